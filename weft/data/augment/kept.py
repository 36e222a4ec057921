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
CROP_COLUMNS = 7  # top, left, height, width, flip, vflip, interpolation
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
        if self.steps:
            rows[:, CROP_COLUMNS:] = self.steps.draw(generator, count)
        return rows

    def crop(self, kept: KeptPictures, index: Tensor, rows: Tensor) -> Tensor:
        """(B, C, h, w) uint8 of the pictures at the positions `index`, (B,), as their `rows` say."""
        height, width = self.preprocessing.size
        where = kept.pixels, kept.starts[index], kept.sizes[index], rows[:, :CROP_COLUMNS].contiguous(), kept.channels
        if self.config.crop == "random-resized":
            crop = crop_resize.run if usable(rows) else crop_resize.reference
            pictures = crop(*where, height, width, kept.tallest)
        else:
            pictures = cut_windows(*where, height, width)
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


def cut_windows(
    pixels: Tensor, starts: Tensor, sizes: Tensor, rows: Tensor, channels: int, height: int, width: int
) -> Tensor:
    """(B, channels, height, width) uint8: windows whose tops and lefts `rows` has; black where they leave a picture."""
    top, left, _, _, flip, vflip, _ = rows.long().unbind(1)
    down, across = torch.arange(height, device=rows.device), torch.arange(width, device=rows.device)
    y = top[:, None] + torch.where(vflip[:, None] > 0, height - 1 - down, down)  # (B, height)
    x = left[:, None] + torch.where(flip[:, None] > 0, width - 1 - across, across)  # (B, width)
    h, w = sizes[:, :1], sizes[:, 1:]  # (B, 1)
    inside = ((y >= 0) & (y < h))[:, :, None] & ((x >= 0) & (x < w))[:, None, :]  # (B, height, width)
    line = y.clamp(min=0).minimum(h - 1) * w  # (B, height)
    column = x.clamp(min=0).minimum(w - 1)
    plane = starts[:, None] + torch.arange(channels, device=rows.device) * h * w  # (B, channels)
    at = plane[:, :, None, None] + line[:, None, :, None] + column[:, None, None, :]
    return torch.where(inside[:, None], pixels[at], 0)
