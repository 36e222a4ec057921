"""ResNet as it was first published (He et al. 2015, arXiv 1512.03385): stages begin with a 1x1 convolution of stride 2.

timm and torchvision have the stride in the 3x3 convolution behind it, which costs more and reaches more. Weights of one
network fit the other and are wrong there: those of the first release, of Keras, and Detectron2's "MSRA" belong here.
VT-FPN was built on this network.
"""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

__all__ = ["ResNetV1"]


class BottleneckV1(Bottleneck):
    """timm's block with the stride in its first convolution."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conv1.stride, self.conv2.stride = self.conv2.stride, self.conv1.stride


class ResNetV1(ResNet):
    """timm's ResNet, whose arguments it takes."""


def _cfg() -> dict[str, Any]:
    return dict(
        input_size=(3, 224, 224),
        pool_size=(7, 7),
        crop_pct=0.875,
        interpolation="bilinear",
        first_conv="conv1",
        classifier="fc",
        license="apache-2.0",
        paper_ids="arXiv:1512.03385",
        paper_name="Deep Residual Learning for Image Recognition",
    )


default_cfgs = generate_default_cfgs({"resnet50_v1.in1k": _cfg(), "resnet101_v1.in1k": _cfg()})

# ImageNet-1k top-1 in percent, of the released weights, from one crop; the paper has ten crops.
PUBLISHED_TOP1 = {"resnet50_v1.in1k": 75.3, "resnet101_v1.in1k": 76.4}


@register_model
def resnet50_v1(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-50 of the paper, 25.6 M parameters."""
    return _create("resnet50_v1", pretrained, (3, 4, 6, 3), kwargs)


@register_model
def resnet101_v1(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-101 of the paper, 44.5 M parameters."""
    return _create("resnet101_v1", pretrained, (3, 4, 23, 3), kwargs)


def _create(variant: str, pretrained: bool, layers: tuple[int, ...], kwargs: dict[str, Any]) -> nn.Module:
    return build_model_with_cfg(ResNetV1, variant, pretrained, block=BottleneckV1, layers=layers, **kwargs)
