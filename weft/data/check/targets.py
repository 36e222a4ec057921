"""What masks or boxes add to the check of a data set: one answer for both, and an empty one for labels."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.config import DataConfig
from weft.data.check.findings import Problem
from weft.data.check.scan import Progress
from weft.data.sources.source import Source

QUICK_SECONDS = 60.0  # before training; all masks of most sets, since a wrong one would spoil it


@dataclass
class Targets:
    problems: list[Problem] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # name of a picture to a reason: left out of training
    present: np.ndarray | None = None  # (N, classes) bool: what occurs in each picture
    pixels: list[int] = field(default_factory=list)  # segment: of each class
    sizes: dict[str, float] = field(default_factory=dict)  # detect: quantiles of the root of objects' areas


def look_at_targets(source: Source, config: DataConfig, quick: bool, progress: Progress | None) -> Targets:
    """Reads masks or boxes (quick: for a minute at most)."""
    if source.task == "classify":
        return Targets()
    settings: Any = dict(max_pixels=config.max_pixels, quick=quick, seconds=QUICK_SECONDS)
    settings |= dict(bad_files=config.bad_files, progress=progress)
    if source.task == "segment":
        from weft.data.check.masks import check_masks

        masks = check_masks(source, **settings)
        return Targets(masks.problems, masks.bad, masks.present, masks.pixels)
    from weft.data.check.boxes import check_boxes

    boxes = check_boxes(source, **settings)
    return Targets(boxes.problems, boxes.bad, source.labels, [], boxes.sizes)
