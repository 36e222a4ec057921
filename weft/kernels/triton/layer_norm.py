"""LayerNorm over the channels, with the residual sum before it, as one pass over memory.

The kernels see rows of C channels. The programs below `map_programs` work on the rows of the map, those behind on the
class tokens, as if they were a map of one position. Tokens are both in one tensor, the class token first.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.ops.layer_norm import as_tokens
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.triton.shares import sum_lines
from weft.kernels.tuning.launches import launch_parameters, processors

SIZES = ["x_rows", "cls_rows", "pictures", "positions", "map_programs"]


@triton.jit
def _standardise(x, eps, C: tl.constexpr, WIDTH: tl.constexpr):
    """Rows with mean 0 and variance 1, zero behind the C channels, and the factors that they were multiplied by."""
    centred = x - (tl.sum(x, axis=1) / C)[:, None]
    if C < WIDTH:
        centred = tl.where((tl.arange(0, WIDTH) < C)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)[:, None]
    return centred * rstd, rstd


@triton.jit
def _rows(row, C: tl.constexpr, WIDTH: tl.constexpr):
    """The channels of some rows, (ROWS, WIDTH) offsets."""
    return (row.to(tl.int64) * C)[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load_rows(
    x, row, x_rows, pictures, positions, token_rows, token,
    C: tl.constexpr, HAS_CLS: tl.constexpr, DENSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of a map: whether they exist, their pictures, their offsets in a dense map and among tokens, their values.

    DENSE: x has no gaps between pictures. There are `token_rows` tokens in a picture, of which `token` is the first.
    """
    there = row < pictures * positions
    mask = there[:, None] & (tl.arange(0, WIDTH) < C)[None, :]
    picture = row // positions
    own = _rows(row, C, WIDTH)
    tokens = own
    if HAS_CLS:
        tokens = _rows(picture.to(tl.int64) * (token_rows - positions) + row + token, C, WIDTH)
    if DENSE:
        value = tl.load(x + own, mask=mask, other=0.0).to(tl.float32)
    else:
        apart = picture.to(tl.int64) * (x_rows - positions) + row
        value = tl.load(x + _rows(apart, C, WIDTH), mask=mask, other=0.0).to(tl.float32)
    return there, mask, picture, own, tokens, value


@triton.jit(do_not_specialize=SIZES)
def _forward(
    x, cls, y, keep, weight, bias, sum_x, sum_cls, normed, normed_cls,
    x_rows, cls_rows, pictures, positions, map_programs, eps,
    C: tl.constexpr, HAS_Y: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_CLS: tl.constexpr, JOINED: tl.constexpr,
    DENSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The norm of x + keep y, of maps and class tokens."""
    program = tl.program_id(0)
    token_rows = positions + HAS_CLS
    token = positions * 0 + HAS_CLS  # the first of the picture's tokens that is at hand
    if HAS_CLS:  # noqa: SIM102  known when it is compiled
        if program >= map_programs:
            program -= map_programs
            x, sum_x, x_rows, positions, token = cls, sum_cls, cls_rows, positions * 0 + 1, token * 0
            if not JOINED:
                normed = normed_cls
    channel = tl.arange(0, WIDTH)
    row = program * ROWS + tl.arange(0, ROWS)
    there, mask, picture, own, tokens, value = _load_rows(
        x, row, x_rows, pictures, positions, token_rows, token, C, HAS_CLS, DENSE, WIDTH
    )
    if HAS_Y:
        branch = tl.load(y + tokens, mask=mask, other=0.0).to(tl.float32)
        if HAS_KEEP:
            branch *= tl.load(keep + picture, mask=there, other=0.0).to(tl.float32)[:, None]
        rounded = (value + branch).to(sum_x.dtype.element_ty)  # what comes out is what is normalised
        tl.store(sum_x + own, rounded, mask=mask)
        value = rounded.to(tl.float32)
    gamma = tl.load(weight + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    beta = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    unit, _ = _standardise(value, eps, C, WIDTH)
    tl.store(normed + (tokens if JOINED else own), unit * gamma + beta, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _backward(
    grad, grad_cls, grad_sum, grad_sum_cls, x, cls, keep, weight, grad_x, grad_x_cls, grad_y, partial,
    x_rows, cls_rows, pictures, positions, map_programs, eps,
    C: tl.constexpr, HAS_SUM: tl.constexpr, HAS_Y: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_CLS: tl.constexpr,
    JOINED: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = map_programs
    partial += program * 2 * C
    token_rows = positions + HAS_CLS
    token = positions * 0 + HAS_CLS
    if HAS_CLS:  # noqa: SIM102  known when it is compiled
        if program >= map_programs:
            program -= map_programs
            programs = tl.num_programs(0) - map_programs
            x, grad_sum, grad_x, x_rows = cls, grad_sum_cls, grad_x_cls, cls_rows
            positions, token = positions * 0 + 1, token * 0
            if not JOINED:
                grad = grad_cls
    channel = tl.arange(0, WIDTH)
    gamma = tl.load(weight + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    grad_gamma = tl.zeros((ROWS, WIDTH), tl.float32)
    grad_beta = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in tl.range(program * ROWS, pictures * positions, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        there, mask, picture, own, tokens, value = _load_rows(
            x, row, x_rows, pictures, positions, token_rows, token, C, HAS_CLS, DENSE, WIDTH
        )
        upstream = tl.load(grad + (tokens if JOINED else own), mask=mask, other=0.0).to(tl.float32)
        if HAS_SUM:
            passed = tl.load(grad_sum + own, mask=mask, other=0.0).to(tl.float32)
        unit, rstd = _standardise(value, eps, C, WIDTH)
        grad_gamma += upstream * unit
        grad_beta += upstream
        upstream *= gamma
        mean = (tl.sum(upstream, axis=1) / C)[:, None]
        along = (tl.sum(upstream * unit, axis=1) / C)[:, None]
        result = (upstream - mean - unit * along) * rstd
        if HAS_SUM:
            result += passed
        tl.store(grad_x + own, result, mask=mask)
        if HAS_Y:
            if HAS_KEEP:
                result *= tl.load(keep + picture, mask=there, other=0.0).to(tl.float32)[:, None]
            tl.store(grad_y + tokens, result, mask=mask)
    tl.store(partial + channel, tl.sum(grad_gamma, axis=0), mask=channel < C)
    tl.store(partial + C + channel, tl.sum(grad_beta, axis=0), mask=channel < C)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """A map or class tokens whose pictures may lie some rows apart, with nothing between the rows of one picture."""
    if x.is_contiguous() or (x.stride(0) % x.shape[-1] == 0 and x[0].is_contiguous()):
        return x
    return x.contiguous()


def _layout(x: Tensor, cls: Tensor | None) -> tuple[Tensor, Tensor | None, bool, int, int]:
    """x and cls where kernels can read them, whether they have no gaps, and rows from picture to picture of each."""
    channels = x.shape[3]
    x = _with_contiguous_rows(x)
    if cls is None:
        return x, None, x.is_contiguous(), x.stride(0) // channels, 1
    cls = _with_contiguous_rows(cls)
    return x, cls, x.is_contiguous() and cls.is_contiguous(), x.stride(0) // channels, cls.stride(0) // channels


def forward(
    x: Tensor, cls: Tensor | None, y: Tensor | None, keep: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dtype: torch.dtype, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Map and class token behind the sum, without a y as they came; tokens, or map and class token, of the norm."""
    pictures, height, width, channels = x.shape
    positions = height * width
    has_y, has_cls = y is not None, cls is not None
    total = total_cls = normed_cls = None
    given = x, cls
    if y is not None:
        y = y.contiguous()
        wide = x.dtype if x.dtype == y.dtype else torch.promote_types(x.dtype, y.dtype)
        total = x.new_empty(x.shape, dtype=wide)
        total_cls = None if cls is None else x.new_empty(cls.shape, dtype=wide)
    normed = x.new_empty(as_tokens(x, cls) if joined else x.shape, dtype=dtype)
    if cls is not None and not joined:
        normed_cls = x.new_empty(cls.shape, dtype=dtype)
    chosen, block = launch_parameters("layer_norm"), power_of_two(channels)
    rows = max(1, chosen["elements"] // block)
    map_programs = cdiv(pictures * positions, rows)
    programs = map_programs + cdiv(pictures, rows) if has_cls else map_programs
    if programs:
        x, cls, dense, x_rows, cls_rows = _layout(x, cls)
        launch(
            _forward, (programs,), x, cls, y, keep, weight, bias, total, total_cls, normed, normed_cls,
            x_rows, cls_rows, pictures, positions, map_programs, eps,
            channels, has_y, keep is not None, has_cls, joined, dense, rows, block, num_warps=chosen["num_warps"],
        )  # fmt: skip
    return *(given if y is None else (total, total_cls)), normed, normed_cls


def backward(
    grad: Tensor, grad_cls: Tensor | None, grad_sum: Tensor | None, grad_sum_cls: Tensor | None,
    x: Tensor, cls: Tensor | None, keep: Tensor | None, weight: Tensor, eps: float,
    x_dtype: torch.dtype, y_dtype: torch.dtype | None, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of map, class token, y, weight and bias."""
    pictures, height, width, channels = x.shape
    positions, has_cls = height * width, cls is not None
    grad_x = x.new_empty(x.shape, dtype=x_dtype)
    grad_x_cls = None if cls is None else x.new_empty(cls.shape, dtype=x_dtype)
    grad_y = None if y_dtype is None else x.new_empty(as_tokens(x, cls), dtype=y_dtype)
    if not x.numel():
        return grad_x, grad_x_cls, grad_y, torch.zeros_like(weight), torch.zeros_like(weight)
    chosen, block = launch_parameters("layer_norm_backward"), power_of_two(channels)
    rows = max(1, chosen["elements"] // block)
    most = chosen["per_processor"] * processors(x.device)
    map_programs = min(cdiv(pictures * positions, rows), most)
    programs = map_programs + min(cdiv(pictures, rows), most) if has_cls else map_programs
    x, cls, dense, x_rows, cls_rows = _layout(x, cls)
    grads = (up if up is None else up.contiguous() for up in (grad, grad_cls, grad_sum, grad_sum_cls))
    partial = torch.empty(programs, 2, channels, device=x.device)
    launch(
        _backward, (programs,), *grads, x, cls, keep, weight, grad_x, grad_x_cls, grad_y, partial,
        x_rows, cls_rows, pictures, positions, map_programs, eps,
        channels, grad_sum is not None, grad_y is not None, keep is not None, has_cls, joined, dense, rows, block,
        chosen["stages"], num_warps=chosen["num_warps"],
    )  # fmt: skip
    return grad_x, grad_x_cls, grad_y, *sum_lines(partial, weight)
