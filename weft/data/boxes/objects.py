"""The objects in one picture: boxes with labels and, where they are known, shapes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Objects:
    boxes: np.ndarray  # (n, 4) float32: left, top, right, bottom, in pixels of the picture as it was annotated
    labels: np.ndarray  # (n,) int64, positions in the source's classes
    crowd: np.ndarray  # (n,) bool: a region of many, neither to be learned nor to be missed
    area: np.ndarray  # (n,) float32, of the shape where there is one
    shapes: list[Any] = field(default_factory=list)  # n COCO segmentations, polygons or run lengths; or none at all
    size: tuple[int, int] | None = None  # height and width of the picture as it was annotated, where that is known

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, keep: np.ndarray) -> "Objects":
        """Those for which `keep`, (n,) bool, is true."""
        shapes = [shape for shape, kept in zip(self.shapes, keep, strict=True) if kept] if self.shapes else []
        boxes, labels, crowd, area = (column[keep] for column in (self.boxes, self.labels, self.crowd, self.area))
        return Objects(boxes, labels, crowd, area, shapes, self.size)

    @property
    def has_shapes(self) -> bool:
        return bool(self.shapes)
