"""The sum over the rows of a matrix: what a bias gets as its gradient."""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.triton.shares import sum_rows
from weft.kernels.tuning.launches import launch_parameters, processors

ROWS, COLUMNS = 64, 64  # of a tile
STEPS = 16  # tiles that a program takes one after another, at most


@triton.jit(do_not_specialize=["rows"])
def _partial_sums(x, partial, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * (ROWS * STEPS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    place = tl.program_id(0) * columns + column
    tl.store(partial + place, tl.sum(total, 0), mask=column < columns)


def column_sums(x: Tensor) -> Tensor:
    """(N, C) -> (C,) in float32."""
    rows, columns = x.shape
    across, programs = cdiv(columns, COLUMNS), launch_parameters("column_sums")["per_processor"] * processors(x.device)
    steps = STEPS
    while steps > 1 and cdiv(rows, ROWS * steps) * across < programs:
        steps //= 2
    partial = torch.empty(cdiv(rows, ROWS * steps), columns, dtype=torch.float32, device=x.device)
    launch(_partial_sums, (partial.shape[0], across), x, partial, rows, columns, ROWS, COLUMNS, steps, num_warps=4)
    return sum_rows(partial)
