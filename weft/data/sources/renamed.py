"""Labels, masks and objects of one source, counted in the classes of another, or of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weft.data.sources.source import Source
from weft.errors import WeftError, did_you_mean, nearest
from weft.words import listed, many, shell, some

NAMED = 5  # classes that are named in a message


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


def match_classes(
    source: Source, positions: np.ndarray, classes: Sequence[str], renamed: Mapping[str, str]
) -> tuple[Source, np.ndarray, list[str]]:
    """A source that counts in a model's `classes`, those of its `positions` that can be measured, and what to say.

    Classes are the same where their names are, or where `renamed` says what a name of the source is called by the
    model. Pictures of other classes are left out; of masks the pixels, of objects these objects.
    """
    _check_renamed(source, classes, renamed)
    place = {name: i for i, name in enumerate(classes)}
    places = np.array([place.get(renamed.get(name, name), -1) for name in source.classes])
    used = _used(source, positions)
    unknown = [source.classes[i] for i in used if places[i] < 0]
    if len(unknown) == len(used):
        _check_known(source, unknown, classes)
    notes = [f"{name!r} counts as {new!r}." for name, new in renamed.items()]
    if source.labels.ndim == 2:
        labels = np.zeros((len(source), len(classes)), bool)
        for column, to in enumerate(places):
            if to >= 0:
                labels[:, to] |= source.labels[:, column]
    else:
        labels = source.labels if source.kind.dense else places[source.labels]
    kept = positions if source.labels.ndim == 2 or source.kind.dense else positions[labels[positions] >= 0]
    if unknown:
        what = many(len(positions) - len(kept), "picture") if len(kept) < len(positions) else "What is"
        notes.append(f"{what} of classes that the model does not have, left out: {_with_hints(unknown, classes)}.")
    if absent := [name for i, name in enumerate(classes) if i not in set(places[used].tolist())]:
        notes.append(f"The model also knows {some(absent)}, of which there is nothing here.")
    targets = source.targets and RenamedTargets(source.targets, places.tolist())
    return replace(source, classes=list(classes), labels=labels, targets=targets), kept, notes


def _used(source: Source, positions: np.ndarray) -> list[int]:
    """The classes that occur at `positions`; of masks, which are not read, all."""
    if source.labels.ndim == 2:
        return np.flatnonzero(source.labels[positions].any(axis=0)).tolist()
    return list(range(len(source.classes))) if source.kind.dense else np.unique(source.labels[positions]).tolist()


def _check_renamed(source: Source, classes: Sequence[str], renamed: Mapping[str, str]) -> None:
    for name, new in renamed.items():
        for word, words, whose in ((name, source.classes, source.root), (new, classes, "The model")):
            if word not in words:
                raise WeftError(f"{whose} has no class {word!r}, which --classes names.{did_you_mean(word, words)}")


def _with_hints(names: Sequence[str], classes: Sequence[str]) -> str:
    """`'Pug' (if it is 'pug': --classes Pug=pug), 'x' and 3 more`."""
    hints = [(name, nearest(name, classes)) for name in names[:NAMED]]
    shown = [f"{a!r} (if it is {b!r}: {shell('--classes', f'{a}={b}')})" if b else repr(a) for a, b in hints]
    return listed([*shown, *([f"{len(names) - NAMED} more"] if names[NAMED:] else [])])


def _check_known(source: Source, used: Sequence[str], classes: Sequence[str]) -> None:
    known = set(classes)
    if unknown := [name for name in used if name not in known]:
        hint = did_you_mean(unknown[0], classes)
        raise WeftError(f"{source.root} has classes that training does not have: {some(unknown)}.{hint}")


class RenamedTargets:
    """Masks or objects whose class i is class `places[i]` of another list; -1: it is not there, and not looked at."""

    def __init__(self, targets: Any, places: Sequence[int]) -> None:
        self.targets = targets
        self.table = np.arange(max(256, len(places)))  # what is no class, such as the value to ignore, stays
        self.table[: len(places)] = places

    def __call__(self, index: int) -> Any:
        target = self.targets(index)
        if isinstance(target, np.ndarray):
            return self.table.astype(np.uint8)[target]  # -1 becomes 255, the value to ignore
        target = replace(target, labels=self.table[target.labels])
        return target if (target.labels >= 0).all() else target.only(target.labels >= 0)

    def sizes(self, positions: range) -> bytes:
        return self.table.tobytes() + self.targets.sizes(positions)

    @property
    def has_shapes(self) -> bool:
        return self.targets.has_shapes
