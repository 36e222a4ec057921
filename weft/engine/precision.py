"""The type in which a CPU multiplies, where nobody said: tried out on the model that is about to be trained."""

import math
import time

import torch

from weft.engine.loop import Trainer
from weft.engine.state import load_tensors, snapshot
from weft.engine.time_budget import TRIAL_PART

PICTURES, TIMES = 16, 3
CLEARLY_FASTER = 1.15  # times as fast: for less, nothing is rounded


def choose_precision(trainer: Trainer) -> None:
    """Has a CPU compute in bfloat16 where this model clearly trains faster so, and nobody said otherwise.

    Some gain half or more, some lose. Only for runs with minutes, whose length is a matter of timing anyway: others
    come to the same numbers each time.
    """
    run = trainer.config.run
    if trainer.device.type != "cpu" or trainer.world.size > 1 or run.precision != "auto" or run.deterministic:
        return
    if not torch.cpu._is_avx512_bf16_supported():
        return
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    times = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    limit = time.monotonic() + TRIAL_PART * 60 * run.minutes
    for _ in range(TIMES):  # in turn, so that a slow moment of the machine hits both
        times = {dtype: min(best, _pass_seconds(trainer, dtype)) for dtype, best in times.items()}
        if time.monotonic() > limit:
            break
    trainer.optimizer.zero_grad(set_to_none=True)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)
    gain = times[torch.float32] / times[torch.bfloat16]
    trainer.run.compute_in(torch.bfloat16 if gain > CLEARLY_FASTER else torch.float32)
    if gain > CLEARLY_FASTER:
        trainer.run.screen.say(f"run.precision bf16: {gain:.1f} times as fast as fp32, on this CPU and for this model")


def _pass_seconds(trainer: Trainer, dtype: torch.dtype) -> float:
    """Seconds of a training pass of some pictures; infinite where they cannot be computed so."""
    trainer.run.compute_in(dtype)
    trainer.model.train(not trainer.config.model.frozen_mode)
    batch = trainer.task.dummy_batch(min(PICTURES, trainer.progress.micro_batch))
    begin = time.perf_counter()
    try:
        loss, _ = trainer.gradients(0, batch).tolist()
    except (RuntimeError, ValueError):  # an operation that does not know the type, too few pictures: the step answers
        return math.inf
    return time.perf_counter() - begin if math.isfinite(loss) else math.inf
