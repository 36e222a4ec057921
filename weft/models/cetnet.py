"""CETNet: Convolutional Embedding Makes Hierarchical Vision Transformer Stronger (Wang et al., ECCV 2022, 2207.13317).

Paper to code:
    section 3.1, figure 3     Convolutional Embedding (CE), stem                ce.conv_embedding
    section 3.2, eqs. 1-6     Locally Enhanced Window attention (LEWin)         LEWinAttention, LEWinBlock
    section 3.3               CETNet-T, CETNet-S, CETNet-B                      VARIANTS
    table 4                   without LEWin, shallow-wide, other embeddings     le, embed_dim and depths, embed
    tables 5 and 6            layers and basic unit of the CE                   ce_layers, ce_expand, ce_unit
    table 8                   where convolutions and where transformers are     pattern

No code was ever published and the paper's supplement is not public. What the text leaves open is solved for from its
parameter counts, which all variants meet:
    - depths of CETNet-S and -B are 4, 4, 30, 2;
    - q, k and v have a depth-wise convolution each, as in CvT (`le="qkv"`). Equations 1 and 4 have one convolution in
      front of the norm, and the residual starts behind it (`le="pre"`); 0.13 M parameters fewer than counted;
    - the convolution sees the whole map, not the window;
    - drop path rates and initialisation are Swin's.
The paper counts MACs without the attention products. Windows that do not fit are padded, and nothing attends to the
padding. In a map that one window covers, windows are not shifted, as in Swin. `pattern` and the basic units of table 6
are Weft's constructions: the paper names the rows, not how they are built.
`cetnet_nano` is Weft's own, for pictures of 28 to 96 pixels.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import RelPosBias, calculate_drop_path_rates
from timm.models import generate_default_cfgs
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from weft.errors import WeftError, check_choice, check_positive, check_rates, check_ratio
from weft.models.ce import check_embedding, conv_embedding, fused_mbconv, mbconv, token_embedding
from weft.models.hierarchy import HierarchicalModel, MapBlock, MapStage, check_stages, doubled_widths
from weft.models.layers import ConvNorm, PointwiseConv, grid_size, pad_to_multiple, to_nchw, to_nhwc
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv
from weft.models.windows import WindowMask, windowed_attention

__all__ = ["CETNet"]

LOCAL_ENHANCEMENTS = ("qkv", "pre", "none")
EMBEDDINGS = ("ce", "conv", "patch")
PATTERN = "C-T-C-T-C-T-C-T"
EMBED_BLOCKS = 2  # LEWin blocks of a T in the place of an embedding


class LEWinAttention(nn.Module):
    """Window attention whose q, k and v come, with `le="qkv"`, from depth-wise convolutions of the map.

    `grid` is the size of the maps for which its mask is made; it takes others as well.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        shifted: bool,
        le: str,
        attn_drop: float,
        proj_drop: float,
        grid: tuple[int, int] = (0, 0),
        **dd: Any,
    ):
        super().__init__()
        self.num_heads, self.window, self.shifted, self.attn_drop = num_heads, window, shifted, attn_drop
        self.has_convs = le == "qkv"
        self.conv_q = local_conv(dim, **dd) if self.has_convs else nn.Identity()
        self.conv_k = local_conv(dim, **dd) if self.has_convs else nn.Identity()
        self.conv_v = local_conv(dim, **dd) if self.has_convs else nn.Identity()
        self.q = nn.Linear(dim, dim, **dd)
        self.k = nn.Linear(dim, dim, **dd)
        self.v = nn.Linear(dim, dim, **dd)
        self.rel_pos = RelPosBias((window, window), num_heads, **dd)
        self.mask = WindowMask(grid, window, shifted, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        dropout = self.attn_drop if self.training else 0.0
        table = self.rel_pos.relative_position_bias_table
        index: Tensor = self.rel_pos.relative_position_index  # pyright: ignore[reportAssignmentType]  a buffer
        heads, mask, grid = self.num_heads, self.mask.mask, self.mask.grid
        y = windowed_attention(q, k, v, table, index, heads, self.window, self.shifted, dropout, mask, grid)
        return self.proj_drop(self.proj(y))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The maps q, k and v, (B, H, W, C) each."""
        return self.q(self.conv_q(x)), self.k(self.conv_k(x)), self.v(self.conv_v(x))


def local_conv(dim: int, **dd: Any) -> ConvNorm:
    return ConvNorm(dim, dim, 3, padding=1, groups=dim, **dd)


class LEWinBlock(MapBlock):
    """Locally Enhanced Window block on a (B, H, W, C) map. With `le="none"` it is Swin's block."""

    def __init__(
        self, dim: int, attn: LEWinAttention, le: str, hidden: int, proj_drop: float, drop_path: float, **dd: Any
    ):
        super().__init__(dim, attn, hidden, proj_drop, drop_path, **dd)
        self.conv = local_conv(dim, **dd) if le == "pre" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_residuals(self.conv(x))  # eqs. 1 and 4: the residuals start behind the convolution


# Table 8 --------------------------------------------------------------------------------------------------------


class ConvBlock(nn.Module):
    """A C in the place of a transformer block and about as heavy as its 12 C^2 weights.

    Three MBConvs of 4 C^2 each, in the first stage one Fused-MBConv of 20 C^2.
    """

    def __init__(self, dim: int, stage: int, drop_path: float, **dd: Any):
        super().__init__()
        unit, count = (fused_mbconv, 1) if stage == 0 else (mbconv, 3)
        self.units = nn.Sequential(*(unit(dim, dim, 1, 2, drop_path, **dd) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return to_nhwc(self.units(to_nchw(x)))


class TransformerEmbed(nn.Module):
    """A T in the place of an embedding: patches or 2x2 means, LEWin blocks at the width that comes in, a 1x1 layer."""

    def __init__(self, reduce: nn.Module, blocks: Sequence[LEWinBlock], in_chs: int, dim: int, **dd: Any):
        super().__init__()
        self.reduce = reduce
        self.blocks = nn.Sequential(*blocks)
        self.proj = PointwiseConv(in_chs, dim, **dd) if in_chs != dim else nn.Identity()
        self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(self.blocks(self.reduce(x))))


class HalvingPool(nn.Module):
    """Means over 2x2 pixels, (B, H, W, C) -> (B, H / 2, W / 2, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return to_nhwc(F.avg_pool2d(to_nchw(pad_to_multiple(x, 2)), 2))


def parse_pattern(pattern: str) -> list[str]:
    slots = pattern.split("-") if isinstance(pattern, str) else []
    if len(slots) != 8 or set(slots) - {"C", "T"}:
        raise WeftError(f"pattern={pattern!r} is not a pattern; give eight letters C or T, such as {PATTERN!r}.")
    return slots


# The network ----------------------------------------------------------------------------------------------------


class CETNet(HierarchicalModel):
    """Hierarchical transformer with convolutions between its stages, at strides 4, 8, 16 and 32.

    Args:
        img_size: default picture size; no weight depends on it, but the masks of its windows are made once.
        global_pool: "avg", "max", "avgmax", or "" for none.
        embed_dim: D, the width of the first stage; it doubles from stage to stage.
        depths, num_heads: blocks and heads, one number per stage.
        window_size: side of the attention windows. mlp_ratio: expansion of the MLP.
        le: local enhancement of the attention: "qkv" (the counts), "pre" (the equations), "none" (Swin; table 4).
        embed: "ce", or CvT's "conv", or Swin's "patch" embedding and merging (table 4).
        ce_unit: "fused" (Fused-MBConv, then MBConv), "mbconv", "ghost", "dense", "shuffle", "resnet", "seresnet"
            (table 6).
        ce_layers: 1, 3, 5 or 7 layers in each CE (table 5).
        ce_expand: expansions of the MBConvs of a CE, over and over; table 5 was made with (2, 1). The other units have
            their own. All ce_ arguments are for C slots with embed="ce", `le` is for T slots.
        pattern: embedding and stage of each of the four stages, C for convolution, T for transformer (table 8).
        stem_stride: 4, or 2 or 1 to keep a useful grid on small pictures. Weights keep their shapes, except those of
            patches (embed="patch" and a pattern that starts with T).
        drop_rate: dropout before the classifier. proj_drop_rate, attn_drop_rate: inside the blocks.
        drop_path_rate: stochastic depth of the last block; grows linearly over all blocks.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: Sequence[int] = (2, 2, 18, 2),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        le: str = "qkv",
        embed: str = "ce",
        ce_unit: str = "fused",
        ce_layers: int = 5,
        ce_expand: Sequence[int] = (2,),
        pattern: str = PATTERN,
        stem_stride: int = 4,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_stages(4, depths=depths, num_heads=num_heads)
        check_positive(in_chans=in_chans, embed_dim=embed_dim, window_size=window_size)
        check_ratio(mlp_ratio=mlp_ratio)
        check_choice("le", le, LOCAL_ENHANCEMENTS)
        check_choice("embed", embed, EMBEDDINGS)
        check_embedding(ce_unit, ce_layers, ce_expand, stem_stride)
        check_rates(drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate)
        check_rates(drop_path_rate=drop_path_rate)
        grids = [grid_size(img_size, stem_stride * 2**i) for i in range(4)]
        slots = parse_pattern(pattern)
        dims = doubled_widths(embed_dim, num_heads)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        self.in_chans = in_chans

        def lewin(stage: int, grid: tuple[int, int], shifted: bool, drop_path: float) -> LEWinBlock:
            dim, heads = dims[stage], num_heads[stage]
            attn = LEWinAttention(dim, heads, window_size, shifted, le, attn_drop_rate, proj_drop_rate, grid, **dd)
            return LEWinBlock(dim, attn, le, int(dim * mlp_ratio), proj_drop_rate, drop_path, **dd)

        def embedding(stage: int, in_chs: int, dim: int) -> nn.Module:
            if slots[2 * stage] == "T":
                reduce = HalvingPool() if stage else token_embedding("patch", stage, in_chs, dim, stem_stride, **dd)
                source = max(stage - 1, 0)  # the stage whose width the blocks have
                blocks = [lewin(source, grids[stage], i % 2 == 1, 0.0) for i in range(EMBED_BLOCKS)]
                return TransformerEmbed(reduce, blocks, dims[source], dim, **dd)
            if embed == "ce":
                return conv_embedding(stage, in_chs, dim, stem_stride, ce_unit, ce_layers, ce_expand, **dd)
            if embed == "patch" and stage:
                return PatchMerging(in_chs, dim, **dd)
            return token_embedding(embed, stage, in_chs, dim, stem_stride, **dd)

        reduction = stem_stride
        for i, (in_chs, dim) in enumerate(pairwise((in_chans, *dims))):
            blocks = [
                lewin(i, grids[i], j % 2 == 1, drop_paths[i][j])
                if slots[2 * i + 1] == "T"
                else ConvBlock(dim, i, drop_paths[i][j], **dd)
                for j in range(depths[i])
            ]
            self.add_stage(MapStage(embedding(i, in_chs, dim), blocks), dim, reduction)
            reduction *= 2
        norm = nn.LayerNorm(dims[-1], **dd)
        self.make_head(dims[-1], num_classes, global_pool, False, drop_rate, norm, **dd)
        self.init_weights(needs_reset=False)


# Variants -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "cetnet_nano": dict(
        embed_dim=24, depths=(1, 1, 4, 1), num_heads=(1, 2, 4, 8), stem_stride=2, window_size=4, drop_path_rate=0.1
    ),
    "cetnet_tiny": dict(embed_dim=64, depths=(2, 2, 18, 2), num_heads=(2, 4, 8, 16), drop_path_rate=0.2),
    "cetnet_small": dict(embed_dim=64, depths=(4, 4, 30, 2), num_heads=(2, 4, 8, 16), drop_path_rate=0.3),
    "cetnet_base": dict(embed_dim=96, depths=(4, 4, 30, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.5),
}


_cfg = partial(
    weights_cfg,
    first_conv="stages.0.embed.units.0.conv",
    paper_ids="arXiv:2207.13317",
    paper_name="Convolutional Embedding Makes Hierarchical Vision Transformer Stronger",
)

default_cfgs = generate_default_cfgs(
    {
        "cetnet_nano": _cfg(64, stride=16),
        "cetnet_tiny": _cfg(),
        "cetnet_small": _cfg(),
        "cetnet_base": _cfg(),
    }
)

# ImageNet-1k top-1 in percent, table 1 of the paper.
PUBLISHED_TOP1 = {"cetnet_tiny": 82.7, "cetnet_small": 83.4, "cetnet_base": 83.8}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if str(kwargs.get("pattern", PATTERN)).startswith("T"):
        kwargs = with_first_conv(kwargs, "stages.0.embed.reduce.proj")
    elif kwargs.get("embed", "ce") != "ce":
        kwargs = with_first_conv(kwargs, "stages.0.embed.proj")
    return build(CETNet, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, 2, 3))


register_variants(
    _create,
    {
        "cetnet_nano": "CETNet for small pictures, Weft's own: 1.3 M parameters, strides 2, 4, 8 and 16.",
        "cetnet_tiny": "CETNet-T, 23.4 M parameters.",
        "cetnet_small": "CETNet-S, 33.5 M parameters.",
        "cetnet_base": "CETNet-B, 74.6 M parameters.",
    },
)
