"""Weights of the networks that a hybrid was built on: ResNet in VT-ResNet, and the hosts of CETNet's embedding."""

import os
import re
from collections.abc import Mapping
from typing import Any

from timm.models import adapt_input_conv

from weft.errors import WeftError
from weft.models.base import HybridModel
from weft.models.ce import ConvolutionalEmbedding
from weft.models.ce_hosts import CESwin
from weft.models.convert import read_state
from weft.models.cswin import CSWin
from weft.models.cvt import CvT
from weft.models.layouts import StateDict, filter_published, rename
from weft.models.pvt import PVT
from weft.models.vt_resnet import VTResNet

SWIN = [  # timm's names and the authors'
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
    (r"^head\.fc\.", "head."),
]
RESNET = [(r"^(conv1|bn1|layer[123])\.", r"resnet.\1.")]
IN_HOST = {  # what a host has and the hybrid has not: its embeddings, its last stage, what is computed
    CESwin: r"^patch_embed\.|\.downsample\.|relative_position_index$|\.attn_mask$",
    VTResNet: r"^(layer4|fc)\.",
}
IN_HYBRID = r"^stages\.\d+\.embed\.|^head\."  # of the hosts with CE
IN_VT = r"^(?!resnet\.)"


def load_host(model: HybridModel, source: str | os.PathLike[str] | Mapping[str, Any]) -> list[str]:
    """Puts the weights of the network that a hybrid was built on into it.

    VT-ResNet takes a ResNet of torchvision or timm; the networks with CETNet's embedding take a Swin of timm or of its
    authors, a CSWin, a PVT or a CvT in any layout that `weft.convert` reads, or of Weft. Blocks that the hybrid has
    fewer of are left out at the end of their stage. The classifier is taken where it fits.

    Args:
        model: such as `weft.create_model("vt_resnet50")` or `weft.create_model("ce_swin_tiny")`. VT-ResNets with
            bottlenecks: the weights do not tell which convolution had the stride when they were trained. It was the
            3x3 one in torchvision and timm (`bottleneck_stride="3x3"`), the first 1x1 one in the original ResNets.
        source: a checkpoint file or a state dict.

    Returns:
        The names of the parameters that stayed as they were: embeddings, or VT modules, and the head if it did not fit.

    Raises:
        WeftError: the file cannot be read safely, or holds another network.
    """
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
            raise WeftError(f"{where} is no host for this model: expected {key} {tuple(value.shape)}, {what}.")
    strange = next((key for key in host if key not in taken and not _may_be_left(model, key)), None)
    if strange is not None:
        raise WeftError(f"{where} is no host for this model: found {strange}, which has no place in it.")
    model.load_state_dict(taken, strict=False)
    return [key for key in expected if key not in taken]


def _host_part(model: HybridModel, state: StateDict) -> StateDict:
    """The weights of a host under the hybrid's names, positions resized to fit."""
    if isinstance(model, VTResNet):
        state = rename(RESNET)(state)
        first = state.get("resnet.conv1.weight")
        if first is not None and first.ndim == 4 and first.shape[1] == 3:
            state["resnet.conv1.weight"] = adapt_input_conv(model.in_chans, first)
        return state
    if isinstance(model, CESwin):
        state = rename(SWIN)(state)
    elif not (isinstance(model, CvT | PVT | CSWin) and isinstance(model.stages[0].embed, ConvolutionalEmbedding)):
        raise WeftError(f"{type(model).__name__} has no host; load_host is for vt_resnet* and ce_* models.")
    return filter_published(state, model)


def _may_be_left(model: HybridModel, key: str) -> bool:
    in_host = IN_HOST.get(type(model))
    if in_host and re.search(in_host, key):
        return True
    block = re.match(r"^stages\.(\d+)\.blocks\.(\d+)\.", key)
    if block and not isinstance(model, VTResNet):
        stages: Any = model.stages
        return int(block[2]) >= len(stages[int(block[1])].blocks)
    return bool(re.match(IN_HYBRID, key))
