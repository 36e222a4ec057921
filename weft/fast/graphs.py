"""Launches that are recorded once and replayed without Python: CUDA graphs of a module's forward and backward pass."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
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
one_at_a_time = threading.RLock()  # what a recording reads and writes has one place
_will_be_kept = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]


def circumstances(x: Tensor) -> Key:
    """All that decides what a module launches for `x`, and what kind of tensor it gives."""
    amp = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    return x.shape, layout(x), x.dtype, x.device, amp, torch.is_inference_mode_enabled(), kernels_are_on()


def layout(x: Tensor) -> torch.memory_format:
    """How a copy of `x` lies in memory: as a map of channels last, or row by row."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@contextmanager
def uncached(x: Tensor) -> Iterator[None]:
    """Autocast as it is, but every weight is cast anew: what was cast before is freed, and weights change."""
    kind = x.device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        yield


def writable_copy(x: Tensor) -> Tensor:
    """One that may be written to later, outside of inference mode, too."""
    with torch.inference_mode(False), torch.no_grad():
        return x.clone(memory_format=layout(x))


def attempt(record: Callable[[], Any], x: Tensor) -> Any:
    """A recording; None, and a warning, where the host takes part, memory is short, or something is no tensor."""
    generator = generator_of(x.device)
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


def generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]


@cache
def _stream_for_recordings(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: "Pool") -> Iterator[None]:
    """Whatever is launched inside goes into `graph` instead of running; its memory comes from `pool`."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # it might free what lies on the GPU, which no recording allows
    try:
        with torch.cuda.stream(_stream_for_recordings(torch.cuda.current_device())):
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")  # readers of data may go on
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


class Pool:
    """Memory that recordings share: what one of them needs during a replay alone, another uses afterwards.

    What a forward pass leaves to its backward pass stays, and may lie where recordings that were made before have what
    they need for a moment. So `waiting` says which recordings, by the order in which they were made, have something
    there. All of them are replayed in one stream. The memory lives as long as one of them.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.count = 0
        self.waiting: dict[int, weakref.ref[Turn]] = {}

    def wait(self, turn: "Turn") -> None:
        number = turn.recording.number
        self.waiting[number] = weakref.ref(turn, lambda _: self.waiting.pop(number, None))

    def later(self, number: int) -> list["Turn"]:
        """Those that wait, and would be written over by the recording of this number."""
        if not self.waiting or max(self.waiting) <= number:
            return []
        turns = [turn() for other, turn in list(self.waiting.items()) if other > number]
        return [turn for turn in turns if turn is not None]


class Recording:
    """The launches of a module for some inputs and, where gradients are wanted, of the way back.

    Its tensors stay where they are: inputs are copied to `given`, results and gradients are cloned. With `retain`, a
    backward pass leaves what it needs as it is, so that there may be another one.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor | None], pool: Pool, retain: bool = False):
        self.pool, self.retain, self.number = pool, retain, pool.count
        pool.count += 1
        first = next(x for x in inputs if x is not None)
        self.given = [None if x is None else writable_copy(x) for x in inputs]
        self.forward, self.backward = torch.cuda.CUDAGraph(), None
        self.kept: list[Tensor] = []  # from the forward pass for the backward pass
        stand_ins = self._stand_ins(module, inputs) if torch.is_grad_enabled() else {}
        watched = saved_tensors_hooks(self._keep, lambda x: x) if retain else nullcontext()
        with uncached(first), recorded(self.forward, pool), watched:
            found, self.spec = pytree.tree_flatten(functional_call(module, stand_ins, tuple(self.given)))
        outputs = [y for y in found if isinstance(y, Tensor) and y.requires_grad]
        if outputs:
            self.backward = torch.cuda.CUDAGraph()
            leaves = [*self.given, *(p for p in stand_ins.values() if p.requires_grad)]
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            with torch.autocast(first.device.type, enabled=False), recorded(self.backward, pool):
                given_grads = [torch.empty_like(y) for y in outputs]
                slopes = iter(torch.autograd.grad(outputs, wanted, given_grads, allow_unused=True))
            self.grads = [lent(next(slopes)) if x is not None and x.requires_grad else None for x in leaves]
            given = iter(given_grads)
            self.found_grads = [lent(next(given)) if y is not None and y.requires_grad else None for y in found]
        own = {storage(x) for x in (*self.given, *module.parameters(), *module.buffers()) if x is not None}
        self.kept = [x.detach() for x in self.kept if storage(x) not in own]
        self.found = [lent(y) for y in found]

    def _stand_ins(self, module: nn.Module, inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """In place of the weights stand others in the same memory, of which no earlier pass has made autograd remember
        a stream: that would be waited for, which no recording can."""
        for given, x in zip(self.given, inputs, strict=True):
            if given is not None and x is not None:
                given.requires_grad_(x.requires_grad)
        return {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in module.named_parameters()}

    def _keep(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return x

    @property
    def is_free(self) -> bool:
        """Whether a replay would write over nothing that a backward pass still needs."""
        return self.number not in self.pool.waiting and not self.pool.later(self.number)

    def __call__(self, inputs: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Any:
        """What the module gives for `inputs`; `weights` are those that want gradients."""
        if self.backward is None:
            return pytree.tree_unflatten(list(self.go(inputs)), self.spec)
        turn = Turn(self)
        self.pool.wait(turn)
        return pytree.tree_unflatten(list(Replay.apply(turn, *inputs, *weights)), self.spec)

    def go(self, inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
        for given, x in zip(self.given, inputs, strict=False):
            if given is not None and x is not None:
                given.copy_(x)
        self.forward.replay()
        return tuple(None if y is None else y.clone() for y in self.found)

    def go_back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs and weights, in memory of their own."""
        assert self.backward is not None
        for given, grad in zip(self.found_grads, grads, strict=True):
            if given is not None and grad is not None:
                given.copy_(grad)
            elif given is not None:
                given.zero_()
        self.backward.replay()
        count = len(self.given)
        inputs = [None if grad is None else grad.clone() for grad in self.grads[:count]]
        weights = [grad for grad in self.grads[count:] if grad is not None]
        copies = iter(torch._foreach_mul(weights, 1.0) if weights else ())  # by one kernel
        return inputs + [None if grad is None else next(copies) for grad in self.grads[count:]]


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Memory:
    """A part of a GPU's memory, in the words by which libraries show each other theirs."""

    def __init__(self, start: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (start, False), "version": 3}


def lent(x: Tensor | None) -> Tensor | None:
    """A tensor where `x` lies that does not hold on to that memory: a pool may give it to others between replays."""
    if x is None or not x.numel():
        return x
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    with torch.inference_mode(False):
        flat = torch.as_tensor(Memory(x.data_ptr(), count * x.element_size()), device=x.device)
        return flat.view(x.dtype).as_strided(x.shape, x.stride())


class Turn:
    """One replay of a recording; it is over when its backward pass was replayed, or can no longer come."""

    def __init__(self, recording: Recording):
        self.recording, self.over = recording, False
        self.saved: list[Tensor] | None = None

    def save(self) -> None:
        """Copies what its backward pass needs to where it is safe."""
        if self.saved is None:
            self.saved = [x.clone() for x in self.recording.kept]

    def restore(self) -> None:
        for x, saved in zip(self.recording.kept, self.saved or (), strict=False):
            x.copy_(saved)


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turn: Turn, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.turn = turn
        return turn.recording.go(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        turn, recording = ctx.turn, ctx.turn.recording
        with one_at_a_time:
            if turn.over:
                raise RuntimeError("A replayed pass has one backward pass; retain_graph needs the model itself.")
            for other in recording.pool.later(recording.number):
                other.save()
            turn.restore()
            if not (recording.retain and _will_be_kept()):
                turn.over = True
                recording.pool.waiting.pop(recording.number, None)
            return None, *recording.go_back(grads)
