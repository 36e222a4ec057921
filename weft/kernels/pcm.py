"""The parallel convolutional module of ViTAE's normal cells in training, as one step for torch.

Three grouped convolutions, two BatchNorms and the sum behind them are a dozen operations of a few microseconds each;
in eager mode torch would need longer to call and to record them than the GPU to compute.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.kernels.choose import TwinIsFaster
from weft.kernels.conv_norm import is_batch_norm
from weft.kernels.grouped import is_grouped
from weft.kernels.op import nobody_looks
from weft.kernels.switch import amp_dtype, usable
from weft.kernels.watch import bare

PARTS = 4  # of a convolution with its norm: weight and bias of either
Buffers = list[tuple[Tensor, ...]]  # running mean and variance, and number of batches of each norm


class _PCM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keep: Tensor | None,
        groups: int,
        momentum: float,
        eps: float,
        buffers: Buffers,
        *parts: Tensor,
    ) -> Tensor:
        from weft.kernels.gpu import pcm

        weights, biases, norms = _sort(parts)
        x = x.contiguous()
        with _on(x.device):
            ctx.plans = pcm.layout(x, weights, groups)
            y, kept = pcm.forward(x, keep, weights, biases, norms, buffers, momentum, eps, ctx.plans)
        ctx.groups, ctx.eps = groups, eps
        ctx.save_for_backward(x, keep, *parts, *kept)  # not the buffers, which the next batch changes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from weft.kernels.gpu import pcm

        x, keep, *rest = ctx.saved_tensors
        parts, kept = rest[: 2 * PARTS + 2], rest[2 * PARTS + 2 :]
        weights, biases, norms = _sort(parts)
        with _on(x.device):
            grad_x, sums, parameters = pcm.backward(
                grad.contiguous(), x, keep, weights, biases, norms, ctx.groups, ctx.eps, ctx.plans, kept
            )
        found: list[Tensor] = []
        sizes = [size for weight in weights for size in (weight.numel(), len(weight))]
        shares = sums.split(sizes)
        for i, weight in enumerate(weights):
            found += [shares[2 * i].view(weight.shape), shares[2 * i + 1], *(parameters[i] if i < len(norms) else ())]
        return grad_x, *(None,) * 5, *(g.to(part.dtype) for g, part in zip(found, parts, strict=True))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


def _sort(parts: tuple[Tensor, ...] | list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, ...]]]:
    """Weights, biases, and weight and bias of each norm."""
    norms = [tuple(parts[i + 2 : i + PARTS]) for i in range(0, len(parts) - 2, PARTS)]
    return list(parts[::PARTS]), list(parts[1::PARTS]), norms


def is_one_step(x: Tensor, pcm: nn.Sequential) -> bool:
    """Whether `train_pcm` may take these layers: three grouped convolutions, the first two with BatchNorm.

    Both norms must be alike and in training mode, and nobody may have put anything into the modules that are not
    called, nor measured that one of the kernels is slower than its twin.
    """
    if not usable(x) or not pcm.training or not x.numel() or x.dtype != amp_dtype(x) or not nobody_looks((x,)):
        return False
    layers: list[Any] = list(pcm)
    layers, rest = layers[::2], layers[1::2]
    if len(layers) != 3 or not bare(pcm, *layers) or not all(hasattr(layer, "conv") for layer in layers):
        return False
    convs, (*norms, last) = [layer.conv for layer in layers], [layer.bn for layer in layers]
    return (
        bare(*convs, types=(nn.Conv2d,))
        and bare(*norms, types=(nn.BatchNorm2d,))
        and bare(last, *rest, types=(nn.Identity,))
        and all(layer.act_in == "none" and layer.act == "silu" for layer in layers)
        and all(is_grouped(conv) and conv.bias is not None and conv.groups == convs[0].groups for conv in convs)
        and all(is_batch_norm(bn) and bn.training for bn in norms)
        and (norms[0].eps, norms[0].momentum) == (norms[1].eps, norms[1].momentum)
        and _is_faster(x, convs)
    )


def _is_faster(x: Tensor, convs: list[nn.Conv2d]) -> bool:
    from weft.kernels.gpu import pcm

    try:  # before anything has changed, and before there is no way back
        pcm.ask(x, [conv.weight for conv in convs], convs[0].groups)
    except TwinIsFaster:
        return False
    return True


def train_pcm(x: Tensor, keep: Tensor | None, pcm: nn.Sequential) -> Tensor:
    """x + keep * PCM(x) of a (B, H, W, C) map; `keep`, None or (B,), are the factors of stochastic depth."""
    first, second, third = list[Any](pcm)[::2]
    norms = first.bn, second.bn
    buffers = [(bn.running_mean, bn.running_var, bn.num_batches_tracked) for bn in norms]
    parts = [t for part in (first.conv, first.bn, second.conv, second.bn, third.conv) for t in (part.weight, part.bias)]
    return _PCM.apply(x, keep, first.conv.groups, first.bn.momentum, first.bn.eps, buffers, *parts)
