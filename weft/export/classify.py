"""Classifiers: probabilities of the classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.loader import Batch
from weft.export.form import Answers, ExportForm, Gap
from weft.tasks.classify.task import logits_of

LEAST = 1e-30  # a probability whose logarithm is a number
YES = 0.5  # where a picture may have several labels, it has those that reach this


class ClassifyForm(ExportForm):
    outputs: Mapping[str, str] = {"probabilities": "(B, classes) float32, in the order of the classes"}
    counted = "pictures"

    def answer(self, pictures: Tensor, *prepared: Tensor) -> tuple[Tensor, ...]:
        (x,) = prepared
        return (self._probabilities(logits_of(self.model, x, self.predictor.task.config.test.flip)),)

    def own_answers(self, inferred: Tensor, shown: Sequence[Tensor], size: tuple[int, int]) -> Answers:
        return {"probabilities": self._probabilities(inferred.float()).numpy()}

    def difference(self, one: Answers, other: Answers) -> Gap:
        a, b = one["probabilities"], other["probabilities"]
        several = self.predictor.multilabel
        changed = ((a >= YES) != (b >= YES)).any(1) if several else a.argmax(1) != b.argmax(1)
        return Gap(float(np.abs(a - b).max()), int(changed.sum()), len(a))

    def as_inferred(self, answers: Answers, batch: Batch) -> Any:
        """Logits; where classes exclude each other, up to a number that is the same for all."""
        found = torch.from_numpy(answers["probabilities"]).double()
        return found.logit(eps=LEAST) if self.predictor.multilabel else found.clamp(min=LEAST).log()

    def thresholds(self) -> dict[str, float]:
        return {"label": YES} if self.predictor.multilabel else {}

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.predictor.multilabel else logits.softmax(1)
