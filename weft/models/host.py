"""Weights of the ordinary networks that a hybrid is built on."""

import os
from collections.abc import Mapping
from typing import Any

from timm.models import adapt_input_conv

from weft.errors import WeftError
from weft.models.convert import StateDict, _first_difference, _unwrap, load_weights
from weft.models.vt_resnet import VTResNet

RESNET_KEPT = ("conv1.", "bn1.", "layer1.", "layer2.", "layer3.")
RESNET_LEFT = ("layer4.", "fc.")  # what the VT modules and their head replace


def load_resnet(model: VTResNet, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
    """Puts the weights of a ResNet into the trunk of a VT-ResNet; VT modules and head stay as they are.

    Args:
        model: such as `weft.create_model("vt_resnet50", bottleneck_stride="3x3")`. The weights do not tell which
            convolution of a bottleneck had the stride when they were trained: "3x3" in torchvision's and timm's
            ResNet-50 and -101, "1x1" in the original ones of He et al. With the wrong one they fit, but see
            shifted pixels.
        source: state dict, or a file of one, of torchvision's or timm's ResNet of the same depth. Stored in half
            precision it is converted; a first convolution for three channels is adapted to `in_chans`.

    Raises:
        WeftError: the file cannot be read safely, or holds something else than such a ResNet.
    """
    is_path = isinstance(source, str | os.PathLike)
    where = os.fspath(source) if is_path else "the state dict"
    state = resnet_trunk(load_weights(source) if is_path else _unwrap(source, where), where)
    first = state.get("conv1.weight")
    if first is not None and first.ndim == 4 and first.shape[1] == 3:
        state["conv1.weight"] = adapt_input_conv(model.in_chans, first)
    difference = _first_difference(model.resnet.state_dict(), state)
    if difference:
        raise WeftError(f"{where} does not fit the ResNet of this model: {difference}.")
    model.resnet.load_state_dict(state)


def resnet_trunk(state: StateDict, where: str) -> StateDict:
    """Of a torchvision or timm ResNet the part that VTResNet keeps, under the names that its trunk has."""
    strange = next((key for key in state if not key.startswith((*RESNET_KEPT, *RESNET_LEFT))), None)
    if strange is not None:
        raise WeftError(f"{where} is no ResNet of torchvision or timm: found {strange}.")
    return {key: value for key, value in state.items() if key.startswith(RESNET_KEPT)}
