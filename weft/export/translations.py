"""Operations that torch's ONNX exporter has no translation of, or one that is not right for all numbers.

Imports onnxscript, in whose words they are written.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset20

from weft.export.suppress import suppress_by_name  # noqa: F401  which makes the operation torch.ops.weft.suppress

op: Any = opset20  # whose types know nothing of the constants that it takes
MOST = 2**31 - 1  # boxes that stay in a group
LEAST_SCORE = -3e38  # any number that is a score is larger


def floor_division(self: Any, other: Any) -> Any:
    """Of sizes: the exporter's own rounds towards 0, and -7 // 4 is how a size is rounded up."""
    return op.Div(op.Sub(self, op.Mod(self, other)), other)


def remainder(self: Any, other: Any) -> Any:
    """By a number that depends on the size."""
    return op.Mod(self, op.CastLike(other, self))


def suppression(boxes: Any, scores: Any, threshold: float) -> Any:
    most, least = op.Constant(value_ints=[MOST]), op.Constant(value_floats=[LEAST_SCORE])
    overlap = op.Constant(value_floats=[threshold])
    chosen = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [1]), most, overlap, least)  # group, 0, place
    places = op.Gather(chosen, [0, 2], axis=1)
    ones = op.Squeeze(op.CastLike(op.Slice(places, [0], [1], [1]) * 0 + 1, scores), [1])
    return op.Greater(op.ScatterND(op.CastLike(op.IsNaN(scores), scores), places, ones), 0.5)


def attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Of any number of axes in front: windows have one more than the four that the exporter's own takes."""
    if causal or enable_gqa:
        raise NotImplementedError("attention that is causal or shares its keys among heads")
    axes = len(key.shape)
    turned = op.Transpose(key, perm=[*range(axes - 2), axes - 1, axes - 2])
    factor = op.Constant(value_float=scale or query.shape[-1] ** -0.5)
    scores = op.MatMul(op.Mul(query, op.CastLike(factor, query)), turned)
    if mask is not None and mask.type.dtype.name == "BOOL":
        mask = op.Where(mask, op.CastLike(0.0, scores), op.CastLike(float("-inf"), scores))
    return op.MatMul(op.Softmax(scores if mask is None else op.Add(scores, mask), axis=-1), value)


def adaptive_mean(x: Any, bins: Any) -> Any:
    """By products, for maps of any size: the exporter's own holds for those that divide as the example does."""
    if all(count == 1 for count in bins):
        return op.ReduceMean(x, [-2, -1], keepdims=1)
    rows, columns = (parts(x, axis, count) for axis, count in zip((-2, -1), bins, strict=True))
    return op.MatMul(op.MatMul(rows, x), op.Transpose(columns, perm=[1, 0]))


def parts(x: Any, axis: int, count: int) -> Any:
    """(count, n): for each part of an axis of length n, the weights of its places in the mean."""
    shape, last = op.Shape(x), op.Constant(value_ints=[count])
    n = op.Gather(shape, op.Constant(value_ints=[axis]), axis=0)
    begin = op.Div(op.Mul(op.Constant(value_ints=[*range(count)]), n), last)
    beyond = op.Mul(op.Constant(value_ints=[*range(1, count + 1)]), n)
    end = op.Div(op.Add(beyond, op.Constant(value_ints=[count - 1])), last)
    places = op.Unsqueeze(op.Range(op.Constant(value_int=0), op.Squeeze(n, [0]), op.Constant(value_int=1)), [0])
    after, before = op.Less(places, op.Unsqueeze(begin, [1])), op.Less(places, op.Unsqueeze(end, [1]))
    inside = op.CastLike(op.And(op.Not(after), before), x)
    return op.Div(inside, op.ReduceSum(inside, [1], keepdims=1))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.adaptive_avg_pool2d.default: adaptive_mean,
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    operator.floordiv: floor_division,
    torch.ops.aten.remainder.Scalar: remainder,
    torch.ops.weft.suppress.default: suppression,
}
