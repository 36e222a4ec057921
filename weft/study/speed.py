"""How fast models are, next to others in the same run: what `weft bench` measures.

Every round times every model in turn, so that a slow moment of the machine hits all of them; the ratio of two models is
the median of their ratios in each round. Before that each model runs a few times, so that nothing is measured that
happens once: compiling, choosing algorithms, taking memory.
"""

import gc
import importlib
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.engine.compiling import compile_model
from weft.engine.parts import is_out_of_memory
from weft.errors import WeftError, did_you_mean
from weft.fast.fuse import fuse
from weft.fast.swap import fast
from weft.kernels.switch import kernels_are_on
from weft.models.registry import list_models
from weft.run.build import check_name, takes_size
from weft.version import __version__

ROUNDS, LEAST = 9, 3  # the second where a call takes long
WARM_UP = 3  # calls; the first compiles
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HUGGING_FACE = {"hf:cvt-13": [1, 2, 10], "hf:cvt-21": [1, 4, 16]}  # blocks of the three stages
PACKAGES = ("torch", "timm", "transformers", "triton")


@dataclass(frozen=True)
class Settings:
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
class Row:
    """What was found about a model. Times are those of a batch."""

    model: str
    pictures_per_second: float | None = None  # the median of the rounds, and their range
    low: float | None = None
    high: float | None = None
    milliseconds: float | None = None
    gib: float | None = None  # peak of what the GPU holds for this model: weights, pictures, activations, optimiser
    peer: str = ""
    ratio: float | None = None  # how many times as fast as the peer
    error: str = ""


# Models ---------------------------------------------------------------------------------------------------------


def check_names(names: Sequence[str]) -> None:
    """Raises for a name that neither Weft nor timm nor our short list of transformers' models has."""
    for name in names:
        if not name.startswith("hf:"):
            check_name(name)
        elif name not in HUGGING_FACE:
            known = ", ".join(HUGGING_FACE)
            raise WeftError(
                f"There is no model {name!r}; of transformers' there are {known}." + did_you_mean(name, HUGGING_FACE)
            )
        else:
            try:
                importlib.import_module("transformers")
            except ImportError:
                raise WeftError(f"{name} needs transformers: pip install transformers.") from None


def pair(models: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    """The peer of each model: the i-th of the i-th, or one for all."""
    if len(peers) not in (0, 1, len(models)):
        raise WeftError(f"{len(peers)} peers for {len(models)} models; give one for each, or one for all.")
    return dict(zip(models, peers if len(peers) == len(models) else list(peers) * len(models), strict=False))


def is_ours(name: str) -> bool:
    return name.split(".")[0] in _our_names()


@cache
def _our_names() -> frozenset[str]:
    return frozenset(list_models())


def build(name: str, img_size: int) -> nn.Module:
    """A model with random weights for 1,000 classes and pictures of this size."""
    if name in HUGGING_FACE:
        return _Cvt(HUGGING_FACE[name])
    size: dict[str, Any] = {"img_size": img_size} if _takes_size(name) else {}
    return timm.create_model(name, **size)


_takes_size = cache(takes_size)


def own_size(name: str) -> int:
    """The side of the pictures that a model was made for."""
    check_names([name])
    cfg = None if name in HUGGING_FACE else timm.get_pretrained_cfg(name)
    return cfg.input_size[-1] if cfg else 224


class _Cvt(nn.Module):
    """transformers' CvT, with logits as its answer."""

    def __init__(self, depth: list[int]) -> None:
        super().__init__()
        from transformers import CvtConfig, CvtForImageClassification

        settings: dict[str, Any] = dict(depth=depth, num_labels=1000)
        self.model = CvtForImageClassification(CvtConfig(**settings))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


# Steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A function that runs a model once, forward or a whole training step, on pictures that lie on the device."""

    run: Callable[[], Any]
    pictures: Tensor
    optimizer: torch.optim.Optimizer | None = None

    def recorded(self) -> "Step":
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

        return Step(replay, self.pictures)


def make_model(name: str, settings: Settings) -> Any:
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


def make_step(model: Any, settings: Settings) -> Step:
    device, dtype, side = torch.device(settings.device), DTYPES[settings.dtype], settings.img_size
    pictures = torch.randn(settings.batch, settings.channels, side, side, device=device)
    pictures = pictures.contiguous(memory_format=torch.channels_last)
    if settings.train:
        return _training(model, pictures, dtype)
    pictures = pictures.to(dtype)
    return Step(torch.inference_mode()(lambda: model(pictures)), pictures)


def _training(model: Any, pictures: Tensor, dtype: torch.dtype) -> Step:
    device = pictures.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=pictures.is_cuda)
    targets = torch.arange(len(pictures), device=device) % 1000

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(pictures)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(step, pictures, optimizer)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Contender:
    """A model in the race; it is made and warmed up, or has an `error` and takes no part."""

    def __init__(self, name: str, settings: Settings, model: Any = None) -> None:
        self.name, self.settings, self.device = name, settings, torch.device(settings.device)
        self.step: Step | None = None
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
        try:
            return None if self.error else run()
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            self.error = _why(error, self.settings)
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


def _why(error: Exception, settings: Settings) -> str:
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return f"does not fit into memory at batch {settings.batch}; try a smaller --batch"
    return f"does not run: {' '.join(str(error).split())[:300] or type(error).__name__}"


# Measuring ------------------------------------------------------------------------------------------------------


def race(
    contenders: Sequence[Contender], seconds: float, rounds: int = ROUNDS, done: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """Seconds per call of each, round by round; `seconds` of timing for each in all rounds together."""
    first = {c.name: c.time(1) for c in contenders}
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    slowest = max((first[c.name] for c in contenders if not c.error), default=seconds)
    for _ in range(min(rounds, max(LEAST, int(seconds / slowest)))):
        for contender in contenders:
            if not contender.error:
                calls = max(1, round(seconds / rounds / first[contender.name]))
                times[contender.name].append(contender.time(calls))
            done()
    return times


def measure(
    models: Sequence[str],
    peers: Sequence[str],
    settings: Settings,
    seconds: float,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """A row for each model and each peer, in the order in which they were given; what fails has only an error."""
    peer_of = pair(models, peers)
    names = list(dict.fromkeys(name for model in models for name in (model, peer_of.get(model)) if name))
    check_names(names)
    count = _Count(len(names) * (1 + ROUNDS), progress)
    contenders = []
    for name in names:
        contenders.append(Contender(name, settings))
        count()
    times = race(contenders, seconds, done=count)
    count.end()
    return make_rows(contenders, times, peer_of)


class _Count:
    def __init__(self, of: int, progress: Callable[[int, int], None] | None) -> None:
        self.of, self.progress, self.n = of, progress, 0

    def __call__(self) -> None:
        self.n += 1
        if self.progress:
            self.progress(self.n, self.of)

    def end(self) -> None:
        self.n = self.of - 1  # there may have been fewer rounds
        self()


def make_rows(contenders: Sequence[Contender], times: dict[str, list[float]], peer_of: dict[str, str]) -> list[Row]:
    times = {c.name: times[c.name] for c in contenders if not c.error}
    return [Row(c.name, error=c.error) if c.error else _row(c, times, peer_of.get(c.name, "")) for c in contenders]


def _row(contender: Contender, times: dict[str, list[float]], peer: str) -> Row:
    own, other, batch = times[contender.name], times.get(peer), contender.settings.batch
    return Row(
        model=contender.name,
        pictures_per_second=batch / statistics.median(own),
        low=batch / max(own),
        high=batch / min(own),
        milliseconds=1000 * statistics.median(own),
        gib=contender.gib,
        peer=peer,
        ratio=statistics.median(b / a for a, b in zip(own, other, strict=True)) if other else None,
    )


# Results --------------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Machine, versions and date: what every file with measurements starts with."""
    return {"date": date.today().isoformat(), "machine": _machine(), "versions": _versions()}


def as_json(rows: Sequence[Row], settings: Settings, seconds: float) -> dict[str, Any]:
    return {**facts(), "settings": {**asdict(settings), "seconds": seconds}, "rows": [asdict(row) for row in rows]}


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _versions() -> dict[str, str]:
    found = {"weft": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # it may lie in a folder of its own
            if package in sys.modules:
                found[package] = sys.modules[package].__version__
    return found


def title(result: dict[str, Any]) -> str:
    """What was measured, in one line."""
    settings, machine, versions = result["settings"], result["machine"], result["versions"]
    place = (
        machine["gpu"]
        if settings["device"].startswith("cuda")
        else f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    )
    form = "plain" if not settings["fast"] else "fused" if settings["fuse"] and not settings["train"] else "fast"
    what = f"{'training step' if settings['train'] else 'inference'}, Weft's models {form}"
    how = ("compiled" if settings["compile"] else "eager") + (", launches replayed" if settings["replay"] else "")
    on_gpu = settings["device"].startswith("cuda")
    how += "" if settings["kernels"] and on_gpu else ", Weft's kernels off" if on_gpu else ", no kernels on a CPU"
    size = f"batch {settings['batch']}, {settings['img_size']} pixels, {settings['dtype']}"
    return f"{what}, {how}, {size}; {place}, torch {versions['torch']}"


HEADER = ["model", "pictures/s", "range", "ms/batch", "peak GiB", "ratio", "to"]


def as_table(rows: Sequence[Row]) -> list[list[str]]:
    """The header and a line for each row, without columns in which nothing stands."""
    lines = list(cells(rows))
    used = [i for i in range(len(HEADER)) if any(line[i] for line in lines)]
    return [[line[i] for i in used] for line in (HEADER, *lines)]


def cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The table's rows; a model that failed has its reason in place of numbers."""
    for row in rows:
        if row.error:
            yield [row.model, "-", "", "", "", "", row.error]
        else:
            speed = f"{_number(row.low)} to {_number(row.high)}"
            gib = "" if row.gib is None else f"{row.gib:.2f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
            yield [row.model, _number(row.pictures_per_second), speed, f"{row.milliseconds:.2f}", gib, ratio, row.peer]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
