"""Sums over all rows of a map: each program sums a share of them into a line of its own, then the lines are summed.

No atomic additions, so that the same numbers give the same sum every time.
"""

# pyright: basic, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch

LINES, WIDTH = 256, 16


@triton.jit(do_not_specialize=["count"])
def _sum_lines(lines, first, second, count, stride, C, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """The first C columns of all lines, `stride` apart, and in the programs of the second axis the next C."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if tl.program_id(1) == 1:
        lines += C
        first = second
    total = tl.zeros((LINES, WIDTH), tl.float32)
    for start in range(0, count, LINES):
        line = start + tl.arange(0, LINES)
        mask = (line < count)[:, None] & (channel < C)[None, :]
        total += tl.load(lines + (line * stride)[:, None] + channel[None, :], mask=mask, other=0.0)
    tl.store(first + channel, tl.sum(total, axis=0), mask=channel < C)


def sum_lines(lines: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(count, 2, C) to twice (C,), the gradients of a weight and a bias."""
    count, _, channels = lines.shape
    first, second = torch.empty_like(weight), torch.empty_like(weight)
    grid = (cdiv(channels, WIDTH), 2)
    launch(_sum_lines, grid, lines, first, second, count, 2 * channels, channels, LINES, WIDTH, num_warps=8)
    return first, second


def sum_rows(lines: Tensor) -> Tensor:
    """(count, C) to (C,). There are a few hundred lines at most, for which torch's sum takes three times as long."""
    count, channels = lines.shape
    total = torch.empty(channels, device=lines.device)
    grid = (cdiv(channels, WIDTH), 1)
    launch(_sum_lines, grid, lines, total, total, count, channels, channels, LINES, WIDTH, num_warps=8)
    return total
