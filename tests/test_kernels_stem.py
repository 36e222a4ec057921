"""Convolution of pictures and max-pooling against their twins in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DEVICE, DTYPES, check_gradients, check_values, close, random
from weft.kernels.choose import forced
from weft.kernels.pool import max_pool_backward, max_pool_forward, plain_max_pool
from weft.kernels.stem import plain_stem, stem_forward

SMALL = dict(BLOCK_M=16, BLOCK_N=16, num_stages=1)  # so that a small picture has many tiles
STEMS = (  # kernel, stride, padding, dilation: of CeiT and VT-ResNet, CvT, CETNet, ViTAE; and odd ones
    (7, 2, 3, 1),
    (7, 4, 2, 1),
    (3, 2, 1, 1),
    (7, 4, 8, 3),
    (3, 1, 1, 1),
    (2, 3, 0, 2),
)
SIDES = st.integers(9, 14)


def stem(numbers: tuple[int, int, int, int], act: str, kernel: bool):
    """The convolution as a function of tensors."""
    _, stride, padding, dilation = numbers
    function = stem_forward if kernel else plain_stem

    def apply(x, weight, bias=None):
        return function(x, [weight], [] if bias is None else [bias], stride, [padding], [dilation], act)

    return apply


@pytest.mark.parametrize("numbers", STEMS)
@settings(max_examples=3, deadline=None)
@given(
    sides=st.tuples(SIDES, SIDES),
    channels=st.integers(1, 4),
    out=st.sampled_from([3, 8, 12]),
    dtype=st.sampled_from(DTYPES),
)
def test_stem(numbers, sides, channels, out, dtype) -> None:
    x = random(2, *sides, channels, dtype=dtype)
    weight, bias = random(out, channels, numbers[0], numbers[0], dtype=dtype), random(out, dtype=dtype)
    with forced(SMALL):
        check_values(stem(numbers, "gelu", True), stem(numbers, "gelu", False), x, weight, bias)
        check_gradients(stem(numbers, "none", True), stem(numbers, "none", False), x, weight, bias)


def test_stem_as_launched() -> None:
    """With the tiles of a GPU, without a bias, also from a picture that does not start at a multiple of 16 bytes."""
    for x in (random(1, 15, 16, 3), random(721)[1:].view(1, 15, 16, 3)):
        weight = random(5, 3, 7, 7).to(memory_format=torch.channels_last)
        check_values(stem(STEMS[0], "none", True), stem(STEMS[0], "none", False), x, weight)


def test_stem_takes_parameters_of_another_type() -> None:
    x, weight, bias = random(1, 9, 9, 3, dtype=torch.bfloat16), random(4, 3, 3, 3), random(4)
    weight.requires_grad_(), bias.requires_grad_()
    y = stem(STEMS[2], "none", True)(x, weight, bias)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("biased", [True, False])
def test_pyramid(biased: bool) -> None:
    paddings, dilations = [2, 5], [1, 2]
    tensors = (random(2, 8, 12, 3), random(4, 3, 7, 7), random(3, 3, 7, 7), *((random(4), random(3)) if biased else ()))

    def pyramid(function):
        return lambda x, a, b, *biases: function(x, [a, b], list(biases), 4, paddings, dilations, "none")

    with forced(SMALL):
        check_values(pyramid(stem_forward), pyramid(plain_stem), *tensors)
        check_gradients(pyramid(stem_forward), pyramid(plain_stem), *tensors)


def test_stem_is_an_operator() -> None:
    x, weight, bias = (random(*shape).requires_grad_() for shape in ((1, 6, 6, 3), (4, 3, 3, 3), (4,)))
    with forced(SMALL):
        torch.library.opcheck(torch.ops.weft.stem.default, (x, [weight], [bias], 2, [1], [1], "none"))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, deadline=None)
@given(shape=st.tuples(st.integers(1, 2), st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 8, 20])))
def test_max_pool(stride: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtype)
    with forced(dict(BLOCK=16, BLOCK_C=16)):
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
    torch.library.opcheck(torch.ops.weft.max_pool.default, (random(1, 5, 5, 2).requires_grad_(), 2, True))


def test_plain_operators_agree_with_the_kernels() -> None:
    """What runs where Triton is missing: the operator's own forward and backward pass."""
    from weft.kernels.pool import _plain, _plain_backward

    x, grad = random(2, 5, 6, 3), random(2, 3, 3, 3, seed=1)
    y, place = _plain(x, 2, True)
    found, found_place = max_pool_forward(x, 2, True)
    assert torch.equal(y, found)
    assert torch.equal(place, found_place)
    close(_plain_backward(grad, place, 5, 6, 2), max_pool_backward(grad, place, 5, 6, 2), 1e-6, "gradient")
