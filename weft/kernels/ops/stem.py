"""Convolution of pictures, of one to four channels, with bias and activation; one, or several side by side."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from weft.kernels.ops.activation import reference_activation
from weft.kernels.ops.op import define

MOST_CHANNELS = 4
MOST_BYTES = 1200  # of a picture that one output sees, holes included; more, and the library is better


def reference_stem(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    """The reference: act(convolution)."""
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, stride, padding, dilation)
    return reference_activation(y.permute(0, 2, 3, 1), act)


def reference_pyramid(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    """The reference of several, side by side in the channels; `biases` may be empty."""
    maps: list[Tensor] = []
    for i, weight in enumerate(weights):
        bias = biases[i] if len(biases) > 0 else None
        maps.append(reference_stem(x, weight, bias, stride, paddings[i], dilations[i], "none"))
    return reference_activation(torch.cat(maps, dim=-1), act)


def reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of weight and, where there is one, bias."""
    with torch.enable_grad():
        inputs = [parameter.detach().requires_grad_() for parameter in (weight, bias) if parameter is not None]
        y = reference_stem(x, inputs[0], None if bias is None else inputs[1], stride, padding, dilation, "none")
        found = torch.autograd.grad(y, inputs, grad)
    return found[0], None if bias is None else found[1]


def _picture_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
    """By torch: pictures seldom want one."""
    shape = x.permute(0, 3, 1, 2).shape
    found = conv2d_input(shape, weight.to(x.dtype), grad.permute(0, 3, 1, 2), stride, padding, dilation)
    return found.permute(0, 2, 3, 1)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.numbers, act = inputs
    assert act == "none", "the gradient wants what was before the activation"
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grad_x = _picture_gradient(grad, x, weight, *ctx.numbers) if ctx.needs_input_grad[0] else None
    return grad_x, *stem_backward.run(grad, x, weight, bias, *ctx.numbers), None, None, None, None


stem_backward = define("stem_backward", reference_backward, "stem.weight_gradient")
stem_forward = define("stem", reference_stem, "stem.forward", setup=_setup, backward=_backward)
pyramid_forward = define("stem_pyramid", reference_pyramid, "stem.pyramid")


def suits_stem(x: Tensor, *convs: nn.Conv2d) -> bool:
    """Whether the kernels know these convolutions of one map: few channels, and a small part of it in each output."""
    channels = x.shape[3]
    if channels > MOST_CHANNELS:
        return False
    return all(
        conv.groups == 1
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.stride[0] == conv.stride[1]
        and conv.padding[0] == conv.padding[1]
        and conv.kernel_size[0] * ((conv.kernel_size[0] - 1) * conv.dilation[0] + 1) * channels * x.element_size()
        <= MOST_BYTES
        for conv in convs
    )
