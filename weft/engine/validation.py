"""Validation of a model that is being trained."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.data.loader import eval_batches
from weft.engine.bad_files import report_bad_files
from weft.engine.training_run import TrainingRun


@torch.no_grad()
def evaluate(run: TrainingRun, infer: Callable[[nn.Module, Any], Any]) -> dict[str, float]:
    """Metrics on the validation pictures, each seen by exactly one process; nothing where there are none.

    `infer(model, pictures)` is the task's, or something around it.
    """
    world, task = run.world, run.task
    if not len(run.split.val):
        return {}
    model = run.best_model.eval()
    meter = task.meter()
    batches = eval_batches(
        run.source,
        run.preprocessing,
        run.split.val,
        batch=task.eval_batch,
        workers=run.config.data.workers,
        pin=world.device.type == "cuda",
        rank=world.rank,
        world=world.size,
    )
    bad: list[tuple[int, str]] = []
    rounds = math.ceil(math.ceil(len(run.split.val) / world.size) / task.eval_batch)
    with contextlib.closing(batches):
        for batch in batches:
            rounds -= 1
            bad += batch.bad
            if len(batch.pictures):
                meter.update(infer(model, batch.pictures), batch)
    if run.config.run.fsdp and rounds:  # another process has one batch more, in which all meet
        task.infer(model, task.dummy_batch(1).pictures)
    meter.reduce()
    report_bad_files(run, bad)
    return meter.result()
