"""CUDA graphs without a GPU: what is recorded is a list of torch's operations, and a replay runs them again.

As a graph does, a replay writes its results where those of the recording lie. As in a pool of memory, it spoils what
recordings that were made later have kept there for their backward passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weft.fast import graphs, record, replay


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
        for later in self.recording.pool.recordings:
            if later.number > self.recording.number:
                for kept in later.kept:
                    kept.fill_(torch.nan if kept.is_floating_point() else 0)


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
def recorded(graph: FakeGraph, pool: Any) -> Iterator[None]:
    with Log(graph):
        yield


class FakePool(graphs.Pool):
    def __init__(self) -> None:
        self.count, self.waiting, self.recordings = 0, {}, []


class FakeRecording(graphs.Recording):
    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        before = [buffer.clone() for buffer in module.buffers()]
        super().__init__(module, *args, **kwargs)
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)  # a GPU computes nothing while it records
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
    monkeypatch.setattr(graphs, "recorded", recorded)
    monkeypatch.setattr(graphs, "lent", lambda x: None if x is None else x.detach())
    monkeypatch.setattr(graphs, "generator_of", lambda device: state)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    for module in (record, replay):
        monkeypatch.setattr(module, "Pool", FakePool)
        monkeypatch.setattr(module, "Recording", FakeRecording)
    return state
