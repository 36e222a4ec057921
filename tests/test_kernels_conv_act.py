"""Convolution with bias, shortcut and activation, by each of its ways, against the twin in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DTYPES, check_values, random
from weft.kernels import choose
from weft.kernels.activation import KINDS
from weft.kernels.conv_act import conv_act, conv_act_forward, plain_conv_act

TILE = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, num_warps=1, num_stages=1)
WAYS = {"library": {"how": "library"}, "linear": {"how": "linear"}, "kernel": {"how": "kernel", **TILE}}


def check(way: str, tensors: list[Tensor | None], stride: int, padding: int, act: str, groups: int = 1) -> None:
    rest = stride, padding, groups, act
    with choose.forced(WAYS[way]):
        check_values(lambda *t: conv_act_forward(*t, *rest), lambda *t: plain_conv_act(*t, *rest), *tensors, factor=2)


def inputs(
    batch: int, size: tuple[int, int], channels: int, features: int, kernel: int, dtype: torch.dtype
) -> list[Tensor | None]:
    x = random(batch, *size, channels, dtype=dtype)
    return [x, random(features, channels, kernel, kernel, dtype=dtype), random(features), None]


@pytest.mark.parametrize("way", ["library", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(
    batch=st.integers(1, 2),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    channels=st.integers(1, 20),
    features=st.integers(1, 20),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 2),
    shortcut=st.booleans(),
    act=st.sampled_from(KINDS),
)
def test_any_shape(way, dtype, batch, size, channels, features, kernel, stride, shortcut, act) -> None:
    tensors = inputs(batch, size, channels, features, kernel, dtype)
    if shortcut:
        small = [(side - 1) // stride + 1 for side in size]
        tensors[3] = random(batch, *small, features, dtype=dtype)
    check(way, tensors, stride, kernel // 2, act)


@pytest.mark.parametrize("act", ["none", "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, act: str) -> None:
    check("linear", inputs(2, (3, 5), 7, 9, 1, dtype), 1, 0, act)


@pytest.mark.parametrize("way", WAYS)
def test_groups_go_to_the_library(way: str) -> None:
    x, _, bias, _ = inputs(2, (3, 5), 8, 4, 3, torch.bfloat16)
    check(way, [x, random(4, 2, 3, 3, dtype=torch.bfloat16), bias, None], 1, 1, "relu", groups=4)


def test_is_an_operator() -> None:
    tensors = inputs(2, (3, 5), 8, 4, 3, torch.float32)
    torch.library.opcheck(torch.ops.weft.conv_act.default, (*tensors, 2, 1, 1, "relu"))


def test_the_function_has_gradients() -> None:
    x, weight, bias, _ = inputs(1, (3, 5), 8, 4, 3, torch.float32)
    assert x is not None
    assert weight is not None
    conv_act(x.requires_grad_(), weight, bias, (1, 1), (1, 1), 1, "gelu").sum().backward()
    assert x.grad is not None
