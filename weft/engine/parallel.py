"""Several processes that train one model: how their gradients and reports become one.

torch's DistributedDataParallel averages the gradients in buckets while the backward pass still runs. All else that the
processes must know of each other in a step (loss, unreadable files, a wish to stop, BatchNorm's statistics) goes in one
small message after it. Whoever fails within a pass cannot take part any more: see `weft.engine.recovery`.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from weft.engine.device import World

HARMLESS = (  # said once in a process, by torch 2.15
    "`broadcast_buffers` is deprecated",  # its successor is not in torch 2.11
    "Grad strides do not match bucket view strides",  # in dimensions of length 1, as depthwise convolutions have
)


def distribute(model: nn.Module, rehearse: Callable[[nn.Module], object]) -> DistributedDataParallel:
    """The model with a backward pass that averages gradients over all processes; these hold the same weights already.

    `rehearse` makes a forward and a backward pass. The first, of this process alone, shows whether each trained
    parameter gets a gradient: only where one does not, torch has to look for such parameters in every pass. After the
    second, torch sorts its buckets by the order in which gradients came. So the first step after a start or a restart
    adds up in the same order as all others, and a run that went on arrives at the same bits.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    rehearse(model)
    some_unused = any(p.requires_grad and p.grad is None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        for message in HARMLESS:
            warnings.filterwarnings("ignore", message)
        distributed = DistributedDataParallel(
            model,
            broadcast_buffers=False,  # statistics are averaged, not those of the first process
            init_sync=False,
            find_unused_parameters=some_unused,
            gradient_as_bucket_view=True,  # no second copy of the gradients
        )
        rehearse(distributed)
    model.zero_grad(set_to_none=True)
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    return distributed


def reducing(forward: Any, when: bool) -> contextlib.AbstractContextManager[object]:
    """Within this, a backward pass sends the gradients that have added up so far, or only adds its own to them."""
    return contextlib.nullcontext() if when or not isinstance(forward, DistributedDataParallel) else forward.no_sync()


@torch.no_grad()
def reduce_report(world: World, statistics: Sequence[Tensor], report: Tensor) -> None:
    """Sums `report` (a few float32 numbers) over all processes, and averages `statistics`: one message."""
    if world.size == 1:
        return
    shares = [values / world.size for values in statistics]
    flat = torch.cat([values.reshape(-1).float() for values in (*shares, report)])
    dist.all_reduce(flat)
    targets = [*statistics, report]
    for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))


def running_statistics(model: nn.Module) -> list[Tensor]:
    """BatchNorm's means and variances: of each process's own pictures, unless they are averaged."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [values for norm in norms for values in (norm.running_mean, norm.running_var) if values is not None]
