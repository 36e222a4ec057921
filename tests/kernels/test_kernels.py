"""Every kernel against its reference in float64 at any shape, in Triton's interpreter and, where one is, on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.kernel_checks import DTYPES, by, check_gradients, check_values, random
from weft.fast.tape.tape import run_as_one_node
from weft.kernels.ops.activation import KINDS, activation_forward, reference_activation
from weft.kernels.ops.attention import attention_forward
from weft.kernels.ops.batch_norm import batch_norm_act_forward, batch_norm_statistics, norm_behind_token
from weft.kernels.ops.conv_act import conv_act_forward
from weft.kernels.ops.depthwise import depthwise_forward, reference_depthwise
from weft.kernels.ops.grouped import grouped_conv_forward
from weft.kernels.ops.layer_norm import residual_norm_forward
from weft.kernels.ops.linear_act import linear_act_forward
from weft.kernels.ops.norm_depthwise import norm_depthwise
from weft.kernels.ops.performer import performer_forward, reference_performer
from weft.kernels.ops.pool import max_pool_forward, reference_max_pool
from weft.kernels.ops.qkv import qkv_forward
from weft.kernels.ops.residual import add_branch_forward
from weft.kernels.ops.stem import stem_forward
from weft.kernels.ops.token_attention import pixels_to_tokens_forward, tokens_to_pixels_forward
from weft.kernels.ops.window_attention import window_attention
from weft.kernels.tuning.launches import forced

pytestmark = pytest.mark.filterwarnings("error:The kernel")  # that it does not run here, and its reference did


@dataclass
class Try:
    """Two functions of the same tensors."""

    tensors: list[Tensor | None]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]


def of(operation: Any, tensors: list[Tensor | None], *rest: Any) -> Try:
    return Try(tensors, by(operation, *rest), lambda *t: operation.reference(*t, *rest))


def side(draw: Any) -> int:
    return draw(st.integers(1, 4))


def maps(draw: Any, channels: Any, dtype: torch.dtype) -> Tensor:
    return random(draw(st.integers(1, 2)), side(draw), side(draw), draw(channels), dtype=dtype)


def maybe(draw: Any, value: Tensor) -> Tensor | None:
    return value if draw(st.booleans()) else None


def activation(draw: Any, dtype: torch.dtype) -> Try:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return of(activation_forward, [3 * random(*shape, dtype=dtype)], draw(st.sampled_from(KINDS)))


def attention(draw: Any, dtype: torch.dtype) -> Try:
    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([16, 32]))
    queries, keys = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    q, k, v = (random(2, length, heads * width, dtype=dtype, seed=i) for i, length in enumerate((queries, keys, keys)))
    return of(attention_forward, [q, k, v], heads, width**-0.5)


def conv_act(draw: Any, dtype: torch.dtype) -> Try:
    x, features = maps(draw, st.integers(1, 20), dtype), draw(st.integers(1, 20))
    kernel, stride = draw(st.sampled_from([1, 3, 5])), draw(st.integers(1, 2))
    small = [(n - 1) // stride + 1 for n in x.shape[1:3]]
    shortcut = maybe(draw, random(len(x), *small, features, dtype=dtype))
    weight = random(features, x.shape[3], kernel, kernel, dtype=dtype)
    act = draw(st.sampled_from(KINDS))
    return of(conv_act_forward, [x, weight, random(features), shortcut], stride, kernel // 2, 1, act)


def linear_act(draw: Any, dtype: torch.dtype) -> Try:
    shape, channels, features = draw(st.sampled_from([(1,), (17,), (2, 3, 5), (0,)])), side(draw) * 9, side(draw) * 11
    weight = random(features, channels, dtype=dtype)
    weight = weight.t().contiguous().t() if draw(st.booleans()) else weight
    tensors: list[Tensor | None] = [random(*shape, channels, dtype=dtype), weight, random(features, dtype=dtype)]
    return of(linear_act_forward, tensors, draw(st.sampled_from(KINDS)), draw(st.booleans()))


def residual_norm(draw: Any, dtype: torch.dtype) -> Try:
    x, joined = maps(draw, st.sampled_from([16, 24, 65]), dtype), draw(st.booleans())
    batch, height, width, channels = x.shape
    cls = maybe(draw, random(batch, 1, channels, dtype=dtype))
    y = maybe(draw, random(batch, height * width + (cls is not None), channels, dtype=dtype, seed=1))
    keep = None if y is None else maybe(draw, random(batch))

    def run(norm: Callable[..., Any], x: Tensor, cls: Any, y: Any, weight: Tensor, bias: Tensor) -> Any:
        factors = None if keep is None else keep.to(weight.dtype)
        return norm(x, cls, y, factors, weight, bias, 1e-5, x.dtype, joined)

    def kernel(*tensors: Tensor | None) -> Any:
        rest = 1e-5, x.dtype, joined
        return by(residual_norm_forward, *rest)(*tensors[:3], keep, *tensors[3:])

    tensors = [x, cls, y, random(channels, seed=2), random(channels, seed=3)]
    return Try(tensors, kernel, lambda *t: run(residual_norm_forward.reference, *t))


def add_branch(draw: Any, dtype: torch.dtype) -> Try:
    x, joined = maps(draw, st.integers(1, 40), dtype), draw(st.booleans())
    batch, height, width, channels = x.shape
    cls = maybe(draw, random(batch, 1, channels, dtype=dtype, seed=1))
    y_cls = None if joined or cls is None else random(batch, 1, channels, dtype=dtype, seed=3)
    tokens = random(batch, height * width + (cls is not None), channels, dtype=dtype, seed=2)
    keep = maybe(draw, random(batch))
    tensors = [x, cls, tokens if joined else random(*x.shape, dtype=dtype, seed=4), y_cls]
    reference = add_branch_forward.reference
    wide = None if keep is None else keep.double()
    return Try(tensors, lambda *t: by(add_branch_forward)(*t, keep), lambda *t: reference(*t, wide))


def norm_by_torch(x: Tensor, mean: Any, var: Any, weight: Tensor, bias: Tensor) -> Tensor:
    """Of the batch, where there is no mean."""
    y = F.batch_norm(x.permute(0, 3, 1, 2), mean, var, weight, bias, mean is None, 0.1, 1e-5)
    return y.permute(0, 2, 3, 1)


def moments(x: Tensor) -> Tensor:
    return batch_norm_statistics.run(x.detach(), None, None, None, 0.1)


def batch_norm(draw: Any, dtype: torch.dtype) -> Try:
    x = random(2, side(draw), 5, draw(st.sampled_from([3, 16, 40])), dtype=dtype)
    channels, act = x.shape[3], draw(st.sampled_from(["none", "gelu", "relu"]))
    residual, keep = maybe(draw, random(*x.shape, dtype=dtype, seed=1)), maybe(draw, random(2, seed=2))
    mean = maybe(draw, random(channels, seed=5))
    var = None if mean is None else random(channels, seed=6).abs() + 0.5

    def kernel(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        centre = moments(x) if mean is None else mean
        return by(batch_norm_act_forward, 1e-5, act)(x, centre, var, weight, bias, residual, keep)

    def reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        fixed = (None, None) if mean is None or var is None else (mean.double(), var.double())
        y = norm_by_torch(x, *fixed, weight, bias)
        y = y if keep is None else y * keep.double().view(-1, 1, 1, 1)
        return reference_activation(y if residual is None else y + residual, act)

    return Try([x, random(channels, seed=3), random(channels, seed=4), residual], kernel, reference)


def norm_behind(draw: Any, dtype: torch.dtype) -> Try:
    """Of a map, or of its tokens, and back: gradients lie behind that of the class token."""
    x = random(draw(st.integers(1, 3)), side(draw), 5, draw(st.sampled_from([3, 16, 40])), dtype=dtype)
    channels, flat = x.shape[3], draw(st.booleans())
    mean = maybe(draw, random(channels, seed=5))
    var = None if mean is None else random(channels, seed=6).abs() + 0.5

    def kernel(x: Tensor, cls: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x.flatten(1, 2) if flat else x
        return by(norm_behind_token, 1e-5)(x, cls, moments(x) if mean is None else mean, var, weight, bias)

    def reference(x: Tensor, cls: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        fixed = (None, None) if mean is None or var is None else (mean.double(), var.double())
        return torch.cat([cls, norm_by_torch(x, *fixed, weight, bias).flatten(1, 2)], dim=1)

    cls = random(len(x), 1, channels, dtype=dtype, seed=1)
    return Try([x, cls, random(channels, seed=3), random(channels, seed=4)], kernel, reference)


def depthwise(draw: Any, dtype: torch.dtype) -> Try:
    x, kernel = maps(draw, st.integers(1, 5), dtype), draw(st.sampled_from([3, 3, 5]))
    weight = random(x.shape[3], 1, kernel, kernel) / kernel
    bias, stride = maybe(draw, random(x.shape[3])), draw(st.integers(1, 2))
    rest = None, None, stride, "none", "none"
    return of(depthwise_forward, [x, weight, bias], *rest)


def folded_depthwise(draw: Any, dtype: torch.dtype) -> Try:
    x = maps(draw, st.integers(1, 5), dtype)
    vectors = [random(x.shape[3], seed=i) for i in range(3)]
    acts = draw(st.sampled_from(["none", "relu"])), draw(st.sampled_from(["none", "relu", "quick_gelu"]))
    return of(depthwise_forward, [x, random(x.shape[3], 1, 3, 3), *vectors], draw(st.integers(1, 2)), *acts)


def normed_depthwise(draw: Any, dtype: torch.dtype) -> Try:
    x = random(2, side(draw), 3, draw(st.integers(1, 8)), dtype=dtype) * 2 + 1
    channels, kernel = x.shape[3], draw(st.sampled_from([3, 3, 5]))
    act, stride = draw(st.sampled_from(["none", "gelu"])), draw(st.integers(1, 2))
    bias = maybe(draw, random(channels, seed=3))

    def run(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        def steps(t: Any, x: Any, gamma: Any, beta: Any, weight: Any, bias: Any) -> Any:
            return t(norm_depthwise, x, moments(x.value), gamma, beta, 1e-5, act, weight, bias, stride)

        return run_as_one_node(steps, x, gamma, beta, weight, bias)

    def reference(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = reference_activation(norm_by_torch(x, None, None, gamma, beta), act)
        return reference_depthwise(y, weight, bias, None, None, stride, "none", "none")

    weight = random(channels, 1, kernel, kernel) / kernel
    return Try([x, random(channels, seed=1), random(channels, seed=2), weight, bias], run, reference)


def qkv(draw: Any, dtype: torch.dtype) -> Try:
    x, stride = maps(draw, st.integers(1, 5), dtype), draw(st.integers(1, 2))
    channels = x.shape[3]
    cls = maybe(draw, random(len(x), 1, channels, dtype=dtype))
    weights = [random(channels, 1, 3, 3, seed=i) for i in range(3)]
    biases = [random(channels, seed=i) for i in range(3)] if draw(st.booleans()) else [None] * 3
    return of(qkv_forward, [x, cls, *weights, *biases], *(None,) * 6, stride)


def folded_qkv(draw: Any, dtype: torch.dtype) -> Try:
    x = maps(draw, st.integers(1, 5), dtype)
    channels = x.shape[3]
    weights = [random(channels, 1, 3, 3, seed=i) for i in range(3)]
    vectors = [random(channels, seed=i) for i in range(9)]
    cls = maybe(draw, random(len(x), 1, channels, dtype=dtype))
    return of(qkv_forward, [x, cls, *weights, *vectors], draw(st.integers(1, 2)))


def grouped(draw: Any, dtype: torch.dtype) -> Try:
    groups, inner, outer = side(draw), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    x = random(2, side(draw), side(draw), groups * inner, dtype=dtype)
    weight, bias = random(groups * outer, inner, 3, 3) / (3 * inner**0.5), maybe(draw, random(groups * outer))
    return of(grouped_conv_forward, [x, weight, bias], groups, draw(st.sampled_from(["none", "gelu", "silu"])))


def performer(draw: Any, dtype: torch.dtype) -> Try:
    tokens, channels = draw(st.integers(1, 24)), draw(st.integers(2, 24))
    kqv = draw(st.sampled_from([0.1, 0.5, 1.0])) * random(2, tokens, 3 * channels, dtype=dtype)
    features = max(channels // 2, 1)
    w = torch.linalg.qr(random(channels, features))[0].t().contiguous() * features**0.5
    kernel = by(performer_forward, w)
    return Try([kqv], lambda kqv: kernel(kqv)[:2], lambda kqv: reference_performer(kqv, w.to(kqv.dtype)))


def max_pool(draw: Any, dtype: torch.dtype) -> Try:
    x, stride = maps(draw, st.sampled_from([1, 8, 20]), dtype), draw(st.integers(1, 2))
    return Try([x], lambda x: by(max_pool_forward, stride, True)(x)[0], lambda x: reference_max_pool(x, stride))


def stem(draw: Any, dtype: torch.dtype) -> Try:
    # kernel, stride, padding, dilation: of CeiT and VT-ResNet, CvT, CETNet, ViTAE; and odd ones
    kernel, *numbers = draw(st.sampled_from([(7, 2, 3, 1), (7, 4, 2, 1), (3, 2, 1, 1), (7, 4, 8, 3), (2, 3, 0, 2)]))
    channels, out = draw(st.sampled_from([1, 3])), draw(st.sampled_from([3, 8]))
    x = random(2, 7 + side(draw), 7 + side(draw), channels, dtype=dtype)
    weight = random(out, channels, kernel, kernel, dtype=dtype)
    return of(stem_forward, [x, weight, maybe(draw, random(out, dtype=dtype))], *numbers, "none")


def pixels_to_tokens(draw: Any, dtype: torch.dtype) -> Try:
    heads, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([3, 16, 20]))
    q = random(heads, 2, tokens, 16, dtype=dtype).transpose(0, 1)
    x = random(2, draw(st.integers(3, 40)), heads * 16, dtype=dtype)
    kernel, reference = by(pixels_to_tokens_forward, 0.3), pixels_to_tokens_forward.reference
    return Try([q, x], lambda *t: kernel(*t)[0], lambda *t: reference(*t, 0.3)[0])


def tokens_to_pixels(draw: Any, dtype: torch.dtype) -> Try:
    heads, tokens, width = draw(st.integers(1, 3)), draw(st.sampled_from([3, 16, 20])), draw(st.sampled_from([16, 32]))
    pixels, keep = draw(st.integers(3, 40)), maybe(draw, random(2))
    tensors = [
        random(2, pixels, heads * width, dtype=dtype),
        random(heads, 2, tokens, width, dtype=dtype).transpose(0, 1),
        maybe(draw, random(heads, 2, tokens, dtype=dtype).transpose(0, 1)),
        random(2, tokens, heads, 16, dtype=dtype).transpose(1, 2),
        random(2, pixels, heads * 16, dtype=dtype),
    ]
    return of(tokens_to_pixels_forward, tensors, keep, 0.3)


def windows(draw: Any, dtype: torch.dtype) -> Try:
    window, heads, dim = draw(st.sampled_from([2, 4, 7])), draw(st.integers(1, 2)), draw(st.sampled_from([8, 24, 32]))
    sides = [draw(st.integers(1, 3 * window // 2)) for _ in range(2)]
    tensors = [*random(3, 2, *sides, heads * dim, dtype=dtype), random((2 * window - 1) ** 2, heads)]
    return of(window_attention, tensors, window, draw(st.booleans()))


@dataclass
class Case:
    make: Callable[[Any, torch.dtype], Try]
    tile: dict[str, Any]  # so small that every kernel has several programs, and every program several tiles
    gradients: bool = True
    factor: float = 2.0  # how many roundings off values may be; gradients twice as many
    cancelling: float = 1.0  # more, where gradients are sums of terms far larger than they are


NORM = dict(elements=128, width=32, per_processor=1, stages=1)
TILE = dict(rows=2, cols=3, block_c=4, unroll=1)
CASES = {
    "activation": Case(activation, {}),
    "attention": Case(attention, {}, gradients=False),
    "conv_act, library": Case(conv_act, dict(how="library"), gradients=False),
    "conv_act, kernel": Case(
        conv_act, dict(how="kernel", BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, num_warps=1, num_stages=1), gradients=False
    ),
    "linear_act": Case(linear_act, dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, num_warps=1), gradients=False),
    "residual_norm": Case(residual_norm, NORM),
    "add_branch": Case(add_branch, {}),
    "batch_norm": Case(batch_norm, NORM),
    "batch_norm behind a token": Case(norm_behind, NORM),
    "depthwise": Case(depthwise, TILE),
    "depthwise, unrolled": Case(depthwise, TILE | dict(cols=1, unroll=2, block_c=8)),
    "depthwise, folded": Case(folded_depthwise, TILE, gradients=False),
    "depthwise of a norm": Case(normed_depthwise, TILE | NORM, cancelling=4.0),
    "qkv": Case(qkv, TILE),
    "qkv, folded": Case(folded_qkv, TILE | dict(cols=2), gradients=False),
    "grouped": Case(grouped, dict(rows=32, chunk=16, block=32)),
    "performer": Case(performer, dict(rows=16), factor=10.0),
    "max_pool": Case(max_pool, dict(BLOCK=32, BLOCK_C=16)),
    "stem": Case(stem, dict(BLOCK_M=16, BLOCK_N=16, num_stages=1)),
    "pixels_to_tokens": Case(pixels_to_tokens, dict(BLOCK=16, num_warps=1)),
    "tokens_to_pixels": Case(tokens_to_pixels, dict(BLOCK=16, num_warps=1)),
    "windows": Case(windows, dict(per_processor=1)),
    "windows, a picture each": Case(windows, dict(per_processor=99)),
}


@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=() if t == torch.float32 else pytest.mark.slow) for t in DTYPES], ids=str
)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])  # shrinking would take minutes
@given(data=st.data())
def test_kernel_equals_reference(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = CASES[name]
    with forced(case.tile):
        it = case.make(data.draw, dtype)
        with torch.no_grad():
            check_values(it.kernel, it.reference, *it.tensors, factor=case.factor)
        if case.gradients:
            check_gradients(it.kernel, it.reference, *it.tensors, factor=2 * case.factor * case.cancelling)
