"""T2T-ViT: Tokens-to-Token ViT (Yuan et al., ICCV 2021, arXiv 2101.11986). The baseline that ViTAE is measured against.

Paper to code:
    Tokens-to-Token module, soft split        T2T, SoftSplit (in performer.py)
    its token transformer                     TokenTransformer, with PerformerAttention or, in the networks with a t in
                                              their names, SoftmaxAttention (in performer.py)
    the "deep-narrow" backbone                hierarchy.TransformerBlock, T2TViT
    tables 1 and 2                            VARIANTS

Defaults are those of the released code, which loads its checkpoints:
    - q, k and v have no bias in the backbone, but have one in the token transformers that are Performers;
    - the other token transformers have one head, and scale by the width of the tokens that come, 147 and 576, not by
      that of the head, 64;
    - the positions are the fixed sinusoids of the flat index for `img_size`; other sizes get them by bicubic resizing,
      as the released code does when it fine-tunes. So they are stored, although nothing learns them;
    - they and the Performer's matrices are buffers here and parameters that are not trained there.
"""

from functools import partial
from typing import Any, Optional

import torch
from timm.layers import Attention, calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from weft.errors import check_choice, check_positive, check_rates, check_ratio, check_widths
from weft.models.flat import FlatModel
from weft.models.hierarchy import TransformerBlock
from weft.models.layers import (
    PositionEmbedding,
    grid_size,
    join,
)
from weft.models.performer import PerformerAttention, SoftmaxAttention, SoftSplit, TokenTransformer
from weft.models.variants import build, register_variants, weights_cfg

__all__ = ["T2TViT"]

TOKEN_ATTENTIONS = ("performer", "softmax")


class T2T(nn.Module):
    """One Tokens-to-Token step: soft split and token transformer, (B, H, W, C_in) -> (B, H / stride, W / stride, C)."""

    def __init__(self, in_chs: int, dim: int, kernel: int, stride: int, attention: str, drop: float, **dd: Any):
        super().__init__()
        self.split = SoftSplit(kernel, stride)
        window = in_chs * kernel**2
        linear = attention == "performer"
        mixer = PerformerAttention(dim, **dd) if linear else SoftmaxAttention(dim, scale=window**-0.5)
        self.transformer = TokenTransformer(window, dim, mixer, drop, kqv_bias=linear, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(self.split(x))


class TokenAttention(nn.Module):
    """Attention over the map and the class token as one sequence; as in the released code q, k and v have no bias."""

    def __init__(self, dim: int, num_heads: int, attn_drop: float, proj_drop: float, **dd: Any):
        super().__init__()
        self.attn = Attention(dim, num_heads, qkv_bias=False, attn_drop=attn_drop, proj_drop=proj_drop, **dd)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> Tensor:
        return self.attn(join(cls, x))  # (B, 1 + H*W, C)


class T2TViT(FlatModel):
    """Two Tokens-to-Token steps to strides 4 and 8, a last soft split to 16, then a plain transformer.

    Args:
        img_size: default picture size, the grid of the fixed positions; they are resized to other sizes.
        global_pool: "token", or "avg", "max", "avgmax" over the map, or "" for none.
        embed_dim, depth, num_heads, mlp_ratio: of the transformer. token_dim: width of the two steps.
        token_attention: of the two steps, "performer" or "softmax".
        drop_rate: dropout before the classifier. pos_drop_rate: behind the positions.
        proj_drop_rate, attn_drop_rate: in the blocks.
        token_drop_rate: dropout in the two steps; the released code has 0.1 in Performers and none with softmax,
            whatever the other rates are.
        drop_path_rate: stochastic depth of the last block; grows linearly over the blocks.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 256,
        depth: int = 7,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        token_dim: int = 64,
        token_attention: str = "performer",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        token_drop_rate: float = 0.1,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_widths(embed_dim, num_heads)
        check_positive(in_chans=in_chans, depth=depth, token_dim=token_dim)
        check_ratio(mlp_ratio=mlp_ratio)
        check_choice("token_attention", token_attention, TOKEN_ATTENTIONS)
        check_rates(drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate)
        check_rates(attn_drop_rate=attn_drop_rate, token_drop_rate=token_drop_rate, drop_path_rate=drop_path_rate)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, depth)

        self.in_chans = in_chans
        reductions = [
            T2T(in_chans, token_dim, 7, 4, token_attention, token_drop_rate, **dd),
            T2T(token_dim, token_dim, 3, 2, token_attention, token_drop_rate, **dd),
            nn.Sequential(SoftSplit(3, 2), nn.Linear(9 * token_dim, embed_dim, **dd)),
        ]
        blocks = [
            TransformerBlock(
                embed_dim,
                TokenAttention(embed_dim, num_heads, attn_drop_rate, proj_drop_rate, **dd),
                int(embed_dim * mlp_ratio),
                proj_drop=proj_drop_rate,
                drop_path=drop_path,
                **dd,
            )
            for drop_path in drop_paths
        ]
        cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        positions = PositionEmbedding(grid_size(img_size, 16), embed_dim, True, sinusoid=True, **dd)
        self.make_trunk(reductions, (token_dim, token_dim, embed_dim), 4, cls_token, positions, pos_drop_rate, blocks)
        self.make_head(embed_dim, num_classes, global_pool, True, drop_rate, nn.LayerNorm(embed_dim, **dd), **dd)
        self.init_weights(needs_reset=False)


# Variants -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "t2t_vit_7": dict(drop_path_rate=0.1),
    "t2t_vit_14": dict(embed_dim=384, depth=14, num_heads=6, mlp_ratio=3.0, drop_path_rate=0.1),
    "t2t_vit_19": dict(embed_dim=448, depth=19, num_heads=7, mlp_ratio=3.0, drop_path_rate=0.1),
    "t2t_vit_24": dict(embed_dim=512, depth=24, num_heads=8, mlp_ratio=3.0, drop_path_rate=0.1),
}
SOFTMAX = dict(token_attention="softmax", token_drop_rate=0.0)
VARIANTS.update({f"t2t_vit_t_{depth}": dict(VARIANTS[f"t2t_vit_{depth}"], **SOFTMAX) for depth in (14, 19, 24)})


_cfg = partial(
    weights_cfg,
    stride=16,
    first_conv=(),  # the picture is read by a linear layer, which timm cannot adapt to other channels
    paper_ids="arXiv:2101.11986",
    paper_name="Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet",
    crop_pct=0.9,
    license="bsd-3-clause-clear",
)

OFFICIAL = "https://github.com/yitu-opensource/T2T-ViT"  # .pth.tar files; none of them is on a hub

default_cfgs = generate_default_cfgs({f"{name}.in1k": _cfg(origin_url=OFFICIAL) for name in VARIANTS})

# ImageNet-1k top-1 in percent, as the names of the released files have it (an older README has 71.2 for T2T-ViT-7).
PUBLISHED_TOP1 = {
    "t2t_vit_7.in1k": 71.7,
    "t2t_vit_14.in1k": 81.5,
    "t2t_vit_19.in1k": 81.9,
    "t2t_vit_24.in1k": 82.3,
    "t2t_vit_t_14.in1k": 81.7,
    "t2t_vit_t_19.in1k": 82.4,
    "t2t_vit_t_24.in1k": 82.6,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    return build(T2TViT, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, -1))


register_variants(
    _create,
    {
        "t2t_vit_7": "T2T-ViT-7, 4.3 M parameters.",
        "t2t_vit_14": "T2T-ViT-14, 21.5 M parameters.",
        "t2t_vit_19": "T2T-ViT-19, 39.1 M parameters.",
        "t2t_vit_24": "T2T-ViT-24, 64.0 M parameters.",
        "t2t_vit_t_14": "T2T-ViT_t-14, whose tokens are made with softmax attention, 21.5 M parameters.",
        "t2t_vit_t_19": "T2T-ViT_t-19, whose tokens are made with softmax attention, 39.1 M parameters.",
        "t2t_vit_t_24": "T2T-ViT_t-24, whose tokens are made with softmax attention, 64.0 M parameters.",
    },
)
