"""The sum at the end of a block as one pass over memory: rows of C channels, those of the map and the class tokens'."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch, power_of_two

SIZES = ["pictures", "positions"]
ELEMENTS, WARPS = 2048, 4


@triton.jit
def _offsets(pictures, positions, C: tl.constexpr, HAS_CLS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's tokens: their pictures, offsets among tokens, in the map and in the class tokens, and masks."""
    tokens = positions + HAS_CLS
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    picture = token // tokens
    place = token - picture * tokens - HAS_CLS  # in the map; -1 for a class token
    channel = tl.arange(0, WIDTH)[None, :]
    there = (token < pictures * tokens)[:, None] & (channel < C)
    in_map = there & (place >= 0)[:, None]
    return (
        picture,
        token[:, None] * C + channel,
        (picture * positions + place)[:, None] * C + channel,
        picture[:, None] * C + channel,
        in_map,
        there & (place < 0)[:, None],
        there,
    )


@triton.jit(do_not_specialize=SIZES)
def _add(
    x, cls, y, y_cls, keep, sum_x, sum_cls, pictures, positions,
    C: tl.constexpr, HAS_CLS: tl.constexpr, JOINED: tl.constexpr, HAS_KEEP: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """x + keep y; y are tokens if JOINED, else a map and class tokens."""
    picture, at_token, at_map, at_cls, in_map, in_cls, there = _offsets(pictures, positions, C, HAS_CLS, ROWS, WIDTH)
    value = tl.load(x + at_map, mask=in_map, other=0.0).to(tl.float32)
    branch = tl.load(y + (at_token if JOINED else at_map), mask=there if JOINED else in_map, other=0.0).to(tl.float32)
    if HAS_CLS:
        value += tl.load(cls + at_cls, mask=in_cls, other=0.0).to(tl.float32)
        if not JOINED:
            branch += tl.load(y_cls + at_cls, mask=in_cls, other=0.0).to(tl.float32)
    if HAS_KEEP:
        branch *= tl.load(keep + picture, mask=picture < pictures, other=0.0).to(tl.float32)[:, None]
    value += branch
    tl.store(sum_x + at_map, value, mask=in_map)
    if HAS_CLS:
        tl.store(sum_cls + at_cls, value, mask=in_cls)


@triton.jit(do_not_specialize=SIZES)
def _branch_gradient(
    grad, grad_cls, keep, grad_y, grad_y_cls, pictures, positions,
    C: tl.constexpr, HAS_CLS: tl.constexpr, JOINED: tl.constexpr, HAS_KEEP: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """keep times the gradients of map and class token, as tokens if JOINED."""
    picture, at_token, at_map, at_cls, in_map, in_cls, there = _offsets(pictures, positions, C, HAS_CLS, ROWS, WIDTH)
    value = tl.load(grad + at_map, mask=in_map, other=0.0).to(tl.float32)
    if HAS_CLS:
        value += tl.load(grad_cls + at_cls, mask=in_cls, other=0.0).to(tl.float32)
    if HAS_KEEP:
        value *= tl.load(keep + picture, mask=picture < pictures, other=0.0).to(tl.float32)[:, None]
    tl.store(grad_y + (at_token if JOINED else at_map), value, mask=there if JOINED else in_map)
    if HAS_CLS and not JOINED:
        tl.store(grad_y_cls + at_cls, value, mask=in_cls)


def _grid(x: Tensor, has_cls: bool) -> tuple[int, int, int, int, int, int]:
    pictures, height, width, channels = x.shape
    padded = power_of_two(channels)
    rows = max(1, ELEMENTS // padded)
    positions = height * width
    return cdiv(pictures * (positions + has_cls), rows), pictures, positions, channels, rows, padded


def add(
    x: Tensor, cls: Tensor | None, y: Tensor, y_cls: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    programs, pictures, positions, channels, rows, padded = _grid(x, cls is not None)
    dtype = x.dtype if x.dtype == y.dtype else torch.promote_types(x.dtype, y.dtype)
    sum_x = x.new_empty(x.shape, dtype=dtype)
    sum_cls = None if cls is None else x.new_empty(cls.shape, dtype=dtype)
    if programs:
        cls, y_cls = None if cls is None else cls.contiguous(), None if y_cls is None else y_cls.contiguous()
        launch(
            _add, (programs,), x.contiguous(), cls, y.contiguous(), y_cls, keep, sum_x, sum_cls, pictures, positions,
            channels, cls is not None, y.dim() == 3, keep is not None, rows, padded, num_warps=WARPS,
        )  # fmt: skip
    return sum_x, sum_cls


def branch_gradient(
    grad: Tensor, grad_cls: Tensor | None, keep: Tensor | None, dtype: torch.dtype, joined: bool
) -> tuple[Tensor, Tensor | None]:
    has_cls = grad_cls is not None
    programs, pictures, positions, channels, rows, padded = _grid(grad, has_cls)
    shape = (pictures, positions + has_cls, channels) if joined else grad.shape
    grad_y = grad.new_empty(shape, dtype=dtype)
    grad_y_cls = None if joined or not has_cls else grad.new_empty((pictures, 1, channels), dtype=dtype)
    if programs:
        grad_cls = None if grad_cls is None else grad_cls.contiguous()
        launch(
            _branch_gradient, (programs,), grad.contiguous(), grad_cls, keep, grad_y, grad_y_cls, pictures, positions,
            channels, has_cls, joined, keep is not None, rows, padded, num_warps=WARPS,
        )  # fmt: skip
    return grad_y, grad_y_cls
