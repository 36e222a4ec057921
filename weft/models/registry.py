"""Weft's models by name: timm's functions, narrowed to our families and kinder to typing mistakes."""

from fnmatch import fnmatch
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.errors import WeftError, did_you_mean
from weft.models import ce_hosts, ceit, cetnet, cvt, vitae, vt_resnet
from weft.models.baselines import cswin, pvt, resnet_v1, t2t_vit

FAMILIES = {  # by the name of the file, under which timm knows them
    "ceit": ceit,
    "vitae": vitae,
    "vt_resnet": vt_resnet,
    "cvt": cvt,
    "cetnet": cetnet,
    "ce_hosts": ce_hosts,
    "t2t_vit": t2t_vit,
    "pvt": pvt,
    "cswin": cswin,
    "resnet_v1": resnet_v1,
}
DRAWING = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.erfinv_, torch.Tensor.clamp_)


def list_models(filter: str = "") -> list[str]:
    """Names of Weft's models, sorted. `filter` is a pattern such as "cvt*", or part of a name."""
    names = sorted(name for family in FAMILIES for name in timm.list_models(module=family))
    pattern = filter if "*" in filter else f"*{filter}*"
    return [name for name in names if fnmatch(name, pattern)]


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Creates a model: `timm.create_model` for Weft's names, with or without a tag, and for model folders.

    Args:
        name: such as "cvt_13" or "cvt_13.msft_in1k_384"; or "local-dir:FOLDER" for what `save_model` wrote.
        pretrained: load the weights that the name stands for.
        **kwargs: whatever timm takes (`num_classes`, `in_chans`, `features_only`, ...) and whatever the family takes;
            `help(weft.models.cvt.CvT)` lists the switches.
    """
    bare = name.split(".")[0]
    if ":" not in name and bare not in list_models():
        raise WeftError(f"There is no model {name!r}; `weft models` lists them." + did_you_mean(bare, list_models()))
    return timm.create_model(name, pretrained=pretrained, **kwargs)


def check_name(name: str) -> None:
    bare = name.split(".")[0]
    if not timm.is_model(bare):
        known = timm.list_models()
        raise WeftError(f"There is no model {name!r}; `weft models` lists Weft's own." + did_you_mean(bare, known))


def takes(name: str, argument: str) -> bool:
    """Whether a model takes an argument, found out without making its weights."""
    value: Any = {"img_size": 224, "stem_stride": 1, "proj_drop_rate": 0.0}[argument]
    try:
        with _WithoutValues():
            timm.create_model(name, device="meta", **{argument: value})
    except TypeError:
        return False
    return True


class _WithoutValues(TorchFunctionMode):
    """Leaves out steps of drawing weights for which torch, where there are no values, asks sympy, slow to import."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in DRAWING else func(*args, **(kwargs or {}))


def takes_size(name: str) -> bool:
    return takes(name, "img_size")
