"""The parallel convolutional module of ViTAE's normal cells in training, as one step for torch.

Three grouped convolutions, two BatchNorms and the sum behind them are a dozen operations of a few microseconds each;
in eager mode torch would need longer to call and to record them than the GPU to compute.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.kernels.conv_norm import is_batch_norm
from weft.kernels.grouped import is_grouped
from weft.kernels.op import nobody_looks  # pyright: ignore[reportPrivateUsage]
from weft.kernels.switch import amp_dtype, usable

PARTS = 7  # of a convolution with its norm: weight and bias of either, running mean and variance, number of batches


class _PCM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keep: Tensor | None, groups: int, momentum: float, eps: float, *parts: Tensor
    ) -> Tensor:
        from weft.kernels.gpu import pcm

        weights, biases, norms = _sort(parts)
        x = x.contiguous()
        ctx.plans = pcm.layout(x, weights, groups)
        y, kept = pcm.forward(x, keep, weights, biases, norms, momentum, eps, ctx.plans)
        ctx.groups, ctx.eps, ctx.parts = groups, eps, len(parts)
        ctx.save_for_backward(x, keep, *parts, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from weft.kernels.gpu import pcm

        x, keep, *rest = ctx.saved_tensors
        parts, kept = rest[: ctx.parts], rest[ctx.parts :]
        weights, biases, norms = _sort(parts)
        grad_x, sums, parameters = pcm.backward(
            grad.contiguous(), x, keep, weights, biases, norms, ctx.groups, ctx.eps, ctx.plans, kept
        )
        found: list[Tensor | None] = []
        sizes = [size for weight in weights for size in (weight.numel(), len(weight))]
        shares = sums.split(sizes)
        for i, weight in enumerate(weights):
            found += [shares[2 * i].view(weight.shape), shares[2 * i + 1]]
            if i < len(norms):
                found += [*parameters[i], None, None, None]
        grads = [None if g is None else g.to(part.dtype) for g, part in zip(found, parts, strict=True)]
        return grad_x, None, None, None, None, *grads


def _sort(parts: tuple[Tensor, ...] | list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, ...]]]:
    """Weights, biases, and for each norm weight, bias, running mean and variance, and number of batches."""
    norms = [tuple(parts[i + 2 : i + PARTS]) for i in range(0, len(parts) - 2, PARTS)]
    return list(parts[::PARTS]), list(parts[1::PARTS]), norms


def is_one_step(x: Tensor, pcm: nn.Sequential) -> bool:
    """Whether `train_pcm` may take these layers: three grouped convolutions, the first two with BatchNorm."""
    if not usable(x) or not pcm.training or not x.numel() or x.dtype != amp_dtype(x) or not nobody_looks((x,)):
        return False
    convs: list[Any] = list(pcm)[::2]
    return (
        len(convs) == 3
        and all(is_grouped(conv.conv) for conv in convs)
        and all(is_batch_norm(conv.bn) for conv in convs[:2])
        and isinstance(convs[2].bn, nn.Identity)
    )


def train_pcm(x: Tensor, keep: Tensor | None, pcm: nn.Sequential) -> Tensor:
    """x + keep * PCM(x) of a (B, H, W, C) map; `keep`, None or (B,), are the factors of stochastic depth."""
    convs: list[Any] = list(pcm)[::2]
    parts: list[Any] = []
    for layer in convs:
        parts += [layer.conv.weight, layer.conv.bias]
        if layer is not convs[-1]:
            bn = layer.bn
            parts += [bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked]
    first = convs[0]
    return _PCM.apply(x, keep, first.conv.groups, first.bn.momentum, first.bn.eps, *parts)
