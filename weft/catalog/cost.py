"""Costs of a model: parameters, and multiply-accumulates counted on the meta device."""

import torch
from torch import nn

from weft.models.performer import PerformerAttention

LAYERS = ("convolution", "addmm", "mm")  # what convolutions and linear layers become; all else is attention


def count_parameters(model: nn.Module) -> int:
    """Parameters, and the Performer's fixed matrices, which the papers and the released codes count as such."""
    fixed = sum(m.w.numel() for m in model.modules() if isinstance(m, PerformerAttention))
    return sum(p.numel() for p in model.parameters()) + fixed


def count_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """MACs of one (C, H, W) picture: convolutions and every matrix product, those of attention included."""
    return sum(count_macs_by_kind(model, input_size))


def count_macs_by_kind(model: nn.Module, input_size: tuple[int, int, int]) -> tuple[int, int]:
    """MACs of convolutions and linear layers, and of the other matrix products, which are those of attention.

    `model` must live on the meta device: there nothing is computed, and fused attention is seen by the counter, which
    it is not on a CPU.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    counter = FlopCounterMode(display=False)
    with counter:
        model.eval()(torch.empty(1, *input_size, device="meta"))
    layers = attention = 0
    for operator, flops in counter.get_flop_counts()["Global"].items():
        if operator.__name__.split(".")[0] in LAYERS:
            layers += flops // 2
        else:
            attention += flops // 2
    return layers, attention
