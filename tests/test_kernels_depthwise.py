"""Depth-wise convolution and the convolutional projection: the kernels against their twins, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from weft.kernels.choose import forced
from weft.kernels.depthwise import plain_depthwise, with_kernels

SIZES = st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 24, 33]))
TILES = st.fixed_dictionaries(dict(rows=st.integers(1, 4), cols=st.integers(1, 4), block_c=st.sampled_from([16, 32])))


def parameters(channels: int, kernel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(channels, 1, kernel, kernel, dtype=dtype), random(channels, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4)
@given(size=SIZES, tile=TILES, stride=st.integers(1, 2), act=st.sampled_from(["none", "gelu", "quick_gelu"]))
def test_depthwise(dtype: torch.dtype, size: Any, tile: dict[str, int], stride: int, act: str) -> None:
    weight, bias = parameters(size[-1], 3, torch.float32)
    scale, shift = random(size[-1], seed=1), random(size[-1], seed=2)
    tensors = random(*size, dtype=dtype), weight, bias, scale, shift
    with forced(tile), torch.no_grad():
        check_values(
            lambda *given: with_kernels(*given, stride, act, act),
            lambda *given: plain_depthwise(*given, stride, act, act),
            *tensors,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4)
@given(size=SIZES, tile=TILES, stride=st.integers(1, 2), biased=st.booleans())
def test_depthwise_gradients(dtype: torch.dtype, size: Any, tile: dict[str, int], stride: int, biased: bool) -> None:
    weight, bias = parameters(size[-1], 3, dtype)
    with forced(tile):
        check_gradients(
            lambda *given: with_kernels(*given, None, None, stride, "none", "none"),
            lambda *given: plain_depthwise(*given, None, None, stride, "none", "none"),
            random(*size, dtype=dtype),
            weight,
            bias if biased else None,
        )
