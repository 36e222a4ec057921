"""Attention inside windows, read from and written to (B, H, W, C) maps: no window, mask or bias is ever in memory.

A program has one head and one window, and takes that window from one picture after another. What is the same for all
pictures stands in front of the loop: where its pixels are, and the bias of every pair of them, which is minus infinity,
or nearly, where one does not see the other.
"""

# pyright: basic

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.choose import launch_parameters
from weft.kernels.switch import interpreted

INTERPRETED = tl.constexpr(interpreted())
LOG2E = tl.constexpr(1.4426950408889634)  # kernels take powers of two: exp(x) = 2 ** (x log2(e))
UNSEEN = tl.constexpr(-1e30)  # finite, so that a place of padding, which sees nothing, does not become NaN


@triton.jit
def _pixels(at, window, height, width, rows, columns, down, right, WINDOW: tl.constexpr):
    """Row and column of a window's places `at`, and whether there is such a pixel. Shifted windows wrap around."""
    y = window // columns * WINDOW + at // WINDOW + down
    x = window % columns * WINDOW + at % WINDOW + right
    y = tl.where(y >= rows * WINDOW, y - rows * WINDOW, y)
    x = tl.where(x >= columns * WINDOW, x - columns * WINDOW, x)
    return y, x, (at < WINDOW * WINDOW) & (y < height) & (x < width)


@triton.jit
def _area(at, window, height, width, rows, columns, down, right, WINDOW: tl.constexpr):
    """A number for each place of a window: those that see each other have the same."""
    y, x, real = _pixels(at, window, height, width, rows, columns, down, right, WINDOW)
    return tl.where(real, tl.where(y < down, 2, 0) + tl.where(x < right, 1, 0), 4)


@triton.jit
def _biases(
    table,
    head,
    heads,
    window,
    height,
    width,
    rows,
    columns,
    down,
    right,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(BLOCK, BLOCK) biases of a window's pairs, times log2(e): the table's entry for their step."""
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (i < WINDOW * WINDOW) & (j < WINDOW * WINDOW)
    step = (i // WINDOW - j // WINDOW + WINDOW - 1) * (2 * WINDOW - 1) + i % WINDOW - j % WINDOW + WINDOW - 1
    bias = tl.load(table + step * heads + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
    seen = j < WINDOW * WINDOW
    if MASKED:
        of_i = _area(i, window, height, width, rows, columns, down, right, WINDOW)
        of_j = _area(j, window, height, width, rows, columns, down, right, WINDOW)
        seen = seen & (of_i == of_j)
    return tl.where(seen, bias, UNSEEN)


@triton.jit
def _product(a, b):
    """a b in float32. Float32 matrices keep their precision, on matrix units, by three products of tf32."""
    if INTERPRETED:  # Triton's interpreter takes the bits of bfloat16 for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _forward(
    q,
    k,
    v,
    table,
    out,
    batch,
    group,
    height,
    width,
    rows,
    columns,
    down,
    right,
    heads,
    batch_stride,
    pixel_stride,
    scale,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head, window = tl.program_id(0) % heads, tl.program_id(0) // heads
    at, channel = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    y, x, real = _pixels(at, window, height, width, rows, columns, down, right, WINDOW)
    inside = real & (channel < DIM)
    pixel = y * width + x
    bias = _biases(table, head, heads, window, height, width, rows, columns, down, right, WINDOW, MASKED, BLOCK)
    place = pixel * pixel_stride + head * DIM + channel
    out_place = pixel * (heads * DIM) + head * DIM + channel
    first = tl.program_id(1) * group
    for step in range(tl.minimum(group, batch - first)):
        picture = (first + step).to(tl.int64)
        start = picture * batch_stride
        tile_q = tl.load(q + start + place, mask=inside, other=0.0)
        tile_k = tl.load(k + start + place, mask=inside, other=0.0)
        tile_v = tl.load(v + start + place, mask=inside, other=0.0)
        logits = _product(tile_q, tl.trans(tile_k)) * (scale * LOG2E) + bias
        weights = tl.exp2(logits - tl.max(logits, 1)[:, None])
        mean = _product(weights.to(tile_v.dtype), tile_v) * (1.0 / tl.sum(weights, 1))[:, None]
        start = picture * height * width * heads * DIM
        tl.store(out + start + out_place, mean.to(tile_v.dtype), mask=inside)


@triton.jit
def _backward(
    grad,
    q,
    k,
    v,
    table,
    grad_q,
    grad_k,
    grad_v,
    partial,
    batch,
    group,
    height,
    width,
    rows,
    columns,
    down,
    right,
    heads,
    batch_stride,
    pixel_stride,
    scale,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head, window = tl.program_id(0) % heads, tl.program_id(0) // heads
    at, channel = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    y, x, real = _pixels(at, window, height, width, rows, columns, down, right, WINDOW)
    inside = real & (channel < DIM)
    pixel = y * width + x
    bias = _biases(table, head, heads, window, height, width, rows, columns, down, right, WINDOW, MASKED, BLOCK)
    place = pixel * pixel_stride + head * DIM + channel
    grad_place = pixel * (heads * DIM) + head * DIM + channel
    grad_bias = tl.zeros((BLOCK, BLOCK), tl.float32)
    first = tl.program_id(1) * group
    for step in range(tl.minimum(group, batch - first)):
        picture = (first + step).to(tl.int64)
        start = picture * batch_stride
        tile_q = tl.load(q + start + place, mask=inside, other=0.0)
        tile_k = tl.load(k + start + place, mask=inside, other=0.0)
        tile_v = tl.load(v + start + place, mask=inside, other=0.0)
        start = picture * height * width * heads * DIM
        tile_grad = tl.load(grad + start + grad_place, mask=inside, other=0.0)
        logits = _product(tile_q, tl.trans(tile_k)) * (scale * LOG2E) + bias
        weights = tl.exp2(logits - tl.max(logits, 1)[:, None])
        weights = weights * (1.0 / tl.sum(weights, 1))[:, None]
        grad_tile_v = _product(tl.trans(weights.to(tile_v.dtype)), tile_grad)
        tl.store(grad_v + start + grad_place, grad_tile_v.to(tile_v.dtype), mask=inside)
        grad_weights = _product(tile_grad, tl.trans(tile_v))
        grad_logits = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None])
        grad_bias += grad_logits
        grad_logits = grad_logits.to(tile_q.dtype)
        grad_tile_q = _product(grad_logits, tile_k) * scale
        tl.store(grad_q + start + grad_place, grad_tile_q.to(tile_q.dtype), mask=inside)
        grad_tile_k = _product(tl.trans(grad_logits), tile_q) * scale
        tl.store(grad_k + start + grad_place, grad_tile_k.to(tile_k.dtype), mask=inside)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    pair = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(partial + program.to(tl.int64) * (BLOCK * BLOCK) + pair, grad_bias)


@triton.jit
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


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The maps in one layout: their own, if it is the same and pixels and rows follow one another, else contiguous."""
    first = tensors[0].stride()
    if all(t.stride() == first for t in tensors) and first[3] == 1 and first[1] == tensors[0].shape[2] * first[2]:
        return tensors
    return tuple(t.contiguous() for t in tensors)


class _Work:
    """How a map is divided among programs, and the arguments that the kernels share."""

    def __init__(self, operation: str, q: Tensor, heads: int, window: int, shifted: bool, default: dict[str, Any]):
        batch, height, width, channels = q.shape
        rows, columns = triton.cdiv(height, window), triton.cdiv(width, window)
        down, right = (window // 2 * (rows > 1), window // 2 * (columns > 1)) if shifted else (0, 0)
        dim, self.block = channels // heads, max(16, triton.next_power_of_2(window**2))
        shape = dict(pixels=batch * height * width, heads=heads, dim=dim, window=window, kind=str(q.dtype)[6:])
        launch = launch_parameters(operation, q.device, default, **shape)
        pairs = rows * columns * heads
        groups = max(1, min(batch, launch.pop("programs") // pairs))
        group = max(1, triton.cdiv(batch, groups))
        self.grid = (pairs, triton.cdiv(batch, group))
        sizes = batch, group, height, width, rows, columns, down, right, heads, q.stride(0), q.stride(2), dim**-0.5
        self.sizes = sizes
        self.options = dict(
            WINDOW=window,
            MASKED=bool(down or right or height % window or width % window),
            DIM=dim,
            BLOCK=self.block,
            BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
            **launch,
        )


def forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    q, k, v = _alike(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    default = dict(programs=2048, num_warps=4, num_stages=2)
    work = _Work("window_attention", q, table.shape[1], window, shifted, default)
    if out.numel():
        _forward[work.grid](q, k, v, table.contiguous(), out, *work.sizes, **work.options)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _alike(q, k, v)
    table = table.contiguous()
    grads = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    grad_table = torch.empty_like(table)
    heads = table.shape[1]
    default = dict(programs=528, num_warps=4, num_stages=1)
    work = _Work("window_attention_backward", q, heads, window, shifted, default)
    programs, block = work.grid[0] * work.grid[1] // heads, work.block
    partial = torch.empty(programs, heads, block, block, dtype=torch.float32, device=q.device)
    if q.numel():
        _backward[work.grid](grad.contiguous(), q, k, v, table, *grads, partial, *work.sizes, **work.options)
    steps = triton.next_power_of_2(2 * window - 1)
    _table_gradient[(heads, 2 * window - 1)](partial, grad_table, programs, heads, window, block, steps, 8, num_warps=8)
    return grads[0], grads[1], grads[2], grad_table
