"""3x3 convolutions in groups of a few channels, as in the normal cells of ViTAE.

The library pads the groups, changes the layout in front of and behind itself, and adds the bias in a pass of its own.
"""

from itertools import pairwise
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import Tensor, nn

from weft.kernels.activation import plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

WIDEST = 32  # channels of a group


def plain_grouped_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int, act: str) -> Tensor:
    """The twin: `act` of a 3x3 convolution with padding 1, (B, H, W, C_in) -> (B, H, W, C_out)."""
    if bias is not None:
        bias = bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, padding=1, groups=groups)
    return plain_activation(y.permute(0, 2, 3, 1), act)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str) -> Tensor:
    return plain_grouped_conv(x, weight, bias, groups, act).contiguous()


def plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the map, and of weight and bias as one row of float32 numbers."""
    if bias is None:
        bias = weight.new_zeros(len(weight))
    with torch.enable_grad():
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        y = plain_grouped_conv(x, weight, bias, groups, act)
        grad_x, grad_weight, grad_bias = torch.autograd.grad(y, (x, weight, bias), grad)
    return grad_x.contiguous(), torch.cat([grad_weight.flatten(), grad_bias]).float()


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str) -> Tensor:
    from weft.kernels.gpu import grouped

    if not x.numel():
        return _fake(x, weight, bias, groups, act)
    return grouped.forward(x.contiguous(), weight.contiguous(), bias, groups, act)


def _launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str
) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import grouped

    if not x.numel():
        return plain_backward(grad, x, weight, bias, groups, act)
    return grouped.backward(grad.contiguous(), x.contiguous(), weight.contiguous(), bias, groups, act)


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
    grad_x, parameters = grouped_conv_backward(grad, x, weight, bias, ctx.groups, ctx.act)
    grad_weight = parameters[: weight.numel()].view(weight.shape).to(weight.dtype)
    grad_bias = None if bias is None else parameters[weight.numel() :].to(bias.dtype)
    return grad_x, grad_weight, grad_bias, None, None


grouped_conv_backward = define(
    "grouped_conv_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, int groups, str act)"
    " -> (Tensor, Tensor)",
    plain_backward,
    _launch_backward,
    _fake_backward,
)
grouped_conv_forward = define(
    "grouped_conv(Tensor x, Tensor weight, Tensor? bias, int groups, str act) -> Tensor",
    _plain,
    _launch,
    _fake,
    _setup,
    _backward,
)


@register_notrace_function
def grouped_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int, act: str = "none") -> Tensor:
    """`act` of a 3x3 convolution of a (B, H, W, C_in) map with padding 1; weight (C_out, C_in / groups, 3, 3)."""
    if torch.jit.is_scripting():
        return plain_grouped_conv(x, weight, bias, groups, act)
    else:  # not compiled by TorchScript
        if not usable(x):
            return plain_grouped_conv(x, weight, bias, groups, act)
        return grouped_conv_forward(x.to(amp_dtype(x)), weight, bias, groups, act)


def is_grouped(conv: nn.Conv2d) -> bool:
    """Whether this is such a convolution; one channel in a group is a depth-wise one, many are the library's."""
    width = max(conv.in_channels, conv.out_channels) // conv.groups
    sizes = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    return conv.groups > 1 and 1 < width <= WIDEST and sizes == ((3, 3), (1, 1), (1, 1), (1, 1))


def cases() -> list[Case]:
    """The PCM of the normal cells of vitae_tiny and vitae_small: three convolutions each, forward and backward."""
    tiles = [
        dict(rows=rows, chunk=chunk, block=block, num_warps=warps, num_stages=stages)
        for rows, chunk, block, warps, stages in (
            (128, 32, 64, 4, 3),
            (128, 32, 32, 4, 3),
            (256, 32, 64, 8, 3),
            (256, 32, 32, 8, 3),
        )
    ]
    weight_tiles = [
        dict(rows=rows, chunk=chunk, block=block, num_warps=warps, num_stages=2)
        for rows, chunk, block, warps in ((128, 32, 64, 4), (256, 32, 64, 8), (128, 32, 32, 4), (128, 64, 64, 8))
    ]
    result: list[Case] = []
    for groups, widths in ((64, (256, 512, 256, 256)), (96, (384, 1152, 384, 384))):
        for in_chs, out_chs in pairwise(widths):
            result.append(_case("grouped_conv", 256, in_chs, out_chs, groups, tiles))
            result.append(_case("grouped_conv", 128, in_chs, out_chs, groups, tiles))
            result.append(_case("grouped_conv_weight", 128, in_chs, out_chs, groups, weight_tiles))
    return result


def _case(operation: str, batch: int, in_chs: int, out_chs: int, groups: int, tiles: list[dict[str, Any]]) -> Case:
    size = 14
    rows, taps = batch * size**2, 9 * in_chs // groups

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(batch, size, size, in_chs, device=device, dtype=torch.bfloat16)
        weight = torch.randn(out_chs, in_chs // groups, 3, 3, device=device) / taps**0.5
        grad = torch.randn(batch, size, size, out_chs, device=device, dtype=torch.bfloat16)
        return grad, x, weight, torch.randn(out_chs, device=device)

    def kernel(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        if operation == "grouped_conv":
            return grouped_conv_forward(x, weight, bias, groups, "none")
        from weft.kernels.gpu import grouped

        return grouped.sum_up([(grad, x)], [weight], groups)

    def plain(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        if operation == "grouped_conv":
            return plain_grouped_conv(x, weight, bias, groups, "none")
        return plain_backward(grad, x, weight, bias, groups, "none")[1]

    return Case(
        operation,
        dict(rows=rows, in_chs=in_chs, out_chs=out_chs, groups=groups),
        inputs,
        kernel,
        plain,
        bytes=2 * rows * (in_chs + out_chs),
        flops=2 * rows * out_chs * taps,
        candidates=tiles,
    )
