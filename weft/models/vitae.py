"""ViTAE: Vision Transformer Advanced by Exploring Intrinsic Inductive Bias (Xu et al., NeurIPS 2021, arXiv 2106.03348).

Paper to code:
    section 3.3, eq. 2       Pyramid Reduction Module (PRM)                  PRM
    section 3.3, eqs. 3-5    Reduction Cell (RC)                             ReductionCell
    section 3.4              Normal Cell (NC)                                NormalCell
    eqs. 4 and section 3.4   Parallel Convolutional Module (PCM)             pcm
    section 3.5, tables 1, 2 ViTAE-T, ViTAE-6M, ViTAE-13M, ViTAE-S           VARIANTS
    table 3                  the arguments dilations, rc_pcm, nc_pcm and nc_pcm_norm of ViTAE

Defaults are those of the released code, which loads its checkpoints. It is another network than the paper's; each
difference is an argument:
    - no class token, the mean over the map is classified; no position encoding, no final norm (`class_token=True,
      global_pool="token", pos_embed="sinusoid", final_norm=True` is the paper);
    - the third reduction cell is its PRM alone (`full_rc3=True`);
    - attention in the reduction cells is the Performer's, linear and with one head (`rc_attention="softmax"`, with
      `rc_heads`; the paper says "multi-head", and not how many);
    - the last reduction cell is as wide as the normal cells (`embed_dim`; the paper has tokens of width 64 behind all
      reduction cells, and does not say how they become the 256 of ViTAE-T's normal cells: here by a linear layer).
Further:
    - "Post" in table 3, a "late fusion", adds the PCM behind the FFN, that is at the end of the cell;
    - a cell without dilations has T2T-ViT's soft split for a PRM: table 3 calls its first row "the standard T2T-ViT";
    - where the width of a PRM without attention is not that of the tokens, a linear layer adapts it, as in T2T-ViT (the
      paper does not say how; its [1, 2, 3] x 3 has "4.6M" parameters, this one 4.51 M);
    - `nc_pcm_convs=2` (convolution, BatchNorm, SiLU, convolution) gives the published parameter counts of T, 6M and
      13M; text and code have three convolutions;
    - ViTAE-13M has an MLP ratio of 3, as its published counts; the code, for which no weights exist, has 2;
    - the Performer's fixed matrices are buffers here and parameters that are not trained there: 4,096 of T's 4,886,888.
`vitae_nano` is Weft's own, for pictures of 28 to 96 pixels.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from weft.errors import WeftError, check_choice, check_positive, check_rates, check_ratio, check_switch, check_widths
from weft.models.flat import FlatModel
from weft.models.hierarchy import spread
from weft.models.layers import (
    ConvNorm,
    LayerNorm,
    PositionEmbedding,
    StochasticDepth,
    add_branch,
    grid_size,
    join,
    pad_to_multiple,
    part,
    to_autocast,
    to_nchw,
    to_nhwc,
)
from weft.models.performer import PerformerAttention, SoftmaxAttention, SoftSplit, TokenTransformer
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv

__all__ = ["ViTAE"]

DILATIONS = ((1, 2, 3, 4), (1, 2, 3), (1, 2))  # table 3's "[1, 2, 3, 4] with an arrow down"
KERNELS = (7, 3, 3)
STEM_STRIDES = (1, 2, 4)
PCM_STRIDES = {4: (2, 2, 1), 2: (2, 1, 1), 1: (1, 1, 1)}
RC_ATTENTIONS = ("performer", "softmax")
NC_PCMS = ("pre", "post", "none")
NC_PCM_CONVS = (2, 3)
POSITIONS = ("none", "sinusoid")
LN_EPS = 1e-6  # of the normal cells; the reduction cells have torch's 1e-5


class PRM(nn.Module):
    """Pyramid Reduction Module, eq. 2: one strided convolution per dilation, side by side in the channels.

    (B, H, W, C_in) -> (B, H / stride, W / stride, dilations * C). If `stride` divides H and W, the padding gives all
    branches this same grid.
    """

    def __init__(self, in_chs: int, dim: int, kernel: int, stride: int, dilations: Sequence[int], **dd: Any):
        super().__init__()
        self.stride = stride
        self.dilations = list(dilations)
        self.paddings = [((kernel - 1) * d + 2 - stride) // 2 for d in dilations]
        self.convs = nn.ModuleList(
            nn.Conv2d(in_chs, dim, kernel, stride, padding, d, **dd)
            for padding, d in zip(self.paddings, dilations, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = to_nchw(to_autocast(x))  # once, where each convolution would convert the picture for itself, and keep it
        branches = [to_nhwc(conv(x)) for conv in self.convs]
        return F.gelu(torch.cat(branches, dim=-1))


def pcm(
    widths: Sequence[int], strides: Sequence[int], norms: Sequence[bool], groups: int, final_act: bool, **dd: Any
) -> nn.Sequential:
    """Parallel Convolutional Module on a (B, H, W, C) map: 3x3 convolutions, each with SiLU, some with BatchNorm."""
    acts = ["silu"] * (len(strides) - 1) + ["silu" if final_act else "none"]
    layers: list[nn.Module] = []
    for in_chs, out_chs, stride, norm, act in zip(widths[:-1], widths[1:], strides, norms, acts, strict=True):
        conv = ConvNorm(in_chs, out_chs, 3, stride, 1, groups, bias=True, norm=norm, act=act, **dd)
        layers += [conv, nn.Identity()]  # checkpoints count the activation as a layer
    return nn.Sequential(*layers)


class ReductionCell(nn.Module):
    """RC, eqs. 2 to 5: attention over what the PRM saw, beside it a PCM, then the FFN. (B, H, W, C_in) -> (B, h, w, C).

    With `attention="none"` the cell is its PRM alone.
    """

    def __init__(
        self,
        in_chs: int,
        prm_dim: int,
        dim: int,
        kernel: int,
        stride: int,
        dilations: Sequence[int],
        attention: str,
        num_heads: int,
        has_pcm: bool,
        drop: float,
        **dd: Any,
    ):
        super().__init__()
        self.stride = stride
        if dilations:
            width = prm_dim * len(dilations)
            self.prm = PRM(in_chs, prm_dim, kernel, stride, dilations, **dd)
        else:
            width = in_chs * kernel**2
            self.prm = SoftSplit(kernel, stride)
        self.proj, self.transformer, self.pcm = nn.Identity(), None, None
        if attention == "none":
            if width != dim:
                self.proj = nn.Linear(width, dim, **dd)
            return
        mixer = PerformerAttention(dim, **dd) if attention == "performer" else SoftmaxAttention(dim, num_heads)
        self.transformer = TokenTransformer(width, dim, mixer, drop, **dd)
        if has_pcm:
            widths = (in_chs, prm_dim, prm_dim, dim)
            self.pcm = pcm(widths, PCM_STRIDES[stride], (False, True, False), 1, True, **dd)

    def forward(self, x: Tensor) -> Tensor:
        # At stride 4, and at sizes that are not multiples of it, PRM and PCM would round to different grids.
        x = pad_to_multiple(x, self.stride)
        y = self.proj(self.prm(x))
        if self.transformer is not None:
            local: Optional[Tensor] = None
            if self.pcm is not None:
                local = self.pcm(x)
            y = self.transformer(y, local)
        return y


class NormalCell(nn.Module):
    """NC: attention over all tokens, beside it a PCM on the map, and the FFN. The class token passes the PCM by.

    `fusion` says where the PCM joins: "pre" in front of the FFN, "post" behind it, "none" for a cell without PCM.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        groups: int,
        fusion: str,
        pcm_norm: bool,
        pcm_convs: int,
        attn_drop: float,
        proj_drop: float,
        drop_path: float,
        **dd: Any,
    ):
        super().__init__()
        self.late = fusion == "post"
        self.pcm = None
        if fusion != "none" and pcm_convs == 2:
            self.pcm = pcm((dim, hidden, dim), (1, 1), (pcm_norm, False), groups, False, **dd)
        elif fusion != "none":
            self.pcm = pcm((dim, hidden, dim, dim), (1, 1, 1), (pcm_norm, pcm_norm, False), groups, True, **dd)
        self.norm1 = LayerNorm(dim, eps=LN_EPS, **dd)
        self.attn = Attention(dim, num_heads, qkv_bias=True, attn_drop=attn_drop, proj_drop=proj_drop, **dd)
        self.norm2 = LayerNorm(dim, eps=LN_EPS, **dd)
        self.mlp = Mlp(dim, hidden, drop=proj_drop, **dd)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        z = self.norm1(join(cls, x))  # (B, [1 +] H*W, C)
        local: Optional[Tensor] = None
        keep: Optional[Tensor] = None
        if self.pcm is not None:
            local = self.pcm(x)  # reads the map as it is, without a norm
            keep = self.drop_path(local)
        if local is not None and not self.late:
            x = add_branch(x, local, keep)
        tokens, y = join(cls, x), self.attn(z)
        tokens = add_branch(tokens, y, self.drop_path(y))
        y = self.mlp(self.norm2(tokens))
        x, cls = part(add_branch(tokens, y, self.drop_path(y)), x, cls)
        if local is not None and self.late:
            x = add_branch(x, local, keep)
        return x, cls


class ViTAE(FlatModel):
    """Three reduction cells to strides 4, 8 and 16, then normal cells.

    Args:
        img_size: default picture size; matters only with position encodings, which are resized to other sizes.
        global_pool: "avg", "max", "avgmax" over the map, or "" for none; or "token" with a class token.
        class_token, final_norm: the paper's class token, and its LayerNorm in front of the classifier.
        pos_embed: "none", or "sinusoid" for the paper's fixed positions in front of the normal cells.
        prm_dims: width of one branch of the PRM (and of the hidden layers of the PCM), one number per reduction cell.
        token_dims: width behind each reduction cell.
        embed_dim: width of the normal cells, the last of `token_dims` by default; a linear layer leads to another one.
        depth, num_heads, mlp_ratio: of the normal cells. groups: of the convolutions in their PCM.
        stem_stride: stride of the first reduction cell, 4, or 2 or 1 to keep a useful grid on small pictures: a token
            covers 4 * stem_stride pixels. Weights keep their shapes.
        dilations: the sets of the three PRMs (table 3); an empty set stands for T2T-ViT's soft split.
        rc_attention: "performer" or "softmax". rc_heads: of the latter, one number or one per reduction cell.
        full_rc3: attention, PCM and FFN in the third reduction cell as well.
        rc_pcm: PCM in the reduction cells (table 3).
        nc_pcm: the PCM of the normal cells joins "pre" or "post" the FFN, or there is "none" (table 3).
        nc_pcm_norm: BatchNorm in the PCM of the normal cells, if there is one (table 3). nc_pcm_convs: 3, or 2 for the
            shallow one.
        drop_rate: dropout before the classifier. pos_drop_rate: in front of the normal cells.
        proj_drop_rate, attn_drop_rate: in the normal cells.
        rc_drop_rate: dropout in the reduction cells; the released code has 0.1 whatever the other rates are.
        drop_path_rate: stochastic depth of the last normal cell; grows linearly over the normal cells.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        class_token: bool = False,
        pos_embed: str = "none",
        final_norm: bool = False,
        prm_dims: Sequence[int] = (64, 64, 128),
        token_dims: Sequence[int] = (64, 64, 256),
        embed_dim: Optional[int] = None,
        depth: int = 7,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        groups: int = 64,
        stem_stride: int = 4,
        dilations: Sequence[Sequence[int]] = DILATIONS,
        rc_attention: str = "performer",
        rc_heads: int | Sequence[int] = 1,
        full_rc3: bool = False,
        rc_pcm: bool = True,
        nc_pcm: str = "pre",
        nc_pcm_norm: bool = True,
        nc_pcm_convs: int = 3,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        rc_drop_rate: float = 0.1,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_cells(prm_dims=prm_dims, token_dims=token_dims, dilations=dilations)
        for prm_dim, token_dim in zip(prm_dims, token_dims, strict=True):
            check_positive(prm_dims=prm_dim, token_dims=token_dim)
        check_positive(in_chans=in_chans, depth=depth, groups=groups)
        check_ratio(mlp_ratio=mlp_ratio)
        check_switch(class_token=class_token, final_norm=final_norm, full_rc3=full_rc3, rc_pcm=rc_pcm)
        check_switch(nc_pcm_norm=nc_pcm_norm)
        check_choice("pos_embed", pos_embed, POSITIONS)
        check_choice("stem_stride", stem_stride, STEM_STRIDES)
        check_choice("rc_attention", rc_attention, RC_ATTENTIONS)
        check_choice("nc_pcm", nc_pcm, NC_PCMS)
        check_choice("nc_pcm_convs", nc_pcm_convs, NC_PCM_CONVS)
        check_rates(drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate)
        check_rates(attn_drop_rate=attn_drop_rate, rc_drop_rate=rc_drop_rate, drop_path_rate=drop_path_rate)
        heads = check_rc_heads(rc_heads, rc_attention, token_dims)
        dim = token_dims[-1] if embed_dim is None else embed_dim
        check_positive(embed_dim=dim)
        hidden = int(dim * mlp_ratio)
        check_widths(dim, num_heads)
        if nc_pcm != "none" and (dim % groups or hidden % groups):
            raise WeftError(f"groups={groups!r} does not divide the widths {dim} and {hidden} of the PCM.")
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, depth)

        self.in_chans = in_chans
        widths, strides = (in_chans, *token_dims[:-1]), (stem_stride, 2, 2)
        attentions = (rc_attention, rc_attention, rc_attention if full_rc3 else "none")
        cells = zip(widths, prm_dims, token_dims, KERNELS, strides, dilations, attentions, heads, strict=True)
        reductions: list[nn.Module] = [ReductionCell(*cell, has_pcm=rc_pcm, drop=rc_drop_rate, **dd) for cell in cells]
        if dim != token_dims[-1]:
            reductions[-1] = nn.Sequential(reductions[-1], nn.Linear(token_dims[-1], dim, **dd))
        pcm_args, drops = (groups, nc_pcm, nc_pcm_norm, nc_pcm_convs), (attn_drop_rate, proj_drop_rate)
        blocks = [NormalCell(dim, num_heads, hidden, *pcm_args, *drops, drop_path, **dd) for drop_path in drop_paths]
        grid = grid_size(img_size, 4 * stem_stride)
        cls_token = nn.Parameter(torch.empty(1, 1, dim, **dd)) if class_token else None
        has_positions = pos_embed == "sinusoid"
        positions = PositionEmbedding(grid, dim, class_token, sinusoid=True, **dd) if has_positions else None
        level_widths = (*token_dims[:-1], dim)
        self.make_trunk(reductions, level_widths, stem_stride, cls_token, positions, pos_drop_rate, blocks)
        norm = nn.LayerNorm(dim, eps=LN_EPS, **dd) if final_norm else nn.Identity()
        self.make_head(dim, num_classes, global_pool, class_token, drop_rate, norm, **dd)
        self.init_weights(needs_reset=False)


def check_rc_heads(rc_heads: Any, rc_attention: str, token_dims: Sequence[int]) -> list[int]:
    """The heads of each reduction cell, which must divide its width; the Performer has one."""
    heads = spread("rc_heads", rc_heads, 3)
    for dim, count in zip(token_dims, heads, strict=True):
        if rc_attention == "performer" and count != 1:
            raise WeftError(f"rc_heads={rc_heads!r} needs rc_attention='softmax'; the Performer has one head.")
        check_positive(rc_heads=count)
        if dim % count:
            raise WeftError(f"rc_heads={rc_heads!r} does not divide the widths {tuple(token_dims)} of the tokens.")
    return heads


def check_cells(**lists: Sequence[Any]) -> None:
    """Raises for a list without one entry per reduction cell, and for a dilation that is not a whole number."""
    for name, values in lists.items():
        if not isinstance(values, list | tuple) or len(values) != 3:
            raise WeftError(f"{name}={values!r} must be a list with one entry for each of the three reduction cells.")
    for dilations in lists["dilations"]:
        if not isinstance(dilations, list | tuple) or not all(isinstance(d, int) and d > 0 for d in dilations):
            raise WeftError(f"dilations={lists['dilations']!r} must be lists of positive whole numbers.")


# Variants -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "vitae_nano": dict(prm_dims=(32, 32, 64), token_dims=(32, 32, 128), groups=32, stem_stride=2, drop_path_rate=0.1),
    "vitae_tiny": dict(drop_path_rate=0.1),
    "vitae_6m": dict(depth=10, drop_path_rate=0.1),
    "vitae_13m": dict(
        prm_dims=(64, 64, 160), token_dims=(64, 64, 320), depth=11, num_heads=5, mlp_ratio=3.0, drop_path_rate=0.1
    ),
    "vitae_small": dict(
        prm_dims=(64, 64, 192),
        token_dims=(96, 192, 384),
        depth=14,
        num_heads=6,
        mlp_ratio=3.0,
        groups=96,
        drop_path_rate=0.1,
    ),
}


def first_convs(dilations: Sequence[Sequence[int]] = DILATIONS, rc_pcm: bool = True) -> tuple[str, ...]:
    """The convolutions that read the picture, which timm adapts to other channels: all of the PRM, one of the PCM."""
    check_cells(dilations=dilations)
    cell = "reductions.0"
    names = [f"{cell}.prm.convs.{i}" for i, _ in enumerate(dilations[0])]
    return (*names, f"{cell}.pcm.0.conv") if rc_pcm else tuple(names)


_cfg = partial(
    weights_cfg,
    stride=16,
    first_conv=first_convs(),
    paper_ids="arXiv:2106.03348",
    paper_name="ViTAE: Vision Transformer Advanced by Exploring Intrinsic Inductive Bias",
    crop_pct=0.9,
)

OFFICIAL = "https://github.com/ViTAE-Transformer/ViTAE-Transformer"  # .pth.tar files; none of them is on a hub

default_cfgs = generate_default_cfgs(
    {
        "vitae_nano": _cfg(64, stride=8),
        "vitae_tiny.in1k": _cfg(origin_url=OFFICIAL),
        "vitae_6m.in1k": _cfg(origin_url=OFFICIAL),
        "vitae_13m": _cfg(),
        "vitae_small.in1k": _cfg(origin_url=OFFICIAL),
    }
)

# ImageNet-1k top-1 in percent, table 2 of the paper.
PUBLISHED_TOP1 = {
    "vitae_tiny.in1k": 75.3,
    "vitae_6m.in1k": 77.9,
    "vitae_13m": 81.0,
    "vitae_small.in1k": 82.0,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    switches = {key: kwargs[key] for key in ("dilations", "rc_pcm") if key in kwargs}
    if switches:
        kwargs = with_first_conv(kwargs, first_convs(**switches))
    return build(ViTAE, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, -1))


register_variants(
    _create,
    {
        "vitae_nano": "ViTAE for small pictures, Weft's own: 1.4 M parameters, strides 2, 4 and 8.",
        "vitae_tiny": "ViTAE-T, 4.9 M parameters.",
        "vitae_6m": "ViTAE-6M, 6.6 M parameters.",
        "vitae_13m": "ViTAE-13M, 13.4 M parameters.",
        "vitae_small": "ViTAE-S, 24.0 M parameters.",
    },
)
