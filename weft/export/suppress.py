"""Suppression of boxes that overlap surer ones, for any number of groups: a picture, or one class in it.

ONNX has an operation for that, which takes all groups at once. torch has torchvision's for one group; there the groups
are laid out so far apart that no boxes of two of them overlap, in float64, since float32 would round them.
"""

import torch
from torch import Tensor
from torchvision.ops import nms

NOTHING = float("-inf")  # the score of what is no box


def suppress(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Which of (G, N, 4) boxes stay, (G, N) bool: no surer one that stays in their group overlaps them by more."""
    apart = boxes.amax().double() + 1
    group, place = (scores > NOTHING).nonzero().unbind(1)
    corners = boxes[group, place].double() + (group * apart)[:, None]
    kept = nms(corners, scores[group, place].double(), threshold)
    return torch.zeros_like(scores, dtype=torch.bool).index_put((group[kept], place[kept]), torch.tensor(True))


@torch.library.custom_op("weft::suppress", mutates_args=())
def suppress_by_name(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """`suppress` as one operation, which stays one in a graph that becomes ONNX."""
    return suppress(boxes, scores, threshold)


@suppress_by_name.register_fake
def _(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(scores, dtype=torch.bool)
