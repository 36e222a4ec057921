"""3x3 max-pooling of a map, which torch does slowly, and with eight bytes per output for the gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.op import define


def reference_max_pool(x: Tensor, stride: int) -> Tensor:
    """The reference: the largest of 3x3 neighbours, at every `stride`-th row and column."""
    return F.max_pool2d(x.permute(0, 3, 1, 2), 3, stride, padding=1).permute(0, 2, 3, 1)


def _reference(x: Tensor, stride: int, places: bool) -> tuple[Tensor, Tensor | None]:
    """Also where in its window each largest value was, 0 to 8, if `places`."""
    y, index = F.max_pool2d(x.permute(0, 3, 1, 2), 3, stride, padding=1, return_indices=True)
    rows, columns = (torch.arange(n, device=x.device) * stride - 1 for n in y.shape[2:])
    row, column = index // x.shape[2] - rows[:, None], index % x.shape[2] - columns
    place = (3 * row + column).to(torch.int8).permute(0, 2, 3, 1)
    return y.permute(0, 2, 3, 1), place if places else None


def _reference_backward(grad: Tensor, place: Tensor, height: int, width: int, stride: int) -> Tensor:
    batch, rows, columns, channels = grad.shape
    padded = grad.new_zeros(batch, height + 2, width + 2, channels)
    for tap in range(9):
        y, x = tap // 3, tap % 3
        window = padded[:, y : y + stride * (rows - 1) + 1 : stride, x : x + stride * (columns - 1) + 1 : stride]
        window += torch.where(place == tap, grad, 0)
    return padded[:, 1:-1, 1:-1]


def _setup(ctx: Any, inputs: tuple[Tensor, int, bool], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.stride, _ = inputs
    ctx.height, ctx.width = x.shape[1:3]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (place,) = ctx.saved_tensors
    return max_pool_backward.run(grad, place, ctx.height, ctx.width, ctx.stride), None, None


max_pool_backward = define("max_pool_backward", _reference_backward, "pool.backward")
max_pool_forward = define("max_pool", _reference, "pool.forward", setup=_setup, backward=_backward)
