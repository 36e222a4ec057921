"""Choices of a run where nobody said: every `auto` and 0 of the configuration, from the data and the machine.

Each choice comes with its reason, which is shown; nothing that was set is changed.
"""

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import timm
import torch

from weft.config import Config
from weft.data.check.check import DataReport
from weft.data.keep import room_on
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture
from weft.data.sources.source import Source
from weft.documents import read_json
from weft.errors import WeftError
from weft.kernels.switch import runs_on
from weft.run.initial import weights_folder
from weft.tasks.choose import default_workers
from weft.tasks.registry import task_class

LEAST_SIZE = 4  # pixels
MEASURED = 500  # pictures for mean and standard deviation


def choose_recipe(config: Config, task: str, pictures: int) -> str:
    return task_class(task).choices.default_recipe(config, pictures)


def fill(
    config: Config, given: Collection[str], report: DataReport, pictures: int, device: torch.device
) -> tuple[Config, list[str]]:
    """The configuration with what depends on the data filled in, and a line for each choice.

    `pictures`: how many train. Device and precision stay open: another machine has others.
    """
    if not report.width:
        raise WeftError(f"None of the pictures of {config.data.source} can be read.")
    task = task_class(report.task)
    config = replace(config, data=replace(config.data, task=cast(Any, report.task)))
    chosen, why = task.choices.fill(config, given, report, device)
    data, run = chosen.data, chosen.run
    if not data.channels:
        data = replace(data, channels=report.channels)
    if not run.batch:
        run = replace(run, batch=_batch(pictures, device, task.largest_batch))
        why.append(f"batch {run.batch}: for {pictures:,} training pictures")
    if data.workers < 0:
        data = replace(data, workers=default_workers(device))
    chosen = replace(chosen, run=run, data=data)
    if data.keep == "auto":
        data = replace(data, keep=_keep(chosen, report, device))
        if data.keep == "no":
            why.append(
                "data.keep no: pictures are read from disk, for a single epoch or since they do not fit into memory"
            )
    return replace(chosen, data=data), why


def _keep(config: Config, report: DataReport, device: torch.device) -> Any:
    """Where pictures are kept that fit there.

    On a CPU a policy is left to the readers, which work while the model computes, and so is all that happens to masks
    and boxes; on a GPU all of it where kernels cannot run. Only readers that are forked share the memory of the host.
    """
    task = task_class(config.data.task)
    one = task.choices.kept_bytes(config, report)
    altered = bool(config.augment.policy or config.augment.color_jitter or not task.whole_pictures)
    left_to_readers = altered if device.type == "cpu" else not runs_on(device)
    on_device = one and not left_to_readers and report.pictures * one <= room_on(device)
    if on_device and task.whole_pictures:
        return "device"
    pixels = report.width["median"] * report.height["median"] * report.pictures
    fits = pixels * (config.data.channels + 1) * report.depth // 8 <= room_on(torch.device("cpu"))
    seen_often = config.run.epochs > 1 or config.run.steps or config.run.minutes
    if not (fits and seen_often and sys.platform == "linux"):
        return "no"
    return "device" if on_device else "memory"


def _batch(pictures: int, device: torch.device, most: int) -> int:
    """A power of two from 8 to `most` that leaves an epoch some steps: fewer on a GPU, which needs large batches."""
    steps = 16 if device.type == "cuda" else 50
    batch = 8
    while batch < most and pictures // (2 * batch) >= steps:
        batch *= 2
    return batch


# Checks ---------------------------------------------------------------------------------------------------------


def check_settings(config: Config) -> None:
    """Raises for values and combinations that cannot work, before any work starts."""
    data, augment, loss, run = config.data, config.augment, config.loss, config.run
    wrong = {
        f"data.fold={data.fold} is none of {data.folds} folds; they count from 0": data.fold >= max(1, data.folds),
        "data.folds=1 leaves nothing to train on; choose 2 or more": data.folds == 1,
        f"augment.img_size={augment.img_size} shows a model nothing; choose {LEAST_SIZE} pixels or more": (
            0 < augment.img_size < LEAST_SIZE
        ),
        f"augment.scale={augment.scale} must be two parts of the area": not _is_range(augment.scale, 1),
        f"augment.ratio={augment.ratio} must be two aspect ratios": not _is_range(augment.ratio, 100),
        f"augment.rescale={augment.rescale} must be two factors": not _is_range(augment.rescale, 100),
        "model.drop_path is no use in model.frozen_mode": bool(config.model.frozen_mode and config.model.drop_path),
        "loss.teacher and loss.kind=bce cannot be combined": bool(loss.teacher and loss.kind == "bce"),
        "run.fsdp and run.ema cannot be combined; set --run.ema 0": bool(run.fsdp and run.ema),
        "run.fsdp and run.precision=fp16 cannot be combined; choose bf16": run.fsdp and run.precision == "fp16",
        f"optim.warmup_epochs={config.optim.warmup_epochs:g} is longer than the run of {run.epochs} epochs": (
            not run.steps and config.optim.warmup_epochs > run.epochs
        ),
        f"run.micro_batch={run.micro_batch} is larger than run.batch={run.batch}": (0 < run.batch < run.micro_batch),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise WeftError(f"{text}.")


def check_task_settings(config: Config) -> None:
    """Raises for settings that belong to another task than that of the data."""
    task_class(config.data.task).choices.check_settings(config)


def _is_range(values: list[float], most: float) -> bool:
    return len(values) == 2 and 0 < values[0] <= values[1] <= most


# Preprocessing --------------------------------------------------------------------------------------------------


def choose_preprocessing(config: Config, report: DataReport, source: Source, train: np.ndarray) -> Preprocessing:
    """Everything that is done to a picture before the model sees it, from now to the end of the model's life.

    Mean and standard deviation are those the initial weights were trained with, ImageNet's for colour pictures, and
    else those of the training pictures.
    """
    chosen = task_class(config.data.task).choices.choose_preprocessing(config, report)
    return replace(chosen, **_statistics(config, chosen, source, train))


def _statistics(
    config: Config, chosen: Preprocessing, source: Source, train: np.ndarray
) -> dict[str, tuple[float, ...]]:
    earlier = read_preprocessing(weights_folder(config.model.init))
    cfg: Any = timm.get_pretrained_cfg(config.model.name)
    if earlier is not None and (earlier.channels, earlier.depth) == (chosen.channels, chosen.depth):
        mean, std = earlier.mean, earlier.std
    elif cfg is not None and len(cfg.mean) == chosen.channels and chosen.depth == 8:
        mean, std = tuple(cfg.mean), tuple(cfg.std)
    else:
        mean, std = measure(chosen, source, train)
    return {"mean": mean, "std": std}


def read_preprocessing(folder: str) -> Preprocessing | None:
    """The preprocessing that a model folder of Weft's holds."""
    try:
        content = read_json(Path(folder) / "config.json")
        return Preprocessing.from_dict(content["weft"]["preprocessing"])
    except (OSError, KeyError, TypeError, WeftError):
        return None


def measure(preprocessing: Preprocessing, source: Source, train: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Mean and standard deviation of each channel over a sample of the training pictures, rounded."""
    sums = torch.zeros(3, preprocessing.channels, dtype=torch.float64)
    for index in train[np.linspace(0, len(train) - 1, min(len(train), MEASURED)).astype(int)]:
        try:
            picture = preprocessing.picture(source.open(int(index)))
        except BadPicture:
            continue
        values = preprocessing.normalise(picture[None])[0].double().flatten(1)  # (C, h*w)
        sums += torch.stack([torch.full((len(values),), values.shape[1]), values.sum(1), values.square().sum(1)])
    count, first, second = sums
    mean = first / count.clamp(min=1)
    std = (second / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std > 1e-6, std, 1.0)  # a constant channel
    return tuple(map(_rounded, mean.tolist())), tuple(map(_rounded, std.tolist()))


def _rounded(value: float) -> float:
    """Four digits; of small numbers, as floating-point pictures may have, four that count: no deviation becomes 0."""
    return round(value, 4) if abs(value) >= 0.01 else float(f"{value:.4g}")
