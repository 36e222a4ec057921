"""Settings of a segmenter that nobody gave."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from weft.config import Config
from weft.data.check.findings import DataReport
from weft.data.preprocessing import Preprocessing
from weft.heads import SEGMENTERS
from weft.tasks.choose import (
    check_dense_settings,
    check_head,
    check_loss,
    dense_preprocessing,
    fill_dense_model,
    usual_side,
)
from weft.tasks.choose import (
    kept_bytes as kept_bytes,
)
from weft.tasks.policy import Situation, segment_settings

HEADS = SEGMENTERS
WINDOW = 512  # side of the window that training cuts out, at most


def auto(now: Situation, report: DataReport) -> tuple[dict[str, Any], list[str]]:
    return segment_settings(now)


def default_recipe(config: Config, pictures: int) -> str:
    return "segment"


def fill(config: Config, given: Collection[str], report: DataReport, device: torch.device) -> tuple[Config, list[str]]:
    config, why = fill_dense_model(config, device, HEADS[0])
    augment, side = config.augment, usual_side(report)
    if not augment.img_size:
        augment = replace(augment, img_size=max(64, min(WINDOW, side // 32 * 32)))
        why.append(f"img_size {augment.img_size}: the window that training cuts out of pictures of {side} pixels")
    return replace(config, augment=augment), why


def choose_preprocessing(config: Config, report: DataReport) -> Preprocessing:
    """Pictures as large as they are, unless a short side is given."""
    return dense_preprocessing(config, report)


def check_settings(config: Config) -> None:
    check_head(config, HEADS)
    check_loss(config, ("auto", "ce", "ohem", "focal", "dice", "ce+dice"))
    check_dense_settings(config, {"data.balance=sampler": config.data.balance == "sampler"})
