"""Networks in stages, each of which shrinks the map by an embedding and then runs its blocks.

CvT and PVT carry a class token in the last stage (`TokenStage`); CETNet, Swin and CSWin have none (`MapStage`).
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from timm.layers import Mlp, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from weft.errors import WeftError, check_positive, check_widths
from weft.models.base import HybridModel
from weft.models.layers import (
    LayerNorm,
    PositionEmbedding,
    StochasticDepth,
    add_branch,
    fix_size,
    image_to_map,
    join,
    part,
)


class TransformerBlock(nn.Module):
    """Pre-norm block on a (B, H, W, C) map and, where there is one, a class token."""

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        hidden: int,
        act_layer: type[nn.Module] = nn.GELU,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
        **dd: Any,
    ):
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=norm_eps, **dd)
        self.attn = attn  # map and class token to (B, [1 +] H*W, C) tokens
        self.norm2 = LayerNorm(dim, eps=norm_eps, **dd)
        self.mlp = Mlp(dim, hidden, act_layer=act_layer, drop=proj_drop, **dd)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        tokens = join(cls, x)  # (B, [1 +] H*W, C)
        z, z_cls = part(self.norm1(tokens), x, cls)
        y = self.attn(z, z_cls)
        tokens = add_branch(tokens, y, self.drop_path(y))
        y = self.mlp(self.norm2(tokens))
        return part(add_branch(tokens, y, self.drop_path(y)), x, cls)


class MapBlock(nn.Module):
    """Pre-norm block on a (B, H, W, C) map that has no class token."""

    def __init__(self, dim: int, attn: nn.Module, hidden: int, proj_drop: float, drop_path: float, **dd: Any):
        super().__init__()
        self.norm1 = LayerNorm(dim, **dd)
        self.attn = attn  # map to map
        self.norm2 = LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, hidden, drop=proj_drop, **dd)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_residuals(x)

    def forward_residuals(self, x: Tensor) -> Tensor:
        y = self.attn(self.norm1(x))
        x = add_branch(x, y, self.drop_path(y))
        y = self.mlp(self.norm2(x))
        return add_branch(x, y, self.drop_path(y))


class TokenStage(nn.Module):
    """Embedding, class token, positions and blocks; all but embedding and blocks are optional.

    (B, H, W, C_in) -> (B, h, w, C), and the class token where the stage has one. `grid` is that of the positions, None
    for a stage without.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        dim: int,
        class_token: bool,
        grid: tuple[int, int] | None,
        drop: float,
        **dd: Any,
    ):
        super().__init__()
        self.grad_checkpointing = False
        self.embed = embed
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **dd)) if class_token else None
        self.pos_embed = PositionEmbedding(grid, dim, class_token, **dd) if grid is not None else None
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward_embed(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        x = self.embed(x)
        cls = self.cls_token.expand(x.shape[0], -1, -1) if self.cls_token is not None else None
        if self.pos_embed is not None:
            x, cls = self.pos_embed(x, cls)
        if cls is not None:
            cls = self.drop(cls)
        return self.drop(x), cls

    def forward(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        x, cls = self.forward_embed(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x, cls = checkpoint(block, x, cls)
            else:
                x, cls = block(x, cls)
        return x, cls


class MapStage(nn.Module):
    """Embedding and blocks of a stage that has a map and nothing else. (B, H, W, C_in) -> (B, h, w, C), None.

    Its blocks cut windows, of which torch.compile must know the number.
    """

    def __init__(self, embed: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.grad_checkpointing = False
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        x = self.embed(fix_size(x))
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():  # noqa: SIM108  TorchScript
                x = checkpoint(block, x)
            else:
                x = block(x)
        return x, None


class HierarchicalModel(HybridModel):
    """A model made of stages, which a family appends with `add_stage`; each is one level of `feature_info`."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        self.feature_info = []

    def add_stage(self, stage: TokenStage | MapStage, dim: int, reduction: int) -> None:
        self.feature_info.append(dict(num_chs=dim, reduction=reduction, module=f"stages.{len(self.stages)}"))
        self.stages.append(stage)

    def forward_trunk(
        self, x: Tensor, take: Optional[list[int]] = None, last: Optional[int] = None
    ) -> tuple[Tensor, Optional[Tensor], list[Tensor]]:
        x = image_to_map(x)
        cls: Optional[Tensor] = None
        maps: list[Tensor] = []
        for i, stage in enumerate(self.stages):
            if last is None or i <= last:
                x, cls = stage(x)
                if take is not None and i in take:
                    maps.append(x)
        return x, cls, maps

    def prune_levels(self, last: int, keep_head: bool) -> None:
        self.stages = self.stages[: last + 1]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^stages\.(\d+)", (0,)),  # the embedding of a later stage goes with its first block
            (r"^norm", (99999,)),
        ]
        return dict(stem=r"^stages\.0\.(?:embed|pos_embed)", blocks=r"^stages\.(\d+)" if coarse else blocks)

    def no_weight_decay(self) -> set[str]:
        return {"*.cls_token", "*.pos_embed.*", "*.relative_position_bias_table"}


def spread(name: str, value: Any, count: int) -> list[Any]:
    """One value `count` times, or a list of `count` values as it is."""
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise WeftError(f"{name}={value!r} has {len(values)} entries; give one value, or a list of {count}.")
    return values


def doubled_widths(embed_dim: int, num_heads: Sequence[int]) -> list[int]:
    """The widths D, 2 D, 4 D, ... of the stages, each of which its number of heads must divide."""
    dims = [embed_dim * 2**i for i in range(len(num_heads))]
    check_heads(dims, num_heads)
    return dims


def check_heads(dims: Sequence[int], num_heads: Sequence[int]) -> None:
    """Raises where the number of heads of a stage does not divide its width."""
    for dim, heads in zip(dims, num_heads, strict=True):
        check_widths(dim, heads)


def check_stages(count: int, **lists: Sequence[Any]) -> None:
    """Raises for a list without one entry per stage."""
    for name, values in lists.items():
        if not isinstance(values, list | tuple) or len(values) != count:
            raise WeftError(f"{name}={values!r} must be a list with one entry for each of the {count} stages.")
        if name == "depths":
            for depth in values:
                check_positive(depths=depth)
