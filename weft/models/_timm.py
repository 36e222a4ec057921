"""Every name that timm keeps private and Weft needs, in one place, so that a new timm breaks one file."""

from timm.layers.activations import GELU  # takes an `inplace` that means nothing, as timm's blocks give one
from timm.models._efficientnet_blocks import ConvBnAct, DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from timm.models._features import feature_take_indices
from timm.models._hub import save_config_for_hf
from timm.models.resnet import make_blocks

__all__ = [
    "GELU",
    "ConvBnAct",
    "DepthwiseSeparableConv",
    "EdgeResidual",
    "InvertedResidual",
    "feature_take_indices",
    "make_blocks",
    "save_config_for_hf",
]
