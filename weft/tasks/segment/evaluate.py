"""Evaluation of a segmenter: class by class over all pixels, and picture by picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.loader import Batch
from weft.data.sources.renamed import in_classes
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.report.text import columns, confusion_line, number, unlearned_line
from weft.tasks.metrics import are_measured
from weft.tasks.segment.metrics import SegmentMeter, ious, segment_metrics

PAIRS = 50  # most confused ones that are listed
MATRIX_CLASSES = 200  # with more classes only the most confused pairs are listed


@dataclass(frozen=True)
class PixelPair:
    """Pixels of one class that were taken for another."""

    truth: str
    said: str
    pixels: int
    part: float  # of all pixels of the true class


@dataclass(frozen=True)
class SegmentEvaluation:
    """A model's answers to pictures whose masks are known, in numbers of labelled pixels."""

    names: list[str]
    classes: list[str]
    confusion: np.ndarray  # (K, K) int64: rows are true classes, columns what was said
    truth: np.ndarray  # (N, K) int64: pixels of each class
    said: np.ndarray  # (N, K) pixels that were given it
    hits: np.ndarray  # (N, K) both
    units: int  # summed loss, as `SegmentMeter` counts it
    unlearned: Sequence[str] = ()  # classes that are not measured: their pixels are none of the above

    @classmethod
    def of(
        cls, names: list[str], classes: list[str], meter: SegmentMeter, unlearned: Sequence[str] = ()
    ) -> "SegmentEvaluation":
        """The evaluation of the pictures that a meter has seen and kept."""
        truth, said, hits = torch.stack(meter.pictures, dim=1).cpu().numpy()  # (N, K) each
        return cls(names, classes, meter.confusion.cpu().numpy(), truth, said, hits, int(meter.units), unlearned)

    def metrics(self) -> dict[str, Any]:
        """All numbers, ready for JSON; loss, mIoU and accuracies are those of `SegmentMeter`, to the last digit.

        A class that occurs in neither truth nor answers has an `iou` of None, one without pixels no `accuracy`.
        """
        pixels, hits = self.confusion.sum(axis=1), self.confusion.diagonal()
        iou, defined = ious(pixels, self.confusion.sum(axis=0), hits)
        measured = are_measured(self.classes, self.unlearned)
        defined &= measured
        return {
            "n": len(self.names),
            **({"unlearned": list(self.unlearned)} if self.unlearned else {}),
            **segment_metrics(self.confusion, self.units, measured),
            "per_class": [
                {
                    "name": name,
                    "iou": float(iou[c]) if defined[c] else None,
                    "accuracy": float(hits[c] / pixels[c]) if pixels[c] else None,
                    "pixels": int(pixels[c]),
                }
                for c, name in enumerate(self.classes)
            ],
            "confusion": self.confusion.tolist() if len(self.classes) <= MATRIX_CLASSES else None,
            "confused_pairs": [vars(pair) for pair in self.confused_pairs(PAIRS)],
        }

    def lines(self, metrics: dict[str, Any]) -> Iterator[str]:
        accuracy = f"pixel accuracy {number(metrics['pixel_accuracy'], 4)}"
        mean, loss = f"mean accuracy {number(metrics['mean_accuracy'], 4)}", f"loss {number(metrics['loss'], 4)}"
        yield f"mIoU {number(metrics['miou'], 4)}   {accuracy}   {mean}   {loss}"
        yield from unlearned_line(self.unlearned)
        yield ""
        pixels = sum(row["pixels"] for row in metrics["per_class"]) or 1
        rows = [
            [row["name"], f"{row['pixels'] / pixels:.2%}", number(row["iou"]), number(row["accuracy"])]
            for row in metrics["per_class"]
        ]
        yield from columns([["class", "of all pixels", "IoU", "accuracy"], *rows], right=range(1, 4))
        yield from confusion_line(metrics["confused_pairs"], lambda pair: f"{pair['part']:.1%}")

    @property
    def scores(self) -> np.ndarray:
        """(N,) mIoU of each picture over the classes that its mask has; NaN where no pixel is labelled.

        A class that is only in the answer takes no part: its pixels are missing from those of others already, and one
        stray pixel would halve the score.
        """
        values, _ = ious(self.truth, self.said, self.hits)
        occurs = self.truth > 0
        with np.errstate(invalid="ignore"):
            return (values * occurs).sum(axis=1) / occurs.sum(axis=1)

    def worst(self, k: int) -> list[int]:
        """Rows of the `k` pictures with the lowest scores, the lowest first; pictures without a score come last."""
        return np.argsort(self.scores, kind="stable")[:k].tolist()

    def confused_pairs(self, k: int) -> list[PixelPair]:
        """The `k` pairs of classes with the most pixels of one that were taken for the other."""
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        order = np.argsort(-wrong, axis=None, kind="stable")[: min(k, np.count_nonzero(wrong))]
        pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
        pixels = self.confusion.sum(axis=1)
        return [
            PixelPair(self.classes[t], self.classes[s], int(wrong[t, s]), float(wrong[t, s] / pixels[t]))
            for t, s in pairs
        ]


class SegmentCollector:
    """Pixel counts of the pictures at `indices`, in the model's classes; unreadable pictures are left out."""

    def __init__(
        self, source: Source, indices: np.ndarray, classes: list[str], device: torch.device, unlearned: Sequence[str]
    ):
        self.source, self.indices, self.classes = in_classes(source, classes), indices, classes
        measured, self.unlearned = are_measured(classes, unlearned), unlearned
        self.meter, self.names = SegmentMeter(len(classes), device, keep=True, measured=measured), []

    def update(self, answers: Sequence[Tensor], batch: Batch) -> None:
        self.meter.update(answers, batch)
        self.names += [self.source.names[i] for i in batch.index.tolist()]

    def evaluation(self) -> SegmentEvaluation:
        if not self.names:
            raise WeftError(f"{self.source.root}: none of the {len(self.indices)} pictures to evaluate can be read.")
        return SegmentEvaluation.of(self.names, self.classes, self.meter, self.unlearned)
