"""VT-FPN (Wu et al. 2020, arXiv 2006.03677, section 4.2): tokens carry what the levels of a pyramid tell each other.

The levels are not added up and have no 3x3 convolutions. Each is summed up in 8 tokens, one transformer relates the
32 tokens of all levels, and each level reads its own ones back. The parts are those of weft/models/vt.py.

The authors released no code. The paper's counts say that the laterals stay, that the tokenizers have no value map,
that the projectors' queries have 16 groups, and that a level reads its own tokens alone.
"""

import torch
from torch import Tensor, nn

from weft.errors import WeftError, check_positive, check_rates
from weft.heads.fpn import PyramidHead, SemanticHead, init_linear_conv
from weft.models.layers import image_to_map, to_nchw
from weft.models.vt import FilterTokenizer, Projector, Transformer

__all__ = ["VTFPN", "SemanticVTFPN"]


class VTFPN(nn.Module):
    """Maps at strides 4, 8, 16, 32 -> as many of `channels` channels, each of which knows the tokens of all."""

    def __init__(
        self, in_channels: list[int], channels: int = 256, num_tokens: int = 8, token_dim: int = 1024, groups: int = 16
    ):
        super().__init__()
        if channels % groups:
            raise WeftError(f"channels={channels!r} is not a multiple of {groups}, the groups of VT-FPN's queries.")
        self.num_tokens = num_tokens
        self.laterals = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in in_channels)
        self.tokenizers = nn.ModuleList(
            FilterTokenizer(channels, num_tokens, token_dim, value=False) for _ in in_channels
        )
        self.transformer = Transformer(token_dim, num_heads=16)
        self.projectors = nn.ModuleList(
            Projector(channels, token_dim, channels, channels // groups) for _ in in_channels
        )
        for lateral in self.laterals:
            init_linear_conv(lateral)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        levels = [image_to_map(lateral(x)) for lateral, x in zip(self.laterals, maps, strict=True)]  # (B, H, W, C)
        found = [tokenizer(x) for tokenizer, x in zip(self.tokenizers, levels, strict=True)]  # (B, L, CT) each
        related = self.transformer(torch.cat(found, dim=1)).split(self.num_tokens, dim=1)
        return [
            to_nchw(project(x, tokens)) for project, x, tokens in zip(self.projectors, levels, related, strict=True)
        ]


class SemanticVTFPN(PyramidHead):
    """VT-FPN and the semantic head of the FPN that it is compared with.

    Args:
        num_tokens, token_dim: tokens of a level, and their width.
        norm: "batch" as in the paper, "group" or "none". It and all others are those of SemanticFPN.
    """

    def __init__(
        self,
        in_channels: list[int],
        classes: int,
        channels: int = 256,
        head_channels: int = 128,
        num_tokens: int = 8,
        token_dim: int = 1024,
        norm: str = "batch",
        dropout: float = 0.0,
    ):
        check_positive(classes=classes, channels=channels, head_channels=head_channels, num_tokens=num_tokens)
        check_rates(dropout=dropout)
        pyramid = VTFPN(in_channels, channels, num_tokens, token_dim)
        super().__init__(pyramid, SemanticHead(channels, classes, head_channels, norm, dropout))
