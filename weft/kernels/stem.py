"""Convolution of pictures, of one to four channels, with bias and activation; one, or several side by side."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import Tensor

from weft.kernels.activation import activation, plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

MOST_CHANNELS = 4
MOST_BYTES = 1200  # of a picture that one output sees, holes included; more, and the library is better


def output_size(height: int, width: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """Rows and columns that a convolution makes of a picture."""
    lost = (kernel - 1) * dilation - 2 * padding
    return (height - lost - 1) // stride + 1, (width - lost - 1) // stride + 1


def plain_stem(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    """The twin: act(convolutions of `x` side by side in the channels); `biases` may be empty."""
    picture = x.permute(0, 3, 1, 2)
    maps: list[Tensor] = []
    for i, weight in enumerate(weights):
        bias = biases[i].to(x.dtype) if len(biases) > 0 else None
        maps.append(F.conv2d(picture, weight.to(x.dtype), bias, stride, paddings[i], dilations[i]))
    joined = maps[0] if len(maps) == 1 else torch.cat(maps, dim=1)
    return plain_activation(joined.permute(0, 2, 3, 1), act)


def plain_backward(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
) -> list[Tensor]:
    """Gradients of weights, then of biases."""
    with torch.enable_grad():
        inputs = [parameter.detach().requires_grad_() for parameter in weights + biases]
        n = len(weights)
        y = plain_stem(x, inputs[:n], inputs[n:], stride, paddings, dilations, "none")
        return list(torch.autograd.grad(y, inputs, grad))


def _empty(x: Tensor, weights: list[Tensor], stride: int, paddings: list[int], dilations: list[int]) -> Tensor:
    batch, height, width, _ = x.shape
    rows, columns = output_size(height, width, weights[0].shape[2], stride, paddings[0], dilations[0])
    channels = sum(weight.shape[0] for weight in weights)
    return torch.empty(batch, rows, columns, channels, dtype=x.dtype, device=x.device)


def _launch(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
    act: str,
) -> Tensor:
    from weft.kernels.gpu import stem

    x = x.contiguous()
    y = _empty(x, weights, stride, paddings, dilations)
    parts = y.split([weight.shape[0] for weight in weights], dim=-1)
    for i, weight in enumerate(weights):
        stem.forward(x, weight, biases[i] if biases else None, parts[i], stride, paddings[i], dilations[i], act)
    return y


def _launch_backward(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    paddings: list[int],
    dilations: list[int],
) -> list[Tensor]:
    from weft.kernels.gpu import stem

    x, grad = x.contiguous(), grad.contiguous()
    parts = grad.split([weight.shape[0] for weight in weights], dim=-1)
    found = [
        stem.weight_gradient(parts[i], x, weight, stride, paddings[i], dilations[i], len(biases) > 0)
        for i, weight in enumerate(weights)
    ]
    return [weight for weight, _ in found] + [grad.to(biases[i].dtype) for i, (_, grad) in enumerate(found) if biases]


def _fake_backward(grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in weights + biases]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, ctx.stride, ctx.paddings, ctx.dilations, act = inputs
    assert act == "none", "the gradient wants what was before the activation"
    ctx.count = len(weights)
    ctx.save_for_backward(x, *weights, *biases)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *parameters = ctx.saved_tensors
    weights, biases = parameters[: ctx.count], parameters[ctx.count :]
    sizes = (ctx.stride, ctx.paddings, ctx.dilations)
    grad_x = _picture_gradient(grad, x, weights, *sizes) if ctx.needs_input_grad[0] else None
    found = stem_backward(grad, x, weights, biases, *sizes)
    return grad_x, found[: ctx.count], found[ctx.count :], None, None, None, None


def _picture_gradient(
    grad: Tensor, x: Tensor, weights: list[Tensor], stride: int, paddings: list[int], dilations: list[int]
) -> Tensor:
    """By torch: pictures seldom want one."""
    shape, parts = x.permute(0, 3, 1, 2).shape, grad.permute(0, 3, 1, 2).split([w.shape[0] for w in weights], dim=1)
    found = [
        torch.nn.grad.conv2d_input(shape, weight.to(x.dtype), part, stride, padding, dilation)
        for weight, part, padding, dilation in zip(weights, parts, paddings, dilations, strict=True)
    ]
    return sum(found[1:], found[0]).permute(0, 2, 3, 1)


_ARGUMENTS = "Tensor x, Tensor[] weights, Tensor[] biases, int stride, int[] paddings, int[] dilations"
stem_backward = define(
    f"stem_backward(Tensor grad, {_ARGUMENTS}) -> Tensor[]", plain_backward, _launch_backward, _fake_backward
)
stem_forward = define(
    f"stem({_ARGUMENTS}, str act) -> Tensor",
    plain_stem,
    _launch,
    lambda x, weights, biases, stride, paddings, dilations, act: _empty(x, weights, stride, paddings, dilations),
    _setup,
    _backward,
)


def _suits(x: Tensor, weights: list[Tensor], dilations: list[int]) -> bool:
    if not usable(x) or x.shape[3] > MOST_CHANNELS:
        return False
    kernel, size = weights[0].shape[2], amp_dtype(x).itemsize
    return kernel * ((kernel - 1) * max(dilations) + 1) * x.shape[3] * size <= MOST_BYTES


@register_notrace_function
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
        return plain_stem(x, weights, biases, stride, paddings, dilations, act)
    else:  # not compiled by TorchScript
        if not _suits(x, weights, dilations):
            return plain_stem(x, weights, biases, stride, paddings, dilations, act)
        x = x.to(amp_dtype(x))
        if act != "none" and torch.is_grad_enabled() and any(p.requires_grad for p in (x, *weights, *biases)):
            return activation(stem_forward(x, weights, biases, stride, paddings, dilations, "none"), act)
        return stem_forward(x, weights, biases, stride, paddings, dilations, act)


@register_notrace_function
def stem_conv(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int, padding: int, dilation: int, act: str
) -> Tensor:
    """act(convolution) of a (B, H, W, C_in) picture with a square kernel: (B, h, w, C_out)."""
    biases: list[Tensor] = [] if bias is None else [bias]
    return stem_pyramid(x, [weight], biases, stride, [padding], [dilation], act)


# kernel, stride, padding, dilation, C_out at 224 pixels: CeiT and VT-ResNet; CvT; CETNet; ViTAE's PCM and PRM
_STEMS = ((7, 2, 3, 1, 64), (7, 4, 2, 1, 64), (3, 2, 1, 1, 32), (3, 2, 1, 1, 64)) + tuple(
    (7, 4, 3 * dilation - 1, dilation, 64) for dilation in (2, 3, 4)
)


def _candidates(*tiles: tuple[int, int, int, int, int]) -> list[dict[str, int]]:
    return [
        dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "programs"), tile, strict=True)) for tile in tiles
    ]


def _case(kernel: int, stride: int, padding: int, dilation: int, out: int, training: bool) -> Case:
    batch, side = 128 if training else 256, 224
    shape = dict(kernel=kernel, stride=stride, dilation=dilation, channels=3, out=out, dtype=str(torch.bfloat16))
    rows, columns = output_size(side, side, kernel, stride, padding, dilation)
    positions = batch * rows * columns
    bytes = 2 * (batch * side * side * 3 + positions * out)
    flops = 2 * positions * out * 3 * kernel * kernel

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(batch, side, side, 3, device=device, dtype=torch.bfloat16)
        dtype = torch.float32 if training else torch.bfloat16
        weight = 0.1 * torch.randn(out, 3, kernel, kernel, device=device, dtype=dtype)
        if training:
            grad = torch.randn(batch, rows, columns, out, device=device, dtype=torch.bfloat16)
            return grad, x, [weight], [], stride, [padding], [dilation]
        bias = torch.randn(out, device=device, dtype=dtype)
        return x, [weight], [bias], stride, [padding], [dilation], "none"

    if training:
        tiles = ((64, 128, 8, 2, 1), (128, 128, 8, 2, 1), (64, 128, 8, 3, 1), (32, 128, 8, 3, 1), (64, 64, 8, 2, 1),
                 (64, 64, 8, 3, 1), (64, 64, 8, 2, 2), (64, 64, 8, 1, 2))  # fmt: skip
        return Case("stem_gradient", shape, inputs, stem_backward, plain_backward, bytes, flops, _candidates(*tiles))
    tiles = ((128, 128, 8, 2, 1), (64, 128, 4, 2, 1), (64, 128, 4, 1, 2), (64, 128, 4, 1, 3), (128, 128, 8, 1, 1),
             (128, 128, 8, 1, 2), (64, 64, 4, 2, 2), (64, 64, 4, 1, 4), (128, 64, 8, 1, 2))  # fmt: skip
    return Case("stem", shape, inputs, stem_forward, plain_stem, bytes, flops, _candidates(*tiles))


def cases() -> list[Case]:
    return [_case(*stem, training=training) for training in (False, True) for stem in _STEMS]
