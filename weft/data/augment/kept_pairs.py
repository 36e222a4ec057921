"""Pictures with masks or objects that are kept on the device: readers draw, the device does what was drawn.

Where a window lies depends on the mask, and what is seen of objects on their outlines, so readers draw all of it, by
the same functions and from the same seeds as where they cut pictures themselves (`weft.data.augment.pairs`). What they
send is a row of numbers for each picture, and objects; a mask lies behind its picture on the device, as one channel
more. Nothing about the launches depends on the numbers, so that a step can be recorded and replayed.
"""

import copy
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.kept import CROP_COLUMNS, cut_windows, grey_picture, resized_boxes
from weft.data.augment.pairs import (
    ColourMap,
    CropView,
    DetectAugmentation,
    DrawnPair,
    SegmentAugmentation,
    align,
    mean_colour,
    recolour,
)
from weft.data.boxes.objects import Objects
from weft.data.keep import KeptPictures
from weft.data.loader import Batch, DrawnPictures, PictureSource, train_batches
from weft.data.masks.values import IGNORE
from weft.data.preprocessing import Preprocessing, to_channels_first
from weft.data.read import Header, OpenedPicture, Picture
from weft.data.sampler import SamplingPlan
from weft.errors import WeftError
from weft.kernels.ops.crop import MODES
from weft.kernels.ops.mix import inside


def supports_pairs(config: AugmentConfig, depth: int) -> bool:
    """Whether pictures of one size, of 8 bits, can be made of kept ones."""
    return depth == 8 and config.interpolation in (*MODES, "random")


class KeptPairs:
    """Pictures on the device become pictures of the size `window`, whether masks or objects belong to them."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing, window: tuple[int, int]) -> None:
        if not supports_pairs(config, preprocessing.depth):
            raise WeftError(
                f"data.keep=device is not for pictures of {preprocessing.depth} bits with"
                f" augment.interpolation={config.interpolation}: readers do these; choose --data.keep memory or no."
            )
        self.config, self.preprocessing, self.window = config, preprocessing, window
        self.pictures: KeptPictures | None = None  # until they are decoded

    def keep(self, pictures: KeptPictures, labels: np.ndarray) -> None:
        self.pictures = pictures

    def decode(self, file: Picture, target: Any) -> Tensor:
        """(C, h, w) uint8: a picture as it is kept, as large as it is."""
        with OpenedPicture(file, self.preprocessing.max_pixels) as opened:
            return to_channels_first(opened.pixels(self.preprocessing.channels), 8).contiguous()

    # In the readers -----------------------------------------------------------------------------------------------

    def batches(
        self, source: PictureSource, plan: SamplingPlan, steps: Iterable[int], workers: int
    ) -> Generator[Batch]:
        assert self.pictures is not None
        bad, pin = dict(self.pictures.bad), workers > 0 and self.pictures.pixels.is_cuda
        for batch in train_batches(source, self, plan, steps, workers=workers, pin=pin):
            batch = _readable(batch, bad)
            rows = torch.stack(list(batch.pictures)) if len(batch.index) else torch.empty(0, 0)
            yield replace(batch, pictures=DrawnPictures(batch.index, rows))

    def header(self, file: Picture) -> Header:
        with OpenedPicture(file, self.preprocessing.max_pixels) as opened:
            return opened.header

    # On the device ------------------------------------------------------------------------------------------------

    def augmented(self, index: Tensor, rows: Tensor) -> Tensor:
        """(B, C, *window) uint8 of the pictures at the positions `index`, (B,), as their `rows` say."""
        assert self.pictures is not None
        channels = self.preprocessing.channels
        pictures = resized_boxes(self.pictures, index, rows, channels, self.window)
        if self.config.photometric:
            matrix, offset = rows[:, CROP_COLUMNS:-1].unflatten(1, (channels, channels)), rows[:, -1]
            pictures = recolour(pictures, ColourMap(matrix, offset), 8)
        height, width = rows[:, CROP_COLUMNS - 2 : CROP_COLUMNS].unbind(1)
        shown = torch.stack([torch.zeros_like(height), height, torch.zeros_like(width), width], dim=1)
        return torch.where(inside(shown, pictures), pictures, mean_colour(self.preprocessing, pictures))

    def rehearse(self, count: int, device: torch.device) -> None:
        rehearsal, channels = copy.copy(self), self.preprocessing.channels
        if self.pictures is None:  # else with the memory that the tallest of them takes
            rehearsal.pictures = grey_picture((channels + 1, *self.window), device)
        colours = ColourMap(torch.eye(channels), torch.tensor(0.5)) if self.config.photometric else None
        row = as_row(DrawnPair(CropView((0, 0, 1, 1), self.window), MODES[0], colours)).to(device)
        rehearsal.augmented(torch.zeros(count, dtype=torch.int64, device=device), row.repeat(count, 1))


def _readable(batch: Batch, bad: dict[int, str]) -> Batch:
    """Without pictures that could not be decoded: those who draw read no more than their heads."""
    index = batch.index.tolist()
    there = [i for i, position in enumerate(index) if position not in bad]
    if len(there) == len(index):
        return batch
    labels = [batch.labels[i] for i in there] if isinstance(batch.labels, list) else batch.labels[there]
    left_out = [(position, bad[position]) for position in index if position in bad]
    pictures = [batch.pictures[i] for i in there]
    return replace(batch, pictures=pictures, labels=labels, index=batch.index[there], bad=[*batch.bad, *left_out])


class KeptMasks(KeptPairs):
    """`SegmentAugmentation` of kept pictures. A mask lies behind its picture, as one channel more."""

    def __init__(self, augmentation: SegmentAugmentation) -> None:
        super().__init__(augmentation.config, augmentation.preprocessing, augmentation.window)
        self.augmentation = augmentation

    def decode(self, file: Picture, target: np.ndarray) -> Tensor:
        """(C + 1, h, w) uint8."""
        mask = torch.from_numpy(align(target, self.header(file)).copy())
        return torch.cat([super().decode(file, target), mask[None]])

    def pair(self, file: Picture, mask: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
        """(columns,) float32 in place of a picture, and nothing in place of its mask; may raise BadPicture."""
        header = self.header(file)
        return as_row(self.augmentation.draw(header, align(mask, header), seed)), torch.empty(0)

    def masks(self, index: Tensor, rows: Tensor) -> Tensor:
        """(B, *window) uint8."""
        assert self.pictures is not None
        last = range(self.pictures.channels - 1, self.pictures.channels)
        return cut_windows(self.pictures, index, rows, last, self.window, IGNORE)[:, 0]


class KeptObjects(KeptPairs):
    """`DetectAugmentation` of kept pictures, with windows of one size; objects come from the readers."""

    def __init__(self, augmentation: DetectAugmentation) -> None:
        side = augmentation.config.img_size
        super().__init__(augmentation.config, augmentation.preprocessing, (side, side))
        if augmentation.config.crop != "random":
            raise WeftError(
                f"data.keep=device is for windows of one size, not for augment.crop={augmentation.config.crop};"
                " choose --data.keep memory or no."
            )
        self.augmentation = augmentation

    def pair(self, file: Picture, objects: Objects, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(columns,) float32 in place of a picture, and the objects in its view; may raise BadPicture."""
        header = self.header(file)
        objects = align(objects, header)
        drawn = self.augmentation.draw(header, objects, seed)
        return as_row(drawn), self.augmentation.target(header, objects, drawn)


def as_row(drawn: DrawnPair) -> Tensor:
    """(columns,) float32: those of a crop, then matrix and offset of the colours."""
    view = drawn.view
    crop = torch.tensor([*view.box, view.flip, view.vflip, MODES.index(drawn.mode), *view.size], dtype=torch.float32)
    colours = () if drawn.colours is None else (drawn.colours.matrix.flatten(), drawn.colours.offset[None])
    return torch.cat([crop, *colours])
