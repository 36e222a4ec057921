"""The type in which a CPU multiplies, where nobody said: tried out on the model that is about to be trained."""

import math
import time

import torch

from weft.engine.loop import Trainer
from weft.engine.state import load_tensors, snapshot
from weft.engine.time_budget import TRIAL_PART

WARM_UP, PICTURES, TIMES = 2, 16, 3
CLEARLY_FASTER = 1.15  # times as fast: for less, nothing is rounded


def choose_precision(trainer: Trainer) -> None:
    """Has a CPU compute in bfloat16 where this model clearly trains faster so, and nobody said otherwise.

    Some gain half or more, some lose. Only for runs with minutes, whose length is a matter of timing anyway: others
    come to the same numbers each time. Nor through torch.compile, which would compile for both types.
    """
    run = trainer.config.run
    if trainer.device.type != "cpu" or trainer.world.size > 1 or run.precision != "auto" or run.deterministic:
        return
    if run.compile or not torch.cpu._is_avx512_bf16_supported():
        return
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    # First passes also make kernels and ask for memory. What is left of that after a few pictures falls on bfloat16,
    # which has to be clearly faster.
    times = dict.fromkeys((torch.bfloat16, torch.float32), math.inf)
    limit = time.monotonic() + TRIAL_PART * 60 * run.minutes
    for dtype in times:
        _pass_seconds(trainer, dtype, WARM_UP)
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


def _pass_seconds(trainer: Trainer, dtype: torch.dtype, pictures: int = PICTURES) -> float:
    """Seconds of a training pass of so many pictures; infinite where they cannot be computed so."""
    trainer.run.compute_in(dtype)
    trainer.model.train(not trainer.config.model.frozen_mode)
    batch = trainer.task.dummy_batch(min(pictures, trainer.progress.micro_batch))
    begin = time.perf_counter()
    try:
        loss, _ = trainer.gradients(0, batch).tolist()
    except (RuntimeError, ValueError):  # an operation that does not know the type, too few pictures: the step answers
        return math.inf
    return time.perf_counter() - begin if math.isfinite(loss) else math.inf
