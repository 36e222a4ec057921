"""CE in four hosts: CvT, PVT, Swin and CSWin with CETNet's convolutional embedding (arXiv 2207.13317, table 7).

The hosts keep their blocks; patch embedding and merging become a CE, and some blocks are removed in return. CvT, PVT
and CSWin take it as `embed="ce"`; Swin is timm's, so its blocks are put into our stages here. Depths are the paper's.
CE-Swin-T has 26.9 M parameters. The paper's 23.4 M are CETNet-T's, probably a slip: CE-Swin-S and -B are made the same
way and meet the paper's counts.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from weft.errors import check_positive, check_rates, check_ratio
from weft.models.base import HybridModel
from weft.models.baselines.cswin import CSWin
from weft.models.baselines.pvt import PVT
from weft.models.ce import check_embedding, conv_embedding
from weft.models.cvt import CvT
from weft.models.hierarchy import HierarchicalModel, MapStage, check_stages, doubled_widths
from weft.models.layers import LayerNorm, StochasticDepth, add_branch, grid_size
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv
from weft.models.windows import WindowMask, windowed_attention

__all__ = ["CESwin"]


class SwinBlock(SwinTransformerBlock):
    """timm's block, its windows cut as CETNet's are: timm's let padding take part in attention, and keep torch.export
    and torch.compile from handling more than one picture size."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        shifted: bool,
        mlp_ratio: float,
        attn_drop: float,
        proj_drop: float,
        drop_path: float,
        grid: tuple[int, int] = (0, 0),
        **dd: Any,
    ):
        super().__init__(
            dim,
            (window, window),
            num_heads,
            window_size=window,
            dynamic_mask=True,
            mlp_ratio=mlp_ratio,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            norm_layer=LayerNorm,
            **dd,
        )
        self.window, self.shifted = window, shifted
        self.mask = WindowMask(grid, window, shifted, **dd)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self._attn(self.norm1(x))
        x = add_branch(x, y, self.drop_path(y))
        y = self.mlp(self.norm2(x))
        return add_branch(x, y, self.drop_path(y))

    def _attn(self, x: Tensor) -> Tensor:
        attn = self.attn
        q, k, v = attn.qkv(x).chunk(3, dim=-1)
        dropout = attn.attn_drop.p if self.training else 0.0
        table = attn.relative_position_bias_table
        index: Tensor = attn.relative_position_index  # pyright: ignore[reportAssignmentType]  a buffer
        index = index.view(-1)
        heads, mask, grid = attn.num_heads, self.mask.mask, self.mask.grid
        y = windowed_attention(q, k, v, table, index, heads, self.window, self.shifted, dropout, mask, grid)
        return attn.proj_drop(attn.proj(y))


class CESwin(HierarchicalModel):
    """Swin with a convolutional embedding in front of each stage, at strides 4, 8, 16 and 32.

    Args:
        img_size: default picture size; no weight depends on it, but the masks of its windows are made once.
        global_pool: "avg", "max", "avgmax", or "" for none.
        embed_dim: width of the first stage; it doubles from stage to stage.
        depths, num_heads: blocks and heads, one number per stage.
        window_size: side of the attention windows. mlp_ratio: expansion of the MLP.
        ce_unit, ce_layers, ce_expand: as in CETNet; table 5 has depths (2, 2, 6, 2), "mbconv" and (2, 1).
        stem_stride: 4, or 2 or 1 to keep a useful grid on small pictures. Weights keep their shapes.
        drop_rate: dropout before the classifier. proj_drop_rate, attn_drop_rate: inside the blocks.
        drop_path_rate: stochastic depth of the last block; grows linearly over all blocks.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 4, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        ce_unit: str = "fused",
        ce_layers: int = 5,
        ce_expand: Sequence[int] = (2,),
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
        check_embedding(ce_unit, ce_layers, ce_expand, stem_stride)
        check_rates(drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate)
        check_rates(drop_path_rate=drop_path_rate)
        dims = doubled_widths(embed_dim, num_heads)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        self.in_chans = in_chans
        reduction = stem_stride
        for i, (in_chs, dim) in enumerate(pairwise((in_chans, *dims))):
            grid = grid_size(img_size, reduction)
            blocks = [
                SwinBlock(
                    dim,
                    num_heads[i],
                    window_size,
                    j % 2 == 1,
                    mlp_ratio,
                    attn_drop_rate,
                    proj_drop_rate,
                    drop_path,
                    grid,
                    **dd,
                )
                for j, drop_path in enumerate(drop_paths[i])
            ]
            embed = conv_embedding(i, in_chs, dim, stem_stride, ce_unit, ce_layers, ce_expand, **dd)
            self.add_stage(MapStage(embed, blocks), dim, reduction)
            reduction *= 2
        norm = nn.LayerNorm(dims[-1], **dd)
        self.make_head(dims[-1], num_classes, global_pool, False, drop_rate, norm, **dd)
        self.init_weights(needs_reset=False)


# Variants -------------------------------------------------------------------------------------------------------

_CVT = dict(embed_dims=(64, 192, 384), num_heads=(1, 3, 6), embed="ce")
_PVT = dict(embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8), embed="ce")
_CSWIN = dict(embed_dims=(64, 128, 256, 512), num_heads=(2, 4, 8, 16), embed="ce")
_CSWIN_BASE = dict(embed_dims=(96, 192, 384, 768), num_heads=(4, 8, 16, 32), embed="ce")
_SWIN = dict(embed_dim=96, num_heads=(3, 6, 12, 24))
_SWIN_BASE = dict(embed_dim=128, num_heads=(4, 8, 16, 32))

VARIANTS: dict[str, tuple[type[HybridModel], dict[str, Any]]] = {  # drop path rates are those of the hosts
    "ce_cvt_13": (CvT, dict(depths=(1, 2, 10), drop_path_rate=0.1, **_CVT)),
    "ce_pvt_small": (PVT, dict(depths=(3, 4, 4, 3), drop_path_rate=0.1, **_PVT)),
    "ce_swin_tiny": (CESwin, dict(depths=(2, 2, 4, 2), drop_path_rate=0.2, **_SWIN)),
    "ce_swin_small": (CESwin, dict(depths=(2, 2, 16, 2), drop_path_rate=0.3, **_SWIN)),
    "ce_swin_base": (CESwin, dict(depths=(2, 2, 16, 2), drop_path_rate=0.5, **_SWIN_BASE)),
    "ce_cswin_tiny": (CSWin, dict(depths=(1, 2, 20, 1), drop_path_rate=0.2, **_CSWIN)),
    "ce_cswin_small": (CSWin, dict(depths=(2, 4, 31, 2), drop_path_rate=0.4, **_CSWIN)),
    "ce_cswin_base": (CSWin, dict(depths=(2, 4, 31, 2), drop_path_rate=0.5, **_CSWIN_BASE)),
}


_cfg = partial(
    weights_cfg,
    first_conv="stages.0.embed.units.0.conv",
    paper_ids="arXiv:2207.13317",
    paper_name="Convolutional Embedding Makes Hierarchical Vision Transformer Stronger",
)

default_cfgs = generate_default_cfgs({name: _cfg(stride=16 if name == "ce_cvt_13" else 32) for name in VARIANTS})

# ImageNet-1k top-1 in percent, table 7 of the paper.
PUBLISHED_TOP1 = {
    "ce_cvt_13": 82.1,
    "ce_pvt_small": 81.1,
    "ce_swin_tiny": 82.5,
    "ce_swin_small": 83.6,
    "ce_swin_base": 84.0,
    "ce_cswin_tiny": 83.6,
    "ce_cswin_small": 84.1,
    "ce_cswin_base": 84.7,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    model_cls, defaults = VARIANTS[variant]
    if kwargs.get("embed", "ce") != "ce":
        kwargs = with_first_conv(kwargs, "stages.0.embed.proj")
    return build(model_cls, variant, pretrained, defaults, kwargs, tuple(range(len(defaults["depths"]))))


register_variants(
    _create,
    {
        "ce_cvt_13": "CvT-13 with CE, 20.0 M parameters.",
        "ce_pvt_small": "PVT-Small with CE, 22.6 M parameters.",
        "ce_swin_tiny": "Swin-T with CE, 26.9 M parameters.",
        "ce_swin_small": "Swin-S with CE, 48.2 M parameters.",
        "ce_swin_base": "Swin-B with CE, 85.2 M parameters.",
        "ce_cswin_tiny": "CSWin-T with CE, 21.6 M parameters.",
        "ce_cswin_small": "CSWin-S with CE, 33.9 M parameters.",
        "ce_cswin_base": "CSWin-B with CE, 75.8 M parameters.",
    },
)
