"""Convolution of pictures and max-pooling against their twins in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DEVICE, DTYPES, check_gradients, check_values, close, random
from weft.kernels import pool
from weft.kernels.choose import forced
from weft.kernels.pool import max_pool_backward, max_pool_forward, plain_max_pool
from weft.kernels.stem import plain_pyramid, plain_stem, pyramid_forward, stem_forward

SMALL = dict(BLOCK_M=16, BLOCK_N=16, num_stages=1)  # so that a small picture has many tiles
STEMS = (  # kernel, stride, padding, dilation: of CeiT and VT-ResNet, CvT, CETNet, ViTAE; and odd ones
    (7, 2, 3, 1),
    (7, 4, 2, 1),
    (3, 2, 1, 1),
    (7, 4, 8, 3),
    pytest.param((7, 4, 5, 2), marks=pytest.mark.slow),
    (2, 3, 0, 2),
)
SIDES = st.integers(9, 11)


def stem(function: Callable[..., Any], numbers: tuple[int, ...], act: str) -> Callable[..., Any]:
    return lambda x, weight, bias=None: function(x, weight, bias, *numbers[1:], act)


@pytest.mark.parametrize("numbers", STEMS)
@settings(max_examples=2, deadline=None)
@given(
    sides=st.tuples(SIDES, SIDES),
    channels=st.sampled_from([1, 3]),
    out=st.sampled_from([3, 8]),
    dtype=st.sampled_from(DTYPES),
)
def test_stem(numbers: tuple[int, ...], sides: tuple[int, int], channels: int, out: int, dtype: torch.dtype) -> None:
    x = random(2, *sides, channels, dtype=dtype)
    weight, bias = random(out, channels, numbers[0], numbers[0], dtype=dtype), random(out, dtype=dtype)
    with forced(SMALL):
        check_values(stem(stem_forward, numbers, "gelu"), stem(plain_stem, numbers, "gelu"), x, weight, bias)
        check_gradients(stem(stem_forward, numbers, "none"), stem(plain_stem, numbers, "none"), x, weight, bias)


def test_stem_as_launched() -> None:
    """With the tiles of a GPU, without a bias, also from a picture that does not start at a multiple of 16 bytes."""
    for x in (random(1, 7, 16, 3), random(337)[1:].view(1, 7, 16, 3)):
        weight = random(5, 3, 7, 7).to(memory_format=torch.channels_last)
        check_values(stem(stem_forward, STEMS[0], "none"), stem(plain_stem, STEMS[0], "none"), x, weight)


def test_stem_takes_parameters_of_another_type() -> None:
    x, weight, bias = random(1, 9, 9, 3, dtype=torch.bfloat16), random(4, 3, 3, 3), random(4)
    weight.requires_grad_()
    with forced(SMALL):
        y = stem_forward(x, weight, bias, 2, 1, 1, "none")
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("biased", [True, False])
def test_pyramid(biased: bool) -> None:
    tensors = (random(1, 8, 12, 3), random(4, 3, 7, 7), random(3, 3, 7, 7), *((random(4), random(3)) if biased else ()))

    def pyramid(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, a, b, *biases: function(x, [a, b], list(biases), 4, [2, 5], [1, 2], "none")

    with forced(SMALL):
        check_gradients(pyramid(pyramid_forward), pyramid(plain_pyramid), *tensors)


def test_stems_are_operators() -> None:
    x, weight, bias = (random(*shape).requires_grad_() for shape in ((1, 5, 5, 1), (2, 1, 2, 2), (2,)))
    checks = "test_schema", "test_faketensor"  # the others take long
    with forced(SMALL):
        given, lists = (x, weight, bias, 2, 1, 1, "none"), (x, [weight], [bias], 2, [1], [1], "none")
        torch.library.opcheck(torch.ops.weft.stem.default, given, test_utils=(*checks, "test_autograd_registration"))
        torch.library.opcheck(torch.ops.weft.stem_pyramid.default, lists, test_utils=checks)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=3, deadline=None)
@given(shape=st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 8, 20])))
def test_max_pool(stride: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtype)
    with forced(dict(BLOCK=32, BLOCK_C=16)):
        check_values(lambda x: max_pool_forward(x, stride, False)[0], lambda x: plain_max_pool(x, stride), x)
        check_gradients(lambda x: max_pool_forward(x, stride, True)[0], lambda x: plain_max_pool(x, stride), x)


def test_of_equals_the_first_gets_the_gradient() -> None:
    x = random(1, 7, 7, 4).relu().round()
    check_gradients(lambda x: max_pool_forward(x, 2, True)[0], lambda x: plain_max_pool(x, 2), x)


def test_max_pool_keeps_what_is_no_number() -> None:
    x = torch.full((1, 5, 5, 2), float("-inf"), device=DEVICE)
    x[0, 2, 2, 0] = float("nan")
    for places in (False, True):
        close(max_pool_forward(x, 2, places)[0].nan_to_num(), plain_max_pool(x, 2).nan_to_num(), 0.0, "maximum")


def test_max_pool_is_an_operator() -> None:
    torch.library.opcheck(torch.ops.weft.max_pool.default, (random(1, 3, 3, 2).requires_grad_(), 2, True))


def test_plain_pooling_agrees_with_the_kernels() -> None:
    """What the operators run where Triton is missing."""
    x, grad = random(2, 5, 6, 3), random(2, 3, 3, 3, seed=1)
    y, place = pool._plain(x, 2, True)
    found, found_place = max_pool_forward(x, 2, True)
    assert torch.equal(y, found)
    assert torch.equal(place, found_place)
    close(pool._plain_backward(grad, place, 5, 6, 2), max_pool_backward(grad, place, 5, 6, 2), 1e-6, "gradient")
