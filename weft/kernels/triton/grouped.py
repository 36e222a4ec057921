# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportAssignmentType=false
"""3x3 convolutions in small groups, on the matrix units.

A group of 4 to 12 channels is too small for a matrix unit, so a program takes a block of output channels, some groups
wide, and the window of input channels that these groups read. The weights between them form a matrix with blocks along
its diagonal and zeros elsewhere; `_pack` writes these matrices out, one for each of the nine taps.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.activations import KINDS, activate, slope
from weft.kernels.triton.dot import dot
from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.tuning.launches import launch_parameters

PACK = 1024  # weights that one program packs
JOB_SIZE = tl.constexpr(9)  # numbers that describe to `_pack` what to do
SPLITS, LEAST = 16, 32  # programs that share the rows of a map, and the fewest rows that are worth one


@triton.jit
def _first_channel(
    block, C_IN: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """The first channel of the window that a block of output channels reads; the window ends inside the map."""
    ALIGN: tl.constexpr = 8 if C_IN % 8 == 0 else 1
    aligned = block * BLOCK // OUT * IN // ALIGN * ALIGN
    return tl.minimum(aligned, max(C_IN - WINDOW, 0) // ALIGN * ALIGN)


@triton.jit
def _pack(weight, table, packed, SIZE: tl.constexpr):
    """The matrices of a convolution, forward or for the gradient of the map, one job of `table` for each.

    A job makes (blocks, 9, WINDOW, BLOCK) matrices; its row in the table is written by `pack_jobs`.
    """
    table += tl.program_id(1) * JOB_SIZE
    start, size, c_in, c_out = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    inner, outer, window, width = tl.load(table + 4), tl.load(table + 5), tl.load(table + 6), tl.load(table + 7)
    backward = tl.load(table + 8)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = at // width
    tap = row // window % 9
    block = row // (window * 9)
    align = tl.where(c_in % 8 == 0, 8, 1)
    start_c = tl.minimum(block * width // outer * inner // align * align, tl.maximum(c_in - window, 0) // align * align)
    c = start_c + row % window
    o = block * width + at % width
    place = tl.where(backward == 1, (c * outer + o % outer) * 9 + 8 - tap, (o * inner + c % inner) * 9 + tap)
    mask = (at < size) & (c // inner == o // outer) & (o < c_out)
    tl.store(packed + start + at, tl.load(weight + place, mask=mask, other=0.0), mask=at < size)


@triton.jit
def _convolve(
    x, packed, bias, upstream, y, start_packed, rows, height, width,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """act(convolution); with an `upstream` gradient, that times slope(convolution)."""
    BLOCKS: tl.constexpr = (C_OUT + BLOCK - 1) // BLOCK
    block, tile = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    r = tl.arange(0, ROWS)
    inside = tile * ROWS + r < rows
    h = (tile * ROWS + r) // width % height
    w = (tile * ROWS + r) % width
    c = _first_channel(block, C_IN, IN, OUT, CHUNKS * CHUNK, BLOCK) + tl.arange(0, CHUNK)
    start = tile.to(tl.int64) * ROWS
    x += start * C_IN
    packed += start_packed + block * 9 * CHUNKS * CHUNK * BLOCK
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
    if bias is not None:
        total += tl.load(bias + o, mask=o < C_OUT, other=0.0).to(tl.float32)[None, :]
    if upstream is None:
        total = activate(total, KIND)
    else:
        total = slope(total, KIND) * tl.load(upstream + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, total, mask=mask)


@triton.jit
def _parameter_gradients(
    grad, x, partial, stride, rows, height, width, length,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums over `length` rows of the gradients of three taps, those of one row of the kernel, and of the bias."""
    kernel_row = tl.program_id(0) % 3
    chunk = tl.program_id(0) // 3 % CHUNKS
    block = tl.program_id(0) // (3 * CHUNKS)
    split = tl.program_id(1)
    c = _first_channel(block, C_IN, IN, OUT, CHUNKS * CHUNK, BLOCK) + chunk * CHUNK + tl.arange(0, CHUNK)
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
    partial += split * stride
    at = partial + (o[:, None] * IN + c[None, :] % IN) * 9 + kernel_row * 3
    tl.store(at, left, mask=mask)
    tl.store(at + 1, middle, mask=mask)
    tl.store(at + 2, right, mask=mask)
    if for_bias:
        tl.store(partial + C_OUT * IN * 9 + o, bias, mask=o < C_OUT)


class GroupedTiling(NamedTuple):
    """How a convolution of a map is cut into tiles and launched."""

    tile: tuple[int, ...]  # what its kernels are compiled for, C_IN to ROWS
    blocks: int
    size: int  # numbers in all its matrices
    num_warps: int
    num_stages: int


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


def find_tiling(operation: str, c_in: int, c_out: int, groups: int) -> GroupedTiling:
    at = launch_parameters(operation, widens=c_out > c_in)
    return _make_tiling(c_in, c_out, groups, at["rows"], at["chunk"], at["block"], at["num_warps"], at["num_stages"])


@cache
def _make_tiling(
    c_in: int, c_out: int, groups: int, step: int, chunk: int, block: int, num_warps: int, num_stages: int
) -> GroupedTiling:
    chunks, blocks = _chunks(c_in, c_out, groups, chunk, block), cdiv(c_out, block)
    tile = (c_in, c_out, c_in // groups, c_out // groups, chunks, chunk, block, step)
    return GroupedTiling(tile, blocks, blocks * 9 * chunks * chunk * block, num_warps, num_stages)


class PackJobs(NamedTuple):
    """The work of `_pack`: a row of numbers for each tiling, and where the matrices of each start."""

    table: Tensor
    starts: list[int]
    size: int
    grid: tuple[int, int]


@cache
def pack_jobs(tilings: tuple[tuple[GroupedTiling, bool], ...], device: torch.device) -> PackJobs:
    """With each tiling comes whether it is that of a gradient."""
    table, starts, end = [], [], 0
    for tiling, backward in tilings:
        c_in, c_out, inner, outer, chunks, chunk, block, _ = tiling.tile
        table.append((end, tiling.size, c_in, c_out, inner, outer, chunks * chunk, block, backward))
        starts.append(end)
        end += cdiv(tiling.size, 16) * 16
    grid = (cdiv(max(tiling.size for tiling, _ in tilings), PACK), len(tilings))
    return PackJobs(torch.tensor(table, dtype=torch.int32, device=device), starts, end, grid)


def pack(weight: Tensor, jobs: PackJobs, dtype: torch.dtype) -> Tensor:
    """All matrices, one behind the other."""
    packed = torch.empty(jobs.size, dtype=dtype, device=weight.device)
    launch(_pack, jobs.grid, weight, jobs.table, packed, PACK, num_warps=4)
    return packed


def convolve(
    x: Tensor, packed: Tensor, start: int, bias: Tensor | None, tiling: GroupedTiling, act: str,
    upstream: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """act(convolution); with an `upstream` gradient, that times slope(convolution)."""
    batch, height, width, _ = x.shape
    rows = batch * height * width
    y = torch.empty(batch, height, width, tiling.tile[1], dtype=x.dtype, device=x.device)
    launch(
        _convolve, (tiling.blocks * cdiv(rows, tiling.tile[7]),),
        x, packed, bias, upstream, y, start, rows, height, width, *tiling.tile, KINDS[act],
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return y


def parameter_gradients(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """The gradients of weight and bias, one behind the other, summed in a fixed order."""
    batch, height, width, channels = x.shape
    rows, length = batch * height * width, weight.numel() + len(weight)
    splits = min(SPLITS, cdiv(rows, LEAST))
    partial = torch.empty(splits, length, dtype=torch.float32, device=x.device)
    tiling = find_tiling("grouped_conv_weight", channels, len(weight), groups)
    step = tiling.tile[7]
    launch(
        _parameter_gradients, (3 * tiling.tile[4] * tiling.blocks, splits),
        grad, x, partial, length, rows, height, width, cdiv(cdiv(rows, splits), step) * step, *tiling.tile,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return partial.sum(0)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str) -> Tensor:
    if not x.numel():
        return x.new_empty(*x.shape[:3], len(weight))
    x, tiling = x.contiguous(), find_tiling("grouped_conv", x.shape[3], len(weight), groups)
    packed = pack(weight.contiguous(), pack_jobs(((tiling, False),), x.device), x.dtype)
    return convolve(x, packed, 0, bias, tiling, act)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return torch.empty_like(x), torch.zeros(weight.numel() + len(weight), device=x.device)
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    c_in, c_out = x.shape[3], len(weight)
    back = find_tiling("grouped_conv", c_out, c_in, groups)
    if act == "none":
        packed = pack(weight, pack_jobs(((back, True),), x.device), x.dtype)
    else:  # what went into the activation is computed again rather than kept
        tiling = find_tiling("grouped_conv", c_in, c_out, groups)
        jobs = pack_jobs(((back, True), (tiling, False)), x.device)
        packed = pack(weight, jobs, x.dtype)
        grad = convolve(x, packed, jobs.starts[1], bias, tiling, act, grad)
    return convolve(grad, packed, 0, None, back, "none"), parameter_gradients(grad, x, weight, groups)
