"""Classification: what happens to a batch, the loss that training minimises, how a model is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.augment.device_policy import DevicePolicy
from weft.data.augment.mix import BatchAugmentation
from weft.data.augment.picture import Augmentation
from weft.data.given import GivenPictures
from weft.data.loader import Batch, DrawnPictures
from weft.data.sources.source import Source
from weft.report.run import RunReport
from weft.tasks.classify import choose
from weft.tasks.classify.evaluate import ClassifyCollector
from weft.tasks.classify.kept import KeptClassification
from weft.tasks.classify.loss import make_loss
from weft.tasks.classify.metrics import ClassifyMeter, count_hits
from weft.tasks.classify.predict import LabelWriter, Prediction, named
from weft.tasks.classify.report import classify_values
from weft.tasks.metrics import are_measured
from weft.tasks.task import TaskFacts

EVAL_BATCH = 128  # of validation, `weft eval` and `weft predict` alike, so that their digits agree


class Classify:
    """One label for a picture, or several: a `Task`."""

    name, purpose = "classify", "name pictures as a whole"
    choices, whole_pictures, writes_pictures = choose, True, False
    scores_classes, per_pixel = True, False
    largest_batch, eval_batch, counts_hits = 256, EVAL_BATCH, True
    shown_metrics: ClassVar[dict[str, str]] = {"top1": "top-1", "top5": "top-5", "map": "mAP", "f1": "F1"}
    can_replay = True

    def __init__(self, config: Config, facts: TaskFacts):
        self.config, self.classes, self.multilabel = config, facts.classes, facts.multilabel
        self.preprocessing, self.device, self.dtype = facts.preprocessing, facts.device, facts.dtype
        self.unlearned = facts.unlearned
        self.score = "map" if self.multilabel else "top1"
        if facts.labels is not None:  # else nothing is trained, and settings of training do not matter
            self._prepare_training(facts.labels)
            self.distillation = facts.distillation

    def _prepare_training(self, labels: np.ndarray) -> None:
        """Raises where settings do not fit the pictures. `labels`: of those that train."""
        augment, classes, multilabel = self.config.augment, len(self.classes), self.multilabel
        self.augmentation = Augmentation(augment, self.preprocessing)
        policy_on_device = augment.policy and augment.on_device == "yes"
        self.policy = DevicePolicy(augment, self.preprocessing) if policy_on_device else None
        self.mix = BatchAugmentation(augment, self.config.loss.smoothing, classes, multilabel)
        on_device = self.config.data.keep == "device"
        self.kept = KeptClassification(augment, self.preprocessing, self.mix) if on_device else None
        self.label_loss = make_loss(
            self.config.loss,
            multilabel=multilabel,
            class_counts=labels.sum(0) if multilabel else np.bincount(labels, minlength=classes),
            balance=self.config.data.balance,
            pictures=len(labels),
        )

    # Training ---------------------------------------------------------------------------------------------------

    @property
    def training_size(self) -> tuple[int, int]:
        return self.preprocessing.size

    def augmented(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """(B, C, h, w) pictures on the device, after the policy where that is done there, and labels."""
        if self.kept is not None and isinstance(batch.pictures, DrawnPictures):
            return self.kept.augmented(*batch.pictures.to(self.device)), batch.labels
        pictures = batch.pictures.to(self.device, non_blocking=True)
        return self.policy(pictures, seed) if self.policy else pictures, batch.labels

    def prepare(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """Pictures and targets on the device, normalised and mixed: the whole batch, before it is cut into parts."""
        if self.kept is not None and isinstance(batch.pictures, DrawnPictures):
            return self.kept.prepare(*batch.pictures.to(self.device))
        pictures, labels = self.augmented(batch, seed)
        return self.mix(self.preprocessing.normalise(pictures), labels.to(self.device, non_blocking=True), seed)

    def advance(self, part_done: float) -> None:
        self.mix.part_done = part_done

    def loss(
        self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, denominator: float
    ) -> tuple[Tensor, Tensor]:
        if self.config.run.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = forward(x)
        loss = self.label_loss(logits, y, denominator)
        if self.distillation:
            weight = self.config.loss.distill_weight
            loss = (1 - weight) * loss + weight * self.distillation(x, logits, denominator)
        return loss, count_hits(logits.detach(), y)

    def meter(self) -> ClassifyMeter:
        measured = are_measured(self.classes, self.unlearned)
        return ClassifyMeter(len(self.classes), self.multilabel, self.device, measured)

    def dummy_batch(self, count: int) -> Batch:
        """A batch of grey pictures, of the right size and type."""
        shape = (count, self.preprocessing.channels, *self.preprocessing.size)
        eight_bit = self.preprocessing.depth == 8
        pictures = torch.full(shape, 127 if eight_bit else 0.5, dtype=torch.uint8 if eight_bit else torch.float32)
        labels = torch.zeros(count, len(self.classes)) if self.multilabel else torch.zeros(count, dtype=torch.int64)
        return Batch(pictures, labels, torch.zeros(count, dtype=torch.int64), [])

    # Use --------------------------------------------------------------------------------------------------------

    def infer(self, model: nn.Module, pictures: Tensor) -> Tensor:
        """(B, classes) logits; where asked for, their mean with those of the mirrored pictures."""
        x = self.preprocessing.normalise(pictures.to(self.device, non_blocking=True))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return logits_of(model, x, self.config.test.flip)

    def set_up(self, model: nn.Module) -> None:
        """Nothing to do: a classifier has one way of being used."""

    def explained(self, model: nn.Module) -> nn.Module:
        return model

    def collector(self, source: Source, indices: np.ndarray) -> ClassifyCollector:
        return ClassifyCollector(source, indices, self.classes, self.multilabel, self.unlearned)

    def prediction(self, name: str, answer: Tensor, batch: Batch, row: int, *, top: int, score: float) -> Prediction:
        return named(name, answer, self.classes, top, self.multilabel)

    def unreadable(self, name: str, why: str) -> Prediction:
        return Prediction(name, [], [], why)

    def to_dict(self, prediction: Prediction) -> dict[str, Any]:
        return {"labels": prediction.labels, "probabilities": prediction.probabilities}

    def results(self, pictures: GivenPictures, out: Path | None, *, top: int, score: float) -> LabelWriter:
        return LabelWriter(min(top, len(self.classes)))

    def report(self, run: RunReport) -> tuple[str, dict[str, Any]]:
        return "report.html.j2", classify_values(run)


def logits_of(model: nn.Module, x: Tensor, both_ways: bool) -> Tensor:
    """(B, classes) of (B, C, h, w); `both_ways`: the mean of x and x mirrored, which go through as one batch of 2 B."""
    return model(torch.cat([x, x.flip(3)])).unflatten(0, (2, -1)).mean(0) if both_ways else model(x)
