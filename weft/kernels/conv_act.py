"""Convolution with bias, shortcut and activation, for inference.

Torch has cudnn convolve and then goes over the map for the bias in a slow kernel, again for the shortcut and again for
the activation. Here a 1x1 convolution is a matrix product that does all of it as it writes, and any other convolution
is followed by one pass. Which way is fastest differs from layer to layer, so it is a launch parameter like tile sizes:

    "linear"     cublas, with the bias and a ReLU as it writes; 1x1 convolutions without a shortcut
    "library"    cudnn, then one pass in place for everything else
    "kernel"     Triton, all in one
"""

from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activation import activation, plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable


def plain_conv_act(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    stride: int,
    padding: int,
    groups: int,
    act: str,
) -> Tensor:
    """The twin: act(conv(x) + bias + residual) of (B, H, W, C) maps."""
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, groups=groups).permute(0, 2, 3, 1)
    return plain_activation(y if residual is None else y + residual, act)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    stride: int,
    padding: int,
    groups: int,
    act: str,
) -> Tensor:
    from weft.kernels.gpu import conv_act

    return conv_act.forward(x, weight, bias, residual, stride, padding, groups, act)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    stride: int,
    padding: int,
    groups: int,
    act: str,
) -> Tensor:
    return x.new_empty(output_shape(x, weight, stride, padding))


def output_shape(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, int, int, int]:
    batch, height, width, _ = x.shape
    features, _, rows, columns = weight.shape
    return batch, (height + 2 * padding - rows) // stride + 1, (width + 2 * padding - columns) // stride + 1, features


conv_act_forward = define(
    "conv_act(Tensor x, Tensor weight, Tensor? bias, Tensor? residual,"
    " int stride, int padding, int groups, str act) -> Tensor",
    plain_conv_act,
    _launch,
    _fake,
)


def conv_act(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    groups: int,
    act: str,
    residual: Optional[Tensor] = None,
) -> Tensor:
    """act(conv(x) + bias + residual) of (B, H, W, C) maps. The kernels have no gradient; the twin has.

    Compilers put all that follows a convolution into one pass themselves, so that only matrix products are left to do.
    """
    nothing = bias is None and residual is None and act == "none"
    square = stride[0] == stride[1] and padding[0] == padding[1]
    compiled = weight.shape[2] > 1 and torch.compiler.is_compiling()
    if torch.is_grad_enabled() or nothing or compiled or not square or not usable(x):
        y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, groups=groups).permute(0, 2, 3, 1)
        return y if nothing else activation(y if residual is None else y + residual, act)
    dtype = amp_dtype(x)
    if x.dtype != dtype or weight.dtype != dtype:
        x, weight = x.to(dtype), weight.to(dtype)
    return conv_act_forward(x, weight, bias, residual, stride[0], padding[0], groups, act)


def cases(batch: int = 256) -> list[Case]:
    """Convolutions of VT-ResNet-18 and -50 and of CETNet's CE units at 224 pixels."""
    layers = [  # side of the map that comes, channels in and out, kernel, stride, whether there is a shortcut, act
        (56, 64, 64, 3, 1, False, "relu"),  # VT-R18
        (56, 64, 64, 3, 1, True, "relu"),
        (56, 64, 128, 3, 2, False, "relu"),
        (28, 128, 128, 3, 1, True, "relu"),
        (14, 256, 256, 3, 1, True, "relu"),
        (56, 64, 128, 1, 2, False, "none"),
        (56, 64, 64, 1, 1, False, "relu"),  # VT-R50
        (56, 64, 256, 1, 1, False, "none"),
        (56, 64, 256, 1, 1, True, "relu"),
        (56, 256, 64, 1, 1, False, "relu"),
        (56, 256, 128, 1, 2, False, "relu"),
        (56, 256, 512, 1, 2, False, "none"),
        (28, 128, 128, 3, 1, False, "relu"),
        (28, 128, 512, 1, 1, True, "relu"),
        (28, 512, 128, 1, 1, False, "relu"),
        (28, 512, 256, 1, 2, False, "relu"),
        (28, 512, 1024, 1, 2, False, "none"),
        (14, 256, 256, 3, 1, False, "relu"),
        (14, 256, 1024, 1, 1, True, "relu"),
        (14, 1024, 256, 1, 1, False, "relu"),
        (112, 32, 32, 3, 1, False, "gelu"),  # CETNet-T
        (112, 32, 64, 3, 2, False, "gelu"),
        (56, 32, 64, 3, 1, False, "gelu"),
        (56, 64, 32, 1, 1, True, "none"),
        (56, 64, 128, 1, 1, False, "gelu"),
        (28, 128, 64, 1, 1, True, "none"),
        (28, 128, 256, 1, 1, False, "gelu"),
        (14, 256, 512, 1, 1, False, "gelu"),
    ]
    return [_case(batch, *layer) for layer in layers]


def _case(
    batch: int, side: int, channels: int, features: int, kernel: int, stride: int, shortcut: bool, act: str
) -> Case:
    small = -(-side // stride)
    rows = batch * small * small
    fast = kernel == 1 and stride == 1 and not shortcut and act in ("none", "relu")
    tiles = [(128, 32, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 3), (64, 256, 8, 2)]  # warps, stages
    tiles = [tile for tile in tiles if min(features, 256) // 4 <= tile[1] <= features][-4 if kernel == 1 else -1 :]
    candidates: list[dict[str, int | str]] = [{"how": "linear" if fast else "library"}]
    candidates += [
        dict(how="kernel", BLOCK_M=m, BLOCK_N=n, BLOCK_K=min(channels, 64), num_warps=warps, num_stages=stages)
        for m, n, warps, stages in tiles
    ]

    def inputs(device: torch.device) -> tuple[Tensor | None, ...]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        weight = random(features, channels, kernel, kernel) * (kernel * kernel * channels) ** -0.5
        return (
            random(batch, side, side, channels),
            weight.contiguous(memory_format=torch.channels_last),
            random(features),
            random(batch, small, small, features) if shortcut else None,
        )

    rest = dict(stride=stride, padding=kernel // 2, groups=1, act=act)
    return Case(
        operation="conv_act",
        shape=dict(
            rows=rows, channels=channels, features=features, kernel=kernel, stride=stride, residual=shortcut, act=act
        ),
        inputs=inputs,
        kernel=partial(_launch, **rest),
        plain=partial(plain_conv_act, **rest),
        bytes=2 * (batch * side * side * channels + rows * features * (2 if shortcut else 1)),
        flops=2 * rows * channels * features * kernel * kernel,
        candidates=candidates,
    )
