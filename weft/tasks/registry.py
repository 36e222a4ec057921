"""The task of a run or of a trained model, by its name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config import Config
from weft.data.preprocessing import Preprocessing
from weft.tasks.task import Task

HEADS = {"classify": ("linear",), "segment": ("fpn", "vt-fpn", "upernet"), "detect": ("mask-rcnn", "faster-rcnn")}


def make_task(
    name: str,
    config: Config,
    *,
    classes: list[str],
    preprocessing: Preprocessing,
    device: torch.device,
    dtype: torch.dtype,
    multilabel: bool = False,
    has_shapes: bool = False,
    labels: np.ndarray | None = None,
    pixel_counts: list[int] | None = None,
    distillation: Callable[[Tensor, Tensor, float], Tensor] | None = None,
) -> Task:
    """A task to train, evaluate or use a model with.

    Args:
        name: classify, segment or detect.
        config: of the run.
        classes: names, in the order of the model's answers.
        preprocessing: of the pictures.
        device: where the model is.
        dtype: what its products are computed in.
        multilabel: classify: whether a picture may have several classes.
        has_shapes: detect: whether there are shapes and not only boxes.
        labels: classify: those of the training pictures, for classes that are rare.
        pixel_counts: segment: training pixels of each class, for the same.
        distillation: classify: a loss to be added.
    """
    common: dict[str, Any] = dict(classes=classes, preprocessing=preprocessing, device=device, dtype=dtype)
    if name == "segment":
        from weft.tasks.segment.task import Segment

        return Segment(config, pixel_counts=pixel_counts, **common)
    if name == "detect":
        from weft.tasks.detect.task import Detect

        return Detect(config, has_shapes=has_shapes, **common)
    from weft.tasks.classify.task import Classify, make_loss

    labels = np.zeros((0, len(classes)) if multilabel else 0, np.int64) if labels is None else labels
    counts = labels.sum(0) if multilabel else np.bincount(labels, minlength=len(classes))
    loss = make_loss(
        config.loss, multilabel=multilabel, class_counts=counts, balance=config.data.balance, pictures=len(labels)
    )
    return Classify(config, multilabel=multilabel, loss=loss, distillation=distillation, **common)
