# pyright: reportArgumentType=false, reportCallIssue=false
"""Attention between many pixels and few tokens. The tokens of one head fit in registers; pixels come in tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.switch import interpreted
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters

LOG2_E = tl.constexpr(1.4426950408889634)  # powers of two are what the GPU computes
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _product(a, b, TYPE: tl.constexpr):
    return tl.dot(a.to(TYPE), b.to(TYPE), input_precision="ieee")


@triton.jit
def _tile(base, row, rows, stride, column):
    """(rows, columns) of a matrix, zeros below its last row."""
    return tl.load(base + row[:, None] * stride + column[None, :], mask=(row < rows)[:, None], other=0.0)


@triton.jit
def _pixels_to_tokens(
    q, x, out, total, heads, pixels, tokens, q_batch, q_head, q_token, scale,
    D: tl.constexpr, L: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over the pixels as they come: what was summed before shrinks when a larger score appears."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    token, column = tl.arange(0, L), tl.arange(0, D)
    query = _tile(q + batch * q_batch + head * q_head, token, tokens, q_token, column)
    x += batch * pixels * heads * D + head * D
    most = tl.full((L,), -1.0e30, tl.float32)
    weight = tl.zeros((L,), tl.float32)
    mean = tl.zeros((L, D), tl.float32)
    for first in range(0, pixels, BLOCK):
        pixel = first + tl.arange(0, BLOCK)
        values = _tile(x, pixel, pixels, heads * D, column)
        scores = _product(query, tl.trans(values), TYPE) * (scale * LOG2_E)
        scores = tl.where((pixel < pixels)[None, :], scores, -1.0e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        share = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        weight = weight * shrink + tl.sum(share, 1)
        mean = mean * shrink[:, None] + _product(share, values, TYPE)
        most = higher
    inside = token < tokens
    out += (batch * tokens * heads + head) * D
    tl.store(out + token[:, None] * heads * D + column[None, :], mean / weight[:, None], mask=inside[:, None])
    tl.store(total + tl.program_id(0).to(tl.int64) * tokens + token, most / LOG2_E + tl.log(weight), mask=inside)


@triton.jit
def _pixels_to_tokens_backward(
    grad, q, x, out, total, grad_q, grad_x, heads, pixels, tokens, q_batch, q_head, q_token, scale,
    D: tl.constexpr, L: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    token, column = tl.arange(0, L), tl.arange(0, D)
    query = _tile(q + batch * q_batch + head * q_head, token, tokens, q_token, column)
    here = (batch * tokens * heads + head) * D
    upstream = _tile(grad + here, token, tokens, heads * D, column)
    mean = _tile(out + here, token, tokens, heads * D, column)
    shared = tl.sum(upstream.to(tl.float32) * mean.to(tl.float32), 1)  # what the softmax takes off every score
    at = tl.program_id(0).to(tl.int64) * tokens + token
    logarithm = tl.load(total + at, mask=token < tokens, other=0.0).to(tl.float32) * LOG2_E
    x += batch * pixels * heads * D + head * D
    grad_x += batch * pixels * heads * D + head * D
    query_grad = tl.zeros((L, D), tl.float32)
    for first in range(0, pixels, BLOCK):
        pixel = first + tl.arange(0, BLOCK)
        values = _tile(x, pixel, pixels, heads * D, column)
        scores = _product(query, tl.trans(values), TYPE) * (scale * LOG2_E)
        share = tl.exp2(scores - logarithm[:, None])
        score_grad = share * (_product(upstream, tl.trans(values), TYPE) - shared[:, None]) * scale
        known = (token < tokens)[:, None] & (pixel < pixels)[None, :]
        share, score_grad = tl.where(known, share, 0.0), tl.where(known, score_grad, 0.0)
        query_grad += _product(score_grad, values, TYPE)
        pixel_grad = _product(tl.trans(share), upstream, TYPE) + _product(tl.trans(score_grad), query, TYPE)
        mask = (pixel < pixels)[:, None]
        tl.store(grad_x + pixel[:, None] * heads * D + column[None, :], pixel_grad, mask=mask)
    tl.store(grad_q + at[:, None] * D + column[None, :], query_grad, mask=(token < tokens)[:, None])


@triton.jit
def _softmax_over_tokens(values, keys, shift, known, scale, TYPE: tl.constexpr):
    """Softmax over the tokens, (pixels, tokens)."""
    scores = (_product(values, tl.trans(keys), TYPE) + shift[None, :]) * (scale * LOG2_E)
    scores = tl.where(known[None, :], scores, -1.0e30)
    share = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return share / tl.sum(share, 1)[:, None]


@triton.jit
def _load_tokens(
    k, bias, v, batch, head, tokens, k_batch, k_head, k_token, bias_batch, bias_head, bias_token,
    v_batch, v_head, v_token, D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Keys, values and biases of all tokens of one head of a picture: (L, D), (L, E), (L,)."""
    token = tl.arange(0, L)
    keys = _tile(k + batch * k_batch + head * k_head, token, tokens, k_token, tl.arange(0, D))
    entries = _tile(v + batch * v_batch + head * v_head, token, tokens, v_token, tl.arange(0, E))
    shift = tl.zeros((L,), tl.float32)
    if HAS_BIAS:
        shift = bias + batch * bias_batch + head * bias_head + token * bias_token
        shift = tl.load(shift, mask=token < tokens, other=0.0).to(tl.float32)
    return keys, entries, shift


@triton.jit
def _tokens_to_pixels(
    x, k, bias, v, shortcut, keep, y, heads, pixels, tokens,
    k_batch, k_head, k_token, bias_batch, bias_head, bias_token, v_batch, v_head, v_token, scale,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = (pixels + BLOCK - 1) // BLOCK
    block, row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (row // heads).to(tl.int64), row % heads
    token, column, feature = tl.arange(0, L), tl.arange(0, D), tl.arange(0, E)
    keys, entries, shift = _load_tokens(
        k, bias, v, batch, head, tokens, k_batch, k_head, k_token, bias_batch, bias_head, bias_token,
        v_batch, v_head, v_token, D, E, L, HAS_BIAS,
    )  # fmt: skip
    pixel = block * BLOCK + tl.arange(0, BLOCK)
    values = _tile(x + (batch * pixels * heads + head) * D, pixel, pixels, heads * D, column)
    mean = _product(_softmax_over_tokens(values, keys, shift, token < tokens, scale, TYPE), entries, TYPE)
    if HAS_KEEP:
        mean *= tl.load(keep + batch).to(tl.float32)
    here = (batch * pixels * heads + head) * E
    mean += _tile(shortcut + here, pixel, pixels, heads * E, feature).to(tl.float32)
    tl.store(y + here + pixel[:, None] * heads * E + feature[None, :], mean, mask=(pixel < pixels)[:, None])


@triton.jit
def _tokens_to_pixels_backward(
    grad, x, k, bias, v, keep, grad_x, grad_k, grad_bias, grad_v, heads, pixels, tokens,
    k_batch, k_head, k_token, bias_batch, bias_head, bias_token, v_batch, v_head, v_token, scale,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    token, column, feature = tl.arange(0, L), tl.arange(0, D), tl.arange(0, E)
    keys, entries, shift = _load_tokens(
        k, bias, v, batch, head, tokens, k_batch, k_head, k_token, bias_batch, bias_head, bias_token,
        v_batch, v_head, v_token, D, E, L, HAS_BIAS,
    )  # fmt: skip
    factor = 1.0
    if HAS_KEEP:
        factor = tl.load(keep + batch).to(tl.float32)
    corner = batch * pixels * heads + head
    key_grad, entry_grad = tl.zeros((L, D), tl.float32), tl.zeros((L, E), tl.float32)
    shift_grad = tl.zeros((L,), tl.float32)
    for first in range(0, pixels, BLOCK):
        pixel = first + tl.arange(0, BLOCK)
        values = _tile(x + corner * D, pixel, pixels, heads * D, column)
        upstream = _tile(grad + corner * E, pixel, pixels, heads * E, feature)  # zeros below: they add nothing
        share = _softmax_over_tokens(values, keys, shift, token < tokens, scale, TYPE)
        entry_grad += _product(tl.trans(share), upstream, TYPE) * factor
        share_grad = _product(upstream, tl.trans(entries), TYPE) * factor
        score_grad = share * (share_grad - tl.sum(share * share_grad, 1)[:, None]) * scale
        key_grad += _product(tl.trans(score_grad), values, TYPE)
        shift_grad += tl.sum(score_grad, 0)
        rows = pixel[:, None] * heads * D + column[None, :]
        tl.store(grad_x + corner * D + rows, _product(score_grad, keys, TYPE), mask=(pixel < pixels)[:, None])
    inside = token < tokens
    at = tl.program_id(0).to(tl.int64) * tokens + token
    tl.store(grad_k + at[:, None] * D + column[None, :], key_grad, mask=inside[:, None])
    tl.store(grad_v + at[:, None] * E + feature[None, :], entry_grad, mask=inside[:, None])
    if HAS_BIAS:
        tl.store(grad_bias + at, shift_grad, mask=inside)


def _last_axis_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if bias is None else bias.stride()


def _token_rows(tokens: int) -> int:
    """Rows of a tile for so many tokens: a power of two and at least what a matrix unit takes."""
    return max(power_of_two(tokens), 16)


def _type(x: Tensor) -> tl.dtype:
    return tl.float32 if interpreted() else TYPES[x.dtype]  # the interpreter multiplies matrices of no other type


def pixels_to_tokens(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, x = _last_axis_contiguous(q), x.contiguous()
    (batch, heads, tokens, width), pixels = q.shape, x.shape[1]
    out, total = x.new_empty(batch, tokens, heads * width), x.new_empty(batch, heads, tokens, dtype=torch.float32)
    tile = launch_parameters("pixels_to_tokens")
    if x.numel():
        launch(
            _pixels_to_tokens, (batch * heads,),
            q, x, out, total, heads, pixels, tokens, *q.stride()[:3], scale,
            width, _token_rows(tokens), _type(x), tile["BLOCK"], num_warps=tile["num_warps"],
        )  # fmt: skip
    return out, total


def pixels_to_tokens_backward(
    grad: Tensor, q: Tensor, x: Tensor, out: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    grad, q, x = grad.contiguous(), _last_axis_contiguous(q), x.contiguous()
    (batch, heads, tokens, width), pixels = q.shape, x.shape[1]
    grad_q, grad_x = q.new_empty(q.shape), torch.empty_like(x)
    tile = launch_parameters("pixels_to_tokens_backward")
    if x.numel():
        launch(
            _pixels_to_tokens_backward, (batch * heads,),
            grad, q, x, out, total, grad_q, grad_x, heads, pixels, tokens, *q.stride()[:3], scale,
            width, _token_rows(tokens), _type(x), tile["BLOCK"], num_warps=tile["num_warps"],
        )  # fmt: skip
    return grad_q, grad_x


def tokens_to_pixels(
    x: Tensor, k: Tensor, bias: Tensor | None, v: Tensor, shortcut: Tensor, keep: Tensor | None, scale: float
) -> Tensor:
    x, k, v, shortcut = x.contiguous(), _last_axis_contiguous(k), _last_axis_contiguous(v), shortcut.contiguous()
    (batch, heads, tokens, width), out, pixels = k.shape, v.shape[3], x.shape[1]
    y = torch.empty_like(shortcut)
    tile = launch_parameters("tokens_to_pixels")
    if x.numel():
        launch(
            _tokens_to_pixels, (cdiv(pixels, tile["BLOCK"]) * batch * heads,),
            x, k, bias, v, shortcut, keep, y, heads, pixels, tokens,
            *k.stride()[:3], *_bias_strides(bias), *v.stride()[:3], scale,
            width, out, _token_rows(tokens), bias is not None, keep is not None, _type(x), tile["BLOCK"],
            num_warps=tile["num_warps"],
        )  # fmt: skip
    return y


def tokens_to_pixels_backward(
    grad: Tensor, x: Tensor, k: Tensor, bias: Tensor | None, v: Tensor, keep: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    grad, x, k, v = grad.contiguous(), x.contiguous(), _last_axis_contiguous(k), _last_axis_contiguous(v)
    (batch, heads, tokens, width), out, pixels = k.shape, v.shape[3], x.shape[1]
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    grads = torch.empty_like(x), k.new_empty(k.shape), grad_bias, v.new_empty(v.shape)
    tile = launch_parameters("tokens_to_pixels_backward")
    if x.numel():
        launch(
            _tokens_to_pixels_backward, (batch * heads,),
            grad, x, k, bias, v, keep, *grads, heads, pixels, tokens,
            *k.stride()[:3], *_bias_strides(bias), *v.stride()[:3], scale,
            width, out, _token_rows(tokens), bias is not None, keep is not None, _type(x), tile["BLOCK"],
            num_warps=tile["num_warps"],
        )  # fmt: skip
    return grads
