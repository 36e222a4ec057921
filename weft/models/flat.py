"""Networks that first reduce the picture in three steps and then keep one resolution: ViTAE and T2T-ViT."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from timm.layers import trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from weft.models.base import HybridModel
from weft.models.layers import PositionEmbedding, image_to_map


class FlatModel(HybridModel):
    """Reductions, class token and positions where a family has them, then blocks on the map and the class token.

    Levels 0 and 1 are the first two reductions; the third belongs to the first block, level 2.
    """

    def make_trunk(
        self,
        reductions: Sequence[nn.Module],
        widths: Sequence[int],
        stem_stride: int,
        cls_token: nn.Parameter | None,
        pos_embed: PositionEmbedding | None,
        pos_drop: float,
        blocks: Sequence[nn.Module],
    ) -> None:
        """`widths` are those behind the reductions, `stem_stride` is the stride of the first; the others have 2."""
        self.reductions = nn.ModuleList(reductions)
        self.cls_token = cls_token
        self.pos_embed = pos_embed
        self.pos_drop = nn.Dropout(pos_drop)
        self.blocks = nn.ModuleList(blocks)
        strides = (stem_stride, 2 * stem_stride, *[4 * stem_stride] * len(blocks))
        modules = ("reductions.0", "reductions.1", *(f"blocks.{i}" for i in range(len(blocks))))
        self.feature_info = [
            dict(num_chs=widths[min(level, 2)], reduction=stride, module=module)
            for level, (stride, module) in enumerate(zip(strides, modules, strict=True))
        ]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward_embed(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Adds class token and positions, between reductions and blocks."""
        cls = self.cls_token.expand(x.shape[0], -1, -1) if self.cls_token is not None else None
        if self.pos_embed is not None:
            x, cls = self.pos_embed(x, cls)
        if cls is not None:
            cls = self.pos_drop(cls)
        return self.pos_drop(x), cls

    def forward_trunk(
        self, x: Tensor, take: Optional[list[int]] = None, last: Optional[int] = None
    ) -> tuple[Tensor, Optional[Tensor], list[Tensor]]:
        maps: list[Tensor] = []
        x = image_to_map(x)
        for i, reduction in enumerate(self.reductions):
            if last is None or i <= last:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(reduction, x)
                else:
                    x = reduction(x)
                if take is not None and i < 2 and i in take:
                    maps.append(x)
        if last is not None and last < 2:
            return x, None, maps

        x, cls = self.forward_embed(x)
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
        self.reductions = self.reductions[: last + 1]
        self.blocks = self.blocks[: max(last - 1, 0)]
        if not self.blocks:
            self.cls_token, self.pos_embed = None, None

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^(?:reductions|cls_token|pos_embed)", blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]
        )

    def no_weight_decay(self) -> set[str]:
        return {"cls_token"}
