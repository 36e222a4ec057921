"""CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows (Dong et al., CVPR 2022,
arXiv 2107.00652).

Paper to code:
    section 3.1, figure 2    convolutional embedding between the stages     layers.ConvEmbed, "conv"
    section 3.2, figure 1    Cross-Shaped Window attention                  CrossShapedAttention, StripeAttention
    section 3.2, figure 3    Locally-enhanced Positional Encoding (LePE)    LePEAttention
    section 3.3, figure 2    CSWin Transformer block                        hierarchy.MapBlock
    table 1                  CSWin-T, CSWin-S, CSWin-B                      VARIANTS

Defaults are those of the released code, which loads its checkpoints. What it changes, or the paper leaves open:
    - the first half of the heads attends inside vertical stripes, the second half inside horizontal ones;
    - the last stage attends over its whole map whatever the size of the picture, in one branch with one LePE;
    - LePE sees its stripe alone: zeros at the borders, not what lies beyond them;
    - drop path is that of the authors' training commands: 0.2, 0.4 and 0.5.
Maps that the stripes do not divide follow the released code for segmentation (that for classification fails): queries,
keys and values are padded with zeros, half of them on either side, and the padding takes part in attention.
Two traits of the code for classification are left out: a stage whose map is as wide as a stripe becomes a last one,
which at 224 and 384 pixels never happens, and the dropout behind the projection is never applied (published: 0).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates, register_notrace_function
from timm.models import generate_default_cfgs, resolve_pretrained_cfg
from torch import Tensor, nn

from weft.errors import WeftError, check_choice, check_positive, check_rates, check_ratio
from weft.models.ce import token_embedding
from weft.models.hierarchy import HierarchicalModel, MapBlock, MapStage, check_heads, check_stages
from weft.models.layers import grid_size, sizes_are_fixed, to_nchw, to_nhwc
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv

__all__ = ["CSWin"]

EMBEDDINGS = ("conv", "ce")


class LePEAttention(nn.Module):
    """Attention over whole maps, plus LePE: a depth-wise 3x3 convolution of the values.

    (B, H, W, 3, C) queries, keys and values -> (B, H, W, C).
    """

    def __init__(self, dim: int, num_heads: int, attn_drop: float, **dd: Any):
        super().__init__()
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.lepe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **dd)

    def attend(self, tokens: Tensor) -> Tensor:
        """(B, N, 3, C) -> (B, N, C)."""
        heads = tokens.unflatten(-1, (self.num_heads, -1))  # (B, N, 3, heads, C / heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, N, C / heads)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop if self.training else 0.0)
        return y.transpose(1, 2).flatten(2)

    def encode(self, qkv: Tensor) -> Tensor:
        """LePE of (B, H, W, 3, C), which is (B, H, W, C)."""
        return to_nhwc(self.lepe(to_nchw(qkv.select(3, 2))))

    def forward(self, qkv: Tensor) -> Tensor:
        lepe = self.encode(qkv)
        return self.attend(qkv.flatten(1, 2)).view(lepe.shape) + lepe


class StripeAttention(LePEAttention):
    """The same inside stripes `split_size` wide, which lie side by side along one side and span the other.

    Horizontal stripes are a view of the map; vertical ones are copied, once when cut and once when put together.
    """

    def __init__(self, dim: int, num_heads: int, split_size: int, along: int, attn_drop: float, **dd: Any):
        super().__init__(dim, num_heads, attn_drop, **dd)
        self.split_size = split_size
        self.along = along  # 2: vertical stripes along W; 1: horizontal stripes along H

    def forward(self, qkv: Tensor) -> Tensor:
        padded = pad_around(qkv, self.along, self.split_size)
        stripes = cut(padded, self.along, self.split_size).movedim(self.along, 1)  # (B, stripes, h, w, 3, C)
        if not sizes_are_fixed(qkv.shape[1], qkv.shape[2]):
            stripes = stripes.contiguous()  # torch.export cannot tell for every size whether it is a view
        y = self.forward_stripes(stripes.flatten(0, 1)).unflatten(0, stripes.shape[:2])  # (B, stripes, h, w, C)
        y = y.movedim(1, self.along)
        y = y.flatten(self.along, self.along + 1) if self.split_size > 1 else y.squeeze(self.along + 1)
        return crop_around(y, self.along, self.split_size, qkv.shape[self.along])

    def forward_stripes(self, qkv: Tensor) -> Tensor:
        # The order of the tokens does not matter to attention. torch.export wants the side that may vary first.
        turn = self.along == 1 and not sizes_are_fixed(qkv.shape[1], qkv.shape[2])
        turned = qkv.transpose(1, 2) if turn else qkv
        y = cut(self.attend(turned.flatten(1, 2)), 1, turned.shape[2])
        return (y.transpose(1, 2).contiguous() if turn else y) + self.encode(qkv)


@register_notrace_function
def cut(x: Tensor, dim: int, size: int) -> Tensor:
    """A view with one side cut into pieces of `size`, which must divide it: (.., n * size, ..) -> (.., n, size, ..)."""
    if sizes_are_fixed(x.shape[1], x.shape[2]):
        return x.unflatten(dim, (x.shape[dim] // size, size))
    # The same view. torch.export cannot tell that it exists for every size.
    return x.unfold(dim, size, size).movedim(-1, dim + 1)


def _margin(side: int, multiple: int) -> int:
    """Pixels missing from `side` to the next multiple."""
    return ((side - 1) // multiple + 1) * multiple - side


@register_notrace_function
def pad_around(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros before and behind a side of a (B, H, W, 3, C) map, half of them each, until `multiple` divides it."""
    margin = _margin(x.shape[dim], multiple)
    before, after = margin // 2, margin - margin // 2
    if multiple == 1 or (sizes_are_fixed(x.shape[1], x.shape[2]) and margin == 0):
        return x
    if not sizes_are_fixed(x.shape[1], x.shape[2]):
        after += multiple  # a stripe of zeros: torch.export would take a single stripe for a constant of the graph
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])


@register_notrace_function
def crop_around(x: Tensor, dim: int, multiple: int, side: int) -> Tensor:
    """Undoes `pad_around`: a view of the map with the `side` it had."""
    before = _margin(side, multiple) // 2
    if multiple == 1 or sizes_are_fixed(x.shape[1], x.shape[2]):
        return x.narrow(dim, before, side)
    # The same numbers. torch.export cannot tell that this part exists for every size.
    return x.index_select(dim, torch.arange(side, device=x.device) + before)


class CrossShapedAttention(nn.Module):
    """Half of the heads attend inside vertical, half inside horizontal stripes. (B, H, W, C) -> (B, H, W, C).

    A `split_size` of 0 makes it the attention of the last stage: one branch over the whole map.
    """

    def __init__(self, dim: int, num_heads: int, split_size: int, attn_drop: float, proj_drop: float, **dd: Any):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        if split_size == 0:
            branches = [LePEAttention(dim, num_heads, attn_drop, **dd)]
        else:
            branches = [
                StripeAttention(dim // 2, num_heads // 2, split_size, along, attn_drop, **dd) for along in (2, 1)
            ]
        self.branches = nn.ModuleList(branches)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, len(self.branches), -1))  # (B, H, W, 3, branches, C / branches)
        outputs = []
        for i, branch in enumerate(self.branches):
            outputs.append(branch(qkv.select(4, i)))
        y = outputs[0] if len(self.branches) == 1 else torch.cat(outputs, dim=-1)
        return self.proj_drop(self.proj(y))


class CSWin(HierarchicalModel):
    """CSWin Transformer: four stages at strides 4, 8, 16 and 32, no class token and no positions but LePE.

    Args:
        img_size: default picture size; no weight depends on it.
        global_pool: "avg", "max" or "avgmax" over the map, or "" for none.
        embed_dims, depths, num_heads, mlp_ratios: one number per stage.
        split_sizes: width of the stripes, one number per stage; 0 for attention over the whole map.
        embed: "conv", or "ce" for CETNet's convolutional embedding.
        drop_rate: dropout before the classifier. proj_drop_rate, attn_drop_rate: inside the blocks.
        drop_path_rate: stochastic depth of the last block; grows linearly over all blocks.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (1, 2, 21, 1),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        mlp_ratios: Sequence[float] = (4.0, 4.0, 4.0, 4.0),
        split_sizes: Sequence[int] = (1, 2, 7, 0),
        embed: str = "conv",
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
        check_stages(4, mlp_ratios=mlp_ratios, split_sizes=split_sizes)
        check_heads(embed_dims, num_heads)
        for heads, ratio, split_size in zip(num_heads, mlp_ratios, split_sizes, strict=True):
            check_ratio(mlp_ratios=ratio)
            check_split(split_size, heads)
        check_positive(in_chans=in_chans)
        check_choice("embed", embed, EMBEDDINGS)
        grid_size(img_size, 32)  # for the check in it
        check_rates(drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate)
        check_rates(drop_path_rate=drop_path_rate)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        self.in_chans = in_chans
        widths = (in_chans, *embed_dims)
        for i, dim in enumerate(embed_dims):
            reduction = 4 * 2**i
            blocks = [
                MapBlock(
                    dim,
                    CrossShapedAttention(dim, num_heads[i], split_sizes[i], attn_drop_rate, proj_drop_rate, **dd),
                    int(dim * mlp_ratios[i]),
                    proj_drop_rate,
                    drop_path,
                    **dd,
                )
                for drop_path in drop_paths[i]
            ]
            self.add_stage(MapStage(token_embedding(embed, i, widths[i], dim, **dd), blocks), dim, reduction)
        norm = nn.LayerNorm(embed_dims[-1], **dd)
        self.make_head(embed_dims[-1], num_classes, global_pool, False, drop_rate, norm, **dd)
        self.init_weights(needs_reset=False)


def check_split(split_size: object, num_heads: int) -> None:
    if type(split_size) is not int or split_size < 0:
        raise WeftError(f"split_sizes has {split_size!r}; give the width of a stripe, or 0 for the whole map.")
    if split_size and num_heads % 2:
        raise WeftError(f"num_heads={num_heads!r} is odd; vertical and horizontal stripes share the heads equally.")


# Variants -------------------------------------------------------------------------------------------------------

SMALL = dict(embed_dims=(64, 128, 256, 512), num_heads=(2, 4, 8, 16))
VARIANTS: dict[str, dict[str, Any]] = {
    "cswin_tiny": dict(depths=(1, 2, 21, 1), drop_path_rate=0.2, **SMALL),
    "cswin_small": dict(depths=(2, 4, 32, 2), drop_path_rate=0.4, **SMALL),
    "cswin_base": dict(
        embed_dims=(96, 192, 384, 768), depths=(2, 4, 32, 2), num_heads=(4, 8, 16, 32), drop_path_rate=0.5
    ),
}
SPLIT_SIZES_384 = (1, 2, 12, 0)  # of the one model that was published for 384 pixels


_cfg = partial(
    weights_cfg,
    first_conv="stages.0.embed.proj",
    paper_ids="arXiv:2107.00652",
    paper_name="CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows",
    crop_pct=0.9,
    license="mit",
    origin_url="https://github.com/microsoft/CSWin-Transformer",  # its releases; none of them is on a hub
)

default_cfgs = generate_default_cfgs(
    {
        "cswin_tiny.msft_in1k": _cfg(),
        "cswin_small.msft_in1k": _cfg(),
        "cswin_base.msft_in1k": _cfg(),
        "cswin_base.msft_in1k_384": _cfg(384, crop_pct=1.0),
    }
)

# ImageNet-1k top-1 in percent, from the paper; the authors' page has 82.8 for tiny and 85.5 at 384 pixels.
PUBLISHED_TOP1 = {
    "cswin_tiny.msft_in1k": 82.7,
    "cswin_small.msft_in1k": 83.6,
    "cswin_base.msft_in1k": 84.2,
    "cswin_base.msft_in1k_384": 85.4,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"))
    if cfg.tag == "msft_in1k_384":
        kwargs = dict(dict(split_sizes=SPLIT_SIZES_384), **kwargs)
    if kwargs.get("embed") == "ce":
        kwargs = with_first_conv(kwargs, "stages.0.embed.units.0.conv")
    return build(CSWin, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, 2, 3))


register_variants(
    _create,
    {
        "cswin_tiny": "CSWin-T, 22.3 M parameters.",
        "cswin_small": "CSWin-S, 34.6 M parameters.",
        "cswin_base": "CSWin-B, 77.4 M parameters.",
    },
)
