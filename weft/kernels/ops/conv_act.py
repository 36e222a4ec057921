"""Convolution with bias, shortcut and activation, for inference.

Torch has cudnn convolve and then goes over the map for the bias in a slow kernel, again for the shortcut and again for
the activation. Here a 1x1 convolution is a matrix product that does all of it as it writes, and any other convolution
is followed by one pass. Which way is fastest differs from layer to layer, so it is in the table of launches:

    "linear"     cublas, with the bias and a ReLU as it writes; 1x1 convolutions without a shortcut
    "library"    cudnn, then one pass in place for everything else
    "kernel"     Triton, all in one
"""

from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.activation import reference_activation
from weft.kernels.ops.op import define


def reference_conv_act(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    stride: int,
    padding: int,
    groups: int,
    act: str,
) -> Tensor:
    """The reference: act(conv(x) + bias + residual) of (B, H, W, C) maps."""
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, stride, padding, groups=groups).permute(0, 2, 3, 1)
    return reference_activation(y if residual is None else y + residual, act)


conv_act_forward = define("conv_act", reference_conv_act, "conv_act.forward")
