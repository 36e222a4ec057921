"""timm's RandAugment for whole batches, on the device that trains on them: readers then only decode, cut and flip.

timm itself draws what happens to each picture, on the host. Pictures with the same kind of operation are then done at
once, and the device is never waited for. Values come out as Pillow's, except that rotations, shears and translations
interpolate in single precision, so that rarely a value differs by one.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.picture import drawing_from
from weft.data.augment.policies import UniformRandAugment, policy_settings, timm_policy
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError

Kernel = Callable[[Tensor, Tensor], Tensor]  # (G, C, h, w) pictures and (G, n) parameters to pictures, all uint8


class DrawnOperation(NamedTuple):
    """An operation on one picture, as timm drew it."""

    operation: Callable[..., Any]  # timm's
    args: tuple[float, ...]
    mode: int  # Pillow's number of the interpolation
    fill: tuple[int, ...]


def fits(policy: str, channels: int, depth: int) -> bool:
    """Whether the policy can be done here: RandAugment without blurring, of grey or RGB pictures of 8 bits."""
    if policy.split("-")[0] != "rand" or depth != 8 or channels not in (1, 3):
        return False
    return all(op.aug_fn in KERNELS for op in timm_policy(policy).ops)


class DevicePolicy:
    """(B, C, h, w) uint8 pictures to what the policy makes of them: a function of pictures and seed alone."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        if not fits(config.policy, preprocessing.channels, preprocessing.depth):
            raise WeftError(
                f"augment.on_device=yes needs a policy rand-... without blurring and 8-bit grey or RGB pictures, not "
                f"augment.policy={config.policy!r} and {preprocessing.channels} channels; set it to no."
            )
        self.policy = timm_policy(config.policy, policy_settings(config, preprocessing))
        self._generators = () if isinstance(self.policy, UniformRandAugment) else ("numpy",)
        for op in self.policy.ops:
            op.aug_fn = partial(_note, op.aug_fn)  # pyright: ignore[reportFunctionMemberAccess]

    def draw(self, pictures: int, seed: int) -> list[list[DrawnOperation]]:
        """The steps of each picture: timm's policy is run, but its operations only note that they were called."""
        with drawing_from(seed, *self._generators):
            return [self.policy([]) for _ in range(pictures)]

    def __call__(self, pictures: Tensor, seed: int) -> Tensor:
        return perform(self.draw(len(pictures), seed), pictures)


@torch.no_grad()
def perform(drawn: list[list[DrawnOperation]], pictures: Tensor) -> Tensor:
    """(B, C, h, w) uint8 pictures after the steps of each."""
    groups = _grouped(drawn, *pictures.shape[-2:])
    pictures = pictures.clone()
    for (_, kernel), rows in zip(groups, _send(groups.values(), pictures.device), strict=True):
        index = rows[:, 0].long()
        pictures.index_copy_(0, index, kernel(pictures[index], rows[:, 1:]))
    return pictures


def _note(
    operation: Callable[..., Any], steps: list[DrawnOperation], *args: float, resample: Any, fillcolor: Any
) -> list[DrawnOperation]:
    if not isinstance(resample, int):  # a choice, which timm leaves to the operations that interpolate
        resample = random.choice(resample) if operation in MATRICES else 0
    return [*steps, DrawnOperation(operation, args, resample, fillcolor)]


def _grouped(drawn: list[list[DrawnOperation]], height: int, width: int) -> dict[tuple[int, Kernel], list[list[float]]]:
    """For each round, and each kernel in it: rows of a picture's index and its parameters."""
    groups = defaultdict(list)
    for position in range(max(map(len, drawn), default=0)):
        for index, steps in enumerate(drawn):
            if position < len(steps):
                step = steps[position]
                groups[position, KERNELS[step.operation]].append([index, *_parameters(step, height, width)])
    return groups


def _parameters(step: DrawnOperation, height: int, width: int) -> Sequence[float]:
    """The parameters of the step's kernel for one picture."""
    if step.operation in MATRICES:
        return [*MATRICES[step.operation](height, width, *step.args), width, height, step.mode, *step.fill]
    return step.args


def _send(tables: Iterable[list[list[float]]], device: torch.device) -> list[Tensor]:
    """Tables as tensors on the device, by a single copy out of pinned memory, for which nobody waits."""
    arrays = [np.array(table, dtype=np.float64) for table in tables]
    packed = torch.from_numpy(np.concatenate([np.zeros(0), *map(np.ravel, arrays)]))
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


# Value by value -------------------------------------------------------------------------------------------------


def invert(pictures: Tensor, _: Tensor) -> Tensor:
    return 255 - pictures


def posterize(pictures: Tensor, bits: Tensor) -> Tensor:
    """Keeps the upper bits; large magnitudes ask for fewer than none."""
    return pictures & (0xFF00 >> bits.int().clamp(0, 8)).to(torch.uint8)[..., None, None]


def solarize(pictures: Tensor, thresholds: Tensor) -> Tensor:
    return torch.where(pictures < thresholds[..., None, None], pictures, 255 - pictures)


def solarize_add(pictures: Tensor, amounts: Tensor) -> Tensor:
    brighter = (pictures + amounts.short()[..., None, None]).clamp_(max=255).to(torch.uint8)
    return torch.where(pictures < 128, brighter, pictures)


def auto_contrast(pictures: Tensor, _: Tensor) -> Tensor:
    low, high = (side.double() for side in pictures.flatten(2).aminmax(dim=2, keepdim=True))  # (G, C, 1)
    values = torch.arange(256, device=pictures.device)
    scale = values[255] / (high - low)  # a tensor above, because torch takes a number times the reciprocal
    stretched = (values * scale + -low * scale).clamp(0, 255)  # as Pillow adds it up, so that it rounds alike
    return _look_up(pictures, torch.where(high > low, stretched, values))


def equalize(pictures: Tensor, _: Tensor) -> Tensor:
    places = pictures.flatten(2).long()  # (G, C, h*w)
    one = torch.ones((), dtype=torch.int32, device=pictures.device)
    counts = torch.zeros(*places.shape[:2], 256, dtype=torch.int32, device=pictures.device)
    counts.scatter_add_(2, places, one.expand(places.shape))
    step = (places.shape[2] - counts.gather(2, places.amax(2, keepdim=True))) // 255  # (G, C, 1)
    below = counts.cumsum(2) - counts
    flat = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return _look_up(pictures, torch.where(step > 0, flat, torch.arange(256, device=pictures.device)))


def _look_up(pictures: Tensor, tables: Tensor) -> Tensor:
    """Each value replaced by that of its channel's table, (G, C, 256), rounded down."""
    return tables.to(torch.uint8).gather(2, pictures.flatten(2).long()).view_as(pictures)


# Towards another picture, and away from it ----------------------------------------------------------------------


def blend(base: Tensor, pictures: Tensor, factors: Tensor) -> Tensor:
    """The base where the factor is 0, the picture where it is 1."""
    return (base + factors.float()[..., None, None] * (pictures.float() - base)).clamp_(0, 255).to(torch.uint8)


def brightness(pictures: Tensor, factors: Tensor) -> Tensor:
    return blend(torch.zeros_like(pictures), pictures, factors)


def color(pictures: Tensor, factors: Tensor) -> Tensor:
    return blend(_grey(pictures), pictures, factors)


def contrast(pictures: Tensor, factors: Tensor) -> Tensor:
    grey = _grey(pictures).flatten(1)
    count = grey.shape[1]
    mean = (2 * grey.sum(1) + count) // (2 * count)  # rounded
    return blend(mean.view(-1, 1, 1, 1), pictures, factors)


def sharpness(pictures: Tensor, factors: Tensor) -> Tensor:
    """The base is smoothed by a 3 x 3 kernel of 1 around 5; pixels on the edge stay as they are."""
    x = pictures.short()
    rows = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * x[..., 1:-1, 1:-1]
    x[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return blend(x, pictures, factors)


def _grey(pictures: Tensor) -> Tensor:
    """(G, 1, h, w) int32, with Pillow's weights."""
    if pictures.shape[1] == 1:
        return pictures.int()
    red, green, blue = pictures.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


# Moved ----------------------------------------------------------------------------------------------------------


def _rotation(height: int, width: int, degrees: float) -> tuple[float, ...]:
    """About the centre, anticlockwise."""
    angle = math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return cos, -sin, cos * -x + -sin * -y + x, sin, cos, sin * -x + cos * -y + y


# of height, width and what timm drew: the a to f with which a value at (x, y) comes from (ax + by + c, dx + ey + f)
MATRICES: dict[Callable[..., Any], Callable[[int, int, float], tuple[float, ...]]] = {
    auto_augment.shear_x: lambda height, width, factor: (1, factor, 0, 0, 1, 0),
    auto_augment.shear_y: lambda height, width, factor: (1, 0, 0, factor, 1, 0),
    auto_augment.translate_x_rel: lambda height, width, part: (1, 0, part * width, 0, 1, 0),
    auto_augment.translate_y_rel: lambda height, width, part: (1, 0, 0, 0, 1, part * height),
    auto_augment.rotate: _rotation,
}


def move(pictures: Tensor, rows: Tensor, *, down: slice, across: slice) -> Tensor:
    """Pillow's affine transformation; `down` and `across` are those of the four taps each way that can have a weight.

    Pixels have their centres at 0.5, 1.5 ...; what comes from outside the picture gets the fill colour, and close to
    the edge the picture goes on as it ends.
    """
    count, channels, height, width = pictures.shape
    matrix, size, mode, fill = rows[..., None, None].split([6, 2, 1, channels], dim=1)  # in double precision, as Pillow
    x = torch.arange(width, device=pictures.device) + 0.5
    y = torch.arange(height, device=pictures.device)[:, None] + 0.5
    by_x, by_y, constant = matrix.unflatten(1, (2, 3)).unbind(2)
    source = by_x * x + by_y * y + constant  # (G, 2, h, w): x and y of where values come from
    outside = ((source < 0) | (source >= size)).any(1, keepdim=True)
    pixels, weights = _taps(source - 0.5, size[:, :, None], mode)  # (G, 2, 4, h, w)
    places = pixels[:, 1, down, None] * width + pixels[:, 0, None, across]  # (G, taps down, taps across, h, w)
    weights = weights[:, 1, down, None] * weights[:, 0, None, across]
    values = pictures.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, channels, -1))
    total = (values.view(count, channels, -1, height, width) * weights.flatten(1, 2)[:, None]).sum(2)
    total += 2e-4  # so that 7 - 1e-5 counts as 7 below
    return torch.where(outside, fill.float(), total).clamp_(0, 255).to(torch.uint8)


def _taps(places: Tensor, size: Tensor, mode: Tensor) -> tuple[Tensor, Tensor]:
    """The four pixels of a line around each place, and their weights; the outer two are for bicubic alone."""
    whole = places.floor()
    d = (places - whole).float()  # the way from the second to the third
    d = torch.where(mode == Image.Resampling.NEAREST, (d >= 0.5).float(), d)
    bend = (mode == Image.Resampling.BICUBIC) * d * (1 - d)
    near, far = bend * (1 - d), bend * d  # Pillow's cubic has a slope of -1
    offsets = torch.arange(-1, 3, device=places.device)[:, None, None]
    pixels = (whole[:, :, None] + offsets).clamp_(min=0).minimum(size - 1).long()
    return pixels, torch.stack([-near, 1 - d + near, d + far, -far], dim=2)


EVERY, SECOND = slice(None), slice(1, 2)
along_x = partial(move, down=SECOND, across=EVERY)
along_y = partial(move, down=EVERY, across=SECOND)
turn = partial(move, down=EVERY, across=EVERY)

KERNELS: dict[Callable[..., Any], Kernel] = {
    auto_augment.invert: invert,
    auto_augment.posterize: posterize,
    auto_augment.solarize: solarize,
    auto_augment.solarize_add: solarize_add,
    auto_augment.auto_contrast: auto_contrast,
    auto_augment.equalize: equalize,
    auto_augment.brightness: brightness,
    auto_augment.color: color,
    auto_augment.contrast: contrast,
    auto_augment.sharpness: sharpness,
    auto_augment.shear_x: along_x,
    auto_augment.translate_x_rel: along_x,
    auto_augment.shear_y: along_y,
    auto_augment.translate_y_rel: along_y,
    auto_augment.rotate: turn,
}
