"""From a file to the tensor a model sees: one object that training makes and evaluation, prediction and export share.

The geometry is timm's, so published models and recipes mean the same here. Evaluation resizes with Pillow as timm does;
training (`weft.data.augment`) resizes with torch, which is faster and differs by one of 255 here and there, very rarely
by two.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from weft.data.read import MAX_PIXELS, BadPicture, OpenedPicture, Picture
from weft.errors import WeftError

THIN = 10  # times as long as wide
Canvas = Any  # a (C, H, W) tensor or a Pillow image: torchvision's functions take both, but are typed for tensors


@dataclass(frozen=True)
class Preprocessing:
    """The way of a picture into the model in evaluation, prediction and export; stored with the weights.

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
        with OpenedPicture(file, self.max_pixels) as opened:
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
            target = cover(F.get_size(canvas), target)
        return to_tensor(F.center_crop(resize(canvas, target, self.interpolation), list(self.size)), self.depth)

    def leaves(self, size: list[int]) -> bool:
        """Whether `picture` gives the pixels of a picture of this height and width as they are."""
        target = [math.floor(side / self.crop_pct) for side in self.size]
        return self.crop_mode != "fit" and self.depth == 8 and target == size == list(self.size)

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that `picture` gives a picture of this size."""
        return fit((height, width), self.size) if self.crop_mode == "fit" else self.size

    def normalise(self, pictures: Tensor) -> Tensor:
        """(B, C, h, w) uint8 or float32 on any device to float32 with the statistics of training."""
        if pictures.dtype == torch.uint8:
            pictures = pictures.to(torch.float32).div_(255)
        mean, std = self.statistics(pictures.device)
        return pictures.sub(mean).div_(std)

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as (C, 1, 1) on the device."""
        return _column(self.mean, device), _column(self.std, device)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Preprocessing":
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(d, dict) or d.keys() != names:
            found = f"found {sorted(d)}" if isinstance(d, dict) else "found none"
            raise WeftError(f"The preprocessing must have the entries {', '.join(sorted(names))}; {found}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in d.items()}
        try:
            wrong = [name for name, is_right in _CHECKS.items() if not is_right(cls(**values))]
        except (TypeError, ValueError, AttributeError):
            wrong = ["it"]
        if wrong:
            raise WeftError(f"The preprocessing cannot be as written: {', '.join(wrong)}; it was changed or damaged.")
        return cls(**values)


# What a file may say: what cannot be is told before pictures are blamed for it.
_CHECKS: dict[str, Callable[[Preprocessing], bool]] = {
    "channels": lambda p: 0 < p.channels == len(p.mean) == len(p.std),
    "depth": lambda p: p.depth in (8, 16, 32),
    "size": lambda p: (
        len(p.size) == 2
        and (min(p.size) >= 0 if p.crop_mode == "fit" else min(p.size) > 0 and math.prod(p.size) <= MAX_PIXELS)
    ),
    "mean": lambda p: all(map(math.isfinite, p.mean)),
    "std": lambda p: all(0 < value < math.inf for value in p.std),
    "interpolation": lambda p: p.interpolation.upper() in Image.Resampling.__members__,
    "crop_pct": lambda p: 0.01 <= p.crop_pct <= 10,
    "crop_mode": lambda p: p.crop_mode in ("center", "squash", "fit"),
    "max_pixels": lambda p: p.max_pixels > 0,
}


def cover(size: list[int], target: list[int]) -> list[int]:
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
    """Height and width of `size`, with antialiasing; on tensors by torch's kernels, which know bilinear and bicubic.

    Raises BadPicture for a thread of pixels that would fill the memory once its short side is as long as it should be.
    """
    height, width = F.get_size(canvas)
    if size[0] * size[1] > max(MAX_PIXELS, height * width) and max(size) > THIN * min(size):
        raise BadPicture(f"{width} x {height} pixels are too thin: resized, they would be {size[1]} x {size[0]}")
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
