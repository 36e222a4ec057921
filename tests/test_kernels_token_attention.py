"""Attention between pixels and tokens against its twins in float64, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from tests.lost_kernels import QUICK_CHECKS, check_promise, lose
from weft.kernels import choose
from weft.kernels.token_attention import (
    pixels_to_tokens_forward,
    plain_pixels_to_tokens,
    plain_tokens_to_pixels,
    tokens_to_pixels_forward,
)

SHAPES = dict(
    batch=st.integers(1, 2), heads=st.integers(1, 3), pixels=st.integers(3, 40), tokens=st.sampled_from([3, 16, 20])
)
TILES = dict(BLOCK=16, num_warps=1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2, deadline=None)
@given(**SHAPES)
def test_pixels_to_tokens(dtype: torch.dtype, batch: int, heads: int, pixels: int, tokens: int) -> None:
    q = random(heads, batch, tokens, 16, dtype=dtype).transpose(0, 1)
    x = random(batch, pixels, heads * 16, dtype=dtype)
    with choose.forced(TILES):
        check_values(lambda *t: pixels_to_tokens_forward(*t, 0.3), lambda *t: plain_pixels_to_tokens(*t, 0.3), q, x)
        check_gradients(
            lambda *t: pixels_to_tokens_forward(*t, 0.3)[0], lambda *t: plain_pixels_to_tokens(*t, 0.3)[0], q, x
        )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2, deadline=None)
@given(**SHAPES, width=st.sampled_from([16, 32]), shifted=st.booleans(), drops=st.booleans())
def test_tokens_to_pixels(
    dtype: torch.dtype, batch: int, heads: int, pixels: int, tokens: int, width: int, shifted: bool, drops: bool
) -> None:
    tensors = [
        random(batch, pixels, heads * width, dtype=dtype),
        random(heads, batch, tokens, width, dtype=dtype).transpose(0, 1),
        random(heads, batch, tokens, dtype=dtype).transpose(0, 1) if shifted else None,
        random(batch, tokens, heads, 16, dtype=dtype).transpose(1, 2),
        random(batch, pixels, heads * 16, dtype=dtype),
    ]
    keep = torch.linspace(0, 1.5, batch).to(tensors[0].device) if drops else None
    with choose.forced(TILES):
        found, wanted = (
            lambda *t: tokens_to_pixels_forward(*t, keep, 0.3),
            lambda *t: plain_tokens_to_pixels(*t, keep, 0.3),
        )
        check_values(found, wanted, *tensors)
        check_gradients(found, wanted, *tensors)


def test_are_operators() -> None:
    q, x = random(2, 2, 3, 16).requires_grad_(), random(2, 5, 32).requires_grad_()
    torch.library.opcheck(torch.ops.weft.pixels_to_tokens.default, (q, x, 0.5), test_utils=QUICK_CHECKS)
    k, v = random(2, 2, 3, 16).requires_grad_(), random(2, 2, 3, 16).requires_grad_()
    bias, shortcut = random(2, 2, 3).requires_grad_(), random(2, 5, 32).requires_grad_()
    tensors = (x, k, bias, v, shortcut, None, 0.5)
    torch.library.opcheck(torch.ops.weft.tokens_to_pixels.default, tensors, test_utils=QUICK_CHECKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lost", ["", "_backward"])
def test_twin_beside_kernel(lost: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by the one, backward by the other."""
    lose(monkeypatch, f"pixels_to_tokens{lost}", f"tokens_to_pixels{lost}", **TILES)
    q, x, shortcut = (random(*shape, dtype=dtype) for shape in ((2, 2, 3, 16), (2, 5, 32), (2, 5, 32)))
    check_gradients(
        lambda *t: pixels_to_tokens_forward(*t, 0.3)[0], lambda *t: plain_pixels_to_tokens(*t, 0.3)[0], q, x
    )
    bias = random(2, 2, 3)  # float32, as it may stay under autocast
    check_gradients(
        lambda *t: tokens_to_pixels_forward(*t, None, 0.3),
        lambda *t: plain_tokens_to_pixels(*t, None, 0.3),
        *(x, q, bias, q, shortcut),
    )


@pytest.mark.parametrize("lost", [False, True])
def test_promises_are_kept(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels and by twins, where the bias is of another type."""
    names = [f"{name}{step}" for name in ("pixels_to_tokens", "tokens_to_pixels") for step in ("", "_backward")]
    lose(monkeypatch, *(names if lost else ()), **TILES)
    q, x = (random(*shape, dtype=torch.bfloat16) for shape in ((2, 2, 3, 16), (2, 5, 32)))
    tokens, bias = random(2, 3, 32, dtype=torch.bfloat16), random(2, 2, 3)
    check_promise(names[0], q, x, 0.3)
    check_promise(names[1], tokens, q, x, tokens, bias, 0.3)
    check_promise(names[2], x, q, bias, q, x, None, 0.3)
    check_promise(names[3], x, x, q, bias, q, None, 0.3)


def test_pictures_and_heads_are_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis of a grid may have more than 65,535 programs."""
    from weft.kernels.gpu import token_attention

    grids = []
    monkeypatch.setattr(token_attention, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    q, x = random(2, 2, 3, 16), random(2, 5, 32)
    with choose.forced(TILES):
        tokens_to_pixels_forward(x, q, None, q, x, None, 0.3)
    assert grids == [(4,)]
