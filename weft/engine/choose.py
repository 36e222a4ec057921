"""What a run does where nobody said: every `auto` and 0 of the configuration, from the data and the machine.

Each choice comes with its reason, which is shown; nothing that was set is changed.
"""

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import timm
import torch

from weft.config import Config
from weft.data.check import DataReport
from weft.data.device_policy import fits
from weft.data.read import BadPicture
from weft.data.sources import Source
from weft.data.transforms import Preprocessing
from weft.engine.build import takes
from weft.errors import WeftError

SMALL = 64  # pictures up to this side are taken as they are
FEW = 20_000  # training pictures up to which the small-data recipe is chosen
NANO_SIZE = 96  # of large pictures for the nano models
READERS = 8  # from so many on, augmentation by the readers was the faster one on an H200 with 16 cores
MEASURED = 500  # pictures for mean and standard deviation


def choose_recipe(config: Config, pictures: int) -> str:
    if config.model.init:
        return "finetune"
    return "small-data" if pictures <= FEW else "large-data"


def fill(
    config: Config, given: Collection[str], report: DataReport, pictures: int, device: torch.device
) -> tuple[Config, list[str]]:
    """The configuration with what depends on the data filled in, and a line for each choice.

    `pictures`: how many train. Device and precision stay open: another machine has others.
    """
    if not report.width:
        raise WeftError(f"None of the pictures of {config.data.source} can be read.")
    width, height = round(report.width["median"]), round(report.height["median"])
    side = min(width, height)
    why: list[str] = []
    model, augment, run, data = config.model, config.augment, config.run, config.data
    if model.name == "auto":
        small = side <= SMALL or device.type == "cpu"
        model = replace(model, name="cvt_nano" if small else "cvt_13")
        why.append(
            f"model {model.name}: " + (f"pictures of {side} pixels" if side <= SMALL else f"for the {device.type}")
        )
    if not augment.img_size:
        augment = replace(augment, img_size=_size(model.name, side))
        own = augment.img_size not in (width, height)
        why.append(
            f"img_size {augment.img_size}: "
            + (f"for {model.name}; " if own else "")
            + f"pictures of {width} x {height}"
        )
    if _needs_small_stride(model.name, augment.img_size) and "stem_stride" not in model.args:
        model = replace(model, args={**model.args, "stem_stride": 1})
        why.append("stem_stride 1: so that small pictures keep a grid of positions")
    if augment.img_size <= SMALL and side <= SMALL and "augment.crop" not in given:
        augment = replace(augment, crop="random", pad=augment.img_size // 8)
        why.append(f"crop random with a margin of {augment.pad}: the pictures are small")
    if not data.channels:
        data = replace(data, channels=report.channels)
    if augment.on_device == "auto":
        few_readers = (data.workers if data.workers >= 0 else _workers(device)) < READERS
        on_device = device.type == "cuda" and few_readers and fits(augment.policy, data.channels, report.depth)
        augment = replace(augment, on_device="yes" if on_device else "no")
    if not run.batch:
        run = replace(run, batch=_batch(pictures, device))
        why.append(f"batch {run.batch}: for {pictures:,} training pictures")
    if data.workers < 0:
        data = replace(data, workers=_workers(device))
    return replace(config, model=model, augment=augment, run=run, data=data), why


def _size(name: str, side: int) -> int:
    cfg: Any = timm.get_pretrained_cfg(name)
    own = cfg.input_size[-1]
    if "nano" in name:
        own = min(own, NANO_SIZE)
    if side >= 0.7 * own:
        return own if side > SMALL else side
    return side if side <= SMALL else max(32, side // 32 * 32)


def _needs_small_stride(name: str, size: int) -> bool:
    """32-pixel pictures leave the larger models 2 x 2 positions, unless their stem keeps the resolution."""
    return size <= SMALL * 3 // 4 and "nano" not in name and takes(name, "stem_stride")


def _batch(pictures: int, device: torch.device) -> int:
    """A power of two from 8 to 256 that leaves an epoch some steps: fewer on a GPU, which small batches do not fill."""
    steps = 16 if device.type == "cuda" else 50
    batch = 8
    while batch < 256 and pictures // (2 * batch) >= steps:
        batch *= 2
    return batch


def _workers(device: torch.device) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    mine = max(1, cores // processes)
    return min(16, mine) if device.type == "cuda" else min(2, mine // 2)


# Checks ---------------------------------------------------------------------------------------------------------


def check_settings(config: Config) -> None:
    """Raises for values and combinations that cannot work, before any work starts."""
    data, augment, loss, run = config.data, config.augment, config.loss, config.run
    wrong = {
        f"data.fold={data.fold} is none of {data.folds} folds; they count from 0": data.fold >= max(1, data.folds),
        "data.folds=1 leaves nothing to train on; choose 2 or more": data.folds == 1,
        f"augment.scale={augment.scale} must be two parts of the area": not _is_range(augment.scale, 1),
        f"augment.ratio={augment.ratio} must be two aspect ratios": not _is_range(augment.ratio, 100),
        "model.drop_path is no use in model.frozen_mode": bool(config.model.frozen_mode and config.model.drop_path),
        "loss.teacher and loss.kind=bce cannot be combined": bool(loss.teacher and loss.kind == "bce"),
        "run.fsdp and run.ema cannot be combined; set --run.ema 0": bool(run.fsdp and run.ema),
        "run.fsdp and run.precision=fp16 cannot be combined; choose bf16": run.fsdp and run.precision == "fp16",
        f"optim.warmup_epochs={config.optim.warmup_epochs:g} is longer than the run of {run.epochs} epochs": (
            config.optim.warmup_epochs > run.epochs
        ),
        f"run.micro_batch={run.micro_batch} is larger than run.batch={run.batch}": (0 < run.batch < run.micro_batch),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise WeftError(f"{text}.")


def _is_range(values: list[float], most: float) -> bool:
    return len(values) == 2 and 0 < values[0] <= values[1] <= most


# Preprocessing --------------------------------------------------------------------------------------------------


def choose_preprocessing(config: Config, report: DataReport, source: Source, train: np.ndarray) -> Preprocessing:
    """What is done to a picture before the model sees it, from now to the end of the model's life.

    Mean and standard deviation are those the initial weights were trained with, ImageNet's for colour pictures, and
    else those of the training pictures.
    """
    cfg: Any = timm.get_pretrained_cfg(config.model.name)
    size, augment = config.augment.img_size, config.augment
    as_they_are = max(report.width["max"], report.height["max"]) <= size <= SMALL
    interpolation = augment.interpolation if augment.interpolation != "random" else "bicubic"
    chosen = Preprocessing(
        size=(size, size),
        channels=config.data.channels,
        depth=report.depth,
        mean=(0.0,) * config.data.channels,
        std=(1.0,) * config.data.channels,
        interpolation=interpolation,
        crop_pct=augment.eval_crop or (1.0 if as_they_are else cfg.crop_pct),
        crop_mode=cast(Any, augment.eval_resize or ("squash" if cfg.crop_mode == "squash" else "center")),
        max_pixels=config.data.max_pixels,
    )
    earlier = read_preprocessing(config.model.init)
    if earlier is not None and earlier.channels == chosen.channels:
        mean, std = earlier.mean, earlier.std
    elif chosen.channels == 3 and chosen.depth == 8:
        mean, std = tuple(cfg.mean), tuple(cfg.std)
    else:
        mean, std = measure(chosen, source, train)
    return replace(chosen, mean=mean, std=std)


def read_preprocessing(folder: str) -> Preprocessing | None:
    """The preprocessing that a model folder of Weft's holds."""
    try:
        content = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return Preprocessing.from_dict(content["weft"]["preprocessing"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError, WeftError):
        return None


def measure(preprocessing: Preprocessing, source: Source, train: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Mean and standard deviation of each channel over a sample of the training pictures, rounded to four digits."""
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
    return tuple(round(v, 4) for v in mean.tolist()), tuple(round(v, 4) for v in std.tolist())
