"""What a run is made of, and the small questions that its loop asks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.data.preprocessing import Preprocessing
from weft.data.sampler import SamplingPlan
from weft.data.sources.source import Source
from weft.data.split import Split
from weft.engine.optim import Ema
from weft.engine.state import whole
from weft.errors import WeftError
from weft.tasks.task import Task


@dataclass
class Parts:
    """What a run is made of."""

    source: Source
    split: Split
    preprocessing: Preprocessing
    model: nn.Module
    write_model: Callable[[Path, nn.Module, dict[str, Tensor], dict[str, Any]], None]  # folder, model, weights, ...
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    plan: SamplingPlan
    task: Task
    facts: dict[str, Any]  # stored with each state, compared on resuming


def step_seed(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence((seed, 2, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def is_finite(model: nn.Module) -> bool:
    return all(bool(whole(p).isfinite().all()) for p in model.parameters())


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def too_many_bad(bad: dict[str, str], count: int, limit: float) -> WeftError:
    first = "; ".join(f"{name}: {why}" for name, why in list(bad.items())[:3])
    return WeftError(
        f"{len(bad)} of {count} pictures cannot be read, more than {limit:.0%} ({first}); mend or remove them"
        " (`weft check` lists all), or allow more with --data.bad_files."
    )


def named_tensors(items: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in dictionaries and lists, on the host, by the way that leads there: "labels.0.boxes"."""
    if isinstance(items, Tensor):
        return {name: items.detach().cpu().contiguous()}
    entries = items.items() if isinstance(items, dict) else enumerate(items)
    parts = (named_tensors(value, f"{name}.{key}".lstrip(".")) for key, value in entries)
    return {key: value for part in parts for key, value in part.items()}
