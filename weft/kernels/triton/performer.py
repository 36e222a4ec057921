# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
"""The Performer in two kernels forward and two backward: one over the keys, one over the queries.

A program takes a run of one picture's tokens. What the programs over the keys find is put together by those that need
it: the largest logarithm of each feature, and relative to it the sum of the features and the (M, C) context.

The logarithms must be exact to much less than 1, hence the matrix in two parts, of which each fits into bfloat16; so do
the gradients of the features, which are small differences.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.ops.performer import SPLITS, outputs
from weft.kernels.triton.dot import dot
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters

FLOOR = tl.constexpr(-1e30)  # the logarithm of a feature that does not exist


@triton.jit
def _split(x, TYPE: tl.constexpr):
    """x as a sum of two matrices of the type that matrix units take; where it is float32, the first is x itself."""
    high = x.to(TYPE)
    return high, (x - high.to(tl.float32)).to(TYPE)


@triton.jit
def _dot_split(a, high, low):
    total = dot(a, high, tl.zeros((a.shape[0], high.shape[1]), tl.float32))
    return dot(a, low, total) if low.dtype == tl.bfloat16 else total


@triton.jit
def _load_matrix(w, C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr):
    """The (M, C) matrix, with zeros up to powers of two."""
    j, c = tl.arange(0, MP)[:, None], tl.arange(0, CP)[None, :]
    return tl.load(w + j * C + c, mask=(j < M) & (c < C), other=0.0).to(tl.float32)


@triton.jit
def _load_rows(x, first, stride, tokens, C: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr):
    """Tokens `first` and following, (ROWS, CP)."""
    t, c = first + tl.arange(0, ROWS)[:, None], tl.arange(0, CP)[None, :]
    return tl.load(x + t * stride + c, mask=(t < tokens) & (c < C), other=0.0).to(TYPE)


@triton.jit
def _store_rows(x, value, first, stride, tokens, C: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr):
    t, c = first + tl.arange(0, ROWS)[:, None], tl.arange(0, CP)[None, :]
    tl.store(x + t * stride + c, value, mask=(t < tokens) & (c < C))


@triton.jit
def _half_square(x):
    return 0.5 * tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)


@triton.jit
def _load_row(found, number, C: tl.constexpr, M: tl.constexpr, MP: tl.constexpr):
    """Row 0 of what a program found are the shifts, row 1 the totals."""
    j = tl.arange(0, MP)
    return tl.load(found + M * C + number * M + j, mask=j < M, other=0.0)


@triton.jit
def _largest_shift(found, SPLITS: tl.constexpr, C: tl.constexpr, M: tl.constexpr, MP: tl.constexpr):
    """The largest shift of all splits."""
    shift = tl.full((MP,), FLOOR, tl.float32)
    for split in range(SPLITS):
        shift = tl.maximum(shift, _load_row(found + split * (M * (C + 2)), 0, C, M, MP))
    return shift


@triton.jit
def _sums(found, shift, SPLITS: tl.constexpr, C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr):
    """Totals and contexts of all splits added up, relative to one shift."""
    j, c = tl.arange(0, MP)[:, None], tl.arange(0, CP)[None, :]
    total = tl.zeros((MP,), tl.float32)
    context = tl.zeros((MP, CP), tl.float32)
    for split in range(SPLITS):
        part = found + split * (M * (C + 2))
        factor = tl.exp(_load_row(part, 0, C, M, MP) - shift)
        total += factor * _load_row(part, 1, C, M, MP)
        context += factor[:, None] * tl.load(part + j * C + c, mask=(j < M) & (c < C), other=0.0)
    return total, context


@triton.jit
def _store_sums(found, shift, total, context, C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr):
    j, c = tl.arange(0, MP), tl.arange(0, CP)
    tl.store(found + j[:, None] * C + c[None, :], context, mask=(j < M)[:, None] & (c < C)[None, :])
    tl.store(found + M * C + j, shift, mask=j < M)
    tl.store(found + M * C + M + j, total, mask=j < M)


@triton.jit
def _keys(
    kqv, w, found, copy, tokens, length,
    C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr,
    TYPE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Shift, total and context of `length` keys; `copy` becomes v. Features are rows here: (MP, ROWS)."""
    split, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kqv += picture * tokens * (3 * C)
    copy += picture * tokens * C
    high, low = _split(_load_matrix(w, C, M, CP, MP), TYPE)
    shift = tl.full((MP,), FLOOR, tl.float32)
    total = tl.zeros((MP,), tl.float32)
    context = tl.zeros((MP, CP), tl.float32)
    for first in range(split * length, tl.minimum(split * length + length, tokens), ROWS):
        k = _load_rows(kqv, first, 3 * C, tokens, C, CP, ROWS, TYPE)
        v = _load_rows(kqv + 2 * C, first, 3 * C, tokens, C, CP, ROWS, TYPE)
        _store_rows(copy, v, first, C, tokens, C, CP, ROWS)
        k_t = tl.trans(k)
        log = dot(high, k_t, tl.zeros((MP, ROWS), tl.float32))
        if low.dtype == tl.bfloat16:
            log = dot(low, k_t, log)
        log -= _half_square(k)[None, :]
        log = tl.where((first + tl.arange(0, ROWS) < tokens)[None, :], log, FLOOR)
        higher = tl.maximum(shift, tl.max(log, axis=1))
        phi = tl.exp(log - higher[:, None]).to(TYPE)  # rounded alike in both sums
        factor = tl.exp(shift - higher)
        total = total * factor + tl.sum(phi.to(tl.float32), axis=1)
        context = dot(phi, v, context * factor[:, None])
        shift = higher
    _store_sums(found + (picture * SPLITS + split) * (M * (C + 2)), shift, total, context, C, M, CP, MP)


@triton.jit
def _keys_of(
    found, picture, SPLITS: tl.constexpr, C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr
):
    """Shift, total and context of all keys of a picture."""
    found += picture * SPLITS * (M * (C + 2))
    shift = _largest_shift(found, SPLITS, C, M, MP)
    total, context = _sums(found, shift, SPLITS, C, M, CP, MP)
    return shift, total, context


@triton.jit
def _features_of_queries(q, high, low, shift, total, M: tl.constexpr, MP: tl.constexpr, TYPE: tl.constexpr):
    """phi(q), the denominator, and the part of it that is epsilon; relative to the largest feature of each query."""
    log = _dot_split(q, tl.trans(high), tl.trans(low)) + shift[None, :]
    log = tl.where((tl.arange(0, MP) < M)[None, :], log, FLOOR)
    largest = tl.max(log, axis=1)
    phi = tl.exp(log - largest[:, None]).to(TYPE).to(tl.float32)  # rounded alike in numerator and denominator
    log_factor = _half_square(q) - largest
    epsilon = 1e-8 * M * tl.exp(tl.minimum(log_factor, 60.0))
    denominator = tl.sum(phi * total[None, :], axis=1) + epsilon
    return phi, denominator, tl.where(log_factor <= 60.0, epsilon, 0.0)


@triton.jit
def _queries(
    kqv, w, found, y, tokens, length,
    C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr,
    TYPE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of `length` queries."""
    split, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kqv += picture * tokens * (3 * C)
    y += picture * tokens * C
    high, low = _split(_load_matrix(w, C, M, CP, MP), TYPE)
    shift, total, context = _keys_of(found, picture, SPLITS, C, M, CP, MP)
    context = context.to(TYPE)
    for first in range(split * length, tl.minimum(split * length + length, tokens), ROWS):
        q = _load_rows(kqv + C, first, 3 * C, tokens, C, CP, ROWS, TYPE)
        phi, denominator, _ = _features_of_queries(q, high, low, shift, total, M, MP, TYPE)
        value = dot(phi.to(TYPE), context, tl.zeros((ROWS, CP), tl.float32)) / denominator[:, None]
        _store_rows(y, value, first, C, tokens, C, CP, ROWS)


@triton.jit
def _queries_backward(
    grad, kqv, w, found, grad_kqv, grad_found, tokens, length,
    C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr,
    TYPE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of `length` queries, and their part of the gradients of total and context."""
    split, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    grad += picture * tokens * C
    kqv += picture * tokens * (3 * C)
    grad_kqv += picture * tokens * (3 * C)
    high, low = _split(_load_matrix(w, C, M, CP, MP), TYPE)
    shift, total, context = _keys_of(found, picture, SPLITS, C, M, CP, MP)
    context_high, context_low = _split(tl.trans(context), TYPE)
    grad_total = tl.zeros((MP,), tl.float32)
    grad_context = tl.zeros((MP, CP), tl.float32)
    for first in range(split * length, tl.minimum(split * length + length, tokens), ROWS):
        q = _load_rows(kqv + C, first, 3 * C, tokens, C, CP, ROWS, TYPE)
        upstream = _load_rows(grad, first, C, tokens, C, CP, ROWS, TYPE)
        phi, denominator, epsilon = _features_of_queries(q, high, low, shift, total, M, MP, TYPE)
        part = phi / denominator[:, None]
        grad_numerator = _dot_split(upstream, context_high, context_low)  # of phi, times the denominator
        grad_denominator = -tl.sum(part * grad_numerator, axis=1) / denominator
        grad_log = part * grad_numerator + phi * grad_denominator[:, None] * total[None, :]
        grad_q = dot(grad_log.to(TYPE), high, tl.zeros((ROWS, CP), tl.float32))
        grad_q += q.to(tl.float32) * (epsilon * grad_denominator)[:, None]
        _store_rows(grad_kqv + C, grad_q, first, 3 * C, tokens, C, CP, ROWS)
        # Rows behind the last token have no gradient.
        grad_total += tl.sum(phi * grad_denominator[:, None], axis=0)
        grad_context = dot(tl.trans(part.to(TYPE)), upstream, grad_context)
    to = grad_found + (picture * SPLITS + split) * (M * (C + 2))
    _store_sums(to, tl.zeros((MP,), tl.float32), grad_total, grad_context, C, M, CP, MP)


@triton.jit
def _keys_backward(
    grad_copy, kqv, w, found, grad_found, grad_kqv, tokens, length,
    C: tl.constexpr, M: tl.constexpr, CP: tl.constexpr, MP: tl.constexpr,
    TYPE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of `length` keys and values."""
    split, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    grad_copy += picture * tokens * C
    kqv += picture * tokens * (3 * C)
    grad_kqv += picture * tokens * (3 * C)
    high, low = _split(_load_matrix(w, C, M, CP, MP), TYPE)
    j = tl.arange(0, MP)
    shift = _largest_shift(found + picture * SPLITS * (M * (C + 2)), SPLITS, C, M, MP)
    grad_found += picture * SPLITS * (M * (C + 2))
    grad_total, grad_context = _sums(grad_found, tl.zeros((MP,), tl.float32), SPLITS, C, M, CP, MP)
    context_high, context_low = _split(grad_context, TYPE)
    for first in range(split * length, tl.minimum(split * length + length, tokens), ROWS):
        k = _load_rows(kqv, first, 3 * C, tokens, C, CP, ROWS, TYPE)
        v = _load_rows(kqv + 2 * C, first, 3 * C, tokens, C, CP, ROWS, TYPE)
        log = _dot_split(k, tl.trans(high), tl.trans(low)) - _half_square(k)[:, None] - shift[None, :]
        phi = tl.exp(tl.where((j < M)[None, :], log, FLOOR))
        upstream = _load_rows(grad_copy, first, C, tokens, C, CP, ROWS, tl.float32)
        grad_v = dot(phi.to(TYPE), context_high, upstream)
        _store_rows(grad_kqv + 2 * C, grad_v, first, 3 * C, tokens, C, CP, ROWS)
        grad_phi = _dot_split(v, tl.trans(context_high), tl.trans(context_low)) + grad_total[None, :]
        grad_log = phi * grad_phi
        grad_k = dot(grad_log.to(TYPE), high, tl.zeros((ROWS, CP), tl.float32))
        grad_k -= k.to(tl.float32) * tl.sum(grad_log, axis=1)[:, None]
        _store_rows(grad_kqv, grad_k, first, 3 * C, tokens, C, CP, ROWS)


def _tile(operation: str, kqv: Tensor, w: Tensor) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The numbers that all four kernels are given behind their tensors, and the options of the launch."""
    tokens, (features, channels) = kqv.shape[1], w.shape
    at = launch_parameters(operation, channels=channels)
    rows = at["rows"]
    length = cdiv(cdiv(tokens, SPLITS), rows) * rows
    dtype = tl.bfloat16 if kqv.dtype == torch.bfloat16 else tl.float32
    padded = max(power_of_two(channels), 16), max(power_of_two(features), 16)
    options = dict(num_warps=at["num_warps"], num_stages=at["num_stages"])
    return (tokens, length, channels, features, *padded, dtype, SPLITS, rows), options


def forward(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kqv, w = kqv.contiguous(), w.contiguous()
    y, v, found = outputs(kqv, w)
    if y.numel():
        grid = (SPLITS, len(kqv))
        sizes, options = _tile("performer", kqv, w)
        launch(_keys, grid, kqv, w, found, v, *sizes, **options)
        launch(_queries, grid, kqv, w, found, y, *sizes, **options)
    return y, v, found


def backward(grad: Tensor, grad_v: Tensor, kqv: Tensor, w: Tensor, found: Tensor) -> Tensor:
    grad, grad_v, kqv, w = grad.contiguous(), grad_v.contiguous(), kqv.contiguous(), w.contiguous()
    grad_kqv, grad_found = torch.empty_like(kqv), torch.empty_like(found)
    if grad.numel():
        grid = (SPLITS, len(kqv))
        sizes, options = _tile("performer_backward", kqv, w)
        launch(_queries_backward, grid, grad, kqv, w, found, grad_kqv, grad_found, *sizes, **options)
        launch(_keys_backward, grid, grad_v, kqv, w, found, grad_found, grad_kqv, *sizes, **options)
    return grad_kqv
