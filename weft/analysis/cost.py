"""What a model costs: parameters, and multiply-accumulates counted on the meta device."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """MACs of one (C, H, W) picture: convolutions and every matrix product, those of attention included.

    `model` must live on the meta device: there nothing is computed, and fused attention is seen by the counter, which
    it is not on a CPU.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        model.eval()(torch.empty(1, *input_size, device="meta"))
    return counter.get_total_flops() // 2
