"""Training of a PCM: the kernels of grouped convolutions and of BatchNorm one after the other, with nothing between."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.choose import launch_parameters
from weft.kernels.gpu import batch_norm, grouped


class Layout(NamedTuple):
    """How the three convolutions are launched, forward and for the gradients, and where their matrices start."""

    ways: list[grouped.Plan]
    backs: list[grouped.Plan]
    jobs: grouped.Jobs


def _widths(x: Tensor, weights: list[Tensor]) -> list[tuple[int, int]]:
    return list(pairwise((x.shape[-1], *(len(weight) for weight in weights))))


def layout(x: Tensor, weights: list[Tensor], groups: int) -> Layout:
    rows, device, widths = x.numel() // x.shape[-1], x.device, _widths(x, weights)
    ways = [grouped.plan("grouped_conv", rows, c_in, c_out, groups, device) for c_in, c_out in widths]
    backs = [grouped.plan("grouped_conv", rows, c_out, c_in, groups, device) for c_in, c_out in widths]
    plans = (*((i, way, False) for i, way in enumerate(ways)), *((i, back, True) for i, back in enumerate(backs)))
    return Layout(ways, backs, grouped.jobs(plans, device))


def ask(x: Tensor, weights: list[Tensor], groups: int) -> None:
    """Raises TwinIsFaster if any of the kernels would."""
    rows, device, widths = x.numel() // x.shape[-1], x.device, _widths(x, weights)
    for c_in, c_out in widths:
        grouped.plan("grouped_conv", rows, c_in, c_out, groups, device)
        grouped.plan("grouped_conv", rows, c_out, c_in, groups, device)
        grouped.plan("grouped_conv_weight", rows, c_in, c_out, groups, device)
    for _, channels in widths[:2]:
        launch_parameters("batch_norm_statistics", device, batch_norm.SHARED, rows=rows, channels=channels)
        for operation, default in (("batch_norm", batch_norm.TILES), ("batch_norm_backward", batch_norm.SHARED)):
            launch_parameters(operation, device, default, rows=rows, channels=channels, residual=False)


def forward(
    x: Tensor,
    keep: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor],
    norms: list[tuple[Tensor, ...]],
    buffers: list[tuple[Tensor, ...]],
    momentum: float,
    eps: float,
    plans: Layout,
) -> tuple[Tensor, list[Tensor]]:
    """x + keep * PCM(x), and what the gradient needs; changes the `buffers`, running mean and variance and batches."""
    ways, _, jobs = plans
    packed, y = grouped.pack([weight.contiguous() for weight in weights], jobs, x.dtype), x
    kept = [packed]
    for way, start, bias, norm, running in zip(ways, jobs.starts, biases, norms, buffers, strict=False):
        (gamma, beta), (running_mean, running_var, batches) = norm, running
        raw = grouped.convolve(y, packed, start, bias, way)
        moments = batch_norm.statistics(raw, running_mean, running_var, batches, momentum)
        y = torch.empty_like(raw)
        batch_norm.apply(raw, moments, None, gamma, beta, None, None, eps, "silu", y)
        kept += [raw, moments, y]
    y = grouped.convolve(y, packed, jobs.starts[2], biases[2], ways[2], "silu", residual=x, keep=keep)
    return y, kept


def backward(
    grad: Tensor,
    x: Tensor,
    keep: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor],
    norms: list[tuple[Tensor, ...]],
    groups: int,
    eps: float,
    plans: Layout,
    kept: list[Tensor],
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients of x, of weights and biases one behind the other, and of weight and bias of each norm."""
    ways, backs, (_, starts, _, _) = plans
    packed, raw1, moments1, y1, raw2, moments2, y2 = kept
    upstream3 = grouped.convolve(
        y2, packed, starts[2], biases[2], ways[2], "silu", residual=grad, keep=keep, gradient=True
    )
    upstream2, norm2 = _through_norm(
        grouped.convolve(upstream3, packed, starts[5], None, backs[2]), raw2, moments2, norms[1], eps
    )
    upstream1, norm1 = _through_norm(
        grouped.convolve(upstream2, packed, starts[4], None, backs[1]), raw1, moments1, norms[0], eps
    )
    grad_x = grouped.convolve(upstream1, packed, starts[3], None, backs[0], residual=grad)
    pairs = [(upstream1, x), (upstream2, y1), (upstream3, y2)]
    return grad_x, grouped.sum_up(pairs, weights, groups), [norm1, norm2]


def _through_norm(
    grad: Tensor, raw: Tensor, moments: Tensor, norm: tuple[Tensor, ...], eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Gradients of what went into a norm with its SiLU, and of its weight and bias."""
    grad_raw = torch.empty_like(raw)
    gamma, beta = norm
    return grad_raw, batch_norm.backward(grad, raw, moments, None, gamma, beta, None, None, eps, "silu", grad_raw, None)
