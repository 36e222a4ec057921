"""Normalising, erasing and mixing 8-bit pictures: each is read once, and where it is mixed its mirror place, too."""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.ops.mix import Mix
from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.tuning.launches import launch_parameters

ERASED, CUT = tl.constexpr(int(Mix.ERASED)), tl.constexpr(int(Mix.CUT))
KEPT, GIVEN = tl.constexpr(int(Mix.KEPT)), tl.constexpr(int(Mix.GIVEN))


@triton.jit
def _inside(box, x, y):
    top, bottom, left, right = tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


@triton.jit
def _value(pictures, noise, row, start, at, x, y, mask, mean, std, ERASE: tl.constexpr):
    """Of a picture, normalised, or noise where it is erased."""
    value = (tl.load(pictures + start + at, mask=mask, other=0).to(tl.float32) / 255.0 - mean) / std
    if ERASE:
        erased = _inside(row + ERASED, x, y)
        value = tl.where(erased, tl.load(noise + start + at, mask=mask & erased, other=0.0), value)
    return value


@triton.jit(do_not_specialize=["batch", "height", "width"])
def _forward(
    pictures, rows, mean, std, noise, out, stride, batch, height, width, channels,
    ERASE: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number, channel = tl.program_id(0), tl.program_id(2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pixels = height * width
    x, y = at % width, at // width
    mean, std = tl.load(mean + channel), tl.load(std + channel)
    start, row, written = (number.to(tl.int64) * channels + channel) * pixels, rows + number * stride, at < pixels
    value = _value(pictures, noise, row, start, at, x, y, written, mean, std, ERASE)
    if MIX:
        mirror = batch - 1 - number
        taken = _inside(row + CUT, x, y).to(tl.float32)
        by_box = tl.load(row + CUT + 1) > tl.load(row + CUT)
        kept = tl.where(by_box, 1.0 - taken, tl.load(row + KEPT))
        given = tl.where(by_box, taken, tl.load(row + GIVEN))
        other = (mirror.to(tl.int64) * channels + channel) * pixels
        mask = written & (given != 0)
        other = _value(pictures, noise, rows + mirror * stride, other, at, x, y, mask, mean, std, ERASE)
        value = value * kept + other * given
    tl.store(out + start + at, value, mask=written)


def forward(pictures: Tensor, rows: Tensor, mean: Tensor, std: Tensor, noise: Tensor | None, mixes: bool) -> Tensor:
    pictures = pictures.contiguous()
    out = torch.empty_like(pictures, dtype=torch.float32)
    batch, channels, height, width = pictures.shape
    if pictures.numel():
        assert rows.stride(1) == 1, "the numbers of a picture lie side by side"
        found = launch_parameters("mix_pictures")
        launch(
            _forward, (batch, cdiv(height * width, found["BLOCK"]), channels), pictures, rows, mean, std, noise, out,
            rows.stride(0), batch, height, width, channels,
            noise is not None, mixes, found["BLOCK"], num_warps=found["num_warps"],
        )  # fmt: skip
    return out
