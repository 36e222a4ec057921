"""PVT: Pyramid Vision Transformer, without convolutions (Wang et al., ICCV 2021, arXiv 2102.12122).

Paper to code:
    section 3.2, figure 3    patch embedding between the stages          layers.ConvEmbed, "patch"
    section 3.3, eqs. 1-4    Spatial-Reduction Attention (figure 4)      SpatialReductionAttention
    figure 3                 encoder block; stage, class token           hierarchy.TransformerBlock, TokenStage
    table 1                  PVT-Tiny, -Small, -Medium, -Large           VARIANTS

Defaults are those of the released code, which loads its checkpoints. What it does that the paper does not say:
    - LayerNorm adds 1e-6 in the blocks and at the end, 1e-5 behind patch embedding and spatial reduction;
    - the class token and its position come in with the last stage, which does not reduce its keys;
    - positions are subject to weight decay, the class token is not.
Where Weft differs from the released code, at other sizes than 224 pixels alone:
    - patch embedding and spatial reduction pad with zeros where that code loses the last rows and columns;
    - positions are resized bicubically, there bilinearly.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from weft.errors import check_choice, check_positive, check_rates, check_ratio
from weft.models.ce import token_embedding
from weft.models.hierarchy import HierarchicalModel, TokenStage, TransformerBlock, check_heads, check_stages
from weft.models.layers import ConvEmbed, grid_size, join
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv

__all__ = ["PVT"]

EMBEDDINGS = ("patch", "ce")
LN_EPS = 1e-6  # of the blocks


class SpatialReductionAttention(nn.Module):
    """SRA, eqs. 1-4: multi-head attention whose keys and values come from a map `sr_ratio` times smaller.

    The reduction of eq. 3 is a patch embedding that keeps the width. A class token is not reduced.
    """

    def __init__(self, dim: int, num_heads: int, sr_ratio: int, attn_drop: float, proj_drop: float, **dd: Any):
        super().__init__()
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.q = nn.Linear(dim, dim, **dd)
        self.sr = ConvEmbed("patch", dim, dim, sr_ratio, stem=False, **dd) if sr_ratio > 1 else None
        self.kv = nn.Linear(dim, 2 * dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> Tensor:
        tokens = join(cls, x)  # (B, [1 +] H*W, C)
        reduced = tokens
        if self.sr is not None:
            reduced = join(cls, self.sr(x))  # (B, [1 +] h*w, C)
        q = self.q(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, N, C / heads)
        kv = self.kv(reduced).unflatten(-1, (2, self.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, n, C / heads)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop if self.training else 0.0)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))


class PVT(HierarchicalModel):
    """Pyramid Vision Transformer: four stages at strides 4, 8, 16 and 32, class token in the last.

    Args:
        img_size: default picture size, the grids of the position embeddings; they are resized to other sizes.
        global_pool: "token", or "avg", "max", "avgmax" over the map, or "" for none.
        embed_dims, depths, num_heads, mlp_ratios: one number per stage.
        sr_ratios: spatial reduction of the keys and values, one number per stage; 1 for none.
        embed: "patch", or "ce" for CETNet's convolutional embedding.
        drop_rate: dropout before the classifier. proj_drop_rate, attn_drop_rate: inside the blocks.
        drop_path_rate: stochastic depth of the last block; grows linearly over all blocks.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (3, 4, 6, 3),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8.0, 8.0, 4.0, 4.0),
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        embed: str = "patch",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_stages(4, embed_dims=embed_dims, depths=depths, num_heads=num_heads)
        check_stages(4, mlp_ratios=mlp_ratios, sr_ratios=sr_ratios)
        check_heads(embed_dims, num_heads)
        for ratio, reduction in zip(mlp_ratios, sr_ratios, strict=True):
            check_positive(sr_ratios=reduction)
            check_ratio(mlp_ratios=ratio)
        check_positive(in_chans=in_chans)
        check_choice("embed", embed, EMBEDDINGS)
        check_rates(drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate)
        check_rates(drop_path_rate=drop_path_rate)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        self.in_chans = in_chans
        widths = (in_chans, *embed_dims)
        for i, dim in enumerate(embed_dims):
            reduction = 4 * 2**i
            blocks = [
                TransformerBlock(
                    dim,
                    SpatialReductionAttention(dim, num_heads[i], sr_ratios[i], attn_drop_rate, proj_drop_rate, **dd),
                    int(dim * mlp_ratios[i]),
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path,
                    norm_eps=LN_EPS,
                    **dd,
                )
                for drop_path in drop_paths[i]
            ]
            embedding, grid = token_embedding(embed, i, widths[i], dim, **dd), grid_size(img_size, reduction)
            self.add_stage(TokenStage(embedding, blocks, dim, i == 3, grid, proj_drop_rate, **dd), dim, reduction)
        norm = nn.LayerNorm(embed_dims[-1], eps=LN_EPS, **dd)
        self.make_head(embed_dims[-1], num_classes, global_pool, True, drop_rate, norm, **dd)
        self.init_weights(needs_reset=False)

    def no_weight_decay(self) -> set[str]:
        return {"*.cls_token"}


# Variants -------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = dict(
    embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8), mlp_ratios=(8.0, 8.0, 4.0, 4.0), sr_ratios=(8, 4, 2, 1)
)
VARIANTS: dict[str, dict[str, Any]] = {
    "pvt_tiny": dict(depths=(2, 2, 2, 2), drop_path_rate=0.1, **BASE),
    "pvt_small": dict(depths=(3, 4, 6, 3), drop_path_rate=0.1, **BASE),
    "pvt_medium": dict(depths=(3, 4, 18, 3), drop_path_rate=0.3, **BASE),
    "pvt_large": dict(depths=(3, 8, 27, 3), drop_path_rate=0.3, **BASE),
}


_cfg = partial(
    weights_cfg,
    first_conv="stages.0.embed.proj",
    paper_ids="arXiv:2102.12122",
    paper_name="Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions",
)

OFFICIAL = "https://github.com/whai362/PVT"  # .pth files among its releases; none of them is on a hub

default_cfgs = generate_default_cfgs({f"{name}.in1k": _cfg(origin_url=OFFICIAL) for name in VARIANTS})

# ImageNet-1k top-1 in percent, from the paper.
PUBLISHED_TOP1 = {
    "pvt_tiny.in1k": 75.1,
    "pvt_small.in1k": 79.8,
    "pvt_medium.in1k": 81.2,
    "pvt_large.in1k": 81.7,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if kwargs.get("embed") == "ce":
        kwargs = with_first_conv(kwargs, "stages.0.embed.units.0.conv")
    return build(PVT, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, 2, 3))


register_variants(
    _create,
    {
        "pvt_tiny": "PVT-Tiny, 13.2 M parameters.",
        "pvt_small": "PVT-Small, 24.5 M parameters.",
        "pvt_medium": "PVT-Medium, 44.2 M parameters.",
        "pvt_large": "PVT-Large, 61.4 M parameters.",
    },
)
