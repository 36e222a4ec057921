"""Pictures as they are kept, 8 bits, to what a model sees: normalised, erased, mixed, in one pass."""

from enum import IntEnum

import torch
from torch import Tensor

from weft.kernels.ops.op import define


class Mix(IntEnum):
    """The columns of what is drawn for a batch: boxes are top, bottom, left, right, without the last row and column."""

    ERASED = 0  # a box of each picture; nothing is erased where it is empty
    KEPT = 4  # from here on the same for all pictures: the part of each that stays ...
    GIVEN = 5  # ... and that its mirror place in the batch gives
    CUT = 6  # the box that cutmix takes from there; where it is empty, values are mixed
    COLUMNS = 10


def inside(boxes: Tensor, pictures: Tensor) -> Tensor:
    """(B, 1, h, w): which pixels lie in the box, a row of (B, 4), of their picture."""
    top, bottom, left, right = boxes[:, :, None, None, None].unbind(1)
    y = torch.arange(pictures.shape[-2], device=pictures.device)[:, None]
    x = torch.arange(pictures.shape[-1], device=pictures.device)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def erase(pictures: Tensor, rows: Tensor, noise: Tensor) -> Tensor:
    """The noise inside the box of each picture."""
    return torch.where(inside(rows[:, Mix.ERASED : Mix.KEPT], pictures), noise, pictures)


def mix(pictures: Tensor, rows: Tensor) -> Tensor:
    """Each picture mixed with its mirror place in the batch; where there is a box, what is inside is the other's."""
    cut = rows[:, Mix.CUT : Mix.COLUMNS]
    others, taken = pictures.flip(0), inside(cut, pictures)
    by_box = (cut[:, 1] > cut[:, 0]).view(-1, 1, 1, 1)
    kept = torch.where(by_box, (~taken).float(), rows[:, Mix.KEPT].view(-1, 1, 1, 1))
    given = torch.where(by_box, taken.float(), rows[:, Mix.GIVEN].view(-1, 1, 1, 1))
    return pictures * kept + others * given


def _reference(pictures: Tensor, rows: Tensor, mean: Tensor, std: Tensor, noise: Tensor | None, mixes: bool) -> Tensor:
    """(B, C, h, w) float32 of uint8; mean and std, (C, 1, 1), are of values from 0 to 1."""
    normal = pictures.to(torch.float32).div_(255).sub(mean).div_(std)
    normal = normal if noise is None else erase(normal, rows, noise)
    return mix(normal, rows) if mixes else normal


mix_pictures = define("mix_pictures", _reference, "mix.forward")
