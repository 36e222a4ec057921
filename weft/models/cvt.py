"""CvT: Introducing Convolutions to Vision Transformers (Wu et al., ICCV 2021, arXiv 2103.15808).

Paper to code:
    section 3.1, eq. 1    Convolutional Token Embedding                 layers.ConvEmbed
    section 3.2, eq. 2    Convolutional Projection (figure 3b, 3c)      conv_projection, Attention
    figure 2b             Convolutional Transformer Block               Block (hierarchy.TransformerBlock)
    figure 2a             stage of the hierarchy, class token           Stage (hierarchy.TokenStage)
    table 2               CvT-13, CvT-21, CvT-W24                       VARIANTS
    tables 5 to 8         the arguments pos_embed, embed, stride_kv, projection of CvT

Defaults are those of the released code, which loads its checkpoints. Where it differs from the paper or from habit:
    - the attention logits are scaled by C ** -0.5, the full width, not the width of a head;
    - the MLP uses QuickGELU, x * sigmoid(1.702 x) (`act_layer="gelu"` gives what the Hugging Face port computes);
    - the class token skips the convolution of the projection, but not its linear half;
    - only the last stage drops paths.
CvT-13-NAS was never released; `cvt_13_nas` is the reading of its one sentence that fits table 3, 18 M parameters and
4.1 G, as the other rows of that table are counted. Another reading fits the sentence better, and the 4.1 G where
attention is left out: `stride_kv=(2, 1, (1,) * 7 + (2,) * 3), mlp_ratio=(2.0, 4.0, (4.0,) * 7 + (2.0,) * 3)`.
`cvt_nano` is Weft's own, for pictures of 28 to 96 pixels.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from weft.errors import check_choice, check_positive, check_rates, check_ratio, check_switch
from weft.models.ce import token_embedding
from weft.models.hierarchy import HierarchicalModel, TokenStage, TransformerBlock, check_heads, check_stages, spread
from weft.models.layers import ConvNorm, QuickGELU, grid_size, join, to_nchw, to_nhwc
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv

__all__ = ["CvT"]

POSITIONS = {  # the stages that have a position embedding
    "none": (False, False, False),
    "first": (True, False, False),
    "last": (False, False, True),
    "every": (True, True, True),
}
EMBEDDINGS = ("conv", "patch", "ce")
PROJECTIONS = ("conv", "avg", "linear")
ACTIVATIONS = {"quick_gelu": QuickGELU, "gelu": nn.GELU}
KV_STRIDES = (1, 2)
STEM_STRIDES = (1, 2, 4)


class AvgProjection(nn.Module):
    """The "avg" of the released code in place of a convolution: (B, H, W, C) -> (B, h, w, C).

    Its `ceil_mode` keeps torch.export from making height and width dynamic.
    """

    def __init__(self, stride: int):
        super().__init__()
        self.pool = nn.AvgPool2d(3, stride, padding=1, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return to_nhwc(self.pool(to_nchw(x)))


def conv_projection(kind: str, dim: int, stride: int, query: bool, **dd: Any) -> nn.Module:
    """The depth-wise half of one Convolutional Projection; the point-wise half is the Linear that follows it."""
    if kind == "conv":
        return ConvNorm(dim, dim, 3, stride, padding=1, groups=dim, **dd)
    if kind == "avg" and not query:
        return AvgProjection(stride)
    return nn.Identity()


class Attention(nn.Module):
    """Multi-head attention whose queries, keys and values come from Convolutional Projections.

    Keys and values are taken at stride `stride_kv` (with "linear" at full resolution), which makes the attention
    matrix (H*W) x (h*w) with h = ceil(H / stride).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        projection: str,
        stride_kv: int,
        attn_drop: float,
        proj_drop: float,
        **dd: Any,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.scale = dim**-0.5
        self.attn_drop = attn_drop
        self.has_convs = projection == "conv"
        self.conv_proj_q = conv_projection(projection, dim, 1, query=True, **dd)
        self.conv_proj_k = conv_projection(projection, dim, stride_kv, query=False, **dd)
        self.conv_proj_v = conv_projection(projection, dim, stride_kv, query=False, **dd)
        self.proj_q = nn.Linear(dim, dim, **dd)
        self.proj_k = nn.Linear(dim, dim, **dd)
        self.proj_v = nn.Linear(dim, dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def heads(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        return x.view(batch, length, self.num_heads, dim // self.num_heads).transpose(1, 2)  # (B, heads, N, C / heads)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> Tensor:
        q, k, v = self.project(x, cls)
        return self.proj_drop(self.proj(self.answer(q, k, v)))

    def project(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The depth-wise halves of the three projections: (B, [1 +] H*W, C), and twice (B, [1 +] h*w, C)."""
        if self.has_convs:
            x = x.contiguous()  # beside a class token it is a part of the tokens, which each convolution would copy
        return join(cls, self.conv_proj_q(x)), join(cls, self.conv_proj_k(x)), join(cls, self.conv_proj_v(x))

    def answer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The tokens `q` ask the tokens `k`, which answer `v`; the linear halves of the projections come first."""
        q, k, v = self.heads(self.proj_q(q)), self.heads(self.proj_k(k)), self.heads(self.proj_v(v))
        dropout = self.attn_drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale)
        return y.transpose(1, 2).flatten(2)


class Block(TransformerBlock):
    """Convolutional Transformer Block, figure 2b: x + Attention(LN(x)), then x + MLP(LN(x)); hierarchy.py has it."""


class Stage(TokenStage):
    """One stage of figure 2a: Convolutional Token Embedding, class token and positions if there are any, blocks."""


class CvT(HierarchicalModel):
    """Convolutional vision Transformer: three stages at strides 4, 8 and 16, class token in the last.

    Args:
        img_size: default picture size; matters only with position embeddings, which are resized to other sizes.
        global_pool: "token", or "avg", "max", "avgmax" over the map, or "" for none.
        class_token: without it the final norm is applied to the map, which is then pooled.
        embed_dims, depths, num_heads: one number per stage.
        stem_stride: 4, or 2 or 1 to keep a useful grid on small pictures. With embed="conv" weights keep their shapes.
        stride_kv, mlp_ratio: one value, one per stage, or one list per stage with a value per block (table 7, NAS).
        projection: "conv", "avg" or "linear"; one value or one per stage (table 8).
        embed: "conv" or "patch", overlapping or not (table 6); "ce" is CETNet's convolutional embedding.
        pos_embed: "none", "first", "last" or "every": the stages with position embeddings (table 5).
        act_layer: "quick_gelu" (released weights) or "gelu".
        drop_rate: dropout before the classifier. proj_drop_rate, attn_drop_rate: inside the blocks.
        drop_path_rate: stochastic depth of the last block; grows linearly over the last stage.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        class_token: bool = True,
        embed_dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        stem_stride: int = 4,
        stride_kv: int | Sequence[Any] = 2,
        mlp_ratio: float | Sequence[Any] = 4.0,
        projection: str | Sequence[str] = "conv",
        embed: str = "conv",
        pos_embed: str = "none",
        act_layer: str = "quick_gelu",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_stages(3, embed_dims=embed_dims, depths=depths, num_heads=num_heads)
        check_heads(embed_dims, num_heads)
        check_positive(in_chans=in_chans)
        check_switch(class_token=class_token)
        check_rates(drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate)
        check_rates(drop_path_rate=drop_path_rate)
        check_choice("stem_stride", stem_stride, STEM_STRIDES)
        check_choice("embed", embed, EMBEDDINGS)
        check_choice("pos_embed", pos_embed, POSITIONS)
        check_choice("act_layer", act_layer, ACTIVATIONS)
        strides_kv = per_block("stride_kv", stride_kv, depths)
        mlp_ratios = per_block("mlp_ratio", mlp_ratio, depths)
        projections = spread("projection", projection, len(depths))
        check_per_block(strides_kv, mlp_ratios, projections)
        drop_paths: Any = [[0.0] * depths[0], [0.0] * depths[1], calculate_drop_path_rates(drop_path_rate, depths[2])]

        self.in_chans = in_chans
        reduction, widths = 1, (in_chans, *embed_dims)
        for i, dim in enumerate(embed_dims):
            reduction *= stem_stride if i == 0 else 2
            grid = grid_size(img_size, reduction)
            has_class_token = class_token and i == 2
            blocks = [
                Block(
                    dim,
                    Attention(dim, num_heads[i], projections[i], stride, attn_drop_rate, proj_drop_rate, **dd),
                    int(dim * ratio),
                    ACTIVATIONS[act_layer],
                    proj_drop_rate,
                    drop_path,
                    **dd,
                )
                for stride, ratio, drop_path in zip(strides_kv[i], mlp_ratios[i], drop_paths[i], strict=True)
            ]
            embedding = token_embedding(embed, i, widths[i], dim, stem_stride, **dd)
            positions = grid if POSITIONS[pos_embed][i] else None
            stage = Stage(embedding, blocks, dim, has_class_token, positions, proj_drop_rate, **dd)
            self.add_stage(stage, dim, reduction)
        norm = nn.LayerNorm(embed_dims[-1], **dd)
        self.make_head(embed_dims[-1], num_classes, global_pool, class_token, drop_rate, norm, **dd)
        self.init_weights(needs_reset=False)

    def _init_linear(self, linear: nn.Linear) -> None:
        super()._init_linear(linear)
        if linear is self.head:  # the released code never resets the bias of the classifier
            bound = linear.in_features**-0.5
            nn.init.uniform_(linear.bias, -bound, bound)


def per_block(name: str, value: Any, depths: Sequence[int]) -> list[list[Any]]:
    """One value, one per stage, or one list per stage, spread to one value per block."""
    stages = spread(name, value, len(depths))
    return [spread(f"{name}[{i}]", stage, depths[i]) for i, stage in enumerate(stages)]


def check_per_block(strides_kv: list[list[Any]], mlp_ratios: list[list[Any]], projections: list[str]) -> None:
    for value in chain.from_iterable(strides_kv):
        check_choice("stride_kv", value, KV_STRIDES)
    for value in chain.from_iterable(mlp_ratios):
        check_ratio(mlp_ratio=value)
    for value in projections:
        check_choice("projection", value, PROJECTIONS)


# Variants -------------------------------------------------------------------------------------------------------

BASE = dict(embed_dims=(64, 192, 384), num_heads=(1, 3, 6), drop_path_rate=0.1)
VARIANTS: dict[str, dict[str, Any]] = {
    "cvt_nano": dict(
        embed_dims=(32, 64, 128), depths=(1, 2, 5), num_heads=(1, 2, 4), stem_stride=2, drop_path_rate=0.1
    ),
    "cvt_13": dict(depths=(1, 2, 10), **BASE),
    "cvt_21": dict(depths=(1, 4, 16), **BASE),
    "cvt_w24": dict(embed_dims=(192, 768, 1024), depths=(2, 2, 20), num_heads=(3, 12, 16), drop_path_rate=0.3),
    "cvt_13_nas": dict(
        depths=(1, 2, 10),
        stride_kv=(2, 2, (1,) * 3 + (2,) * 7),
        mlp_ratio=(2.0, 2.0, (4.0,) * 7 + (2.0,) * 3),
        **BASE,
    ),
}


_cfg = partial(
    weights_cfg,
    stride=16,
    first_conv="stages.0.embed.proj",
    paper_ids="arXiv:2103.15808",
    paper_name="CvT: Introducing Convolutions to Vision Transformers",
)
# The authors evaluate 384 pixels without a crop: the whole picture, resized to a square.
_cfg_384 = partial(_cfg, 384, crop_pct=1.0, crop_mode="squash")

default_cfgs = generate_default_cfgs(
    {
        "cvt_nano": _cfg(64, stride=8),
        "cvt_13.msft_in1k": _cfg(hf_hub_id="microsoft/cvt-13"),
        "cvt_13.msft_in1k_384": _cfg_384(hf_hub_id="microsoft/cvt-13-384"),
        "cvt_13.msft_in22k_ft_in1k_384": _cfg_384(hf_hub_id="microsoft/cvt-13-384-22k"),
        "cvt_21.msft_in1k": _cfg(hf_hub_id="microsoft/cvt-21"),
        "cvt_21.msft_in1k_384": _cfg_384(hf_hub_id="microsoft/cvt-21-384"),
        "cvt_21.msft_in22k_ft_in1k_384": _cfg_384(hf_hub_id="microsoft/cvt-21-384-22k"),
        "cvt_w24.msft_in22k_ft_in1k_384": _cfg_384(hf_hub_id="microsoft/cvt-w24-384-22k"),
        "cvt_13_nas": _cfg(),
    }
)

# ImageNet-1k top-1 in percent, table 3 of the paper.
PUBLISHED_TOP1 = {
    "cvt_13.msft_in1k": 81.6,
    "cvt_13.msft_in1k_384": 83.0,
    "cvt_13.msft_in22k_ft_in1k_384": 83.3,
    "cvt_21.msft_in1k": 82.5,
    "cvt_21.msft_in1k_384": 83.3,
    "cvt_21.msft_in22k_ft_in1k_384": 84.9,
    "cvt_w24.msft_in22k_ft_in1k_384": 87.7,
    "cvt_13_nas": 82.2,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if kwargs.get("embed") == "ce":
        kwargs = with_first_conv(kwargs, "stages.0.embed.units.0.conv")
    return build(CvT, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, 2))


register_variants(
    _create,
    {
        "cvt_nano": "CvT for small pictures, Weft's own: 1.4 M parameters, strides 2, 4 and 8.",
        "cvt_13": "CvT-13, 20.0 M parameters.",
        "cvt_21": "CvT-21, 31.6 M parameters.",
        "cvt_w24": "CvT-W24, the wide one, 277.2 M parameters.",
        "cvt_13_nas": "CvT-13-NAS as reconstructed from the paper's wording and counts, 17.9 M parameters.",
    },
)
