"""Activations as one pass over memory."""

# pyright: basic, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.activations import KINDS, activate, slope
from weft.kernels.triton.launch import cdiv, launch

BLOCK = 2048


@triton.jit
def _forward(x, y, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, KIND), mask=inside)


@triton.jit
def _backward(grad, x, grad_x, y, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_x + at, upstream * slope(value, KIND), mask=inside)
    if y is not None:
        tl.store(y + at, activate(value, KIND), mask=inside)


def forward(x: Tensor, kind: str) -> Tensor:
    x = x.contiguous()
    y, size = torch.empty_like(x), x.numel()
    if size:
        launch(_forward, (cdiv(size, BLOCK),), x, y, size, KINDS[kind], BLOCK, num_warps=4)
    return y


def backward(grad: Tensor, x: Tensor, kind: str, with_output: bool) -> tuple[Tensor, Tensor | None]:
    grad, x = grad.contiguous(), x.contiguous()
    grad_x, size = torch.empty_like(x), x.numel()
    y = torch.empty_like(x) if with_output else None
    if size:
        launch(_backward, (cdiv(size, BLOCK),), grad, x, grad_x, y, size, KINDS[kind], BLOCK, num_warps=4)
    return grad_x, y
