"""Operations of timm's policies on (C, H, W) uint8 tensors, where that is several times as fast as Pillow.

What works value by value is Pillow's, looked up. Shears and translations move each row by its own distance and
interpolate along it; Pillow does so in double precision, so here, rarely, a value differs by one.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

Resampling = Image.Resampling | Sequence[Image.Resampling]


def look_up(operation: Callable[..., Image.Image], picture: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An operation that maps values one by one, done for the 256 there are."""
    ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
    table = operation(ramp, *args, **kwargs).tobytes()
    values = bytearray(picture.numpy().tobytes()).translate(table)
    return torch.frombuffer(values, dtype=torch.uint8).view(picture.shape)


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """The upper `bits` of each value. timm asks Pillow, which since version 13 refuses to keep none of them;
    large magnitudes ask for fewer than none."""
    return image.point([value & (0xFF00 >> max(bits, 0)) for value in range(256)] * len(image.getbands()))


def shift(
    picture: Tensor,
    amount: float,
    *,
    vertical: bool,
    kind: str,
    fillcolor: tuple[int, ...],
    resample: Resampling,
) -> Tensor:
    """Moves each row to the left by `amount` pixels, of the width ("relative") or of its height in the picture
    ("shear"); columns upwards where `vertical`."""
    mode = resample if isinstance(resample, Image.Resampling) else random.choice(resample)
    rows = picture.numpy().swapaxes(1, 2) if vertical else picture.numpy()  # (C, H, W)
    _, height, width = rows.shape
    distance = np.full(height, amount * width if kind == "relative" else amount)  # (H,)
    if kind == "shear":
        distance = amount * (np.arange(height) + 0.5)
    moved = _interpolate(rows, distance, mode)
    source = np.arange(width) + 0.5 + distance[:, None]  # (H, W)
    outside = (source < 0) | (source >= width)
    np.copyto(moved, np.array(fillcolor, dtype=np.uint8)[:, None, None], where=outside)
    return torch.from_numpy(moved.swapaxes(1, 2) if vertical else moved)


def _interpolate(rows: np.ndarray, distance: np.ndarray, mode: Image.Resampling) -> np.ndarray:
    """(C, H, W) with each row's value at x taken from x + distance; the edges go on beyond the picture."""
    _, height, width = rows.shape
    whole = np.floor(distance).astype(np.int64).clip(-width, width)
    margin = int(np.abs(whole).max()) + 2
    padded = np.empty((len(rows), height, width + 2 * margin), dtype=np.uint8)
    padded[..., :margin] = rows[..., :1]
    padded[..., margin:-margin] = rows
    padded[..., -margin:] = rows[..., -1:]
    windows = np.lib.stride_tricks.sliding_window_view(padded, width + 3, axis=-1)
    taps = torch.from_numpy(windows[:, np.arange(height), whole + margin - 1]).float()  # (C, H, W + 3)
    d = (distance - np.floor(distance))[:, None]  # (H, 1), the way from the second tap to the third
    weights = [0 * d, 1 - d, d, 0 * d]
    if mode == Image.Resampling.BICUBIC:  # Pillow's, with a slope of -1
        weights = [-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, -(d**2) + d**3]
    total = torch.full(rows.shape, 1e-4)  # so that 7 - 1e-6 counts as 7 below
    for i, weight in enumerate(weights):
        total.addcmul_(taps[..., i : i + width], torch.from_numpy(weight.astype(np.float32)))
    return total.clamp_(0, 255).to(torch.uint8).numpy()


TENSOR_OPS = {
    auto_augment.invert: partial(look_up, auto_augment.invert),
    auto_augment.posterize: partial(look_up, posterize),
    auto_augment.solarize: partial(look_up, auto_augment.solarize),
    auto_augment.solarize_add: partial(look_up, auto_augment.solarize_add),
    auto_augment.brightness: partial(look_up, auto_augment.brightness),
    auto_augment.shear_x: partial(shift, vertical=False, kind="shear"),
    auto_augment.shear_y: partial(shift, vertical=True, kind="shear"),
    auto_augment.translate_x_rel: partial(shift, vertical=False, kind="relative"),
    auto_augment.translate_y_rel: partial(shift, vertical=True, kind="relative"),
    auto_augment.translate_x_abs: partial(shift, vertical=False, kind="pixels"),
    auto_augment.translate_y_abs: partial(shift, vertical=True, kind="pixels"),
}
