"""Masks or objects in the check of a data set: one answer for both, and an empty one for labels."""

from dataclasses import dataclass, field

import numpy as np

from weft.config import DataConfig
from weft.data.check.boxes import check_boxes
from weft.data.check.findings import Problem
from weft.data.check.masks import check_masks, coding_of
from weft.data.check.scan import LookLimits, Progress
from weft.data.sources.source import Source
from weft.data.targets import MASKS, OBJECTS

QUICK_SECONDS = 60.0  # before training; all masks of most sets, since a wrong one would spoil it


@dataclass
class TargetFindings:
    problems: list[Problem] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # name of a picture to a reason: left out of training
    present: np.ndarray | None = None  # (N, classes) bool: what occurs in each picture
    pixels: list[int] = field(default_factory=list)  # of each class, in masks
    sizes: dict[str, float] = field(default_factory=dict)  # quantiles of the root of objects' areas
    has_checked_classes: bool = False  # pixels tell more about classes than pictures do
    looked_at_all: bool = True  # so that a class which was not seen is not there
    mask_values: list[int] = field(default_factory=list)  # what stands for each class in the files of masks
    mask_colours: bool = False  # these are 0xRRGGBB


def look_at_targets(source: Source, config: DataConfig, quick: bool, progress: Progress | None) -> TargetFindings:
    """Reads masks or objects (quick: for a minute at most)."""
    if source.kind not in LOOKS:
        return TargetFindings()
    limits = LookLimits(config.max_pixels, quick, QUICK_SECONDS, config.bad_files, progress)
    return LOOKS[source.kind](source, limits)


def _look_at_masks(source: Source, limits: LookLimits) -> TargetFindings:
    found, coding = check_masks(source, limits), coding_of(source.targets)
    return TargetFindings(
        found.problems,
        found.bad,
        found.present,
        found.pixels,
        has_checked_classes=True,
        looked_at_all=found.looked_at == len(source),
        mask_values=coding.of_classes(len(source.classes)) if coding else [],
        mask_colours=bool(coding and coding.colours),
    )


def _look_at_objects(source: Source, limits: LookLimits) -> TargetFindings:
    found = check_boxes(source, limits)
    return TargetFindings(found.problems, found.bad, source.labels, sizes=found.sizes)


LOOKS = {MASKS: _look_at_masks, OBJECTS: _look_at_objects}
