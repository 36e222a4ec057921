"""Detection and instance segmentation: torchvision's losses, boxes and masks in pixels of the given pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.augment.kept_pairs import KeptObjects
from weft.data.augment.pairs import DetectAugmentation
from weft.data.given import GivenPictures
from weft.data.loader import Batch, DrawnPictures
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.report.run import RunReport
from weft.tasks.choose import window_size
from weft.tasks.detect import choose
from weft.tasks.detect.evaluate import DetectCollector
from weft.tasks.detect.metrics import DetectMeter
from weft.tasks.detect.predict import ObjectPrediction, ObjectWriter, located, objects_dict
from weft.tasks.detect.report import detect_values
from weft.tasks.metrics import are_measured
from weft.tasks.task import TaskFacts, to_device

EVAL_BATCH = 8  # of validation, `weft eval` and `weft predict` alike
DUMMY_OBJECTS = 32  # in each picture of a dummy batch


class Detect:
    """Objects with boxes and, where they are known, shapes: a `Task`."""

    name, purpose = "detect", "detect objects"
    choices, whole_pictures, writes_pictures = choose, False, True
    scores_classes, per_pixel = False, False
    largest_batch, eval_batch, counts_hits = 16, EVAL_BATCH, False
    shown_metrics: ClassVar[dict[str, str]] = {"box_ap": "box AP", "mask_ap": "mask AP"}
    can_replay = False  # takes targets along with pictures, and waits for the number of its proposals
    multilabel = False

    def __init__(self, config: Config, facts: TaskFacts):
        self.config, self.classes, self.preprocessing = config, facts.classes, facts.preprocessing
        self.device, self.dtype = facts.device, facts.dtype
        self.unlearned = facts.unlearned
        self.has_shapes = config.model.head == choose.WITH_SHAPES
        self.augmentation = DetectAugmentation(config.augment, self.preprocessing)
        self.kept = KeptObjects(self.augmentation) if config.data.keep == "device" else None
        self.score = "mask_ap" if self.has_shapes else "box_ap"

    # Training ---------------------------------------------------------------------------------------------------

    @property
    def training_size(self) -> tuple[int, int]:
        return window_size(self.config)

    def augmented(self, batch: Batch, seed: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """(C, h, w) pictures on the device, of any size, and their objects."""
        if self.kept is not None and isinstance(batch.pictures, DrawnPictures):
            return list(self.kept.augmented(*batch.pictures.to(self.device))), batch.labels
        return to_device(list(batch.pictures), self.device), batch.labels

    def prepare(self, batch: Batch, seed: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Normalised pictures and targets on the device; a detector's labels begin at 1, as 0 is the background."""
        pictures, objects = self.augmented(batch, seed)
        wanted = ("boxes", "masks") if self.has_shapes else ("boxes",)
        targets = [{**{key: y[key] for key in wanted}, "labels": y["labels"] + 1} for y in objects]
        return self._shown(pictures), to_device(targets, self.device)

    def advance(self, part_done: float) -> None:
        """Nothing to do: no augmentation depends on it."""

    def loss(
        self, forward: Callable[..., Any], x: list[Tensor], y: list[dict[str, Tensor]], denominator: float
    ) -> tuple[Tensor, Tensor]:
        """torchvision's losses times the number of pictures; the hits are always 0: there is no single answer.

        Its losses are means over the anchors and regions that it samples, whose number differs little from picture to
        picture, and over the regions that hold an object. So the parts of a batch add up to the batch only about: where
        objects are rare, those of a small part weigh more.
        """
        with self._autocast():
            losses = forward(x, y)
        loss = torch.stack([loss.float() for loss in losses.values()]).sum()
        return loss * (len(x) / denominator), torch.zeros_like(loss)

    def meter(self) -> DetectMeter:
        measured = are_measured(self.classes, self.unlearned)
        return DetectMeter(len(self.classes), self.has_shapes, self.config.test.detections, measured)

    def dummy_batch(self, count: int) -> Batch:
        """Grey pictures with objects side by side."""
        height, width = self._largest()
        dtype = torch.uint8 if self.preprocessing.depth == 8 else torch.float32
        grey = torch.full((self.preprocessing.channels, height, width), 0.5).mul(255 if dtype == torch.uint8 else 1)
        edges = torch.linspace(0, width, DUMMY_OBJECTS + 1)
        boxes = torch.stack([edges[:-1], edges[:-1] * 0, edges[1:], edges[1:] * 0 + height], dim=1)
        target = {"boxes": boxes, "labels": torch.zeros(DUMMY_OBJECTS, dtype=torch.int64)}
        if self.has_shapes:
            target["masks"] = torch.ones(DUMMY_OBJECTS, height, width, dtype=torch.uint8)
        return Batch([grey.to(dtype)] * count, [target] * count, torch.arange(count), [])

    # Use --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(self, model: nn.Module, pictures: Tensor | Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Boxes, labels from 1 on, scores and (n, 1, 28, 28) masks, on the device, in pixels of the given pictures.

        Only pictures of equal size share a pass, so that no answer depends on how far a neighbour made it pad.
        """
        shown = self._shown(pictures)
        answers: list[Any] = [None] * len(shown)
        for shape in dict.fromkeys(picture.shape for picture in shown):
            group = [i for i, picture in enumerate(shown) if picture.shape == shape]
            with self._autocast():
                for i, answer in zip(group, model([shown[i] for i in group]), strict=True):
                    answers[i] = answer
        return answers

    def set_up(self, model: nn.Module) -> None:
        """Gives the settings of use to torchvision's detector."""
        test = self.config.test
        if test.flip or test.scales != [1.0]:
            raise WeftError("A detector looks at a picture once; leave out test.flip and test.scales.")
        heads: Any = model.roi_heads  # torchvision's names
        heads.score_thresh, heads.nms_thresh, heads.detections_per_img = test.score, test.nms, test.detections

    def explained(self, model: nn.Module) -> nn.Module:
        """The backbone: what is behind it depends on proposals."""
        return model.backbone  # pyright: ignore[reportReturnType]

    def collector(self, source: Source, indices: np.ndarray) -> DetectCollector:
        return DetectCollector(source, self.classes, self.meter(), self.has_shapes, self.unlearned)

    def prediction(
        self, name: str, answer: dict[str, Tensor], batch: Batch, row: int, *, top: int, score: float
    ) -> ObjectPrediction:
        height, width = batch.pictures[row].shape[-2:]
        return located(name, answer, (height, width), batch.sizes[row]).above(score)

    def unreadable(self, name: str, why: str) -> ObjectPrediction:
        return ObjectPrediction(name, error=why)

    def to_dict(self, prediction: ObjectPrediction) -> dict[str, Any]:
        return objects_dict(prediction, self.classes)

    def results(self, pictures: GivenPictures, out: Path | None, *, top: int, score: float) -> ObjectWriter:
        most = self.config.test.detections
        return ObjectWriter(self.classes, self.preprocessing, pictures, out, score=score, most=most)

    def report(self, run: RunReport) -> tuple[str, dict[str, Any]]:
        return "report_detect.html.j2", detect_values(run)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _largest(self) -> tuple[int, int]:
        """The height and width of the largest picture that training has."""
        augment = self.augmentation.config
        if augment.crop == "random":
            return augment.img_size, augment.img_size
        short = max(augment.short_sides or [augment.img_size])
        return short, augment.long_side or round(1.6667 * short)

    def _shown(self, pictures: Tensor | Sequence[Tensor]) -> list[Tensor]:
        return [self.preprocessing.normalise(picture) for picture in to_device(list(pictures), self.device)]
