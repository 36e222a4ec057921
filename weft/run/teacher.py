"""Distillation in a run: its teacher is a run or model folder, or a model of timm's."""

from pathlib import Path
from typing import Any

import timm
import torch

from weft.config import Config, LossConfig
from weft.data.preprocessing import Preprocessing
from weft.data.sources.source import Source
from weft.errors import WeftError, did_you_mean
from weft.run.initial import create_pretrained
from weft.run.predictor import Predictor, load, timms_preprocessing
from weft.tasks.classify.distill import Distillation, check_distillation
from weft.tasks.registry import UNNAMED, make_task
from weft.tasks.task import TaskFacts


def make_distillation(
    config: LossConfig, source: Source, preprocessing: Preprocessing, device: torch.device
) -> Distillation | None:
    """The loss that a teacher adds; None without one. What can be refused is refused before the teacher is opened."""
    if not config.teacher:
        return None
    check_distillation(config, source.multilabel)
    teacher = open_teacher(config.teacher, device)
    return Distillation(config, teacher, classes=source.classes, preprocessing=preprocessing, device=device)


def open_teacher(name: str, device: torch.device) -> Predictor:
    """A run or model folder, or a model of timm's with its pretrained weights."""
    if Path(name).is_dir():
        teacher = load(name, device=str(device))
        if not teacher.task.whole_pictures:
            raise WeftError(f"loss.teacher={name} is not a classifier.")
        return teacher
    bare = name.split(".")[0]
    if not timm.is_model(bare):
        hint = did_you_mean(bare, timm.list_models())
        raise WeftError(f"loss.teacher={name!r} is neither a run folder nor a model of timm's.{hint}")
    model = create_pretrained(name)
    cfg: dict[str, Any] = model.pretrained_cfg
    names = cfg.get("label_names") or [str(i) for i in range(cfg["num_classes"])]
    facts = TaskFacts(list(names), timms_preprocessing(model), device)
    return Predictor(model, make_task(UNNAMED, Config(), facts))
