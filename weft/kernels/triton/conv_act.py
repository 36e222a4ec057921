"""Convolution with bias, shortcut and activation, all in one kernel or behind the library's convolution."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.switch import interpreted
from weft.kernels.triton.activations import KINDS, activate
from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.tuning.launches import launch_parameters

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # of matrix products; the interpreter has but float32
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
    HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
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
    at = row.to(tl.int64)[:, None] * features + feature[None, :]
    known = (row < rows)[:, None] & (feature < features)[None, :]
    if HAS_RESIDUAL:  # on its way while the matrix unit works
        shortcut = tl.load(residual + at, mask=known, other=0.0)
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
            exists = first + channel < channels
            x_mask, w_mask = x_mask & exists[None, :], w_mask & exists[:, None]
        pixels = tl.load(corner + ((down * in_width + right) * channels + first), mask=x_mask, other=0.0)
        taps = tl.load(filters + (tap * channels + first), mask=w_mask, other=0.0)
        total = tl.dot(pixels.to(TYPE), taps.to(TYPE), total)
    total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += shortcut.to(tl.float32)  # pyright: ignore[reportPossiblyUnboundVariable]
    tl.store(y + at, activate(total, KIND), mask=known)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: int,
    padding: int,
    groups: int,
    act: str,
) -> Tensor:
    if residual is not None:
        residual = residual.contiguous()
    batch, height, width, _ = x.shape
    features, channels, kernel, columns = weight.shape
    height, width = (height + 2 * padding - kernel) // stride + 1, (width + 2 * padding - columns) // stride + 1
    shape, rows = (batch, height, width, features), batch * height * width
    product = kernel == 1 and stride == 1 and residual is None and act in ("none", "relu")  # all that cublas does
    launched = launch_parameters(
        "conv_act", kernel=kernel, stride=stride, channels=channels, features=features, product=product
    )
    how = launched["how"]
    matrix = groups == 1 and kernel == columns and x.dtype in TYPES and rows > 0
    if how == "linear" and product and matrix and bias is not None:
        return _linear(x, weight, bias, shape, act)
    if how == "kernel" and matrix and bias is not None:
        return _kernel(x, weight, bias, residual, shape, stride, padding, act, launched)
    return _library(x, weight, bias, residual, rows, stride, padding, groups, act)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], act: str) -> Tensor:
    multiply = torch._addmm_activation if act == "relu" else torch.addmm
    return multiply(bias.to(x.dtype), x.reshape(-1, x.shape[3]), weight.flatten(1).t()).view(shape)


def _library(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: int,
    stride: int,
    padding: int,
    groups: int,
    act: str,
) -> Tensor:
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, None, stride, padding, groups=groups)
    y = y.permute(0, 2, 3, 1).contiguous()  # as the library writes it, most of the time
    features = y.shape[3]
    width = min(max(features & -features, 16), 256)  # the largest power of two that divides it
    height = PASS_SIZE // width
    if rows:
        launch(
            _finish, (cdiv(rows, height), cdiv(features, width)),
            y, bias, residual, rows, features, KINDS[act], bias is not None, residual is not None, height, width,
            num_warps=8,
        )  # fmt: skip
    return y


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    shape: tuple[int, int, int, int],
    stride: int,
    padding: int,
    act: str,
    tile: dict[str, Any],
) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous(memory_format=torch.channels_last)
    _, in_height, in_width, channels = x.shape
    batch, height, width, features = shape
    y = x.new_empty(shape)
    rows, pixels, columns, inner = batch * height * width, tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    launch(
        _convolve, (cdiv(rows, pixels) * cdiv(features, columns),),
        x, weight, bias, residual, y, rows, in_height, in_width, height, width, channels, features,
        weight.shape[2], stride, padding, KINDS[act], residual is not None, channels % inner == 0,
        tl.float32 if interpreted() else TYPES[x.dtype], pixels, columns, inner,
        num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    return y
