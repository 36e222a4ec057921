"""Classifiers that are trained on pictures which are kept on the device: a `KeptTraining`."""

import copy
from collections.abc import Generator, Iterable

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.kept import KeptAugmentation, grey_picture
from weft.data.augment.mix import BatchAugmentation
from weft.data.keep import KeptPictures
from weft.data.loader import Batch, PictureSource, drawn_batches
from weft.data.preprocessing import Preprocessing
from weft.data.sampler import SamplingPlan


class KeptClassification(KeptAugmentation):
    """Crop, flips, policy and colours of kept pictures, then erasing and mixing, with their labels."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing, mix: BatchAugmentation) -> None:
        super().__init__(config, preprocessing)
        self.mix = mix
        self.pictures: KeptPictures | None = None  # until they are decoded

    def keep(self, pictures: KeptPictures, labels: np.ndarray) -> None:
        on_device = torch.from_numpy(labels).to(pictures.pixels.device)
        self.pictures, self.labels = pictures, on_device.float() if self.mix.multilabel else on_device

    def batches(
        self, source: PictureSource, plan: SamplingPlan, steps: Iterable[int], workers: int
    ) -> Generator[Batch]:
        assert self.pictures is not None
        return drawn_batches(self.pictures.shapes, self.pictures.stand_ins, source.labels, self.draw, plan, steps)

    def draw(self, generator: np.random.Generator, shapes: np.ndarray) -> np.ndarray:
        mixed = self.mix.draw_rows(generator, len(shapes), *self.preprocessing.size)
        return np.hstack([self.draw_crops(generator, shapes), mixed])

    def augmented(self, index: Tensor, rows: Tensor) -> Tensor:
        assert self.pictures is not None
        return self.crop(self.pictures, index, rows)

    def prepare(self, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        mixed = rows[:, self.columns :].contiguous()
        return self.mix.finish(self.augmented(index, rows), self.labels[index], mixed, self.preprocessing)

    def rehearse(self, count: int, device: torch.device) -> None:
        size = self.preprocessing.size
        rehearsal, classes = copy.copy(self), self.mix.num_classes
        if self.pictures is None:  # else with the memory that the tallest of them takes
            labels = np.zeros((1, classes) if self.mix.multilabel else 1, np.int64)
            rehearsal.keep(grey_picture((self.preprocessing.channels, *size), device), labels)
        rows = self.draw(np.random.default_rng(0), np.tile(size, (count, 1)))
        rehearsal.prepare(torch.zeros(count, dtype=torch.int64, device=device), torch.from_numpy(rows).to(device))
