"""A matrix product whose values pass through an activation as they are written."""

# pyright: basic, reportCallIssue=false

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import activation
from weft.kernels.triton.activations import KINDS, activate
from weft.kernels.triton.dot import dot
from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.tuning.launches import launch_parameters

HALF = (torch.bfloat16, torch.float16)  # what matrix units multiply at full rate


@triton.jit
def _multiply(
    x, weight, bias, y, hidden, rows, channels, features, in_stride, out_stride,
    KIND: tl.constexpr, KEEP: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x is (rows, channels), weight (features, channels) with these strides, y and hidden (rows, features)."""
    blocks_n = tl.cdiv(features, BLOCK_N)  # neighbours in the grid read the same rows
    row = (tl.program_id(0) // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    # What lies outside reads inside, and is not written: no masks in the loop.
    tokens = x + (row % rows).to(tl.int64)[:, None] * channels + channel[None, :]
    taps = weight + (feature % features)[None, :] * out_stride + channel[:, None] * in_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, channels, BLOCK_K):
        if EVEN:
            a, b = tl.load(tokens), tl.load(taps)
        else:
            exists = first + channel < channels
            a, b = tl.load(tokens, mask=exists[None, :], other=0.0), tl.load(taps, mask=exists[:, None], other=0.0)
        total = dot(a, b, total)
        tokens += BLOCK_K
        taps += BLOCK_K * in_stride
    total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * features + feature[None, :]
    inside = (row < rows)[:, None] & (feature < features)[None, :]
    if KEEP:
        total = total.to(y.dtype.element_ty)  # the activation of what is kept, so that its gradient is the reference's
        tl.store(hidden + at, total, mask=inside)
    tl.store(y + at, activate(total.to(tl.float32), KIND), mask=inside)


def forward(x: Tensor, weight: Tensor, bias: Tensor, act: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    rows = x.numel() // x.shape[-1]
    if x.dtype in HALF and rows:
        return _kernel(x.contiguous(), weight, bias, rows, act, keep, launch_parameters("linear_act"))
    y = F.linear(x, weight, bias.to(x.dtype))
    return activation.forward(y, act), y if keep else None


def _kernel(
    x: Tensor, weight: Tensor, bias: Tensor, rows: int, act: str, keep: bool, tile: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    features, channels = weight.shape
    y = x.new_empty((*x.shape[:-1], features))
    hidden = torch.empty_like(y) if keep else None
    m, n, k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    launch(
        _multiply, (cdiv(rows, m) * cdiv(features, n),),
        x, weight, bias, y, hidden, rows, channels, features, weight.stride(1), weight.stride(0),
        KINDS[act], keep, channels % k == 0, m, n, k, num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    return y, hidden
