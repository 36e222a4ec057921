"""T2T-ViT: Tokens-to-Token ViT (Yuan et al., ICCV 2021, arXiv 2101.11986). The baseline that ViTAE is measured against.

Paper to code:
    Tokens-to-Token module, soft split        T2T, SoftSplit (in performer.py)
    its token transformer, a Performer        TokenTransformer, PerformerAttention (in performer.py)
    the "deep-narrow" backbone                hierarchy.TransformerBlock, T2TViT
    T2T-ViT-7, T2T-ViT-14                     VARIANTS

Defaults are those of the released code, which loads its checkpoints:
    - q, k and v have no bias in the backbone, but have one in the token transformers;
    - the positions are the fixed sinusoids of the flat index for `img_size`; other sizes get them by bicubic resizing,
      as the released code does when it fine-tunes. So they are stored, although nothing learns them;
    - they and the Performer's matrices are buffers here and parameters that are not trained there.
"""

from typing import Any, Optional

import torch
from timm.layers import Attention, calculate_drop_path_rates, trunc_normal_
from timm.models import checkpoint, generate_default_cfgs, register_model
from torch import Tensor, nn

from weft.errors import check_positive, check_rates, check_ratio, check_widths
from weft.models.base import HybridModel, build
from weft.models.hierarchy import TransformerBlock
from weft.models.layers import (
    PositionEmbedding,
    grid_size,
    image_to_map,
    join,
    present,
)
from weft.models.performer import PerformerAttention, SoftSplit, TokenTransformer

__all__ = ["T2TViT"]

REDUCTION = 16


class T2T(nn.Module):
    """One Tokens-to-Token step: soft split and token transformer, (B, H, W, C_in) -> (B, H / stride, W / stride, C)."""

    def __init__(self, in_chs: int, dim: int, kernel: int, stride: int, drop: float, **dd: Any):
        super().__init__()
        self.split = SoftSplit(kernel, stride)
        self.transformer = TokenTransformer(in_chs * kernel**2, dim, PerformerAttention(dim, **dd), drop, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(self.split(x))


class TokenAttention(nn.Module):
    """Attention over the map and the class token as one sequence; as in the released code q, k and v have no bias."""

    def __init__(self, dim: int, num_heads: int, attn_drop: float, proj_drop: float, **dd: Any):
        super().__init__()
        self.attn = Attention(dim, num_heads, qkv_bias=False, attn_drop=attn_drop, proj_drop=proj_drop, **dd)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> Tensor:
        return self.attn(join(cls, x))  # (B, 1 + H*W, C)


class T2TViT(HybridModel):
    """Two Tokens-to-Token steps to strides 4 and 8, a last soft split to 16, then a plain transformer.

    Args:
        img_size: default picture size, the grid of the fixed positions; they are resized to other sizes.
        global_pool: "token", or "avg", "max", "avgmax" over the map, or "" for none.
        embed_dim, depth, num_heads, mlp_ratio: of the transformer. token_dim: width of the two steps.
        drop_rate: dropout before the classifier. pos_drop_rate: behind the positions.
        proj_drop_rate, attn_drop_rate: in the blocks.
        token_drop_rate: dropout in the two steps; the released code has 0.1 whatever the other rates are.
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
        check_rates(drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate)
        check_rates(attn_drop_rate=attn_drop_rate, token_drop_rate=token_drop_rate, drop_path_rate=drop_path_rate)
        drop_paths: Any = calculate_drop_path_rates(drop_path_rate, depth)

        self.in_chans = in_chans
        self.t2t = nn.ModuleList(
            T2T(in_chs, token_dim, kernel, stride, token_drop_rate, **dd)
            for in_chs, kernel, stride in ((in_chans, 7, 4), (token_dim, 3, 2))
        )
        self.split = SoftSplit(3, 2)
        self.proj = nn.Linear(9 * token_dim, embed_dim, **dd)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.pos_embed = PositionEmbedding(grid_size(img_size, REDUCTION), embed_dim, True, sinusoid=True, **dd)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                embed_dim,
                TokenAttention(embed_dim, num_heads, attn_drop_rate, proj_drop_rate, **dd),
                int(embed_dim * mlp_ratio),
                proj_drop=proj_drop_rate,
                drop_path=drop_path,
                **dd,
            )
            for drop_path in drop_paths
        )
        self.feature_info = [dict(num_chs=token_dim, reduction=4 * (i + 1), module=f"t2t.{i}") for i in range(2)]
        self.feature_info += [dict(num_chs=embed_dim, reduction=REDUCTION, module=f"blocks.{i}") for i in range(depth)]
        self.make_head(embed_dim, num_classes, global_pool, True, drop_rate, nn.LayerNorm(embed_dim, **dd), **dd)
        self.reset_parameters()
        self.init_weights(needs_reset=False)

    def reset_parameters(self) -> None:
        trunc_normal_(self.cls_token, std=0.02)

    def forward_trunk(
        self, x: Tensor, take: Optional[list[int]] = None, last: Optional[int] = None
    ) -> tuple[Tensor, Optional[Tensor], list[Tensor]]:
        """Levels 0 and 1 are the two Tokens-to-Token steps, the others the blocks."""
        maps: list[Tensor] = []
        x = image_to_map(x)
        for i, step in enumerate(self.t2t):
            if last is None or i <= last:
                if self.grad_checkpointing and not torch.jit.is_scripting():  # noqa: SIM108  TorchScript needs the if
                    x = checkpoint(step, x)
                else:
                    x = step(x)
                if take is not None and i in take:
                    maps.append(x)
        if last is not None and last < 2:
            return x, None, maps

        x = self.proj(self.split(x))  # (B, H, W, C)
        x, positioned = self.pos_embed(x, present(self.cls_token).expand(x.shape[0], -1, -1))
        x = self.pos_drop(x)
        cls: Optional[Tensor] = self.pos_drop(present(positioned))
        for i, block in enumerate(self.blocks):
            if last is None or 2 + i <= last:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x, cls = checkpoint(block, x, cls)
                else:
                    x, cls = block(x, cls)
                if take is not None and 2 + i in take:
                    maps.append(x)
        return x, cls, maps

    def prune_levels(self, last: int, keep_head: bool) -> None:
        self.t2t = self.t2t[: last + 1]
        self.blocks = self.blocks[: max(last - 1, 0)]
        if not self.blocks:
            self.proj, self.pos_embed, self.cls_token = nn.Identity(), nn.Identity(), None

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(stem=r"^(?:t2t|proj|cls_token|pos_embed)", blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))])

    def no_weight_decay(self) -> set[str]:
        return {"cls_token"}


# Variants -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "t2t_vit_7": dict(drop_path_rate=0.1),
    "t2t_vit_14": dict(embed_dim=384, depth=14, num_heads=6, mlp_ratio=3.0, drop_path_rate=0.1),
}


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return dict(
        input_size=(3, 224, 224),
        pool_size=(14, 14),
        crop_pct=0.9,
        interpolation="bicubic",
        first_conv=(),  # the picture is read by a linear layer, which timm cannot adapt to other channels
        classifier="head",
        license="bsd-3-clause-clear",
        paper_ids="arXiv:2101.11986",
        paper_name="Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet",
        **kwargs,
    )


OFFICIAL = "https://github.com/yitu-opensource/T2T-ViT"  # .pth.tar files; none of them is on a hub

default_cfgs = generate_default_cfgs(
    {
        "t2t_vit_7.in1k": _cfg(origin_url=OFFICIAL),
        "t2t_vit_14.in1k": _cfg(origin_url=OFFICIAL),
    }
)

# ImageNet-1k top-1 in percent, as the names of the released files have it (an older README has 71.2 for T2T-ViT-7).
PUBLISHED_TOP1 = {"t2t_vit_7.in1k": 71.7, "t2t_vit_14.in1k": 81.5}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    return build(T2TViT, variant, pretrained, VARIANTS[variant], kwargs, (0, 1, -1))


@register_model
def t2t_vit_7(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """T2T-ViT-7, 4.3 M parameters."""
    return _create("t2t_vit_7", pretrained, kwargs)


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """T2T-ViT-14, 21.5 M parameters."""
    return _create("t2t_vit_14", pretrained, kwargs)
