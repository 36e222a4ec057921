"""Labels, masks and objects of one source, counted in the classes of another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weft.data.sources.source import Source
from weft.errors import WeftError, did_you_mean
from weft.words import some


def relabelled(source: Source, classes: Sequence[str], positions: np.ndarray) -> np.ndarray:
    """The labels at `positions`, counted in `classes`, which must have every class that occurs there."""
    labels = source.labels[positions]
    used = np.flatnonzero(labels.any(axis=0)) if source.multilabel else np.unique(labels)
    position = {name: i for i, name in enumerate(classes)}
    _check_known(source, [source.classes[i] for i in used], classes)
    if not source.multilabel:
        return np.array([position.get(name, -1) for name in source.classes])[labels]
    wide = np.zeros((len(labels), len(classes)), bool)
    wide[:, [position[source.classes[i]] for i in used]] = labels[:, used]
    return wide


def in_classes(source: Source, classes: Sequence[str]) -> Source:
    """A source of masks or objects that counts in `classes`, which must have every one of its own."""
    _check_known(source, source.classes, classes)
    if source.classes == list(classes):
        return source
    places = [list(classes).index(name) for name in source.classes]
    labels = source.labels
    if source.multilabel:
        labels = np.zeros((len(source), len(classes)), bool)
        labels[:, places] = source.labels
    return replace(source, classes=list(classes), labels=labels, targets=RenamedTargets(source.targets, places))


def _check_known(source: Source, used: Sequence[str], classes: Sequence[str]) -> None:
    known = set(classes)
    if unknown := [name for name in used if name not in known]:
        hint = did_you_mean(unknown[0], classes)
        raise WeftError(f"{source.root} has classes that training does not have: {some(unknown)}.{hint}")


class RenamedTargets:
    """Masks or objects whose class i is class `places[i]` of another list."""

    def __init__(self, targets: Any, places: Sequence[int]) -> None:
        self.targets = targets
        self.table = np.arange(max(256, len(places)))  # what is no class, such as the value to ignore, stays
        self.table[: len(places)] = places

    def __call__(self, index: int) -> Any:
        target = self.targets(index)
        if isinstance(target, np.ndarray):
            return self.table.astype(np.uint8)[target]
        return replace(target, labels=self.table[target.labels])

    def sizes(self, positions: range) -> bytes:
        return self.table.tobytes() + self.targets.sizes(positions)

    @property
    def has_shapes(self) -> bool:
        return self.targets.has_shapes
