"""Depth-wise convolution of a (B, H, W, C) map with everything around it: activation, bias, BatchNorm, activation."""

from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activation import activation, plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

KERNELS = (3, 5, 7)


def plain_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    stride: int,
    act_in: str,
    act: str,
) -> Tensor:
    """The twin."""
    x = plain_activation(x, act_in).permute(0, 3, 1, 2)
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x, weight.to(x.dtype), bias, stride, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    y = y.permute(0, 2, 3, 1)
    if scale is not None and shift is not None:
        y = y * scale.to(y.dtype) + shift.to(y.dtype)
    return plain_activation(y, act)


def plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; an empty one where there is no bias."""
    with torch.enable_grad():
        wanted = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        offset = None if bias is None else wanted[2]
        y = plain_depthwise(wanted[0], wanted[1], offset, None, None, stride, "none", "none")
        grads = torch.autograd.grad(y, wanted, grad)
    return grads[0].contiguous(), grads[1], x.new_empty(0) if bias is None else grads[2]


def _launch(*args: Any) -> Tensor:
    from weft.kernels.gpu import depthwise

    return depthwise.forward(*args)


def _launch_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from weft.kernels.gpu import depthwise

    return depthwise.backward(*args)


def _fake(x: Tensor, weight: Tensor, bias: Any, scale: Any, shift: Any, stride: int, act_in: str, act: str) -> Tensor:
    batch, height, width, channels = x.shape
    rows, cols = (height + stride - 1) // stride, (width + stride - 1) // stride
    return torch.empty(batch, rows, cols, channels, dtype=x.dtype, device=x.device)


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, torch.empty_like(weight), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, scale, _, ctx.stride, act_in, act = inputs
    assert act_in == act == "none", "the gradient of activations is not this operator's"
    assert scale is None, "nor is that of a scale"
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = depthwise_backward(grad, x, weight, bias, ctx.stride)
    return grad_x, grad_weight, None if bias is None else grad_bias, None, None, None, None, None


depthwise_backward = define(
    "depthwise_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, int stride) -> (Tensor, Tensor, Tensor)",
    plain_backward,
    _launch_backward,
    _fake_backward,
)
depthwise_forward = define(
    "depthwise(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? shift, int stride, str act_in, str act)"
    " -> Tensor",
    plain_depthwise,
    _launch,
    _fake,
    _setup,
    _backward,
)


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def with_kernels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    stride: int,
    act_in: str,
    act: str,
) -> Tensor:
    """One kernel where no gradient is asked for; where one is, activations and BatchNorm are steps of their own."""
    if not wants_gradient(x, weight, bias, scale, shift):
        return depthwise_forward(x, weight, bias, scale, shift, stride, act_in, act)
    y = depthwise_forward(activation(x, act_in), weight, bias, None, None, stride, "none", "none")
    if scale is not None and shift is not None:
        y = y * scale.to(y.dtype) + shift.to(y.dtype)
    return activation(y, act)


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    stride: int = 1,
    act_in: str = "none",
    act: str = "none",
) -> Tensor:
    """act(scale * conv(act_in(x)) + shift) of a (B, H, W, C) map, padded with zeros: (B, H / stride, W / stride, C).

    Args:
        x: each picture in one piece; it may be the map part of (B, 1 + H*W, C) tokens.
        weight, bias: (C, 1, K, K) as a depth-wise nn.Conv2d has it, K of 3, 5 or 7, and (C,).
        scale, shift: (C,), a BatchNorm with fixed statistics.
        act_in, act: activations before and behind, by the names of `weft.kernels.activation`.
    """
    if torch.jit.is_scripting():
        return plain_depthwise(x, weight, bias, scale, shift, stride, act_in, act)
    else:  # not compiled by TorchScript
        if not usable(x) or weight.shape[-1] not in KERNELS:
            return plain_depthwise(x, weight, bias, scale, shift, stride, act_in, act)
        return with_kernels(x.to(amp_dtype(x)), weight, bias, scale, shift, stride, act_in, act)


# Measurement --------------------------------------------------------------------------------------------------------

SHAPES = (  # side of the map, channels, stride
    *((14, channels, 1) for channels in (768, 1536, 3072)),  # CeiT T, S, B
    *((56, 128, 2), (28, 256, 2), (14, 512, 2), (28, 128, 1), (14, 256, 1), (7, 512, 1)),  # CETNet's CE
)
# rows and columns of a tile, channels of a lane, warps, rows written out
FORWARD = (
    (14, 14, 1, 1, 2),
    (14, 14, 2, 1, 1),
    (14, 14, 2, 1, 2),
    (14, 7, 1, 1, 2),
    (14, 7, 2, 1, 1),
    (14, 7, 2, 1, 2),
)
BACKWARD = (
    (14, 14, 1, 1, 1),
    (14, 14, 2, 1, 1),
    (14, 14, 2, 1, 2),
    (7, 14, 2, 1, 1),
    (14, 7, 1, 1, 2),
    (14, 7, 2, 1, 1),
)


def tiles(*measures: tuple[int, int, int, int, int], width: int) -> list[dict[str, int]]:
    """Launch parameters from `measures` such as those above, where a tile is not wider than the map."""
    return [
        dict(rows=rows, cols=cols, block_c=32 * lane_channels * warps, unroll=unroll, num_warps=warps)
        for rows, cols, lane_channels, warps, unroll in measures
        if cols <= width
    ]


def _inputs(batch: int, side: int, channels: int, device: torch.device, stride: int = 0) -> tuple[Any, ...]:
    """A map, a weight and a bias; with a `stride`, before them the gradient of what they make."""
    x = torch.randn(batch, side, side, channels, device=device, dtype=torch.bfloat16)
    weight, bias = torch.randn(channels, 1, 3, 3, device=device) / 3, torch.randn(channels, device=device)
    return (x, weight, bias) if stride == 0 else (torch.randn_like(x[:, ::stride, ::stride]), x, weight, bias)


def _forward_case(side: int, channels: int, stride: int, act_in: str, act: str) -> Case:
    size = side * side * channels * 2
    return Case(
        "depthwise",
        dict(height=side, width=side, channels=channels, kernel=3, stride=stride, active=act != "none"),
        partial(_inputs, 256, side, channels),
        lambda x, weight, bias: depthwise_forward(x, weight, bias, None, None, stride, act_in, act),
        lambda x, weight, bias: plain_depthwise(x, weight, bias, None, None, stride, act_in, act),
        256 * (size + size // stride**2),
        candidates=tiles(*FORWARD, width=side // stride),
    )


def _backward_case(side: int, channels: int, stride: int) -> Case:
    size = side * side * channels * 2
    return Case(
        "depthwise_backward",
        dict(height=side, width=side, channels=channels, kernel=3, stride=stride),
        partial(_inputs, 128, side, channels, stride=stride),
        lambda grad, x, weight, bias: depthwise_backward(grad, x, weight, bias, stride),
        lambda grad, x, weight, bias: plain_backward(grad, x, weight, bias, stride),
        128 * (2 * size + size // stride**2),
        candidates=tiles(*BACKWARD, width=side // stride),
    )


def cases() -> list[Case]:
    made = []
    for side, channels, stride in SHAPES:
        act_in, act = ("gelu", "gelu") if channels > 512 else ("none", "silu")  # LeFF's and CE's
        made.append(_forward_case(side, channels, stride, act_in, act))
        made.append(_forward_case(side, channels, stride, "none", "none"))
        made.append(_backward_case(side, channels, stride))
    return made
