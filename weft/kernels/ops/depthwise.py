"""Depth-wise convolution of a (B, H, W, C) map with everything around it: activation, bias, BatchNorm, activation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.activation import reference_activation
from weft.kernels.ops.op import define


def reference_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    stride: int,
    act_in: str,
    act: str,
) -> Tensor:
    """act(bn(conv(act_in(x)) + bias)), of which scale and shift are the BatchNorm in eval mode."""
    x = reference_activation(x, act_in).permute(0, 3, 1, 2)
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x, weight.to(x.dtype), bias, stride, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    y = y.permute(0, 2, 3, 1)
    if scale is not None and shift is not None:
        y = y * scale.to(y.dtype) + shift.to(y.dtype)
    return reference_activation(y, act)


def reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, weight and, where there is one, bias."""
    with torch.enable_grad():
        wanted = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        offset = None if bias is None else wanted[2]
        y = reference_depthwise(wanted[0], wanted[1], offset, None, None, stride, "none", "none")
        grads = torch.autograd.grad(y, wanted, grad)
    return grads[0], grads[1], None if bias is None else grads[2]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, scale, _, ctx.stride, act_in, act = inputs
    assert act_in == act == "none", "the gradient of activations is not this operation's"
    assert scale is None, "nor is that of a scale"
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *depthwise_backward.run(grad, *ctx.saved_tensors, ctx.stride), None, None, None, None, None


depthwise_backward = define("depthwise_backward", reference_backward, "depthwise.backward")
depthwise_forward = define("depthwise", reference_depthwise, "depthwise.forward", setup=_setup, backward=_backward)
