"""A model as a folder: `model.safetensors` and `config.json`, in the layout that timm opens as "local-dir:FOLDER"."""

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from weft.documents import read_json
from weft.errors import WeftError, check_model_folder, check_writable
from weft.files import is_run, write_atomic, write_tensors
from weft.models._timm import save_config_for_hf
from weft.models.base import HybridModel
from weft.models.weights.convert import load_weights
from weft.models.weights.former import former_args
from weft.version import __version__

CARD = """---
tags: [image-classification, timm, weft]
library_name: timm
---
# {name}, trained with Weft

```python
import timm, weft

model = timm.create_model("hf-hub:{repo_id}", pretrained=True)
```
"""


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    label_names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes `model` into a new or empty `folder`, with the names of its classes where they are given.

    With `overwrite`, a model that lies there is replaced, unless it is that of a run; other files stay.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it once Weft is imported. The configuration is
    written last, and each file under a temporary name first, so a folder with a `config.json` is complete.
    """
    folder = Path(folder)
    hybrid = _check_savable(model)
    if not overwrite or (folder.exists() and not folder.is_dir()):
        check_writable(folder)
    elif is_run(folder):
        raise WeftError(f"{folder} is a run, whose report and state belong to its own model; choose another place.")
    elif (folder / "config.json").exists():
        read_model_config(folder)  # raises where it is not that of a model
    folder.mkdir(parents=True, exist_ok=True)
    size = hybrid.model_args.get("img_size", hybrid.pretrained_cfg["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    cfg = {"input_size": (hybrid.in_chans, height, width)}
    _write(hybrid, folder, hybrid.state_dict(), cfg, _arguments(hybrid), label_names, {})
    return folder


def push_model(
    model: nn.Module,
    repo_id: str,
    label_names: Sequence[str] | None = None,
    *,
    commit_message: str = "Add model",
    token: str | None = None,
    revision: str | None = None,
    private: bool = False,
    create_pr: bool = False,
) -> str:
    """Uploads what `save_model` writes to a repository of the Hugging Face Hub, which is made; returns its address.

    A repository without a README gets one that says how to open the model.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="weft", library_version=__version__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_model(model, Path(temporary) / "model", label_names)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if not api.file_exists(repo_id, "README.md", revision=revision):
            name = read_model_config(folder)["architecture"]
            (folder / "README.md").write_text(CARD.format(name=name, repo_id=repo_id), encoding="utf-8")
        options: Any = dict(commit_message=commit_message, revision=revision, create_pr=create_pr)
        api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
    return f"https://huggingface.co/{repo_id}"


def fetch_model(repo_id: str) -> Path:
    """The folder of a model on the Hugging Face Hub, from where it was kept last or from there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=["config.json", "model.safetensors"]))
    except (OSError, ValueError) as error:  # no such repository, no network; no name of one
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeftError(f"hub:{repo_id} cannot be fetched: {why}") from None


def write_model(
    model: nn.Module,
    folder: Path,
    *,
    classes: Sequence[str],
    preprocessing: dict[str, Any],
    multilabel: bool,
    settings: Mapping[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes or rewrites the model of a run, with all that is needed to use it, into its `folder`, which exists.

    Args:
        model: what timm.create_model made: not compiled, not wrapped.
        folder: of the run.
        classes: names, in the order of the model's outputs.
        preprocessing: `Preprocessing.to_dict()`. timm's data configuration of the opened model says the same.
        multilabel: whether a picture may have several classes.
        settings: of how it is used, where they are not the usual ones.
        args: what timm.create_model was given. A model of Weft knows its own.
        weights: what to write instead of the model's own state, such as one gathered from many processes.
    """
    keys = ("mean", "std", "crop_pct", "interpolation", "crop_mode")
    cfg = {"input_size": (preprocessing["channels"], *preprocessing["size"]), **{k: preprocessing[k] for k in keys}}
    common = {"num_classes": len(classes), "in_chans": preprocessing["channels"]}
    arguments = _arguments(model) if isinstance(model, HybridModel) else {**(args or {}), **common}
    entry = {"preprocessing": preprocessing, "multilabel": multilabel, "version": __version__}
    entry |= {"settings": dict(settings)} if settings else {}
    _write(model, folder, weights or model.state_dict(), cfg, arguments, classes, {"weft": entry})


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of config.json in the folder of a model, which must be complete."""
    check_model_folder(folder)
    try:
        config = read_json(folder / "config.json")
        names, count, _ = list(config.get("label_names") or ()), int(config["num_classes"]), config["architecture"]
        config.get("weft", {}).get("head")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeftError(f"{folder}/config.json is damaged; expected timm's layout.") from None
    if names and len(names) != count:
        raise WeftError(f"{folder}/config.json has {len(names)} label_names for {count} classes.")
    return config


def open_classifier(folder: Path, config: dict[str, Any]) -> nn.Module:
    """The model that timm makes of `config`, the content of the folder's config.json, with all of its weights."""
    if not timm.is_model(config["architecture"]):
        raise WeftError(f"{folder}/config.json: there is no model {config['architecture']!r}.")
    try:
        former = former_args(config["architecture"], config.get("model_args") or {}, folder / "model.safetensors")
        model = timm.create_model(f"local-dir:{folder}", pretrained=False, **former)
    except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeftError(f"{folder}/config.json cannot be built: {why}") from None
    load_saved(model, folder, f"{config['architecture']}, {config['num_classes']} classes")
    return model


def load_saved(model: nn.Module, folder: Path, made: str) -> None:
    """Loads the weights of a folder, every one of which must be there and fit the model that config.json `made`."""
    weights, own = load_weights(folder / "model.safetensors"), model.state_dict()
    shapes = [{key: tuple(value.shape) for key, value in tensors.items()} for tensors in (own, weights)]
    odd = sorted(key for key in {*own, *weights} if shapes[0].get(key) != shapes[1].get(key))
    if odd:
        expected, found = (each.get(odd[0], "none") for each in shapes)
        raise WeftError(
            f"{folder}/model.safetensors does not fit config.json ({made}): {len(odd)} tensors differ, such as"
            f" {odd[0]}: expected {expected}, found {found}."
        )
    model.load_state_dict(weights)


def _check_savable(model: nn.Module) -> HybridModel:
    """Raises unless timm can build `model` again from its name and arguments."""
    if not isinstance(model, HybridModel) or not hasattr(model, "model_args"):
        raise WeftError(
            f"{type(model).__name__} cannot be saved; expected what weft.create_model or timm.create_model made."
        )
    if getattr(model, "fused", False):  # `weft.fuse` says so
        raise WeftError("A fused copy cannot be saved; save the model it was made from and fuse again after loading.")
    rebuilt = timm.create_model(model.pretrained_cfg["architecture"], device="meta", **_arguments(model))
    if rebuilt.state_dict().keys() != model.state_dict().keys():
        raise WeftError("A model that has lost layers cannot be saved; save it before prune_intermediate_layers.")
    return model


def _arguments(model: HybridModel) -> dict[str, Any]:
    args = {**model.model_args, "global_pool": model.global_pool}
    return {**args, "num_classes": model.num_classes, "in_chans": model.in_chans}


def _write(
    model: Any,
    folder: Path,
    weights: Mapping[str, Tensor],
    cfg: dict[str, Any],
    arguments: dict[str, Any],
    classes: Sequence[str] | None,
    entries: dict[str, Any],
) -> None:
    """Both files, the configuration last. `cfg` goes over the model's own pretrained_cfg, `entries` beside it."""
    if classes is not None and len(classes) != model.num_classes:
        raise WeftError(f"label_names has {len(classes)} names; the model has {model.num_classes} classes.")
    # The pretrained weights' own: a second size for tests, and classes that are no longer there
    obsolete = ("test_input_size", "test_crop_pct", "label_offset", "label_names", "label_descriptions")
    shell = copy.copy(model)  # the same parameters under another configuration
    shell.pretrained_cfg = {k: v for k, v in dict(model.pretrained_cfg).items() if k not in obsolete}
    shell.pretrained_cfg.update(cfg, num_classes=model.num_classes)
    if cfg["input_size"][0] != 3:
        shell.pretrained_cfg["first_conv"] = None  # else timm adapts the weights from 3 channels, which they lack
    if classes:
        entries = {"label_names": list(classes), **entries}
    tensors = {key: value.contiguous() for key, value in weights.items()}
    write_tensors(folder / "model.safetensors", tensors)
    write_atomic(
        folder / "config.json",
        lambda path: save_config_for_hf(shell, path, entries, arguments),  # type: ignore[arg-type]  it wants a Path
    )
