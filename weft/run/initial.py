"""Weights to start from, by a word: `pretrained`, published for a model, or `host`, of the network it was built on.

`host` alone takes timm's weights of the usual host, host:NAME those of another model of timm's, host:FILE a file. The
name of weights that come with the package, such as vt_resnet_nano.weft_cifar10, stands for their folder.
"""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import timm
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session

from weft.errors import WeftError, did_you_mean
from weft.models.weights.convert import load_weights
from weft.models.weights.layouts import StateDict
from weft.models.weights.release import released, released_folder

PRETRAINED, HOST, SCRATCH = "pretrained", "host", "scratch"  # the last: none
MODELS = {PRETRAINED: "cvt_13", HOST: "vt_resnet18"}  # where none was asked for: 80 MB and 47 MB of weights
HOSTS = {
    "vt_resnet18": "resnet18",
    "vt_resnet34": "resnet34",
    "vt_resnet50": "resnet50",
    "vt_resnet101": "resnet101",
    "vt_resnet18_table8": "resnet18",
    "vt_resnet34_table8": "resnet34",
    "ce_swin_tiny": "swin_tiny_patch4_window7_224",
    "ce_swin_small": "swin_small_patch4_window7_224",
    "ce_swin_base": "swin_base_patch4_window7_224",
    "ce_cvt_13": "cvt_13",
}
BOTTLENECKS = ("vt_resnet50", "vt_resnet101")
ANSWER_SECONDS = 5.0  # to wait for the hub
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def is_host(init: str) -> bool:
    return init == HOST or init.startswith(f"{HOST}:")


def model_for(init: str, model: str) -> dict[str, Any]:
    """Settings that these weights ask for: a model that has them, and strides as the host had them."""
    word = HOST if is_host(init) else init
    settings: dict[str, Any] = {}
    if model == "auto" and init in released():
        return {"model.name": init.partition(".")[0]}
    if model == "auto" and word in MODELS:
        model = settings["model.name"] = MODELS[word]
    if is_host(init) and model in BOTTLENECKS and not Path(init.removeprefix(f"{HOST}:")).is_file():
        settings["model.args.bottleneck_stride"] = "3x3"  # timm's; a file has those of the model as it is, or is told
    return settings


def check_init(init: str) -> None:
    """Raises for weights to start from that nobody knows, before anything else is looked at."""
    words = (PRETRAINED, HOST, SCRATCH, *released())
    if init in ("", *words) or is_host(init) or Path(init).exists():
        return
    raise WeftError(
        f"--init {init}: no such file or folder, and none of {', '.join(words)}." + did_you_mean(Path(init).name, words)
    )


def weights_folder(init: str) -> str:
    """The folder of weights that come with the package, where `init` is their name; else `init`."""
    return str(released_folder(init)) if init in released() else init


def host_weights(init: str, model: str) -> StateDict:
    """The weights of a host: from a file, or from timm, which takes them from the cache or from the hub."""
    asked = init.removeprefix(HOST).removeprefix(":")
    if asked and Path(asked).exists():
        return load_weights(asked)
    name = asked or HOSTS.get(model, "")
    if not name:
        raise WeftError(
            f"No weights of a host are known for {model}; name them with --init host:FILE."
            f" --init host alone is for {', '.join(HOSTS)}."
        )
    if not timm.is_model(name.split(".")[0]):
        raise WeftError(f"--init {init}: {name} is neither a file nor a model of timm's.")
    return create_pretrained(name).state_dict()


def create_pretrained(name: str, **args: Any) -> Any:
    """timm's model with its published weights: from the cache where they lie there, without a look at the network."""
    found = cached_weights(name)
    if found:
        args["pretrained_cfg_overlay"] = {"file": str(found)}
    else:
        check_reachable(name)
    try:
        return timm.create_model(name, True, **args)
    except (WeftError, TypeError):
        raise
    except Exception as error:  # whatever a download or a cache raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeftError(f"No pretrained weights of {name} can be had: {reason}") from error


def check_reachable(name: str) -> None:
    """Raises where weights are on the hub, and it does not answer: a download would try again and again, for a minute.

    Those at other addresses may lie in torch's cache, and have no retries.
    """
    cfg: Any = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is None or cfg.file or cfg.state_dict or not cfg.hf_hub_id:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception as error:  # whatever the library has for a network, a proxy, or a wish to stay offline
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        place = urlsplit(constants.ENDPOINT).hostname
        raise WeftError(
            f"No pretrained weights of {name} can be had: {place} does not answer ({reason.rstrip('.')}), and they are"
            " not in the cache. Without a network, name a file or a folder of weights, or leave --init away: small ones"
            " come with Weft."
        ) from None


def cached_weights(name: str) -> Path | None:
    """The file of a model's published weights, where an earlier download has left it."""
    cfg: Any = timm.get_pretrained_cfg(name, allow_unregistered=True)
    hub = getattr(cfg, "hf_hub_id", None)
    if not hub:
        return None
    repository = hub if not hub.endswith("/") else f"{hub}{cfg.architecture}.{cfg.tag}"
    for file in (cfg.hf_hub_filename, *WEIGHT_FILES):
        try:
            path = try_to_load_from_cache(repository, file) if file else None
        except HFValidationError:
            return None
        if isinstance(path, str):
            return Path(path)
    return None
