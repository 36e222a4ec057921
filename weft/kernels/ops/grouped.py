"""3x3 convolutions in groups of a few channels, as in the normal cells of ViTAE.

The library pads the groups, changes the layout in front of and behind itself, and adds the bias in a pass of its own.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.kernels.ops.activation import reference_activation
from weft.kernels.ops.op import define

WIDEST = 32  # channels of a group


def reference_grouped_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int, act: str) -> Tensor:
    """The reference: `act` of a 3x3 convolution with padding 1, (B, H, W, C_in) -> (B, H, W, C_out)."""
    if bias is not None:
        bias = bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, padding=1, groups=groups)
    return reference_activation(y.permute(0, 2, 3, 1), act)


def reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the map, and of weight and bias as one row of float32 numbers."""
    if bias is None:
        bias = weight.new_zeros(len(weight))
    with torch.enable_grad():
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        y = reference_grouped_conv(x, weight, bias, groups, act)
        grad_x, grad_weight, grad_bias = torch.autograd.grad(y, (x, weight, bias), grad)
    return grad_x.contiguous(), torch.cat([grad_weight.flatten(), grad_bias]).float()


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str) -> Tensor:
    return x.new_empty(*x.shape[:3], weight.shape[0])


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str
) -> tuple[Tensor, Tensor]:
    parameters = torch.empty(weight.numel() + weight.shape[0], dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), parameters


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, int, str], output: Tensor) -> None:
    x, weight, bias, ctx.groups, ctx.act = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
    x, weight, bias = ctx.saved_tensors
    grad_x, parameters = grouped_conv_backward.dispatch(grad, x, weight, bias, ctx.groups, ctx.act)
    grad_weight = parameters[: weight.numel()].view(weight.shape).to(weight.dtype)
    grad_bias = None if bias is None else parameters[weight.numel() :].to(bias.dtype)
    return grad_x, grad_weight, grad_bias, None, None


grouped_conv_backward = define(
    "grouped_conv_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, int groups, str act)"
    " -> (Tensor, Tensor)",
    reference_backward,
    "grouped.backward",
    _fake_backward,
)
grouped_conv_forward = define(
    "grouped_conv(Tensor x, Tensor weight, Tensor? bias, int groups, str act) -> Tensor",
    reference_grouped_conv,
    "grouped.forward",
    _fake,
    _setup,
    _backward,
)


def is_grouped(conv: nn.Conv2d) -> bool:
    """Whether this is such a convolution; one channel in a group is a depth-wise one, many are the library's."""
    width = max(conv.in_channels, conv.out_channels) // conv.groups
    sizes = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    return conv.groups > 1 and 1 < width <= WIDEST and sizes == ((3, 3), (1, 1), (1, 1), (1, 1))
