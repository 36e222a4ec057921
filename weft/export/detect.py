"""Detectors: boxes in pixels of the picture as it is, with everything behind the network inside the graph.

torchvision's stages loop over pictures and keep lists of different lengths, of which no graph for every batch can be
made. Here the same is computed on (B, N) tables in which places may be empty.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou, roi_align

from weft.data.loader import Batch
from weft.export.form import Answers, ExportForm, Gap
from weft.export.suppress import NOTHING, suppress
from weft.heads.regions import STRIDES, USUAL_LEVEL, USUAL_SIDE, AlignedRoIAlign
from weft.run.predictor import Predictor
from weft.tasks.detect.coco import restore

WIDEST = math.log(1000 / 16)  # by how much a box may grow, as torchvision limits it
EMPTY = -1  # the label of a place without an object
SURE, SAME = 0.5, 0.9  # an object that users see; the overlap from which on two boxes are the same
SMALLEST = {"proposal": 1e-3, "object": 1e-2}  # sides of a box in pixels, as in torchvision


class DetectForm(ExportForm):
    outputs: Mapping[str, str] = {
        "boxes": "(B, N, 4) float32: left, top, right, bottom, in pixels of the picture; the surest object first",
        "labels": "(B, N) int64, positions in the classes; -1: no object",
        "scores": "(B, N) float32, 0 where there is none",
    }
    counted = "objects"
    multiple = 32

    def __init__(self, predictor: Predictor):
        super().__init__(predictor)
        self.suppress = suppress
        if self.stage_two.has_mask():
            self.outputs = {**self.outputs, "masks": "(B, N, 28, 28) float32, the object's probability inside its box"}

    @property
    def stage_one(self) -> Any:
        return self.model.rpn

    @property
    def stage_two(self) -> Any:
        return self.model.roi_heads

    def answer(self, pictures: Tensor, *prepared: Tensor) -> tuple[Tensor, ...]:
        whole, x = prepared
        size = whole.shape[2:]
        detector: Any = self.model
        maps = detector.backbone(x)
        boxes, scores, labels = self._objects(maps, *self._proposals(x, maps, size), size)
        there = labels != EMPTY
        masks = [self._masks(maps, boxes, labels)] if self.stage_two.has_mask() else []
        scale = [side / part for side, part in zip(pictures.shape[1:3], size, strict=True)]
        boxes = torch.stack([boxes[..., i] * scale[1 - i % 2] for i in range(4)], 2)
        boxes = _clipped(boxes, pictures.shape[1:3])
        return boxes * there[..., None], labels, torch.where(there, scores, 0.0), *masks

    # Stage one: anchors to proposals ----------------------------------------------------------------------------

    def _proposals(self, x: Tensor, maps: dict[str, Tensor], size: Any) -> tuple[Tensor, Tensor]:
        """(B, N, 4) boxes and (B, N) whether there is one; N is the number of proposals that are kept."""
        features, one = list(maps.values()), self.stage_one
        objectness, deltas = one.head(features)
        kept = one.post_nms_top_n()
        boxes, scores = [], []
        for level, (score, delta) in enumerate(zip(objectness, deltas, strict=True)):
            anchors = self._anchors(level, x.shape[2:], score.shape[2:])
            score = score.permute(0, 2, 3, 1).flatten(1)  # (B, h * w * anchors of a place)
            delta = delta.unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
            score, index = F.pad(score, (0, kept), value=NOTHING).topk(kept)  # padded, for there may be fewer
            index = index.clamp(max=anchors.shape[0] - 1)
            chosen = delta.gather(1, index[..., None].expand(-1, -1, 4))
            found = _clipped(decode(chosen, anchors[index], (1.0, 1.0, 1.0, 1.0)), size)
            boxes.append(found)
            scores.append(score.masked_fill(_small(found, SMALLEST["proposal"]), NOTHING))
        table, score = torch.stack(boxes, 1), torch.stack(scores, 1)  # (B, levels, N, 4), (B, levels, N)
        stays = self.suppress(table.flatten(0, 1), score.flatten(0, 1), one.nms_thresh).unflatten(0, score.shape[:2])
        best, index = score.masked_fill(~stays, NOTHING).flatten(1).topk(kept)
        return table.flatten(1, 2).gather(1, index[..., None].expand(-1, -1, 4)), best > NOTHING

    def _anchors(self, level: int, whole: Any, grid: Any) -> Tensor:
        """(places * anchors of a place, 4), as torchvision's generator has them."""
        base: Tensor = self.stage_one.anchor_generator.cell_anchors[level]
        y, x = (torch.arange(n) * (side // n) for side, n in zip(whole, grid, strict=True))
        y, x = (part.flatten() for part in torch.meshgrid(y, x, indexing="ij"))
        return (torch.stack([x, y, x, y], 1)[:, None] + base).flatten(0, 1)

    # Stage two: proposals to objects ----------------------------------------------------------------------------

    def _objects(
        self, maps: dict[str, Tensor], proposals: Tensor, there: Tensor, size: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, 4) boxes in pixels of what the network saw, (B, N) scores and labels, the surest first."""
        two, (picture, place) = self.stage_two, there.nonzero().unbind(1)
        found = proposals[picture, place]  # (n, 4), of all pictures
        logits, deltas = two.box_predictor(two.box_head(_pooled(two.box_roi_pool, maps, found, picture)))
        classes = logits.shape[1] - 1
        deltas = deltas.unflatten(1, (classes + 1, 4))[:, 1:]
        boxes = _clipped(decode(deltas, found[:, None], two.box_coder.weights), size)  # (n, classes, 4)
        scores = logits.softmax(1)[:, 1:]
        scores = scores.masked_fill((scores <= two.score_thresh) | _small(boxes, SMALLEST["object"]), NOTHING)
        shape = (proposals.shape[0], proposals.shape[1], classes)
        score = scores.new_full(shape, NOTHING).index_put((picture, place), scores).transpose(1, 2)
        table = boxes.new_zeros(*shape, 4).index_put((picture, place), boxes).transpose(1, 2)
        stays = self.suppress(table.flatten(0, 1), score.flatten(0, 1), two.nms_thresh).unflatten(0, score.shape[:2])
        best, index = (
            score.masked_fill(~stays, NOTHING).flatten(1).topk(min(two.detections_per_img, math.prod(shape[1:])))
        )
        table = table.flatten(1, 2).gather(1, index[..., None].expand(-1, -1, 4))
        return table, best, torch.where(best > NOTHING, index // shape[1], EMPTY)

    def _masks(self, maps: dict[str, Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """(B, N, 28, 28) probabilities."""
        two, (picture, place) = self.stage_two, (labels != EMPTY).nonzero().unbind(1)
        pooled = _pooled(two.mask_roi_pool, maps, boxes[picture, place], picture)
        found = two.mask_predictor(two.mask_head(pooled))
        own = labels[picture, place] + 1  # 0 is the background
        found = found.gather(1, own[:, None, None, None].expand(-1, -1, *found.shape[2:]))[:, 0].sigmoid()
        return found.new_zeros(*labels.shape, *found.shape[1:]).index_put((picture, place), found)

    # Answers ----------------------------------------------------------------------------------------------------

    def own_answers(
        self, inferred: Sequence[dict[str, Tensor]], shown: Sequence[Tensor], size: tuple[int, int]
    ) -> Answers:
        most, rows = int(self.thresholds()["objects"]), []
        for answer, picture in zip(inferred, shown, strict=True):
            seen = (picture.shape[1], picture.shape[2])
            found = restore({key: answer[key] for key in ("boxes", "labels", "scores")}, seen, size)
            row = {"boxes": found.boxes.clip(0, np.array([size[1], size[0]] * 2)), "labels": found.labels}
            row |= {"scores": found.scores} | ({"masks": answer["masks"][:, 0].numpy()} if "masks" in answer else {})
            empty = {"labels": EMPTY}
            rows.append({name: _filled(value, most, empty.get(name, 0)) for name, value in row.items()})
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def difference(self, one: Answers, other: Answers) -> Gap:
        """Sure objects of either are changed where the other has none of that class at that place."""
        total = Gap()
        for i in range(len(one["labels"])):
            pair = [{name: torch.from_numpy(each[name][i]) for name in self.outputs} for each in (one, other)]
            total += _matched(*pair) + _matched(*reversed(pair))
        return total

    def as_inferred(self, answers: Answers, batch: Batch) -> Any:
        rows = []
        for i, (picture, size) in enumerate(zip(batch.pictures, batch.sizes, strict=True)):
            row = {name: torch.from_numpy(answers[name][i]) for name in self.outputs}
            there = row["labels"] != EMPTY
            row = {name: value[there] for name, value in row.items()}
            height, width = (seen / whole for seen, whole in zip(picture.shape[1:], size, strict=True))
            row["boxes"] = row["boxes"] * torch.tensor([width, height] * 2)
            row["labels"] = row["labels"] + 1
            rows.append(row | ({"masks": row["masks"][:, None]} if "masks" in row else {}))
        return rows

    def thresholds(self) -> dict[str, float]:
        two = self.stage_two
        classes = two.box_predictor.cls_score.out_features - 1
        objects = min(two.detections_per_img, classes * self.stage_one.post_nms_top_n())
        return {"score": two.score_thresh, "overlap": two.nms_thresh, "objects": objects, "shown": SURE}


def decode(deltas: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    """(..., 4) boxes that lie by `deltas` beside anchors, as torchvision's `BoxCoder` has it."""
    sides = anchors[..., 2:] - anchors[..., :2]
    centre = anchors[..., :2] + 0.5 * sides
    step = torch.stack([deltas[..., i] / weights[i] for i in range(4)], -1)
    centre = step[..., :2] * sides + centre
    half = 0.5 * step[..., 2:].clamp(max=WIDEST).exp() * sides
    return torch.cat([centre - half, centre + half], -1)


def _clipped(boxes: Tensor, size: Any) -> Tensor:
    """(..., 4) boxes inside a picture of this height and width."""
    limits = (size[1], size[0], size[1], size[0])
    return torch.stack([boxes[..., i].clamp(0, limits[i]) for i in range(4)], -1)


def _small(boxes: Tensor, least: float) -> Tensor:
    return ((boxes[..., 2:] - boxes[..., :2]) < least).any(-1)


def _pooled(pool: Any, maps: dict[str, Tensor], boxes: Tensor, picture: Tensor) -> Tensor:
    """(n, C, side, side) of n boxes, each from the map that suits its size."""
    regions = torch.cat([picture[:, None].to(boxes.dtype), boxes], 1)
    sides = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
    levels = (USUAL_LEVEL + torch.log2(sides / USUAL_SIDE) + 1e-6).floor().clamp(0, len(STRIDES) - 1)
    first = maps[next(iter(STRIDES))]
    pooled = first.new_zeros(boxes.shape[0], first.shape[1], *pool.output_size)
    aligned = isinstance(pool, AlignedRoIAlign)
    for level, (name, stride) in enumerate(STRIDES.items()):
        here = (levels == level).nonzero()[:, 0]
        part = roi_align(maps[name], regions[here], pool.output_size, 1 / stride, pool.sampling_ratio, aligned)
        pooled = pooled.index_put((here,), part)
    return pooled


def _filled(values: np.ndarray, count: int, empty: float) -> np.ndarray:
    """As many rows as there are places."""
    rest = np.full((count - len(values), *values.shape[1:]), empty, values.dtype)
    return np.concatenate([values, rest])


def _matched(one: dict[str, Tensor], other: dict[str, Tensor]) -> Gap:
    """How far the sure objects of one, or else the surest, are from the nearest of the other, of the same class.

    In their scores and in their masks, of which the mean over its places counts.
    """
    sure = (one["scores"] >= one["scores"].max().clamp(max=SURE)) & (one["labels"] != EMPTY)
    if not sure.any():
        return Gap()
    iou = box_iou(one["boxes"][sure], other["boxes"]) * (one["labels"][sure][:, None] == other["labels"])
    overlap, nearest = iou.max(1)
    same = overlap >= SAME
    if not same.any():
        return Gap(changed=len(same), answers=len(same))
    scores = (one["scores"][sure] - other["scores"][nearest])[same].abs().max()
    moved = (one["boxes"][sure] - other["boxes"][nearest])[same].abs().max()
    if "masks" in one:  # the mean of each, for a box that is rounded otherwise moves the edges
        masks = (one["masks"][sure] - other["masks"][nearest])[same].abs().mean((1, 2)).max()
        scores = torch.maximum(scores, masks)
    return Gap(float(scores), int((~same).sum()), len(same), float(moved))
