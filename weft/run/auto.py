"""The recipe `auto` for a run: the machine and its time, as `weft.tasks.policy` wants to know them."""

from collections.abc import Collection
from typing import Any

import torch

from weft.catalog.pace import pace
from weft.config import Config
from weft.models.weights.release import have_learned, weights_of_many_kinds
from weft.run.data import RunData
from weft.tasks.choose import shared_long_side, usual_side
from weft.tasks.policy import Situation
from weft.tasks.registry import task_class

START = {"cpu": 4.0, "cuda": 12.0}  # seconds until the first step, from where this is asked
TRAINING = 0.85  # of the time that is left then; the rest goes into trials, validation and the report


def auto_settings(
    config: Config, given: Collection[str], data: RunData, device: torch.device, elapsed: float
) -> tuple[dict[str, Any], list[str]]:
    """Settings by their full names, as a recipe has them, and a line on each choice.

    Args:
        config: with what was `given`, by the names of settings.
        elapsed: seconds since the command was given.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    pictures, run = max(1, len(data.split.train)), config.run
    epochs = float(run.epochs) if "run.epochs" in given and not run.minutes else 0.0
    if run.steps:
        epochs = run.steps * (run.batch or 32) / pictures
    now = Situation(
        pictures=pictures,
        side=config.test.short_side or usual_side(data.report),
        long=0 if config.test.short_side else shared_long_side(data.report),
        depth=data.report.depth,
        device=kind,
        pace=pace(device),
        seconds=max(1.0, TRAINING * (60 * run.minutes - elapsed - START[kind])) if run.minutes else 0.0,
        epochs=epochs,
        model="" if config.model.name == "auto" else config.model.name,
        size=config.augment.img_size,
        weights=bool(config.model.init),
        packaged=() if "model.init" in given or {*config.model.args} - {"stem_stride"} else weights_of_many_kinds(),
        known=have_learned(data.source.classes),
    )
    return task_class(data.report.task).choices.auto(now, data.report)
