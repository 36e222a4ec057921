"""Where a run computes: device, precision, and the other processes that torchrun started.

Gradients are averaged by one all-reduce after the backward pass, not by a wrapper around the model that reduces while
it runs: a process that ran out of memory, met a NaN or was asked to stop can then say so in the same message, so
all processes always agree on what happened, and nobody waits for a message that never comes.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config import RunConfig
from weft.errors import WeftError


@dataclass(frozen=True)
class World:
    """This process among all those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, value: Any) -> Any:
        """The main process's `value`, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, work: Callable[[], Any]) -> Any:
        """What `work` gives in the main process, in every process. Its error becomes everybody's."""
        value = None
        if self.is_main:
            try:
                value = work()
            except WeftError as error:
                value = error
        value = self.share(value)
        if isinstance(value, WeftError):
            raise value
        return value

    def wait(self) -> None:
        """Until everybody is here."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def join_world(device: str) -> World:
    """This process's place, from what torchrun set. With one process nothing is set up."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    chosen = pick_device(device)
    if size == 1:
        return World(chosen)
    if chosen.type == "cuda":
        if local >= torch.cuda.device_count():
            raise WeftError(
                f"Process {local} of this machine has no GPU of its own ({torch.cuda.device_count()} found);"
                " start torchrun with --nproc-per-node at most that, or with --run.device cpu."
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return World(chosen, rank, size)


def leave_world() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WeftError(f"run.device={name!r} does not exist; choose auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise WeftError(f"run.device={name!r}: this machine has {torch.cuda.device_count()} GPUs; try auto or cpu.")
    return device


def pick_precision(config: RunConfig, device: torch.device) -> torch.dtype:
    """The type that matrix products run in; weights and optimiser stay float32."""
    if config.precision == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if bf16 else torch.float32
    if config.precision == "fp16" and device.type != "cuda":
        raise WeftError("run.precision=fp16 needs a GPU; choose bf16 or fp32.")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]


def reduce_gradients(world: World, parameters: Sequence[nn.Parameter], report: Tensor) -> None:
    """Sums the gradients and `report` (a few float32 numbers) over all processes, in one message.

    A process that has no gradients, because it failed on the way, takes part with zeros; its report says so.
    """
    if world.size == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([*(grad.reshape(-1).float() for grad in grads), report])
    dist.all_reduce(flat)
    parts = flat.split([*(grad.numel() for grad in grads), report.numel()])
    for parameter, grad, part in zip(parameters, grads, parts, strict=False):
        if parameter.grad is not None:
            grad.copy_(part.view(grad.shape))
    report.copy_(parts[-1])


def shard(model: nn.Module, world: World, dtype: torch.dtype) -> None:
    """FSDP2: parameters, gradients and optimiser state of each block are spread over the processes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if world.size == 1:
        raise WeftError("run.fsdp spreads a model over several processes; start the command with torchrun.")
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype != torch.float32 else MixedPrecisionPolicy()
    for block in _blocks(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The repeated blocks: the members of every list of modules that holds no further list."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for child in module.children():
                nested = any(isinstance(inner, nn.ModuleList) for inner in child.modules())
                if not nested and sum(p.numel() for p in child.parameters()) > 10_000:
                    yield child


def convert_sync_bn(model: nn.Module, world: World) -> nn.Module:
    if world.device.type != "cuda":
        raise WeftError("run.sync_bn needs GPUs: torch has no synchronised BatchNorm for the CPU.")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if world.size > 1 else model
