"""Attention inside windows, read from and written to (B, H, W, C) maps: no window, mask or bias is ever in memory.

A program has one head and one window, and takes that window from one picture after another. What is the same for all
pictures stands in front of the loop: where its pixels are, and the bias of every pair of them, which is minus infinity,
or nearly, where one does not see the other.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.dot import dot
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters, processors

LOG2E = tl.constexpr(1.4426950408889634)  # kernels take powers of two: exp(x) = 2 ** (x log2(e))
DEPTH = 8  # partial sums that a program loads at once
VARYING = ["batch", "group", "height", "width", "shift", "heads"]  # compiled once for all
UNSEEN = tl.constexpr(-1e30)  # finite, so that a place of padding, which sees nothing, does not become NaN


@triton.jit
def _pixels(at, window, height, width, shift, WINDOW: tl.constexpr):
    """Row and column of a window's places `at`, whether there is such a pixel, and what other places it sees.

    Shifted windows wrap around. They then hold two or four ends of the map, which do not see each other: only places
    with the same number `end` do. Along an axis that one window covers nothing is shifted.
    """
    rows, columns = tl.cdiv(height, WINDOW), tl.cdiv(width, WINDOW)
    down, right = tl.where(rows > 1, shift, 0), tl.where(columns > 1, shift, 0)
    y = window // columns * WINDOW + at // WINDOW + down
    x = window % columns * WINDOW + at % WINDOW + right
    y = tl.where(y >= rows * WINDOW, y - rows * WINDOW, y)
    x = tl.where(x >= columns * WINDOW, x - columns * WINDOW, x)
    real = (at < WINDOW * WINDOW) & (y < height) & (x < width)
    end = tl.where(real, tl.where(y < down, 2, 0) + tl.where(x < right, 1, 0), 4)
    return y, x, real, end


@triton.jit
def _biases(
    table, head, heads, window, height, width, shift, WINDOW: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """(BLOCK, BLOCK) biases of a window's pairs, times log2(e): the table's entry for their step."""
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (i < WINDOW * WINDOW) & (j < WINDOW * WINDOW)
    step = (i // WINDOW - j // WINDOW + WINDOW - 1) * (2 * WINDOW - 1) + i % WINDOW - j % WINDOW + WINDOW - 1
    bias = tl.load(table + step * heads + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
    seen = j < WINDOW * WINDOW
    if MASKED:
        _, _, _, end_i = _pixels(i, window, height, width, shift, WINDOW)
        _, _, _, end_j = _pixels(j, window, height, width, shift, WINDOW)
        seen = seen & (end_i == end_j)
    return tl.where(seen, bias, UNSEEN)


@triton.jit
def _window(
    table, height, width, shift, heads, pixel_stride,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Of a program's window: offsets of its pixels in q, k and v and in a dense map, which there are, and biases."""
    head, window = tl.program_id(0) % heads, tl.program_id(0) // heads
    at, channel = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    y, x, real, _ = _pixels(at, window, height, width, shift, WINDOW)
    inside = real & (channel < DIM)
    pixel = y * width + x
    bias = _biases(table, head, heads, window, height, width, shift, WINDOW, MASKED, BLOCK)
    place = pixel * pixel_stride + head * DIM + channel
    dense_place = pixel * (heads * DIM) + head * DIM + channel
    return place, dense_place, inside, bias


@triton.jit
def _load_tiles(q, k, v, start, place, inside):
    tile_q = tl.load(q + start + place, mask=inside, other=0.0)
    tile_k = tl.load(k + start + place, mask=inside, other=0.0)
    tile_v = tl.load(v + start + place, mask=inside, other=0.0)
    return tile_q, tile_k, tile_v


@triton.jit
def _exponentials(tile_q, tile_k, bias, DIM: tl.constexpr):
    """The softmax of all pairs, (BLOCK, BLOCK), before rows are divided by their sums."""
    scale: tl.constexpr = DIM**-0.5
    logits = dot(tile_q, tl.trans(tile_k), None) * (scale * LOG2E) + bias
    return tl.exp2(logits - tl.max(logits, 1)[:, None])


@triton.jit(do_not_specialize=VARYING)
def _forward(
    q, k, v, table, out, batch, group, height, width, shift, heads, batch_stride, pixel_stride,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    place, out_place, inside, bias = _window(
        table, height, width, shift, heads, pixel_stride, WINDOW, MASKED, DIM, BLOCK, BLOCK_DIM
    )
    first = tl.program_id(1) * group
    for step in range(tl.minimum(group, batch - first)):
        picture = (first + step).to(tl.int64)
        tile_q, tile_k, tile_v = _load_tiles(q, k, v, picture * batch_stride, place, inside)
        weights = _exponentials(tile_q, tile_k, bias, DIM)
        mean = dot(weights.to(tile_v.dtype), tile_v, None) * (1.0 / tl.sum(weights, 1))[:, None]
        start = picture * height * width * heads * DIM
        tl.store(out + start + out_place, mean.to(tile_v.dtype), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _backward(
    grad, q, k, v, table, grad_q, grad_k, grad_v, partial,
    batch, group, height, width, shift, heads, batch_stride, pixel_stride,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    scale: tl.constexpr = DIM**-0.5
    place, grad_place, inside, bias = _window(
        table, height, width, shift, heads, pixel_stride, WINDOW, MASKED, DIM, BLOCK, BLOCK_DIM
    )
    grad_bias = tl.zeros((BLOCK, BLOCK), tl.float32)
    first = tl.program_id(1) * group
    for step in range(tl.minimum(group, batch - first)):
        picture = (first + step).to(tl.int64)
        tile_q, tile_k, tile_v = _load_tiles(q, k, v, picture * batch_stride, place, inside)
        start = picture * height * width * heads * DIM
        tile_grad = tl.load(grad + start + grad_place, mask=inside, other=0.0)
        weights = _exponentials(tile_q, tile_k, bias, DIM)
        weights = weights * (1.0 / tl.sum(weights, 1))[:, None]
        grad_tile_v = dot(tl.trans(weights.to(tile_v.dtype)), tile_grad, None)
        tl.store(grad_v + start + grad_place, grad_tile_v.to(tile_v.dtype), mask=inside)
        grad_weights = dot(tile_grad, tl.trans(tile_v), None)
        grad_logits = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None])
        grad_bias += grad_logits
        grad_logits = grad_logits.to(tile_q.dtype)
        grad_tile_q = dot(grad_logits, tile_k, None) * scale
        tl.store(grad_q + start + grad_place, grad_tile_q.to(tile_q.dtype), mask=inside)
        grad_tile_k = dot(tl.trans(grad_logits), tile_q, None) * scale
        tl.store(grad_k + start + grad_place, grad_tile_k.to(tile_k.dtype), mask=inside)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    pair = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(partial + program.to(tl.int64) * (BLOCK * BLOCK) + pair, grad_bias)


@triton.jit(do_not_specialize=["programs", "heads"])
def _table_gradient(
    partial,
    grad_table,
    programs,
    heads,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sums, for one head and one step down, the gradients of all pairs so far apart, for each step right."""
    head, down = tl.program_id(0), tl.program_id(1) - WINDOW + 1
    i, right = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, STEPS)[None, None, :] - WINDOW + 1
    y, x = i // WINDOW - down, i % WINDOW - right  # of the other pixel
    inside = (i < WINDOW * WINDOW) & (y >= 0) & (y < WINDOW) & (x >= 0) & (x < WINDOW)
    pair = i * BLOCK + y * WINDOW + x
    total = tl.zeros((BLOCK, STEPS), tl.float32)
    for first in range(0, programs, DEPTH):
        program = first + tl.arange(0, DEPTH)[:, None, None]
        start = (program * heads + head).to(tl.int64) * (BLOCK * BLOCK)
        total += tl.sum(tl.load(partial + start + pair, mask=inside & (program < programs), other=0.0), 0)
    step = tl.arange(0, STEPS)
    entry = (tl.program_id(1) * (2 * WINDOW - 1) + step) * heads + head
    tl.store(grad_table + entry, tl.sum(total, 0), mask=step < 2 * WINDOW - 1)


def _in_one_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maps in one layout: their own, if it is the same and pixels and rows follow one another, else contiguous."""
    layout = q.stride()
    if k.stride() == layout == v.stride() and layout[3] == 1 and layout[1] == q.shape[2] * layout[2]:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


@cache
def _partition(
    shape: tuple[int, ...], heads: int, window: int, shifted: bool, programs: int
) -> tuple[tuple[int, int], tuple[int, ...], tuple[Any, ...]]:
    """How a (B, H, W, C) map is divided among about so many programs: their grid, and numbers that kernels take."""
    batch, height, width, channels = shape
    dim, pairs = channels // heads, cdiv(height, window) * cdiv(width, window) * heads
    group = max(1, cdiv(batch, max(1, programs // pairs)))  # pictures that a program takes one after another
    masked = shifted or height % window != 0 or width % window != 0
    constants = window, masked, dim, max(16, power_of_two(window**2)), max(16, power_of_two(dim))
    return (pairs, cdiv(batch, group)), (batch, group, height, width, window // 2 * shifted, heads), constants


def forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    q, k, v = _in_one_layout(q, k, v)
    shape, heads = q.shape, table.shape[1]
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.numel():
        programs, options = _options("window_attention", q, heads)
        grid, sizes, constants = _partition(shape, heads, window, shifted, programs)
        strides = q.stride(0), q.stride(2)
        launch(_forward, grid, q, k, v, table.contiguous(), out, *sizes, *strides, *constants, **options)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _in_one_layout(q, k, v)
    shape, heads = q.shape, table.shape[1]
    grad_q, grad_k, grad_v = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(3))
    if not q.numel():
        return grad_q, grad_k, grad_v, torch.zeros_like(table)
    grad_table = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    programs, options = _options("window_attention_backward", q, heads)
    grid, sizes, constants = _partition(shape, heads, window, shifted, programs)
    programs, block = grid[0] * grid[1] // heads, constants[3]  # programs of one head
    partial = torch.empty(programs, heads, block, block, dtype=torch.float32, device=q.device)
    maps = grad.contiguous(), q, k, v, table.contiguous(), grad_q, grad_k, grad_v, partial
    launch(_backward, grid, *maps, *sizes, q.stride(0), q.stride(2), *constants, **options)
    steps = 2 * window - 1
    sizes = programs, heads, window, block, power_of_two(steps), DEPTH
    launch(_table_gradient, (heads, steps), partial, grad_table, *sizes, num_warps=8)
    return grad_q, grad_k, grad_v, grad_table


def _options(operation: str, q: Tensor, heads: int) -> tuple[int, dict[str, int]]:
    """About how many programs, and what else they are launched with."""
    found = launch_parameters(operation, heads=heads)
    # More stages of float32 might not fit into a smaller GPU's shared memory.
    options = dict(num_warps=found["num_warps"], num_stages=found["num_stages"] if q.dtype.itemsize == 2 else 1)
    return found["per_processor"] * processors(q.device), options
