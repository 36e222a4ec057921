"""3x3 max-pooling: every value is read once or from the cache, its place in the window is kept in one byte."""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters


@triton.jit(do_not_specialize=["positions", "height", "width", "rows_out", "columns_out"])
def _forward(
    x, y, place, positions, height, width, channels, rows_out, columns_out,
    STRIDE: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of outputs
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    line = position // columns_out
    left = position % columns_out * STRIDE - 1
    top = line % rows_out * STRIDE - 1
    start = (((line // rows_out).to(tl.int64) * height + top) * width + left) * channels
    written = (position < positions)[:, None] & (channel < channels)[None, :]
    best = tl.full((BLOCK, BLOCK_C), float("-inf"), tl.float32)
    values, insides = (), ()
    for tap in tl.static_range(9):
        row, column = top + tap // 3, left + tap % 3
        inside = (row.to(tl.uint32) < height) & (column.to(tl.uint32) < width)  # unsigned, -1 is large
        at = start + (tap // 3 * width + tap % 3) * channels
        value = tl.load(x + at[:, None] + channel[None, :], mask=inside[:, None] & written, other=float("-inf"))
        value = value.to(tl.float32)
        best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
        values, insides = values + (value,), insides + (inside,)
    at = (position.to(tl.int64) * channels)[:, None] + channel[None, :]
    tl.store(y + at, best, mask=written)
    if PLACES:  # backwards, so that the first of equals stays, as torch has it
        found = tl.full((BLOCK, BLOCK_C), 4, tl.int8)
        for back in tl.static_range(9):
            found = tl.where((values[8 - back] == best) & insides[8 - back][:, None], 8 - back, found).to(tl.int8)
        tl.store(place + at, found, mask=written)


@triton.jit
def _gather_gradient(
    grad, place, picture, row, column, channel, written, rows_out, columns_out, channels,
    ROW: tl.constexpr, COLUMN: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of inputs (row * STRIDE + ROW, column * STRIDE + COLUMN), from all windows that chose them."""
    total = tl.zeros(written.shape, tl.float32)
    for tap in tl.static_range(9):
        if (ROW + 1 - tap // 3) % STRIDE == 0 and (COLUMN + 1 - tap % 3) % STRIDE == 0:
            out_row = row + (ROW + 1 - tap // 3) // STRIDE
            out_column = column + (COLUMN + 1 - tap % 3) // STRIDE
            inside = (out_row >= 0) & (out_row < rows_out) & (out_column >= 0) & (out_column < columns_out)
            at = ((picture * rows_out + out_row) * columns_out + out_column) * channels
            at, mask = at[:, None] + channel[None, :], inside[:, None] & written
            chosen = tl.load(place + at, mask=mask, other=-1) == tap
            total += tl.where(chosen, tl.load(grad + at, mask=mask, other=0.0).to(tl.float32), 0.0)
    return total


@triton.jit(do_not_specialize=["blocks", "height", "width", "rows_out", "columns_out"])
def _backward(
    grad, place, grad_x, blocks, height, width, channels, rows_out, columns_out,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Each program has blocks of STRIDE x STRIDE inputs: at stride 2 four, which look at the same four windows."""
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    columns, rows = tl.cdiv(width, STRIDE), tl.cdiv(height, STRIDE)
    column, row = block % columns, block // columns % rows
    picture = (block // columns // rows).to(tl.int64)
    written = (block < blocks)[:, None] & (channel < channels)[None, :]
    totals = ()  # all before the first is stored, so that what was loaded for one serves the others
    for i in tl.static_range(STRIDE * STRIDE):
        total = _gather_gradient(
            grad, place, picture, row, column, channel, written, rows_out, columns_out, channels,
            i // STRIDE, i % STRIDE, STRIDE,
        )  # fmt: skip
        totals = totals + (total,)
    for i in tl.static_range(STRIDE * STRIDE):
        at_row, at_column = row * STRIDE + i // STRIDE, column * STRIDE + i % STRIDE
        at = ((picture * height + at_row) * width + at_column) * channels
        mask = written & (at_row < height)[:, None] & (at_column < width)[:, None]
        tl.store(grad_x + at[:, None] + channel[None, :], totals[i], mask=mask)


def _parameters(operation: str, channels: int) -> tuple[int, int, int]:
    found = launch_parameters(operation)
    return found["BLOCK"], min(found["BLOCK_C"], power_of_two(channels)), found["num_warps"]


def forward(x: Tensor, stride: int, places: bool) -> tuple[Tensor, Tensor | None]:
    x, (batch, height, width, channels) = x.contiguous(), x.shape
    rows_out, columns_out = cdiv(height, stride), cdiv(width, stride)
    y = x.new_empty(batch, rows_out, columns_out, channels)
    place = torch.empty_like(y, dtype=torch.int8) if places else None
    positions = batch * rows_out * columns_out
    block, block_c, warps = _parameters("max_pool", channels)
    launch(
        _forward, (cdiv(positions, block), cdiv(channels, block_c)), x, y, place,
        positions, height, width, channels, rows_out, columns_out,
        stride, places, block, block_c, num_warps=warps,
    )  # fmt: skip
    return y, place


def backward(grad: Tensor, place: Tensor, height: int, width: int, stride: int) -> Tensor:
    grad = grad.contiguous()
    batch, rows_out, columns_out, channels = grad.shape
    grad_x = torch.empty(batch, height, width, channels, dtype=grad.dtype, device=grad.device)
    blocks = batch * cdiv(height, stride) * cdiv(width, stride)
    block, block_c, warps = _parameters("max_pool_backward", channels)
    launch(
        _backward, (cdiv(blocks, block), cdiv(channels, block_c)), grad, place, grad_x,
        blocks, height, width, channels, rows_out, columns_out,
        stride, block, block_c, num_warps=warps,
    )  # fmt: skip
    return grad_x
