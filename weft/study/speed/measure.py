"""How fast models are, next to others in the same run: the measurements of `weft bench`.

Every round times every model in turn, so that a slow moment of the machine hits all of them; the ratio of two models is
the median of their ratios in each round. Before that each model runs a few times, so that nothing is measured that
happens once: compiling, choosing algorithms, taking memory.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.compiling import compile_model
from weft.engine.device import is_out_of_memory
from weft.errors import WeftError
from weft.fast.fuse import fuse
from weft.fast.swap import fast
from weft.kernels.switch import kernels_are_on
from weft.study.speed.models import build, check_names, is_ours

ROUNDS, LEAST_ROUNDS = 9, 3  # the second where a call takes long
WARM_UP = 3  # calls; the first compiles
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class SpeedSettings:
    train: bool = False  # a whole training step; otherwise inference
    compile: bool = False
    replay: bool = False  # launches recorded once as a CUDA graph
    batch: int = 8
    channels: int = 3
    img_size: int = 224
    dtype: str = "fp32"
    device: str = "cpu"
    fuse: bool = True  # inference of Weft's models through `weft.fuse`
    fast: bool = True  # their training, and inference that is not fused, through `weft.fast`; without it they are plain
    kernels: bool = field(default_factory=kernels_are_on)  # Weft's own, where the machine can run them; as they stand


@dataclass(frozen=True)
class SpeedRow:
    """The measurements of one model. Times are those of a batch."""

    model: str
    pictures_per_second: float | None = None  # the median of the rounds, and their range
    low: float | None = None
    high: float | None = None
    milliseconds: float | None = None
    gib: float | None = None  # peak of what the GPU holds for this model: weights, pictures, activations, optimiser
    peer: str = ""
    ratio: float | None = None  # how many times as fast as the peer
    error: str = ""


# One model ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedStep:
    """A function that runs a model once, forward or a whole training step, on pictures that lie on the device."""

    run: Callable[[], Any]
    pictures: Tensor
    optimizer: torch.optim.Optimizer | None = None

    def recorded(self) -> "TimedStep":
        """The same as one CUDA graph, into whose pictures others are copied first, as one would to use it."""
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["capturable"] = True
        given = self.pictures.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()

        def replay() -> None:
            self.pictures.copy_(given)
            graph.replay()

        return TimedStep(replay, self.pictures)


def make_model(name: str, settings: SpeedSettings) -> Any:
    """A model as it is measured: on its device, in its type and layout, plain or fast, compiled or not."""
    device = torch.device(settings.device)
    with device:  # where filling it with random numbers takes no time
        model = build(name, settings.img_size)
    model.train(settings.train)
    if settings.fast and is_ours(name):
        model = fuse(model) if settings.fuse and not settings.train else fast(model)
    dtype = torch.float32 if settings.train else DTYPES[settings.dtype]
    model = model.to(device, dtype, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if settings.compile:
        from torch import _dynamo

        _dynamo.config.recompile_limit = 256  # models of one family share their code; each is compiled for itself
        model = compile_model(model, dynamic=False)
    return model


def make_step(model: Any, settings: SpeedSettings) -> TimedStep:
    device, dtype, side = torch.device(settings.device), DTYPES[settings.dtype], settings.img_size
    pictures = torch.randn(settings.batch, settings.channels, side, side, device=device)
    pictures = pictures.contiguous(memory_format=torch.channels_last)
    if settings.train:
        return _training(model, pictures, dtype)
    pictures = pictures.to(dtype)
    return TimedStep(torch.inference_mode()(lambda: model(pictures)), pictures)


def _training(model: Any, pictures: Tensor, dtype: torch.dtype) -> TimedStep:
    device = pictures.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=pictures.is_cuda)
    targets = torch.arange(len(pictures), device=device) % 1000

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(pictures)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return TimedStep(step, pictures, optimizer)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedModel:
    """A model that is timed: made and warmed up, or with an `error`, and then it takes no part."""

    def __init__(self, name: str, settings: SpeedSettings, model: Any = None) -> None:
        self.name, self.settings, self.device = name, settings, torch.device(settings.device)
        self.step: TimedStep | None = None
        self.gib: float | None = None
        self.error = ""
        self._guarded(lambda: self._warm_up(model))
        if settings.replay:
            self.replay()

    def time(self, calls: int) -> float:
        """Seconds per call, after one that does not count: it comes behind another model. NaN if that fails."""
        return self._guarded(lambda: self._time(calls)) or math.nan

    def replay(self) -> None:
        """From now on the same as a CUDA graph, whose memory nobody counts."""
        self._guarded(self._record)

    def _guarded(self, run: Callable[[], float | None]) -> float | None:
        """The result of `run`; where that raises, None, and the model has an error and no tensors any more."""
        try:
            return None if self.error else run()
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            self.error = _failure(error, self.settings)
        self.step = None  # outside of `except`, where the traceback keeps all tensors alive
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _warm_up(self, model: Any) -> None:
        gpu = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if gpu else 0
        self.step = make_step(make_model(self.name, self.settings) if model is None else model, self.settings)
        for _ in range(WARM_UP if gpu or self.settings.compile else 1):
            self.step.run()
        if gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step.run()
            self.gib = (torch.cuda.max_memory_allocated(self.device) - before) / 2**30

    def _record(self) -> None:
        if self.device.type == "cuda" and self.step is not None:
            self.step, self.gib = self.step.recorded(), None

    def _time(self, calls: int) -> float:
        assert self.step is not None
        self.step.run()
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            self.step.run()
        _synchronize(self.device)
        return (time.perf_counter() - start) / calls


def _failure(error: Exception, settings: SpeedSettings) -> str:
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return f"does not fit into memory at batch {settings.batch}; try a smaller --batch"
    return f"does not run: {' '.join(str(error).split())[:300] or type(error).__name__}"


# All models, in turns -----------------------------------------------------------------------------------------------


def pair_with_peers(models: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    """The peer of each model: the i-th of the i-th, or one for all."""
    if len(peers) not in (0, 1, len(models)):
        raise WeftError(f"{len(peers)} peers for {len(models)} models; give one for each, or one for all.")
    return dict(zip(models, peers if len(peers) == len(models) else list(peers) * len(models), strict=False))


def time_in_turns(
    timed: Sequence[TimedModel], seconds: float, rounds: int = ROUNDS, done: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """Seconds per call of each, round by round; `seconds` of timing for each in all rounds together."""
    first = {model.name: model.time(1) for model in timed}
    times: dict[str, list[float]] = {model.name: [] for model in timed}
    slowest = max((first[model.name] for model in timed if not model.error), default=seconds)
    for _ in range(min(rounds, max(LEAST_ROUNDS, int(seconds / slowest)))):
        for model in timed:
            if not model.error:
                calls = max(1, round(seconds / rounds / first[model.name]))
                times[model.name].append(model.time(calls))
            done()
    return times


def measure(
    models: Sequence[str],
    peers: Sequence[str],
    settings: SpeedSettings,
    seconds: float,
    progress: Callable[[int, int], None] | None = None,
) -> list[SpeedRow]:
    """A row for each model and each peer, in the order in which they were given; what fails has only an error."""
    peer_of = pair_with_peers(models, peers)
    names = list(dict.fromkeys(name for model in models for name in (model, peer_of.get(model)) if name))
    check_names(names)
    count = _ProgressCounter(len(names) * (1 + ROUNDS), progress)
    timed = []
    for name in names:
        timed.append(TimedModel(name, settings))
        count()
    times = time_in_turns(timed, seconds, done=count)
    count.end()
    return make_rows(timed, times, peer_of)


class _ProgressCounter:
    def __init__(self, of: int, progress: Callable[[int, int], None] | None) -> None:
        self.of, self.progress, self.n = of, progress, 0

    def __call__(self) -> None:
        self.n += 1
        if self.progress:
            self.progress(self.n, self.of)

    def end(self) -> None:
        self.n = self.of - 1  # there may have been fewer rounds
        self()


def make_rows(timed: Sequence[TimedModel], times: dict[str, list[float]], peer_of: dict[str, str]) -> list[SpeedRow]:
    times = {model.name: times[model.name] for model in timed if not model.error}
    return [_row(model, times, peer_of.get(model.name, "")) for model in timed]


def _row(model: TimedModel, times: dict[str, list[float]], peer: str) -> SpeedRow:
    if model.error:
        return SpeedRow(model.name, error=model.error)
    own, other, batch = times[model.name], times.get(peer), model.settings.batch
    return SpeedRow(
        model=model.name,
        pictures_per_second=batch / statistics.median(own),
        low=batch / max(own),
        high=batch / min(own),
        milliseconds=1000 * statistics.median(own),
        gib=model.gib,
        peer=peer,
        ratio=statistics.median(b / a for a, b in zip(own, other, strict=True)) if other else None,
    )
