"""Evaluation of a detector: objects found and missed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from weft.data.boxes.objects import Objects
from weft.data.loader import Batch
from weft.data.sources.renamed import in_classes
from weft.data.sources.source import Source
from weft.report.text import columns, number, unlearned_line
from weft.tasks.detect.coco import DETECTIONS, RECALL_STEPS, Detections, Kind, Precision, overlaps
from weft.tasks.detect.metrics import DetectMeter

SURE = 0.5  # answers of at least this score count in a picture's own score
SAME = 0.5  # and are right from this intersection over union on


@dataclass(frozen=True)
class DetectEvaluation:
    """Objects that a model found in pictures whose objects are known, in pixels of the pictures on disk."""

    names: list[str]
    classes: list[str]
    found: list[Detections]
    truth: list[Objects]
    sizes: list[tuple[int, int]]  # height, width
    masks: bool  # whether masks are measured, too
    most: int = DETECTIONS  # answers that a picture may have
    unlearned: Sequence[str] = ()  # classes that are not measured: without objects here

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("box", "mask") if self.masks else ("box",)

    def metrics(self) -> dict[str, Any]:
        """All numbers, ready for JSON; those that `DetectMeter` has, too, are the same to the last digit.

        What no object defines is null; small, medium and large are below 32 x 32 pixels, below 96 x 96, and the rest.
        """
        counts = np.bincount(
            np.concatenate([np.zeros(0, np.int64), *(t.labels[~t.crowd] for t in self.truth)]),
            minlength=len(self.classes),
        )
        numbers: dict[str, Any] = {"n": len(self.names), "objects": int(counts.sum())}
        numbers |= {"unlearned": list(self.unlearned)} if self.unlearned else {}
        for kind, p in self.precisions.items():
            sizes = {f"{kind}_ap_{area}": p.ap(area=area) for area in ("small", "medium", "large")}
            numbers |= {f"{kind}_ap": p.ap(), f"{kind}_ap50": p.ap(0.5), f"{kind}_ap75": p.ap(0.75), **sizes}
            numbers[f"{kind}_ar100"] = p.ar()
        numbers["f1"] = float(self.scores.mean()) if len(self.scores) else None
        numbers["per_class"] = [
            {"name": name, "n": int(counts[k])} | {f"{kind}_ap": p.ap(label=k) for kind, p in self.precisions.items()}
            for k, name in enumerate(self.classes)
        ]
        return numbers

    def lines(self, metrics: dict[str, Any]) -> Iterator[str]:
        kinds = [kind for kind in self.kinds if metrics[f"{kind}_ap"] is not None]
        parts = {"": "AP", "50": "AP50", "75": "AP75", "_small": "small", "_medium": "medium", "_large": "large"}
        rows = [[kind, *(number(metrics[f"{kind}_ap{key}"]) for key in parts)] for kind in kinds or self.kinds[:1]]
        yield from columns([["", *parts.values()], *rows], right=range(1, 7))
        yield from unlearned_line(self.unlearned)
        yield ""
        rows = [
            [row["name"], f"{row['n']:,}", *(number(row[f"{kind}_ap"]) for kind in kinds)]
            for row in metrics["per_class"]
        ]
        yield from columns([["class", "objects", *(f"{kind} AP" for kind in kinds)], *rows], right=range(1, 4))

    @cached_property
    def precisions(self) -> dict[Kind, Precision]:
        columns = self.found, self.truth, self.sizes
        return {kind: Precision(*columns, len(self.classes), kind, self.most) for kind in self.kinds}

    @cached_property
    def scores(self) -> np.ndarray:
        """(N,) F1 of each picture: of answers that are sure, with masks or boxes that overlap by half; 1 is perfect."""
        return np.array([self._f1(*row) for row in zip(self.found, self.truth, self.sizes, strict=True)])

    def worst(self, k: int) -> list[int]:
        """The rows of the `k` pictures with the lowest score; those without a mistake are left out."""
        order = np.argsort(self.scores, kind="stable")[:k]
        return [int(row) for row in order if self.scores[row] < 1]

    def curves(self) -> dict[str, list[float]]:
        """{"recall", "box", "mask"}: precision at an IoU of 0.5 over recall, a mean over the classes."""
        lines = {kind: p.curve(SAME).tolist() for kind, p in self.precisions.items()}
        return {"recall": np.linspace(0, 1, RECALL_STEPS).tolist(), **lines}

    def _f1(self, found: Detections, truth: Objects, size: tuple[int, int]) -> float:
        sure = found.only(found.scores >= SURE)
        hits, ignored = matched(sure, truth, overlaps(sure, truth, size, self.kinds[-1]))
        wrong, missed = len(sure) - hits - ignored, int((~truth.crowd).sum()) - hits
        return 2 * hits / (2 * hits + wrong + missed) if hits + wrong + missed else 1.0


def matched(found: Detections, truth: Objects, iou: np.ndarray) -> tuple[int, int]:
    """How many answers hit an object, and how many lie in a crowd instead, which is neither right nor wrong.

    The surest answer chooses first, the object of its class that it overlaps most of those that are left.
    """
    free, hits, ignored = ~truth.crowd, 0, 0
    for i in np.argsort(-found.scores, kind="stable"):
        near = np.where(truth.labels == found.labels[i], iou[i], 0.0)
        best = int(np.argmax(np.where(free, near, 0.0))) if len(near) else 0
        if len(near) and free[best] and near[best] >= SAME:
            free[best], hits = False, hits + 1
        elif (near[truth.crowd] >= SAME).any():
            ignored += 1
    return hits, ignored


class DetectCollector:
    """Objects found in the pictures of a source, and true ones; unreadable pictures are left out."""

    def __init__(self, source: Source, classes: list[str], meter: DetectMeter, masks: bool, unlearned: Sequence[str]):
        self.source, self.classes, self.meter, self.masks = in_classes(source, classes), classes, meter, masks
        self.unlearned = unlearned

    def update(self, answers: list[dict[str, Tensor]], batch: Batch) -> None:
        self.meter.update(answers, batch)

    def evaluation(self) -> DetectEvaluation:
        names = [self.source.names[index] for index in sorted(self.meter.rows)]
        columns = self.meter.columns()
        facts = {"masks": self.masks, "most": self.meter.most, "unlearned": self.unlearned}
        return DetectEvaluation(names, self.classes, *columns, **facts)
