"""3x3 convolutions in small groups, on the matrix units.

A group of 4 to 12 channels is too small for a matrix unit, so a program takes a block of output channels, some groups
wide, and the window of input channels that these groups read. The weights between them form a matrix with blocks along
its diagonal and zeros elsewhere; `_pack` writes these matrices out, one for each of the nine taps.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.choose import launch_parameters
from weft.kernels.gpu.activations import KINDS, activate, slope
from weft.kernels.gpu.dot import dot
from weft.kernels.gpu.launch import cdiv, launch

PACK = 1024  # weights that one program packs
CONVOLVE = dict(rows=128, chunk=32, block=32, num_warps=4, num_stages=3)
SUM_UP = dict(rows=128, chunk=32, block=64, splits=16, num_warps=4, num_stages=2)


@triton.jit
def _first(block, C_IN: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first channel of the window that a block of output channels reads; the window ends inside the map."""
    ALIGN: tl.constexpr = 8 if C_IN % 8 == 0 else 1
    aligned = block * BLOCK // OUT * IN // ALIGN * ALIGN
    return tl.minimum(aligned, max(C_IN - WINDOW, 0) // ALIGN * ALIGN)


@triton.jit
def _pack(
    weight,
    packed,
    size,
    C_IN: tl.constexpr,
    C_OUT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """(blocks, 9, CHUNKS * CHUNK, BLOCK) matrices; TRANSPOSED makes those of the gradient of the map."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = at // BLOCK
    tap = row // (CHUNKS * CHUNK) % 9
    block = row // (CHUNKS * CHUNK * 9)
    c = _first(block, C_IN, IN, OUT, CHUNKS * CHUNK, BLOCK) + row % (CHUNKS * CHUNK)
    o = block * BLOCK + at % BLOCK
    source = (c * OUT + o % OUT) * 9 + 8 - tap if TRANSPOSED else (o * IN + c % IN) * 9 + tap
    value = tl.load(weight + source, mask=(c // IN == o // OUT) & (o < C_OUT), other=0.0)
    tl.store(packed + at, value, mask=at < size)


@triton.jit
def _convolve(
    x,
    packed,
    bias,
    upstream,
    y,
    rows,
    height,
    width,
    C_IN: tl.constexpr,
    C_OUT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """Convolution and activation; with GRADIENT, `upstream` times the activation's slope instead."""
    BLOCKS: tl.constexpr = (C_OUT + BLOCK - 1) // BLOCK
    block, tile = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    r = tl.arange(0, ROWS)
    inside = tile * ROWS + r < rows
    h = (tile * ROWS + r) // width % height
    w = (tile * ROWS + r) % width
    c = _first(block, C_IN, IN, OUT, CHUNKS * CHUNK, BLOCK) + tl.arange(0, CHUNK)
    start = tile.to(tl.int64) * ROWS
    x += start * C_IN
    packed += block * 9 * CHUNKS * CHUNK * BLOCK
    matrix = tl.arange(0, CHUNK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]

    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(9 * CHUNKS):
        tap = i // CHUNKS
        dh, dw = tap // 3 - 1, tap % 3 - 1
        there = inside & (h + dh >= 0) & (h + dh < height) & (w + dw >= 0) & (w + dw < width)
        channel = c + i % CHUNKS * CHUNK
        mask = there[:, None] if CHUNKS * CHUNK <= C_IN else there[:, None] & (channel < C_IN)[None, :]
        value = tl.load(x + (r + dh * width + dw)[:, None] * C_IN + channel[None, :], mask=mask, other=0.0)
        weight = tl.load(packed + i * CHUNK * BLOCK + matrix)
        total = dot(value, weight, total)

    o = block * BLOCK + tl.arange(0, BLOCK)
    mask = inside[:, None] if C_OUT % BLOCK == 0 else inside[:, None] & (o < C_OUT)[None, :]
    at = start * C_OUT + r[:, None] * C_OUT + o[None, :]
    if HAS_BIAS:
        total += tl.load(bias + o, mask=o < C_OUT, other=0.0).to(tl.float32)[None, :]
    if GRADIENT:
        total = slope(total, KIND) * tl.load(upstream + at, mask=mask, other=0.0).to(tl.float32)
    else:
        total = activate(total, KIND)
    tl.store(y + at, total, mask=mask)


@triton.jit
def _parameters(
    grad,
    x,
    partial,
    rows,
    height,
    width,
    length,
    C_IN: tl.constexpr,
    C_OUT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums over `length` rows of the gradients of three taps, those of one row of the kernel, and of the bias."""
    kernel_row = tl.program_id(0) % 3
    chunk = tl.program_id(0) // 3 % CHUNKS
    block = tl.program_id(0) // (3 * CHUNKS)
    split = tl.program_id(1)
    c = _first(block, C_IN, IN, OUT, CHUNKS * CHUNK, BLOCK) + chunk * CHUNK + tl.arange(0, CHUNK)
    o = block * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    dh = kernel_row - 1
    for_bias = kernel_row + chunk == 0  # one program of each block sums the bias as well
    known = (c < C_IN)[None, :]  # always, where a window is no wider than the map

    left = tl.zeros((BLOCK, CHUNK), tl.float32)
    middle = tl.zeros((BLOCK, CHUNK), tl.float32)
    right = tl.zeros((BLOCK, CHUNK), tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    begin = split.to(tl.int64) * length
    grad += begin * C_OUT
    x += begin * C_IN
    for step in range(0, tl.minimum(length, rows - split * length), ROWS):
        m = split * length + step + r
        h, w = m // width % height, m % width
        inside = m < rows
        mask = inside[:, None] if C_OUT % BLOCK == 0 else inside[:, None] & (o < C_OUT)[None, :]
        upstream = tl.load(grad + (step + r)[:, None] * C_OUT + o[None, :], mask=mask, other=0.0)
        if for_bias:
            bias += tl.sum(upstream.to(tl.float32), axis=0)
        upstream = tl.trans(upstream)
        above = inside & (h + dh >= 0) & (h + dh < height)
        at = x + (step + r + dh * width)[:, None] * C_IN + c[None, :]
        value = tl.load(at - C_IN, mask=(above & (w > 0))[:, None] & known, other=0.0)
        left = dot(upstream, value, left)
        value = tl.load(at, mask=above[:, None] & known, other=0.0)
        middle = dot(upstream, value, middle)
        value = tl.load(at + C_IN, mask=(above & (w + 1 < width))[:, None] & known, other=0.0)
        right = dot(upstream, value, right)

    # What lies beside the diagonal belongs to no weight.
    mask = (c[None, :] // IN == o[:, None] // OUT) & (o < C_OUT)[:, None] & (c < C_IN)[None, :]
    partial += split * C_OUT * (IN * 9 + 1)
    at = partial + (o[:, None] * IN + c[None, :] % IN) * 9 + kernel_row * 3
    tl.store(at, left, mask=mask)
    tl.store(at + 1, middle, mask=mask)
    tl.store(at + 2, right, mask=mask)
    if for_bias:
        tl.store(partial + C_OUT * IN * 9 + o, bias, mask=o < C_OUT)


@cache
def _chunks(c_in: int, c_out: int, groups: int, chunk: int, block: int) -> int:
    """How many chunks the widest window has."""
    inner, outer = c_in // groups, c_out // groups
    align = 8 if c_in % 8 == 0 else 1
    widest = 0
    for start in range(0, c_out, block):
        end = (min(start + block, c_out) - 1) // outer * inner + inner
        widest = max(widest, end - start // outer * inner // align * align)
    return cdiv(widest, chunk)


def _plan(
    operation: str, x: Tensor, c_out: int, groups: int, default: dict[str, int]
) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Rows of the map, what all kernels of a convolution are compiled for (C_IN to BLOCK), and launch parameters."""
    c_in = x.shape[3]
    rows = x.numel() // c_in
    at = launch_parameters(operation, x.device, default, rows=rows, in_chs=c_in, out_chs=c_out, groups=groups)
    chunk, block = at["chunk"], at["block"]
    chunks = _chunks(c_in, c_out, groups, chunk, block)
    return rows, (c_in, c_out, c_in // groups, c_out // groups, chunks, chunk, block), at


def _options(at: dict[str, int]) -> dict[str, int]:
    return dict(num_warps=at["num_warps"], num_stages=at["num_stages"])


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    act: str,
    upstream: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    batch, height, width, _ = x.shape
    c_out = weight.shape[1] * groups if transposed else weight.shape[0]
    rows, tile, at = _plan("grouped_conv", x, c_out, groups, CONVOLVE)
    *_, chunks, chunk, block = tile
    blocks = cdiv(c_out, block)
    size = blocks * 9 * chunks * chunk * block
    packed = torch.empty(size, dtype=x.dtype, device=x.device)
    y = torch.empty(batch, height, width, c_out, dtype=x.dtype, device=x.device)
    if rows:
        launch(_pack, (cdiv(size, PACK),), weight, packed, size, *tile, transposed, PACK, num_warps=4)
        grid = (blocks * cdiv(rows, at["rows"]),)
        launch(
            _convolve, grid, x, packed, x if bias is None else bias, x if upstream is None else upstream, y, rows,
            height, width, *tile, at["rows"], KINDS[act], bias is not None, upstream is not None, **_options(at),
        )  # fmt: skip
    return y


def parameter_gradients(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Gradients of weight and bias, one behind the other, summed in a fixed order."""
    _, height, width, _ = x.shape
    c_out = weight.shape[0]
    rows, tile, at = _plan("grouped_conv_weight", x, c_out, groups, SUM_UP)
    *_, chunks, _, block = tile
    length = cdiv(cdiv(rows, at["splits"]), at["rows"]) * at["rows"]
    splits = cdiv(rows, length) if rows else 0
    partial = torch.empty(splits, weight.numel() + c_out, dtype=torch.float32, device=x.device)
    if rows:
        grid = (3 * chunks * cdiv(c_out, block), splits)
        launch(
            _parameters, grid, grad, x, partial, rows, height, width, length, *tile, at["rows"], **_options(at)
        )  # fmt: skip
    return partial.sum(0)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str) -> Tensor:
    return convolution(x, weight, bias, groups, act)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str
) -> tuple[Tensor, Tensor]:
    if act != "none":  # what went into the activation is computed again rather than kept
        grad = convolution(x, weight, bias, groups, act, upstream=grad)
    grad_x = convolution(grad, weight, None, groups, "none", transposed=True)
    return grad_x, parameter_gradients(grad, x, weight, groups)
