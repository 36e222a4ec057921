"""Launches that are recorded once and replayed without Python: CUDA graphs of a module's forward and backward pass."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils import _pytree as pytree

from weft.kernels.switch import kernels_are_on

Key = tuple[object, ...]
replay_lock = threading.RLock()  # tensors that a recording reads and writes are there once for all threads
_graph_is_retained = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]

_precision = torch._C._get_fp32_precision_getter

SETTINGS = ("momentum", "eps", "p", "drop_prob")  # that modules read at every call, and a recording as it is made


def capture_key(x: Tensor) -> Key:
    """All that decides what a module launches for `x`, and what kind of tensor it gives."""
    amp = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    return x.shape, memory_format_of(x), x.dtype, x.device, amp, torch.is_inference_mode_enabled(), kernels_are_on()


def settings_of(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Where the `SETTINGS` of these modules are: their attributes, and the name of the one."""
    attributes = [module.__dict__ for module in modules]
    return [(own, name) for own in attributes for name in SETTINGS if type(own.get(name)) in (float, int)]


def precision() -> Key:
    """How products of float32 are computed."""
    return _precision("cuda", "matmul"), _precision("cuda", "conv")


def memory_format_of(x: Tensor) -> torch.memory_format:
    """How a copy of `x` lies in memory: as a map of channels last, or row by row."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@contextmanager
def without_autocast_cache(x: Tensor) -> Iterator[None]:
    """Autocast as it is, but every weight is cast anew: what was cast before is freed, and weights change."""
    kind = x.device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        yield


def writable_copy(x: Tensor) -> Tensor:
    """One that may be written to later, outside of inference mode, too."""
    with torch.inference_mode(False), torch.no_grad():
        return x.clone(memory_format=memory_format_of(x))


def try_recording(record: Callable[[], Any], x: Tensor) -> Any:
    """A recording; None, and a warning, where the host takes part, memory is short, or something is no tensor."""
    generator = default_generator(x.device)
    before = generator.clone_state()
    try:
        return record()
    except (RuntimeError, TypeError) as error:
        generator.graphsafe_set_state(before)  # the one in use still takes itself for recorded
        # Behind the reason comes that the recording could not be ended.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        why = (str(cause).splitlines() or [type(cause).__name__])[0]
        warnings.warn(f"Not replayed, but launched one by one: {why}", stacklevel=2)
        return None


def default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]


@cache
def stream_for_recordings(device: int) -> torch.cuda.Stream:
    """The one stream of a GPU that all recordings are made in."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: "GraphPool") -> Iterator[None]:
    """Launches inside go into `graph` instead of running; their memory comes from `pool`."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # it might free what lies on the GPU, which no recording allows
    try:
        with torch.cuda.stream(stream_for_recordings(torch.cuda.current_device())):
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")  # readers of data may go on
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


class GraphPool:
    """Memory that recordings share: what one of them needs during a replay alone, another uses afterwards.

    What a forward pass leaves to its backward pass stays, and may lie where recordings that were made before have what
    they need for a moment. So `pending` says which recordings, by the order in which they were made, have something
    there. All of them are replayed in one stream. The memory lives as long as one of them.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.count = 0
        self.pending: dict[int, weakref.ref[PendingReplay]] = {}

    def add_pending(self, replay: "PendingReplay") -> None:
        number = replay.recording.number
        self.pending[number] = weakref.ref(replay, lambda _: self.pending.pop(number, None))

    def pending_after(self, number: int) -> list["PendingReplay"]:
        """The passes whose backward pass is still to come, and that the recording of this number would write over."""
        if not self.pending:
            return []
        pending = self.pending.copy()  # one may end at any time, in another thread or as garbage
        replays = [replay() for other, replay in pending.items() if other > number]
        return [replay for replay in replays if replay is not None]


class Recording:
    """The launches of a module for some inputs and, where gradients are wanted, of the way back.

    Its tensors stay where they are: inputs are copied to `inputs`, results and gradients are cloned. With `retain`, a
    backward pass leaves what it needs as it is, so that there may be another one.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor | None], pool: GraphPool, retain: bool = False):
        self.pool, self.retain, self.number = pool, retain, pool.count
        pool.count += 1
        first = next(x for x in inputs if x is not None)
        self.inputs = [None if x is None else writable_copy(x) for x in inputs]
        self.forward, self.backward = torch.cuda.CUDAGraph(), None
        saved: list[Tensor] = []  # from the forward pass for the backward pass; alive, so that nothing else lies there
        aliases = self._aliases(module, inputs) if torch.is_grad_enabled() else {}
        watched = saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x) if retain else nullcontext()
        with without_autocast_cache(first), capturing(self.forward, pool), watched:
            outputs, self.spec = pytree.tree_flatten(functional_call(module, aliases, tuple(self.inputs)))
        if any(isinstance(y, Tensor) and y.requires_grad for y in outputs):
            self._record_backward(outputs, [*self.inputs, *(p for p in aliases.values() if p.requires_grad)])
        own = {storage_address(x) for x in (*self.inputs, *module.parameters(), *module.buffers()) if x is not None}
        self.saved = distinct_memory(x for x in saved if storage_address(x) not in own)
        self.outputs = [alias_of(y) for y in outputs]

    def _aliases(self, module: nn.Module, inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """In place of the weights stand others in the same memory, of which no earlier pass has made autograd remember
        a stream: that would be waited for, which no recording can."""
        for own, x in zip(self.inputs, inputs, strict=True):
            if own is not None and x is not None:
                own.requires_grad_(x.requires_grad)
        return {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in module.named_parameters()}

    def _record_backward(self, outputs: Sequence[Any], leaves: Sequence[Tensor | None]) -> None:
        self.backward = torch.cuda.CUDAGraph()
        reached = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        with torch.autocast(reached[0].device.type, enabled=False), capturing(self.backward, self.pool):
            upstream = [torch.empty_like(y) for y in reached]
            grads = iter(torch.autograd.grad(reached, wanted, upstream, allow_unused=True))
        self.leaf_grads = [alias_of(next(grads)) if x is not None and x.requires_grad else None for x in leaves]
        given = iter(upstream)
        self.output_grads = [alias_of(next(given)) if y is not None and y.requires_grad else None for y in outputs]

    @property
    def is_free(self) -> bool:
        """Whether a replay would write over nothing that a backward pass still needs."""
        return self.number not in self.pool.pending and not self.pool.pending_after(self.number)

    def __call__(self, inputs: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Any:
        """The module's results for `inputs`; `weights` are those that want gradients."""
        if self.backward is None:
            return pytree.tree_unflatten(list(self.replay_forward(inputs)), self.spec)
        replay = PendingReplay(self, weights)
        self.pool.add_pending(replay)
        return pytree.tree_unflatten(list(ReplayFunction.apply(replay, *inputs, *weights)), self.spec)

    def replay_forward(self, inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
        for own, x in zip(self.inputs, inputs, strict=False):  # behind the inputs come weights, which are read in place
            if own is not None and x is not None:
                own.copy_(x)
        self.forward.replay()
        return tuple(None if y is None else y.clone() for y in self.outputs)

    def replay_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs and weights, in memory of their own."""
        assert self.backward is not None
        for own, grad in zip(self.output_grads, grads, strict=True):
            if own is not None and grad is not None:
                own.copy_(grad)
            elif own is not None:
                own.zero_()
        self.backward.replay()
        count = len(self.inputs)
        inputs = [None if grad is None else grad.clone() for grad in self.leaf_grads[:count]]
        weights = [grad for grad in self.leaf_grads[count:] if grad is not None]
        copies = iter(torch._foreach_mul(weights, 1.0) if weights else ())  # by one kernel
        return inputs + [None if grad is None else next(copies) for grad in self.leaf_grads[count:]]


def storage_address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def distinct_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The memory in which these tensors lie, as bytes, each piece once: views may overlap, and may be expanded."""
    storages = {storage_address(x): x.untyped_storage() for x in tensors if x.numel()}
    return [torch.empty(0, dtype=torch.uint8, device=part.device).set_(part) for part in storages.values()]


class CudaArray:
    """A part of a GPU's memory, in the words by which libraries show each other theirs."""

    def __init__(self, start: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (start, False), "version": 3}


def alias_of(x: Tensor | None) -> Tensor | None:
    """A tensor where `x` lies that does not hold on to that memory: a pool may give it to others between replays."""
    if x is None or not x.numel():
        return x
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    with torch.inference_mode(False):
        flat = torch.as_tensor(CudaArray(x.data_ptr(), count * x.element_size()), device=x.device)
        return flat.view(x.dtype).as_strided(x.shape, x.stride())


class PendingReplay:
    """One replay of a recording; it is done when its backward pass was replayed, or can no longer come."""

    def __init__(self, recording: Recording, weights: Sequence[Tensor] = ()):
        self.recording, self.done = recording, False
        self.copies: list[Tensor] | None = None
        self.weights, self.versions = weights, [p._version for p in weights]

    def check_weights(self) -> None:
        """The recording reads weights where they are: those of now, which must be those of the forward pass."""
        if [p._version for p in self.weights] != self.versions:
            raise RuntimeError(
                "Weights were modified by an inplace operation between a replayed forward pass and its backward pass."
            )

    def save(self) -> None:
        """Copies what its backward pass needs to where it is safe."""
        if self.copies is None:
            self.copies = [x.clone() for x in self.recording.saved]

    def restore(self) -> None:
        for x, copy in zip(self.recording.saved, self.copies or (), strict=False):
            x.copy_(copy)


class ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replay: PendingReplay, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.replay = replay
        return replay.recording.replay_forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        replay, recording = ctx.replay, ctx.replay.recording
        with replay_lock:
            if replay.done:
                raise RuntimeError("A replayed pass has one backward pass; retain_graph needs the model itself.")
            replay.check_weights()
            for other in recording.pool.pending_after(recording.number):
                other.save()
            replay.restore()
            if not (recording.retain and _graph_is_retained()):
                replay.done = True
                recording.pool.pending.pop(recording.number, None)
            return None, *recording.replay_backward(grads)
