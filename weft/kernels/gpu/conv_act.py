"""Convolution with bias, shortcut and activation, all in one kernel or behind the library's convolution."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.choose import launch_parameters
from weft.kernels.conv_act import output_size
from weft.kernels.gpu.activations import KINDS, activate
from weft.kernels.switch import interpreted

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # of matrix products; the interpreter has but float32
TILE = dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=4)
PASS_SIZE = 4096  # values of a program of the pass behind a convolution


@triton.jit
def _finish(
    y, bias, residual, rows, features, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """y = act(y + bias + residual) in place, on (rows, features)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = (row < rows)[:, None] & (feature < features)[None, :]
    at = row[:, None] * features + feature[None, :]
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, KIND), mask=inside)


@triton.jit
def _convolve(
    x, weight, bias, residual, y, rows, in_height, in_width, height, width, channels, features,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    TYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A matrix product: rows are pixels of the result, columns its features, inner are the channels under each tap.

    x is (B, H, W, C), weight (features, KERNEL, KERNEL, C), y and residual (rows, features).
    """
    blocks_n = tl.cdiv(features, BLOCK_N)  # neighbours in the grid read the same pixels
    row = (tl.program_id(0) // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    picture, pixel = row // (height * width), row % (height * width)
    top, left = (pixel // width) * STRIDE - PADDING, (pixel % width) * STRIDE - PADDING
    corner = x + ((picture.to(tl.int64) * in_height + top) * in_width + left)[:, None] * channels + channel[None, :]
    filters = weight + feature[None, :] * (KERNEL * KERNEL * channels) + channel[:, None]
    blocks_k = tl.cdiv(channels, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(KERNEL * KERNEL * blocks_k):
        tap, first = step // blocks_k, (step % blocks_k) * BLOCK_K
        down, right = tap // KERNEL, tap % KERNEL
        inside = row < rows
        if PADDING > 0:
            inside &= (top + down >= 0) & (top + down < in_height) & (left + right >= 0) & (left + right < in_width)
        x_mask, w_mask = inside[:, None], (feature < features)[None, :]
        if not EVEN:
            known = first + channel < channels
            x_mask, w_mask = x_mask & known[None, :], w_mask & known[:, None]
        pixels = tl.load(corner + ((down * in_width + right) * channels + first), mask=x_mask, other=0.0)
        taps = tl.load(filters + (tap * channels + first), mask=w_mask, other=0.0)
        total = tl.dot(pixels.to(TYPE), taps.to(TYPE), total)
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * features + feature[None, :]
    inside = (row < rows)[:, None] & (feature < features)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, activate(total, KIND), mask=inside)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    groups: int,
    act: str,
) -> Tensor:
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    height, width = output_size(x, weight, stride, padding)
    features, channels, kernel, _ = weight.shape
    pointwise = kernel == 1 and stride[0] == 1 and residual is None and act in ("none", "relu")
    launch = launch_parameters(
        "conv_act",
        x.device,
        {"how": "linear" if pointwise else "library"},
        rows=x.shape[0] * height * width,
        channels=channels,
        features=features,
        kernel=kernel,
        stride=stride[0],
        residual=residual is not None,
        act=act,
    )
    how = launch["how"]
    square = weight.shape[2] == weight.shape[3] and stride[0] == stride[1] and padding[0] == padding[1]
    if groups > 1 or not square or x.dtype not in TYPES or x.numel() == 0:
        how = "library"
    if how == "library" or bias is None:
        return _library(x, weight, bias, residual, stride, padding, groups, act)
    if how == "linear":
        return _linear(x, weight, bias, act)
    tile = {key: value for key, value in {**TILE, **launch}.items() if key != "how"}
    return _kernel(x, weight, bias, residual, (height, width), stride[0], padding[0], act, tile)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, act: str) -> Tensor:
    pixels = x.permute(0, 2, 3, 1)  # (B, H, W, C)
    flat, matrix = pixels.reshape(-1, x.shape[1]), weight.flatten(1).t()
    multiply = torch._addmm_activation if act == "relu" else torch.addmm
    return multiply(bias.to(x.dtype), flat, matrix).view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)


def _library(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    groups: int,
    act: str,
) -> Tensor:
    y = F.conv2d(x, weight, None, stride, padding, groups=groups).contiguous(memory_format=torch.channels_last)
    features = y.shape[1]
    rows = y.numel() // max(features, 1)
    if rows:
        width = min(max(features & -features, 16), 256)  # the largest power of two that divides it
        tile = dict(ROWS=PASS_SIZE // width, FEATURES=width, num_warps=8)
        grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(features, width))
        _finish[grid](
            y, bias, residual, rows, features, KINDS[act], bias is not None, residual is not None, **tile
        )  # fmt: skip
    return y


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    size: tuple[int, int],
    stride: int,
    padding: int,
    act: str,
    tile: dict[str, int],
) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    batch, channels, in_height, in_width = x.shape
    features, _, kernel, _ = weight.shape
    y = x.new_empty(batch, *size, features)
    rows = batch * size[0] * size[1]
    grid = (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(features, tile["BLOCK_N"]),)
    _convolve[grid](
        x, weight, bias, residual, y, rows, in_height, in_width, *size, channels, features,
        KERNEL=kernel, STRIDE=stride, PADDING=padding, KIND=KINDS[act],
        HAS_BIAS=True, HAS_RESIDUAL=residual is not None, EVEN=channels % tile["BLOCK_K"] == 0,
        TYPE=tl.float32 if interpreted() else TYPES[x.dtype], **tile,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)
