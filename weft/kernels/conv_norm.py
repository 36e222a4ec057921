"""Convolution or linear layer, BatchNorm and activation of a (B, H, W, C) map, by whichever kernels fit."""

from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from weft.kernels.activation import activation
from weft.kernels.batch_norm import batch_norm_act
from weft.kernels.conv_act import conv_act
from weft.kernels.depthwise import depthwise
from weft.kernels.grouped import grouped_conv, is_grouped
from weft.kernels.qkv import qkv_depthwise
from weft.kernels.stem import stem_conv
from weft.kernels.watch import bare

DEPTHWISE_KERNELS = (3, 5, 7)
DEPTHWISE_STRIDES = (1, 2)
FEW_CHANNELS = 4  # of a picture


def conv_norm(
    x: Tensor,
    conv: nn.Conv2d,
    bn: Any,
    act_in: str,
    act: str,
    residual: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """act(residual + keep bn(conv(act_in(x)))), in training and in eval mode; `bn` may be an Identity."""
    if isinstance(bn, nn.Identity) and keep is None:
        return _convolve(x, conv, None, None, act_in, act, residual)
    if bn.training or keep is not None or not is_batch_norm(bn):
        return norm_act(_convolve(x, conv, None, None, act_in, "none"), bn, act, residual, keep)
    scale, shift = affine(bn)
    return _convolve(x, conv, scale, shift, act_in, act, residual)


def convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    return _convolve(x, conv, None, None, "none", "none")


def conv_qkv(x: Tensor, cls: Tensor | None, q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Three depth-wise `ConvNorm`s of one map, the last two perhaps with a stride: tokens, the class token first."""
    branches = (q, k, v)
    weights, biases = [b.conv.weight for b in branches], [b.conv.bias for b in branches]
    stride = k.conv.stride[0]
    if isinstance(q.bn, nn.Identity):
        return qkv_depthwise(x, cls, weights, biases, None, None, stride)
    if not q.bn.training:
        scales, shifts = zip(*(affine(b.bn) for b in branches), strict=True)
        return qkv_depthwise(x, cls, weights, biases, scales, shifts, stride)
    raw = qkv_depthwise(x, None, weights, biases, None, None, stride)
    height, width = x.shape[1:3]
    grids = ((height, width), *[(-(-height // stride), -(-width // stride))] * 2)
    maps = [norm_act(y.unflatten(1, grid), b.bn, "none") for y, grid, b in zip(raw, grids, branches, strict=True)]
    q, k, v = (y.flatten(1, 2) if cls is None else torch.cat([cls, y.flatten(1, 2)], dim=1) for y in maps)
    return q, k, v


def fit_together(*branches: Any) -> bool:
    """Whether `conv_qkv` may take these `ConvNorm`s: nobody watches them, and their norms are in one mode."""
    norms = [branch.bn for branch in branches]
    if not bare(*branches, *norms, *(branch.conv for branch in branches)):
        return False
    if all(type(norm) is nn.Identity for norm in norms):
        return True
    return all(map(is_batch_norm, norms)) and len({norm.training for norm in norms}) == 1


def norm_act(x: Tensor, bn: Any, act: str, residual: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
    """act(residual + keep bn(x)); moves the running statistics where `bn` is in training mode."""
    if not is_batch_norm(bn):  # SyncBatchNorm, which talks to other processes, or nothing at all
        y = bn(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        y = y if keep is None else y * keep.view(-1, 1, 1, 1)
        return activation(y if residual is None else residual + y, act)
    return batch_norm_act(
        x, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.training, bn.momentum, bn.eps, act, residual, keep,
        bn.num_batches_tracked,
    )  # fmt: skip


def keep_factors(drop_path: Any, x: Tensor) -> Tensor | None:
    """(B,) factors of timm's stochastic depth, 0 or 1 / (1 - rate); None where nothing is dropped."""
    rate = getattr(drop_path, "drop_prob", 0.0)
    if not rate or not drop_path.training:
        return None
    return x.new_empty(x.shape[0], dtype=torch.float32).bernoulli_(1 - rate).div_(1 - rate)


def is_batch_norm(bn: Any) -> bool:
    """Whether `bn` is a plain BatchNorm with running statistics and parameters, as all of ours are."""
    return (
        type(bn) in (nn.BatchNorm2d, BatchNormAct2d)
        and bn.affine
        and bn.track_running_stats
        and bn.momentum is not None
    )


def affine(bn: Any) -> tuple[Tensor, Tensor]:
    """What a BatchNorm in eval mode is: x * scale + shift."""
    scale = bn.weight * (bn.running_var + bn.eps).rsqrt()
    return scale, bn.bias - bn.running_mean * scale


def _convolve(
    x: Tensor,
    conv: Any,
    scale: Tensor | None,
    shift: Tensor | None,
    act_in: str,
    act: str,
    residual: Tensor | None = None,
) -> Tensor:
    if is_depthwise(conv) and residual is None:
        return depthwise(x, conv.weight, conv.bias, scale, shift, stride=conv.stride[0], act_in=act_in, act=act)
    weight, bias = conv.weight, conv.bias
    if scale is not None and shift is not None:
        weight = weight * scale.view(-1, 1, 1, 1)
        bias = shift if bias is None else bias * scale + shift
    x = activation(x, act_in)
    if is_grouped(conv) and residual is None:
        return grouped_conv(x, weight, bias, conv.groups, act)
    if conv.in_channels <= FEW_CHANNELS and conv.groups == 1 and residual is None:
        return stem_conv(x, weight, bias, conv.stride[0], conv.padding[0], conv.dilation[0], act)
    return conv_act(x, weight, bias, conv.stride, conv.padding, conv.groups, act, residual)


def is_depthwise(conv: nn.Conv2d) -> bool:
    """Whether the depth-wise kernels know this convolution."""
    kernel = conv.kernel_size[0]
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and kernel in DEPTHWISE_KERNELS
        and conv.kernel_size == (kernel, kernel)
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.stride[0] == conv.stride[1]
        and conv.stride[0] in DEPTHWISE_STRIDES
        and conv.dilation == (1, 1)
    )
