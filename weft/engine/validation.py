"""Validation of a model that is being trained."""

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.data.loader import Batch, eval_batches
from weft.engine.bad_files import report_bad_files
from weft.engine.training_run import TrainingRun


@torch.no_grad()
def evaluate(
    run: TrainingRun, infer: Callable[[nn.Module, Any], Any], model: nn.Module, indices: np.ndarray | None = None
) -> dict[str, float]:
    """Metrics on the pictures that validate, each seen by exactly one process; nothing where there are none.

    `infer(model, pictures)` is the task's, or something around it; `indices` are other pictures than these.
    """
    world, task = run.world, run.task
    kept = run.kept_validation if indices is None else None
    indices = run.validated if indices is None else indices
    if kept is not None and run.progress.validation_pictures:
        kept = kept.only(indices)
    if not len(indices):
        return {}
    model.eval()
    meter = task.meter()
    bad: list[tuple[int, str]] = []
    rounds = math.ceil(math.ceil(len(indices) / world.size) / task.eval_batch)
    with contextlib.closing(kept.batches(task.eval_batch) if kept else read_batches(run, indices)) as batches:
        for batch in batches:
            bad += batch.bad
            if len(batch.pictures):
                rounds -= 1
                meter.update(infer(model, batch.pictures), batch)
    for _ in range(rounds if run.config.run.fsdp else 0):  # other processes have batches more, in which all meet
        task.infer(model, task.dummy_batch(1).pictures)
    meter.reduce()
    report_bad_files(run, bad)
    return meter.result()


def read_batches(run: TrainingRun, indices: np.ndarray) -> Generator[Batch]:
    """This process's part of these pictures, read from where they lie."""
    return eval_batches(
        run.source,
        run.preprocessing,
        indices,
        batch=run.task.eval_batch,
        workers=run.config.data.workers,
        pin=run.world.device.type == "cuda",
        rank=run.world.rank,
        world=run.world.size,
    )
