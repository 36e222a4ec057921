"""The kernels against their twins in float64, in Triton's interpreter, and on a GPU where there is one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DEVICE, DTYPES, check_gradients, check_values, random
from weft.kernels.activation import KINDS, activation_forward, plain_activation

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, deadline=None)
@given(shape=SHAPES)
def test_activation(kind: str, dtype: torch.dtype, shape: list[int]) -> None:
    x = 3 * random(*shape, dtype=dtype)
    check_values(lambda x: activation_forward(x, kind), lambda x: plain_activation(x, kind), x)
    check_gradients(lambda x: activation_forward(x, kind), lambda x: plain_activation(x, kind), x)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_an_operator(kind: str) -> None:
    torch.library.opcheck(torch.ops.weft.activation.default, (random(3, 5).requires_grad_(), kind))


def test_activation_at_the_ends() -> None:
    x = torch.tensor([-200.0, -20.0, -0.0, 0.0, 20.0, 200.0], device=DEVICE)
    check_values(lambda x: activation_forward(x, "gelu"), lambda x: plain_activation(x, "gelu"), x)
