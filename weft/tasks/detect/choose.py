"""Settings of a detector that nobody gave."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from weft.config import AugmentConfig, Config
from weft.data.check.findings import DataReport
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError
from weft.heads.rcnn import choose_anchors
from weft.tasks import choose as common
from weft.tasks.choose import (
    LONG_SIDE,
    check_dense_settings,
    check_head,
    check_loss,
    dense_preprocessing,
    fill_dense_model,
    usual_side,
)
from weft.tasks.policy import Situation, detect_settings

WITH_SHAPES = "mask-rcnn"
HEADS = (WITH_SHAPES, "faster-rcnn")
SHORT_SIDE = 800  # of pictures, at most


def auto(now: Situation, report: DataReport) -> tuple[dict[str, Any], list[str]]:
    return detect_settings(now)


def default_recipe(config: Config, pictures: int) -> str:
    return "detect"


def fill(config: Config, given: Collection[str], report: DataReport, device: torch.device) -> tuple[Config, list[str]]:
    config, why = fill_dense_model(config, device, HEADS[0 if report.has_shapes else 1])
    model, augment, side = config.model, config.augment, usual_side(report)
    if model.head == WITH_SHAPES and not report.has_shapes:
        raise WeftError(
            f"{config.data.source} has boxes and no shapes, which {WITH_SHAPES} learns; choose --head {HEADS[1]}."
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
    return replace(config, model=model, augment=augment), why


def choose_preprocessing(config: Config, report: DataReport) -> Preprocessing:
    """Whole pictures at the size at which the detector was trained."""
    return dense_preprocessing(config, report, (config.augment.img_size, config.augment.long_side))


def kept_bytes(config: Config, report: DataReport) -> int:
    """Only windows are of one size, as a batch on the device has to be."""
    return common.kept_bytes(config, report) if config.augment.crop == "random" else 0


def check_settings(config: Config) -> None:
    check_head(config, HEADS)
    check_loss(config, ("auto",))
    others = {
        "data.balance=loss": config.data.balance == "loss",
        "loss.smoothing": config.loss.smoothing,
        "model.frozen_mode": config.model.frozen_mode,
        "run.compile": config.run.compile,
        "test.scales": config.test.scales != [1.0],
        "test.flip": config.test.flip,
    }
    check_dense_settings(config, others)
    _check_cut(config.augment)


def _check_cut(augment: AugmentConfig) -> None:
    sides = augment.cut_sides
    if len(sides) != 2 or not 0 < sides[0] <= sides[1]:
        raise WeftError(f"augment.cut_sides={sides} must be the smallest and the largest side, such as [384, 600].")
    if min(augment.cut_short_sides, default=1) < 1:
        raise WeftError(f"augment.cut_short_sides={augment.cut_short_sides} must be positive.")
    if augment.cut_short_sides and augment.crop == "random":
        raise WeftError("augment.cut_short_sides and augment.crop=random both cut; choose augment.crop=resize.")
