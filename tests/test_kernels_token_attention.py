"""Attention between pixels and tokens against its twins in float64, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
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
@settings(max_examples=3, deadline=None)
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
@settings(max_examples=3, deadline=None)
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
    checks = "test_schema", "test_autograd_registration", "test_faketensor"  # the others take long
    q, x = random(2, 2, 3, 16).requires_grad_(), random(2, 5, 32).requires_grad_()
    torch.library.opcheck(torch.ops.weft.pixels_to_tokens.default, (q, x, 0.5), test_utils=checks)
    k, v = random(2, 2, 3, 16).requires_grad_(), random(2, 2, 3, 16).requires_grad_()
    bias, shortcut = random(2, 2, 3).requires_grad_(), random(2, 5, 32).requires_grad_()
    tensors = (x, k, bias, v, shortcut, None, 0.5)
    torch.library.opcheck(torch.ops.weft.tokens_to_pixels.default, tensors, test_utils=checks)
