"""Depth-wise convolution of act(bn(x)), which is never stored: not on the way there, and not for the way back.

LeFF's map between the two is four times as wide as its tokens. Both passes of the convolution read x in its place, and
make it again from the statistics of the batch as they read.
"""

from typing import Any

from torch import Tensor

from weft.kernels.ops import depthwise
from weft.kernels.ops.batch_norm import batch_norm_act_backward, reference_norm_act
from weft.kernels.ops.op import define


def reference_norm_depthwise(
    x: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, eps: float, act: str,
    weight: Tensor, bias: Tensor | None, stride: int,
) -> Tensor:  # fmt: skip
    """The convolution of act(bn(x)). `moments`, (2, C), are those of this batch, through which x has a gradient."""
    x = reference_norm_act(x, moments, None, gamma, beta, None, None, eps, act)
    return depthwise.reference_depthwise(x, weight, bias, None, None, stride, "none", "none")


def _reference_backward(
    grad: Tensor, x: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, eps: float, act: str,
    weight: Tensor, bias: Tensor | None, stride: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of act(bn(x)), weight and, where there is one, bias."""
    x = reference_norm_act(x, moments, None, gamma, beta, None, None, eps, act)
    return depthwise.reference_backward(grad, x, weight, bias, stride)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, moments, gamma, beta, ctx.eps, ctx.act, weight, bias, ctx.stride = inputs
    ctx.save_for_backward(x, moments, gamma, beta, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, moments, gamma, beta, weight, bias = ctx.saved_tensors
    normed = x, moments, gamma, beta, ctx.eps, ctx.act
    grad_active, grad_weight, grad_bias = norm_depthwise_backward.run(grad, *normed, weight, bias, ctx.stride)
    grad_x, grad_gamma, grad_beta, *_ = batch_norm_act_backward.run(
        grad_active, x, moments, None, gamma, beta, None, None, ctx.eps, ctx.act, False
    )
    return grad_x, None, grad_gamma, grad_beta, None, None, grad_weight, grad_bias, None


norm_depthwise_backward = define("norm_depthwise_backward", _reference_backward, "depthwise.norm_backward")
norm_depthwise = define(
    "norm_depthwise", reference_norm_depthwise, "depthwise.norm_forward", setup=_setup, backward=_backward
)
