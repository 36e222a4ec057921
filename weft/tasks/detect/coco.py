"""Average precision of boxes and masks as COCO defines it, computed by faster-coco-eval.

It is called directly rather than through torchmetrics, which wants every mask as an array of the picture's size,
evaluates once more for each class, and rounds recalls to float32, which moves the fourth digit. Run lengths take a
thousandth of the memory, one evaluation has every number, and the numbers are those of pycocotools.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks, paste_mask_in_image

from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import pack
from weft.errors import WeftError
from weft.threads import torch_threads

Kind = Literal["box", "mask"]

AREAS = ("all", "small", "medium", "large")  # small: below 32 x 32 pixels, large: from 96 x 96 on
DETECTIONS = 100  # of a picture, the surest, count, as in COCO's tables; more where more are allowed
RECALL_STEPS = 101


@dataclass(frozen=True)
class Detections:
    """Objects found in one picture, in pixels of the picture on disk."""

    boxes: np.ndarray  # (n, 4) float32: left, top, right, bottom
    labels: np.ndarray  # (n,) int64, positions in the classes
    scores: np.ndarray  # (n,) float32, the surest first
    masks: list[dict[str, Any]] = field(default_factory=list)  # n run lengths; or none at all

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, which: np.ndarray) -> "Detections":
        """Those that are chosen by (n,) bool."""
        masks = [mask for mask, chosen in zip(self.masks, which, strict=False) if chosen]
        return Detections(self.boxes[which], self.labels[which], self.scores[which], masks)


def restore(answer: dict[str, Tensor], shown: tuple[int, int], size: tuple[int, int]) -> Detections:
    """A detector's answer to a picture that it was shown at one size, at the picture's own: (height, width) each."""
    height, width = (own / seen for own, seen in zip(size, shown, strict=True))
    answer = {key: value.detach().float().cpu() for key, value in answer.items()}
    boxes = answer["boxes"] * answer["boxes"].new_tensor([width, height, width, height])
    with torch_threads(1):  # masks are pasted one by one: starting several for each takes longer than the work
        masks = pasted(answer["masks"], boxes, size) if "masks" in answer else []
    return Detections(boxes.numpy(), answer["labels"].long().numpy() - 1, answer["scores"].numpy(), masks)


def pasted(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> list[dict[str, Any]]:
    """(n, 1, 28, 28) probabilities inside (n, 4) boxes as run lengths of masks of the picture's size.

    The masks are those of torchvision's `paste_masks_in_image`, but only the part around each box is ever made.
    """
    masks, scale = expand_masks(masks, padding=1)
    shapes = []
    for mask, box in zip(masks, expand_boxes(boxes, scale).long(), strict=True):
        left, top = (min(max(int(near), 0), most - 1) for near, most in zip(box[:2], size[::-1], strict=True))
        right, bottom = (min(int(far) + 1, most) for far, most in zip(box[2:], size[::-1], strict=True))
        window = paste_mask_in_image(mask[0], box - box.new_tensor([left, top] * 2), bottom - top, right - left)
        shapes.append(run_lengths(window.numpy() > 0.5, (top, left), size))
    return shapes


def run_lengths(part: np.ndarray, corner: tuple[int, int], size: tuple[int, int]) -> dict[str, Any]:
    """Packed run lengths of an (h, w) bool mask that lies at a corner (top, left) of a picture, empty elsewhere."""
    edges = np.diff(np.pad(part.T, ((0, 0), (1, 1))).astype(np.int8), axis=1)  # (w, h + 1)
    column, row = np.nonzero(edges)  # where it begins and ends, in turn, down one column after the other
    changes = (column + corner[1]) * size[0] + row + corner[0]
    goes_on, kept = changes[1:] == changes[:-1], np.ones(len(changes), bool)
    kept[1:] &= ~goes_on  # from the bottom of a column to the top of the next
    kept[:-1] &= ~goes_on
    runs = np.diff(changes[kept], prepend=0, append=size[0] * size[1])
    return {"size": list(size), "counts": pack(runs if runs[-1] else runs[:-1])}


def overlaps(found: Detections, truth: Objects, size: tuple[int, int], kind: Kind) -> np.ndarray:
    """(found, truth) intersection over union; of a crowd, the part of what was found that lies in it."""
    if not len(found) or not len(truth):
        return np.zeros((len(found), len(truth)))
    ours = found.masks if kind == "mask" else _corner_and_size(found.boxes)
    theirs = _run_lengths(truth, size) if kind == "mask" else _corner_and_size(truth.boxes)
    return np.asarray(_library().mask.iou(ours, theirs, truth.crowd.astype(int).tolist()))


class Precision:
    """`precision` (IoUs, recalls, classes, areas) and `recall` (IoUs, classes, areas) as COCO defines them.

    IoUs are 0.5 to 0.95 by 0.05, recalls 0 to 1 by 0.01; -1 marks what is undefined, because no such object exists.
    """

    def __init__(
        self,
        found: Sequence[Detections],
        truth: Sequence[Objects],
        sizes: Sequence[tuple[int, int]],
        classes: int,
        kind: Kind,
        most: int = DETECTIONS,
    ) -> None:
        library = _library()
        objects = [o for i, t in enumerate(truth) for o in _true_objects(t, i, sizes[i], kind)]
        answers = [a for i, f in enumerate(found) for a in _answers(f, i, kind)]
        shared = {
            "images": [{"id": i, "height": h, "width": w} for i, (h, w) in enumerate(sizes)],
            "categories": [{"id": k, "name": str(k)} for k in range(classes)],
        }
        sets = [library.COCO({**shared, "annotations": _numbered(rows)}) for rows in (objects, answers)]
        run = library.COCOeval_faster(*sets, iouType="bbox" if kind == "box" else "segm")
        run.params.maxDets = [1, 10, DETECTIONS] if most <= DETECTIONS else [1, DETECTIONS, most]
        run.evaluate()
        run.accumulate()
        self.precision = np.asarray(run.eval["precision"])[..., -1]
        self.recall = np.asarray(run.eval["recall"])[..., run.params.maxDets.index(DETECTIONS)]

    def ap(self, iou: float | None = None, area: str = "all", label: int | None = None) -> float | None:
        """Mean over IoUs, recalls and classes, or at one IoU, for one class; none where no such object exists."""
        values = self.precision[..., AREAS.index(area)]
        values = values if iou is None else values[round((iou - 0.5) / 0.05)]
        return _mean(values if label is None else values[..., label])

    def ar(self) -> float | None:
        """The part of the objects that is among the 100 surest answers, a mean over IoUs and classes."""
        return _mean(self.recall[..., 0])

    def curve(self, iou: float = 0.5) -> np.ndarray:
        """(101,) precision at recalls 0 to 1, a mean over the classes that have objects."""
        values = self.precision[round((iou - 0.5) / 0.05), :, :, 0]
        known = values[:, (values > -1).all(axis=0)]
        return known.mean(axis=1) if known.size else np.zeros(RECALL_STEPS)


def _mean(values: np.ndarray) -> float | None:
    values = values[values > -1]
    return float(values.mean()) if values.size else None


def _true_objects(truth: Objects, picture: int, size: tuple[int, int], kind: Kind) -> Iterator[dict[str, Any]]:
    boxes = _corner_and_size(truth.boxes)
    masks = _run_lengths(truth, size) if kind == "mask" else None
    for i in range(len(truth)):
        row = {"image_id": picture, "category_id": int(truth.labels[i]), "bbox": boxes[i], "area": float(truth.area[i])}
        yield {**row, "iscrowd": int(truth.crowd[i])} | ({"segmentation": masks[i]} if masks else {})


def _answers(found: Detections, picture: int, kind: Kind) -> Iterator[dict[str, Any]]:
    boxes = _corner_and_size(found.boxes)
    areas = _library().mask.area(found.masks) if kind == "mask" and len(found) else [w * h for _, _, w, h in boxes]
    for i in range(len(found)):
        row = {"image_id": picture, "category_id": int(found.labels[i]), "score": float(found.scores[i]), "iscrowd": 0}
        shape = {"segmentation": found.masks[i]} if kind == "mask" else {}
        yield {**row, "bbox": boxes[i], "area": float(areas[i]), **shape}


def _numbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "id": number} for number, row in enumerate(rows, start=1)]  # 0 means "none" to COCO's code


def _corner_and_size(boxes: np.ndarray) -> list[list[float]]:
    boxes = boxes.astype(np.float64)
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1).tolist()


def _run_lengths(truth: Objects, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Shapes as run lengths; an object of which only the box is known fills it."""
    height, width = size
    corners = truth.boxes.astype(np.float64)[:, [0, 1, 2, 1, 2, 3, 0, 3]].tolist()
    shapes = truth.shapes or [[corner] for corner in corners]
    return [_library().mask.segmToRle(shape, width, height) for shape in shapes]


def _library() -> Any:
    try:
        import faster_coco_eval
        import faster_coco_eval.core.mask
    except ImportError:
        raise WeftError("Detection needs faster-coco-eval to measure precision: pip install weft[detect].") from None
    return faster_coco_eval
