"""Convolution of pictures, which have so few channels that libraries pad them to eight, as a matrix product.

In a (B, H, W, C) picture the pixels under one row of the kernel lie side by side in memory, and so do those under the
kernels of neighbouring outputs. One row of the left matrix therefore is, for each row of the kernel, the SPAN values
that a GROUP of neighbouring outputs sees; the right matrix holds the weights of each output of the group where it sees
them, and zeros elsewhere. For 7x7 at stride 2 on three channels two outputs see 27 values, which with three more in
front of them start at a multiple of four, so that everything is loaded by eight bytes, and four times less of it.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.activations import KINDS, activate
from weft.kernels.triton.dot import dot
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters, processors

TILES = ((128, 128, 2), (64, 128, 2), (64, 64, 2), (64, 64, 1), (32, 32, 1))  # BLOCK_M, BLOCK_N, num_stages
REGISTERS = 40_000  # that sums may take, of the 65,536 of eight warps
REDUCED, SHARES = 128, 16  # weights whose gradients a program sums, and how many parts of each at a time


@dataclass(frozen=True)
class StemTiling:
    """How the outputs of a row are grouped. Kernels take it as compile-time numbers."""

    group: int  # outputs that share a row of the left matrix
    lead: int  # values in front of those that the first output sees
    span: int  # values that are loaded from a row of the picture for a group
    vector: int  # values that can be loaded at once: starts of groups and rows are multiples of it


@cache
def find_tiling(kernel: int, stride: int, padding: int, dilation: int, channels: int, row: int) -> StemTiling:
    """The fewest multiplications, then the largest group, then the widest loads; `row` counts the values in one."""
    best: tuple[tuple[int, int, int], StemTiling] | None = None
    for group in (1, 2, 4):
        seen = ((group - 1) * stride + (kernel - 1) * dilation + 1) * channels
        for vector in (1, 2, 4, 8):
            if row % vector or group * stride * channels % vector:
                continue
            lead = -padding * channels % vector
            span = 16 if lead + seen <= 16 else cdiv(lead + seen, 32) * 32
            rank = (span, -group, -vector)
            if best is None or rank < best[0]:
                best = rank, StemTiling(group, lead, span, vector)
    assert best is not None
    return best[1]


@triton.jit
def _divide(n, divisor):
    """n // divisor for 0 <= n < 2**21, in three instructions instead of twenty."""
    return ((n.to(tl.float32) + 0.5) * (1.0 / divisor)).to(tl.int32)


@triton.jit
def _tile(tile, rows_out, groups_per_row, BLOCK_M: tl.constexpr):
    """Of the groups in a tile: picture, row and place in the row, the first line of outputs and lines from there on."""
    line = tile * BLOCK_M // groups_per_row
    place = tile * BLOCK_M % groups_per_row + tl.arange(0, BLOCK_M)
    lines = _divide(place, groups_per_row)
    row = line % rows_out + lines
    pictures = _divide(row, rows_out)
    picture = line // rows_out + pictures.to(tl.int64)
    return picture, row - pictures * rows_out, place - lines * groups_per_row, line, lines


@triton.jit
def _corners(
    picture, row_out, place, exists, height, row,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Where groups begin to see the picture: row, value in the row, value in all pictures."""
    top = tl.where(exists, row_out * STRIDE - PADDING, height)  # below the picture nothing is seen
    left = tl.multiple_of(place * (GROUP * STRIDE * CHANNELS) - (PADDING * CHANNELS + LEAD), VECTOR)
    return top, left, tl.multiple_of((picture * height + top) * row + left, VECTOR)


@triton.jit
def _patches(
    x, top, left, start, height, row, FIRST: tl.constexpr,
    DILATION: tl.constexpr, SPAN: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + BLOCK_K of the left matrix, zeros where the kernel hangs over the edge."""
    y: tl.constexpr = FIRST // SPAN * DILATION
    k = FIRST % SPAN + tl.arange(0, BLOCK_K)[None, :]
    # As unsigned numbers those below zero are large.
    inside = ((top + y).to(tl.uint32) < height)[:, None] & ((left[:, None] + k).to(tl.uint32) < row)
    below = start + y * tl.multiple_of(row, VECTOR)
    return tl.load(x + below[:, None] + k, mask=inside, other=0.0)


@triton.jit
def _spread_weight(
    weight, matrix, out_stride, in_stride, y_stride, x_stride,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of the right matrix, (kernel rows * SPAN, GROUP * OUT), filled up with zeros."""
    k = (tl.program_id(0) * 16 + tl.arange(0, 16))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    y = k // SPAN
    value = k % SPAN - LEAD - (n // OUT) * (STRIDE * CHANNELS)  # as seen by this output of the group
    pixel = value // CHANNELS
    x = pixel // DILATION
    seen = (value >= 0) & (pixel % DILATION == 0) & (x < KERNEL) & (n < GROUP * OUT)
    at = (n % OUT) * out_stride + (value % CHANNELS) * in_stride + y * y_stride + x * x_stride
    tl.store(matrix + k * COLUMNS + n, tl.load(weight + at, mask=seen, other=0.0))


@triton.jit
def _forward(
    x, matrix, bias, out, groups, height, row, rows_out, columns_out, groups_per_row, out_channels,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr,
    PADDING: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Each program keeps its columns of the right matrix, and goes through its share of the groups."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    member, channel = n // OUT, n % OUT
    column = member * out_channels + channel
    if HAS_BIAS:
        shift = tl.load(bias + channel).to(tl.float32)
    rights = ()
    for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        rights = rights + (tl.load(matrix + k[:, None] * COLUMNS + n[None, :]),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, BLOCK_M), tl.num_programs(0)):
        exists = tile * BLOCK_M + tl.arange(0, BLOCK_M) < groups
        picture, row_out, place, line, lines = _tile(tile, rows_out, groups_per_row, BLOCK_M)
        top, left, start = _corners(
            picture, row_out, place, exists, height, row, STRIDE, PADDING, CHANNELS, GROUP, LEAD, VECTOR
        )
        lefts = ()  # all are asked for before the first is needed
        for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
            lefts = lefts + (_patches(x, top, left, start, height, row, first, DILATION, SPAN, VECTOR, BLOCK_K),)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.static_range(KERNEL * SPAN // BLOCK_K):
            total = dot(lefts[i], rights[i], total)
        if HAS_BIAS:
            total += shift[None, :]
        inside = exists[:, None] & (n < GROUP * OUT)[None, :]
        inside = inside & ((place * GROUP)[:, None] + member[None, :] < columns_out)
        position = (lines * columns_out + place * GROUP) * out_channels
        begin = out + line.to(tl.int64) * columns_out * out_channels
        tl.store(begin + position[:, None] + column[None, :], activate(total, KIND), mask=inside)


@triton.jit
def _weight_gradient(
    x, grad, partial, partial_bias, groups, height, row, rows_out, columns_out, groups_per_row, out_channels,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr,
    PADDING: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient of the right matrix, transposed, from the share of the groups that this program has."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    member = n // OUT
    column = member * out_channels + n % OUT
    totals = ()
    for _ in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
        totals = totals + (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),)
    ones = tl.full((BLOCK_M, 16), 1.0, tl.float32).to(grad.dtype.element_ty)
    bias = tl.zeros((BLOCK_N, 16), tl.float32)  # sixteen times the same: that is how the matrix unit sums
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, BLOCK_M), tl.num_programs(0)):
        exists = tile * BLOCK_M + tl.arange(0, BLOCK_M) < groups
        picture, row_out, place, line, lines = _tile(tile, rows_out, groups_per_row, BLOCK_M)
        top, left, start = _corners(
            picture, row_out, place, exists, height, row, STRIDE, PADDING, CHANNELS, GROUP, LEAD, VECTOR
        )
        inside = exists[:, None] & (n < GROUP * OUT)[None, :]
        inside = inside & ((place * GROUP)[:, None] + member[None, :] < columns_out)
        position = (lines * columns_out + place * GROUP) * out_channels
        begin = grad + line.to(tl.int64) * columns_out * out_channels
        upstream = tl.load(begin + position[:, None] + column[None, :], mask=inside, other=0.0)
        if HAS_BIAS:
            bias = dot(tl.trans(upstream), ones, bias)
        updated = ()
        for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
            patches = _patches(x, top, left, start, height, row, first, DILATION, SPAN, VECTOR, BLOCK_K)
            updated = updated + (dot(tl.trans(upstream), patches, totals[first // BLOCK_K]),)
        totals = updated
    share = tl.program_id(0).to(tl.int64) * COLUMNS
    for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        at = (share + n)[:, None] * (KERNEL * SPAN) + k[None, :]
        tl.store(partial + at, totals[first // BLOCK_K])
    if HAS_BIAS:
        tl.store(partial_bias + share + n, tl.max(bias, axis=1))


@triton.jit
def _reduce_shares(
    partial, partial_bias, weight, bias, shares,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SHARES: tl.constexpr,
):  # fmt: skip
    """Sums over shares, and over the outputs of a group, what belongs to the same weight; the last programs: bias."""
    SIZE: tl.constexpr = OUT * CHANNELS * KERNEL * KERNEL
    of_bias = tl.program_id(0) - tl.cdiv(SIZE, BLOCK)
    total = tl.zeros((BLOCK_SHARES, BLOCK), tl.float32)
    if of_bias < 0:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # in a (OUT, CHANNELS, KERNEL, KERNEL) weight
        x, y = i % KERNEL, i // KERNEL % KERNEL
        channel, out = i // (KERNEL * KERNEL) % CHANNELS, i // (KERNEL * KERNEL * CHANNELS)
        for first in range(0, shares, BLOCK_SHARES):
            share = first + tl.arange(0, BLOCK_SHARES)
            inside = (share < shares)[:, None] & (i < SIZE)[None, :]
            for member in tl.static_range(GROUP):
                k = y * SPAN + LEAD + (member * STRIDE + x * DILATION) * CHANNELS + channel
                at = share.to(tl.int64)[:, None] * COLUMNS + (member * OUT + out)[None, :]
                total += tl.load(partial + at * (KERNEL * SPAN) + k[None, :], mask=inside, other=0.0)
        tl.store(weight + i, tl.sum(total, axis=0), mask=i < SIZE)
    else:
        i = of_bias * BLOCK + tl.arange(0, BLOCK)
        for first in range(0, shares, BLOCK_SHARES):
            share = first + tl.arange(0, BLOCK_SHARES)
            inside = (share < shares)[:, None] & (i < OUT)[None, :]
            for member in tl.static_range(GROUP):
                at = share[:, None] * COLUMNS + (member * OUT + i)[None, :]
                total += tl.load(partial_bias + at, mask=inside, other=0.0)
        tl.store(bias + i, tl.sum(total, axis=0), mask=i < OUT)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 20


@dataclass(frozen=True)
class StemProblem:
    """One convolution at one size: what its kernels are compiled for, and what they are told."""

    geometry: tuple[int, ...]  # compile-time numbers of all kernels, KERNEL to SPAN
    edges: tuple[int, ...]  # and of those that read the picture, PADDING to BLOCK_K
    sizes: tuple[int, ...]  # groups to groups_per_row
    depth: int  # columns of the left matrix
    columns: int  # of the right matrix


@cache
def _stem_problem(
    x_shape: torch.Size, out_shape: torch.Size, kernel: int, stride: int, padding: int, dilation: int, aligned: bool
) -> StemProblem:
    batch, height, width, channels = x_shape
    _, rows_out, columns_out, out = out_shape
    row = width * channels
    found = find_tiling(kernel, stride, padding, dilation, channels, row if aligned else 1)
    groups_per_row = cdiv(columns_out, found.group)
    return StemProblem(
        (kernel, stride, dilation, channels, out, found.group, found.lead, found.span),
        (padding, found.vector, found.span if found.span in (16, 64) else 32),
        (batch * rows_out * groups_per_row, height, row, rows_out, columns_out, groups_per_row),
        kernel * found.span,
        found.group * out,
    )


def _fitting_parameters(
    operation: str, x: Tensor, problem: StemProblem, bytes_needed: Callable[[int, int, int], int]
) -> dict[str, int]:
    """Launch parameters: the table's, or the largest tiles that need no more shared memory than this GPU has."""
    limit = _shared_memory(x.device)
    kernel, stride, dilation = problem.geometry[:3]
    found = launch_parameters(operation, kernel=kernel, stride=stride, dilation=dilation)
    if bytes_needed(found["BLOCK_M"], found["BLOCK_N"], found["num_stages"]) > limit:
        tiles = next((tile for tile in TILES if bytes_needed(*tile) <= limit), TILES[-1])
        found = dict(BLOCK_M=tiles[0], BLOCK_N=tiles[1], num_warps=8, num_stages=tiles[2], per_processor=1)
    return found | dict(BLOCK_N=max(16, min(found["BLOCK_N"], power_of_two(problem.columns))))


def _grid(x: Tensor, problem: StemProblem, found: dict[str, int]) -> tuple[int, int]:
    """Programs, each of which has a share of the groups, for each block of columns."""
    shares = min(found["per_processor"] * processors(x.device), cdiv(problem.sizes[0], found["BLOCK_M"]))
    return shares, cdiv(problem.columns, found["BLOCK_N"])


def _without_skipped_pixels(x: Tensor, stride: int, padding: int, dilation: int) -> tuple[Tensor, int, int, int]:
    """If stride and dilation skip rows and columns of the picture, the same convolution of what they do not skip."""
    step = gcd(stride, dilation)
    first = -padding % step
    x = x.contiguous() if step == 1 else x[:, first::step, first::step].contiguous()
    return x, stride // step, (padding + first) // step, dilation // step


def _empty_output(x: Tensor, out: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Room for a map of `out` channels."""
    batch, height, width, _ = x.shape
    lost = (kernel - 1) * dilation - 2 * padding
    size = (batch, (height - lost - 1) // stride + 1, (width - lost - 1) // stride + 1, out)
    return torch.empty(size, dtype=x.dtype, device=x.device)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    y = _empty_output(x, len(weight), weight.shape[2], stride, padding, dilation)
    _convolve_into(x, weight, bias, y, stride, padding, dilation, act)
    return y


def pyramid(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], stride: int, paddings: list[int], dilations: list[int],
    act: str,
) -> Tensor:  # fmt: skip
    widths = [len(weight) for weight in weights]
    y = _empty_output(x, sum(widths), weights[0].shape[2], stride, paddings[0], dilations[0])
    for i, part in enumerate(y.split(widths, dim=-1)):
        _convolve_into(x, weights[i], biases[i] if biases else None, part, stride, paddings[i], dilations[i], act)
    return y


def _convolve_into(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, stride: int, padding: int, dilation: int, act: str
) -> None:
    """Writes into `out`, (B, h, w, C_out), which may be a slice of the channels of a wider map."""
    x, stride, padding, dilation = _without_skipped_pixels(x, stride, padding, dilation)
    problem = _stem_problem(x.shape, out.shape, weight.shape[2], stride, padding, dilation, x.data_ptr() % 16 == 0)
    depth, size = problem.depth, x.element_size()

    def bytes_needed(m: int, n: int, stages: int) -> int:
        return size * (depth * n + m * n + m * (stages * depth if stages > 1 else 64))

    found = _fitting_parameters("stem", x, problem, bytes_needed)
    grid, width = _grid(x, problem, found), found["BLOCK_N"]
    columns = grid[1] * width
    matrix = torch.empty(depth, columns, dtype=x.dtype, device=x.device)
    launch(_spread_weight, (depth // 16, grid[1]), weight, matrix, *weight.stride(), *problem.geometry, columns, width)
    launch(
        _forward, grid, x, matrix, matrix if bias is None else bias, out, *problem.sizes, out.stride(2),
        *problem.geometry, *problem.edges, found["BLOCK_M"], width, columns, bias is not None, KINDS[act],
        num_warps=found["num_warps"], num_stages=found["num_stages"],
    )  # fmt: skip


def weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and, where there is one, bias; `grad` may be a slice of the channels of a wider map."""
    _, rows, columns, _ = grad.shape
    step = grad.stride(2)
    if grad.stride() != (rows * columns * step, columns * step, step, 1):
        grad = grad.contiguous()
    x, stride, padding, dilation = _without_skipped_pixels(x, stride, padding, dilation)
    problem = _stem_problem(x.shape, grad.shape, weight.shape[2], stride, padding, dilation, x.data_ptr() % 16 == 0)
    size = x.element_size()

    def bytes_needed(m: int, n: int, stages: int) -> int:
        if n * problem.depth > REGISTERS:
            return 1 << 30
        return size * m * (stages * (n + problem.depth) if stages > 1 else n + 64)

    found = _fitting_parameters("stem_gradient", x, problem, bytes_needed)
    grid = _grid(x, problem, found)
    columns, has_bias = grid[1] * found["BLOCK_N"], bias is not None
    partial = torch.empty(grid[0], columns, problem.depth, dtype=torch.float32, device=x.device)
    partial_bias = torch.empty(grid[0], columns, dtype=torch.float32, device=x.device) if has_bias else partial
    launch(
        _weight_gradient, grid, x, grad, partial, partial_bias, *problem.sizes, grad.stride(2),
        *problem.geometry, *problem.edges, found["BLOCK_M"], found["BLOCK_N"], columns, has_bias,
        num_warps=found["num_warps"], num_stages=found["num_stages"],
    )  # fmt: skip
    result = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    result_bias = None if bias is None else torch.empty_like(bias)
    programs = cdiv(result.numel(), REDUCED) + (cdiv(weight.shape[0], REDUCED) if has_bias else 0)
    launch(
        _reduce_shares, (programs,), partial, partial_bias, result, result if result_bias is None else result_bias,
        grid[0], *problem.geometry, columns, REDUCED, SHARES,
    )  # fmt: skip
    return result, result_bias
