"""Augmentation of a whole batch on its device: random erasing, mixup, cutmix, label smoothing, as timm has them.

Every number is drawn on the host from the step's seed, so the device is never waited for.
"""

import math

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig

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

    def __call__(self, pictures: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(B, C, h, w) normalised pictures and their (B,) or (B, classes) labels."""
        generator = np.random.default_rng(seed)
        if self.config.erase:
            pictures = self._erase(pictures, generator)
        if not (self.config.mixup or self.config.cutmix):
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
        if generator.random() >= cfg.mix_prob:
            return 1.0, None
        cutmix = cfg.cutmix > 0 and (not cfg.mixup or generator.random() < cfg.switch_prob)
        alpha = cfg.cutmix if cutmix else cfg.mixup
        lam = float(generator.beta(alpha, alpha))
        if not cutmix:
            return lam, None
        y, x = int(generator.integers(height)), int(generator.integers(width))
        box = cut_box(lam, height, width, y, x)
        return 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width), box

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
