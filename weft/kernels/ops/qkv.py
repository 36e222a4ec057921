"""The convolutional projection of CvT and LEWin: queries, keys and values by three depth-wise convolutions of a map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.ops.depthwise import reference_depthwise
from weft.kernels.ops.op import define

Three = tuple[Tensor, Tensor, Tensor]
Parameters = Sequence[Tensor | None] | None
NONE = (None, None, None)


def reference_qkv(
    x: Tensor, cls: Tensor | None, weights: Sequence[Tensor], biases: Parameters, scales: Parameters,
    shifts: Parameters, stride: int,
) -> Three:  # fmt: skip
    """Queries at stride 1, keys and values at `stride`, as tokens behind the class token where there is one."""
    strides = (1, stride, stride)
    filters = zip(weights, biases or NONE, scales or NONE, shifts or NONE, strides, strict=True)
    q, k, v = (
        reference_depthwise(x, weight, bias, scale, shift, step, "none", "none").flatten(1, 2)
        for weight, bias, scale, shift, step in filters
    )
    return _join(cls, q, k, v)


def _join(cls: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Three:
    if cls is None:
        return q, k, v
    cls = cls.to(q.dtype)
    return torch.cat([cls, q], dim=1), torch.cat([cls, k], dim=1), torch.cat([cls, v], dim=1)


def _reference(x: Tensor, cls: Tensor | None, *rest: Any) -> Three:
    return reference_qkv(x, cls, rest[:3], rest[3:6], rest[6:9], rest[9:12], rest[12])


def _reference_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor,
    bias: Tensor | None, has_cls: bool, stride: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of x, of the class token, and of weights and biases stacked; None where there are none.

    `bias` is any one of the three: all that counts are its shape and type.
    """
    first = 1 if has_cls else 0
    with torch.enable_grad():
        x, *weights = (t.detach().requires_grad_() for t in (x, wq, wk, wv))
        outputs = reference_qkv(x, None, weights, None, None, None, stride)
        grads = (grad_q, grad_k, grad_v)
        grad_x, *grad_weights = torch.autograd.grad(outputs, (x, *weights), [grad[:, first:] for grad in grads])
    grad_cls = (grad_q[:, :1] + grad_k[:, :1] + grad_v[:, :1]).to(x.dtype) if has_cls else None
    grad_bias = None
    if bias is not None:
        grad_bias = torch.stack([grad[:, first:].sum((0, 1)) for grad in grads]).to(bias.dtype)
    return grad_x, grad_cls, torch.stack(grad_weights), grad_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    x, cls, wq, wk, wv, bias, _, _, *scales_and_shifts, ctx.stride = inputs
    assert scales_and_shifts == [None] * 6, "the gradient of scales is not this operation's"
    ctx.save_for_backward(x, wq, wk, wv, bias)
    ctx.cls_type = None if cls is None else cls.dtype


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # checkpointing gives them once
    bias, has_cls = saved[-1], ctx.cls_type is not None
    grad_x, grad_cls, grad_weight, grad_bias = qkv_backward.run(*grads, *saved, has_cls, ctx.stride)
    return (
        grad_x,
        grad_cls.to(ctx.cls_type) if has_cls else None,
        *grad_weight.unbind(0),
        *((None,) * 3 if bias is None else grad_bias.unbind(0)),
        *(None,) * 7,  # there are no scales and shifts
    )


qkv_backward = define("qkv_depthwise_backward", _reference_backward, "qkv.backward")
qkv_forward = define("qkv_depthwise", _reference, "qkv.forward", setup=_setup, backward=_backward)
