"""Segmentation: what is learned from masks, and how a picture of any size is labelled.

Answers are probabilities. Windows, scales and the mirrored picture are all averaged as such, so every way of looking
at a picture counts the same.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config import Config
from weft.data.augment.kept_pairs import KeptMasks
from weft.data.augment.pairs import SegmentAugmentation
from weft.data.given import GivenPictures
from weft.data.loader import Batch, DrawnPictures
from weft.data.masks.values import IGNORE
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.report.run import RunReport
from weft.tasks.choose import window_size
from weft.tasks.metrics import are_measured
from weft.tasks.segment import choose
from weft.tasks.segment.evaluate import SegmentCollector
from weft.tasks.segment.losses import PixelLoss, make_pixel_loss, resized
from weft.tasks.segment.metrics import SegmentMeter
from weft.tasks.segment.predict import MaskPrediction, MaskWriter, class_map, mask_dict
from weft.tasks.segment.report import segment_values
from weft.tasks.task import TaskFacts, to_device

EVAL_BATCH = 8
PIXELS_AT_ONCE = 2**21  # of windows in one forward pass: eight of 512 by 512
ANSWERS_AT_ONCE = 2**26  # likewise, a number for each class and pixel: two of 512 by 512 for 128 classes


class Segment:
    """A class for each pixel: a `Task`. Of the configuration, `loss` and `test` decide most."""

    name, purpose = "segment", "segment"
    choices, whole_pictures, writes_pictures = choose, False, True
    scores_classes, per_pixel = True, True
    largest_batch, eval_batch, counts_hits = 16, EVAL_BATCH, True
    shown_metrics: ClassVar[dict[str, str]] = {"miou": "mIoU", "pixel_accuracy": "pixels"}
    can_replay = True
    score, multilabel = "miou", False

    def __init__(self, config: Config, facts: TaskFacts):
        self.config, self.classes, self.preprocessing = config, facts.classes, facts.preprocessing
        self.device, self.dtype, self.pixel_counts = facts.device, facts.dtype, facts.pixel_counts
        self.unlearned = facts.unlearned
        self.mask_values, self.mask_colours = facts.mask_values or range(len(facts.classes)), facts.mask_colours
        side = config.augment.img_size
        self.augmentation = SegmentAugmentation(config.augment, self.preprocessing, (side, side))
        self.kept = KeptMasks(self.augmentation) if config.data.keep == "device" else None
        self.window = config.test.window or side  # of test.mode=slide
        if config.test.mode == "slide" and not self.window:
            raise WeftError("test.mode=slide needs the side of a window; set test.window.")
        if not config.test.scales or min(config.test.scales) <= 0:
            raise WeftError(f"test.scales={config.test.scales} must be positive numbers, such as [0.75, 1.0, 1.25].")

    # Training ---------------------------------------------------------------------------------------------------

    @property
    def training_size(self) -> tuple[int, int]:
        return window_size(self.config)

    @cached_property
    def pixel_loss(self) -> PixelLoss:
        return make_pixel_loss(
            self.config.loss,
            classes=len(self.classes),
            pixel_counts=self.pixel_counts,
            balance=self.config.data.balance,
        )

    def augmented(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """(B, C, h, w) pictures and (B, h, w) masks, on the device."""
        if self.kept is None or not isinstance(batch.pictures, DrawnPictures):
            return to_device(batch.pictures, self.device), to_device(batch.labels, self.device)
        drawn = batch.pictures.to(self.device)
        return self.kept.augmented(*drawn), self.kept.masks(*drawn)

    def prepare(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        pictures, masks = self.augmented(batch, seed)
        return self.preprocessing.normalise(pictures), masks

    def advance(self, part_done: float) -> None:
        """Nothing to do: no augmentation depends on it."""

    def loss(self, forward: Callable[..., Any], x: Tensor, y: Tensor, denominator: float) -> tuple[Tensor, Tensor]:
        """The loss with that of the auxiliary head, and the sum of the pictures' pixel accuracies."""
        maps = {name: part.float() for name, part in self._forward(forward, x).items()}
        loss = self.pixel_loss(maps["out"], y, denominator)
        if "aux" in maps:
            loss = loss + self.config.loss.aux_weight * self.pixel_loss(maps["aux"], y, denominator)
        return loss, pixel_accuracies(maps["out"].detach(), y).sum()

    def dummy_batch(self, count: int) -> Batch:
        side, eight_bit = self.config.augment.img_size, self.preprocessing.depth == 8
        shape = (count, self.preprocessing.channels, side, side)
        pictures = torch.full(shape, 127 if eight_bit else 0.5, dtype=torch.uint8 if eight_bit else torch.float32)
        mask = torch.arange(side * side).remainder(len(self.classes)).to(torch.uint8).view(side, side)
        return Batch(pictures, mask.repeat(count, 1, 1), torch.zeros(count, dtype=torch.int64), [])

    # Evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(self, model: nn.Module, pictures: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """(K, h, w) float32 probabilities of each (C, h, w) picture, on the device; equal sizes go together."""
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, picture in enumerate(pictures):
            groups[tuple(picture.shape)].append(i)
        answers: dict[int, Tensor] = {}
        for members in groups.values():
            x = self._input(torch.stack([pictures[i] for i in members]))
            answers.update(zip(members, self._looks(model, x), strict=True))
        return [answers[i] for i in range(len(answers))]

    def meter(self) -> SegmentMeter:
        return SegmentMeter(len(self.classes), self.device, measured=are_measured(self.classes, self.unlearned))

    def collector(self, source: Source, indices: np.ndarray) -> SegmentCollector:
        return SegmentCollector(source, indices, self.classes, self.device, self.unlearned)

    def set_up(self, model: nn.Module) -> None:
        """Nothing to do: how a picture is looked at is decided here, not in the model."""

    def explained(self, model: nn.Module) -> nn.Module:
        return model

    def prediction(
        self, name: str, answer: Tensor, batch: Batch, row: int, *, top: int, score: float
    ) -> MaskPrediction:
        return MaskPrediction(name, class_map(answer, batch.sizes[row]).cpu().numpy())

    def unreadable(self, name: str, why: str) -> MaskPrediction:
        return MaskPrediction(name, None, why)

    def to_dict(self, prediction: MaskPrediction) -> dict[str, Any]:
        return mask_dict(prediction, self.classes)

    def results(self, pictures: GivenPictures, out: Path | None, *, top: int, score: float) -> MaskWriter:
        values = (self.mask_values, self.mask_colours)
        return MaskWriter(self.classes, self.preprocessing, pictures, out, top, *values)

    def report(self, run: RunReport) -> tuple[str, dict[str, Any]]:
        return "report_segment.html.j2", segment_values(run)

    def _looks(self, model: nn.Module, x: Tensor) -> Tensor:
        """(B, K, h, w) means over scales and, where asked for, the mirrored picture."""
        size, test = x.shape[2:], self.config.test
        total: Tensor | None = None
        for scale in test.scales:
            wanted = [max(1, round(side * scale)) for side in size]
            scaled = x if wanted == list(size) else F.interpolate(x, wanted, mode="bilinear", antialias=True)
            for flip in (False, True)[: 1 + test.flip]:
                answer = self._windows(model, scaled.flip(3) if flip else scaled)
                answer = resized(answer.flip(3) if flip else answer, size)
                total = answer if total is None else total.add_(answer)
        assert total is not None
        return total.div_(len(test.scales) * (1 + test.flip))

    def _windows(self, model: nn.Module, x: Tensor) -> Tensor:
        """(B, K, h, w) means over the windows that see a pixel; a picture smaller than a window is padded with 0."""
        height, width = x.shape[2:]
        h, w = (self.window, self.window) if self.config.test.mode == "slide" else (height, width)
        x = F.pad(x, (0, max(0, w - width), 0, max(0, h - height)))
        rows, columns = (
            [slice(start, start + side) for start in window_starts(whole, side, self.config.test.overlap)]
            for whole, side in zip(x.shape[2:], (h, w), strict=True)
        )
        windows = [(i, slice(None), row, column) for i in range(len(x)) for row in rows for column in columns]
        total = x.new_zeros(len(x), len(self.classes), *x.shape[2:])
        seen = x.new_zeros(len(x), 1, *x.shape[2:])  # by how many windows
        at_once = max(1, min(PIXELS_AT_ONCE, ANSWERS_AT_ONCE // len(self.classes)) // (h * w))
        for start in range(0, len(windows), at_once):
            some = windows[start : start + at_once]
            logits = self._forward(model, torch.stack([x[window] for window in some]))["out"].float()
            for window, answer in zip(some, resized(logits, (h, w)).softmax(dim=1), strict=True):
                total[window] += answer
                seen[window] += 1
        return total.div_(seen)[:, :, :height, :width]

    def _input(self, pictures: Tensor) -> Tensor:
        """(B, C, h, w) float32 on the device."""
        return self.preprocessing.normalise(to_device(pictures, self.device))

    def _forward(self, model: Callable[..., Any], x: Tensor) -> dict[str, Tensor]:
        if self.config.run.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return model(x)


def window_starts(whole: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along a side; each covers `overlap` of the last or more, the last one ends at the border."""
    step = max(1, int(window * (1 - overlap)))
    return [*range(0, max(0, whole - window), step), max(0, whole - window)]


def pixel_accuracies(logits: Tensor, masks: Tensor) -> Tensor:
    """(B,) part of the labelled pixels that are right, looked at where the logits have their points."""
    truth = F.interpolate(masks[:, None].float(), logits.shape[2:], mode="nearest-exact")[:, 0]
    valid = truth != IGNORE
    right = (logits.argmax(dim=1) == truth) & valid
    return right.sum(dim=(1, 2)) / valid.sum(dim=(1, 2)).clamp(min=1)
