"""Boxes cut out of pictures of any size and resized: one pass along the rows, one down the columns.

Beyond what is shown of a picture nothing is added up, and zeros are written.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters

COLUMNS = 9  # of `rows`: top, left, height, width, flip, vflip, mode, and the height and width that are shown


@triton.jit
def _filter(x, bicubic):
    """The interpolation's weight at a distance, as Pillow and torch have it: the cubic has a slope of -0.5."""
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    cubic = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(bicubic, cubic, tl.maximum(1.0 - x, 0.0))


@triton.jit
def _first_tap(place, side, size, bicubic):
    """Of an output place along an axis of a box: its centre in the box, the first pixel that counts, and how many."""
    scale = side / size
    support = tl.where(bicubic, 2.0, 1.0) * tl.maximum(scale, 1.0)
    centre = scale * (place.to(tl.float32) + 0.5)
    first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + support + 0.5).to(tl.int32), side.to(tl.int32))
    return centre, first, last - first


@triton.jit
def _rounded(total, weights):
    return tl.minimum(tl.maximum(tl.floor(total / weights + 0.5), 0.0), 255.0).to(tl.uint8)


@triton.jit(do_not_specialize=["width", "most"])
def _along_rows(
    pixels, starts, sizes, rows, between, width, most,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LINES lines of one picture's box, all channels, every output column: into `between`, (B, C, most, width)."""
    picture = tl.program_id(0)
    row = rows + picture * COLUMNS
    box_height, box_width, shown = tl.load(row + 2), tl.load(row + 3), tl.load(row + 8)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    if tl.program_id(1) * LINES < box_height:
        top, left = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
        flip, bicubic = tl.load(row + 4) > 0.5, tl.load(row + 6) > 0.5
        start, h, w = tl.load(starts + picture), tl.load(sizes + 2 * picture), tl.load(sizes + 2 * picture + 1)
        column = tl.arange(0, BLOCK)
        place = tl.where(flip, shown - 1 - column, column)
        centre, first, count = _first_tap(place, box_width, shown, bicubic)
        shrink = 1.0 / tl.maximum(box_width / shown, 1.0)
        taps = tl.max(tl.where(column < shown, count, 0), 0)
        for channel in tl.static_range(CHANNELS):
            at = start + (channel * h + top + line).to(tl.int64) * w + left  # (LINES,)
            total = tl.zeros((LINES, BLOCK), tl.float32)
            weights = tl.zeros((BLOCK,), tl.float32)
            for tap in range(0, taps):
                used = (tap < count) & (column < shown)
                weight = tl.where(used, _filter((first + tap - centre + 0.5) * shrink, bicubic), 0.0)
                mask = (line < box_height)[:, None] & used[None, :]
                value = tl.load(pixels + at[:, None] + (first + tap)[None, :], mask=mask, other=0)
                total += weight[None, :] * value.to(tl.float32)
                weights += weight
            to = ((picture * CHANNELS + channel) * most + line).to(tl.int64)[:, None] * width + column[None, :]
            written = (line < box_height)[:, None] & (column < width)[None, :]
            tl.store(between + to, _rounded(total, tl.where(column < shown, weights, 1.0)[None, :]), mask=written)


@triton.jit(do_not_specialize=["height", "width", "most"])
def _down_columns(
    between, rows, y, height, width, most,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LINES output lines of one channel of one picture."""
    plane = tl.program_id(0)  # of B * C
    row = rows + plane // CHANNELS * COLUMNS
    box_height, vflip, bicubic = tl.load(row + 2), tl.load(row + 5) > 0.5, tl.load(row + 6) > 0.5
    shown = tl.load(row + 7)
    line, column = tl.program_id(1) * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK)
    place = tl.where(vflip, shown - 1 - line, line)
    centre, first, count = _first_tap(place, box_height, shown, bicubic)
    shrink = 1.0 / tl.maximum(box_height / shown, 1.0)
    taps = tl.max(tl.where(line < shown, count, 0), 0)
    total = tl.zeros((LINES, BLOCK), tl.float32)
    weights = tl.zeros((LINES,), tl.float32)
    for tap in range(0, taps):
        used = (tap < count) & (line < shown)
        weight = tl.where(used, _filter((first + tap - centre + 0.5) * shrink, bicubic), 0.0)
        at = (plane * most + first + tap).to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(between + at, mask=used[:, None] & (column < width)[None, :], other=0)
        total += weight[:, None] * value.to(tl.float32)
        weights += weight
    to = (plane * height + line).to(tl.int64)[:, None] * width + column[None, :]
    written = (line < height)[:, None] & (column < width)[None, :]
    tl.store(y + to, _rounded(total, tl.where(line < shown, weights, 1.0)[:, None]), mask=written)


def crop_resize(
    pixels: Tensor, starts: Tensor, sizes: Tensor, rows: Tensor, channels: int, height: int, width: int, most: int
) -> Tensor:
    batch, block, launched = len(rows), power_of_two(width), launch_parameters("crop")
    lines = max(1, launched["elements"] // block)
    between = torch.empty(batch, channels, most, width, dtype=torch.uint8, device=pixels.device)
    y = torch.empty(batch, channels, height, width, dtype=torch.uint8, device=pixels.device)
    if batch:
        options = dict(num_warps=launched["num_warps"])
        launch(
            _along_rows, (batch, cdiv(most, lines)),
            pixels, starts, sizes, rows, between, width, most, COLUMNS, channels, lines, block, **options,
        )  # fmt: skip
        launch(
            _down_columns, (batch * channels, cdiv(height, lines)),
            between, rows, y, height, width, most, COLUMNS, channels, lines, block, **options,
        )  # fmt: skip
    return y
