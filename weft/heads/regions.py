"""The stages of a detector that torchvision has, with what mmdetection does otherwise as arguments.

| part | torchvision | mmdetection, which the papers used |
|---|---|---|
| RoIAlign | corners half a pixel of the map off | corners at their places |
| its points in a bin | 2 x 2 | as many as the bin has pixels of the map |
| loss of boxes, both stages | smooth L1, with a beta of 1/9 | L1 |
| a proposal on two objects | is that of the one it overlaps more | unless it is the best of the other |
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import MultiScaleRoIAlign, box_iou, roi_align
from torchvision.ops.poolers import initLevelMapper

STRIDES = {"0": 4, "1": 8, "2": 16, "3": 32}  # of the maps that regions are read from
USUAL_SIDE, USUAL_LEVEL = 224, 2  # a region of this side is read from the map of stride 16 (Lin et al. 2017)


class PlainL1(TorchFunctionMode):
    """Inside of it smooth L1 is L1: torchvision's losses have no argument for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"beta": 0.0} if func is F.smooth_l1_loss else {}))


BOX_LOSSES: dict[str, Callable[[], AbstractContextManager[Any]]] = {"smooth-l1": nullcontext, "l1": PlainL1}


class Proposals(RegionProposalNetwork):
    """The first stage: anchors to proposals."""

    def __init__(self, *parts: Any, box_loss: str, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.box_loss = BOX_LOSSES[box_loss]

    def compute_loss(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with self.box_loss():
            return super().compute_loss(*args, **kwargs)


class Regions(RoIHeads):
    """The second stage: proposals to classes, boxes and masks."""

    def __init__(self, *parts: Any, box_loss: str, low_quality_matches: bool, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.box_loss, self.low_quality_matches = BOX_LOSSES[box_loss], low_quality_matches

    def forward(self, *args: Any, **kwargs: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        with self.box_loss() if self.training else nullcontext():
            return super().forward(*args, **kwargs)

    def assign_targets_to_proposals(
        self, proposals: list[Tensor], gt_boxes: list[Tensor], gt_labels: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The object, by its position, and the class, 0 for none, of each proposal of each picture."""
        matched, labels = super().assign_targets_to_proposals(proposals, gt_boxes, gt_labels)
        if self.low_quality_matches:
            for i, (found, boxes) in enumerate(zip(proposals, gt_boxes, strict=True)):
                chosen, objects = best_of_objects(found, boxes, self.proposal_matcher.high_threshold)
                matched[i][chosen], labels[i][chosen] = objects, gt_labels[i][objects]
        return matched, labels


def best_of_objects(proposals: Tensor, boxes: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Proposals (n, 4) that are the best of an object (m, 4), with an IoU of at least `least`: (k,) numbers of both.

    Of several objects with the same best proposal the last has it. The last m proposals are the objects themselves, as
    torchvision adds them, and take no part, or there would be no other best.
    """
    found = len(proposals) - len(boxes)
    if not found or not len(boxes):
        nobody = torch.empty(0, dtype=torch.int64, device=boxes.device)
        return nobody, nobody
    iou = box_iou(boxes, proposals[:found])  # (m, n)
    best = iou.amax(1, keepdim=True)
    numbers = torch.arange(1, len(boxes) + 1, device=boxes.device)[:, None]
    owner = (numbers * ((iou == best) & (best >= least))).amax(0)  # (n,), 0: nobody's best
    chosen = owner.nonzero()[:, 0]
    return chosen, owner[chosen] - 1


class AlignedRoIAlign(MultiScaleRoIAlign):
    """RoIAlign over the levels of a pyramid whose corners are not half a pixel off, torchvision's `aligned`."""

    def __init__(self, output_size: int, sampling_ratio: int) -> None:
        super().__init__([*STRIDES], output_size, sampling_ratio)

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """(n, C, side, side) of n boxes, those of all pictures, in pixels of the pictures."""
        regions = torch.cat(
            [F.pad(some, (1, 0), value=float(i)) for i, some in enumerate(boxes)]
        )  # picture and corners
        sides = ((regions[:, 3:] - regions[:, 1:3]).prod(1)).sqrt()
        levels = (USUAL_LEVEL + torch.log2(sides / USUAL_SIDE) + 1e-6).floor().clamp(0, len(STRIDES) - 1)
        maps = [x[name] for name in STRIDES]
        pooled = maps[0].new_zeros(len(regions), maps[0].shape[1], *self.output_size)
        for level, (features, stride) in enumerate(zip(maps, STRIDES.values(), strict=True)):
            here = (levels == level).nonzero()[:, 0]
            part = roi_align(features, regions[here], self.output_size, 1 / stride, self.sampling_ratio, aligned=True)
            pooled[here] = part.to(pooled.dtype)
        return pooled


def region_pool(side: int, sampling_ratio: int, aligned: bool) -> MultiScaleRoIAlign:
    """RoIAlign at the strides that the maps have.

    torchvision guesses them at the first call and keeps them; of a small picture that is padded a lot it guesses wrong.
    """
    if aligned:
        return AlignedRoIAlign(side, sampling_ratio)
    pool, strides = MultiScaleRoIAlign([*STRIDES], side, sampling_ratio), [*STRIDES.values()]
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = initLevelMapper(int(math.log2(strides[0])), int(math.log2(strides[-1])), USUAL_SIDE)
    return pool
