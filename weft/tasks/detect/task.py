"""Detection and instance segmentation: torchvision's losses, and average precision at the pictures' own size."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config import Config
from weft.data.boxes.objects import Objects
from weft.data.loader import Batch
from weft.data.preprocessing import Preprocessing
from weft.tasks.detect.coco import Found, Kind, Precision, restore
from weft.tasks.task import to_device

EVAL_BATCH = 8  # of validation, `weft eval` and `weft predict` alike
DUMMY_OBJECTS = 32  # in each picture of a dummy batch


class Detect:
    """The task of `make_detector`'s models."""

    name, counts_hits = "detect", False
    can_replay = False  # takes targets along with pictures, and waits for the number of its proposals
    eval_batch = EVAL_BATCH

    def __init__(
        self,
        config: Config,
        *,
        classes: list[str],
        preprocessing: Preprocessing,
        device: torch.device,
        dtype: torch.dtype,
        has_shapes: bool,
    ) -> None:
        from weft.data.augment.pairs import DetectAugmentation

        self.classes, self.preprocessing, self.device, self.dtype = classes, preprocessing, device, dtype
        self.has_shapes, self.most = has_shapes, config.test.detections
        self.augmentation = DetectAugmentation(config.augment, preprocessing)
        self.score = "mask_ap" if has_shapes else "box_ap"

    def augmented(self, batch: Batch, seed: int) -> list[Tensor]:
        """(C, h, w) pictures on the device, of any size."""
        return to_device(list(batch.pictures), self.device)

    def prepare(self, batch: Batch, seed: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Normalised pictures and targets on the device; a detector's labels begin at 1, as 0 is the background."""
        wanted = ("boxes", "masks") if self.has_shapes else ("boxes",)
        targets = [{**{key: y[key] for key in wanted}, "labels": y["labels"] + 1} for y in batch.labels]
        return self._shown(batch.pictures), to_device(targets, self.device)

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

    def meter(self) -> "DetectMeter":
        return DetectMeter(len(self.classes), self.has_shapes, self.most)

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


class DetectMeter:
    """Keeps what was found and what is true, on the host, masks as run lengths, until the precision is asked for."""

    def __init__(self, classes: int, has_shapes: bool, most: int) -> None:
        self.classes, self.most = classes, most
        self.kinds: tuple[Kind, ...] = ("box", "mask") if has_shapes else ("box",)
        self.rows: dict[int, tuple[Found, Objects, tuple[int, int]]] = {}  # by position in the source

    def update(self, answers: list[dict[str, Tensor]], batch: Batch) -> None:
        shown = [(picture.shape[1], picture.shape[2]) for picture in batch.pictures]
        found = [restore(*one) for one in zip(answers, shown, batch.sizes, strict=True)]
        self.rows.update(zip(batch.index.tolist(), zip(found, batch.labels, batch.sizes, strict=True), strict=True))

    def reduce(self) -> None:
        """Every process gets the rows of all."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, self.rows)
            self.rows = {index: row for part in parts for index, row in part.items()}

    def columns(self) -> tuple[list[Found], list[Objects], list[tuple[int, int]]]:
        """What was found, what is true, and the sizes, in the order of the source: of equal scores the first counts."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]

    def result(self) -> dict[str, float]:
        """`{"box_ap", "box_ap50"}` and, where there are shapes, `"mask_ap"` and `"mask_ap50"`; 0 without objects."""
        results: dict[str, float] = {}
        for kind in self.kinds:
            precision = Precision(*self.columns(), self.classes, kind, self.most)
            results |= {f"{kind}_ap": precision.ap() or 0.0, f"{kind}_ap50": precision.ap(0.5) or 0.0}
        return results
