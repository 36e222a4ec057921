"""CeiT: Incorporating Convolution Designs into Visual Transformers (Yuan et al., ICCV 2021, arXiv 2103.11816).

Paper to code:
    section 3.2, eq. 4         Image-to-Tokens (I2T)                       Image2Tokens
    section 3.3, eqs. 5-11     Locally-enhanced Feed-Forward (figure 3)    LeFF
    section 3.4, figure 4      Layer-wise Class-token Attention            LCA
    figure 2                   encoder block                               Block
    table 1                    CeiT-T, CeiT-S, CeiT-B                      VARIANTS
    tables 5 and 7, sec. 4.4   the arguments i2t_*, leff_* and lca of CeiT

Defaults are those of the released code, which loads its checkpoints. Where it differs from the paper:
    - the stem has 64 channels, not 32 (only 64 gives the published parameter counts) and no activation;
    - blocks are pre-norm, equation 1 is post-norm; attention is scaled by the width of a head, not by C;
    - LeFF returns the class token as it came, but what comes is LN(x), so its update is x + LN(x);
    - LeFF has no GELU behind its last BatchNorm, equation 10 has one (`leff_final_act=True`);
    - LCA adds a learned embedding per layer, which the paper does not mention, and never drops its path.
With i2t_layers="none", leff_kernel=0, leff_norm=False and lca=False the network is DeiT.
`ceit_nano` is Weft's own, for pictures of 28 to 96 pixels.
"""

from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp, calculate_drop_path_rates, trunc_normal_
from timm.models import checkpoint, generate_default_cfgs
from torch import Tensor, nn

from weft.errors import check_choice, check_positive, check_rates, check_ratio, check_switch, check_widths
from weft.models.base import HybridModel
from weft.models.layers import (
    ConvNorm,
    LayerNorm,
    LinearNorm,
    MaxPool,
    PatchConv,
    PointwiseConv,
    PositionEmbedding,
    StochasticDepth,
    add_branch,
    grid_size,
    image_to_map,
    join,
    pad_to_multiple,
    part,
    present,
)
from weft.models.variants import build, register_variants, weights_cfg, with_first_conv

__all__ = ["CeiT"]

I2T_LAYERS = {  # the rows of table 5: kernel and stride of each layer
    "none": (),
    "k7s4": ((7, 4),),
    "k5s4": ((5, 4),),
    "k3s2+k3s2": ((3, 2), (3, 2)),
    "k7s2+maxpool": ((7, 2), (3, 2)),
}
LEFF_KERNELS = (0, 1, 3, 5)
STEM_STRIDES = (1, 2, 4)
PATCH = 4  # the projection turns 4 x 4 positions of the stem into one token
LN_EPS = 1e-6


class Image2Tokens(nn.Module):
    """I2T, eq. 4: MaxPool(BN(Conv(x))). (B, H, W, C_in) -> (B, H / stride, W / stride, D).

    A `stride` below the 4 of the paper is reached by giving up the strides of the first layers first.
    """

    def __init__(self, layers: str, norm: bool, in_chs: int, channels: int, stride: int, **dd: Any):
        super().__init__()
        self.convs = nn.Sequential()
        self.pool = nn.Identity()
        surplus = 4 // stride
        for kernel, full_stride in I2T_LAYERS[layers]:
            layer_stride = max(full_stride // surplus, 1)
            surplus //= full_stride // layer_stride
            if layers.endswith("maxpool") and len(self.convs) == 1:
                self.pool = MaxPool(layer_stride)
            else:
                self.convs.append(ConvNorm(in_chs, channels, kernel, layer_stride, kernel // 2, norm=norm, **dd))
                in_chs = channels

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.convs(x))


class LeFF(nn.Module):
    """Locally-enhanced Feed-Forward network on a (B, H, W, C) map; the class token passes by (eq. 11).

    Without the depth-wise convolution (`kernel=0`) nothing is local any more: it is then the ordinary feed-forward
    network, through which the class token goes as well.
    """

    def __init__(self, dim: int, hidden: int, kernel: int, norm: bool, final_act: bool, **dd: Any):
        super().__init__()
        linear = PointwiseConv if kernel > 0 else nn.Linear  # the ordinary network is initialised as one
        self.linear1 = LinearNorm(linear(dim, hidden, **dd), norm=norm, act="gelu", **dd)
        self.dwconv = None
        if kernel > 0:
            self.dwconv = ConvNorm(
                hidden, hidden, kernel, padding=kernel // 2, groups=hidden, bias=True, norm=norm, act="gelu", **dd
            )
        self.linear2 = LinearNorm(linear(hidden, dim, **dd), norm=norm, act="gelu" if final_act else "none", **dd)

    def forward(self, x: Tensor, cls: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        if self.dwconv is None:
            tokens = join(cls, x).unsqueeze(2)  # (B, 1 + H*W, 1, C), a map one token wide
            return part(self.linear2(self.linear1(tokens)).squeeze(2), x, cls)
        x = self.linear1(x.contiguous())  # eq. 6: (B, H, W, e C); the map comes as a part of all tokens
        x = self.dwconv(x)  # eq. 8; the map is its own SpatialRestore and Flatten, eqs. 7 and 9
        return self.linear2(x), cls  # eq. 10: (B, H, W, C)


class Block(nn.Module):
    """Encoder block: MSA over all tokens, then LeFF."""

    def __init__(
        self, dim: int, num_heads: int, leff: LeFF, attn_drop: float, proj_drop: float, drop_path: float, **dd: Any
    ):
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=LN_EPS, **dd)
        self.attn = Attention(dim, num_heads, qkv_bias=True, attn_drop=attn_drop, proj_drop=proj_drop, **dd)
        self.norm2 = LayerNorm(dim, eps=LN_EPS, **dd)
        self.leff = leff
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, cls: Tensor) -> tuple[Tensor, Tensor]:
        tokens = join(cls, x)  # (B, 1 + H*W, C)
        y = self.attn(self.norm1(tokens))
        tokens = add_branch(tokens, y, self.drop_path(y))
        z, z_cls = part(self.norm2(tokens), x, cls)
        local, new_cls = self.leff(z, present(z_cls))
        y = join(new_cls, local)
        x, new_cls = part(add_branch(tokens, y, self.drop_path(y)), x, cls)
        return x, present(new_cls)


class LCA(nn.Module):
    """Layer-wise Class-token Attention: the last class token asks those of all layers. (B, L, C) -> (B, 1, C)."""

    def __init__(self, dim: int, depth: int, num_heads: int, hidden: int, **dd: Any):
        super().__init__()
        self.num_heads = num_heads
        self.pos_layer_embed = nn.Parameter(torch.empty(1, depth, dim, **dd))
        self.norm1 = nn.LayerNorm(dim, eps=LN_EPS, **dd)
        self.q = nn.Linear(dim, dim, **dd)
        self.kv = nn.Linear(dim, 2 * dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=LN_EPS, **dd)
        self.feedforward = Mlp(dim, hidden, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.pos_layer_embed)

    def forward(self, x: Tensor) -> Tensor:
        batch, depth, dim = x.shape
        x = x + self.pos_layer_embed
        z = self.norm1(x)
        q = self.q(z[:, -1:]).view(batch, 1, self.num_heads, dim // self.num_heads).transpose(1, 2)
        kv = self.kv(z).view(batch, depth, 2, self.num_heads, dim // self.num_heads)
        kv = kv.permute(2, 0, 3, 1, 4)  # (2, B, heads, L, C / heads)
        k, v = kv.unbind(0)
        z = F.scaled_dot_product_attention(q, k, v)
        last = x[:, -1:] + self.proj(z.transpose(1, 2).flatten(2))  # (B, 1, C)
        return last + self.feedforward(self.norm2(last))


class CeiT(HybridModel):
    """Convolution-enhanced image Transformer: a flat transformer at stride 16 behind a convolutional stem at stride 4.

    Args:
        img_size: default picture size, the grid of the position embedding; it is resized to other sizes.
        global_pool: "token", or "avg", "max", "avgmax" over the map, or "" for none.
        embed_dim, depth, num_heads, mlp_ratio: width, blocks, heads, and e, the expansion of LeFF and of LCA's MLP.
        stem_stride: stride of the stem, 4, or 2 or 1 to keep a useful grid on small pictures: a token covers
            4 * stem_stride pixels. Weights keep their shapes, except for i2t_layers="none".
        i2t_layers: "k7s2+maxpool", or "k7s4", "k5s4", "k3s2+k3s2", or "none" for DeiT's 16 x 16 patches (table 5).
        i2t_norm, i2t_channels: BatchNorm and width of the stem (table 5).
        leff_kernel: 3, or 1, 5, or 0 for no depth-wise convolution (table 7).
        leff_norm: BatchNorm in LeFF (table 7). leff_final_act: the last GELU of equation 10.
        lca: Layer-wise Class-token Attention, or else the class token of the last block.
        drop_rate: dropout before the classifier. pos_drop_rate: behind the position embedding.
        proj_drop_rate, attn_drop_rate: of the attention.
        drop_path_rate: stochastic depth of the last block; grows linearly over the blocks.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        stem_stride: int = 4,
        i2t_layers: str = "k7s2+maxpool",
        i2t_norm: bool = True,
        i2t_channels: int = 64,
        leff_kernel: int = 3,
        leff_norm: bool = True,
        leff_final_act: bool = False,
        lca: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_widths(embed_dim, num_heads)
        check_switch(i2t_norm=i2t_norm, leff_norm=leff_norm, leff_final_act=leff_final_act, lca=lca)
        check_rates(drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate)
        check_rates(attn_drop_rate=attn_drop_rate, drop_path_rate=drop_path_rate)
        check_positive(in_chans=in_chans, i2t_channels=i2t_channels, depth=depth)
        check_ratio(mlp_ratio=mlp_ratio)
        check_choice("stem_stride", stem_stride, STEM_STRIDES)
        check_choice("i2t_layers", i2t_layers, I2T_LAYERS)
        check_choice("leff_kernel", leff_kernel, LEFF_KERNELS)
        reduction = PATCH * stem_stride
        grid = grid_size(img_size, reduction)
        hidden = int(embed_dim * mlp_ratio)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, depth)

        self.in_chans, self.depth = in_chans, depth
        self.stem = None
        self.feature_info = []
        if i2t_layers != "none":
            self.stem = Image2Tokens(i2t_layers, i2t_norm, in_chans, i2t_channels, stem_stride, **dd)
            self.feature_info.append(dict(num_chs=i2t_channels, reduction=stem_stride, module="stem"))
        self.patch = reduction if self.stem is None else PATCH
        self.proj = PatchConv(in_chans if self.stem is None else i2t_channels, embed_dim, self.patch, **dd)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.pos_embed = PositionEmbedding(grid, embed_dim, class_token=True, **dd)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                LeFF(embed_dim, hidden, leff_kernel, leff_norm, leff_final_act, **dd),
                attn_drop_rate,
                proj_drop_rate,
                drop_path,
                **dd,
            )
            for drop_path in drop_paths
        )
        self.feature_info += [dict(num_chs=embed_dim, reduction=reduction, module=f"blocks.{i}") for i in range(depth)]
        self.lca = LCA(embed_dim, depth, num_heads, hidden, **dd) if lca else None
        norm = nn.LayerNorm(embed_dim, eps=LN_EPS, **dd)
        self.make_head(embed_dim, num_classes, global_pool, True, drop_rate, norm, **dd)
        self.reset_parameters()
        self.init_weights(needs_reset=False)

    def reset_parameters(self) -> None:
        trunc_normal_(self.cls_token, std=0.02)

    def forward_trunk(
        self, x: Tensor, take: Optional[list[int]] = None, last: Optional[int] = None
    ) -> tuple[Tensor, Optional[Tensor], list[Tensor]]:
        maps: list[Tensor] = []
        x = image_to_map(x)
        first_block = 0
        if self.stem is not None:
            x = self.stem(x)
            if take is not None and 0 in take:
                maps.append(x)
            first_block = 1
            if last is not None and last == 0:
                return x, None, maps
        x = self.proj(pad_to_multiple(x, self.patch))  # (B, H, W, C)
        x, positioned = self.pos_embed(x, present(self.cls_token).expand(x.shape[0], -1, -1))
        x, cls = self.pos_drop(x), self.pos_drop(present(positioned))

        class_tokens: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            level = first_block + i
            if last is None or level <= last:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x, cls = checkpoint(block, x, cls)
                else:
                    x, cls = block(x, cls)
                class_tokens.append(cls)
                if take is not None and level in take:
                    maps.append(x)
        if self.lca is not None and len(class_tokens) == self.depth:
            cls = self.lca(torch.cat(class_tokens, dim=1))
        return x, cls, maps

    def prune_levels(self, last: int, keep_head: bool) -> None:
        self.blocks = self.blocks[: last + 1 if self.stem is None else last]
        if not keep_head or len(self.blocks) < self.depth:
            self.lca = None  # reads the class tokens of all blocks, for the head
        if not self.blocks:  # the stem alone
            self.proj, self.pos_embed, self.cls_token = nn.Identity(), nn.Identity(), None

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^(?:stem|proj|cls_token|pos_embed)",
            blocks=[(r"^blocks\.(\d+)", None), (r"^(?:lca|norm)", (99999,))],
        )

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed.*"}


# Variants -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "ceit_nano": dict(embed_dim=96, depth=9, num_heads=3, i2t_channels=32, stem_stride=1, drop_path_rate=0.1),
    "ceit_tiny": dict(embed_dim=192, depth=12, num_heads=3, drop_path_rate=0.1),
    "ceit_small": dict(embed_dim=384, depth=12, num_heads=6, drop_path_rate=0.1),
    "ceit_base": dict(embed_dim=768, depth=12, num_heads=12, drop_path_rate=0.1),
}


_cfg = partial(
    weights_cfg,
    stride=16,
    first_conv="stem.convs.0.conv",
    paper_ids="arXiv:2103.11816",
    paper_name="Incorporating Convolution Designs into Visual Transformers",
)

OFFICIAL = "https://github.com/coeusguo/ceit"  # one archive of .pth files; none of them is on a hub

default_cfgs = generate_default_cfgs(
    {
        "ceit_nano": _cfg(64, stride=4),
        "ceit_tiny.in1k": _cfg(origin_url=OFFICIAL),
        "ceit_tiny.in1k_384": _cfg(384, origin_url=OFFICIAL),
        "ceit_small.in1k": _cfg(origin_url=OFFICIAL),
        "ceit_small.in1k_384": _cfg(384, origin_url=OFFICIAL),
        "ceit_base.in1k": _cfg(origin_url=OFFICIAL),
    }
)

# ImageNet-1k top-1 in percent, tables 4 and 8 of the paper (base: after 100 epochs).
PUBLISHED_TOP1 = {
    "ceit_tiny.in1k": 76.4,
    "ceit_tiny.in1k_384": 78.8,
    "ceit_small.in1k": 82.0,
    "ceit_small.in1k_384": 83.3,
    "ceit_base.in1k": 81.8,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    defaults = VARIANTS[variant]
    third = kwargs.get("depth", defaults["depth"]) // 3
    out_indices = (0, -1 - 2 * third, -1 - third, -1)  # the stem, and the ends of the thirds of the blocks
    if kwargs.get("i2t_layers") == "none":
        kwargs = with_first_conv(kwargs, "proj")
    return build(CeiT, variant, pretrained, defaults, kwargs, out_indices)


register_variants(
    _create,
    {
        "ceit_nano": "CeiT for small pictures, Weft's own: 1.3 M parameters, a token every 4 pixels.",
        "ceit_tiny": "CeiT-T, 6.4 M parameters.",
        "ceit_small": "CeiT-S, 24.2 M parameters.",
        "ceit_base": "CeiT-B, 94.4 M parameters.",
    },
)
