"""Amounts of what the training pictures show, from a sample that is the same each time.

A run derives class weights and anchors from them: they must depend neither on pictures that test it nor on the clock.
"""

from dataclasses import replace

import numpy as np

from weft.data.check.findings import DataReport, quantiles
from weft.data.read import BadPicture
from weft.data.sources.source import Source
from weft.data.targets import MASKS, OBJECTS

SAMPLE = 500  # pictures, evenly spaced


def sample(positions: np.ndarray) -> np.ndarray:
    return positions[np.linspace(0, len(positions) - 1, min(len(positions), SAMPLE)).astype(int)]


def measure_targets(source: Source, positions: np.ndarray, report: DataReport) -> DataReport:
    """`report` with the amounts in the targets at `positions`; as it is where those are labels."""
    if source.kind not in MEASURES:
        return report
    entry, measure = MEASURES[source.kind]
    return replace(report, **{entry: measure(source, positions)})


def count_pixels(source: Source, positions: np.ndarray) -> list[int]:
    """Pixels of each class in the masks at `positions`."""
    counts = np.zeros(256, np.int64)
    for index in sample(positions):
        try:
            counts += np.bincount(source.target(int(index)).reshape(-1), minlength=256)
        except (BadPicture, OSError):
            continue
    return counts[: len(source.classes)].tolist()


def object_sizes(source: Source, positions: np.ndarray) -> dict[str, float]:
    """Quantiles of the root of the area of the objects at `positions`, in pixels; nothing where there are none."""
    areas = [np.zeros(0, np.float32)]
    for index in sample(positions):
        try:
            objects = source.target(int(index))
        except (BadPicture, OSError):
            continue
        areas.append(objects.area[~objects.crowd])
    sides = np.sqrt(np.concatenate(areas))
    return quantiles(sides[np.isfinite(sides)])


MEASURES = {MASKS: ("pixels", count_pixels), OBJECTS: ("object_sizes", object_sizes)}  # an entry of the report
