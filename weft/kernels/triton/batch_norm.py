"""BatchNorm on rows of C channels: statistics in one pass, act(keep * bn(x) + residual) in another; two passes back.

A program has a block of channels and a share of the rows, every `programs`-th tile of them. What it finds about its
share goes to a table with a line per program, from which a small kernel or a sum makes the whole. C is an argument:
blocks of channels are the same for most, so that one kernel serves all stages of a network.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.ops.batch_norm import output_dtype
from weft.kernels.triton.activations import KINDS, activate, slope
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.triton.shares import sum_lines
from weft.kernels.tuning.launches import launch_parameters, processors


@triton.jit
def _tile(channel, C, ROWS: tl.constexpr):
    """Offsets in a tile, and from row to row: the one in 32 bits, which is cheap, the other in 64, which is safe."""
    return (tl.arange(0, ROWS) * C)[:, None] + channel[None, :], tl.full((), C, tl.int64)


@triton.jit
def _own_tile(rows, C, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of a program that has one tile: its channels and rows, which there are, where it begins, and `_tile`."""
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (channel < C)[None, :]
    tile, step = _tile(channel, C, ROWS)
    return channel, row, mask, step * first, tile


@triton.jit
def _place(row, positions, gap, start, tile, channel, C, DENSE: tl.constexpr):
    """Offsets of a tile, `start + tile`, in a map whose pictures lie `gap` rows apart, unless it is DENSE."""
    place = start + tile
    if not DENSE:
        place = (row + row // positions * gap).to(tl.int64)[:, None] * C + channel[None, :]
    return place


@triton.jit(do_not_specialize=["rows"])
def _statistics(x, partial, rows, C, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Welford's means and sums of squared deviations, one per row of a tile and channel, then merged."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    seen = 0.0
    tile, step = _tile(channel, C, ROWS)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (channel < C)[None, :]
        value = tl.load(x + step * first + tile, mask=mask, other=0.0).to(tl.float32)
        seen += 1.0
        count += tl.where(row < rows, 1.0, 0.0)
        change = tl.where((row < rows)[:, None], value - mean, 0.0)
        mean += change * (1.0 / seen)
        squares += change * (value - mean)
    total = tl.sum(count, axis=0)
    merged = tl.sum(mean * count[:, None], axis=0) / total
    off = mean - merged[None, :]
    squares += off * off * count[:, None]
    line = partial + program * 2 * C
    tl.store(line + channel, merged, mask=channel < C)
    tl.store(line + C + channel, tl.sum(squares, axis=0), mask=channel < C)


@triton.jit(do_not_specialize=["rows", "programs"])
def _merge(
    partial, moments, running_mean, running_var, batches, rows, programs, momentum,
    C, TILE: tl.constexpr, RUNNING: tl.constexpr, COUNTED: tl.constexpr,
    LINES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and variance of all rows from those of every program's share; then the running ones."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < C
    around = tl.load(partial + channel, mask=inside, other=0.0)  # near every mean, so that differences are small
    total = tl.zeros((LINES, WIDTH), tl.float32)
    squares = tl.zeros((LINES, WIDTH), tl.float32)
    for first in range(0, programs, LINES):
        program = first + tl.arange(0, LINES)
        # A program has every `programs`-th tile; the last tile may be short.
        tiles = (rows + TILE - 1) // TILE
        own = (tiles - program + programs - 1) // programs
        short = tl.where((tiles - 1) % programs == program, tiles * TILE - rows, 0)
        count = (own * TILE - short).to(tl.float32)[:, None]
        mask = (program < programs)[:, None] & inside[None, :]
        line = partial + (program * 2 * C)[:, None] + channel[None, :]
        off = tl.where(mask, tl.load(line, mask=mask, other=0.0) - around[None, :], 0.0)
        total += off * count
        squares += tl.load(line + C, mask=mask, other=0.0) + off * off * count
    shift = tl.sum(total, axis=0) / rows
    found_mean = around + shift
    found = tl.maximum(tl.sum(squares, axis=0) / rows - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(moments + channel, found_mean, mask=inside)
    tl.store(moments + C + channel, found, mask=inside)
    if RUNNING:
        before = tl.load(running_mean + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_mean + channel, before + momentum * (found_mean - before), mask=inside)
        before = tl.load(running_var + channel, mask=inside, other=0.0).to(tl.float32)
        unbiased = found * (rows / (rows - 1.0))
        tl.store(running_var + channel, before + momentum * (unbiased - before), mask=inside)
    if COUNTED:  # noqa: SIM102  known when it is compiled
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _channels(mean, var, weight, bias, channel, eps, C):
    """Of some channels: mean, inverse of the standard deviation, weight and bias, each (1, WIDTH)."""
    inside = channel < C
    if var is None:  # then both are in one tensor
        var = mean + C
    rstd = tl.rsqrt(tl.load(var + channel, mask=inside, other=1.0).to(tl.float32) + eps)
    centre = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return centre[None, :], rstd[None, :], gamma[None, :], beta[None, :]


@triton.jit(do_not_specialize=["rows", "positions", "gap"])
def _apply(
    x, mean, var, weight, bias, residual, keep, y, rows, positions, gap, eps,
    C, HAS_RESIDUAL: tl.constexpr, HAS_KEEP: tl.constexpr, ACT: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """act(keep * bn(x) + residual) of a tile; pictures of y lie `gap` rows apart."""
    channel, row, mask, start, tile = _own_tile(rows, C, ROWS, WIDTH)
    value = tl.load(x + start + tile, mask=mask, other=0.0).to(tl.float32)
    centre, rstd, gamma, beta = _channels(mean, var, weight, bias, channel, eps, C)
    value = (value - centre) * (rstd * gamma) + beta
    if HAS_KEEP:
        value *= tl.load(keep + row // positions, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        value += tl.load(residual + start + tile, mask=mask, other=0.0).to(tl.float32)
    place = _place(row, positions, gap, start, tile, channel, C, DENSE)
    tl.store(y + place, activate(value, ACT), mask=mask)


@triton.jit(do_not_specialize=["rows", "positions", "gap"])
def _reduce(
    grad, x, mean, var, weight, bias, residual, keep, grad_residual, y, partial, rows, positions, gap, eps,
    C, HAS_RESIDUAL: tl.constexpr, HAS_KEEP: tl.constexpr, ACT: tl.constexpr, WITH_OUTPUT: tl.constexpr,
    DENSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias, a line per program; where residual and activation are, also the residual's.

    Pictures of `grad` lie `gap` rows apart. WITH_OUTPUT: and y, as `_apply` makes it, since all that it takes is at
    hand.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    centre, rstd, gamma, beta = _channels(mean, var, weight, bias, channel, eps, C)
    grad_gamma = tl.zeros((ROWS, WIDTH), tl.float32)
    grad_beta = tl.zeros((ROWS, WIDTH), tl.float32)
    tile, step = _tile(channel, C, ROWS)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (channel < C)[None, :]
        start = step * first
        unit = (tl.load(x + start + tile, mask=mask, other=0.0).to(tl.float32) - centre) * rstd
        place = _place(row, positions, gap, start, tile, channel, C, DENSE)
        upstream = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if HAS_KEEP:
            factor = tl.load(keep + row // positions, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        if ACT or WITH_OUTPUT:
            value = unit * gamma + beta
            if HAS_KEEP:
                value *= factor
            if HAS_RESIDUAL:
                value += tl.load(residual + start + tile, mask=mask, other=0.0).to(tl.float32)
        if WITH_OUTPUT:
            tl.store(y + start + tile, activate(value, ACT), mask=mask)
        if ACT:
            upstream *= slope(value, ACT)
            if HAS_RESIDUAL:
                tl.store(grad_residual + start + tile, upstream, mask=mask)
        if HAS_KEEP:
            upstream *= factor
        grad_gamma += upstream * unit
        grad_beta += upstream
    line = partial + program * 2 * C
    tl.store(line + channel, tl.sum(grad_gamma, axis=0), mask=channel < C)
    tl.store(line + C + channel, tl.sum(grad_beta, axis=0), mask=channel < C)


@triton.jit(do_not_specialize=["rows", "positions", "gap"])
def _input_gradient(
    grad, x, mean, var, weight, bias, grad_weight, grad_bias, keep, grad_x, rows, positions, gap, eps,
    C, HAS_KEEP: tl.constexpr, ACT: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a tile; pictures of `grad` lie `gap` rows apart.

    Where mean and variance are those of the rows, each row has a share in them.
    """
    channel, row, mask, start, tile = _own_tile(rows, C, ROWS, WIDTH)
    place = _place(row, positions, gap, start, tile, channel, C, DENSE)
    upstream = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + start + tile, mask=mask, other=0.0).to(tl.float32)
    centre, rstd, gamma, beta = _channels(mean, var, weight, bias, channel, eps, C)
    unit = (value - centre) * rstd
    if HAS_KEEP:
        factor = tl.load(keep + row // positions, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if ACT:
        value = unit * gamma + beta
        if HAS_KEEP:
            value *= factor
        upstream *= slope(value, ACT)
    if HAS_KEEP:
        upstream *= factor
    if var is None:
        along = tl.load(grad_weight + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :] / rows
        level = tl.load(grad_bias + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :] / rows
        upstream -= level + unit * along
    tl.store(grad_x + start + tile, upstream * (rstd * gamma), mask=mask)


def _blocks(channels: int, most: int) -> tuple[int, int]:
    """Channels of a program, and how many blocks of them there are.

    That is the power of two which divides C, or one above C where that would be too few.
    """
    whole = channels & -channels
    width = min(whole if whole >= 32 else power_of_two(channels), most)
    return width, cdiv(channels, width)


def _with_gaps(x: Tensor) -> tuple[Tensor, int]:
    """A map that kernels can read, and the rows between its pictures: behind a class token it stays where it is."""
    between, rest = divmod(x.stride(0) - x[0].numel(), x.shape[-1])
    in_place = between > 0 and rest == 0 and x[0].is_contiguous()
    return (x, between) if in_place else (x.contiguous(), 0)


def statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    """Mean and biased variance of each channel, (2, C); updates the running ones."""
    x, channels = x.contiguous(), x.shape[-1]
    rows = x.numel() // channels
    chosen = launch_parameters("batch_norm_statistics")
    width, blocks = _blocks(channels, chosen["width"])
    tile = max(1, chosen["elements"] // width)
    programs = min(cdiv(rows, tile), max(1, chosen["per_processor"] * processors(x.device) // blocks))
    partial = torch.empty(programs, 2, channels, device=x.device)
    moments = torch.empty(2, channels, device=x.device)
    launch(
        _statistics, (programs, blocks), x, partial, rows, channels, tile, width, chosen["stages"],
        num_warps=chosen["num_warps"],
    )  # fmt: skip
    launch(
        _merge, (cdiv(channels, 16),), partial, moments, running_mean, running_var, batches, rows, programs, momentum,
        channels, tile, running_mean is not None, batches is not None, 256, 16, num_warps=8,
    )  # fmt: skip
    # Autograd does not see what a kernel writes.
    torch.autograd.graph.increment_version([t for t in (running_mean, running_var, batches) if t is not None])
    return moments


def apply(
    x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    """act(keep * bn(x) + residual)."""
    y = x.new_empty(x.shape, dtype=output_dtype(x, residual))
    _write(x, mean, var, weight, bias, residual, keep, eps, act, y, gap=0)
    return y


def apply_behind_token(
    x: Tensor, cls: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """bn(x) behind the class token."""
    pictures, *sides, channels = x.shape
    tokens = x.new_empty(pictures, 1 + math.prod(sides), channels)
    tokens[:, :1] = cls
    _write(x, mean, var, weight, bias, None, None, eps, "none", tokens[:, 1:], gap=1)
    return tokens


def _write(
    x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str, y: Tensor, gap: int,
) -> None:  # fmt: skip
    """`apply` into y, whose pictures lie `gap` rows apart."""
    channels = x.shape[-1]
    if not x.numel():
        return
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    rows, has_residual = x.numel() // channels, residual is not None
    chosen = launch_parameters("batch_norm")
    width, blocks = _blocks(channels, chosen["width"])
    tile = max(1, chosen["elements"] // width)
    launch(
        _apply, (cdiv(rows, tile), blocks), x, mean, var, weight, bias, residual, keep, y,
        rows, rows // x.shape[0], gap, eps, channels, has_residual, keep is not None, KINDS[act], gap == 0, tile, width,
        num_warps=chosen["num_warps"],
    )  # fmt: skip


def backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str, with_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, weight, bias and, behind an activation, of the residual; and y `with_output`."""
    grad_x, channels = x.new_empty(x.shape), x.shape[-1]
    grad_residual = None if residual is None or act == "none" else residual.new_empty(residual.shape)
    y = x.new_empty(x.shape, dtype=output_dtype(x, residual)) if with_output else None
    if not x.numel():
        return grad_x, torch.zeros_like(weight), torch.zeros_like(weight), grad_residual, y
    grad, gap = _with_gaps(grad)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    rows, has_residual = x.numel() // channels, residual is not None
    chosen = launch_parameters("batch_norm_backward")
    width, blocks = _blocks(channels, chosen["width"])
    tile, warps = max(1, chosen["elements"] // width), chosen["num_warps"]
    programs = min(cdiv(rows, tile), max(1, chosen["per_processor"] * processors(x.device) // blocks))
    partial = torch.empty(programs, 2, channels, device=x.device)
    kind, positions = KINDS[act], rows // x.shape[0]
    launch(
        _reduce, (programs, blocks), grad, x, mean, var, weight, bias, residual, keep, grad_residual, y, partial,
        rows, positions, gap, eps, channels, has_residual, keep is not None, kind, y is not None, gap == 0, tile, width,
        chosen["stages"], num_warps=warps,
    )  # fmt: skip
    grad_weight, grad_bias = sum_lines(partial, weight)
    if grad_residual is not None:  # which has the slope of the activation in it
        grad, gap, kind = grad_residual, 0, 0
    launch(
        _input_gradient, (cdiv(rows, tile), blocks), grad, x, mean, var, weight, bias, grad_weight, grad_bias, keep,
        grad_x, rows, positions, gap, eps, channels, keep is not None, kind, gap == 0, tile, width, num_warps=warps,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias, grad_residual, y
