"""Semantic segmentation by a feature pyramid: the semantic half of Panoptic FPN (Kirillov et al., arXiv 1901.02446).

    figure 2, left     lateral and output convolutions, coarse levels added to fine ones    FPN
    section 3.1        each level upsampled to stride 4 by convolutions, summed             SemanticHead

Widths, strides and biases are those of Detectron2, with which VT compares itself. A level is resized to the next finer
one, whatever the size of that is: pictures need not be multiples of 32.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import check_choice, check_positive, check_rates

__all__ = ["FPN", "PyramidHead", "SemanticFPN", "SemanticHead"]

NORMS = ("batch", "group", "none")


class FPN(nn.Module):
    """Maps at strides 4, 8, 16, 32 -> as many of `channels` channels, each of which knows the coarser ones."""

    def __init__(self, in_channels: list[int], channels: int = 256):
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in in_channels)
        self.outputs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in in_channels)
        for conv in (*self.laterals, *self.outputs):
            init_linear_conv(conv)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        sums = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=True)]
        for i in range(len(sums) - 2, -1, -1):  # from coarse to fine
            sums[i] = sums[i] + F.interpolate(sums[i + 1], size=sums[i].shape[2:], mode="nearest")
        return [output(x) for output, x in zip(self.outputs, sums, strict=True)]


class SemanticHead(nn.Module):
    """A pyramid -> (B, K, H / 4, W / 4) logits. The levels take 1, 1, 2 and 3 convolutions on their way to stride 4."""

    def __init__(self, in_channels: int, classes: int, channels: int = 128, norm: str = "group", dropout: float = 0.0):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.ModuleList(
                conv_norm(in_channels if i == 0 else channels, channels, 3, norm) for i in range(max(1, level))
            )
            for level in range(4)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.predictor = make_predictor(channels, classes)

    def forward(self, pyramid: list[Tensor]) -> Tensor:
        total = self.branches[0][0](pyramid[0])  # pyright: ignore[reportIndexIssue]
        for level, branch in enumerate(self.branches[1:], start=1):
            x = pyramid[level]
            for conv, finer in zip(branch, reversed(pyramid[:level]), strict=True):  # pyright: ignore[reportArgumentType]
                x = resize(conv(x), finer)
            total = total + x
        return self.predictor(self.dropout(total))


class PyramidHead(nn.Module):
    """A pyramid and the semantic head on it: maps at strides 4, 8, 16, 32 -> (B, K, H / 4, W / 4) logits."""

    def __init__(self, pyramid: nn.Module, head: SemanticHead):
        super().__init__()
        self.pyramid = pyramid
        self.head = head

    def forward(self, maps: list[Tensor]) -> Tensor:
        return self.head(self.pyramid(maps))


class SemanticFPN(PyramidHead):
    """An FPN and the semantic head on it.

    Args:
        in_channels: of the maps at strides 4, 8, 16, 32. classes: K.
        channels: of the pyramid. head_channels: of the semantic head.
        norm: behind the convolutions of the semantic head, "group" as in Detectron2, "batch" or "none".
        dropout: part of the channels dropped before the last convolution.
    """

    def __init__(
        self,
        in_channels: list[int],
        classes: int,
        channels: int = 256,
        head_channels: int = 128,
        norm: str = "group",
        dropout: float = 0.0,
    ):
        check_positive(classes=classes, channels=channels, head_channels=head_channels)
        check_rates(dropout=dropout)
        super().__init__(FPN(in_channels, channels), SemanticHead(channels, classes, head_channels, norm, dropout))


# Shared by the heads --------------------------------------------------------------------------------------------


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear resize to the height and width of another map."""
    return x if x.shape[2:] == like.shape[2:] else F.interpolate(x, size=like.shape[2:], mode="bilinear")


def conv_norm(in_channels: int, channels: int, kernel_size: int, norm: str) -> nn.Sequential:
    """Convolution, norm, ReLU."""
    check_choice("norm", norm, NORMS)
    conv = nn.Conv2d(in_channels, channels, kernel_size, padding=kernel_size // 2, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    norms = dict(batch=LoneBatchNorm, group=group_norm, none=nn.Identity)
    return nn.Sequential(conv, norms[norm](channels), nn.ReLU(inplace=True))


def group_norm(channels: int) -> nn.GroupNorm:
    """32 groups, or as many as can be."""
    return LoneGroupNorm(math.gcd(32, channels), channels)


class LoneGroupNorm(nn.GroupNorm):
    """GroupNorm that makes no difference between one picture and several: torch's refuses a lone value per group.

    A narrow head has such groups at the coarsest level of a picture of up to 32 pixels; what is left of them is 0.
    """

    def forward(self, input: Tensor) -> Tensor:
        return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LoneBatchNorm(nn.BatchNorm2d):
    """BatchNorm that takes its running statistics where there is one value per channel, which has no variance.

    The mean of a lone picture is such a case: without it, no micro-batch could be of one picture.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() > input.shape[1]:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def make_predictor(channels: int, classes: int) -> nn.Conv2d:
    """Logits of each pixel, all near 0 at first."""
    conv: Any = nn.Conv2d(channels, classes, 1)
    nn.init.normal_(conv.weight, std=0.01)
    nn.init.zeros_(conv.bias)
    return conv


def init_linear_conv(conv: Any) -> None:
    """Gain 1, for a convolution that no ReLU follows."""
    nn.init.kaiming_uniform_(conv.weight, a=1)
    nn.init.zeros_(conv.bias)
