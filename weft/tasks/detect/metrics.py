"""Metrics of detection: average precision at the pictures' own size."""

from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from weft.data.boxes.objects import Objects
from weft.data.loader import Batch
from weft.tasks.detect.coco import Detections, Kind, Precision, restore


class DetectMeter:
    """Keeps what was found and what is true, on the host, masks as run lengths, until the precision is asked for.

    Objects of classes that are not `measured`, (classes,) bool, do not count as missed.
    """

    def __init__(self, classes: int, has_shapes: bool, most: int, measured: np.ndarray | None = None) -> None:
        self.classes, self.most = classes, most
        self.measured = np.ones(classes, bool) if measured is None else measured
        self.kinds: tuple[Kind, ...] = ("box", "mask") if has_shapes else ("box",)
        self.rows: dict[int, tuple[Detections, Objects, tuple[int, int]]] = {}  # by position in the source

    def update(self, answers: list[dict[str, Tensor]], batch: Batch) -> None:
        shown = [(picture.shape[1], picture.shape[2]) for picture in batch.pictures]
        found = [restore(*one) for one in zip(answers, shown, batch.sizes, strict=True)]
        truth = [objects.only(self.measured[objects.labels]) for objects in batch.labels]
        self.rows.update(zip(batch.index.tolist(), zip(found, truth, batch.sizes, strict=True), strict=True))

    def reduce(self) -> None:
        """Every process gets the rows of all."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, self.rows)
            self.rows = {index: row for part in parts for index, row in part.items()}

    def columns(self) -> tuple[list[Detections], list[Objects], list[tuple[int, int]]]:
        """Objects found, true objects and sizes, in the order of the source: of equal scores the first counts."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]

    def result(self) -> dict[str, float]:
        """`{"box_ap", "box_ap50"}` and, where there are shapes, `"mask_ap"` and `"mask_ap50"`; 0 without objects."""
        results: dict[str, float] = {}
        for kind in self.kinds:
            precision = Precision(*self.columns(), self.classes, kind, self.most)
            results |= {f"{kind}_ap": precision.ap() or 0.0, f"{kind}_ap50": precision.ap(0.5) or 0.0}
        return results
