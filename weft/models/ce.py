"""Convolutional Embedding (CE): what CETNet (arXiv 2207.13317) puts between the stages of a vision transformer.

Paper to code:
    section 3.1               stem, the first CE, and the CE of the later stages     conv_embedding
    section 5.1, table 5      number of layers                                       layers, expand
    section 5.2, table 6      basic unit                                             unit

The paper gives no widths. Those here are solved for from the published parameter counts of the ten networks that have a
CE: the units of stage i run at the width that comes in (the stem: at half of its output), and a 1x1 convolution widens
the map at the end. Every unit but the dense one keeps its width. The activation is not named either; here it is GELU.
All units run on (B, C, H, W) channels-last views; most come from timm.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import BatchNormAct2d, SEModule
from timm.models.densenet import DenseLayer
from timm.models.ghostnet import GhostBottleneck
from timm.models.resnet import Bottleneck
from torch import Tensor, nn

from weft.errors import WeftError, check_choice, check_positive
from weft.models._timm import GELU, ConvBnAct, DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from weft.models.layers import ConvEmbed, MaxPool, PointwiseConv, to_nchw, to_nhwc

CE_UNITS = ("fused", "mbconv", "ghost", "dense", "shuffle", "resnet", "seresnet")
CE_LAYERS = (1, 3, 5, 7)
CE_EXPANSIONS = (1, 2)
STEM_STRIDES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}  # of the two halves of the stem, S0 and the CE of the first stage

# These bring the units to the parameter counts of table 6.
GHOST_EXPANSION = 7
SHUFFLE_EXPANSION, SHUFFLE_GROUPS = 4, 2
DENSE_GROWTH, DENSE_BOTTLENECK = 1 / 8, 2  # growth as a part of the width
RESNET_BASE_WIDTH = 160  # of ResNet's 64 per quarter of the width: a bottleneck of 5/8 of it


class ConvolutionalEmbedding(nn.Module):
    """Convolutional units, a 1x1 convolution to the stage's width, LayerNorm. (B, H, W, C_in) -> (B, h, w, C)."""

    def __init__(self, units: Sequence[nn.Module], proj: nn.Module, dim: int, **dd: Any):
        super().__init__()
        self.units = nn.Sequential(*units)
        self.proj = proj
        self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(to_nhwc(self.units(to_nchw(x)))))


class ShuffleUnit(nn.Module):
    """ShuffleNet's unit: grouped 1x1 convolution, channel shuffle, depth-wise 3x3, grouped 1x1, shortcut."""

    def __init__(self, chs: int, stride: int, **dd: Any):
        super().__init__()
        if chs % SHUFFLE_GROUPS:
            raise WeftError(f"ce_unit='shuffle' needs widths that are multiples of {SHUFFLE_GROUPS}; found {chs!r}.")
        hidden, groups = SHUFFLE_EXPANSION * chs, SHUFFLE_GROUPS
        self.has_skip = stride == 1
        self.layers = nn.Sequential(
            nn.Conv2d(chs, hidden, 1, groups=groups, bias=False, **dd),
            nn.BatchNorm2d(hidden, **dd),
            nn.GELU(),
            nn.ChannelShuffle(groups),
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False, **dd),
            nn.BatchNorm2d(hidden, **dd),
            nn.Conv2d(hidden, chs, 1, groups=groups, bias=False, **dd),
            nn.BatchNorm2d(chs, **dd),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.has_skip else y


class DenseUnit(nn.Module):
    """DenseNet's layer: `growth` new channels beside those that came. At stride 2 the map is max-pooled first."""

    def __init__(self, chs: int, growth: int, stride: int, **dd: Any):
        super().__init__()
        self.pool = MaxPool(stride) if stride > 1 else nn.Identity()
        norm: Any = partial(BatchNormAct2d, act_layer=nn.GELU)
        self.layer = DenseLayer(chs, growth, DENSE_BOTTLENECK, norm_layer=norm, **dd)

    def forward(self, x: Tensor) -> Tensor:
        x = to_nchw(self.pool(to_nhwc(x)))
        return torch.cat([x, self.layer(x)], dim=1)


def mbconv(in_chs: int, out_chs: int, stride: int, expand: int, drop_path: float = 0.0, **dd: Any) -> nn.Module:
    """MBConv; with expansion 1 there is nothing to expand, and it is a depth-wise separable convolution."""
    args: dict[str, Any] = dict(stride=stride, act_layer=nn.GELU, drop_path_rate=drop_path, **dd)
    if expand == 1:
        return DepthwiseSeparableConv(in_chs, out_chs, **args)
    return InvertedResidual(in_chs, out_chs, exp_ratio=expand, **args)


def fused_mbconv(in_chs: int, out_chs: int, stride: int, expand: int, drop_path: float = 0.0, **dd: Any) -> nn.Module:
    """Fused-MBConv; with expansion 1 it is one 3x3 convolution."""
    args: dict[str, Any] = dict(stride=stride, act_layer=nn.GELU, drop_path_rate=drop_path, **dd)
    if expand == 1:
        return ConvBnAct(in_chs, out_chs, 3, skip=True, **args)
    return EdgeResidual(in_chs, out_chs, exp_ratio=expand, **args)


class EverySecond(nn.Module):
    """Every second row and column. Behind it a 1x1 convolution needs no stride, which crashes torch 2.15 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return to_nchw(to_nhwc(x)[:, ::2, ::2].contiguous())


def resnet_unit(chs: int, stride: int, squeeze: bool, **dd: Any) -> nn.Module:
    if chs % 4:
        raise WeftError(f"ce_unit='resnet' and 'seresnet' need widths that are multiples of 4; found {chs!r}.")
    shortcut = None
    if stride > 1:
        conv = nn.Conv2d(chs, chs, 1, bias=False, **dd)
        shortcut = nn.Sequential(EverySecond(), conv, nn.BatchNorm2d(chs, **dd))
    attn: Any = partial(SEModule, rd_ratio=1 / 4) if squeeze else None
    return Bottleneck(
        chs, chs // 4, stride, shortcut, base_width=RESNET_BASE_WIDTH, act_layer=GELU, attn_layer=attn, **dd
    )


def conv_unit(unit: str, chs: int, width: int, stride: int, expand: int, **dd: Any) -> tuple[nn.Module, int]:
    """One basic unit and the channels it puts out. `width` is what the embedding runs at, `chs` what comes in."""
    if unit == "fused":
        return fused_mbconv(chs, chs, stride, expand, **dd), chs
    if unit == "mbconv":
        return mbconv(chs, chs, stride, expand, **dd), chs
    if unit == "ghost":
        return GhostBottleneck(chs, GHOST_EXPANSION * chs, chs, stride=stride, act_layer=GELU, **dd), chs
    if unit == "shuffle":
        return ShuffleUnit(chs, stride, **dd), chs
    if unit == "dense":
        growth = max(int(DENSE_GROWTH * width), 1)
        return DenseUnit(chs, growth, stride, **dd), chs + growth
    return resnet_unit(chs, stride, squeeze=unit == "seresnet", **dd), chs


def check_embedding(unit: str, layers: int, expand: Sequence[int], stem_stride: int) -> None:
    check_choice("stem_stride", stem_stride, STEM_STRIDES)
    check_choice("ce_unit", unit, CE_UNITS)
    check_choice("ce_layers", layers, CE_LAYERS)
    if not isinstance(expand, list | tuple) or not expand:
        raise WeftError(f"ce_expand={expand!r} is not a list of expansions; give one such as (2,) or (2, 1).")
    for value in expand:
        check_choice("ce_expand", value, CE_EXPANSIONS)
    if layers == 1 and unit not in ("fused", "mbconv"):
        raise WeftError(f"ce_layers=1 needs ce_unit='fused' or 'mbconv', the only units that widen; found {unit!r}.")


def conv_embedding(
    stage: int,
    in_chs: int,
    dim: int,
    stem_stride: int = 4,
    unit: str = "fused",
    layers: int = 5,
    expand: Sequence[int] = (2,),
    **dd: Any,
) -> ConvolutionalEmbedding:
    """The CE of `stage`, counted from 0: the stem at `stem_stride`, or a halving of the map.

    "fused" stands for Fused-MBConv in the stem and MBConv behind it. `layers` counts the 1x1 convolution at the end.
    The expansions of the later stages are those of `expand`, over and over; the stem has 1 in its first half, 2 in its
    second. The first layer of the network is a plain 3x3 convolution, whatever the unit.
    """
    check_positive(in_chs=in_chs, dim=dim)
    if stage == 0:
        return _stem(in_chs, dim, stem_stride, unit, layers, **dd)
    unit = "mbconv" if unit == "fused" else unit
    if layers == 1:
        return ConvolutionalEmbedding([mbconv(in_chs, dim, 2, expand[0], **dd)], nn.Identity(), dim, **dd)
    units, chs = [], in_chs
    for i in range(layers - 1):
        module, chs = conv_unit(unit, chs, in_chs, 2 if i == 0 else 1, expand[i % len(expand)], **dd)
        units.append(module)
    return ConvolutionalEmbedding(units, PointwiseConv(chs, dim, **dd), dim, **dd)


def token_embedding(
    kind: str, stage: int, in_chs: int, dim: int, stem_stride: int = 4, **dd: Any
) -> ConvolutionalEmbedding | ConvEmbed:
    """The embedding in front of `stage`: a "ce", or one of the kinds of ConvEmbed."""
    if kind == "ce":
        return conv_embedding(stage, in_chs, dim, stem_stride, **dd)
    return ConvEmbed(kind, in_chs, dim, stem_stride if stage == 0 else 2, stem=stage == 0, **dd)


def _stem(in_chs: int, dim: int, stride: int, unit: str, layers: int, **dd: Any) -> ConvolutionalEmbedding:
    if layers == 1:
        conv = ConvBnAct(in_chs, dim, 7, stride, pad_type=2 if stride == 4 else 3, act_layer=nn.GELU, **dd)
        return ConvolutionalEmbedding([conv], nn.Identity(), dim, **dd)
    width, half = dim // 2, (layers - 1) // 2
    strides = STEM_STRIDES[stride]
    units: list[nn.Module] = [ConvBnAct(in_chs, width, 3, strides[0], act_layer=nn.GELU, **dd)]
    chs = width
    for i in range(1, layers - 1):
        second = i >= half
        module, chs = conv_unit(unit, chs, width, strides[1] if i == half else 1, 2 if second else 1, **dd)
        units.append(module)
    return ConvolutionalEmbedding(units, PointwiseConv(chs, dim, **dd), dim, **dd)
