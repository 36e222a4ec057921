"""The sum at the end of a block: the kernel against its twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from weft.kernels.residual import add_branch_forward, plain_add_branch


def present(values):
    return tuple(value for value in values if value is not None and value.numel())


def inputs(batch, height, width, channels, dtype, has_cls, joined, has_keep):
    x = random(batch, height, width, channels, dtype=dtype)
    cls = random(batch, 1, channels, dtype=dtype, seed=1) if has_cls else None
    y = random(batch, height * width + has_cls, channels, dtype=dtype, seed=2)
    y_cls = random(batch, 1, channels, dtype=dtype, seed=3) if has_cls and not joined else None
    if not joined:
        y = random(batch, height, width, channels, dtype=dtype, seed=4)
    return x, cls, y, y_cls, random(batch, dtype=dtype, seed=5) if has_keep else None


@pytest.mark.parametrize("has_cls", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@settings(max_examples=6)
@given(
    batch=st.integers(1, 3),
    height=st.integers(1, 4),
    width=st.integers(1, 5),
    channels=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    has_keep=st.booleans(),
)
def test_add_branch(has_cls, joined, batch, height, width, channels, dtype, has_keep):
    *tensors, keep = inputs(batch, height, width, channels, dtype, has_cls, joined, has_keep)
    twin = lambda x, cls, y, y_cls: present(  # noqa: E731
        plain_add_branch(x, cls, y, y_cls, None if keep is None else keep.double())
    )
    kernel = lambda x, cls, y, y_cls: present(add_branch_forward(x, cls, y, y_cls, keep))  # noqa: E731
    check_values(kernel, twin, *tensors)
    check_gradients(kernel, twin, *tensors)


def test_a_float32_stream_takes_half_precision_branches():
    x, cls, y, _, keep = inputs(2, 3, 2, 8, torch.float32, True, True, True)
    total, total_cls = add_branch_forward(x, cls, y.bfloat16().requires_grad_(), None, keep)
    assert total.dtype == total_cls.dtype == torch.float32
    wanted, wanted_cls = plain_add_branch(x, cls, y.bfloat16().float(), None, keep)
    torch.testing.assert_close((total, total_cls), (wanted, wanted_cls))


@pytest.mark.parametrize("joined", [False, True])
def test_add_branch_is_an_operator(joined):
    tensors = inputs(2, 2, 3, 5, torch.float32, True, joined, True)
    tensors = [None if t is None else t.requires_grad_(i < 4) for i, t in enumerate(tensors)]
    torch.library.opcheck(torch.ops.weft.add_branch.default, tuple(tensors))
