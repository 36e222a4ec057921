"""Depth-wise convolution and the convolutional projection: the kernels against their twins, in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from weft.kernels import depthwise, qkv
from weft.kernels.choose import forced

SIZES = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))  # B, H, W, C
TILES = st.fixed_dictionaries(
    dict(rows=st.integers(1, 3), cols=st.integers(1, 3), block_c=st.sampled_from([4, 8]), unroll=st.integers(1, 2))
)
STRIDES = st.integers(1, 2)
TYPES = st.sampled_from(DTYPES)


def convolution(of: Callable[..., Tensor], stride: int = 1, act_in: str = "none", act: str = "none") -> Any:
    """`of` as a function of x, weight, bias, scale and shift, where those left out are None."""
    return lambda *tensors: of(*tensors, *(None,) * (5 - len(tensors)), stride, act_in, act)


def parameters(channels: int, kernel: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weight, bias, scale and shift."""
    vectors = [random(channels, dtype=dtype, seed=i) for i in range(3)]
    return [random(channels, 1, kernel, kernel, dtype=dtype), *vectors]


def check_depthwise(x: Tensor, given: list[Tensor], **how: Any) -> None:
    kernel, twin = convolution(depthwise.with_kernels, **how), convolution(depthwise.plain_depthwise, **how)
    check_gradients(kernel, twin, x, *given)


@settings(max_examples=6)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, act=st.sampled_from(["none", "relu", "quick_gelu"]))
def test_depthwise(size: Any, tile: Any, stride: int, dtype: torch.dtype, act: str) -> None:
    kernel = convolution(depthwise.with_kernels, stride, "relu", act)
    twin = convolution(depthwise.plain_depthwise, stride, "relu", act)
    with forced(tile), torch.no_grad():
        check_values(kernel, twin, random(*size, dtype=dtype), *parameters(size[-1]))


@settings(max_examples=6)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, biased=st.booleans())
def test_depthwise_gradients(size: Any, tile: Any, stride: int, dtype: torch.dtype, biased: bool) -> None:
    with forced(tile):
        check_depthwise(random(*size, dtype=dtype), parameters(size[-1], 3, dtype)[: 1 + biased], stride=stride)


@pytest.mark.parametrize(("kernel", "stride"), [(5, 2), (7, 1)])
def test_larger_kernels(kernel: int, stride: int) -> None:
    with forced(dict(rows=2, cols=2)):
        check_depthwise(random(1, 3, 2, 3), parameters(3, kernel)[:2], stride=stride)


def test_gradients_through_activations_and_scale() -> None:
    with forced(dict(rows=2, cols=3)):
        weight, bias, scale, shift = parameters(3)
        kernel, twin = (
            lambda x, weight, bias, of=of: of(x, weight, bias, scale.to(x), shift.to(x), 1, "gelu", "silu")
            for of in (depthwise.with_kernels, depthwise.plain_depthwise)
        )
        check_gradients(kernel, twin, random(1, 2, 3, 3), weight, bias)


def test_a_map_among_tokens_is_read_in_place() -> None:
    """As it comes from joined tokens; the gradient comes back through such a view as well."""

    def among_tokens(of: Callable[..., Tensor]) -> Any:
        def run(tokens: Tensor, weight: Tensor) -> Tensor:
            y = convolution(of)(tokens[:, 1:].view(2, 2, 3, 4), weight)
            return torch.cat([tokens[:, :1], y.flatten(1, 2)], dim=1)

        return run

    with forced(dict(rows=2, cols=3)):
        tokens = random(2, 7, 4)
        kernel, twin = among_tokens(depthwise.with_kernels), among_tokens(depthwise.plain_depthwise)
        check_gradients(kernel, twin, tokens, parameters(4)[0])


def test_parameters_keep_their_type() -> None:
    """Under autocast maps are in half precision and parameters in float32."""
    x, (weight, bias, _, _) = random(1, 2, 2, 3, dtype=torch.bfloat16).requires_grad_(), parameters(3)
    with forced(dict(rows=2, cols=2)):
        y = convolution(depthwise.with_kernels)(x, weight.requires_grad_(), bias.requires_grad_())
        y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


def projection(of: Callable[..., Any], stride: int, cls: bool) -> Any:
    """`of` as a function of x, the class token if there is one, three weights, and biases, scales, shifts if any."""

    def run(x: Tensor, *rest: Tensor) -> Any:
        token, rest = (rest[0], rest[1:]) if cls else (None, rest)
        threes = [list(rest[i : i + 3]) or None for i in (0, 3, 6, 9)]
        return of(x, token, *threes, stride)

    return run


def three_of_each(channels: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    weights = [random(channels, 1, 3, 3, dtype=dtype, seed=i) for i in range(3)]
    return weights + [random(channels, dtype=dtype, seed=i) for i in range(9)]


def with_class_token(size: Any, cls: bool, dtype: torch.dtype) -> list[Tensor]:
    return [random(*size, dtype=dtype)] + [random(size[0], 1, size[-1], dtype=dtype)] * cls


@settings(max_examples=4)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, cls=st.booleans())
def test_qkv(size: Any, tile: Any, stride: int, dtype: torch.dtype, cls: bool) -> None:
    kernel, twin = projection(qkv.with_kernels, stride, cls), projection(qkv.plain_qkv, stride, cls)
    with forced(tile), torch.no_grad():
        check_values(kernel, twin, *with_class_token(size, cls, dtype), *three_of_each(size[-1]))


@settings(max_examples=4)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, cls=st.booleans(), biased=st.booleans())
def test_qkv_gradients(size: Any, tile: Any, stride: int, dtype: torch.dtype, cls: bool, biased: bool) -> None:
    kernel, twin = projection(qkv.with_kernels, stride, cls), projection(qkv.plain_qkv, stride, cls)
    with forced(tile):
        given = three_of_each(size[-1], dtype)[: 6 if biased else 3]
        check_gradients(kernel, twin, *with_class_token(size, cls, dtype), *given)


@pytest.mark.parametrize("cls", [False, True])
def test_they_are_operators(cls: bool) -> None:
    x, weight, bias = random(1, 2, 3, 2).requires_grad_(), random(2, 1, 3, 3), random(2).requires_grad_()
    token = random(1, 1, 2).requires_grad_() if cls else None
    with forced(dict(rows=2, cols=3, block_c=4)):
        if cls:
            given = (x, weight, bias, None, None, 2, "none", "none")
            torch.library.opcheck(torch.ops.weft.depthwise.default, given)
        given = (x, token, weight, weight, weight, *((bias,) * 3 if cls else (None,) * 3), *(None,) * 6, 1)
        torch.library.opcheck(torch.ops.weft.qkv_depthwise.default, given)
