"""From a file to the tensor a model sees: one object for evaluation everywhere, one for training.

The geometry is timm's, so published models and recipes mean the same here. Pictures of 8 bits and 1 or 3 channels go
through Pillow, where timm's augmentation policies live; 16-bit, floating-point and other pictures through torchvision
on tensors. `weft.data.mix` has what happens to a whole batch on the device.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from weft.config import AugmentConfig
from weft.data.mix import BatchAugmentation as BatchAugmentation  # the third of the family, for those who import here
from weft.data.read import BadPicture, Opened, Picture
from weft.errors import WeftError, did_you_mean

Canvas = Any  # a Pillow image, or a (C, H, W) tensor: torchvision's functions take both, but are typed for tensors
Box = tuple[int, int, int, int]  # top, left, height, width

POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix", "trivial")


@dataclass(frozen=True)
class Preprocessing:
    """What evaluation, prediction, export and serving do to a picture; stored with the weights.

    `center` resizes the short side to size / crop_pct and cuts out the centre, `squash` resizes both sides, as timm
    does. Nothing is drawn, nothing is shrunk by the decoder, so 8-bit pictures come out as timm's, bit for bit.
    """

    size: tuple[int, int]  # height, width
    channels: int
    depth: int  # 8: uint8 tensors; 16 and 32: float32
    mean: tuple[float, ...]  # of values from 0 to 1
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: Literal["center", "squash"]
    max_pixels: int

    def picture(self, file: Picture) -> Tensor:
        """(C, h, w) uint8, or float32 where the depth is not 8; raises BadPicture."""
        with Opened(file, self.max_pixels) as opened:
            canvas = to_canvas(opened.pixels(self.channels), self.depth)
        target = [math.floor(side / self.crop_pct) for side in self.size]
        if self.crop_mode == "center":
            target = _cover(F.get_size(canvas), target)
        return to_tensor(F.center_crop(self._resize(canvas, target), list(self.size)), self.depth)

    def _resize(self, canvas: Canvas, size: list[int]) -> Canvas:
        return F.resize(canvas, size, InterpolationMode(self.interpolation))

    def normalise(self, pictures: Tensor) -> Tensor:
        """(B, C, h, w) uint8 or float32 on any device to float32 with the statistics of training."""
        if pictures.dtype == torch.uint8:
            pictures = pictures.to(torch.float32).div_(255)
        return pictures.sub(_column(self.mean, pictures.device)).div_(_column(self.std, pictures.device))

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Preprocessing":
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(d, dict) or d.keys() != names:
            raise WeftError(f"The preprocessing must have the entries {', '.join(sorted(names))}; found {sorted(d)}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in d.items()}
        return cls(**values)


class Augmentation:
    """What training does to a picture: crop, flips, then a policy or colour jitter, as in timm, drawn from a seed.

    `random-resized` is timm's random resized crop. `random` brings the short side to the target's where it is not,
    adds `pad` black pixels around, and cuts a random window. `resize` brings both sides to the target. Colour jitter
    beside a policy is left out unless the policy is 3-Augment, as in timm.

    JPEGs much larger than needed are shrunk while they are decoded, but stay `SPARE` times as large as the result.
    """

    SPARE = 2.0

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        self.config, self.preprocessing = config, preprocessing
        self._policy = self._colour = None
        if config.policy:
            self._policy = _make_policy(config, preprocessing)
        if config.color_jitter and (not config.policy or "3a" in config.policy):
            _needs_pillow("augment.color_jitter", preprocessing)
            self._colour = v2.ColorJitter(*[config.color_jitter] * 3)

    def picture(self, file: Picture, seed: int) -> Tensor:
        """(C, h, w) as `Preprocessing.picture` gives it: a function of file and seed alone; may raise BadPicture."""
        with drawing_from(seed, with_torch=self._colour is not None or self.config.policy == "trivial"):
            canvas = self._cut(file)
            if random.random() < self.config.flip:
                canvas = F.horizontal_flip(canvas)
            if random.random() < self.config.vflip:
                canvas = F.vertical_flip(canvas)
            for step in (self._policy, self._colour):
                canvas = canvas if step is None else step(canvas)
        return to_tensor(canvas, self.preprocessing.depth)

    def _cut(self, file: Picture) -> Canvas:
        """The picture, decoded and cut to the target's size."""
        target, cfg = self.preprocessing.size, self.config
        with Opened(file, self.preprocessing.max_pixels) as opened:
            whole = opened.header.height, opened.header.width
            box: Box = (0, 0, *whole)
            if cfg.crop == "random-resized":
                box = random_box(whole, cfg.scale, cfg.ratio)
            name = random.choice(("bilinear", "bicubic")) if cfg.interpolation == "random" else cfg.interpolation
            # how large the whole picture has to be for the box to have SPARE times the target's size
            needed = [math.ceil(side * self.SPARE * t / b) for side, t, b in zip(whole, target, box[2:], strict=True)]
            pixels = opened.pixels(self.preprocessing.channels, (needed[0], needed[1]))
        canvas = to_canvas(pixels, self.preprocessing.depth)
        mode = InterpolationMode(name)
        if cfg.crop == "random":
            return _random_window(canvas, target, cfg.pad, mode)
        shrunk = F.get_size(canvas)[0] / whole[0]
        if shrunk < 1 and isinstance(canvas, Image.Image):
            top, left, height, width = (side * shrunk for side in box)
            bounds = (left, top, min(left + width, canvas.width), min(top + height, canvas.height))
            return canvas.resize((target[1], target[0]), Image.Resampling[name.upper()], box=bounds)
        return F.resized_crop(canvas, *box, list(target), mode)


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


def _random_window(canvas: Canvas, target: tuple[int, int], pad: int, mode: InterpolationMode) -> Canvas:
    size = _cover(F.get_size(canvas), list(target))
    if size != F.get_size(canvas):
        canvas = F.resize(canvas, size, mode)
    top = random.randint(0, size[0] + 2 * pad - target[0])
    left = random.randint(0, size[1] + 2 * pad - target[1])
    return F.crop(F.pad(canvas, [pad]), top, left, *target) if pad else F.crop(canvas, top, left, *target)


def _cover(size: list[int], target: list[int]) -> list[int]:
    """The height and width of a picture of `size` that is resized until it just covers `target`."""
    if target[0] == target[1]:  # torchvision's rule for the short side, which rounds down ...
        short = min(size)
        return [target[0] if side == short else int(target[0] * side / short) for side in size]
    ratio = min(side / t for side, t in zip(size, target, strict=True))  # ... and timm's where the target is no square
    return [round(side / ratio) for side in size]


def to_canvas(pixels: Image.Image | np.ndarray, depth: int) -> Canvas:
    """Pixels of any type at the depth of the run: a Pillow image where it can be, else (C, H, W) uint8 or float32."""
    if isinstance(pixels, Image.Image):
        if depth == 8:
            return pixels
        pixels = np.asarray(pixels)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.dtype.kind == "f" and depth < 32:
        raise BadPicture(f"floating-point values; expected {depth} bits")
    if depth > 8:
        top = 1 if pixels.dtype.kind == "f" else np.iinfo(pixels.dtype).max
        return torch.from_numpy(pixels.astype(np.float32) / np.float32(top)).permute(2, 0, 1)
    if pixels.dtype == np.uint16:
        pixels = ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 becomes 255
    if pixels.shape[2] in (1, 3):
        return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)


def to_tensor(canvas: Canvas, depth: int) -> Tensor:
    """(C, h, w) uint8 or float32."""
    if isinstance(canvas, Image.Image):
        return F.pil_to_tensor(canvas)
    return canvas.clamp(0, 1) if depth == 16 else canvas  # bicubic resizing overshoots


@lru_cache(maxsize=16)
def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1), kept on the device: copying it anew for each batch would wait for the device."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


@contextmanager
def drawing_from(seed: int, with_torch: bool = False) -> Iterator[None]:
    """Seeds the global generators that timm and torchvision draw from, and leaves them as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state() if with_torch else None
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if with_torch:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if states[2] is not None:
            torch.set_rng_state(states[2])


def _needs_pillow(setting: str, preprocessing: Preprocessing) -> None:
    if preprocessing.depth != 8 or preprocessing.channels not in (1, 3):
        found = f"{preprocessing.depth} bits and {preprocessing.channels} channels"
        raise WeftError(f"{setting} needs pictures of 8 bits and 1 or 3 channels; these have {found}. Leave it empty.")


def _make_policy(config: AugmentConfig, preprocessing: Preprocessing) -> Callable[[Any], Any]:
    from timm.data import auto_augment
    from timm.data.transforms import str_to_pil_interp

    name = config.policy.split("-")[0]
    if name not in POLICIES:
        near = did_you_mean(name, POLICIES)
        raise WeftError(f"augment.policy={config.policy!r} does not exist; it begins with {', '.join(POLICIES)}.{near}")
    _needs_pillow(f"augment.policy={config.policy!r}", preprocessing)
    fill = tuple(min(255, round(255 * mean)) for mean in preprocessing.mean)
    if name == "trivial":
        return v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR, fill=list(fill))
    settings: dict[str, Any] = dict(translate_const=int(min(preprocessing.size) * 0.45), img_mean=fill)
    if config.interpolation != "random":
        settings["interpolation"] = str_to_pil_interp(config.interpolation)
    try:
        if name == "rand":
            policy = auto_augment.rand_augment_transform(config.policy, settings)
            ops = policy.ops
        elif name == "augmix":
            policy = auto_augment.augment_and_mix_transform(config.policy, {**settings, "translate_pct": 0.3})
            ops = policy.ops
        else:
            policy = auto_augment.auto_augment_transform(config.policy, settings)
            ops = [op for pair in policy.policy for op in pair]
    except (AssertionError, ValueError, KeyError):
        raise WeftError(
            f"augment.policy={config.policy!r} is no policy of timm's; try rand-m9-mstd0.5-inc1 or original."
        ) from None
    for op in ops:
        if op.aug_fn is auto_augment.posterize:
            op.aug_fn = _posterize
    return policy


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """The upper `bits` of each value. timm's asks Pillow, which since version 13 refuses to keep none of them."""
    return image.point([value & (0xFF00 >> bits) for value in range(256)] * len(image.getbands()))
