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
from weft.data.augment.device_policy import fits
from weft.data.check.check import DataReport
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.heads.rcnn import choose_anchors
from weft.run.build import takes
from weft.tasks.registry import HEADS

SMALL = 64  # pictures up to this side are taken as they are
FEW = 20_000  # training pictures up to which the small-data recipe is chosen
NANO_SIZE = 96  # of large pictures for the nano models
READERS = 8  # from so many on, augmentation by the readers was the faster one on an H200 with 16 cores
WINDOW = 512  # side of the window that segmentation trains on, at most
SHORT_SIDE, LONG_SIDE = 800, 1333 / 800  # of detection: at most, and in proportion to the short side
MEASURED = 500  # pictures for mean and standard deviation


def choose_recipe(config: Config, task: str, pictures: int) -> str:
    if task != "classify":
        return task
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
    why: list[str] = []
    config = replace(config, data=replace(config.data, task=cast(Any, report.task)))
    chosen = _fill_model(config, report, device, why)
    if config.data.task == "classify":
        chosen = _fill_classifier(chosen, given, report, device, why)
    else:
        chosen = _fill_dense(chosen, report, why)
    data, run = chosen.data, chosen.run
    if not data.channels:
        data = replace(data, channels=report.channels)
    if not run.batch:
        run = replace(run, batch=_batch(pictures, device, 256 if data.task == "classify" else 16))
        why.append(f"batch {run.batch}: for {pictures:,} training pictures")
    if data.workers < 0:
        data = replace(data, workers=_workers(device))
    return replace(chosen, run=run, data=data), why


def _fill_model(config: Config, report: DataReport, device: torch.device, why: list[str]) -> Config:
    model, task = config.model, config.data.task
    side = usual_side(report)
    if model.name == "auto":
        small = device.type == "cpu" or (side <= SMALL and task == "classify")
        nano, large = ("cvt_nano", "cvt_13") if task == "classify" else ("cetnet_nano", "cetnet_tiny")
        model = replace(model, name=nano if small else large)
        why.append(
            f"model {model.name}: "
            + (f"pictures of {side} pixels" if side <= SMALL and task == "classify" else f"for the {device.type}")
        )
    if model.head == "auto":
        heads = {"classify": "linear", "segment": "fpn", "detect": "mask-rcnn" if report.has_shapes else "faster-rcnn"}
        model = replace(model, head=cast(Any, heads[task]))
        if task != "classify":
            why.append(f"head {model.head}")
    return replace(config, model=model)


def usual_side(report: DataReport) -> int:
    """The short side of a usual picture."""
    return min(round(report.width["median"]), round(report.height["median"]))


def _fill_classifier(
    config: Config, given: Collection[str], report: DataReport, device: torch.device, why: list[str]
) -> Config:
    model, augment, side = config.model, config.augment, usual_side(report)
    width, height = round(report.width["median"]), round(report.height["median"])
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
    if augment.on_device == "auto":
        few_readers = (config.data.workers if config.data.workers >= 0 else _workers(device)) < READERS
        channels = config.data.channels or report.channels
        on_device = device.type == "cuda" and few_readers and fits(augment.policy, channels, report.depth)
        augment = replace(augment, on_device="yes" if on_device else "no")
    return replace(config, model=model, augment=augment)


def _fill_dense(config: Config, report: DataReport, why: list[str]) -> Config:
    model, augment, side = config.model, config.augment, usual_side(report)
    augment = replace(augment, on_device="no")
    if not augment.img_size and config.data.task == "segment":
        augment = replace(augment, img_size=max(64, min(WINDOW, side // 32 * 32)))
        why.append(f"img_size {augment.img_size}: the window that training cuts out of pictures of {side} pixels")
    if config.data.task == "detect":
        if model.head == "mask-rcnn" and not report.has_shapes:
            raise WeftError(
                f"{config.data.source} has boxes and no shapes, which mask-rcnn learns; choose --head faster-rcnn."
            )
        if not augment.img_size:
            augment = replace(augment, img_size=max(augment.short_sides, default=min(SHORT_SIDE, side)))
            why.append(f"img_size {augment.img_size}: the short side of pictures of {side} pixels")
        if not augment.long_side:
            augment = replace(augment, long_side=round(LONG_SIDE * augment.img_size))
        if "anchor_sizes" not in model.head_args and report.object_sizes:
            scale = augment.img_size / side
            usual = ("q05", "q95")  # a stray speck is not to decide
            sizes = choose_anchors({name: report.object_sizes[name] * scale for name in usual})
            model = replace(model, head_args={**model.head_args, "anchor_sizes": sizes})
            why.append(f"anchors of {', '.join(f'{size:g}' for size in sizes)} pixels, by the sizes of the objects")
    return replace(config, model=model, augment=augment)


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


def _batch(pictures: int, device: torch.device, most: int) -> int:
    """A power of two from 8 to `most` that leaves an epoch some steps: fewer on a GPU, which needs large batches."""
    steps = 16 if device.type == "cuda" else 50
    batch = 8
    while batch < most and pictures // (2 * batch) >= steps:
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
        f"augment.rescale={augment.rescale} must be two factors": not _is_range(augment.rescale, 100),
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


def check_task_settings(config: Config) -> None:
    """Raises for settings that belong to another task than that of the data."""
    task, augment, loss = config.data.task, config.augment, config.loss
    if config.model.head not in HEADS[task]:
        raise WeftError(
            f"model.head={config.model.head} is not for these data, whose task is to {task};"
            f" choose {' or '.join(HEADS[task])}."
        )
    kinds = {"classify": ("auto", "ce", "bce"), "segment": ("auto", "ce", "ohem", "focal", "dice", "ce+dice")}
    if loss.kind not in kinds.get(task, ("auto",)):
        raise WeftError(f"loss.kind={loss.kind} is not for these data, whose task is to {task}; leave it out.")
    if task == "classify":
        return
    theirs = {
        "run.fsdp": config.run.fsdp,  # whose processes must make equally many passes, whatever the sizes of pictures
        "augment.policy": augment.policy,
        "augment.mixup": augment.mixup,
        "augment.cutmix": augment.cutmix,
        "augment.erase": augment.erase,
        "augment.color_jitter": augment.color_jitter,
        "loss.teacher": loss.teacher,
        "model.drop": config.model.drop,
        "data.balance=logit-adjust": config.data.balance == "logit-adjust",
    }
    if task == "segment":
        theirs["data.balance=sampler"] = config.data.balance == "sampler"
    else:
        theirs |= {
            "data.balance=loss": config.data.balance == "loss",
            "loss.smoothing": loss.smoothing,
            "model.frozen_mode": config.model.frozen_mode,
            "run.compile": config.run.compile,
            "test.scales": config.test.scales != [1.0],
            "test.flip": config.test.flip,
        }
    for name, is_set in theirs.items():
        if is_set:
            raise WeftError(f"{name} does not exist for data whose task is to {task}; leave it out.")


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
    if config.data.task != "classify":
        chosen = _dense_preprocessing(config, report)
        return replace(chosen, **_statistics(config, cfg, chosen, source, train))
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
    return replace(chosen, **_statistics(config, cfg, chosen, source, train))


def _dense_preprocessing(config: Config, report: DataReport) -> Preprocessing:
    """Whole pictures: of segmentation as large as they are unless a short side is given, of detection as trained."""
    augment, short = config.augment, config.test.short_side
    size = (short, round(LONG_SIDE * short)) if short else (0, 0)
    if config.data.task == "detect" and not short:
        size = (augment.img_size, augment.long_side)
    return Preprocessing(
        size=size,
        channels=config.data.channels,
        depth=report.depth,
        mean=(0.0,) * config.data.channels,
        std=(1.0,) * config.data.channels,
        interpolation=augment.interpolation if augment.interpolation != "random" else "bicubic",
        crop_pct=1.0,
        crop_mode="fit",
        max_pixels=config.data.max_pixels,
    )


def _statistics(
    config: Config, cfg: Any, chosen: Preprocessing, source: Source, train: np.ndarray
) -> dict[str, tuple[float, ...]]:
    earlier = read_preprocessing(config.model.init)
    if earlier is not None and earlier.channels == chosen.channels:
        mean, std = earlier.mean, earlier.std
    elif chosen.channels == 3 and chosen.depth == 8:
        mean, std = tuple(cfg.mean), tuple(cfg.std)
    else:
        mean, std = measure(chosen, source, train)
    return {"mean": mean, "std": std}


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
