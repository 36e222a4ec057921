"""A backbone, a head that labels its pixels, and in training a second head that helps the first."""

from typing import Any

from torch import Tensor, nn

from weft.heads.features import Features, prefixed

__all__ = ["Segmenter"]


class Segmenter(nn.Module):
    """(B, C, H, W) pictures -> {"out": (B, K, ceil(H / 4), ceil(W / 4)) logits}.

    In training there is "aux" as well, the coarser logits of the auxiliary head, where there is one.

    Args:
        backbone: gives the maps. head: reads them all. aux: reads the map at stride 16.
    """

    def __init__(self, backbone: Features, head: nn.Module, aux: nn.Module | None = None):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.aux = aux

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.backbone(x)
        logits = {"out": self.head(maps)}
        if self.aux is not None and self.training:
            logits["aux"] = self.aux(maps[2])
        return logits

    def get_classifier(self) -> list[nn.Module]:
        """All that weights of a classifier do not hold."""
        new = [self.backbone.norms, self.backbone.makers, self.head, self.aux]
        return [module for module in new if module is not None]

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return prefixed("backbone", self.backbone.group_matcher(coarse))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)
