"""Augmentation of pictures that are kept on the device: whole batches at once, where they lie.

What happens is what happens to a picture that is read (`weft.data.augment.picture`): crop, flips, then a policy or
colour jitter. Every number is drawn on the host, for all pictures of a step at once, from the run's seed and the number
of the step; the device gets a table with a row for each picture. Nothing about the launches depends on the numbers in
it, so that a step can be recorded and replayed.
"""

import math

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.batch_policy import batch_steps, can_batch
from weft.data.keep import KeptPictures
from weft.data.preprocessing import Preprocessing, cover, resize, to_channels_first
from weft.data.read import OpenedPicture, Picture
from weft.errors import WeftError
from weft.kernels.ops.crop import MODES, crop_resize
from weft.kernels.switch import usable

SPARE = 2  # times the sides that the model sees: larger pictures are kept no larger than that
CROP_COLUMNS = 9  # top, left, height, width, flip, vflip, interpolation, and the height and width that are shown
TRIES = 10  # of a random box, until one fits into its picture


def supports(config: AugmentConfig, channels: int, depth: int) -> bool:
    """Whether this augmentation can be done to kept pictures, which are of 8 bits."""
    drawn = config.interpolation == "random" and config.crop == "random-resized"
    return depth == 8 and (drawn or config.interpolation in MODES) and can_batch(config, channels, depth)


def kept_size(crop: str, whole: list[int], target: tuple[int, int]) -> list[int]:
    """The height and width that a picture is kept with: no more than `SPARE` times what the model sees.

    What `random` and `resize` crops do first, to bring a picture to size, is done before it is kept.
    """
    if crop == "resize":
        return list(target)
    if crop == "random":
        return cover(whole, list(target))
    largest = cover(whole, [SPARE * side for side in target])
    return largest if largest[0] < whole[0] else whole


def grey_picture(shape: tuple[int, int, int], device: torch.device) -> KeptPictures:
    """A single one, (C, h, w), to rehearse with."""
    grey = torch.full((math.prod(shape),), 127, dtype=torch.uint8, device=device)
    start, size = torch.zeros(1, dtype=torch.int64, device=device), np.array([shape[1:]])
    return KeptPictures(grey, start, torch.from_numpy(size).to(device), size, shape[0], np.zeros(1, np.int64), [])


class KeptAugmentation:
    """Crop, flips, then a policy or colour jitter, as `Augmentation` has them, of kept pictures."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        if not supports(config, preprocessing.channels, preprocessing.depth):
            raise WeftError(
                f"data.keep=device is not for {preprocessing.channels} channels of {preprocessing.depth} bits with"
                f" augment.policy={config.policy!r}, augment.interpolation={config.interpolation}: readers do these;"
                " choose --data.keep memory or no."
            )
        self.config, self.preprocessing = config, preprocessing
        self.steps = batch_steps(config, preprocessing)
        self.columns = CROP_COLUMNS + (self.steps.columns if self.steps else 0)

    # Once ---------------------------------------------------------------------------------------------------------

    def decode(self, file: Picture) -> Tensor:
        """(C, h, w) uint8: a picture as it is kept."""
        with OpenedPicture(file, self.preprocessing.max_pixels) as opened:
            whole = [opened.header.height, opened.header.width]
            size = kept_size(self.config.crop, whole, self.preprocessing.size)
            pixels = opened.pixels(self.preprocessing.channels, (size[0], size[1]))
        picture = to_channels_first(pixels, self.preprocessing.depth)
        if list(picture.shape[1:]) != size:
            mode = "bicubic" if self.config.interpolation == "random" else self.config.interpolation
            picture = resize(picture, size, mode)
        return picture.contiguous()

    # For every step -----------------------------------------------------------------------------------------------

    def draw_crops(self, generator: np.random.Generator, shapes: np.ndarray) -> np.ndarray:
        """(B, columns) float32 for pictures that are kept with these heights and widths, (B, 2)."""
        count, cfg = len(shapes), self.config
        rows = np.zeros((count, self.columns), np.float32)
        if cfg.crop == "random-resized":
            rows[:, :4] = random_boxes(generator, shapes, cfg.scale, cfg.ratio)
        else:
            target, pad = np.array(self.preprocessing.size), cfg.pad if cfg.crop == "random" else 0
            rows[:, :2] = generator.integers(0, shapes + 2 * pad - target, endpoint=True) - pad
            rows[:, 2:4] = target
        rows[:, 4] = generator.random(count) < cfg.flip
        rows[:, 5] = generator.random(count) < cfg.vflip
        choice = generator.integers(0, len(MODES), count)
        rows[:, 6] = choice if cfg.interpolation == "random" else MODES.index(cfg.interpolation)
        rows[:, 7:9] = self.preprocessing.size
        if self.steps:
            rows[:, CROP_COLUMNS:] = self.steps.draw(generator, count)
        return rows

    def crop(self, kept: KeptPictures, index: Tensor, rows: Tensor) -> Tensor:
        """(B, C, h, w) uint8 of the pictures at the positions `index`, (B,), as their `rows` say."""
        if self.config.crop == "random-resized":
            pictures = resized_boxes(kept, index, rows, kept.channels, self.preprocessing.size)
        else:
            pictures = cut_windows(kept, index, rows, range(kept.channels), self.preprocessing.size)
        steps = rows[:, CROP_COLUMNS : self.columns].contiguous()
        return self.steps(pictures, steps) if self.steps else pictures


def random_boxes(
    generator: np.random.Generator, shapes: np.ndarray, scale: list[float], ratio: list[float]
) -> np.ndarray:
    """(B, 4) top, left, height, width: `picture.random_box` for pictures of heights and widths (B, 2) at once."""
    height, width = shapes[:, :1], shapes[:, 1:]  # (B, 1)
    area = generator.uniform(scale[0], scale[1], (len(shapes), TRIES)) * height * width
    aspect = np.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1]), area.shape))
    w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))  # (B, TRIES)
    fits = (w <= width) & (h <= height) & (w >= 1) & (h >= 1)
    first = fits.argmax(axis=1)[:, None]
    h, w = np.take_along_axis(h, first, 1), np.take_along_axis(w, first, 1)
    top, left = (np.floor(generator.random(h.shape) * (side - part + 1)) for side, part in ((height, h), (width, w)))
    near_w = np.minimum(width, np.rint(height * max(ratio)))  # centred, where none of the tries fits
    near_h = np.minimum(height, np.rint(width / min(ratio)))
    centred = np.hstack([(height - near_h) // 2, (width - near_w) // 2, near_h, near_w])
    return np.where(fits.any(axis=1, keepdims=True), np.hstack([top, left, h, w]), centred)


def resized_boxes(kept: KeptPictures, index: Tensor, rows: Tensor, channels: int, size: tuple[int, int]) -> Tensor:
    """(B, channels, *size) uint8: boxes of the pictures' first channels, as the first columns of `rows` say."""
    crop = crop_resize.run if usable(rows) else crop_resize.reference
    rows = rows[:, :CROP_COLUMNS].contiguous()
    return crop(kept.pixels, kept.starts[index], kept.sizes[index], rows, channels, *size, kept.tallest)


def cut_windows(
    kept: KeptPictures, index: Tensor, rows: Tensor, channels: range, size: tuple[int, int], fill: int = 0
) -> Tensor:
    """(B, channels, *size) uint8: boxes as `resized_boxes` has them, with values that are chosen, never mixed.

    Boxes may leave their pictures here; `fill` is what there is outside, and beyond what is shown.
    """
    top, left, box_height, box_width, flip, vflip, _, shown_height, shown_width = (
        column[:, None] for column in rows[:, :CROP_COLUMNS].long().unbind(1)
    )
    sizes = kept.sizes[index]
    h, w = sizes[:, :1], sizes[:, 1:]  # (B, 1)
    y, inside_y = _nearest(size[0], top, box_height, vflip, shown_height, h)
    x, inside_x = _nearest(size[1], left, box_width, flip, shown_width, w)
    planes = torch.arange(channels.start, channels.stop, device=rows.device) * h * w  # (B, channels)
    at = (kept.starts[index, None] + planes)[:, :, None, None] + (y * w)[:, None, :, None] + x[:, None, None, :]
    inside = inside_y[:, None, :, None] & inside_x[:, None, None, :]
    return torch.where(inside, kept.pixels[at], fill)


def _nearest(
    count: int, first: Tensor, part: Tensor, mirror: Tensor, shown: Tensor, side: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, count) positions along a side of the pictures, `CropView.pixels` of a batch, and whether they are there."""
    place = torch.arange(count, device=first.device)
    place = torch.where(mirror > 0, shown - 1 - place, place)
    at = first + ((2 * place + 1) * part).div(2 * shown, rounding_mode="floor")
    inside = (place >= 0) & (place < shown) & (at >= 0) & (at < side)
    return at.clamp(min=0).minimum(side - 1), inside
