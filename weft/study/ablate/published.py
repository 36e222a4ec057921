"""A table as its paper trained it: the settings of each row, and how long all of them would take on this machine."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from weft.config import Config, override
from weft.data.preprocessing import Preprocessing
from weft.engine.device import is_out_of_memory, pick_precision
from weft.engine.optim import make_optimizer
from weft.errors import WeftError
from weft.fast.swap import fast_on
from weft.run.build import make_model
from weft.run.choose import check_settings, check_task_settings
from weft.run.recipes import find_recipe
from weft.study.ablate.plan import AblationPlan, Execution, steps_of
from weft.study.ablate.tables import Network, Table, TableRow
from weft.study.cells.cell import whole_epochs
from weft.tasks.registry import UNNAMED, make_task
from weft.tasks.task import TaskFacts
from weft.words import many

MOST_AT_ONCE = {"cuda": (64, 8), "cpu": (4, 2)}  # pictures of a timed step, without and with a head
WARM_UP, TIMED = 1, 2  # steps


def published_config(row: TableRow, network: Network, **more: Any) -> Config:
    """The settings of a row's training in the paper, with those that somebody gave."""
    own = {"model.name": network.model, "model.args": dict(network.switches)}
    config = override(Config(), {**find_recipe(row.recipe), **row.settings, **more, **own})
    classifier = {"data.task": UNNAMED, "model.head": "linear"}
    return config if config.data.task != "auto" else override(config, classifier)


def published_length(table: Table, row: TableRow, config: Config, pictures: int) -> tuple[float, float]:
    """Epochs of a row in the paper, the cool-down among them, and the part of the `pictures` that it sees.

    Steps, where they decide, are so many epochs as these pictures make of them.
    """
    recipe = find_recipe(row.recipe)
    epochs, part = whole_epochs((table.length or config.run.epochs) * row.epochs, row.fraction)
    if config.run.steps and (config.run.steps != recipe.get("run.steps") or steps_of(row.recipe, epochs, part)):
        return config.run.steps * config.run.batch / (part * pictures), part
    cooldown = config.optim.cooldown_epochs / recipe["run.epochs"]  # keeps its share of the run
    return epochs * (1 + cooldown), part


def check_published(table: Table) -> None:
    """Raises where a table does not say, or says wrongly, how its paper trains it."""
    rows = table.trained(published=True)
    if not rows or not all(row.recipe for row in rows):
        raise WeftError(f"{table.name} names no recipe of its paper, so it cannot be trained --as-published.")
    for row in rows:
        assert row.full is not None
        config = published_config(row, row.full)
        check_settings(config)
        check_task_settings(config)


# What it costs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowEstimate:
    """How long a row takes with one seed."""

    row: TableRow
    size: int
    epochs: float
    pictures: int  # of an epoch
    speed: float | None  # pictures per second in training; None where it does not run here

    @property
    def hours(self) -> float | None:
        return self.epochs * self.pictures / self.speed / 3600 if self.speed else None


def estimate(table: Table, plan: AblationPlan, how: Execution) -> Iterator[RowEstimate]:
    """Times a few training steps of each row, on grey pictures."""
    device = how.first_device
    speed_of = cache(lambda name: _speed(table, plan, name, device))  # rows may differ in nothing but their length
    names: dict[str, str] = {}
    for row in table.trained(published=True):
        network = plan.networks[row.name]
        same = names.setdefault(f"{network} {plan.size(row.name)} {row.recipe}", row.name)
        config = published_config(row, network, **plan.settings)
        epochs, part = published_length(table, row, config, plan.pictures)
        yield RowEstimate(row, plan.size(row.name), epochs, round(part * plan.pictures), speed_of(same))


def _speed(table: Table, plan: AblationPlan, name: str, device: torch.device) -> float | None:
    row, network = next(row for row in table.rows if row.name == name), plan.networks[name]
    size = {"augment.img_size": plan.size(name), "data.channels": plan.channels, "model.init": ""}
    head = {"model.head": network.head, "model.head_args": network.head_args} if network.head else {}
    config = published_config(row, network, **{**plan.settings, **size, **head})
    most = MOST_AT_ONCE.get(device.type, MOST_AT_ONCE["cpu"])[bool(network.head)]
    count = min(config.run.batch or most, most)
    while count:
        try:
            return count / time_step(config, plan.classes, count, device)
        except (WeftError, AssertionError, ValueError):
            return None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                return None
            count //= 2
    return None


def time_step(config: Config, classes: int, count: int, device: torch.device) -> float:
    """Seconds of a training step on `count` grey pictures: forward, backward, update."""
    side, channels = config.augment.img_size, config.data.channels
    names = [str(i) for i in range(classes)]
    preprocessing = Preprocessing(
        size=(side, side),
        channels=channels,
        depth=8,
        mean=(0.5,) * channels,
        std=(0.2,) * channels,
        interpolation="bicubic",
        crop_pct=1.0,
        crop_mode="center",
        max_pixels=config.data.max_pixels,
    )
    dtype, labels = pick_precision(config.run, device), np.arange(classes)
    facts = TaskFacts(names, preprocessing, device, dtype, labels=labels, pixel_counts=[1] * classes)
    task = make_task(config.data.task, config, facts)
    model = make_model(config, classes=names, size=(side, side)).model.to(device)
    model = fast_on(model.to(memory_format=torch.channels_last), device)
    model.train(not config.model.frozen_mode)
    optimizer = make_optimizer(model, config.optim, config.run.batch or count)
    pictures, targets = task.prepare(task.dummy_batch(count), 0)
    begin = 0.0
    for step in range(WARM_UP + TIMED):
        if step == WARM_UP:
            begin = _now(device)
        task.loss(model, pictures, targets, count)[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (_now(device) - begin) / TIMED


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def estimate_table(found: list[RowEstimate]) -> list[list[str]]:
    """The estimates as rows of text, below a header."""
    lines = [["row", "recipe", "epochs", "pixels", "pictures/s", "hours"]]
    for each in found:
        speed, hours = f"{each.speed or 0:,.4g}", f"{each.hours or 0:,.4g}"
        length = [f"{each.epochs:g}", str(each.size), *((speed, hours) if each.speed else ("-", "-"))]
        lines.append([each.row.name, each.row.recipe, *length])
    return lines


def estimate_line(found: list[RowEstimate], how: Execution) -> str:
    """How long all rows with all seeds take, in a sentence."""
    hours = how.seeds * sum(each.hours or 0.0 for each in found)
    silent = sum(each.hours is None for each in found)
    workers = min(how.workers, how.seeds * len(found))
    wall = max(hours / workers, max((each.hours or 0.0 for each in found), default=0.0))  # one is not cut in two
    where = f"{many(workers, 'training')} at once on {how.first_device.type}"
    spent = f"{wall:,.1f} hours" if wall < 72 else f"{wall / 24:,.0f} days"
    return (
        f"In all about {hours:,.1f} hours of training for {many(how.seeds, 'seed')}, or {spent} with {where}."
        " Measured in a few steps on grey pictures: yours must be read as fast, and validation comes on top."
        + (f" {many(silent, 'row')} could not be timed here, and is not in it." if silent else "")
    )
