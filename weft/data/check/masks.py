"""Checks the masks of a set before anything is trained on them, and names files, values and numbers of pixels."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.data.check.findings import Problem, Severity
from weft.data.check.scan import LookLimits, look_at_all
from weft.data.masks.classes import MaskContent, find_contradictions, mask_kind
from weft.data.masks.values import BadMask, Coding, MaskFiles
from weft.data.sources.source import JoinedReaders, Source
from weft.words import many, some

MANY = 20  # masks among which a class that only one has is suspicious
BAD = {  # BadMask.kind to what is said of such masks
    "unknown-values": "with values that are not classes: name them in --data.classes, or --data.ignore them",
    "mask-size": "of a size other than the picture's",
    "jpeg-mask": "saved as JPEG, which changes values; save masks as PNG",
    "deep-mask": "with values that are not class numbers of 8 bits",
    "mixed-masks": "coded by colour among masks that hold class numbers",
    "unreadable-mask": "that cannot be read",
}


@dataclass
class MaskFindings:
    problems: list[Problem] = field(default_factory=list)
    pixels: list[int] = field(default_factory=list)  # of each class, in the masks looked at
    bad: dict[str, str] = field(default_factory=dict)  # name of the picture to a reason: to be left out of training
    looked_at: int = 0
    present: np.ndarray | None = None  # (N, classes) bool: which classes occur in each mask that was looked at


@dataclass
class MaskSummary:
    """One mask that can be used."""

    counts: np.ndarray  # (256,) pixels of each class number
    seen: MaskContent | None  # the kind of its file and its palette, where it is a file
    turned: bool


def check_masks(source: Source, limits: LookLimits) -> MaskFindings:
    """Reads the masks, and the headers of their pictures.

    Pictures that cannot be read are not counted here. Bad masks are a warning up to the part `bad_files` of all, but an
    unknown value is always an error: it means that masks are not what they were taken for.
    """

    def look(index: int) -> MaskSummary | BadMask:
        try:
            return _summarise(source, index, limits.max_pixels)
        except BadMask as error:
            return error

    good = MaskTotals(np.zeros(256, np.int64), np.zeros((len(source), len(source.classes)), bool))
    bad: dict[int, BadMask] = {}
    for index, answer in look_at_all(source, look, limits):
        if isinstance(answer, MaskSummary):
            good.add(index, answer)
        else:
            bad[index] = answer if isinstance(answer, BadMask) else BadMask("unreadable-mask", answer)
    found = MaskFindings(pixels=good.pixels[: len(source.classes)].tolist(), looked_at=good.count + len(bad))
    found.present = good.present
    found.bad = {source.names[i]: str(bad[i]) for i in sorted(bad)}
    found.problems = [
        *_unusable(source, bad, len(bad) / max(found.looked_at, 1), limits.bad_files),
        *_poor(source, good),
        *_classes(source, found, good),
        *_surprising(source, good),
    ]
    return found


@dataclass
class MaskTotals:
    """Sums over the masks that can be used: little is kept of each, because there may be very many."""

    pixels: np.ndarray  # (256,) of each class number
    present: np.ndarray  # (N, classes) bool
    count: int = 0
    nothing: list[int] = field(default_factory=list)  # positions of masks that are ignored altogether
    single: dict[int, int] = field(default_factory=dict)  # position to class, where there is only one
    turned: list[int] = field(default_factory=list)
    seen: list[MaskContent] = field(default_factory=list)

    def add(self, index: int, look: MaskSummary) -> None:
        self.pixels += look.counts
        self.count += 1
        self.present[index] = look.counts[: self.present.shape[1]] > 0
        classes = np.flatnonzero(self.present[index]).tolist()
        if not classes:
            self.nothing.append(index)
        elif len(classes) == 1:
            self.single[index] = classes[0]
        if look.turned:
            self.turned.append(index)
        if look.seen is not None:
            self.seen.append(look.seen)


def _summarise(source: Source, index: int, max_pixels: int) -> MaskSummary:
    targets, position = source.targets, index
    while isinstance(targets, JoinedReaders):
        targets, position = targets.readers[targets.part[position]], int(targets.position[position])
    if not isinstance(targets, MaskFiles):
        return MaskSummary(_count(targets(position)), None, False)
    looked = targets.examine(position, max_pixels)
    return MaskSummary(_count(looked.mask), mask_kind(targets.files.paths[position], looked.raw), looked.turned)


def coding_of(targets: Any) -> Coding | None:
    """Which value stands for which class in files of masks; None where there are none, or several ways."""
    if isinstance(targets, JoinedReaders):
        found = {coding_of(reader) for reader in targets.readers}
        return found.pop() if len(found) == 1 else None
    return targets.coding if isinstance(targets, MaskFiles) else None


def _count(mask: np.ndarray) -> np.ndarray:
    return np.bincount(mask.reshape(-1), minlength=256)


def _unusable(source: Source, bad: dict[int, BadMask], part: float, bad_files: float) -> Iterator[Problem]:
    for kind, words in BAD.items():
        concerned = [i for i in sorted(bad) if bad[i].kind == kind]
        if not concerned:
            continue
        too_many = part > bad_files
        severity: Severity = "error" if too_many or kind == "unknown-values" else "warning"
        then = "" if severity == "error" else "; left out of training"
        text = f"{many(len(concerned), 'mask')} {words}{then}. {bad[concerned[0]]}."
        yield Problem.at(source.names, concerned, severity, kind, text, lambda i: str(bad[i]))


def _poor(source: Source, good: MaskTotals) -> Iterator[Problem]:
    """Masks that have nothing to learn from, or a single class."""
    if good.nothing:
        text = f"{many(len(good.nothing), 'mask')} with every pixel ignored: nothing is learned from them."
        yield Problem.at(source.names, sorted(good.nothing), "warning", "ignored-mask", text)
    if good.single and len(source.classes) > 1:
        names = {i: source.classes[number] for i, number in sorted(good.single.items())}
        most = ", ".join(f"{n} {name!r}" for name, n in Counter(names.values()).most_common(3))
        text = f"{many(len(names), 'mask')} with a single class: {most}."
        # where most masks are so, they were probably misread
        severity: Severity = "warning" if len(names) > 0.5 * good.count else "note"
        yield Problem.at(source.names, list(names), severity, "one-class-mask", text, lambda i: names[i])


def _classes(source: Source, found: MaskFindings, good: MaskTotals) -> Iterator[Problem]:
    never = [name for name, n in zip(source.classes, found.pixels, strict=True) if not n]
    if never and sum(found.pixels):
        seen = "" if found.looked_at == len(source) else f" in the {found.looked_at} masks looked at"
        text = f"{many(len(never), 'class')} without a single pixel{seen}: {some(never)}."
        severity: Severity = "warning" if found.looked_at == len(source) else "note"
        yield Problem(severity, "unseen-class", text, never, count=len(never))
    if good.count >= MANY:  # a stray value that was taken for a class looks like this
        for number in np.flatnonzero(good.present.sum(0) == 1).tolist():
            name, index = source.classes[number], int(good.present[:, number].argmax())
            text = f"Class {name!r} occurs in one mask only, that of {source.names[index]}: "
            text += f"{many(found.pixels[number], 'pixel')}; if it is not a class, --data.ignore its value."
            yield Problem("warning", "rare-class", text, [source.names[index]], {source.names[index]: name}, count=1)
    if len(source.classes) == 1:
        text = f"Only one class, {source.classes[0]!r}: there is nothing to tell apart."
        yield Problem("warning", "one-class", text)


def _surprising(source: Source, good: MaskTotals) -> Iterator[Problem]:
    for text in find_contradictions(good.seen):
        yield Problem("warning", "palette", text)
    if good.turned:
        text = f"{many(len(good.turned), 'mask')} turned together with the picture, as its EXIF entry says."
        yield Problem.at(source.names, sorted(good.turned), "note", "turned-mask", text)
