"""Convolution of pictures, which have so few channels that libraries pad them to eight, as a matrix product.

In a (B, H, W, C) picture the pixels under one row of the kernel lie side by side in memory, and so do those under the
kernels of neighbouring outputs. One row of the left matrix therefore is, for each row of the kernel, the SPAN values
that a GROUP of neighbouring outputs sees; the right matrix holds the weights of each output of the group where it sees
them, and zeros elsewhere. For 7x7 at stride 2 on three channels two outputs see 27 values, which with three more in
front of them start at a multiple of four, so that everything is loaded by eight bytes, and four times less of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.choose import launch_parameters
from weft.kernels.gpu.activations import KINDS, activate
from weft.kernels.gpu.dot import dot
from weft.kernels.stem import output_size

TILES = ((128, 128, 2), (64, 128, 2), (64, 64, 2), (64, 64, 1), (32, 32, 1))  # BLOCK_M, BLOCK_N, num_stages
FOLDED = 64  # weights whose gradients one program sums


@dataclass(frozen=True)
class Plan:
    """How the outputs of a row are grouped. Kernels take it as compile-time numbers."""

    group: int  # outputs that share a row of the left matrix
    lead: int  # values in front of those that the first output sees
    span: int  # values that are loaded from a row of the picture for a group
    vector: int  # values that can be loaded at once: starts of groups and rows are multiples of it


@cache
def plan(kernel: int, stride: int, padding: int, dilation: int, channels: int, row: int) -> Plan:
    """The fewest multiplications, then the largest group, then the widest loads; `row` counts the values in one."""
    best: tuple[tuple[int, int, int], Plan] | None = None
    for group in (1, 2, 4):
        seen = ((group - 1) * stride + (kernel - 1) * dilation + 1) * channels
        for vector in (1, 2, 4, 8):
            if row % vector or group * stride * channels % vector:
                continue
            lead = -padding * channels % vector
            span = 16 if lead + seen <= 16 else triton.cdiv(lead + seen, 32) * 32
            rank = (span, -group, -vector)
            if best is None or rank < best[0]:
                best = rank, Plan(group, lead, span, vector)
    assert best is not None
    return best[1]


@triton.jit
def _divide(n, divisor):
    """n // divisor for 0 <= n < 2**21, in three instructions instead of twenty."""
    return ((n.to(tl.float32) + 0.5) * (1.0 / divisor)).to(tl.int32)


@triton.jit
def _tile(tile, groups, rows_out, groups_per_row, BLOCK_M: tl.constexpr):
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
def _spread(
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
    seen = (value >= 0) & (pixel % DILATION == 0) & (x < KERNEL) & (y < KERNEL) & (n < GROUP * OUT)
    at = (n % OUT) * out_stride + (value % CHANNELS) * in_stride + y * y_stride + x * x_stride
    tl.store(matrix + k * COLUMNS + n, tl.load(weight + at, mask=seen, other=0.0))


@triton.jit
def _forward(
    x, matrix, bias, out, groups, height, row, rows_out, columns_out, groups_per_row, out_channels,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr, VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    member, channel = n // OUT, n % OUT
    column = member * out_channels + channel
    rights = ()
    for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        rights = rights + (tl.load(matrix + k[:, None] * COLUMNS + n[None, :]),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, BLOCK_M), tl.num_programs(0)):
        exists = tile * BLOCK_M + tl.arange(0, BLOCK_M) < groups
        picture, row_out, place, line, lines = _tile(tile, groups, rows_out, groups_per_row, BLOCK_M)
        top, left, start = _corners(
            picture, row_out, place, exists, height, row, STRIDE, PADDING, CHANNELS, GROUP, LEAD, VECTOR
        )
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
            patches = _patches(x, top, left, start, height, row, first, DILATION, SPAN, VECTOR, BLOCK_K)
            total = dot(patches, rights[first // BLOCK_K], total)
        if HAS_BIAS:
            total += tl.load(bias + channel).to(tl.float32)[None, :]
        inside = exists[:, None] & (n < GROUP * OUT)[None, :]
        inside = inside & ((place * GROUP)[:, None] + member[None, :] < columns_out)
        position = (lines * columns_out + place * GROUP) * out_channels
        begin = out + line.to(tl.int64) * columns_out * out_channels
        tl.store(begin + position[:, None] + column[None, :], activate(total, KIND), mask=inside)


@triton.jit
def _weight_gradient(
    x, grad, partial, partial_bias, groups, height, row, rows_out, columns_out, groups_per_row, out_channels,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr, VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of the right matrix, transposed, from the share of the groups that this program has."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    member = n // OUT
    column = member * out_channels + n % OUT
    totals = ()
    for _ in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
        totals = totals + (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, BLOCK_M), tl.num_programs(0)):
        exists = tile * BLOCK_M + tl.arange(0, BLOCK_M) < groups
        picture, row_out, place, line, lines = _tile(tile, groups, rows_out, groups_per_row, BLOCK_M)
        top, left, start = _corners(
            picture, row_out, place, exists, height, row, STRIDE, PADDING, CHANNELS, GROUP, LEAD, VECTOR
        )
        inside = exists[:, None] & (n < GROUP * OUT)[None, :]
        inside = inside & ((place * GROUP)[:, None] + member[None, :] < columns_out)
        position = (lines * columns_out + place * GROUP) * out_channels
        begin = grad + line.to(tl.int64) * columns_out * out_channels
        upstream = tl.load(begin + position[:, None] + column[None, :], mask=inside, other=0.0)
        if HAS_BIAS:
            bias += tl.sum(upstream.to(tl.float32), axis=0)
        updated = ()
        for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
            patches = _patches(x, top, left, start, height, row, first, DILATION, SPAN, VECTOR, BLOCK_K)
            total = dot(tl.trans(upstream), patches, totals[first // BLOCK_K])
            updated = updated + (total,)
        totals = updated
    share = tl.program_id(0).to(tl.int64) * COLUMNS
    for first in tl.static_range(0, KERNEL * SPAN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        at = (share + n)[:, None] * (KERNEL * SPAN) + k[None, :]
        tl.store(partial + at, totals[first // BLOCK_K])
    if HAS_BIAS:
        tl.store(partial_bias + share + n, bias)


@triton.jit
def _fold(
    partial, weight, shares, SIZE: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, LEAD: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SHARES: tl.constexpr,
):  # fmt: skip
    """Sums over shares, and over the outputs of a group, what belongs to the same weight."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # in a (OUT, CHANNELS, KERNEL, KERNEL) weight
    x, y = i % KERNEL, i // KERNEL % KERNEL
    channel, out = i // (KERNEL * KERNEL) % CHANNELS, i // (KERNEL * KERNEL * CHANNELS)
    total = tl.zeros((BLOCK_SHARES, BLOCK), tl.float32)
    for first in range(0, shares, BLOCK_SHARES):
        share = first + tl.arange(0, BLOCK_SHARES)
        inside = (share < shares)[:, None] & (i < SIZE)[None, :]
        for member in tl.static_range(GROUP):
            k = y * SPAN + LEAD + (member * STRIDE + x * DILATION) * CHANNELS + channel
            at = (member * OUT + out) * (KERNEL * SPAN) + k
            begin = partial + share.to(tl.int64)[:, None] * (COLUMNS * KERNEL * SPAN)
            total += tl.load(begin + at[None, :], mask=inside, other=0.0)
    tl.store(weight + i, tl.sum(total, axis=0), mask=i < SIZE)


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 3, 1 << 20
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin


@dataclass(frozen=True)
class Setting:
    """One convolution at one size: what its kernels are compiled for, and what they are told."""

    geometry: dict[str, int]  # compile-time numbers of all kernels
    edges: dict[str, int]  # and of those that read the picture
    sizes: tuple[int, ...]  # height to groups_per_row
    depth: int  # columns of the left matrix
    columns: int  # of the right matrix


@cache
def _setting(
    height: int,
    width: int,
    channels: int,
    out: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    aligned: bool,
) -> Setting:
    row = width * channels
    found = plan(kernel, stride, padding, dilation, channels, row if aligned else 1)
    rows_out, columns_out = output_size(height, width, kernel, stride, padding, dilation)
    geometry = dict(
        KERNEL=kernel, STRIDE=stride, DILATION=dilation, CHANNELS=channels, OUT=out,
        GROUP=found.group, LEAD=found.lead, SPAN=found.span,
    )  # fmt: skip
    edges = dict(PADDING=padding, VECTOR=found.vector, BLOCK_K=found.span if found.span in (16, 64) else 32)
    sizes = (height, row, rows_out, columns_out, triton.cdiv(columns_out, found.group))
    return Setting(geometry, edges, sizes, kernel * found.span, found.group * out)


def _setting_of(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int) -> Setting:
    _, height, width, channels = x.shape
    out, kernel = weight.shape[0], weight.shape[2]
    return _setting(height, width, channels, out, kernel, stride, padding, dilation, x.data_ptr() % 16 == 0)


def _launch_of(operation: str, x: Tensor, setting: Setting, need: Callable[[int, int, int], int]) -> dict[str, int]:
    """Launch parameters: those measured, or the largest tiles whose `need` of shared memory this GPU has."""
    limit = _limits(x.device)[1]
    tiles = next((tile for tile in TILES if need(*tile) <= limit), TILES[-1])
    width = max(16, min(tiles[1], triton.next_power_of_2(setting.columns)))
    default = dict(BLOCK_M=tiles[0], BLOCK_N=width, num_warps=8, num_stages=tiles[2], programs=1)
    shape = {name.lower(): setting.geometry[name] for name in ("KERNEL", "STRIDE", "DILATION", "CHANNELS", "OUT")}
    found = launch_parameters(operation, x.device, default, dtype=str(x.dtype), **shape)
    return found if need(found["BLOCK_M"], found["BLOCK_N"], found["num_stages"]) <= limit else default


def _grid(x: Tensor, setting: Setting, launch: dict[str, int]) -> tuple[int, tuple[int, int]]:
    """Groups of outputs; and programs, each of which has a share of them, for each block of columns."""
    groups = x.shape[0] * setting.sizes[2] * setting.sizes[4]
    programs = launch.pop("programs") * _limits(x.device)[0]
    shares = min(programs, triton.cdiv(groups, launch["BLOCK_M"]))
    return groups, (shares, triton.cdiv(setting.columns, launch["BLOCK_N"]))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, stride: int, padding: int, dilation: int, act: str
) -> None:
    """Writes into `out`, (B, h, w, C_out), which may be a slice of the channels of a wider map."""
    setting = _setting_of(x, weight, stride, padding, dilation)
    depth, size = setting.depth, x.element_size()

    def need(m: int, n: int, stages: int) -> int:
        return size * (depth * n + m * n + m * (stages * depth if stages > 1 else 64))

    launch = _launch_of("stem", x, setting, need)
    groups, grid = _grid(x, setting, launch)
    matrix = torch.empty(depth, grid[1] * launch["BLOCK_N"], dtype=x.dtype, device=x.device)
    compiled = dict(**setting.geometry, COLUMNS=matrix.shape[1])
    _spread[(depth // 16, grid[1])](weight, matrix, *weight.stride(), **compiled, BLOCK=launch["BLOCK_N"])
    _forward[grid](
        x, matrix, matrix if bias is None else bias, out, groups, *setting.sizes, out.stride(2),
        **compiled, **setting.edges, HAS_BIAS=bias is not None, KIND=KINDS[act], **launch,
    )  # fmt: skip


def weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `weight` and bias; `grad` may be a slice of the channels of a wider map."""
    setting = _setting_of(x, weight, stride, padding, dilation)
    size = x.element_size()

    def need(m: int, n: int, stages: int) -> int:
        return size * m * (stages * (n + setting.depth) if stages > 1 else n + 64)

    launch = _launch_of("stem_gradient", x, setting, need)
    groups, grid = _grid(x, setting, launch)
    shares, width = grid[0], grid[1] * launch["BLOCK_N"]
    partial = torch.empty(shares, width, setting.depth, dtype=torch.float32, device=x.device)
    partial_bias = torch.empty(shares, width, dtype=torch.float32, device=x.device) if has_bias else partial
    compiled = dict(**setting.geometry, COLUMNS=width)
    _weight_gradient[grid](
        x, grad, partial, partial_bias, groups, *setting.sizes, grad.stride(2),
        **compiled, **setting.edges, HAS_BIAS=has_bias, **launch,
    )  # fmt: skip
    result = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    _fold[(triton.cdiv(result.numel(), FOLDED),)](
        partial, result, shares, result.numel(), **compiled, BLOCK=FOLDED, BLOCK_SHARES=16
    )
    if not has_bias:
        return result, None
    return result, partial_bias[:, : setting.columns].reshape(-1, weight.shape[0]).sum(0)
