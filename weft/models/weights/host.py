"""Weights of the networks that a hybrid was built on: ResNet in VT-ResNet, and the hosts of CETNet's embedding."""

import os
import re
from collections.abc import Mapping
from typing import Any

from timm.models import adapt_input_conv
from torch import nn

from weft.errors import WeftError, check_choice
from weft.models.base import HybridModel
from weft.models.baselines.cswin import CSWin
from weft.models.baselines.pvt import PVT
from weft.models.ce import ConvolutionalEmbedding
from weft.models.ce_hosts import CESwin
from weft.models.cvt import CvT
from weft.models.hierarchy import HierarchicalModel
from weft.models.vt_resnet import BOTTLENECK_STRIDES, VTResNet
from weft.models.weights.convert import read_state
from weft.models.weights.layouts import StateDict, filter_published, rename

SWIN = [  # timm's names and the authors'
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
    (r"^head\.fc\.", "head."),
]
RESNET = [(r"^(conv1|bn1|layer[123])\.", r"resnet.\1.")]
IN_HOST = {  # tensors of a host that the hybrid lacks: embeddings, the last stage, computed buffers
    CESwin: r"^patch_embed\.|\.downsample\.|relative_position_index$|\.attn_mask$",
    VTResNet: r"^(layer4|fc)\.",
}
IN_HYBRID = r"^stages\.\d+\.embed\.|^head\."  # of the hosts with CE
IN_VT = r"^(?!resnet\.)"
LEFT = rf"{IN_HYBRID}|^norm\.|^stages\.\d+\.(?:cls_token|pos_embed)"  # absent with `features_only`
SURPLUS_BLOCKS = 2  # that a stage of a host has more, at most


def load_host(
    model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Any], bottleneck_stride: str = "3x3"
) -> list[str]:
    """Puts the weights of the network that a hybrid was built on into it.

    VT-ResNet takes a ResNet of torchvision or timm; the networks with CETNet's embedding take a Swin of timm or of its
    authors, a CSWin, a PVT or a CvT in any layout that `weft.convert` reads, or of Weft. The hybrids have up to two
    blocks fewer in a stage; the host's last ones are left out. The classifier is taken where it fits.

    Args:
        model: such as `weft.create_model("vt_resnet18")` or `weft.create_model("ce_swin_tiny")`, with or without
            `features_only`.
        source: a checkpoint file or a state dict.
        bottleneck_stride: for ResNets with bottlenecks, which convolution had the stride when the weights were trained;
            they do not tell it themselves. "3x3" in torchvision and timm, "1x1" in the original ResNets. The model must
            have been made with the same value.

    Returns:
        The names of the parameters that stayed as they were: embeddings, or VT modules, and the head if it did not fit.

    Raises:
        WeftError: the file cannot be read safely, or holds another network.
    """
    check_choice("bottleneck_stride", bottleneck_stride, BOTTLENECK_STRIDES)
    if not isinstance(model, HybridModel) and isinstance(getattr(model, "model", None), HybridModel):
        model = model.model  # pyright: ignore[reportAssignmentType]  of `features_only`
    if isinstance(model, VTResNet) and model.bottleneck_stride not in ("", bottleneck_stride):
        raise WeftError(
            f"The weights have bottleneck_stride={bottleneck_stride!r}, the model was made with"
            f" {model.bottleneck_stride!r}; make it with {bottleneck_stride!r} or, if the weights do have their stride"
            f" there, call load_host(..., bottleneck_stride={model.bottleneck_stride!r})."
        )
    state, where = read_state(source)
    host = _host_part(model, state)
    expected = model.state_dict()
    own = re.compile(IN_VT if isinstance(model, VTResNet) else IN_HYBRID)
    taken: StateDict = {}
    for key, value in expected.items():
        found = host.get(key)
        if found is not None and found.shape == value.shape:
            taken[key] = found
        elif not own.match(key):
            what = "which is missing" if found is None else f"found {tuple(found.shape)}"
            raise WeftError(f"{where} is not a host of this model: expected {key} {tuple(value.shape)}, {what}.")
    strange = next((key for key in host if key not in taken and not _may_be_left(model, key)), None)
    if strange is not None:
        raise WeftError(f"{where} is not a host of this model: found {strange}, which has no place in it.")
    model.load_state_dict(taken, strict=False)
    return [key for key in expected if key not in taken]


def _host_part(model: nn.Module, state: StateDict) -> StateDict:
    """The weights of a host under the hybrid's names, positions resized to fit."""
    if isinstance(model, VTResNet):
        state = rename(RESNET)(state)
        first = state.get("resnet.conv1.weight")
        if first is not None and first.ndim == 4 and first.shape[1] == 3:
            state["resnet.conv1.weight"] = adapt_input_conv(model.in_chans, first.float())
        return state
    if isinstance(model, CESwin):
        state = rename(SWIN)(state)
    elif not (isinstance(model, CvT | PVT | CSWin) and isinstance(model.stages[0].embed, ConvolutionalEmbedding)):
        raise WeftError(f"{type(model).__name__} has no host; load_host is for vt_resnet* and ce_* models.")
    return filter_published(state, model)


def _may_be_left(model: nn.Module, key: str) -> bool:
    in_host = IN_HOST.get(type(model))
    if in_host and re.search(in_host, key):
        return True
    block = re.match(r"^stages\.(\d+)\.blocks\.(\d+)\.", key)
    if block and isinstance(model, HierarchicalModel):
        stage, number = int(block[1]), int(block[2])
        if stage >= len(model.stages):  # pruned away
            return True
        blocks: Any = model.stages[stage].blocks
        return len(blocks) <= number < len(blocks) + SURPLUS_BLOCKS
    return bool(re.match(LEFT, key))
