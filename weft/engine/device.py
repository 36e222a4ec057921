"""The place where a run computes: device, precision, and the other processes that torchrun started.

All processes must always agree on what happened, so that nobody waits for a message that never comes. What may go wrong
outside of a training step goes through `World.on_main` or `World.propagate_errors`: an error of one process ends all of
them. `weft.engine.parallel` has what goes on within a step.
"""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from weft.config import RunConfig
from weft.errors import WeftError
from weft.words import clean, many

MIN_UNIT_PARAMETERS = 10_000  # for which a message of their own pays in a sharded model
TIMEOUT = timedelta(minutes=30)  # with other processes, such as one that writes the report


def chooses_threads(run: RunConfig, device: torch.device) -> bool:
    """Whether a run may compute with other threads than this process has: on a CPU, where nobody said how many."""
    return device.type == "cpu" and not (run.threads or run.deterministic or "OMP_NUM_THREADS" in os.environ)


@dataclass(frozen=True)
class World:
    """This process among all those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether no other process of this machine comes before this one."""
        return self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def on_one_machine(self) -> bool:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) == self.size

    def broadcast(self, value: Any) -> Any:
        """The main process's `value`, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Calls `work` in the main process and returns its result in every process. Its error becomes everybody's."""
        value = None
        with self.propagate_errors():
            if self.is_main:
                value = work()
        return self.broadcast(value)

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Ends all processes after this block where something went wrong in one; the main process says what it was.

        There must be no message between processes within the block.
        """
        if self.size == 1:
            yield
            return
        mine = None
        try:
            yield
        except (WeftError, OSError) as error:
            mine = error
        first = next((text for text in self.all_gather(mine and str(mine)) if text), None)
        if first is not None:
            self.fail(mine or WeftError(first))

    def fail(self, error: Exception) -> NoReturn:
        """Ends all processes, which have all found the same error: the main one says it."""
        raise error if self.is_main else SystemExit(2)

    def with_device(self, name: str) -> "World":
        """The same place, on its device: with several processes on a machine each has a GPU of its own."""
        with self.propagate_errors():
            device = pick_device(name)
            if self.size > 1 and device.type == "cuda":
                local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
                if local >= count:
                    raise WeftError(
                        f"Process {local} on this machine has no GPU of its own ({count} found);"
                        f" start torchrun with --nproc-per-node {count} at most, or weft with --device cpu."
                    )
                device = torch.device("cuda", local)
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)
        return replace(self, device=device)

    def barrier(self) -> None:
        """Waits until every process is here."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@contextlib.contextmanager
def process_group() -> Iterator[World]:
    """This process's place, from what torchrun set; on the CPU until `World.with_device`.

    With one process nothing is set up. A process that fails alone says so itself and ends without a farewell, which
    would wait for the others; torchrun, or their broken connections, then end these without many words.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    world = World(torch.device("cpu"), rank, size)
    if size == 1:
        yield world
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=_rendezvous(rank, size), rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield world
    except (WeftError, OSError) as error:
        if world.is_main:
            raise
        print(clean(f"weft: process {rank}: {error}"), file=sys.stderr)
        raise SystemExit(2) from error
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        world.fail(WeftError("The connection to another process is lost: it has ended, and says why, or was killed."))
    dist.destroy_process_group()


def _rendezvous(rank: int, size: int) -> dist.Store:
    """A store in which the processes of this attempt, and no dead ones of an earlier one, exchange their addresses.

    `init_process_group` from the environment alone would find the addresses of the dead: torchrun's store lives through
    its restarts, with all that was left in it, and machines need not agree on the number of restarts (pytorch/pytorch
    135712; a test shows it). So everybody says hello with a name never used before, and the main process, which cannot
    know whether a hello is old, welcomes each until all have answered.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(host, port, size, rank == 0 and not hosted, TIMEOUT, wait_for_workers=False)
    me = uuid.uuid4().hex
    if rank:
        store.set(f"hello {rank}", me)
        meeting = store.get(f"welcome {me}").decode()
        store.set(f"{meeting} {rank}", me)
        return dist.PrefixStore(meeting, store)
    missing, start = set(range(1, size)), time.monotonic()
    while missing:
        for other in missing:
            if store.check([f"hello {other}"]):
                store.set(f"welcome {store.get(f'hello {other}').decode()}", me)
        time.sleep(0.02)
        missing = {other for other in missing if not store.check([f"{me} {other}"])}
        if time.monotonic() - start > TIMEOUT.total_seconds():
            raise WeftError(f"{len(missing)} of {size} processes did not join; look at their output.")
    return dist.PrefixStore(me, store)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WeftError(f"run.device={name!r} does not exist; choose auto, cpu, cuda or cuda:N.") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise WeftError(f"run.device={name!r}: this machine has {many(count, 'GPU')}; try auto or cpu.")
    return device


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def pick_precision(config: RunConfig, device: torch.device) -> torch.dtype:
    """The type that matrix products run in; weights and optimiser stay float32."""
    if config.precision == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if bf16 else torch.float32
    if config.precision == "fp16" and device.type != "cuda":
        raise WeftError("run.precision=fp16 needs a GPU; choose bf16 or fp32.")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]


def shard_model(model: nn.Module, world: World) -> None:
    """FSDP2: parameters, gradients and optimiser state of each unit are spread over the processes.

    They stay float32, also between processes: autocast then does what it does for a model that is not sharded.
    """
    from torch.distributed.fsdp import fully_shard

    if world.size == 1:
        raise WeftError("run.fsdp shards a model over several processes; start the command with torchrun.")
    for unit in fsdp_units(model, num_parameters(model) // 4):
        fully_shard(unit)
    fully_shard(model)


def fsdp_units(module: nn.Module, limit: int) -> Iterator[nn.Module]:
    """Modules that are gathered and sharded as one: blocks and stages, inner ones before outer ones.

    These are the members of lists of modules; one of more than `limit` parameters leaves the lists within it their own.
    """
    for child in module.children():
        is_member = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
        if not is_member or num_parameters(child) > limit:
            yield from fsdp_units(child, limit)
        if is_member and num_parameters(child) >= MIN_UNIT_PARAMETERS:
            yield child


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def convert_sync_bn(model: nn.Module, world: World) -> nn.Module:
    if world.device.type != "cuda":
        raise WeftError("run.sync_bn needs GPUs: torch has no synchronised BatchNorm for the CPU.")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if world.size > 1 else model
