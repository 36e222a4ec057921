"""What a detector finds and misses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from weft.data.boxes.objects import Objects
from weft.data.loader import eval_batches
from weft.data.sources.source import Source
from weft.tasks.detect.coco import DETECTIONS, RECALL_STEPS, Found, Kind, Precision, overlaps

if TYPE_CHECKING:
    from weft.tasks.detect.task import Detect

SURE = 0.5  # answers of at least this score count in a picture's own score
SAME = 0.5  # and are right from this intersection over union on


@dataclass(frozen=True)
class DetectEvaluation:
    """What a model found in pictures whose objects are known, everything in pixels of the pictures on disk."""

    names: list[str]
    classes: list[str]
    found: list[Found]
    truth: list[Objects]
    sizes: list[tuple[int, int]]  # height, width
    masks: bool  # whether masks are measured, too
    most: int = DETECTIONS  # answers that a picture may have

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

    def _f1(self, found: Found, truth: Objects, size: tuple[int, int]) -> float:
        sure = found.only(found.scores >= SURE)
        hits, ignored = matched(sure, truth, overlaps(sure, truth, size, self.kinds[-1]))
        wrong, missed = len(sure) - hits - ignored, int((~truth.crowd).sum()) - hits
        return 2 * hits / (2 * hits + wrong + missed) if hits + wrong + missed else 1.0


def matched(found: Found, truth: Objects, iou: np.ndarray) -> tuple[int, int]:
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


def collect(
    task: "Detect",
    model: nn.Module,
    source: Source,
    indices: np.ndarray,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> DetectEvaluation:
    """What the model, in evaluation mode, finds in the pictures of a source; unreadable ones are left out.

    `progress` is called with the number of pictures done and of all pictures.
    """
    meter, done = task.meter(), 0
    batches = eval_batches(
        source, task.preprocessing, indices, batch=task.eval_batch, workers=workers, pin=task.device.type == "cuda"
    )
    for batch in batches:
        if len(batch.pictures):
            meter.update(task.infer(model, batch.pictures), batch)
        done += len(batch.pictures) + len(batch.bad)
        if progress:
            progress(done, len(indices))
    names = [source.names[index] for index in sorted(meter.rows)]
    return DetectEvaluation(names, task.classes, *meter.columns(), masks=task.has_shapes, most=task.most)
