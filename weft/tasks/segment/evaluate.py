"""What a segmenter gets right and wrong: class by class over all pixels, and picture by picture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.data.loader import eval_batches
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.tasks.segment.task import Segment, SegmentMeter, ious, segment_metrics

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
    """What a model said about pictures whose masks are known, in numbers of labelled pixels."""

    names: list[str]
    classes: list[str]
    confusion: np.ndarray  # (K, K) int64: rows are true classes, columns what was said
    truth: np.ndarray  # (N, K) int64: pixels of each class
    said: np.ndarray  # (N, K) pixels that were given it
    hits: np.ndarray  # (N, K) both
    units: int  # summed loss, as `SegmentMeter` counts it

    def metrics(self) -> dict[str, Any]:
        """All numbers, ready for JSON; loss, mIoU and accuracies are those of `SegmentMeter`, to the last digit.

        A class that occurs in neither truth nor answers has an `iou` of None, one without pixels no `accuracy`.
        """
        pixels, hits = self.confusion.sum(axis=1), self.confusion.diagonal()
        iou, defined = ious(pixels, self.confusion.sum(axis=0), hits)
        return {
            "n": len(self.names),
            **segment_metrics(self.confusion, self.units),
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


def collect(
    task: Segment,
    model: nn.Module,
    source: Source,
    indices: np.ndarray,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SegmentEvaluation:
    """What `model`, in evaluation mode, says about the pictures at `indices`, next to their masks.

    The source counts in the task's classes. Pictures that cannot be read are left out, as in training.
    """
    meter = SegmentMeter(len(task.classes), task.device, keep=True)
    names, done = [], 0
    pin = task.device.type == "cuda"
    for batch in eval_batches(source, task.preprocessing, indices, batch=task.eval_batch, workers=workers, pin=pin):
        meter.update(task.infer(model, batch.pictures), batch)
        names += [source.names[i] for i in batch.index.tolist()]
        done += len(batch.index) + len(batch.bad)
        if progress:
            progress(done, len(indices))
    if not names:
        raise WeftError(f"{source.root}: none of the {len(indices)} pictures to evaluate can be read.")
    return evaluation(names, task.classes, meter)


def evaluation(names: list[str], classes: list[str], meter: SegmentMeter) -> SegmentEvaluation:
    """Of the pictures that a meter has seen and kept."""
    truth, said, hits = torch.stack(meter.pictures, dim=1).cpu().numpy()  # (N, K) each
    return SegmentEvaluation(names, classes, meter.confusion.cpu().numpy(), truth, said, hits, int(meter.units))
