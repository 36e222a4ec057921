"""Blocks that Python launches twice and no more: what a fused block launches for a shape is recorded, and replayed.

On most machines Python takes longer to launch the kernels of a training step than a GPU takes to run them. Every block
of a model makes recordings of its own, so that the loop around the model, hooks between blocks, several losses and
accumulated gradients stay what they are. `weft.replay` does the same for a whole model, and saves what is left.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.fast.graphs import Key, Pool, Recording, attempt, circumstances, one_at_a_time

IN_A_ROW = 3  # times that a block must be called alike: shapes that come and go are not worth a recording
MOST = 2  # recordings of a block, such as one for training and one for evaluation
MOST_MEMORY = 0.5  # of a GPU; a recording keeps what it needs, also while it is not replayed

_pools: "weakref.WeakValueDictionary[tuple[int, int], Pool]" = weakref.WeakValueDictionary()  # by device and stream


class Body(nn.Module):
    """A function and the modules whose parameters it reads."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]):
        super().__init__()
        self.function, self.inside = function, nn.ModuleList()
        inside: set[nn.Module] = set()
        for module in modules:
            if module not in inside:  # each once: what stands in for a parameter has one name
                self.inside.append(module)
                inside.update(module.modules())

    def forward(self, *inputs: Tensor | None) -> Any:
        return self.function(*inputs)


class Recordings:
    """Those of one block; a copy of the block begins without any."""

    def __init__(self) -> None:
        self.made: dict[Key, Recording | None] = {}  # None: cannot be recorded
        self.first: Key | None = None
        self.last: Key | None = None
        self.times = 0

    def __deepcopy__(self, memo: Any) -> "Recordings":
        return Recordings()

    def __reduce__(self) -> Any:
        return Recordings, ()

    @property
    def is_near(self) -> bool:
        """Whether the next call will be recorded if it is like the last one, or is still to be expected to."""
        return self.times == IN_A_ROW - 1 or self.last == self.first

    def run(self, function: Callable[..., Any], parts: Sequence[nn.Module], inputs: Sequence[Tensor | None]) -> Any:
        """`function(*inputs)`, replayed; None where there is no recording, or it is in use."""
        with one_at_a_time:
            weights = [p for part in parts for p in part.__dict__["_parameters"].values() if p is not None]
            recording = self._find(function, parts, weights, inputs)
            if recording is None or not recording.is_free:
                return None
            return recording(inputs, [p for p in weights if p.requires_grad])

    def _find(self, function: Any, parts: Any, weights: Sequence[Tensor], inputs: Any) -> Recording | None:
        key = *(None if x is None else (*circumstances(x), x.requires_grad) for x in inputs), *state(parts, weights)
        if key in self.made:
            found = self.made[key] = self.made.pop(key)  # the last in the dictionary is the last that was used
            if found is None or found.pool is _pools.get(place()):
                return found
            del self.made[key]
        self.times = self.times + 1 if key == self.last else 1
        self.last = key
        self.first = self.first or key
        if self.times < IN_A_ROW or not has_memory(inputs[0].device):
            return None
        made = self.made[key] = attempt(lambda: _record(Body(function, parts), inputs), inputs[0])
        if made is None:
            _pools.pop(place(), None)  # all others draw their random numbers from a state that is no longer in use
        while len(self.made) > MOST:
            del self.made[next(iter(self.made))]
        return made


def state(parts: Sequence[nn.Module], weights: Sequence[Tensor]) -> Key:
    """What decides a block's launches beside its inputs, and must not change between a recording and its replay."""
    return (
        torch.is_grad_enabled(),
        place(),
        tuple([part.training for part in parts]),
        tuple([(p.data_ptr(), p.requires_grad) for p in weights]),
        tuple([b.data_ptr() for part in parts for b in part.__dict__["_buffers"].values() if b is not None]),
    )


def place() -> tuple[int, int]:
    """The current device and stream."""
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentRawStream(device)


def _record(body: Body, inputs: Sequence[Tensor | None]) -> Recording:
    pool = _pools.get(place()) or _pools.setdefault(place(), Pool())
    return Recording(body, inputs, pool, retain=True)


def has_memory(device: torch.device) -> bool:
    """Whether there is memory to spare on a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < MOST_MEMORY * total


def may_record(x: Tensor) -> bool:
    """Whether recordings are made and replayed here: on the current GPU, forward, and where nobody takes care of what
    is saved for the way back, as checkpointing does."""
    from weft.kernels.triton.launch import rehearsing  # imports Triton

    return (
        x.is_cuda
        and x.get_device() == torch._C._cuda_getDevice()
        and rehearsing.get() is None
        and not torch.cuda.is_current_stream_capturing()
        and torch._C._current_graph_task_id() == -1
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # pyright: ignore
        and records_here()
    )


def records_here() -> bool:
    """Whether this process makes recordings: alone, and unless every pass must give the same numbers as the first ones,
    which may be plain."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not grouped and not torch.are_deterministic_algorithms_enabled()
