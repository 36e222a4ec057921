"""The preprocessing as a part of the graph: pictures of any size in, what the model sees out.

Weft evaluates with Pillow's resizing, which weighs pixels by a filter that is as wide as the picture shrinks: along the
width first, then along the height, rounding to whole numbers each time. Both are products with a matrix of weights,
computed here from the size that the picture has when the graph runs. No runtime needs to know antialiasing for that,
and all agree.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError

Size = Any  # an int, or torch's symbol for one


class GraphPreprocessing(nn.Module):
    """(B, H, W, C) pictures, uint8, or float32 where the run has other depths -> (B, C, h, w) normalised."""

    def __init__(self, preprocessing: Preprocessing):
        super().__init__()
        self.rules = preprocessing
        if preprocessing.interpolation not in FILTERS:
            raise WeftError(
                f"The interpolation {preprocessing.interpolation!r} cannot be exported; only {', '.join(FILTERS)} can."
            )
        if preprocessing.crop_mode != "fit" and preprocessing.crop_pct > 1:
            raise WeftError(
                f"crop_pct={preprocessing.crop_pct} puts a black frame around pictures, which cannot be exported; only"
                " 1 and less can."
            )
        mean, std = preprocessing.statistics(torch.device("cpu"))
        self.mean, self.std = nn.Buffer(mean.clone()), nn.Buffer(std.clone())

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.resized(pictures.permute(0, 3, 1, 2).to(torch.float32))
        if self.rules.depth == 8:
            x = x / 255
        elif self.rules.depth == 16:
            x = x.clamp(0, 1)  # bicubic resizing overshoots
        return (x - self.mean) / self.std

    def resized(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the size that the model sees."""
        rules, (height, width) = self.rules, x.shape[2:]
        if rules.crop_mode == "fit" and rules.size == (0, 0):
            return x
        if rules.crop_mode == "fit":
            count = target = fitted(height, width, rules.size)
        else:
            count, target = rules.size, tuple(int(side / rules.crop_pct) for side in rules.size)
            target = covering(height, width, target) if rules.crop_mode == "center" else target
        starts = [_rounded(whole - cut, 2) for whole, cut in zip(target, count, strict=True)]
        x = self._rounded(x @ weights(width, target[1], starts[1], count[1], rules.interpolation).T)
        return self._rounded(weights(height, target[0], starts[0], count[0], rules.interpolation) @ x)

    def _rounded(self, x: Tensor) -> Tensor:
        """As Pillow leaves pixels behind each direction; torch, which resizes the deeper ones, rounds nothing."""
        return (x + 0.5).floor().clamp(0, 255) if self.rules.depth == 8 else x


def covering(height: Size, width: Size, target: tuple[int, ...]) -> tuple[Size, Size]:
    """As `weft.data.preprocessing.cover`, in whole numbers alone."""
    if target[0] == target[1]:
        short = torch.sym_min(height, width)
        return target[0] * height // short, target[0] * width // short
    return (
        torch.sym_max(target[0], _rounded(height * target[1], width)),
        torch.sym_max(target[1], _rounded(width * target[0], height)),
    )


def fitted(height: Size, width: Size, limits: tuple[int, int]) -> tuple[Size, Size]:
    """As `weft.data.preprocessing.fit`, in whole numbers alone."""
    short, long = torch.sym_min(height, width), torch.sym_max(height, width)

    def side(length: Size) -> Size:
        by_short = (2 * length * limits[0] + short) // (2 * short)
        by_long = (2 * length * limits[1] + long) // (2 * long)
        return torch.sym_max(1, torch.sym_min(by_short, by_long))

    return side(height), side(width)


def _rounded(dividend: Size, divisor: Size) -> Size:
    """The nearest whole number to a quotient, of two equally near ones the even one, as Python's `round`."""
    nearest, left = (2 * dividend + divisor) // (2 * divisor), (2 * dividend + divisor) % (2 * divisor)
    return nearest - (1 - torch.sym_min(1, left)) * (nearest % 2)


def weights(size: Size, target: Size, start: Size, count: Size, interpolation: str) -> Tensor:
    """(count, size) float32: the part that each pixel has in those from `start` on of a side that gets `target` long.

    Distances are exact up to the last division, whatever the sizes: 2 i + 1 halves of a pixel are where its centre is.
    """
    to, of = torch.arange(count)[:, None] + start, torch.arange(size)
    if interpolation == "nearest":
        return (of == (2 * to + 1) * size // (2 * target)).to(torch.float32)
    distance = (2 * of + 1) * target - (2 * to + 1) * size
    parts = FILTERS[interpolation](distance.to(torch.float32) / (2 * torch.sym_max(size, target)))
    return parts / parts.sum(1, keepdim=True)


def bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def bicubic(x: Tensor) -> Tensor:
    """Keys' filter with a = -1/2."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def lanczos(x: Tensor) -> Tensor:
    angle = torch.pi * x
    wave = 3 * angle.sin() * (angle / 3).sin() / torch.where(x == 0, 1.0, angle * angle)
    return torch.where(x == 0, 1.0, torch.where(x.abs() < 3, wave, 0.0))


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": bilinear,
    "bicubic": bicubic,
    "lanczos": lanczos,
    "nearest": torch.round,  # `weights` needs no filter for it
}
