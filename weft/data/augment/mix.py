"""Augmentation of a whole batch on its device: random erasing, mixup, cutmix, label smoothing, as timm has them.

Every number is drawn on the host from the step's seed, so the device is never waited for. Called with a seed, a
`BatchAugmentation` cuts out boxes, whose sizes differ from step to step. `draw_rows` and `apply` are for steps that are
recorded and replayed: rows of numbers for the whole batch, and masks of one size.
"""

import math

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.preprocessing import Preprocessing
from weft.kernels.ops.mix import Mix, erase, mix, mix_pictures
from weft.kernels.switch import usable

ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)


class BatchAugmentation:
    """Erases, mixes each picture with its mirror place in the batch, smooths labels; a function of the seed alone.

    Integer labels stay as they are where nothing is ever mixed or smoothed, else they become (B, classes) targets.
    Smoothing spreads over the classes; where labels are several, over the two answers of each.
    """

    def __init__(self, config: AugmentConfig, smoothing: float, num_classes: int, multilabel: bool) -> None:
        self.config, self.smoothing = config, smoothing
        self.num_classes, self.multilabel = num_classes, multilabel
        self.mixes = bool(config.mixup or config.cutmix)
        self.part_done = 0.0  # of the run

    def __call__(self, pictures: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(B, C, h, w) normalised pictures and their (B,) or (B, classes) labels."""
        generator = np.random.default_rng(seed)
        if self.config.erase:
            pictures = self._erase(pictures, generator)
        if not self.mixes:
            return pictures, self.targets(labels) if self.multilabel or self.smoothing else labels
        lam, box = self.draw(generator, pictures.shape[-2], pictures.shape[-1])
        if box is not None:
            top, bottom, left, right = box
            cut = pictures.flip(0)[..., top:bottom, left:right]
            pictures = pictures.clone()
            pictures[..., top:bottom, left:right] = cut
        elif lam < 1:
            pictures = pictures.mul(lam).add_(pictures.flip(0).mul_(1 - lam))
        targets = self.targets(labels)
        return pictures, targets.mul(lam).add_(targets.flip(0).mul_(1 - lam)) if lam < 1 else targets

    def draw(
        self, generator: np.random.Generator, height: int, width: int
    ) -> tuple[float, tuple[int, int, int, int] | None]:
        """How much of each picture stays, and for cutmix the box (top, bottom, left, right) that does not."""
        cfg = self.config
        over = self.part_done >= cfg.mix_until < 1
        if over or generator.random() >= cfg.mix_prob:
            return 1.0, None
        cutmix = cfg.cutmix > 0 and (not cfg.mixup or generator.random() < cfg.switch_prob)
        alpha = cfg.cutmix if cutmix else cfg.mixup
        lam = float(generator.beta(alpha, alpha))
        if not cutmix:
            return lam, None
        y, x = int(generator.integers(height)), int(generator.integers(width))
        box = cut_box(lam, height, width, y, x)
        return 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width), box

    def draw_rows(self, generator: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
        """(count, Mix.COLUMNS) float32, all that `apply` needs but the noise."""
        rows = np.zeros((count, Mix.COLUMNS), dtype=np.float32)
        if self.config.erase:
            erased = generator.random(count) <= self.config.erase
            rows[:, Mix.ERASED : Mix.KEPT] = erased_boxes(generator, count, height, width) * erased[:, None]
        lam, box = 1.0, None
        if self.mixes:
            lam, box = self.draw(generator, height, width)
        rows[:, Mix.KEPT :] = lam, 1 - lam, *(box or (0, 0, 0, 0))
        return rows

    def apply(self, pictures: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Does to (B, C, h, w) normalised pictures and their labels what the rows, on the same device, say.

        Shapes and kernels are always the same. Noise comes from the device's own generator.
        """
        if self.config.erase:
            pictures = erase(pictures, rows, torch.randn_like(pictures))
        return mix(pictures, rows) if self.mixes else pictures, self._mixed_targets(labels, rows)

    def finish(
        self, pictures: Tensor, labels: Tensor, rows: Tensor, preprocessing: Preprocessing
    ) -> tuple[Tensor, Tensor]:
        """`apply` to (B, C, h, w) uint8 pictures, which it normalises: on a GPU all in one pass."""
        if pictures.dtype != torch.uint8 or not usable(rows):
            return self.apply(preprocessing.normalise(pictures), labels, rows)
        noise = torch.randn(pictures.shape, device=pictures.device) if self.config.erase else None
        pictures = mix_pictures.run(pictures, rows, *preprocessing.statistics(pictures.device), noise, self.mixes)
        return pictures, self._mixed_targets(labels, rows)

    def _mixed_targets(self, labels: Tensor, rows: Tensor) -> Tensor:
        if not self.mixes:
            return self.targets(labels) if self.multilabel or self.smoothing else labels
        targets = self.targets(labels)
        return targets.mul(rows[:, Mix.KEPT, None]).add_(targets.flip(0).mul_(rows[:, Mix.GIVEN, None]))

    def targets(self, labels: Tensor) -> Tensor:
        """(B, classes) float32, smoothed."""
        if self.multilabel:
            return labels.to(torch.float32).mul(1 - self.smoothing).add_(self.smoothing / 2)
        off = self.smoothing / self.num_classes
        targets = torch.full((len(labels), self.num_classes), off, device=labels.device)
        return targets.scatter_(1, labels[:, None], 1 - self.smoothing + off)

    def _erase(self, pictures: Tensor, generator: np.random.Generator) -> Tensor:
        noise = torch.Generator(pictures.device).manual_seed(int(generator.integers(2**63)))
        pictures = pictures.clone()
        for picture in pictures:
            if generator.random() <= self.config.erase and (box := erased_box(generator, *picture.shape[1:])):
                top, bottom, left, right = box
                picture[:, top:bottom, left:right].normal_(generator=noise)
        return pictures


def cut_box(lam: float, height: int, width: int, y: int, x: int) -> tuple[int, int, int, int]:
    """Top, bottom, left, right of a box of 1 - lam of the area, centred at (y, x), as far as it lies inside."""
    side = math.sqrt(1 - lam)
    h, w = int(height * side), int(width * side)
    return max(0, y - h // 2), min(height, y + (h + 1) // 2), max(0, x - w // 2), min(width, x + (w + 1) // 2)


def erased_box(generator: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int] | None:
    """Top, bottom, left, right of the area to erase; None where ten draws did not fit."""
    low, high = np.log(ERASED_ASPECT)
    for _ in range(10):
        area = generator.uniform(*ERASED_AREA) * height * width
        aspect = math.exp(generator.uniform(low, high))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            top, left = int(generator.integers(height - h + 1)), int(generator.integers(width - w + 1))
            return top, top + h, left, left + w
    return None


def erased_boxes(generator: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
    """(count, 4): the boxes of `erased_box` for as many pictures; zeros where ten draws did not fit."""
    area = generator.uniform(*ERASED_AREA, (count, 10)) * height * width
    aspect = np.exp(generator.uniform(math.log(ERASED_ASPECT[0]), math.log(ERASED_ASPECT[1]), (count, 10)))
    h, w = np.rint(np.sqrt(area * aspect)).astype(int), np.rint(np.sqrt(area / aspect)).astype(int)
    fitting = (h < height) & (w < width)
    first = np.arange(count), fitting.argmax(1)  # of those that fit; where none does, the first of all
    found, h, w = fitting[first], h[first].clip(max=height), w[first].clip(max=width)
    top, left = generator.integers(height - h + 1), generator.integers(width - w + 1)
    return np.stack([top, top + h, left, left + w], axis=1) * found[:, None]
