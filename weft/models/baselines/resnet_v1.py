"""ResNet as it was first published (He et al. 2015, arXiv 1512.03385): stages begin with a 1x1 convolution of stride 2.

timm and torchvision have the stride in the 3x3 convolution behind it, which costs more and reaches more. Weights of one
network fit the other and are wrong there: those of the first release, of Keras, and Detectron2's "MSRA" belong here.
VT-FPN was built on this network.
"""

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from weft.models.variants import register_variants, weights_cfg

__all__ = ["ResNetV1"]


class BottleneckV1(Bottleneck):
    """timm's block with the stride in its first convolution."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conv1.stride, self.conv2.stride = self.conv2.stride, self.conv1.stride


class ResNetV1(ResNet):
    """timm's ResNet, whose arguments it takes."""


VARIANTS = {"resnet50_v1": (3, 4, 6, 3), "resnet101_v1": (3, 4, 23, 3)}  # blocks of the four stages

_cfg = partial(
    weights_cfg,
    first_conv="conv1",
    paper_ids="arXiv:1512.03385",
    paper_name="Deep Residual Learning for Image Recognition",
    interpolation="bilinear",
    classifier="fc",
)

default_cfgs = generate_default_cfgs({"resnet50_v1.in1k": _cfg(), "resnet101_v1.in1k": _cfg()})

# ImageNet-1k top-1 in percent, of the released weights, from one crop; the paper has ten crops.
PUBLISHED_TOP1 = {"resnet50_v1.in1k": 75.3, "resnet101_v1.in1k": 76.4}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    return build_model_with_cfg(ResNetV1, variant, pretrained, block=BottleneckV1, layers=VARIANTS[variant], **kwargs)


register_variants(
    _create,
    {
        "resnet50_v1": "ResNet-50 of the paper, 25.6 M parameters.",
        "resnet101_v1": "ResNet-101 of the paper, 44.5 M parameters.",
    },
)
