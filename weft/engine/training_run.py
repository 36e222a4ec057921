"""A run in progress, on which the loop and all that stands beside it work."""

import math
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.keep import KeptPictures, KeptValidation
from weft.data.loader import Batch, train_batches
from weft.data.preprocessing import Preprocessing
from weft.data.sampler import SamplingPlan
from weft.data.sources.source import Source
from weft.data.split import Split
from weft.engine.device import World, chooses_threads
from weft.engine.log import Screen
from weft.engine.optim import Ema
from weft.engine.start import RunStart
from weft.engine.state import RunProgress
from weft.tasks.task import Task


@dataclass
class TrainingRun:
    """The parts of a run, how far it is, and where it writes."""

    folder: Path
    config: Config
    world: World
    dtype: torch.dtype  # of matrix products
    source: Source
    split: Split
    preprocessing: Preprocessing
    plan: SamplingPlan
    task: Task
    model: nn.Module
    write_model: Callable[[Path, nn.Module, dict[str, Tensor], dict[str, Any]], None]  # folder, model, weights, ...
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    progress: RunProgress
    screen: Screen
    kept: KeptPictures | None = None  # training pictures on the device
    kept_validation: KeptValidation | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # stored with each state, compared on resuming
    log: Callable[[dict[str, Any]], object] = lambda row: None  # writes a row of metrics.jsonl
    rewind_log: Callable[[], object] = lambda: None  # to `progress`
    rehearsed: tuple[int, int] = (0, 0)  # pictures of the pass that named the kernels, and bytes that it took
    start: RunStart | None = None  # until the first step is done
    usual_threads: int = field(default_factory=torch.get_num_threads)  # of this process, where fewer are not faster
    step_seconds: float = math.inf  # of a trial, where there was one

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=self.dtype == torch.float16)
        self.saved_at = time.monotonic()

    @property
    def best_model(self) -> nn.Module:
        """The model that is validated, and kept where it is the best."""
        return self.ema.module if self.ema is not None and self.config.run.ema_eval else self.model

    @property
    def validated(self) -> np.ndarray:
        """The pictures that validate on the way: all, or some from everywhere among them where minutes are few."""
        val, some = self.split.val, self.progress.validation_pictures
        return val[np.linspace(0, len(val) - 1, some).round().astype(int)] if some else val

    def compute_in(self, dtype: torch.dtype) -> None:
        """Has matrix products run in another type from here on; resumed runs go on in it."""
        self.dtype = self.task.dtype = dtype
        self.progress.bf16 = dtype == torch.bfloat16

    def compute_with(self, threads: int) -> None:
        """Computes with so many threads from here on, 0: the usual number; resumed runs go on with them."""
        self.progress.threads = threads
        if chooses_threads(self.config.run, self.world.device):
            torch.set_num_threads(threads or self.usual_threads)

    def elapsed(self) -> float:
        """Seconds of work in this run, in all its sessions."""
        return self.progress.seconds + time.monotonic() - self.saved_at

    def event(self, text: str) -> None:
        """Says and logs something that does not happen at every step."""
        self.log({"kind": "event", "step": self.progress.step, "text": text})
        self.screen.say(text)

    def log_start(self, step: int) -> None:
        """Logs what the time went into until here, once, when a first step is done."""
        if self.start is not None:
            self.log({**self.start.row(step), "threads": torch.get_num_threads()})
            self.start = None

    def seed(self, step: int) -> int:
        """The seed of all that this process draws for whole batches, and of drop path and dropout."""
        return step_seed(self.config.run.seed, step, self.world.rank)

    def train_batches(self, steps: Iterable[int], workers: int) -> Generator[Batch]:
        """This process's batches of these steps: of pictures that are kept, or that `workers` processes read."""
        if self.kept is not None and self.task.kept is not None:
            return self.task.kept.batches(self.source, self.plan, steps, workers)
        pin = workers > 0 and self.world.device.type == "cuda"
        return train_batches(self.source, self.task.augmentation, self.plan, steps, workers=workers, pin=pin)

    def first_batch(self) -> Batch:
        """The first step's pictures and targets as training sees them, before they are normalised and mixed."""
        batch = next(iter(self.train_batches([0], workers=0)))
        pictures, targets = self.task.augmented(batch, self.seed(0))
        return replace(batch, pictures=pictures, labels=targets)


def step_seed(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence((seed, 2, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
