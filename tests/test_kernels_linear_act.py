"""A linear layer with its activation, by both of its ways, against the twin in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DTYPES, check_values, random
from weft.kernels import choose
from weft.kernels.activation import KINDS
from weft.kernels.linear_act import linear_act, linear_act_forward, plain_linear_act

TILE = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, num_warps=1, num_stages=1)
WAYS = {"library": {"how": "library"}, "kernel": {"how": "kernel", **TILE}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(
    shape=st.sampled_from([(1,), (17,), (2, 3, 5), (0,)]),
    channels=st.integers(1, 40),
    features=st.integers(1, 40),
    by_columns=st.booleans(),
    act=st.sampled_from(KINDS),
    keep=st.booleans(),
)
def test_any_shape(way, dtype, shape, channels, features, by_columns, act, keep) -> None:
    weight = random(features, channels, dtype=dtype)
    weight = weight.t().contiguous().t() if by_columns else weight
    with choose.forced(WAYS[way]):
        check_values(
            lambda *t: linear_act_forward(*t, act, keep),
            lambda *t: plain_linear_act(*t, act, keep),
            *(random(*shape, channels, dtype=dtype), weight, random(features, dtype=dtype)),
            factor=2,
        )


@pytest.mark.parametrize("keep", [False, True])
def test_is_an_operator(keep: bool) -> None:
    tensors = random(2, 3, 8), random(4, 8), random(4)
    torch.library.opcheck(torch.ops.weft.linear_act.default, (*tensors, "gelu", keep))


def test_the_function_has_gradients() -> None:
    x, weight, bias = random(3, 8).requires_grad_(), random(4, 8), random(4)
    linear_act(x, weight, bias, "silu").sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
