"""A step of a policy on 8-bit pictures: tables of values, then every pixel by its picture's operation.

Programs branch by the code in their picture's row, so that launches and shapes are always the same. Products and sums
are not fused (`enable_fp_fusion`), since 7 - 1e-6 becomes 6: values that do not move come out as Pillow's.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.ops import augment as ops
from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.tuning.launches import launch_parameters

NOTHING, INVERT, POSTERIZE = (tl.constexpr(int(code)) for code in list(ops.Code)[:3])
SOLARIZE, SOLARIZE_ADD, BRIGHTNESS = (tl.constexpr(int(code)) for code in list(ops.Code)[3:6])
CONTRAST, AUTO_CONTRAST, EQUALIZE = (tl.constexpr(int(code)) for code in list(ops.Code)[6:9])
COLOR, SHARPNESS, SHEAR_X = (tl.constexpr(int(code)) for code in list(ops.Code)[9:12])
SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = (tl.constexpr(int(code)) for code in list(ops.Code)[12:])
BY, SINE, MODE = (tl.constexpr(int(column)) for column in list(ops.Step)[1:])
NEAREST, BICUBIC = tl.constexpr(ops.NEAREST), tl.constexpr(ops.BICUBIC)


@triton.jit
def _blend(base, value, factor):
    mixed = base.to(tl.float32) + factor * (value - base).to(tl.float32)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit
def _grey(picture, at, inside, pixels, CHANNELS: tl.constexpr):
    grey = tl.load(picture + at, mask=inside, other=0).to(tl.int32)
    if CHANNELS == 3:
        green = tl.load(picture + pixels + at, mask=inside, other=0).to(tl.int32)
        blue = tl.load(picture + 2 * pixels + at, mask=inside, other=0).to(tl.int32)
        grey = (grey * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return grey


# Tables ---------------------------------------------------------------------------------------------------------


@triton.jit
def _grey_mean(picture, pixels, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Rounded."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.where(at < pixels, _grey(picture, at, at < pixels, pixels, CHANNELS), 0)
    return ((2 * tl.sum(total.to(tl.int64)) + pixels) // (2 * pixels)).to(tl.int32)


@triton.jit
def _count(plane, pixels, BLOCK: tl.constexpr):
    """(256,) how often each value occurs."""
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(plane + at, mask=at < pixels, other=0).to(tl.int32)
        counts += tl.histogram(values, 256, mask=at < pixels)
    return counts


@triton.jit
def _stretch(value, counts):
    """From the least value to the largest becomes from 0 to 255; in double precision, as Pillow adds it up."""
    low = tl.min(tl.where(counts > 0, value, 255)).to(tl.float64)
    high = tl.max(tl.where(counts > 0, value, 0)).to(tl.float64)
    scale = 255.0 / tl.where(high > low, high - low, 1.0)
    stretched = value.to(tl.float64) * scale + -low * scale
    return tl.where(high > low, tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32), value)


@triton.jit
def _equalize(value, counts, pixels):
    high = tl.max(tl.where(counts > 0, value, 0))
    step = (pixels - tl.sum(tl.where(value == high, counts, 0))) // 255
    below = tl.cumsum(counts, 0) - counts
    flat = tl.minimum((step // 2 + below) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, flat, value)


@triton.jit(do_not_specialize=["first", "pixels"])
def _make_tables(pictures, rows, tables, stride, first, pixels, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    number, channel = tl.program_id(0), tl.program_id(1)
    picture = pictures + number.to(tl.int64) * CHANNELS * pixels
    row = rows + number * stride + first
    code, by = tl.load(row).to(tl.int32), tl.load(row + BY)
    if (code > NOTHING) & (code <= EQUALIZE):
        value = tl.arange(0, 256)
        table = value
        if code == INVERT:
            table = 255 - value
        elif code == POSTERIZE:
            table = value & (0xFF00 >> tl.minimum(tl.maximum(by.to(tl.int32), 0), 8))
        elif code == SOLARIZE:
            table = tl.where(value.to(tl.float32) < by, value, 255 - value)
        elif code == SOLARIZE_ADD:
            table = tl.where(value < 128, tl.minimum(value + by.to(tl.int32), 255), value)
        elif code == BRIGHTNESS:
            table = _blend(tl.zeros_like(value), value, by)
        elif code == CONTRAST:
            mean = _grey_mean(picture, pixels, CHANNELS, BLOCK)
            table = _blend(tl.zeros_like(value) + mean, value, by)
        else:
            counts = _count(picture + channel * pixels, pixels, BLOCK)
            if code == AUTO_CONTRAST:  # noqa: SIM108  Triton would compute both
                table = _stretch(value, counts)
            else:
                table = _equalize(value, counts, pixels)
        tl.store(tables + (number * CHANNELS + channel) * 256 + value, table.to(tl.uint8))


# Pixels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _smooth(plane, value, at, height, width):
    """3 x 3 pixels, of 1 around 5; those on the edge stay as they are."""
    x, y = at % width, at // width
    interior = (x > 0) & (x < width - 1) & (y > 0) & (y < height - 1)
    total = 4 * value
    for tap in tl.static_range(9):
        near = at + (tap // 3 - 1) * width + tap % 3 - 1
        total += tl.load(plane + near, mask=interior, other=0).to(tl.int32)
    return tl.where(interior, (2 * total + 13) // 26, value)


@triton.jit
def _place(code, by, sine, at, height, width):
    """Where values come from, (x, y), in double precision, as in Pillow."""
    x, y = (at % width).to(tl.float64) + 0.5, (at // width).to(tl.float64) + 0.5
    by, sine = by.to(tl.float64), sine.to(tl.float64)
    across, down = width.to(tl.float64) / 2, height.to(tl.float64) / 2
    if code == ROTATE:  # about the centre
        from_x = by * x + -sine * y + (across - by * across + sine * down)
        from_y = sine * x + by * y + (down - sine * across - by * down)
    else:
        from_x = x + tl.where(code == SHEAR_X, by, 0.0) * y + tl.where(code == TRANSLATE_X, by * width, 0.0)
        from_y = tl.where(code == SHEAR_Y, by, 0.0) * x + y + tl.where(code == TRANSLATE_Y, by * height, 0.0)
    return from_x, from_y


@triton.jit
def _between(place, mode):
    """The pixel before a place, and the way from there to the next."""
    whole = tl.floor(place - 0.5)
    way = (place - 0.5 - whole).to(tl.float32)
    return whole.to(tl.int32), tl.where(mode == NEAREST, (way >= 0.5).to(tl.float32), way)


@triton.jit
def _weight(way, mode, tap):
    """Of one of four pixels around a place; the outer two are for bicubic alone."""
    bend = tl.where(mode == BICUBIC, way * (1 - way), 0.0)  # Pillow's cubic has a slope of -1
    near, far = bend * (1 - way), bend * way
    outer, inner = tl.where(tap == 0, -near, -far), tl.where(tap == 1, 1 - way + near, way + far)
    return tl.where((tap == 0) | (tap == 3), outer, inner)


@triton.jit
def _taps(mode, still):
    """The first of the four pixels around a place that can have a weight, and behind the last; one if it is `still`."""
    first = tl.where((mode == BICUBIC) & (still == 0), 0, 1)
    return first, tl.where(still, 2, tl.where(mode == BICUBIC, 4, 3))


@triton.jit(do_not_specialize=["first", "height", "width", "fill"])
def _change(
    pictures, rows, tables, out, stride, first, height, width, fill, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pixels = height * width
    inside = at < pixels
    picture = pictures + number.to(tl.int64) * CHANNELS * pixels
    result = out + number.to(tl.int64) * CHANNELS * pixels
    row = rows + number * stride + first
    code, by = tl.load(row).to(tl.int32), tl.load(row + BY)
    if code <= SHARPNESS:
        for channel in tl.static_range(CHANNELS):
            plane = picture + channel * pixels
            value = tl.load(plane + at, mask=inside, other=0).to(tl.int32)
            if code == COLOR:
                value = _blend(_grey(picture, at, inside, pixels, CHANNELS), value, by)
            elif code == SHARPNESS:
                value = _blend(_smooth(plane, value, at, height, width), value, by)
            elif code != NOTHING:
                value = tl.load(tables + (number * CHANNELS + channel) * 256 + value).to(tl.int32)
            tl.store(result + channel * pixels + at, value.to(tl.uint8), mask=inside)
    else:
        mode = tl.load(row + MODE).to(tl.int32)
        from_x, from_y = _place(code, by, tl.load(row + SINE), at, height, width)
        seen = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height) & inside
        x, way_x = _between(from_x, mode)
        y, way_y = _between(from_y, mode)
        left, right = _taps(mode, (code == SHEAR_Y) | (code == TRANSLATE_Y))
        top, bottom = _taps(mode, (code == SHEAR_X) | (code == TRANSLATE_X))
        for channel in tl.static_range(CHANNELS):
            total = tl.zeros((BLOCK,), tl.float32)
            for i in range(top, bottom):
                line = tl.minimum(tl.maximum(y + i - 1, 0), height - 1) * width
                for j in range(left, right):
                    near = line + tl.minimum(tl.maximum(x + j - 1, 0), width - 1)
                    pixel = tl.load(picture + channel * pixels + near, mask=seen, other=0).to(tl.float32)
                    total += pixel * (_weight(way_y, mode, i) * _weight(way_x, mode, j))
            total = tl.minimum(tl.maximum(total + 2e-4, 0.0), 255.0)  # so that 7 - 1e-5 counts as 7 below
            moved = tl.where(seen, total.to(tl.int32), fill >> 8 * channel & 255)
            tl.store(result + channel * pixels + at, moved.to(tl.uint8), mask=inside)


def forward(pictures: Tensor, rows: Tensor, first: int, fill: tuple[int, ...]) -> Tensor:
    pictures = pictures.contiguous()
    out, (batch, channels, height, width) = torch.empty_like(pictures), pictures.shape
    if not pictures.numel():
        return out
    assert rows.stride(1) == 1, "the numbers of a picture lie side by side"
    tables = torch.empty(batch, channels, 256, dtype=torch.uint8, device=pictures.device)
    colour = sum(value << 8 * channel for channel, value in enumerate(fill))
    found = launch_parameters("augment_tables")
    launch(
        _make_tables, (batch, channels), pictures, rows, tables, rows.stride(0), first, height * width,
        channels, found["BLOCK"], num_warps=found["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip
    found = launch_parameters("augment_step")
    launch(
        _change, (batch, cdiv(height * width, found["BLOCK"])), pictures, rows, tables, out,
        rows.stride(0), first, height, width, colour,
        channels, found["BLOCK"], num_warps=found["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip
    return out
