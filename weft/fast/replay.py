"""A model without waiting for Python: its launches are recorded once for a shape, and replayed as one."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from weft.errors import WeftError, check_positive
from weft.fast.recording.graphs import (
    GraphPool,
    Key,
    Recording,
    capture_key,
    precision,
    settings_of,
    try_recording,
    without_autocast_cache,
)
from weft.fast.swap import replaying

WARM_UPS = 3  # passes in front of a recording, in which libraries choose kernels and reserve memory
MOST_COUNTED = 1000  # shapes; more mean that no shape ever comes back


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
    change between training and evaluation or their rates of dropout, there is another recording.

    A replayed pass has one backward pass and no second derivatives. Hooks run while a pass is recorded, and not later.
    For several processes: DistributedDataParallel(weft.replay(model)).
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
        self._inference: dict[Key, Recording | None] = {}  # None: cannot be recorded
        self._training: dict[Key, Recording | None] = {}
        self._seen: dict[Key, int] = {}
        self.forget()

    def forget(self) -> None:
        """Frees the memory of all recordings."""
        for recordings in (self._inference, self._training):
            for key in [key for key, recording in recordings.items() if recording is not None]:
                del recordings[key]
        self._seen.clear()
        self._pool: GraphPool | None = None  # of all passes: never are two of them under way

    def __getattr__(self, name: str) -> Any:
        """Looks in the model for what this does not have."""
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
        return any(self._inference.values()) or any(self._training.values())

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
            return self.model(x) if self.model.training else self._infer(x)

    def _infer(self, x: Tensor) -> Any:
        key = *capture_key(x), *state_key(self.model)
        recorded = self._find(self._inference, key, x, lambda: self._record_inference(x))
        return self.model(x) if recorded is None else recorded([x], [])

    def _train(self, x: Tensor) -> Any:
        key = *capture_key(x), *state_key(self.model)
        if (self._pool and self._pool.pending) or self._is_warming_up(key):
            with without_autocast_cache(x):  # as in the recording, so that a compiled model is compiled once
                return self.model(x)
        recorded = self._find(self._training, key, x, lambda: self._record_training(x))
        if recorded is None:
            return self.model(x)
        return recorded([x], [p for p in self.model.parameters() if p.requires_grad])

    def _is_warming_up(self, key: Key) -> bool:
        """Counts the passes of a shape until there are enough; they warm up what is recorded then."""
        if len(self._seen) > MOST_COUNTED:
            self._seen.clear()
        self._seen[key] = seen = self._seen.get(key, 0) + 1
        return seen <= WARM_UPS

    def _find(
        self, recordings: dict[Key, Recording | None], key: Key, x: Tensor, record: Callable[[], Recording]
    ) -> Recording | None:
        """The recording for a key, made where there is none yet; None where that cannot be."""
        if key in recordings:
            recording = recordings.pop(key)
        else:
            recording = try_recording(record, x)
            if recording is None:  # others took memory, or draw their random numbers from a state no longer in use
                self.forget()
        recordings[key] = recording  # the last in the dictionary is the last that was used
        while len(recordings) > self.most:
            oldest = next(iter(recordings))
            del recordings[oldest]
            self._seen.pop(oldest, None)
        return recording

    def _record_training(self, x: Tensor) -> Recording:
        free_cache()
        self._pool = self._pool or GraphPool()
        return Recording(self.model, [x], self._pool)

    def _record_inference(self, x: Tensor) -> Recording:
        warm_up(self.model, x)
        free_cache()
        return Recording(self.model, [x], GraphPool())


def warm_up(model: nn.Module, x: Tensor) -> None:
    """Calls the model as often as a recording needs it to, in another stream, as that does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), without_autocast_cache(x):
        for _ in range(WARM_UPS):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)


def free_cache() -> None:
    """Gives back the memory that is kept for later: a recording has a pool of its own."""
    gc.collect()
    torch.cuda.empty_cache()


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def state_key(model: nn.Module) -> Key:
    """All else that decides a model's launches, and must not change between a recording and its replay."""
    return (
        precision(),
        tuple(own[name] for own, name in settings_of(model.modules())),
        tuple((type(module), module.training) for module in model.modules()),
        tuple((p.data_ptr(), p.dtype, p.requires_grad) for p in model.parameters()),
        tuple(buffer.data_ptr() for buffer in model.buffers()),
    )
