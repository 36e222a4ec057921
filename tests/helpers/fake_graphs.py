"""CUDA graphs without a GPU: what is recorded is a list of torch's operations, and a replay runs them again.

As a graph does, a replay writes its results where those of the recording lie. As in a pool of memory, it spoils what
recordings that were made later have saved there for their backward passes, and the results of all others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weft.fast import replay
from weft.fast.recording import graphs, record


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.recording: Any = None

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, found in self.calls:
                again = pytree.tree_leaves(function(*args, **kwargs))
                for old, new in zip(found, again, strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        for other in self.recording.pool.recordings:
            if other is not self.recording:
                spoil(other, other.number > self.recording.number)


def spoil(recording: Any, is_later: bool) -> None:
    """Writes over memory of a recording that others use, too: bytes of ones, which are NaN as numbers."""
    for part in recording.saved if is_later else ():
        part.fill_(255)
    own = {graphs.storage_address(x) for x in (*recording.saved, *recording.own)}
    results = (*recording.outputs, *(recording.leaf_grads if recording.backward else ()))
    for part in graphs.distinct_memory(x for x in results if x is not None and graphs.storage_address(x) not in own):
        part.fill_(255)


class Log(TorchDispatchMode):
    def __init__(self, graph: FakeGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        args, kwargs, leaves = pytree.tree_map_only(
            Tensor, lambda x: x.detach() if x.requires_grad else x, (args, kwargs or {}, pytree.tree_leaves(found))
        )
        if "empty" not in str(function):  # memory alone
            self.graph.calls.append((function, args, kwargs, leaves))
        return found


@contextmanager
def capturing(graph: FakeGraph, pool: Any) -> Iterator[None]:
    with Log(graph):
        yield


class FakeGraphPool(graphs.GraphPool):
    def __init__(self) -> None:
        self.count, self.pending, self.recordings = 0, {}, []


class FakeRecording(graphs.Recording):
    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        before, drawn = [buffer.clone() for buffer in module.buffers()], torch.get_rng_state()
        super().__init__(module, *args, **kwargs)
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)  # a GPU computes nothing while it records
        torch.set_rng_state(drawn)  # and draws nothing
        self.own = [x for x in (*self.inputs, *module.parameters(), *module.buffers()) if x is not None]
        for graph in (self.forward, self.backward):
            if graph is not None:
                graph.recording = self
        self.pool.recordings.append(self)  # pyright: ignore[reportAttributeAccessIssue]


class State:
    """What stands in for a generator of random numbers: it says when it was put back."""

    restored = False

    def clone_state(self) -> str:
        return "before"

    def graphsafe_set_state(self, state: str) -> None:
        self.restored = state == "before"


def install(monkeypatch: Any) -> State:
    """Lets the tensors of a CPU pass for those of a GPU."""
    state = State()
    monkeypatch.setattr(graphs, "capturing", capturing)
    monkeypatch.setattr(graphs, "alias_of", lambda x: None if x is None else x.detach())
    monkeypatch.setattr(graphs, "default_generator", lambda device: state)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    for module in (record, replay):
        monkeypatch.setattr(module, "GraphPool", FakeGraphPool)
        monkeypatch.setattr(module, "Recording", FakeRecording)
    return state
