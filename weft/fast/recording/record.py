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

from weft.fast.recording.graphs import (
    GraphPool,
    Key,
    Recording,
    capture_key,
    precision,
    replay_lock,
    settings_of,
    try_recording,
)

CALLS_IN_A_ROW = 3  # alike, until a block is recorded: shapes that come and go are not worth a recording
MOST_RECORDINGS = 2  # of a block, such as one for training and one for evaluation
MOST_MEMORY = 0.5  # of a GPU; a recording keeps what it needs, also while it is not replayed

# By device and stream.
_pools: "weakref.WeakValueDictionary[tuple[int, int], GraphPool]" = weakref.WeakValueDictionary()


class FunctionModule(nn.Module):
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


class BlockRecordings:
    """The recordings of one block; a copy of the block begins without any."""

    def __init__(self) -> None:
        self.made: dict[Key, Recording | None] = {}  # None: cannot be recorded
        self.settings: list[tuple[dict[str, Any], str]] | None = None  # of the block's modules
        self.first: Key | None = None
        self.last: Key | None = None
        self.times = 0

    def __deepcopy__(self, memo: Any) -> "BlockRecordings":
        return BlockRecordings()

    def __reduce__(self) -> Any:
        return BlockRecordings, ()

    @property
    def expects_recording(self) -> bool:
        """Whether the next call will be recorded if it is like the last one, or is still to be expected to."""
        return self.times == CALLS_IN_A_ROW - 1 or self.last == self.first

    def run(self, function: Callable[..., Any], parts: Sequence[nn.Module], inputs: Sequence[Tensor | None]) -> Any:
        """`function(*inputs)`, replayed; None where there is no recording, or it is in use."""
        with replay_lock:
            weights = [p for part in parts for p in part.__dict__["_parameters"].values() if p is not None]
            recording = self._find(function, parts, weights, inputs)
            if recording is None or not recording.is_free:
                return None
            return recording(inputs, [p for p in dict.fromkeys(weights) if p.requires_grad])

    def _find(self, function: Any, parts: Any, weights: Sequence[Tensor], inputs: Any) -> Recording | None:
        if self.settings is None:
            self.settings = settings_of(parts)
        key = (
            *(None if x is None else (*capture_key(x), x.requires_grad) for x in inputs),
            *state_key(parts, weights),
            *[own.get(name) for own, name in self.settings],
        )
        if key in self.made:
            found = self.made[key] = self.made.pop(key)  # the last in the dictionary is the last that was used
            if found is None or found.pool is _pools.get(device_and_stream()):
                return found
            del self.made[key]
            self.last, self.times = key, CALLS_IN_A_ROW - 1  # recorded again at once
        self.times = self.times + 1 if key == self.last else 1
        self.last = key
        self.first = self.first or key
        if self.times != CALLS_IN_A_ROW or not has_spare_memory(inputs[0].device):  # which takes long to ask
            return None
        return self._record(key, function, parts, inputs)

    def _record(self, key: Key, function: Any, parts: Any, inputs: Any) -> Recording | None:
        def record() -> Recording:
            pool = _pools.get(device_and_stream()) or _pools.setdefault(device_and_stream(), GraphPool())
            return Recording(FunctionModule(function, parts), inputs, pool, retain=True)

        made = self.made[key] = try_recording(record, inputs[0])
        if made is None:  # all others draw their random numbers from a state that is no longer in use
            _pools.pop(device_and_stream(), None)
        while len(self.made) > MOST_RECORDINGS:
            del self.made[next(iter(self.made))]
        return made


def state_key(parts: Sequence[nn.Module], weights: Sequence[Tensor]) -> Key:
    """All that decides a block's launches beside its inputs, and must not change between a recording and its replay."""
    return (
        torch.is_grad_enabled(),
        device_and_stream(),
        precision(),
        tuple([part.training for part in parts]),
        tuple([(p.data_ptr(), p.dtype, p.requires_grad) for p in weights]),
        tuple([b.data_ptr() for part in parts for b in part.__dict__["_buffers"].values() if b is not None]),
    )


def device_and_stream() -> tuple[int, int]:
    """The current ones."""
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentRawStream(device)


def has_spare_memory(device: torch.device) -> bool:
    """Whether there is memory to spare on a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < MOST_MEMORY * total


def may_record(x: Tensor) -> bool:
    """Whether recordings are made and replayed here: on the current GPU, forward, and where nobody takes care of what
    is saved for the way back, as checkpointing does."""
    from weft.kernels.triton.launch import dry_run_keys  # imports Triton

    return (
        x.is_cuda
        and x.get_device() == torch._C._cuda_getDevice()
        and dry_run_keys.get() is None
        and not torch.cuda.is_current_stream_capturing()
        and torch._C._current_graph_task_id() == -1
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # pyright: ignore
        and process_may_record()
    )


def process_may_record() -> bool:
    """Whether this process makes recordings: alone, and unless every pass must give the same numbers as the first ones,
    which may be plain."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not grouped and not torch.are_deterministic_algorithms_enabled()
