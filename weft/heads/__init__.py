"""Heads: from the maps of a backbone to the classes of pixels, or to objects."""

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from weft.errors import WeftError, did_you_mean

if TYPE_CHECKING:
    from weft.heads.segmenter import Segmenter

__all__ = ["DETECTORS", "SEGMENTERS", "make_segmenter"]

SEGMENTERS = ("fpn", "vt-fpn", "upernet")
DETECTORS = ("faster-rcnn", "mask-rcnn")


def make_segmenter(backbone: nn.Module, head: str, classes: int, **head_args: Any) -> "Segmenter":
    """A network for semantic segmentation.

    Args:
        backbone: any timm model; it is changed. `weft.heads.features.any_size` says how one of a fixed size is made.
        head: "fpn", "vt-fpn" or "upernet".
        classes: K.
        **head_args: arguments of SemanticFPN, SemanticVTFPN or UPerNet; for the last one also `aux_channels`, the width
            of the auxiliary head, 0 for none.
    """
    import torch

    from weft.heads.features import Features
    from weft.heads.fpn import SemanticFPN
    from weft.heads.segmenter import Segmenter
    from weft.heads.upernet import FCN, UPerNet
    from weft.heads.vt_fpn import SemanticVTFPN

    kinds = {"fpn": SemanticFPN, "vt-fpn": SemanticVTFPN, "upernet": UPerNet}
    if head not in kinds:
        known = ", ".join(map(repr, kinds))
        raise WeftError(f"There is no head {head!r} for segmentation; choose from {known}." + did_you_mean(head, kinds))
    own = {"aux_channels": 256} if head == "upernet" else {}
    known = [*inspect.signature(kinds[head]).parameters][2:] + [*own]
    check_args(head, head_args, known)
    aux_channels = {**own, **head_args}.get("aux_channels", 0)
    args = {key: value for key, value in head_args.items() if key not in own}
    features = Features(backbone)
    with torch.device(next(features.parameters()).device):
        made = kinds[head](features.channels, classes, **args)
        aux = FCN(features.channels[2], classes, aux_channels) if aux_channels else None
    return Segmenter(features, made, aux)


def check_args(head: str, args: dict[str, Any], known: list[str]) -> None:
    """Raises for an argument that a head does not have."""
    for name in args:
        if name not in known:
            raise WeftError(
                f"The head {head!r} has no argument {name!r}; it has {', '.join(known)}." + did_you_mean(name, known)
            )
