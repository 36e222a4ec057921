"""Using a model that segments or detects: pictures of any size in, masks or objects at that size out."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.data.given import GivenPictures, Progress
from weft.data.loader import Batch, eval_batches, reading_workers
from weft.data.preprocessing import Preprocessing
from weft.errors import check_positive
from weft.fast.swap import fast_on
from weft.tasks.task import Task

if TYPE_CHECKING:
    from weft.run.subjects import Explained

CHUNK = 2**26  # numbers that exist at once while answers are brought to a picture's size
WORTH_COMPILING = 20_000  # pictures; fewer are done before kernels are compiled
SCORE = 0.5  # objects that the model is less sure of are left out, unless asked for


@dataclass(frozen=True)
class MaskPrediction:
    name: str
    mask: np.ndarray | None  # (H, W) uint8, positions in the predictor's classes
    error: str = ""  # why there is none


@dataclass(frozen=True)
class ObjectPrediction:
    """The n objects of a picture, the surest first."""

    name: str
    boxes: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.float32))  # left, top, right, bottom
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # positions in the predictor's classes
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # from 0 to 1
    shapes: list[dict[str, Any]] | None = None  # n COCO run lengths, where the model was trained on shapes
    size: tuple[int, int] = (0, 0)  # height and width of the picture
    error: str = ""  # why there are none

    @property
    def masks(self) -> np.ndarray | None:
        """(n, H, W) bool, made anew each time, because they are large."""
        from weft.data.boxes.shapes import draw

        if self.shapes is None:
            return None
        return np.array([draw(shape, *self.size) for shape in self.shapes], bool).reshape(-1, *self.size)

    def above(self, score: float) -> "ObjectPrediction":
        """Those that the model is at least so sure of."""
        keep = self.scores >= score
        shapes = self.shapes and [shape for shape, kept in zip(self.shapes, keep, strict=True) if kept]
        return replace(self, boxes=self.boxes[keep], labels=self.labels[keep], scores=self.scores[keep], shapes=shapes)


def fast_for_many(model: nn.Module, device: torch.device, pictures: int) -> None:
    """`weft.fast(model)` on a GPU that is to see so many pictures that it pays."""
    if pictures >= WORTH_COMPILING:
        fast_on(model, device)


class DensePredictor:
    """A model that segments or detects, with all that is needed to use it."""

    def __init__(self, model: nn.Module, task: Task, preprocessing: Preprocessing, device: torch.device):
        self.model = model.to(device).eval()
        self.task, self.classes, self.preprocessing, self.device = task, task.classes, preprocessing, device

    def predict(
        self,
        pictures: Any,
        *,
        score: float = SCORE,
        batch: int = 0,
        workers: int = -1,
        progress: Progress | None = None,
    ) -> list[Any]:
        """A `MaskPrediction` or an `ObjectPrediction` for each picture, at the picture's own size.

        Pictures are a file, a folder with all below it, a pattern such as "*.jpg", a Pillow image, an (H, W) or
        (H, W, C) array, or a list of these. One that cannot be read has an `error`; the others are not touched by
        that. `score`: objects that the model is less sure of are left out.
        """
        return list(self.stream(GivenPictures(pictures, self.task.name), score, batch, workers, progress))

    def explain(self, pictures: Any, **options: Any) -> "Explained":
        """What of `Predictor.explain` applies, with the same options."""
        from weft.run.predictor import Predictor

        return Predictor.explain(self, pictures, **options)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def stream(
        self,
        found: GivenPictures,
        score: float = SCORE,
        batch: int = 0,
        workers: int = -1,
        progress: Progress | None = None,
    ) -> Iterator[Any]:
        """The predictions one after the other, so that the masks of thousands need not be kept."""
        batch = batch or self.task.eval_batch
        check_positive(batch=batch)
        done, indices = 0, np.arange(len(found.names))
        fast_for_many(self.model, self.device, len(indices))
        workers, pin = reading_workers(workers, len(indices)), self.device.type == "cuda"
        for read in eval_batches(found, self.preprocessing, indices, batch=batch, workers=workers, pin=pin):
            rows = {index: self._nothing(found.names[index], why) for index, why in read.bad}
            rows |= dict(self._answered(found, read, score))
            for index in sorted(rows):
                yield rows[index]
            done += len(rows)
            if progress:
                progress(done, len(indices))

    def _answered(self, found: GivenPictures, read: Batch, score: float) -> Iterator[tuple[int, Any]]:
        answers = self._answers(read.pictures) if len(read.pictures) else []
        for index, answer, picture, size in zip(read.index.tolist(), answers, read.pictures, read.sizes, strict=True):
            name = found.names[index]
            if isinstance(answer, str):
                yield index, self._nothing(name, answer)
            elif self.task.name == "segment":
                yield index, MaskPrediction(name, class_map(answer, size).cpu().numpy())
            else:
                yield index, _objects(name, answer, tuple(picture.shape[-2:]), size).above(score)

    def _answers(self, pictures: Any) -> list[Any]:
        """What the task infers of each picture, or one line on why it cannot."""
        from weft.engine.parts import is_out_of_memory

        try:
            return list(self.task.infer(self.model, pictures))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if len(pictures) == 1:
            return ["too large for the memory of this device; shrink it, or try --device cpu"]
        return [self._answers(pictures[i : i + 1])[0] for i in range(len(pictures))]

    def _nothing(self, name: str, why: str) -> MaskPrediction | ObjectPrediction:
        return MaskPrediction(name, None, why) if self.task.name == "segment" else ObjectPrediction(name, error=why)


def class_map(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, h, w) scores to (H, W) uint8: the likeliest class after resizing, a few classes at a time."""
    from weft.tasks.segment.losses import resized

    at_once = max(1, CHUNK // (size[0] * size[1]))
    best, which = resized(scores[None, :1].float(), size)[0, 0], scores.new_zeros(size, dtype=torch.uint8)
    for start in range(1, len(scores), at_once):
        value, index = resized(scores[None, start : start + at_once].float(), size)[0].max(dim=0)
        which = torch.where(value > best, (index + start).to(torch.uint8), which)
        best = torch.maximum(value, best)
    return which


def _objects(name: str, answer: dict[str, Tensor], shown: tuple[int, int], size: tuple[int, int]) -> ObjectPrediction:
    """A detector's answer to a picture that it was `shown` smaller or larger than its `size`."""
    from weft.tasks.detect.coco import restore

    found = restore(answer, shown, size)
    shapes = found.masks if "masks" in answer else None
    limits = np.array([size[1], size[0]] * 2, np.float32)
    return ObjectPrediction(name, found.boxes.clip(0, limits), found.labels, found.scores, shapes, size)
