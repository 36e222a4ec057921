"""UPerNet for semantic segmentation (Xiao et al., arXiv 1807.10221).

Paper to code:
    figure 4    pyramid pooling on the coarsest map (PSPNet, arXiv 1612.01105)    PyramidPooling
    figure 4    a feature pyramid whose levels are fused at stride 4              UPerNet
The widths, and the auxiliary head on the map at stride 16 (FCN), are those of mmsegmentation, by which CETNet's
networks were trained.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import check_positive, check_rates
from weft.heads.fpn import conv_norm, make_predictor, resize

__all__ = ["FCN", "PyramidPooling", "UPerNet"]

BINS = (1, 2, 3, 6)


class PyramidPooling(nn.Module):
    """The map and its means over 1, 2 x 2, 3 x 3 and 6 x 6 parts, fused by a convolution."""

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        self.pooled = nn.ModuleList(conv_norm(in_channels, channels, 1, "batch") for _ in BINS)
        self.fuse = conv_norm(in_channels + len(BINS) * channels, channels, 3, "batch")

    def forward(self, x: Tensor) -> Tensor:
        means = [conv(F.adaptive_avg_pool2d(x, bins)) for bins, conv in zip(BINS, self.pooled, strict=True)]
        return self.fuse(torch.cat([x, *(resize(mean, x) for mean in means)], dim=1))


class UPerNet(nn.Module):
    """Maps at strides 4, 8, 16, 32 -> (B, K, H / 4, W / 4) logits.

    Args:
        in_channels: of the maps. classes: K.
        channels: of all that lies between.
        dropout: part of the channels dropped before the last convolution.
    """

    def __init__(self, in_channels: list[int], classes: int, channels: int = 512, dropout: float = 0.1):
        super().__init__()
        check_positive(classes=classes, channels=channels)
        check_rates(dropout=dropout)
        *fine, coarsest = in_channels
        self.pool = PyramidPooling(coarsest, channels)
        self.laterals = nn.ModuleList(conv_norm(width, channels, 1, "batch") for width in fine)
        self.outputs = nn.ModuleList(conv_norm(channels, channels, 3, "batch") for _ in fine)
        self.fuse = conv_norm(len(in_channels) * channels, channels, 3, "batch")
        self.dropout = nn.Dropout2d(dropout)
        self.predictor = make_predictor(channels, classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        *fine, coarsest = maps
        pooled = self.pool(coarsest)
        levels, x = [pooled], pooled
        for lateral, output, y in reversed(list(zip(self.laterals, self.outputs, fine, strict=True))):
            y = lateral(y)
            x = y + resize(x, y)
            levels.insert(0, output(x))
        fused = self.fuse(torch.cat([resize(level, levels[0]) for level in levels], dim=1))
        return self.predictor(self.dropout(fused))


class FCN(nn.Module):
    """The auxiliary head: one convolution and a prediction from the map at stride 16."""

    def __init__(self, in_channels: int, classes: int, channels: int = 256, dropout: float = 0.1):
        super().__init__()
        check_positive(classes=classes, aux_channels=channels)
        self.conv = conv_norm(in_channels, channels, 3, "batch")
        self.dropout = nn.Dropout2d(dropout)
        self.predictor = make_predictor(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(self.dropout(self.conv(x)))
