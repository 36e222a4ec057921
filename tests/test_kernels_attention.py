"""Attention to few keys against the twin in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DTYPES, check_values, random
from weft.kernels import switch
from weft.kernels.attention import attention_forward, plain_attention, suits


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 2),
    queries=st.integers(1, 70),
    keys=st.integers(1, 40),
    heads=st.integers(1, 3),
    width=st.sampled_from([16, 32]),
)
def test_any_shape(dtype, batch, queries, keys, heads, width) -> None:
    q, k, v = (
        random(batch, length, heads * width, dtype=dtype, seed=i) for i, length in enumerate((queries, keys, keys))
    )
    rest = heads, width**-0.5
    check_values(lambda *t: attention_forward(*t, *rest), lambda *t: plain_attention(*t, *rest), q, k, v, factor=2)


def test_large_scores() -> None:
    q, k, v = random(1, 5, 16) * 100, random(1, 7, 16, seed=1) * 100, random(1, 7, 16, seed=2)
    check_values(lambda *t: attention_forward(*t, 1, 1.0), lambda *t: plain_attention(*t, 1, 1.0), q, k, v, factor=50)


def test_is_an_operator() -> None:
    tensors = random(2, 5, 32), random(2, 3, 32), random(2, 3, 32)
    torch.library.opcheck(torch.ops.weft.attention.default, (*tensors, 2, 0.25))


def test_where_it_suits(monkeypatch) -> None:
    monkeypatch.setattr(switch, "_usable", lambda x: True)
    q, k = torch.ones(1, 5, 32), torch.ones(1, 3, 32)
    assert not suits(q, k, 2)  # a gradient may be wanted
    with torch.no_grad():
        assert suits(q, k, 2)
        assert not suits(q, torch.ones(1, 129, 32), 2)
        assert not suits(q, k, 4)  # heads of 8 channels
