"""Augmentation of a training picture that has labels: crop, flips, policy, colours, each drawn from a seed.

`weft.data.augment.pairs` is for pictures with masks or objects, `weft.data.augment.mix` for whole batches.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from weft.config import AugmentConfig
from weft.data.augment.policies import UniformRandAugment, make_policy, on_pillow
from weft.data.augment.wide import is_wide, wide_jitter, wide_policy
from weft.data.preprocessing import Canvas, Preprocessing, cover, resize, to_channels_first, to_tensor
from weft.data.read import OpenedPicture, Picture

Box = tuple[int, int, int, int]  # top, left, height, width


class Augmentation:
    """Crop, flips, then a policy or colour jitter, as in timm, drawn from a seed.

    `random-resized` is timm's random resized crop. `random` brings the short side to the target's where it is not,
    adds `pad` black pixels around, and cuts a random window. `resize` brings both sides to the target. Colour jitter
    beside a policy is left out unless the policy is 3-Augment, as in timm. With on_device=yes the policy is left to
    `weft.data.augment.device_policy`.

    JPEGs much larger than needed are shrunk while they are decoded, but stay `SPARE` times as large as the result.
    """

    SPARE = 2.0

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        self.config, self.preprocessing = config, preprocessing
        self._steps: list[Callable[[Canvas], Canvas]] = []
        self._generators: set[str] = set()
        wide = is_wide(preprocessing)
        if config.policy and config.on_device != "yes":
            policy = (wide_policy if wide else make_policy)(config, preprocessing)
            self._steps.append(policy)
            self._generators |= {"torch"} if config.policy == "trivial" else {"numpy"}
            if isinstance(policy, UniformRandAugment):
                self._generators.clear()
        if config.color_jitter and (not config.policy or "3a" in config.policy):
            if wide:
                self._steps.append(wide_jitter(config.color_jitter, preprocessing))
            else:
                self._steps.append(partial(on_pillow, v2.ColorJitter(*[config.color_jitter] * 3)))
                self._generators.add("torch")

    def picture(self, file: Picture, seed: int) -> Tensor:
        """(C, h, w) as `Preprocessing.picture` gives it: a function of file and seed alone; may raise BadPicture."""
        with drawing_from(seed, *self._generators):
            canvas = self._cut(file)
            if random.random() < self.config.flip:
                canvas = canvas.flip(2)
            if random.random() < self.config.vflip:
                canvas = canvas.flip(1)
            for step in self._steps:
                canvas = step(canvas)
        return to_tensor(canvas, self.preprocessing.depth)

    def _cut(self, file: Picture) -> Tensor:
        """The picture, decoded and cut to the target's size."""
        target, cfg = self.preprocessing.size, self.config
        with OpenedPicture(file, self.preprocessing.max_pixels) as opened:
            whole = opened.header.height, opened.header.width
            box = random_box(whole, cfg.scale, cfg.ratio) if cfg.crop == "random-resized" else (0, 0, *whole)
            mode = random.choice(("bilinear", "bicubic")) if cfg.interpolation == "random" else cfg.interpolation
            # how large the whole picture has to be for the box to be SPARE times as large as the target
            needed = [math.ceil(side * self.SPARE * t / b) for side, t, b in zip(whole, target, box[2:], strict=True)]
            pixels = opened.pixels(self.preprocessing.channels, (needed[0], needed[1]))
        if cfg.crop == "random":
            return _random_window(to_channels_first(pixels, self.preprocessing.depth), target, cfg.pad, mode)
        picture = to_channels_first(cropped(pixels, box, whole), self.preprocessing.depth)
        return resize(picture, target, mode)


def cropped(pixels: Image.Image | np.ndarray, box: Box, whole: tuple[int, int]) -> Image.Image | np.ndarray:
    """The box, drawn for a picture of the size `whole`, of pixels that may have been shrunk."""
    height, width = pixels.size[::-1] if isinstance(pixels, Image.Image) else pixels.shape[:2]
    top, bottom = (round(side * height / whole[0]) for side in (box[0], box[0] + box[2]))
    left, right = (round(side * width / whole[1]) for side in (box[1], box[1] + box[3]))
    if isinstance(pixels, Image.Image):
        return pixels.crop((left, top, right, bottom))
    return pixels[top:bottom, left:right]


def random_box(size: tuple[int, int], scale: list[float], ratio: list[float]) -> Box:
    """The box of a random resized crop: area and aspect ratio drawn up to ten times until the box fits, else a
    centred one with the nearest aspect ratio that is allowed. Draws from `random` as timm does, in the same order."""
    height, width = size
    for _ in range(10):
        area = random.uniform(*scale) * height * width
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w <= width and h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    w = min(width, round(height * max(ratio)))
    h = min(height, round(width / min(ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def _random_window(picture: Tensor, target: tuple[int, int], pad: int, mode: str) -> Tensor:
    size = cover(list(picture.shape[1:]), list(target))
    if size != list(picture.shape[1:]):
        picture = resize(picture, size, mode)
    top = random.randint(0, size[0] + 2 * pad - target[0])
    left = random.randint(0, size[1] + 2 * pad - target[1])
    picture = torch.nn.functional.pad(picture, [pad] * 4)
    return picture[:, top : top + target[0], left : left + target[1]]


@contextmanager
def drawing_from(seed: int, *others: str) -> Iterator[None]:
    """Seeds Python's global generator, and "numpy"'s and "torch"'s where asked, and leaves them as they were."""
    python = random.getstate()
    numpy = np.random.get_state() if "numpy" in others else None
    torchs = torch.get_rng_state() if "torch" in others else None
    random.seed(seed)
    try:
        if numpy is not None:
            np.random.seed(seed % 2**32)
        if torchs is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            np.random.set_state(numpy)
        if torchs is not None:
            torch.set_rng_state(torchs)
