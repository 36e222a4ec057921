# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Three depth-wise convolutions of one map, which is read once: queries at stride 1, keys and values at stride STRIDE.

Tiles are those of depthwise.py: ROWS x COLS keys and values, and the STRIDE times as many queries in each direction
that lie at them. Results are tokens (B, CLS + H*W, C), where token 0, if CLS, is the class token.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.depthwise import (
    SIZES,
    add_row,
    add_shares,
    correlate,
    input_grad,
    load_filter,
    load_row,
    store_sums,
    tile,
    tiles,
    weight_grad,
    with_contiguous_pictures,
    zeros,
)
from weft.kernels.triton.launch import cdiv, launch


@triton.jit
def store_row(
    y, window, taps, offset, row, col, H, W, channel, C: tl.constexpr, K: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, STEP: tl.constexpr, COLS: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """COLS outputs from column `col` on of a row of an (H, W, C) picture; they lie STEP columns of the window apart."""
    at = (row * W + col).to(tl.int64) * C + channel
    for c in tl.static_range(COLS):
        limit = C if EVEN else tl.where((row < H) & (col + c < W), C, 0)
        value = correlate(window, taps, offset, TOP, LEFT + c * STEP, N, K)
        tl.store(y + at + c * C, value, mask=channel < limit)


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, cls, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v, scale_q, scale_k, scale_v, shift_q, shift_k, shift_v,
    q, k, v, H, W, out_H, out_W, x_batch, cls_batch,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    channel, col, first, picture = tile(tl.program_id(0), out_H, out_W, C, ROWS, COLS, BLOCK_C)
    x += picture * x_batch
    CLS: tl.constexpr = cls is not None
    q += picture * (H * W + CLS) * C
    k += picture * (out_H * out_W + CLS) * C
    v += picture * (out_H * out_W + CLS) * C
    if CLS:
        if first + col == 0:
            token = tl.load(cls + picture * cls_batch + channel, mask=channel < C)
            tl.store(q + channel, token, mask=channel < C)
            tl.store(k + channel, token, mask=channel < C)
            tl.store(v + channel, token, mask=channel < C)
        q += C
        k += C
        v += C
    taps_q, offset_q = load_filter(weight_q, bias_q, scale_q, shift_q, channel, C, K)
    taps_k, offset_k = load_filter(weight_k, bias_k, scale_k, shift_k, channel, C, K)
    taps_v, offset_v = load_filter(weight_v, bias_v, scale_v, shift_v, channel, C, K)

    PAD: tl.constexpr = K // 2
    BEFORE: tl.constexpr = 0 if WIDE else PAD  # columns in front of the tile
    COLS_Q: tl.constexpr = COLS * STRIDE
    N: tl.constexpr = COLS_Q if WIDE else COLS_Q + K - 1
    LAST: tl.constexpr = BEFORE + COLS_Q if EVEN else 0
    LEFT: tl.constexpr = BEFORE - PAD
    left = col * STRIDE - BEFORE
    window = ()
    for i in tl.static_range(K - 1):
        window = window + (load_row(x, first * STRIDE - PAD + i, left, H, W, channel, C, N, BEFORE, LAST),)
    for start in range(0, ROWS, UNROLL):
        for step in tl.static_range(UNROLL):
            row = first + start + step
            for i in tl.static_range(K - 1, K - 1 + STRIDE):
                window = window + (load_row(x, row * STRIDE - PAD + i, left, H, W, channel, C, N, BEFORE, LAST),)
            for top in tl.static_range(STRIDE):
                store_row(
                    q, window, taps_q, offset_q, row * STRIDE + top, col * STRIDE, H, W, channel, C, K,
                    top, LEFT, 1, COLS_Q, N, EVEN,
                )  # fmt: skip
            store_row(
                k, window, taps_k, offset_k, row, col, out_H, out_W, channel, C, K, 0, LEFT, STRIDE, COLS, N, EVEN
            )
            store_row(
                v, window, taps_v, offset_v, row, col, out_H, out_W, channel, C, K, 0, LEFT, STRIDE, COLS, N, EVEN
            )
            window = window[STRIDE:]


@triton.jit(do_not_specialize=SIZES)
def _backward(
    grad_q, grad_k, grad_v, x, weight_q, weight_k, weight_v, grad_x, grad_cls, partials,
    H, W, out_H, out_W, q_batch, k_batch, v_batch, x_batch,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The gradients of x and the class token, and the program's share of the filters': (programs, 3, K*K + BIAS, C)."""
    channel, col, first, picture = tile(tl.program_id(0), out_H, out_W, C, ROWS, COLS, BLOCK_C)
    grad_q += picture * q_batch
    grad_k += picture * k_batch
    grad_v += picture * v_batch
    x += picture * x_batch
    grad_x += picture * H * W * C
    if grad_cls is not None:
        if first + col == 0:
            total = tl.load(grad_q + channel, mask=channel < C).to(tl.float32)
            total += tl.load(grad_k + channel, mask=channel < C).to(tl.float32)
            total += tl.load(grad_v + channel, mask=channel < C).to(tl.float32)
            tl.store(grad_cls + picture * C + channel, total, mask=channel < C)
        grad_q += C
        grad_k += C
        grad_v += C
    taps_q, none = load_filter(weight_q, None, None, None, channel, C, K)
    taps_k, none = load_filter(weight_k, None, None, None, channel, C, K)
    taps_v, none = load_filter(weight_v, None, None, None, channel, C, K)
    sums_q, sums_k, sums_v = zeros(channel, K * K), zeros(channel, K * K), zeros(channel, K * K)
    bias_q, bias_k, bias_v = zeros(channel, 3)

    COLS_Q: tl.constexpr = COLS * STRIDE
    PAD: tl.constexpr = K // 2  # rows around the tile, of the queries' gradient
    BEFORE_Q: tl.constexpr = 0 if WIDE else PAD  # columns in front of it
    NQ: tl.constexpr = COLS_Q if WIDE else COLS_Q + K - 1
    LAST_Q: tl.constexpr = BEFORE_Q + COLS_Q if EVEN else 0
    ABOVE: tl.constexpr = K // 2 // STRIDE  # the same of the keys' and values'
    BELOW: tl.constexpr = (K // 2 + STRIDE - 1) // STRIDE
    BEFORE: tl.constexpr = 0 if WIDE else ABOVE
    N: tl.constexpr = COLS if WIDE else ABOVE + COLS + BELOW
    LAST: tl.constexpr = BEFORE + COLS if EVEN else 0
    LAST_X: tl.constexpr = COLS_Q if EVEN else 0
    left_q = col * STRIDE - BEFORE_Q
    left = col - BEFORE
    window_q, window_k, window_v = (), (), ()
    for i in tl.static_range(K - 1):
        above = load_row(grad_q, first * STRIDE - PAD + i, left_q, H, W, channel, C, NQ, BEFORE_Q, LAST_Q)
        window_q = window_q + (above,)
    for i in tl.static_range(ABOVE + BELOW):
        window_k = window_k + (load_row(grad_k, first - ABOVE + i, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
        window_v = window_v + (load_row(grad_v, first - ABOVE + i, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
    for start in range(0, ROWS, UNROLL):
        for step in tl.static_range(UNROLL):
            row = first + start + step
            for i in tl.static_range(K - 1, K - 1 + STRIDE):
                below = load_row(grad_q, row * STRIDE - PAD + i, left_q, H, W, channel, C, NQ, BEFORE_Q, LAST_Q)
                window_q = window_q + (below,)
            window_k = window_k + (load_row(grad_k, row + BELOW, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
            window_v = window_v + (load_row(grad_v, row + BELOW, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
            for top in tl.static_range(STRIDE):
                row_x = row * STRIDE + top
                values = load_row(x, row_x, col * STRIDE, H, W, channel, C, COLS_Q, 0, LAST_X)
                at = (row_x * W + col * STRIDE).to(tl.int64) * C + channel
                for c in tl.static_range(COLS_Q):
                    total = input_grad(none, window_q, taps_q, top, c, BEFORE_Q, NQ, K, 1)
                    total = input_grad(total, window_k, taps_k, top, c, BEFORE, N, K, STRIDE)
                    total = input_grad(total, window_v, taps_v, top, c, BEFORE, N, K, STRIDE)
                    limit = C if EVEN else tl.where((row_x < H) & (col * STRIDE + c < W), C, 0)
                    tl.store(grad_x + at + c * C, total, mask=channel < limit)
                    sums_q = weight_grad(sums_q, values[c], window_q, top, c, BEFORE_Q, NQ, K, 1)
                    sums_k = weight_grad(sums_k, values[c], window_k, top, c, BEFORE, N, K, STRIDE)
                    sums_v = weight_grad(sums_v, values[c], window_v, top, c, BEFORE, N, K, STRIDE)
                if BIAS:
                    bias_q = add_row(bias_q, window_q[PAD + top], BEFORE_Q, COLS_Q)
            if BIAS:
                bias_k = add_row(bias_k, window_k[ABOVE], BEFORE, COLS)
                bias_v = add_row(bias_v, window_v[ABOVE], BEFORE, COLS)
            window_q = window_q[STRIDE:]
            window_k = window_k[1:]
            window_v = window_v[1:]

    if BIAS:
        sums_q, sums_k, sums_v = sums_q + (bias_q,), sums_k + (bias_k,), sums_v + (bias_v,)
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    TAPS: tl.constexpr = K * K + BIAS
    partials += (tl.program_id(0) // blocks).to(tl.int64) * (3 * TAPS * C)
    store_sums(partials, sums_q, channel, C, TAPS)
    store_sums(partials + TAPS * C, sums_k, channel, C, TAPS)
    store_sums(partials + 2 * TAPS * C, sums_v, channel, C, TAPS)


def with_contiguous_tokens(x: Tensor) -> Tensor:
    """(B, N, C) tokens; a picture's lie behind each other, wherever they begin."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def forward(x: Tensor, cls: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The rest are three weights, biases, scales and shifts, and the stride."""
    weights, affine, stride = rest[:3], rest[3:-1], rest[-1]
    batch, height, width, channels = x.shape
    kernel, x = weights[0].shape[-1], with_contiguous_pictures(x)
    rows, cols = cdiv(height, stride), cdiv(width, stride)
    first = 0 if cls is None else 1
    q = torch.empty(batch, first + height * width, channels, dtype=x.dtype, device=x.device)
    k = torch.empty(batch, first + rows * cols, channels, dtype=x.dtype, device=x.device)
    v = torch.empty_like(k)
    cut, count, blocks, warps = tiles("qkv_depthwise", x, kernel, stride)
    if q.numel():
        launch(
            _forward, (count * blocks,), x, cls, *weights, *affine, q, k, v, height, width, rows, cols, x.stride(0),
            0 if cls is None else cls.stride(0), channels, kernel, stride, *cut, num_warps=warps,
        )  # fmt: skip
    return q, k, v


def backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor,
    bias: Tensor | None, has_cls: bool, stride: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of x, of the class token, and of weights and biases stacked; None where there are none."""
    batch, height, width, channels = x.shape
    kernel, x = wq.shape[-1], with_contiguous_pictures(x)
    rows, cols = cdiv(height, stride), cdiv(width, stride)
    grad_q, grad_k, grad_v = (with_contiguous_tokens(grad) for grad in (grad_q, grad_k, grad_v))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_cls = x.new_empty(batch, 1, channels) if has_cls else None
    cut, shares, blocks, warps = tiles("qkv_depthwise_backward", x, kernel, stride)
    has_bias = bias is not None
    partials = x.new_empty(shares, 3, kernel * kernel + has_bias, channels, dtype=torch.float32)
    if x.numel():
        launch(
            _backward, (shares * blocks,), grad_q, grad_k, grad_v, x, wq, wk, wv, grad_x, grad_cls, partials,
            height, width, rows, cols, grad_q.stride(0), grad_k.stride(0), grad_v.stride(0), x.stride(0),
            channels, kernel, stride, has_bias, *cut, num_warps=warps,
        )  # fmt: skip
    grad_weight = wq.new_empty(3, *wq.shape)
    grad_bias = None if bias is None else bias.new_empty(3, channels)
    add_shares(partials, grad_weight, grad_bias)
    return grad_x, grad_cls, grad_weight, grad_bias
