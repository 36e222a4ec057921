"""Settings of a classifier that nobody gave."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import timm
import torch

from weft.catalog.measured import SMALL_SIDE
from weft.config import Config
from weft.data.augment.device_policy import fits
from weft.data.augment.kept import kept_size, supports
from weft.data.check.findings import DataReport
from weft.data.preprocessing import Preprocessing
from weft.models.registry import takes
from weft.tasks.choose import check_head, check_loss, default_workers, usual_side
from weft.tasks.policy import Situation, classify_settings, usual_model

HEADS = ("linear",)
FEW = 20_000  # training pictures up to which the small-data recipe is chosen
NANO_SIZE = 96  # of large pictures for the nano models
READERS = 8  # from so many on, augmentation by the readers was the faster one on an H200 with 16 cores


def auto(now: Situation, report: DataReport) -> tuple[dict[str, Any], list[str]]:
    return classify_settings(now)


def default_recipe(config: Config, pictures: int) -> str:
    if config.model.init:
        return "finetune"
    return "small-data" if pictures <= FEW else "large-data"


def fill(config: Config, given: Collection[str], report: DataReport, device: torch.device) -> tuple[Config, list[str]]:
    why: list[str] = []
    config = _fill_model(config, usual_side(report), device, why)
    config = _fill_size(config, given, report, why)
    if config.augment.on_device == "auto":
        readers = config.data.workers if config.data.workers >= 0 else default_workers(device)
        channels = config.data.channels or report.channels
        fitting = device.type == "cuda" and fits(config.augment.policy, channels, report.depth)
        on_device = "yes" if fitting and readers < READERS else "no"
        config = replace(config, augment=replace(config.augment, on_device=on_device))
    return config, why


def _fill_model(config: Config, side: int, device: torch.device, why: list[str]) -> Config:
    model = config.model
    if model.name == "auto":
        row = usual_model("cuda" if device.type == "cuda" else "cpu", side)
        model = replace(model, name=row.model, args={**row.args, **model.args})
        why.append(f"model {model.name}: the best on {row.data} that was measured on a {device.type}")
    if model.head == "auto":
        model = replace(model, head=cast(Any, HEADS[0]))
    return replace(config, model=model)


def _fill_size(config: Config, given: Collection[str], report: DataReport, why: list[str]) -> Config:
    """The size that the model sees, and what small sizes need."""
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
    if augment.img_size <= SMALL_SIDE and side <= SMALL_SIDE and "augment.crop" not in given:
        augment = replace(augment, crop="random", pad=augment.img_size // 8)
        why.append(f"crop random with a margin of {augment.pad}: the pictures are small")
    return replace(config, model=model, augment=augment)


def _size(name: str, side: int) -> int:
    cfg: Any = timm.get_pretrained_cfg(name)
    own = cfg.input_size[-1]
    if "nano" in name:
        own = min(own, NANO_SIZE)
    if side >= 0.7 * own:
        return own if side > SMALL_SIDE else side
    return side if side <= SMALL_SIDE else max(32, side // 32 * 32)


def _needs_small_stride(name: str, size: int) -> bool:
    """32-pixel pictures leave the larger models 2 x 2 positions, unless their stem keeps the resolution."""
    return size <= SMALL_SIDE * 3 // 4 and "nano" not in name and takes(name, "stem_stride")


def choose_preprocessing(config: Config, report: DataReport) -> Preprocessing:
    cfg: Any = timm.get_pretrained_cfg(config.model.name)
    size, augment = config.augment.img_size, config.augment
    as_they_are = max(report.width["max"], report.height["max"]) <= size <= SMALL_SIDE
    return Preprocessing(
        size=(size, size),
        channels=config.data.channels,
        depth=report.depth,
        mean=(0.0,) * config.data.channels,
        std=(1.0,) * config.data.channels,
        interpolation=augment.interpolation if augment.interpolation != "random" else "bicubic",
        crop_pct=augment.eval_crop or (1.0 if as_they_are else cfg.crop_pct),
        crop_mode=cast(Any, augment.eval_resize or ("squash" if cfg.crop_mode == "squash" else "center")),
        max_pixels=config.data.max_pixels,
    )


def kept_bytes(config: Config, report: DataReport) -> int:
    if not supports(config.augment, config.data.channels, report.depth):
        return 0
    whole, side = [round(report.height["q95"]), round(report.width["q95"])], config.augment.img_size
    height, width = kept_size(config.augment.crop, whole, (side, side))
    return config.data.channels * max(height * width, side * side)  # a validation picture is as the model sees it


def check_settings(config: Config) -> None:
    check_head(config, HEADS)
    check_loss(config, ("auto", "ce", "bce"))
