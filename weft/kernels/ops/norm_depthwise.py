"""Depth-wise convolution of act(bn(x)), which is never stored: not on the way there, and not for the way back.

LeFF's map between the two is four times as wide as its tokens. Both passes of the convolution read x in its place, and
make it again from the statistics of the batch as they read.
"""

from typing import Any

from torch import Tensor

from weft.kernels.ops import depthwise
from weft.kernels.ops.batch_norm import batch_norm_act_backward, plain_norm_act
from weft.kernels.ops.op import define


def plain_norm_depthwise(
    x: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, eps: float, act: str,
    weight: Tensor, bias: Tensor | None, stride: int,
) -> Tensor:  # fmt: skip
    """The twin. `moments`, (2, C), are mean and variance of this batch's x, through which x gets a gradient as well."""
    x = plain_norm_act(x, moments, None, gamma, beta, None, None, eps, act)
    return depthwise.plain_depthwise(x, weight, bias, None, None, stride, "none", "none")


def _plain_backward(
    grad: Tensor, x: Tensor, moments: Tensor, gamma: Tensor, beta: Tensor, eps: float, act: str,
    weight: Tensor, bias: Tensor | None, stride: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of act(bn(x)), weight and, where there is one, bias."""
    x = plain_norm_act(x, moments, None, gamma, beta, None, None, eps, act)
    return depthwise.plain_backward(grad, x, weight, bias, stride)


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


norm_depthwise_backward = define("norm_depthwise_backward", _plain_backward, "depthwise.norm_backward")
norm_depthwise = define(
    "norm_depthwise", plain_norm_depthwise, "depthwise.norm_forward", setup=_setup, backward=_backward
)
