"""Convolution of pictures, of one to four channels, with bias and activation; one, or several side by side."""

from math import gcd
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from weft.kernels.activation import activation, plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

MOST_CHANNELS = 4
MOST_BYTES = 1200  # of a picture that one output sees, holes included; more, and the library is better


def plain_stem(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    """The twin: act(convolution)."""
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, dilation)
    return plain_activation(y.permute(0, 2, 3, 1), act)


def plain_pyramid(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    """The twin of several, side by side in the channels; `biases` may be empty."""
    maps: list[Tensor] = []
    for i, weight in enumerate(weights):
        bias = biases[i] if len(biases) > 0 else None
        maps.append(plain_stem(x, weight, bias, stride, paddings[i], dilations[i], "none"))
    return plain_activation(torch.cat(maps, dim=-1), act)


# One convolution ------------------------------------------------------------------------------------------------


def _empty(x: Tensor, out: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Room for a map of `out` channels."""
    batch, height, width, _ = x.shape
    lost = (kernel - 1) * dilation - 2 * padding
    size = (batch, (height - lost - 1) // stride + 1, (width - lost - 1) // stride + 1, out)
    return torch.empty(size, dtype=x.dtype, device=x.device)


def _fake(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    return _empty(x, weight.shape[0], weight.shape[2], stride, padding, dilation)


def _launch(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    from weft.kernels.gpu import stem

    y = _fake(x, weight, bias, stride, padding, dilation, act)
    stem.forward(x, weight, bias, y, stride, padding, dilation, act)
    return y


def plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, that of a missing bias empty."""
    with torch.enable_grad():
        inputs = [parameter.detach().requires_grad_() for parameter in (weight, bias) if parameter is not None]
        weight, *biases = (parameter.to(x.dtype) for parameter in inputs)
        y = plain_stem(x, weight, biases[0] if biases else None, stride, padding, dilation, "none")
        found = torch.autograd.grad(y, inputs, grad)
    return found[0], found[1] if bias is not None else found[0].new_empty(0)


def _launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import stem

    _, rows, columns, _ = grad.shape
    step = grad.stride(2)  # more than there are channels where `grad` is a part of them
    if grad.stride() != (rows * columns * step, columns * step, step, 1):
        grad = grad.contiguous()
    return stem.weight_gradient(grad, x, weight, bias, stride, padding, dilation)


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], *rest: int
) -> tuple[Tensor, Tensor]:
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), (
        weight.new_empty(0) if bias is None else torch.empty_like(bias)
    )


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
    grad_weight, grad_bias = stem_backward(grad, x, weight, bias, *ctx.numbers)
    return grad_x, grad_weight, None if bias is None else grad_bias, None, None, None, None


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, int stride, int padding, int dilation"
stem_backward = define(
    f"stem_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor)", plain_backward, _launch_backward, _fake_backward
)
stem_forward = define(f"stem({_ARGUMENTS}, str act) -> Tensor", plain_stem, _launch, _fake, _setup, _backward)


# Several --------------------------------------------------------------------------------------------------------


def _fake_pyramid(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    out = sum(weight.shape[0] for weight in weights)
    return _empty(x, out, weights[0].shape[2], stride, paddings[0], dilations[0])


def _launch_pyramid(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    from weft.kernels.gpu import stem

    y = _fake_pyramid(x, weights, biases, stride, paddings, dilations, act)
    parts = y.split([weight.shape[0] for weight in weights], dim=-1)
    for i, weight in enumerate(weights):
        stem.forward(x, weight, biases[i] if biases else None, parts[i], stride, paddings[i], dilations[i], act)
    return y


def _setup_pyramid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, ctx.stride, ctx.paddings, ctx.dilations, act = inputs
    assert act == "none", "the gradient wants what was before the activation"
    ctx.count = len(weights)
    ctx.save_for_backward(x, *weights, *biases)


def _backward_pyramid(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *parameters = ctx.saved_tensors
    weights, biases = parameters[: ctx.count], parameters[ctx.count :]
    grad_x, grad_weights, grad_biases = None, [], []
    for i, part in enumerate(grad.split([weight.shape[0] for weight in weights], dim=-1)):
        numbers = (ctx.stride, ctx.paddings[i], ctx.dilations[i])
        if ctx.needs_input_grad[0]:
            found = _picture_gradient(part, x, weights[i], *numbers)
            grad_x = found if grad_x is None else grad_x + found
        found = stem_backward(part, x, weights[i], biases[i] if biases else None, *numbers)
        grad_weights.append(found[0])
        grad_biases.append(found[1])
    return grad_x, grad_weights, grad_biases if biases else [], None, None, None, None


pyramid_forward = define(
    "stem_pyramid(Tensor x, Tensor[] weights, Tensor[] biases,"
    " int stride, int[] paddings, int[] dilations, str act) -> Tensor",
    plain_pyramid,
    _launch_pyramid,
    _fake_pyramid,
    _setup_pyramid,
    _backward_pyramid,
)


# What models call -----------------------------------------------------------------------------------------------


def _suits(x: Tensor, kernel: int, dilation: int) -> bool:
    channels = x.shape[3]
    if channels > MOST_CHANNELS:
        return False
    return kernel * ((kernel - 1) * dilation + 1) * channels * amp_dtype(x).itemsize <= MOST_BYTES


def stem_conv(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    """act(convolution) of a (B, H, W, C_in) picture with a square kernel: (B, h, w, C_out)."""
    if torch.jit.is_scripting():
        return plain_stem(x, weight, bias, stride, padding, dilation, act)
    else:  # not compiled by TorchScript
        if not usable(x) or not _suits(x, weight.shape[2], dilation):
            return plain_stem(x, weight, bias, stride, padding, dilation, act)
        x = x.to(amp_dtype(x))
        if act != "none" and _learns([x, weight] if bias is None else [x, weight, bias]):
            return activation(stem_forward(x, weight, bias, stride, padding, dilation, "none"), act)
        return stem_forward(x, weight, bias, stride, padding, dilation, act)


def stem_pyramid(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    """Convolutions of a (B, H, W, C_in) picture side by side: (B, h, w, sum of C_out).

    Args:
        weights, biases: as nn.Conv2d has them, kernels square; no biases means none.
        paddings, dilations: one for each convolution, such that all make a map of the same size.
        act: an activation by its name, "none" for none.
    """
    if torch.jit.is_scripting():
        return plain_pyramid(x, weights, biases, stride, paddings, dilations, act)
    else:  # not compiled by TorchScript
        if not usable(x) or not _suits(x, weights[0].shape[2], max(dilations)):
            return plain_pyramid(x, weights, biases, stride, paddings, dilations, act)
        x = x.to(amp_dtype(x))
        if act != "none" and _learns([x, *weights, *biases]):
            return activation(pyramid_forward(x, weights, biases, stride, paddings, dilations, "none"), act)
        return pyramid_forward(x, weights, biases, stride, paddings, dilations, act)


def _learns(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# Measurement ----------------------------------------------------------------------------------------------------

# kernel, stride, padding, dilation, C_out at 224 pixels: ViTAE's PRM and PCM; CETNet; CvT; CeiT and VT-ResNet
_STEMS = ((7, 4, 5, 2, 64), (7, 4, 8, 3, 64), (7, 4, 11, 4, 64), (3, 2, 1, 1, 64), (3, 2, 1, 1, 32), (7, 4, 2, 1, 64),
          (7, 2, 3, 1, 64))  # fmt: skip
# BLOCK_M, BLOCK_N, num_warps, num_stages, programs on a multiprocessor
_TILES = ((64, 128, 4, 1, 2), (128, 128, 8, 1, 2), (64, 64, 4, 1, 4), (128, 64, 8, 1, 2), (64, 64, 4, 2, 2),
          (128, 128, 8, 2, 1))  # fmt: skip
_GRADIENT_TILES = ((64, 128, 8, 3, 1), (32, 128, 8, 3, 1), (64, 64, 8, 3, 1), (64, 64, 8, 2, 1), (64, 64, 8, 2, 2))


def _case(kernel: int, stride: int, padding: int, dilation: int, out: int, training: bool) -> Case:
    batch, side = 128 if training else 256, 224
    numbers = (stride, padding, dilation)

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(batch, side, side, 3, device=device, dtype=torch.bfloat16)
        weight = 0.1 * torch.randn(out, 3, kernel, kernel, device=device, dtype=torch.bfloat16)
        bias = torch.randn(out, device=device, dtype=torch.bfloat16)
        y = _empty(x, out, kernel, *numbers)
        return (y.normal_(), x, weight.float(), None, *numbers) if training else (x, weight, bias, *numbers, "none")

    rows = (side - (kernel - 1) * dilation + 2 * padding - 1) // stride + 1
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "programs")
    step = gcd(stride, dilation)  # rows and columns that are skipped are no part of the shape
    shape = dict(kernel=kernel, stride=stride // step, dilation=dilation // step, channels=3, out=out)
    return Case(
        "stem_gradient" if training else "stem",
        {**shape, "dtype": str(torch.bfloat16)},
        inputs,
        stem_backward if training else stem_forward,
        plain_backward if training else plain_stem,
        bytes=2 * batch * (side * side * 3 + rows * rows * out),
        flops=2 * batch * rows * rows * out * 3 * kernel * kernel,
        candidates=[dict(zip(names, tile, strict=True)) for tile in (_GRADIENT_TILES if training else _TILES)],
    )


def cases() -> list[Case]:
    return [_case(*stem, training=training) for training in (False, True) for stem in _STEMS]
