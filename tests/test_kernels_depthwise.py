"""Depth-wise convolution and the convolutional projection: the kernels against their twins, in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DTYPES, check_gradients, check_values, close, random
from tests.lost_kernels import QUICK_CHECKS, check_promise, lose
from weft.kernels import depthwise, qkv
from weft.kernels.choose import forced

SIZES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))  # B, H, W, C
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


@settings(max_examples=4)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, act=st.sampled_from(["none", "relu", "quick_gelu"]))
def test_depthwise(size: Any, tile: Any, stride: int, dtype: torch.dtype, act: str) -> None:
    kernel = convolution(depthwise.with_kernels, stride, "relu", act)
    twin = convolution(depthwise.plain_depthwise, stride, "relu", act)
    with forced(tile), torch.no_grad():
        check_values(kernel, twin, random(*size, dtype=dtype), *parameters(size[-1]))


@settings(max_examples=3)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, biased=st.booleans())
def test_depthwise_gradients(size: Any, tile: Any, stride: int, dtype: torch.dtype, biased: bool) -> None:
    with forced(tile):
        check_depthwise(random(*size, dtype=dtype), parameters(size[-1], 3, dtype)[: 1 + biased], stride=stride)


@pytest.mark.parametrize(("kernel", "stride"), [(5, 2), (7, 1)])
def test_larger_kernels(kernel: int, stride: int) -> None:
    with forced(dict(rows=2, cols=2)):
        check_depthwise(random(1, 2, 2, 3), parameters(3, kernel)[:2], stride=stride)


def test_gradients_through_activations_and_scale() -> None:
    with forced(dict(rows=2, cols=3)):
        check_depthwise(random(1, 2, 3, 3), parameters(3), act_in="gelu", act="silu")


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


@settings(max_examples=3)
@given(size=SIZES, tile=TILES, stride=STRIDES, dtype=TYPES, cls=st.booleans())
def test_qkv(size: Any, tile: Any, stride: int, dtype: torch.dtype, cls: bool) -> None:
    kernel, twin = projection(qkv.with_kernels, stride, cls), projection(qkv.plain_qkv, stride, cls)
    with forced(tile), torch.no_grad():
        check_values(kernel, twin, *with_class_token(size, cls, dtype), *three_of_each(size[-1]))


@settings(max_examples=2)
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
            torch.library.opcheck(torch.ops.weft.depthwise.default, given, test_utils=QUICK_CHECKS)
        given = (x, token, weight, weight, weight, *((bias,) * 3 if cls else (None,) * 3), *(None,) * 6, 1)
        torch.library.opcheck(torch.ops.weft.qkv_depthwise.default, given, test_utils=QUICK_CHECKS)


def check_alone(kernel: Any, twin: Any, tensors: list[Tensor], trainable: int) -> None:
    """The gradient of one tensor, where no other has any."""
    grads = []
    for of in (kernel, twin):
        given = [t.clone().requires_grad_(i == trainable) for i, t in enumerate(tensors)]
        outputs = of(*given)
        total = sum((y * y).sum() for y in ([outputs] if isinstance(outputs, Tensor) else outputs))
        grads += torch.autograd.grad(total, given[trainable])
    close(*grads, 1e-5, f"gradient of input {trainable}")


@pytest.mark.parametrize("trainable", range(5))
def test_depthwise_with_one_trainable_tensor(trainable: int) -> None:
    """As with a BatchNorm in eval mode of which only the bias is trained."""
    kernel, twin = convolution(depthwise.with_kernels), convolution(depthwise.plain_depthwise)
    with forced(dict(rows=2, cols=2)):
        check_alone(kernel, twin, [random(1, 2, 2, 3), *parameters(3)], trainable)


@pytest.mark.parametrize("trainable", [0, 1, 3, 7, 8, 13])  # map, class token, weight, bias, scale, shift
def test_scaled_qkv_with_one_trainable_tensor(trainable: int) -> None:
    kernel, twin = projection(qkv.with_kernels, 1, True), projection(qkv.plain_qkv, 1, True)
    with forced(dict(rows=2, cols=2)):
        check_alone(kernel, twin, [*with_class_token((1, 2, 2, 3), True, torch.float32), *three_of_each(3)], trainable)


@pytest.mark.parametrize("lost", ["", "_backward"])
def test_twin_beside_kernel(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by the one, backward by the other, with maps in half precision and parameters in float32."""
    lose(monkeypatch, f"depthwise{lost}", f"qkv_depthwise{lost}", rows=2, cols=2)
    x, cls = with_class_token((1, 2, 2, 3), True, torch.bfloat16)
    three = three_of_each(3)
    check_depthwise(x, three[:1] + three[3:4])
    check_gradients(projection(qkv.with_kernels, 1, True), projection(qkv.plain_qkv, 1, True), x, cls, *three[:6])


def test_twins_keep_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "depthwise", "depthwise_backward", "qkv_depthwise", "qkv_depthwise_backward")
    x, cls = with_class_token((1, 2, 2, 3), True, torch.bfloat16)
    three, tokens = three_of_each(3), random(1, 5, 3, dtype=torch.bfloat16)
    check_promise("depthwise", x, *three[2:6], 1, "gelu", "silu")
    check_promise("depthwise_backward", x, x, *three[2:4], 1)
    check_promise("qkv_depthwise", x, cls, *three, 1)
    check_promise("qkv_depthwise_backward", tokens, tokens, tokens, x, *three[:4], True, 1)
