"""3x3 max-pooling of a map, which torch does slowly, and with eight bytes per output for the gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.case import Case, Shape
from weft.kernels.op import define
from weft.kernels.switch import usable


def plain_max_pool(x: Tensor, stride: int) -> Tensor:
    """The twin: the largest of 3x3 neighbours, at every `stride`-th row and column."""
    return F.max_pool2d(x.permute(0, 3, 1, 2), 3, stride, padding=1).permute(0, 2, 3, 1)


def _plain(x: Tensor, stride: int, places: bool) -> tuple[Tensor, Tensor]:
    """Also where in its window each largest value was, 0 to 8, if `places`."""
    y, index = F.max_pool2d(x.permute(0, 3, 1, 2), 3, stride, padding=1, return_indices=True)
    rows, columns = (torch.arange(n, device=x.device) * stride - 1 for n in y.shape[2:])
    row, column = index // x.shape[2] - rows[:, None], index % x.shape[2] - columns
    place = (3 * row + column).to(torch.int8).permute(0, 2, 3, 1)
    return y.permute(0, 2, 3, 1).contiguous(), place.contiguous() if places else place.new_empty(0)


def _plain_backward(grad: Tensor, place: Tensor, height: int, width: int, stride: int) -> Tensor:
    batch, rows, columns, channels = grad.shape
    padded = grad.new_zeros(batch, height + 2, width + 2, channels)
    for tap in range(9):
        y, x = tap // 3, tap % 3
        window = padded[:, y : y + stride * (rows - 1) + 1 : stride, x : x + stride * (columns - 1) + 1 : stride]
        window += torch.where(place == tap, grad, 0)
    return padded[:, 1:-1, 1:-1].contiguous()


def _fake(x: Tensor, stride: int, places: bool) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = x.shape
    shape = (batch, (height - 1) // stride + 1, (width - 1) // stride + 1, channels)
    place = torch.empty(shape if places else 0, dtype=torch.int8, device=x.device)
    return torch.empty(shape, dtype=x.dtype, device=x.device), place


def _launch(x: Tensor, stride: int, places: bool) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import pool

    y, place = _fake(x, stride, places)
    pool.forward(x.contiguous(), y, place if places else None, stride)
    return y, place


def _launch_backward(grad: Tensor, place: Tensor, height: int, width: int, stride: int) -> Tensor:
    from weft.kernels.gpu import pool

    return pool.backward(grad.contiguous(), place, height, width, stride)


def _fake_backward(grad: Tensor, place: Tensor, height: int, width: int, stride: int) -> Tensor:
    return torch.empty(grad.shape[0], height, width, grad.shape[3], dtype=grad.dtype, device=grad.device)


def _setup(ctx: Any, inputs: tuple[Tensor, int, bool], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.stride, _ = inputs
    ctx.height, ctx.width = x.shape[1:3]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (place,) = ctx.saved_tensors
    return max_pool_backward(grad, place, ctx.height, ctx.width, ctx.stride), None, None


max_pool_backward = define(
    "max_pool_backward(Tensor grad, Tensor place, SymInt height, SymInt width, int stride) -> Tensor",
    _plain_backward,
    _launch_backward,
    _fake_backward,
)
max_pool_forward = define(
    "max_pool(Tensor x, int stride, bool places) -> (Tensor, Tensor)", _plain, _launch, _fake, _setup, _backward
)


def max_pool(x: Tensor, stride: int) -> Tensor:
    """The largest of 3x3 neighbours of a (B, H, W, C) map, at every `stride`-th (1 or 2) row and column."""
    if torch.jit.is_scripting():
        return plain_max_pool(x, stride)
    else:  # not compiled by TorchScript
        if not usable(x):
            return plain_max_pool(x, stride)
        return max_pool_forward(x, stride, torch.is_grad_enabled() and x.requires_grad)[0]


def _inputs(device: torch.device, batch: int) -> Tensor:
    """What comes behind the first convolution of CeiT and VT-ResNet."""
    return torch.randn(batch, 112, 112, 64, device=device, dtype=torch.bfloat16)


def _backward_inputs(device: torch.device) -> tuple[Any, ...]:
    y, place = max_pool_forward(_inputs(device, 128), 2, True)
    return torch.randn_like(y), place, 112, 112, 2


def cases() -> list[Case]:
    size = 112 * 112 * 64
    shape: Shape = dict(channels=64, stride=2)
    tiles = [dict(BLOCK=rows * warps, BLOCK_C=64, num_warps=warps) for rows in (4, 8) for warps in (2, 4, 8)]
    return [
        Case(
            "max_pool",
            shape,
            lambda device: (_inputs(device, 256), 2),
            lambda x, stride: max_pool_forward(x, stride, False)[0],
            plain_max_pool,
            bytes=256 * size * 5 // 2,
            candidates=tiles,
        ),
        Case(
            "max_pool_backward",
            shape,
            _backward_inputs,
            max_pool_backward,
            _plain_backward,
            bytes=128 * size * 11 // 4,
            candidates=tiles,
        ),
    ]
