"""What a model costs: parameters, and multiply-accumulates counted on the meta device."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from weft.models.performer import PerformerAttention

LAYERS = ("convolution", "addmm", "mm")  # what convolutions and linear layers become; all else is attention


def count_parameters(model: nn.Module) -> int:
    """Parameters, and the Performer's fixed matrices, which the papers and the released codes count as such."""
    fixed = sum(m.w.numel() for m in model.modules() if isinstance(m, PerformerAttention))
    return sum(p.numel() for p in model.parameters()) + fixed


def count_macs(model: nn.Module, input_size: tuple[int, int, int], attention: bool = True) -> int:
    """MACs of one (C, H, W) picture: convolutions and every matrix product, `attention` says whether its own as well.

    `model` must live on the meta device: there nothing is computed, and fused attention is seen by the counter, which
    it is not on a CPU.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        model.eval()(torch.empty(1, *input_size, device="meta"))
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in counts.items() if attention or op.__name__.split(".")[0] in LAYERS) // 2
