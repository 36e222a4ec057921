"""Helpers of the tasks' choices: what nobody said is decided from the data and the machine, each with its reason."""

import os
from dataclasses import replace
from typing import Any, cast

import torch

from weft.config import Config, TestConfig
from weft.data.augment.kept_pairs import supports_pairs
from weft.data.check.findings import DataReport
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError
from weft.tasks.policy import BACKBONES

LONG_SIDE = 1333 / 800  # of whole pictures, at most, in proportion to the short side
ALIKE = 1.25  # times: sides of pictures that differ by no more, but for some, are alike


def usual_side(report: DataReport) -> int:
    """The short side of a usual picture."""
    return min(round(report.width["median"]), round(report.height["median"]))


def shared_long_side(report: DataReport) -> int:
    """The longest side of pictures that are alike in size; 0 of others."""
    sides = report.width, report.height
    alike = all(side["q95"] <= ALIKE * side["q05"] for side in sides)
    return round(max(side["max"] for side in sides)) if alike else 0


def default_workers(device: torch.device) -> int:
    """Processes that read pictures, for one process that trains."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mine = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min(16, mine) if device.type == "cuda" else min(2, mine // 2)


def check_head(config: Config, heads: tuple[str, ...]) -> None:
    if config.model.head not in heads:
        raise WeftError(
            f"model.head={config.model.head} is not for these data, whose task is to {config.data.task};"
            f" choose {' or '.join(heads)}."
        )


def check_loss(config: Config, kinds: tuple[str, ...]) -> None:
    if config.loss.kind not in kinds:
        raise WeftError(
            f"loss.kind={config.loss.kind} is not for these data, whose task is to {config.data.task}; leave it out."
        )


# Segmentation and detection --------------------------------------------------------------------------------------


def fill_dense_model(config: Config, device: torch.device, head: str) -> tuple[Config, list[str]]:
    """A backbone for the machine, and a head on top."""
    model, why = config.model, []
    if model.name == "auto":
        name, args = BACKBONES["cuda" if device.type == "cuda" else "cpu"]
        model = replace(model, name=name, args={**args, **model.args})
        why.append(f"model {model.name}: for the {device.type}")
    if model.head == "auto":
        model = replace(model, head=cast(Any, head))
        why.append(f"head {head}")
    return replace(config, model=model, augment=replace(config.augment, on_device="no")), why


def window_size(config: Config) -> tuple[int, int]:
    """Height and width of a training picture, or about that."""
    return config.augment.img_size, config.augment.long_side or config.augment.img_size


def size_in_use(test: TestConfig, size: tuple[int, int]) -> tuple[int, int]:
    """The short side and the longest long side of a picture in use; `size` where nothing else was asked for."""
    if test.long_side and not 0 < test.short_side <= test.long_side:
        raise WeftError(f"test.long_side={test.long_side} needs a test.short_side, which must not be longer.")
    return (test.short_side, test.long_side or round(LONG_SIDE * test.short_side)) if test.short_side else size


def dense_preprocessing(config: Config, report: DataReport, size: tuple[int, int] = (0, 0)) -> Preprocessing:
    """Whole pictures, fitted into `size`, or into what test.short_side gives; (0, 0): as large as they are."""
    return Preprocessing(
        size=size_in_use(config.test, size),
        channels=config.data.channels,
        depth=report.depth,
        mean=(0.0,) * config.data.channels,
        std=(1.0,) * config.data.channels,
        interpolation=config.augment.interpolation if config.augment.interpolation != "random" else "bicubic",
        crop_pct=1.0,
        crop_mode="fit",
        max_pixels=config.data.max_pixels,
    )


def kept_bytes(config: Config, report: DataReport) -> int:
    """Of pictures with masks or boxes, which are kept as large as they are."""
    if not supports_pairs(config.augment, report.depth):
        return 0
    return round((config.data.channels + 1) * report.height["q95"] * report.width["q95"])


def check_dense_settings(config: Config, others: dict[str, Any]) -> None:
    """Raises for settings that are for classifiers alone, and for `others` that are set."""
    augment = config.augment
    theirs = {
        "run.fsdp": config.run.fsdp,  # whose processes must make equally many passes, whatever the sizes of pictures
        "augment.policy": augment.policy,
        "augment.mixup": augment.mixup,
        "augment.cutmix": augment.cutmix,
        "augment.erase": augment.erase,
        "augment.color_jitter": augment.color_jitter,
        "loss.teacher": config.loss.teacher,
        "model.drop": config.model.drop,
        "data.balance=logit-adjust": config.data.balance == "logit-adjust",
    }
    for name, is_set in {**theirs, **others}.items():
        if is_set:
            raise WeftError(f"{name} does not exist for data whose task is to {config.data.task}; leave it out.")
