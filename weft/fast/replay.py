"""A model without waiting for Python: its launches are recorded once for a shape, and replayed as one."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from weft.errors import WeftError, check_positive
from weft.fast.swap import replaying
from weft.kernels.switch import kernels_are_on

WARM_UPS = 3  # passes in front of a recording, in which libraries choose kernels and reserve memory
MOST_COUNTED = 1000  # shapes; more mean that no shape ever comes back
Key = tuple[object, ...]


def replay(model: nn.Module, *, most: int = 4) -> "Replayed":
    """A model that launches nothing twice: what it did on the GPU for a batch of some shape is recorded and replayed.

        fast = weft.replay(weft.fuse(model).cuda())
        with torch.inference_mode():
            logits = fast(pictures)

        fast = weft.replay(model.cuda().train())
        loss(fast(pictures), labels).backward()

    Only on a GPU; every other call goes to the model as it is. So do the first three training passes of a shape, a pass
    whose predecessor still waits for its backward pass, and all passes of a model that cannot be recorded, since it
    asks the GPU for numbers on its way. The recordings, CUDA graphs, take memory of their own, so that only those of
    the `most` shapes that came last are kept. Weights may change in place; where they are moved or frozen, or modules
    change between training and evaluation, there is another recording.

    A replayed pass has one backward pass and no second derivatives. Gradients that you keep beside `.grad` beyond the
    next pass must be clones. Hooks run while a pass is recorded, and not later. For several processes:
    DistributedDataParallel(weft.replay(model)).
    """
    if not isinstance(model, nn.Module):
        raise WeftError(f"weft.replay takes a model, not {type(model).__name__}; make one with weft.create_model.")
    if isinstance(model, Replayed):
        raise WeftError("This model is replayed already.")
    if isinstance(model, DistributedDataParallel):
        raise WeftError("weft.replay goes inside: DistributedDataParallel(weft.replay(model)).")
    check_positive(most=most)
    return Replayed(model, most)


class Replayed(nn.Module):
    """See `replay`."""

    def __init__(self, model: nn.Module, most: int):
        super().__init__()
        self.model = model
        self.train(model.training)
        self.most = most
        self._answers: dict[Key, Answer | None] = {}  # None: cannot be recorded
        self._passes: dict[Key, Pass | None] = {}
        self._seen: dict[Key, int] = {}
        self.forget()

    def forget(self) -> None:
        """Frees the memory of all recordings."""
        for recordings in (self._answers, self._passes):
            for key in [key for key, recording in recordings.items() if recording is not None]:
                del recordings[key]
        self._seen.clear()
        self._pool: Any = None  # of all passes: never are two of them under way
        self._lent: set[int] = set()  # where in it gradients lie
        self._waiting: weakref.ref[Turn] | None = None

    def __getattr__(self, name: str) -> Any:
        """What this does not have, the model may."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def no_weight_decay(self) -> set[str]:
        return {f"model.{name}" for name in self.model.no_weight_decay()}  # pyright: ignore[reportCallIssue]

    def group_matcher(self, coarse: bool = False) -> Any:
        """timm's: patterns of parameters' names, which begin with "model." here."""
        groups = self.model.group_matcher(coarse=coarse)  # pyright: ignore[reportCallIssue]
        return pytree.tree_map(lambda x: x.replace("^", "^model\\.") if isinstance(x, str) else x, groups)

    @property
    def holds_memory(self) -> bool:
        return any(self._answers.values()) or any(self._passes.values())

    def forward(self, x: Tensor) -> Any:
        if not is_on_gpu(x) or x.requires_grad or torch.compiler.is_compiling():
            return self.model(x)
        token = replaying.set(True)  # in the passes before a recording, too: all of them give the same numbers
        try:
            return self._run(x)
        finally:
            replaying.reset(token)

    def _run(self, x: Tensor) -> Any:
        with torch.cuda.device(x.device):  # streams and graphs are those of the current one
            if torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
                return self._train(x)
            return self.model(x) if self.model.training else self._answer(x)

    def _answer(self, x: Tensor) -> Any:
        answer = self._find(self._answers, (*circumstances(x), *state(self.model)), x, lambda: Answer(self.model, x))
        return self.model(x) if answer is None else answer(x)

    def _train(self, x: Tensor) -> Any:
        key = *circumstances(x), *state(self.model)
        turn = self._waiting() if self._waiting else None
        if (turn and not turn.over) or self._is_new(key):
            with uncached(x):  # as in the recording, so that a compiled model is compiled once
                return self.model(x)
        recorded = self._find(self._passes, key, x, lambda: self._record(x))
        if recorded is None:
            return self.model(x)
        self._save_grads()
        turn = Turn(recorded)
        self._waiting = weakref.ref(turn)
        found = Replay.apply(turn, x, *recorded.weights)
        return pytree.tree_unflatten(list(found), recorded.spec)

    def _is_new(self, key: Key) -> bool:
        """Counts the passes of a shape until there are enough; they warm up what is recorded then."""
        if len(self._seen) > MOST_COUNTED:
            self._seen.clear()
        self._seen[key] = seen = self._seen.get(key, 0) + 1
        return seen <= WARM_UPS

    def _record(self, x: Tensor) -> "Pass":
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        recorded = Pass(self.model, x, self._pool)
        self._lent |= {grad.data_ptr() for grad in recorded.weight_grads if grad is not None}
        return recorded

    def _find(self, recordings: dict[Key, Any], key: Key, x: Tensor, record: Callable[[], Any]) -> Any:
        """The recording for a key, made where there is none yet; None where that cannot be."""
        recording = recordings.pop(key) if key in recordings else attempt(record, x)
        if recording is None:
            self.forget()  # others took memory, or draw their random numbers from a state that is no longer in use
        recordings[key] = recording  # the last in the dictionary is the last that was used
        while len(recordings) > self.most:
            oldest = next(iter(recordings))
            del recordings[oldest]
            self._seen.pop(oldest, None)
        return recording

    def _save_grads(self) -> None:
        """Moves gradients that were not used yet, to which others are to be added, out of the recordings' memory."""
        for weight in self.model.parameters():
            if weight.grad is not None and weight.grad.data_ptr() in self._lent:
                weight.grad = weight.grad.clone()


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def circumstances(x: Tensor) -> Key:
    """All that decides what a model launches for `x`, and what kind of tensor it gives."""
    amp = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    return x.shape, x.stride(), x.dtype, x.device, amp, torch.is_inference_mode_enabled(), kernels_are_on()


def state(model: nn.Module) -> Key:
    """What else decides a model's launches, and must not change between a recording and its replay."""
    return (
        tuple((type(module), module.training) for module in model.modules()),
        tuple((p.data_ptr(), p.requires_grad) for p in model.parameters()),
        tuple(buffer.data_ptr() for buffer in model.buffers()),
    )


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
        return x.clone()


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


class Answer:
    """A recorded inference."""

    def __init__(self, model: nn.Module, x: Tensor):
        self.given = writable_copy(x)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with uncached(x):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    model(self.given)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.found = pytree.tree_map(torch.clone, model(self.given))

    def __call__(self, x: Tensor) -> Any:
        self.given.copy_(x)
        self.graph.replay()
        return pytree.tree_map(torch.clone, self.found)


class Pass:
    """A recorded pass of training, forward and backward."""

    def __init__(self, model: nn.Module, x: Tensor, pool: Any):
        self.given = writable_copy(x)
        # In place of the weights stand others in the same memory, of which no earlier pass has made autograd remember
        # a stream: that would be waited for, which no recording can.
        stand_ins: dict[str, Tensor] = {
            name: nn.Parameter(p.detach(), p.requires_grad) for name, p in model.named_parameters()
        }
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        how: dict[str, Any] = dict(pool=pool, capture_error_mode="thread_local")  # readers of data may go on
        with uncached(x), torch.cuda.graph(self.forward, **how):
            found, self.spec = pytree.tree_flatten(functional_call(model, stand_ins, self.given))
        self.found_grads = [torch.empty_like(y) for y in found]
        with torch.autocast(x.device.type, enabled=False), torch.cuda.graph(self.backward, **how):
            wanted = [p for p in stand_ins.values() if p.requires_grad]
            self.weight_grads = torch.autograd.grad(found, wanted, self.found_grads, allow_unused=True)
        self.found = [y.detach() for y in found]


class Turn:
    """One replay of a pass; it is over when its backward pass was replayed, or can no longer come."""

    def __init__(self, recorded: Pass):
        self.recorded, self.over = recorded, False


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turn: Turn, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.turn = turn
        turn.recorded.given.copy_(x)
        turn.recorded.forward.replay()
        return tuple(y.clone() for y in turn.recorded.found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        turn, recorded = ctx.turn, ctx.turn.recorded
        if turn.over:
            raise RuntimeError("A replayed pass has one backward pass; retain_graph needs the model itself.")
        turn.over = True
        for static, grad in zip(recorded.found_grads, grads, strict=True):
            static.copy_(grad)
        recorded.backward.replay()
        # Views, which autograd may keep as .grad without a copy.
        return None, None, *(None if grad is None else grad.detach() for grad in recorded.weight_grads)
