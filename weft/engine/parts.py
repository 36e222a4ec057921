"""What a run is made of, and the small questions that its loop asks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.data.loader import Batch
from weft.data.sampler import Plan
from weft.data.sources import Source
from weft.data.split import Split
from weft.data.transforms import Preprocessing
from weft.engine.optim import Ema
from weft.engine.state import whole
from weft.errors import WeftError


@dataclass
class Parts:
    """What a run is made of."""

    source: Source
    split: Split
    preprocessing: Preprocessing
    model: nn.Module
    model_args: dict[str, Any]
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    plan: Plan
    loss: Callable[[Tensor, Tensor, float], Tensor]
    distillation: Callable[[Tensor, Tensor, float], Tensor] | None
    facts: dict[str, Any]  # stored with each state, compared on resuming


def made_up(parts: Parts, count: int) -> Batch:
    """A batch of grey pictures, of the right size and type."""
    shape = (count, parts.preprocessing.channels, *parts.preprocessing.size)
    eight_bit = parts.preprocessing.depth == 8
    pictures = torch.full(shape, 127 if eight_bit else 0.5, dtype=torch.uint8 if eight_bit else torch.float32)
    labels = torch.zeros(count, dtype=torch.int64)
    if parts.source.multilabel:
        labels = torch.zeros(count, len(parts.source.classes))
    return Batch(pictures, labels, torch.zeros(count, dtype=torch.int64), [])


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
