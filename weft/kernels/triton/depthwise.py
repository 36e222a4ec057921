# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Depth-wise convolution: every value of the map is read, converted and activated once, and used K * K times.

A program makes a tile of ROWS x COLS outputs of BLOCK_C channels. Channels lie along the lanes; columns are written
out, each a tensor of its own, so that neighbours are other registers; the program slides down the rows and keeps the
last K of them, as a tuple of tuples of (BLOCK_C,) tensors, the `window`. Where a tile is as WIDE as the map, nothing is
on either side of it; otherwise the window has the neighbours' columns as well. UNROLL rows are written out, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.activations import KINDS, activate
from weft.kernels.triton.launch import cdiv, launch
from weft.kernels.tuning.launches import launch_parameters

SIZES = ["H", "W", "out_H", "out_W"]  # these differ from picture to picture and are not worth a kernel each


@triton.jit
def tile(pid, rows, cols, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of a program: its channels, its first column and row, and its picture. Neighbours share rows of the map."""
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    across, down = tl.cdiv(cols, COLS), tl.cdiv(rows, ROWS)
    channel = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    pid = pid // blocks
    col = pid % across * COLS
    pid = pid // across
    return channel, col, pid % down * ROWS, (pid // down).to(tl.int64)


@triton.jit
def load_channels(values, channel, C: tl.constexpr, default: tl.constexpr):
    if values is None:
        return tl.full(channel.shape, default, tl.float32)
    else:
        return tl.load(values + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit
def load_filter(weight, bias, scale, shift, channel, C: tl.constexpr, K: tl.constexpr):
    """The K * K taps of each channel and what is added to their sum, with scale and shift worked in."""
    factor = load_channels(scale, channel, C, 1.0)
    offset = load_channels(bias, channel, C, 0.0) * factor + load_channels(shift, channel, C, 0.0)
    taps = ()
    for t in tl.static_range(K * K):
        tap = tl.load(weight + channel * (K * K) + t, mask=channel < C, other=0.0)
        taps = taps + (tap.to(tl.float32) * factor,)
    return taps, offset


@triton.jit
def load_norm(moments, gamma, beta, eps, channel, C: tl.constexpr):
    """A BatchNorm of each channel: what is taken off, what the rest is multiplied by, what is added then."""
    if moments is None:
        nothing = tl.zeros(channel.shape, tl.float32)
        return nothing, nothing, nothing
    else:
        rstd = tl.rsqrt(load_channels(moments + C, channel, C, 0.0) + eps)
        centre, shift = load_channels(moments, channel, C, 0.0), load_channels(beta, channel, C, 0.0)
        return centre, rstd * load_channels(gamma, channel, C, 0.0), shift


@triton.jit
def channels_at(
    row, col, H, W, C: tl.constexpr, c: tl.constexpr, BEFORE: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """How many channels there are in column col + c of a row: C, and outside of the picture none."""
    here = tl.where((row >= 0) & (row < H), C, 0)
    if c < BEFORE:
        here = tl.where(col + c >= 0, here, 0)
    if c >= LAST:
        here = tl.where(col + c < W, here, 0)
    return here


@triton.jit
def load_row(x, row, col, H, W, channel, C: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr, LAST: tl.constexpr):
    """Columns col .. col + N - 1 of a row of an (H, W, C) picture, zeros outside of it.

    The first BEFORE columns may lie left of the picture, those from LAST on right of it.
    """
    at = (row * W + col).to(tl.int64) * C + channel
    values = ()
    for c in tl.static_range(N):
        inside = channel < channels_at(row, col, H, W, C, c, BEFORE, LAST)
        values = values + (tl.load(x + at + c * C, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def load_active(
    x, norm, row, col, H, W, channel, C: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr, LAST: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """`load_row` with a norm, rounded as if it had been stored, and an activation; what lies outside stays zero."""
    values = load_row(x, row, col, H, W, channel, C, N, BEFORE, LAST)
    active = ()
    for c in tl.static_range(N):
        value = values[c]
        if NORM:
            value = activate((value - norm[0]) * norm[1] + norm[2], ACT).to(x.dtype.element_ty).to(tl.float32)
            value = tl.where(channel < channels_at(row, col, H, W, C, c, BEFORE, LAST), value, 0.0)
        else:
            value = activate(value, ACT)
        active = active + (value,)
    return active


@triton.jit
def correlate(window, taps, offset, TOP: tl.constexpr, LEFT: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The sum of taps over the K x K values at (TOP, LEFT) of a window of N columns; what lies beside it is zero."""
    total = offset
    for t in tl.static_range(K * K):
        if LEFT + t % K >= 0 and LEFT + t % K < N:
            total = tl.fma(window[TOP + t // K][LEFT + t % K], taps[t], total)
    return total


# Input p and tap i belong to output (p + K // 2 - i) / STRIDE, where that is whole: i and j below. The window of
# gradients begins (K // 2) // STRIDE rows and BEFORE columns in front of the tile, and has N columns.


@triton.jit
def input_grad(
    total, window, taps, TOP: tl.constexpr, LEFT: tl.constexpr,
    BEFORE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Adds what the input at (TOP, LEFT) of the tile gets back from every output that it went into."""
    for i in tl.static_range(TOP + K // 2, TOP - K // 2 - 1, -1):
        for j in tl.static_range(LEFT + K // 2, LEFT - K // 2 - 1, -1):
            if i % STRIDE == 0 and j % STRIDE == 0 and j // STRIDE + BEFORE >= 0 and j // STRIDE + BEFORE < N:
                grad = window[i // STRIDE + K // 2 // STRIDE][j // STRIDE + BEFORE]
                total = tl.fma(grad, taps[(TOP + K // 2 - i) * K + LEFT + K // 2 - j], total)
    return total


@triton.jit
def weight_grad(
    sums, value, window, TOP: tl.constexpr, LEFT: tl.constexpr,
    BEFORE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Adds to the sum of every tap the input `value` at (TOP, LEFT) times the gradient of the output they go into."""
    added = ()
    for i in tl.static_range(TOP + K // 2, TOP - K // 2 - 1, -1):
        for j in tl.static_range(LEFT + K // 2, LEFT - K // 2 - 1, -1):
            total = sums[(TOP + K // 2 - i) * K + LEFT + K // 2 - j]
            if i % STRIDE == 0 and j % STRIDE == 0 and j // STRIDE + BEFORE >= 0 and j // STRIDE + BEFORE < N:
                total = tl.fma(window[i // STRIDE + K // 2 // STRIDE][j // STRIDE + BEFORE], value, total)
            added = added + (total,)
    return added


@triton.jit
def zeros(like, N: tl.constexpr):
    """N sums at zero."""
    sums = ()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros(like.shape, tl.float32),)
    return sums


@triton.jit
def add_row(total, values, FIRST: tl.constexpr, N: tl.constexpr):
    for c in tl.static_range(N):
        total += values[FIRST + c]
    return total


@triton.jit
def store_sums(partials, sums, channel, C: tl.constexpr, N: tl.constexpr):
    for t in tl.static_range(N):
        tl.store(partials + t * C + channel, sums[t], mask=channel < C)


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, moments, gamma, beta, eps, weight, bias, scale, shift, y, H, W, out_H, out_W, x_batch,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, ACT_IN: tl.constexpr,
    ACT: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    channel, col, first, picture = tile(tl.program_id(0), out_H, out_W, C, ROWS, COLS, BLOCK_C)
    x += picture * x_batch
    y += picture * out_H * out_W * C
    taps, offset = load_filter(weight, bias, scale, shift, channel, C, K)
    norm = load_norm(moments, gamma, beta, eps, channel, C)

    PAD: tl.constexpr = K // 2
    BEFORE: tl.constexpr = 0 if WIDE else PAD  # columns in front of the tile
    N: tl.constexpr = COLS * STRIDE if WIDE else (COLS - 1) * STRIDE + K
    LAST: tl.constexpr = BEFORE + COLS * STRIDE if EVEN else 0  # the first that may not be in the picture
    left = col * STRIDE - BEFORE
    window = ()
    for i in tl.static_range(K - STRIDE):
        above = first * STRIDE - PAD + i
        window = window + (load_active(x, norm, above, left, H, W, channel, C, N, BEFORE, LAST, NORM, ACT_IN),)
    for start in range(0, ROWS, UNROLL):
        for step in tl.static_range(UNROLL):
            row = first + start + step
            for i in tl.static_range(K - STRIDE, K):
                below = row * STRIDE - PAD + i
                window = window + (load_active(x, norm, below, left, H, W, channel, C, N, BEFORE, LAST, NORM, ACT_IN),)
            out = y + (row * out_W + col).to(tl.int64) * C + channel
            for c in tl.static_range(COLS):
                value = activate(correlate(window, taps, offset, 0, c * STRIDE - PAD + BEFORE, N, K), ACT)
                limit = C if EVEN else tl.where((row < out_H) & (col + c < out_W), C, 0)
                tl.store(out + c * C, value, mask=channel < limit)
            window = window[STRIDE:]


@triton.jit(do_not_specialize=SIZES)
def _backward(
    grad, x, moments, gamma, beta, eps, weight, grad_x, partials, H, W, out_H, out_W, grad_batch, x_batch,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, ACT_IN: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and the program's share of those of weight and bias: (programs, K * K + BIAS, C).

    Behind a norm or an activation that of x is the gradient of what these give, which is made again from x.
    A tile is ROWS x COLS outputs and the STRIDE times as many inputs in each direction that lie at them.
    """
    channel, col, first, picture = tile(tl.program_id(0), out_H, out_W, C, ROWS, COLS, BLOCK_C)
    grad += picture * grad_batch
    x += picture * x_batch
    grad_x += picture * H * W * C
    taps, none = load_filter(weight, None, None, None, channel, C, K)
    norm = load_norm(moments, gamma, beta, eps, channel, C)

    ABOVE: tl.constexpr = K // 2 // STRIDE  # rows of the gradient around the tile
    BELOW: tl.constexpr = (K // 2 + STRIDE - 1) // STRIDE
    BEFORE: tl.constexpr = 0 if WIDE else ABOVE  # columns in front of it
    N: tl.constexpr = COLS if WIDE else ABOVE + COLS + BELOW
    LAST: tl.constexpr = BEFORE + COLS if EVEN else 0
    COLS_X: tl.constexpr = COLS * STRIDE
    LAST_X: tl.constexpr = COLS_X if EVEN else 0
    sums = zeros(channel, K * K)
    bias_sum = tl.zeros(channel.shape, tl.float32)
    window = ()
    for i in tl.static_range(ABOVE + BELOW):
        window = window + (load_row(grad, first - ABOVE + i, col - BEFORE, out_H, out_W, channel, C, N, BEFORE, LAST),)
    for start in range(0, ROWS, UNROLL):
        for step in tl.static_range(UNROLL):
            row = first + start + step
            window = window + (load_row(grad, row + BELOW, col - BEFORE, out_H, out_W, channel, C, N, BEFORE, LAST),)
            for top in tl.static_range(STRIDE):
                row_x = row * STRIDE + top
                left = col * STRIDE
                values = load_active(x, norm, row_x, left, H, W, channel, C, COLS_X, 0, LAST_X, NORM, ACT_IN)
                at = (row_x * W + col * STRIDE).to(tl.int64) * C + channel
                for c in tl.static_range(COLS_X):
                    value = input_grad(none, window, taps, top, c, BEFORE, N, K, STRIDE)
                    limit = C if EVEN else tl.where((row_x < H) & (col * STRIDE + c < W), C, 0)
                    tl.store(grad_x + at + c * C, value, mask=channel < limit)
                    sums = weight_grad(sums, values[c], window, top, c, BEFORE, N, K, STRIDE)
            if BIAS:
                bias_sum = add_row(bias_sum, window[ABOVE], BEFORE, COLS)
            window = window[1:]

    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    partials += (tl.program_id(0) // blocks).to(tl.int64) * ((K * K + BIAS) * C)
    store_sums(partials, sums, channel, C, K * K)
    if BIAS:
        tl.store(partials + K * K * C + channel, bias_sum, mask=channel < C)


@triton.jit(do_not_specialize=["shares"])
def _add_shares(
    partials, grad_weight, grad_bias, shares,
    C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums (shares, filters, TAPS + BIAS, C) over the shares into (filters, C, TAPS) and (filters, C)."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t, filter, filters = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in range(0, shares, BLOCK_S):
        share = start + tl.arange(0, BLOCK_S)
        at = ((share * filters + filter) * (TAPS + BIAS) + t).to(tl.int64) * C
        mask = (share < shares)[:, None] & (channel < C)[None, :]
        total += tl.load(partials + at[:, None] + channel[None, :], mask=mask, other=0.0)
    total = tl.sum(total, 0)
    if t < TAPS:
        tl.store(grad_weight + (filter * C + channel) * TAPS + t, total, mask=channel < C)
    if BIAS and t == TAPS:
        tl.store(grad_bias + filter * C + channel, total, mask=channel < C)


def with_contiguous_pictures(x: Tensor) -> Tensor:
    """`x` itself if the kernels can read it where it is: every picture in one piece, wherever it begins."""
    _, _, width, channels = x.shape
    return x if x.stride()[1:] == (width * channels, channels, 1) else x.contiguous()


def add_shares(partials: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> None:
    """(shares, filters, K*K [+ 1], C) sums into gradients ([filters,] C, 1, K, K) and, with a bias, ([filters,] C)."""
    shares, filters, rows, channels = partials.shape
    biased = grad_bias is not None
    launch(
        _add_shares, (cdiv(channels, 32), rows, filters), partials, grad_weight, grad_bias, shares,
        channels, rows - biased, biased, 32, 32, num_warps=4,
    )  # fmt: skip


Tiles = tuple[bool, bool, int, int, int, int]  # EVEN, WIDE, ROWS, COLS, BLOCK_C, UNROLL
Norm = tuple[Tensor | None, Tensor | None, Tensor | None, float]
NO_NORM: Norm = (None, None, None, 0.0)


def tiles(operation: str, x: Tensor, kernel: int, stride: int, active: bool = False) -> tuple[Tiles, int, int, int]:
    """How to cut the outputs of a map x (B, H, W, C): tiles, how many there are, blocks of channels, warps."""
    batch, height, width, channels = x.shape
    rows, cols = cdiv(height, stride), cdiv(width, stride)
    at = launch_parameters(operation, kernel=kernel, stride=stride, active=active)
    tile_rows = min(at["rows"], rows)
    even = rows * stride == height and cols * stride == width and rows % tile_rows == 0 and cols % at["cols"] == 0
    unroll = at["unroll"] if tile_rows % at["unroll"] == 0 else 1
    count = batch * cdiv(rows, tile_rows) * cdiv(cols, at["cols"])
    cut = (even, even and cols == at["cols"], tile_rows, at["cols"], at["block_c"], unroll)
    return cut, count, cdiv(channels, at["block_c"]), at["num_warps"]


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    stride: int, act_in: str, act: str, norm: Norm = NO_NORM,
) -> Tensor:  # fmt: skip
    """`norm`, in front of `act_in`: a BatchNorm's (2, C) mean and variance, weight, bias and epsilon."""
    batch, height, width, channels = x.shape
    kernel, x = weight.shape[-1], with_contiguous_pictures(x)
    rows, cols = cdiv(height, stride), cdiv(width, stride)
    y = torch.empty(batch, rows, cols, channels, dtype=x.dtype, device=x.device)
    cut, count, blocks, warps = tiles("depthwise", x, kernel, stride, active=act_in != "none" or act != "none")
    if y.numel():
        launch(
            _forward, (count * blocks,), x, *norm, weight, bias, scale, shift, y, height, width, rows, cols,
            x.stride(0), channels, kernel, stride, norm[0] is not None, KINDS[act_in], KINDS[act], *cut,
            num_warps=warps,
        )  # fmt: skip
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    act_in: str = "none",
    norm: Norm = NO_NORM,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of act_in(norm(x)), weight and, where there is one, bias."""
    _, height, width, channels = x.shape
    kernel, x, grad = weight.shape[-1], with_contiguous_pictures(x), with_contiguous_pictures(grad)
    rows, cols = grad.shape[1:3]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cut, shares, blocks, warps = tiles("depthwise_backward", x, kernel, stride)
    has_bias = bias is not None
    partials = x.new_empty(shares, 1, kernel * kernel + has_bias, channels, dtype=torch.float32)
    if x.numel():
        launch(
            _backward, (shares * blocks,), grad, x, *norm, weight, grad_x, partials, height, width, rows, cols,
            grad.stride(0), x.stride(0), channels, kernel, stride, norm[0] is not None, KINDS[act_in], has_bias, *cut,
            num_warps=warps,
        )  # fmt: skip
    grad_weight, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    add_shares(partials, grad_weight, grad_bias)
    return grad_x, grad_weight, grad_bias


def norm_forward(
    x: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, eps: float, act: str,
    weight: Tensor, bias: Tensor | None, stride: int,
) -> Tensor:  # fmt: skip
    return forward(x, weight, bias, None, None, stride, act, "none", (moments, gamma, beta, eps))


def norm_backward(
    grad: Tensor, x: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, eps: float, act: str,
    weight: Tensor, bias: Tensor | None, stride: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    return backward(grad, x, weight, bias, stride, act, (moments, gamma, beta, eps))
