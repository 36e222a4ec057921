"""From a file to the tensor a model sees: one object for evaluation everywhere, one for training.

The geometry is timm's, so published models and recipes mean the same here. Evaluation resizes with Pillow as timm does;
training resizes with torch, which is faster and differs by one of 255 here and there, very rarely by two. timm's
augmentation policies are for 8 bits and 1 or 3 channels. `weft.data.augment.mix` has what happens to a whole batch.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from weft.config import AugmentConfig
from weft.data.augment.mix import (
    BatchAugmentation as BatchAugmentation,  # the third of the family, for those who import here
)
from weft.data.read import BadPicture, Opened, Picture
from weft.errors import WeftError, did_you_mean

Canvas = Any  # a (C, H, W) tensor or a Pillow image: torchvision's functions take both, but are typed for tensors
Box = tuple[int, int, int, int]  # top, left, height, width

POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix", "trivial")


@dataclass(frozen=True)
class Preprocessing:
    """What evaluation, prediction, export and serving do to a picture; stored with the weights.

    `center` resizes the short side to size / crop_pct and cuts out the centre, `squash` resizes both sides, as timm
    does. Nothing is drawn, nothing is shrunk by the decoder, so 8-bit pictures come out as timm's, bit for bit.
    `fit`, for masks and boxes, keeps the whole picture and its aspect ratio: `size` is the short side and the most that
    the long side may have; (0, 0) keeps the size, too.
    """

    size: tuple[int, int]  # height, width; of `fit`: short side, long side
    channels: int
    depth: int  # 8: uint8 tensors; 16 and 32: float32
    mean: tuple[float, ...]  # of values from 0 to 1
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: Literal["center", "squash", "fit"]
    max_pixels: int

    def picture(self, file: Picture) -> Tensor:
        """(C, h, w) uint8, or float32 where the depth is not 8; raises BadPicture."""
        with Opened(file, self.max_pixels) as opened:
            pixels = opened.pixels(self.channels)
        if self.depth == 8 and self.channels in (1, 3):
            canvas: Canvas = pixels if isinstance(pixels, Image.Image) else to_pillow(to_channels_first(pixels, 8))
        else:
            canvas = to_channels_first(pixels, self.depth)
        if self.crop_mode == "fit":
            height, width = F.get_size(canvas)
            return to_tensor(resize(canvas, self.fitted(height, width), self.interpolation), self.depth)
        target = [math.floor(side / self.crop_pct) for side in self.size]
        if self.crop_mode == "center":
            target = _cover(F.get_size(canvas), target)
        return to_tensor(F.center_crop(resize(canvas, target, self.interpolation), list(self.size)), self.depth)

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that `picture` gives a picture of this size."""
        return fit((height, width), self.size) if self.crop_mode == "fit" else self.size

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
    beside a policy is left out unless the policy is 3-Augment, as in timm. With on_device=yes the policy is left to
    `weft.data.augment.device_policy`.

    JPEGs much larger than needed are shrunk while they are decoded, but stay `SPARE` times as large as the result.
    """

    SPARE = 2.0

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        self.config, self.preprocessing = config, preprocessing
        self._steps: list[Callable[[Canvas], Canvas]] = []
        self._generators: set[str] = set()
        if config.policy and config.on_device != "yes":
            _needs_pillow(f"augment.policy={config.policy!r}", preprocessing)
            policy = make_policy(config, preprocessing)
            self._steps.append(policy)
            self._generators |= {"torch"} if config.policy == "trivial" else {"numpy"}
            if isinstance(policy, Uniform):
                self._generators.clear()
        if config.color_jitter and (not config.policy or "3a" in config.policy):
            _needs_pillow("augment.color_jitter", preprocessing)
            self._steps.append(partial(_on_pillow, v2.ColorJitter(*[config.color_jitter] * 3)))
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
        with Opened(file, self.preprocessing.max_pixels) as opened:
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
    size = _cover(list(picture.shape[1:]), list(target))
    if size != list(picture.shape[1:]):
        picture = resize(picture, size, mode)
    top = random.randint(0, size[0] + 2 * pad - target[0])
    left = random.randint(0, size[1] + 2 * pad - target[1])
    picture = torch.nn.functional.pad(picture, [pad] * 4)
    return picture[:, top : top + target[0], left : left + target[1]]


def _cover(size: list[int], target: list[int]) -> list[int]:
    """The height and width of a picture of `size` that is resized until it just covers `target`."""
    if target[0] == target[1]:  # torchvision's rule for the short side, which rounds down ...
        short = min(size)
        return [target[0] if side == short else int(target[0] * side / short) for side in size]
    ratio = min(side / t for side, t in zip(size, target, strict=True))  # ... and timm's where the target is no square
    return [round(side / ratio) for side in size]


def fit(size: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
    """The height and width with the short side of `limits`, or with its long side where that would become longer."""
    if limits == (0, 0):
        return size
    scale = min(limits[0] / min(size), limits[1] / max(size))
    height, width = (max(1, math.floor(side * scale + 0.5)) for side in size)
    return height, width


def resize(canvas: Canvas, size: Sequence[int], mode: str) -> Canvas:
    """Height and width of `size`, with antialiasing; on tensors by torch's kernels, which know bilinear and bicubic."""
    if isinstance(canvas, Image.Image):
        return canvas.resize((size[1], size[0]), Image.Resampling[mode.upper()])
    if mode in ("bilinear", "bicubic") and size[1] > 1:  # at a width of 1 torch repeats the first row, or crashes
        return torch.nn.functional.interpolate(canvas[None], tuple(size), mode=mode, antialias=True)[0]
    return torch.cat([F.pil_to_tensor(resize(to_pillow(channel[None]), size, mode)) for channel in canvas])


def to_channels_first(pixels: Image.Image | np.ndarray, depth: int) -> Tensor:
    """(C, H, W) at the depth of the run: uint8, or float32 where whole numbers are divided by the largest there is."""
    pixels = np.array(pixels)  # a copy, because torch has no read-only tensors
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.dtype.kind == "f" and depth < 32:
        raise BadPicture(f"floating-point values; expected {depth} bits")
    if depth > 8:
        top = 1 if pixels.dtype.kind == "f" else np.iinfo(pixels.dtype).max
        pixels = pixels.astype(np.float32) / np.float32(top)
    elif pixels.dtype == np.uint16:
        pixels = ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 becomes 255
    return torch.from_numpy(pixels).permute(2, 0, 1)


def to_pillow(picture: Tensor) -> Image.Image:
    """(1 or 3, H, W) uint8, or (1, H, W) float32."""
    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels[..., 0] if len(picture) == 1 else pixels)


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


def _needs_pillow(setting: str, preprocessing: Preprocessing) -> None:
    if preprocessing.depth != 8 or preprocessing.channels not in (1, 3):
        found = f"{preprocessing.depth} bits and {preprocessing.channels} channels"
        raise WeftError(f"{setting} needs pictures of 8 bits and 1 or 3 channels; these have {found}. Leave it empty.")


def make_policy(config: AugmentConfig, preprocessing: Preprocessing) -> Callable[[Canvas], Canvas]:
    """timm's policy by timm's string, or torchvision's TrivialAugment; takes tensors or Pillow images."""
    from timm.data import auto_augment

    from weft.data.augment.ops import TENSOR_OPS, posterize

    settings = policy_settings(config, preprocessing)
    if config.policy == "trivial":
        return partial(_on_pillow, v2.TrivialAugmentWide(fill=list(settings["img_mean"])))
    policy = timm_policy(config.policy, settings)
    if isinstance(policy, auto_augment.AugMixAugment):  # which blends Pillow images
        for op in policy.ops:
            op.aug_fn = posterize if op.aug_fn is auto_augment.posterize else op.aug_fn
        return partial(_on_pillow, policy)
    pairs = policy.policy if isinstance(policy, auto_augment.AutoAugment) else [policy.ops]
    for op in [op for pair in pairs for op in pair]:
        quick = TENSOR_OPS.get(op.aug_fn)
        op.aug_fn = partial(_on_pillow, op.aug_fn) if quick is None else partial(_on_tensor, quick)
    return policy


def policy_settings(config: AugmentConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    """What timm wants to know beside a policy's string."""
    from timm.data.transforms import str_to_pil_interp

    fill = tuple(min(255, round(255 * mean)) for mean in preprocessing.mean)
    settings: dict[str, Any] = dict(translate_const=int(min(preprocessing.size) * 0.45), img_mean=fill)
    if config.interpolation != "random":  # and Pillow rotates and shears with nothing finer than bicubic
        mode = "bicubic" if config.interpolation == "lanczos" else config.interpolation
        settings["interpolation"] = str_to_pil_interp(mode)
    return settings


def timm_policy(policy: str, settings: dict[str, Any] | None = None) -> Any:
    """timm's own object; where it draws from two generators without need, ours that draws from one."""
    from timm.data import auto_augment

    name = policy.split("-")[0]
    if name not in POLICIES:
        near = did_you_mean(name, POLICIES)
        raise WeftError(f"augment.policy={policy!r} does not exist; it begins with {', '.join(POLICIES)}.{near}")
    try:
        if name == "augmix":
            return auto_augment.augment_and_mix_transform(policy, {**(settings or {}), "translate_pct": 0.3})
        if name != "rand":
            return auto_augment.auto_augment_transform(policy, settings)
        made = auto_augment.rand_augment_transform(policy, settings)
    except (AssertionError, ValueError, KeyError):
        raise WeftError(
            f"augment.policy={policy!r} is no policy of timm's; try rand-m9-mstd0.5-inc1 or original."
        ) from None
    return Uniform(made.ops, made.num_layers) if made.choice_weights is None else made


@dataclass(frozen=True)
class Uniform:
    """timm's RandAugment, but drawing from `random` like all of its operations: seeding NumPy as well takes longer."""

    ops: list[Callable[[Canvas], Canvas]]
    layers: int

    def __call__(self, canvas: Canvas) -> Canvas:
        for op in random.choices(self.ops, k=self.layers):
            canvas = op(canvas)
        return canvas


def _on_pillow(function: Callable[..., Canvas], canvas: Canvas, *args: Any, **kwargs: Any) -> Canvas:
    """Only an operation that is really drawn pays for the conversion."""
    return function(canvas if isinstance(canvas, Image.Image) else to_pillow(canvas), *args, **kwargs)


def _on_tensor(function: Callable[..., Tensor], canvas: Canvas, *args: Any, **kwargs: Any) -> Tensor:
    return function(F.pil_to_tensor(canvas) if isinstance(canvas, Image.Image) else canvas, *args, **kwargs)
