"""Whether a file answers as the run does: on the run's own validation pictures, at several batch sizes and shapes."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.given import Progress
from weft.data.preprocessing import to_channels_first
from weft.data.read import decode
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.export.form import Answers, ExportForm, Gap
from weft.report.text import SCORES, columns
from weft.words import many

File = Callable[[np.ndarray], Answers]  # an exported file that is used

BATCHES = (2, 3, 8)
SHAPES = ((1.0, 0.5), (0.5, 1.0), (0.75, 0.6))  # parts of height and width
ROUNDS = 9  # of the clock, and
PAUSE = 0.1  # seconds before each


@dataclass(frozen=True)
class Limits:
    """How far the file may be from the run."""

    largest: float = 0.05  # in any probability
    part: float = 0.01  # of the answers may be others; a single one always
    points: float = 0.5  # of the metric, in per cent


@dataclass(frozen=True)
class AgreementRow:
    """Pictures that were shown to both in one way."""

    what: str
    pictures: int
    difference: Gap
    batched: Gap = field(default_factory=Gap)  # of the file from itself, where it sees them one by one


@dataclass(frozen=True)
class Agreement:
    """A file next to its run."""

    name: str  # of the file
    rows: list[AgreementRow]
    counted: str  # what an answer is
    score: str  # the metric, by its name
    before: float | None
    after: float | None
    scored: int  # pictures that the metric is of: with a fixed size, those that have it
    latency: dict[str, float]  # milliseconds for a picture, from its pixels to the answer
    bytes: dict[str, int]
    limits: Limits = field(default_factory=Limits)

    def faults(self) -> list[str]:
        """Words on each thing that is over its limit."""
        found = []
        for row in self.rows:
            difference = row.difference
            if not difference.largest <= self.limits.largest:
                found.append(f"{row.what}: probabilities differ by {difference.largest:.3g}")
            elif difference.changed > 1 and difference.part > self.limits.part:
                found.append(f"{row.what}: {difference.changed} of {difference.answers} {self.counted} changed")
            elif _differs(row.batched):
                found.append(f"{row.what}: answers are not those that the file gives to each picture alone")
        total = sum((row.difference for row in self.rows), Gap())
        if not found and total.changed > 1 and total.part > self.limits.part:
            found.append(f"{total.changed} of all {total.answers} {self.counted} changed")
        if self.before is None and self.limits.part >= 1:
            found.append("no picture has the fixed size, so nothing says how good eight bits are: leave out --size")
        if self.before is not None and self.after is not None:
            lost = 100 * (self.before - self.after)
            if not lost <= self.limits.points:
                found.append(f"{self.metric} {lost:.2f} points lower")
        return found

    @property
    def metric(self) -> str:
        return SCORES.get(self.score, self.score)

    def table(self) -> list[list[str]]:
        """The header, and a row for each way in which pictures were shown."""
        moved = any(row.difference.moved for row in self.rows)
        head = ["shown", "pictures", "largest difference", *(["boxes moved by"] if moved else []), "changed"]
        return [head, *(self._cells(row, moved) for row in self.rows)]

    def _cells(self, row: AgreementRow, moved: bool) -> list[str]:
        difference = row.difference
        pixels = [f"{difference.moved:.3f} px"] if moved else []
        changed = f"{difference.changed} of {difference.answers:,} {self.counted}"
        return [row.what, f"{row.pictures}", f"{difference.largest:.2e}", *pixels, changed]

    def facts(self) -> list[list[str]]:
        """Metric, time and size, of the run and of the file."""
        rows = [["", *self.latency]]
        metric = ["-" if value is None else f"{100 * value:.2f} %" for value in (self.before, self.after)]
        rows.append([f"{self.metric} of {many(self.scored, 'picture')}", *metric])
        rows.append(["a picture takes", *(f"{value:.1f} ms" for value in self.latency.values())])
        rows.append(["size", *(f"{self.bytes[key] / 1e6:.1f} MB" for key in self.latency)])
        return rows

    def lines(self) -> Iterator[str]:
        yield from columns(table := self.table(), right=range(1, len(table[0])))
        yield ""
        yield from columns(self.facts(), right=range(1, 3))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": not self.faults(), "faults": self.faults()}


def measure(
    form: ExportForm,
    path: Path,
    file: File,
    source: Source,
    indices: np.ndarray,
    *,
    fixed: tuple[int, int, int] | None = None,
    least: int = 1,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Agreement:
    """Shows the pictures at `indices` to the run and to its file.

    Args:
        fixed: the one batch, height and width that the file takes.
        least: the shortest side that it takes.
    """
    watch = _Watch(form, file, fixed)
    task = form.predictor.task
    before, after = task.collector(source, indices), task.collector(source, indices)
    whole, kept, seen, scored = Gap(), [], 0, 0
    for read in form.predictor.read(before.source, indices, 1, 0, progress):
        if not len(read.index):
            continue
        raw = decode(before.source.open(int(read.index[0])), channels=form.preprocessing.rules.channels)
        fits = fixed is None or raw.shape[:2] == fixed[1:]
        kept += [raw] if len(kept) < max(BATCHES) else []
        inferred = form.predictor.infer(read.pictures)
        own = form.own_answers(inferred, list(read.pictures), raw.shape[:2]) if fits else None
        if own is None:
            whole += watch.compare([raw])
        else:
            answers = watch.file([raw])
            whole += form.difference(own, answers)
            before.update(inferred, read)
            after.update(form.as_inferred(answers, read), read)
            scored += 1
        seen += 1
    if not kept:
        raise WeftError(f"{source.root}: none of {many(len(indices), 'picture')} can be read.")
    rows = [AgreementRow("each as it is" if fixed is None else f"each at {fixed[1]} x {fixed[2]}", seen, whole)]
    others = [] if fixed else _variants(kept, least)
    rows += [AgreementRow(what, len(some), watch.compare(some), watch.batched(some)) for what, some in others]
    scores = [each.evaluation().metrics()[task.score] if scored else None for each in (before, after)]
    weights = sum(p.numel() * p.element_size() for p in form.model.state_dict().values())
    return Agreement(
        name=path.name,
        rows=rows,
        counted=form.counted,
        score=task.score,
        before=scores[0],
        after=scores[1],
        scored=scored,
        latency=watch.times(kept[0]),
        bytes={"torch": weights, "file": path.stat().st_size},
        limits=limits or Limits(),
    )


def _differs(gap: Gap) -> bool:
    """Whether answers are others, by the limits of a file that is not in eight bits."""
    usual = Limits()
    return not gap.largest <= usual.largest or (gap.changed > 1 and gap.part > usual.part)


def _variants(pictures: Sequence[np.ndarray], least: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Batches of several sizes, cut from the same pictures."""
    for batch in BATCHES:
        some = [pictures[i % len(pictures)] for i in range(batch)]
        height, width = (min(picture.shape[axis] for picture in some) for axis in (0, 1))
        yield f"{batch} at once, {height} x {width}", [cut(picture, (height, width)) for picture in some]
    for number, parts in enumerate(SHAPES):
        some = [pictures[(number + i) % len(pictures)] for i in range(1 + number)]
        size = [max(least, int(min(picture.shape[axis] for picture in some) * part)) for axis, part in enumerate(parts)]
        yield f"{len(some)} at once, {size[0]} x {size[1]}", [cut(picture, (size[0], size[1])) for picture in some]


def cut(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of an (H, W, C) picture, which is continued at its edges where it is smaller."""
    for axis, side in enumerate(size):
        missing = max(0, side - picture.shape[axis])
        around = [(0, 0)] * 3
        around[axis] = (missing // 2, missing - missing // 2)
        picture = np.pad(picture, around, mode="edge")
        start = (picture.shape[axis] - side) // 2
        picture = np.take(picture, range(start, start + side), axis=axis)
    return np.ascontiguousarray(picture)


class _Watch:
    """The run and its file side by side."""

    def __init__(self, form: ExportForm, file: File, fixed: tuple[int, int, int] | None):
        self.form, self._file, self.fixed = form, file, fixed
        self.rules = form.predictor.preprocessing

    def file(self, pictures: Sequence[np.ndarray]) -> Answers:
        """Of the file; where its batch is fixed, the pictures are repeated to fill it."""
        given = np.stack([as_input(picture, self.rules.depth) for picture in pictures])
        if self.fixed is not None:
            given = np.concatenate([given] * self.fixed[0])[: self.fixed[0]]
        return {name: value[: len(pictures)] for name, value in self._file(np.ascontiguousarray(given)).items()}

    def own(self, pictures: Sequence[np.ndarray]) -> Answers:
        shown: list[Tensor] = [self.rules.picture(picture) for picture in pictures]
        return self.form.own_answers(self.form.predictor.infer(torch.stack(shown)), shown, pictures[0].shape[:2])

    def compare(self, pictures: Sequence[np.ndarray]) -> Gap:
        if self.fixed is not None:
            pictures = [cut(picture, self.fixed[1:]) for picture in pictures]
        return self.form.difference(self.own(pictures), self.file(pictures))

    def batched(self, pictures: Sequence[np.ndarray]) -> Gap:
        """Distance of the file from itself: what eight bits cost, they cost each picture the same in every batch."""
        alone = [self.file([picture]) for picture in pictures]
        together = {name: np.concatenate([answer[name] for answer in alone]) for name in alone[0]}
        return self.form.difference(together, self.file(pictures))

    def times(self, picture: np.ndarray) -> dict[str, float]:
        """Medians in milliseconds.

        Threads of onnxruntime go on waiting for work, for a moment, and would take a core from who comes right after.
        """
        picture = cut(picture, self.fixed[1:]) if self.fixed is not None else picture
        taken: dict[str, list[float]] = {"torch": [], "file": []}
        for _ in range(ROUNDS):
            for name, run in (("torch", self.own), ("file", self.file)):
                time.sleep(PAUSE)
                run([picture])
                start = time.perf_counter()
                run([picture])
                taken[name].append(time.perf_counter() - start)
        return {name: 1000 * statistics.median(values) for name, values in taken.items()}


def as_input(picture: np.ndarray, depth: int) -> np.ndarray:
    """(H, W, C) as the graph takes it, from what `decode` gives: uint8, or float32 for deeper pictures."""
    return to_channels_first(picture, depth).permute(1, 2, 0).numpy()
