"""Segmenters: a class for each pixel of the picture as it is."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data.loader import Batch
from weft.errors import WeftError
from weft.export.form import Answers, ExportForm, Gap
from weft.run.predictor import Predictor
from weft.tasks.segment.losses import resized

# `resized` without a look at the size, which a graph does not know
stretched = partial(F.interpolate, mode="bilinear", align_corners=False)


class SegmentForm(ExportForm):
    outputs: Mapping[str, str] = {
        "labels": "(B, H, W) uint8, positions in the classes",
        "scores": "(B, H, W) float32, the probability of that class",
    }
    counted = "pixels"

    def __init__(self, predictor: Predictor):
        super().__init__(predictor)
        task: Any = predictor.task
        test = task.config.test
        if test.mode == "slide" or test.flip or test.scales != [1.0]:
            raise WeftError(
                "What is exported looks once, at the whole picture; add --test.mode whole --test.flip no"
                " --test.scales [1.0]."
            )

    def answer(self, pictures: Tensor, *prepared: Tensor) -> tuple[Tensor, ...]:
        (x,) = prepared
        parts = stretched(self.model(x)["out"], x.shape[2:]).softmax(1)
        if self.preprocessing.rules.size != (0, 0):
            parts = stretched(parts, pictures.shape[1:3])
        scores, labels = parts.max(1)
        return labels.to(torch.uint8), scores

    def own_answers(self, inferred: Sequence[Tensor], shown: Sequence[Tensor], size: tuple[int, int]) -> Answers:
        parts = [resized(answer[None], size) for answer in inferred]
        scores, labels = torch.cat(parts).max(1)
        return {"labels": labels.to(torch.uint8).numpy(), "scores": scores.numpy()}

    def difference(self, one: Answers, other: Answers) -> Gap:
        changed = one["labels"] != other["labels"]
        return Gap(float(np.abs(one["scores"] - other["scores"]).max()), int(changed.sum()), changed.size)

    def as_inferred(self, answers: Answers, batch: Batch) -> Any:
        """Probabilities: the score of the class that was chosen, nothing for the others."""
        classes = len(self.predictor.classes)
        labels, scores = torch.from_numpy(answers["labels"]).long(), torch.from_numpy(answers["scores"])
        return [F.one_hot(a, classes).permute(2, 0, 1) * b for a, b in zip(labels, scores, strict=True)]
