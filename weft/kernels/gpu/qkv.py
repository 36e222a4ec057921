# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Three depth-wise convolutions of one map, which is read once: queries at stride 1, keys and values at stride STRIDE.

Tiles are those of depthwise.py: ROWS x COLS keys and values, and the STRIDE times as many queries in each direction
that lie at them. Results are tokens (B, CLS + H*W, C), where token 0, if CLS, is the class token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.depthwise import (
    SIZES,
    add_shares,
    correlate,
    even,
    in_place,
    input_grad,
    launch,
    load_filter,
    load_row,
    programs,
    store_sums,
    tile,
    weight_grad,
    zeros,
)


@triton.jit
def store_row(
    y, window, taps, offset, row, col, H, W, channel,
    C: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """N outputs from column `col` on of a row of an (H, W, C) picture; they lie STEP columns of the window apart."""
    at = (row * W + col).to(tl.int64) * C + channel
    for c in tl.static_range(N):
        limit = C if EVEN else tl.where((row < H) & (col + c < W), C, 0)
        tl.store(y + at + c * C, correlate(window, taps, offset, TOP, c * STEP, K), mask=channel < limit)


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, cls, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v, scale_q, scale_k, scale_v, shift_q, shift_k, shift_v,
    q, k, v, H, W, out_H, out_W, x_batch, cls_batch,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr,
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
    N: tl.constexpr = COLS * STRIDE + K - 1
    LAST: tl.constexpr = PAD + COLS * STRIDE if EVEN else 0
    left = col * STRIDE - PAD
    window = ()
    for i in tl.static_range(K - 1):
        window = window + (load_row(x, first * STRIDE - PAD + i, left, H, W, channel, C, N, PAD, LAST),)
    for step in range(tl.minimum(ROWS, out_H - first)):
        row = first + step
        for i in tl.static_range(K - 1, K - 1 + STRIDE):
            window = window + (load_row(x, row * STRIDE - PAD + i, left, H, W, channel, C, N, PAD, LAST),)
        for top in tl.static_range(STRIDE):
            store_row(
                q, window, taps_q, offset_q, row * STRIDE + top, col * STRIDE, H, W, channel,
                C, K, top, 1, COLS * STRIDE, EVEN,
            )  # fmt: skip
        store_row(k, window, taps_k, offset_k, row, col, out_H, out_W, channel, C, K, 0, STRIDE, COLS, EVEN)
        store_row(v, window, taps_v, offset_v, row, col, out_H, out_W, channel, C, K, 0, STRIDE, COLS, EVEN)
        window = window[STRIDE:]


@triton.jit
def add_row(total, values, FIRST: tl.constexpr, N: tl.constexpr):
    for c in tl.static_range(N):
        total += values[FIRST + c]
    return total


@triton.jit(do_not_specialize=SIZES)
def _backward(
    grad_q, grad_k, grad_v, x, weight_q, weight_k, weight_v, grad_x, grad_cls, partials,
    H, W, out_H, out_W, q_batch, k_batch, v_batch, x_batch,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr,
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

    PAD: tl.constexpr = K // 2  # rows and columns around the tile, of the queries' gradient
    NQ: tl.constexpr = COLS * STRIDE + K - 1
    LAST_Q: tl.constexpr = PAD + COLS * STRIDE if EVEN else 0
    BEFORE: tl.constexpr = K // 2 // STRIDE  # and of the keys' and values'
    BEHIND: tl.constexpr = (K // 2 + STRIDE - 1) // STRIDE
    N: tl.constexpr = BEFORE + COLS + BEHIND
    LAST: tl.constexpr = BEFORE + COLS if EVEN else 0
    LAST_X: tl.constexpr = COLS * STRIDE if EVEN else 0
    left_q = col * STRIDE - PAD
    left = col - BEFORE
    window_q, window_k, window_v = (), (), ()
    for i in tl.static_range(K - 1):
        window_q = window_q + (load_row(grad_q, first * STRIDE - PAD + i, left_q, H, W, channel, C, NQ, PAD, LAST_Q),)
    for i in tl.static_range(BEFORE + BEHIND):
        window_k = window_k + (load_row(grad_k, first - BEFORE + i, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
        window_v = window_v + (load_row(grad_v, first - BEFORE + i, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
    for step in range(tl.minimum(ROWS, out_H - first)):
        row = first + step
        for i in tl.static_range(K - 1, K - 1 + STRIDE):
            window_q = window_q + (load_row(grad_q, row * STRIDE - PAD + i, left_q, H, W, channel, C, NQ, PAD, LAST_Q),)
        window_k = window_k + (load_row(grad_k, row + BEHIND, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
        window_v = window_v + (load_row(grad_v, row + BEHIND, left, out_H, out_W, channel, C, N, BEFORE, LAST),)
        for top in tl.static_range(STRIDE):
            at = ((row * STRIDE + top) * W + col * STRIDE).to(tl.int64) * C + channel
            values = load_row(x, row * STRIDE + top, col * STRIDE, H, W, channel, C, COLS * STRIDE, 0, LAST_X)
            for c in tl.static_range(COLS * STRIDE):
                total = input_grad(none, window_q, taps_q, top, c, K, 1)
                total = input_grad(total, window_k, taps_k, top, c, K, STRIDE)
                total = input_grad(total, window_v, taps_v, top, c, K, STRIDE)
                limit = C if EVEN else tl.where((row * STRIDE + top < H) & (col * STRIDE + c < W), C, 0)
                tl.store(grad_x + at + c * C, total, mask=channel < limit)
                sums_q = weight_grad(sums_q, values[c], window_q, top, c, K, 1)
                sums_k = weight_grad(sums_k, values[c], window_k, top, c, K, STRIDE)
                sums_v = weight_grad(sums_v, values[c], window_v, top, c, K, STRIDE)
            if BIAS:
                bias_q = add_row(bias_q, window_q[PAD + top], PAD, COLS * STRIDE)
        if BIAS:
            bias_k = add_row(bias_k, window_k[BEFORE], BEFORE, COLS)
            bias_v = add_row(bias_v, window_v[BEFORE], BEFORE, COLS)
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


def tokens_in_place(x: Tensor) -> Tensor:
    """(B, N, C) tokens; a picture's lie behind each other, wherever they begin."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def forward(
    x: Tensor, cls: Tensor | None, weights: list[Tensor], affine: list[Tensor | None], stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`affine`: three biases, three scales, three shifts."""
    batch, height, width, channels = x.shape
    kernel, x = weights[0].shape[-1], in_place(x)
    rows, cols = -(-height // stride), -(-width // stride)
    first = 0 if cls is None else 1
    q = torch.empty(batch, first + height * width, channels, dtype=x.dtype, device=x.device)
    k = torch.empty(batch, first + rows * cols, channels, dtype=x.dtype, device=x.device)
    v = torch.empty_like(k)
    at = launch("qkv_depthwise", x, kernel, stride)
    blocks = triton.cdiv(channels, at["block_c"])
    if q.numel():
        _forward[(blocks * programs(batch, rows, cols, at),)](
            x, cls, *weights, *affine, q, k, v, height, width, rows, cols, x.stride(0),
            0 if cls is None else cls.stride(0), channels, kernel, stride,
            even(x, rows, cols, stride, at), at["rows"], at["cols"], at["block_c"],
            num_warps=at["num_warps"],
        )  # fmt: skip
    return q, k, v


def backward(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], bias: Tensor | None, has_cls: bool, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the class token (empty where there is none), and of weights and biases, stacked."""
    batch, height, width, channels = x.shape
    kernel, x = weights[0].shape[-1], in_place(x)
    rows, cols = -(-height // stride), -(-width // stride)
    grad_q, grad_k, grad_v = (tokens_in_place(grad) for grad in grads)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_cls = x.new_empty(batch, 1, channels) if has_cls else None
    at = launch("qkv_depthwise_backward", x, kernel, stride)
    blocks, shares = triton.cdiv(channels, at["block_c"]), programs(batch, rows, cols, at)
    has_bias = bias is not None
    partials = x.new_empty(shares, 3, kernel * kernel + has_bias, channels, dtype=torch.float32)
    if x.numel():
        _backward[(blocks * shares,)](
            grad_q, grad_k, grad_v, x, *weights, grad_x, grad_cls, partials, height, width, rows, cols,
            grad_q.stride(0), grad_k.stride(0), grad_v.stride(0), x.stride(0), channels, kernel, stride, has_bias,
            even(x, rows, cols, stride, at), at["rows"], at["cols"], at["block_c"],
            num_warps=at["num_warps"],
        )  # fmt: skip
    return grad_x, x.new_empty(0) if grad_cls is None else grad_cls, *add_shares(partials, weights[0], bias)
