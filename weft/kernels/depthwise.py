"""Stub."""

from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activation import plain_activation


def plain_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    stride: int = 1,
    act_in: str = "none",
    act: str = "none",
) -> Tensor:
    x = plain_activation(x, act_in).permute(0, 3, 1, 2)
    y = F.conv2d(
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        stride,
        weight.shape[-1] // 2,
        groups=weight.shape[0],
    ).permute(0, 2, 3, 1)
    if scale is not None:
        y = y * scale + shift
    return plain_activation(y, act)


def depthwise(x, weight, bias=None, scale=None, shift=None, *, stride=1, act_in="none", act="none"):
    return plain_depthwise(x, weight, bias, scale, shift, stride, act_in, act)
