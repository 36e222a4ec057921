"""The convolutional projection of CvT and LEWin: queries, keys and values by three depth-wise convolutions of a map."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.kernels.case import Case
from weft.kernels.depthwise import KERNELS, plain_depthwise, tiles, wants_gradient
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

Three = tuple[Tensor, Tensor, Tensor]
Parameters = Sequence[Tensor | None] | None
NONE = (None, None, None)


def plain_qkv(
    x: Tensor, cls: Tensor | None, weights: Sequence[Tensor], biases: Parameters, scales: Parameters,
    shifts: Parameters, stride: int,
) -> Three:  # fmt: skip
    """The twin."""
    strides = (1, stride, stride)
    filters = zip(weights, biases or NONE, scales or NONE, shifts or NONE, strides, strict=True)
    q, k, v = (
        plain_depthwise(x, weight, bias, scale, shift, step, "none", "none").flatten(1, 2)
        for weight, bias, scale, shift, step in filters
    )
    return _join(cls, q, k, v)


def _join(cls: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Three:
    if cls is None:
        return q, k, v
    cls = cls.to(q.dtype)
    return torch.cat([cls, q], dim=1), torch.cat([cls, k], dim=1), torch.cat([cls, v], dim=1)


def _plain(x: Tensor, cls: Tensor | None, *rest: Any) -> Three:
    q, k, v = plain_qkv(x, cls, rest[:3], rest[3:6], rest[6:9], rest[9:12], rest[12])
    return q.contiguous(), k.contiguous(), v.contiguous()


def _plain_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor,
    bias: Tensor | None, has_cls: bool, stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, of the class token, and of weights and biases stacked; empty ones where there are none.

    `bias` is any one of the three: all that counts are its shape and type.
    """
    first = 1 if has_cls else 0
    with torch.enable_grad():
        x, *weights = (t.detach().requires_grad_() for t in (x, wq, wk, wv))
        outputs = plain_qkv(x, None, weights, None, None, None, stride)
        grads = (grad_q, grad_k, grad_v)
        grad_x, *grad_weights = torch.autograd.grad(outputs, (x, *weights), [grad[:, first:] for grad in grads])
    grad_cls = grad_q[:, :1] + grad_k[:, :1] + grad_v[:, :1] if has_cls else x.new_empty(0)
    grad_bias = x.new_empty(0)
    if bias is not None:
        grad_bias = torch.stack([grad[:, first:].sum((0, 1)) for grad in grads]).to(bias.dtype)
    return grad_x.contiguous(), grad_cls.to(x.dtype), torch.stack(grad_weights), grad_bias


def _launch(x: Tensor, cls: Tensor | None, *rest: Any) -> Three:
    from weft.kernels.gpu import qkv

    return qkv.forward(x, cls, list(rest[:3]), list(rest[3:-1]), rest[-1])


def _launch_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from weft.kernels.gpu import qkv

    return qkv.backward(list(args[:3]), args[3], list(args[4:7]), *args[7:])


def _fake(x: Tensor, cls: Tensor | None, *rest: Any) -> Three:
    batch, height, width, channels = x.shape
    stride, first = rest[-1], 0 if cls is None else 1
    reduced = ((height + stride - 1) // stride) * ((width + stride - 1) // stride)
    q, k, v = (
        torch.empty(batch, first + size, channels, dtype=x.dtype, device=x.device)
        for size in (height * width, reduced, reduced)
    )
    return q, k, v


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, x, weight, _, _, bias, has_cls, _ = args
    grad_cls = x.new_empty(x.shape[0], 1, x.shape[3]) if has_cls else x.new_empty(0)
    grad_bias = x.new_empty(0) if bias is None else bias.new_empty(3, *bias.shape)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), grad_cls, weight.new_empty(3, *weight.shape), grad_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    x, cls, wq, wk, wv, bias, _, _, *scales_and_shifts, ctx.stride = inputs
    assert scales_and_shifts == [None] * 6, "the gradient of scales is not this operator's"
    ctx.save_for_backward(x, wq, wk, wv, bias)
    ctx.cls_type = None if cls is None else cls.dtype


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # checkpointing gives them once
    bias, has_cls = saved[-1], ctx.cls_type is not None
    grad_x, grad_cls, grad_weight, grad_bias = qkv_backward(*grads, *saved, has_cls, ctx.stride)
    return (
        grad_x,
        grad_cls.to(ctx.cls_type) if has_cls else None,
        *grad_weight.unbind(0),
        *((None,) * 3 if bias is None else grad_bias.unbind(0)),
        *(None,) * 7,  # there are no scales and shifts
    )


qkv_backward = define(
    "qkv_depthwise_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor x, Tensor wq, Tensor wk, Tensor wv,"
    " Tensor? bias, bool has_cls, int stride) -> (Tensor, Tensor, Tensor, Tensor)",
    _plain_backward,
    _launch_backward,
    _fake_backward,
)
qkv_forward = define(
    "qkv_depthwise(Tensor x, Tensor? cls, Tensor wq, Tensor wk, Tensor wv, Tensor? bq, Tensor? bk, Tensor? bv,"
    " Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, Tensor? shift_q, Tensor? shift_k, Tensor? shift_v, int stride)"
    " -> (Tensor, Tensor, Tensor)",
    _plain,
    _launch,
    _fake,
    _setup,
    _backward,
)


def with_kernels(
    x: Tensor, cls: Tensor | None, weights: Parameters, biases: Parameters, scales: Parameters, shifts: Parameters,
    stride: int,
) -> Three:  # fmt: skip
    """One kernel where no gradient is asked for; where one is, scales and shifts are steps of their own."""
    filters, affine = (*(weights or NONE), *(biases or NONE)), (*(scales or NONE), *(shifts or NONE))
    if scales is None or shifts is None or not wants_gradient(x, cls, *filters, *affine):
        return qkv_forward(x, cls, *filters, *affine, stride)
    maps = qkv_forward(x, None, *filters, *NONE, *NONE, stride)
    q, k, v = (
        y if a is None or b is None else y * a.to(y.dtype) + b.to(y.dtype)
        for y, a, b in zip(maps, scales, shifts, strict=True)
    )
    return _join(cls, q, k, v)


def qkv_depthwise(
    x: Tensor,
    cls: Tensor | None,
    weights: Sequence[Tensor],
    biases: Parameters = None,
    scales: Parameters = None,
    shifts: Parameters = None,
    stride: int = 1,
) -> Three:
    """Queries (B, [1 +] H*W, C), keys and values (B, [1 +] h*w, C) of a (B, H, W, C) map; scale * conv(x) + shift each.

    Args:
        cls: (B, 1, C), becomes the first of all three, or None.
        weights, biases: three of (C, 1, K, K) and of (C,), as depth-wise nn.Conv2d have them.
        scales, shifts: three of (C,) each, BatchNorms with fixed statistics.
        stride: of keys and values; that of the queries is 1.
    """
    if not usable(x) or weights[0].shape[-1] not in KERNELS:
        return plain_qkv(x, cls, weights, biases, scales, shifts, stride)
    return with_kernels(x.to(amp_dtype(x)), cls, weights, biases, scales, shifts, stride)


# Measurement --------------------------------------------------------------------------------------------------------

SHAPES = (  # side of the map, channels, stride, class token
    *((56, 64, 2, False), (28, 192, 2, False), (14, 384, 2, True)),  # CvT-13
    *((56, 64, 1, False), (28, 128, 1, False), (14, 256, 1, False), (7, 512, 1, False)),  # CETNet-T
)
# rows and columns of a tile, channels of a lane, warps, rows written out
FORWARD = ((14, 14, 1, 1, 1), (14, 7, 1, 1, 1), (14, 7, 1, 1, 2), (14, 7, 2, 1, 1), (7, 7, 1, 2, 1), (14, 4, 2, 1, 1))
BACKWARD = ((14, 14, 1, 1, 1), (14, 7, 1, 1, 1), (14, 7, 1, 1, 2), (7, 7, 1, 1, 1), (14, 4, 1, 1, 1), (14, 4, 2, 1, 1))


def _inputs(batch: int, side: int, channels: int, has_cls: bool, device: torch.device) -> tuple[Any, ...]:
    x = torch.randn(batch, side, side, channels, device=device, dtype=torch.bfloat16)
    cls = torch.randn_like(x[:, 0, :1]) if has_cls else None
    return x, cls, *(torch.randn(channels, 1, 3, 3, device=device) / 3 for _ in range(3))


def _backward_inputs(batch: int, side: int, channels: int, has_cls: bool, stride: int, device: torch.device) -> Any:
    x, cls, *weights = _inputs(batch, side, channels, has_cls, device)
    grads = [torch.randn_like(y) for y in _fake(x, cls, stride)]
    return *grads, x, *weights, None, has_cls, stride


def _forward_case(side: int, channels: int, stride: int, has_cls: bool) -> Case:
    size = side * side * channels * 2
    return Case(
        "qkv_depthwise",
        dict(height=side, width=side, channels=channels, kernel=3, stride=stride),
        partial(_inputs, 256, side, channels, has_cls),
        lambda *given: qkv_forward(*given, *(None,) * 9, stride),
        lambda *given: _plain(*given, *(None,) * 9, stride),
        256 * (2 * size + 2 * size // stride**2),
        candidates=tiles(*FORWARD, width=side // stride),
    )


def _backward_case(side: int, channels: int, stride: int, has_cls: bool) -> Case:
    size = side * side * channels * 2
    return Case(
        "qkv_depthwise_backward",
        dict(height=side, width=side, channels=channels, kernel=3, stride=stride),
        partial(_backward_inputs, 128, side, channels, has_cls, stride),
        qkv_backward,
        _plain_backward,
        128 * (3 * size + 2 * size // stride**2),
        candidates=tiles(*BACKWARD, width=side // stride),
    )


def cases() -> list[Case]:
    return [make(*shape) for shape in SHAPES for make in (_forward_case, _backward_case)]
