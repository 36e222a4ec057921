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
from timm.data import auto_augment
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.picture import drawing_from
from weft.data.augment.policies import UniformRandAugment, policy_settings, timm_policy
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError
from weft.kernels.ops.augment import CHANGES, Change, Code


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
    return all(op.aug_fn in CODES for op in timm_policy(policy).ops)


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
    for (_, change), rows in zip(groups, _send(groups.values(), pictures.device), strict=True):
        index = rows[:, 0].long()
        pictures.index_copy_(0, index, change(pictures[index], rows[:, 1:]))
    return pictures


def _note(
    operation: Callable[..., Any], steps: list[DrawnOperation], *args: float, resample: Any, fillcolor: Any
) -> list[DrawnOperation]:
    if not isinstance(resample, int):  # a choice, which timm leaves to the operations that interpolate
        resample = random.choice(resample) if operation in MATRICES else 0
    return [*steps, DrawnOperation(operation, args, resample, fillcolor)]


def _grouped(drawn: list[list[DrawnOperation]], height: int, width: int) -> dict[tuple[int, Change], list[list[float]]]:
    """For each round, and each change in it: rows of a picture's index and its parameters."""
    groups = defaultdict(list)
    for position in range(max(map(len, drawn), default=0)):
        for index, steps in enumerate(drawn):
            if position < len(steps):
                step = steps[position]
                groups[position, CHANGES[CODES[step.operation]]].append([index, *_parameters(step, height, width)])
    return groups


def _parameters(step: DrawnOperation, height: int, width: int) -> Sequence[float]:
    """The parameters of the step's change for one picture."""
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


CODES: dict[Callable[..., Any], Code] = {
    auto_augment.invert: Code.INVERT,
    auto_augment.posterize: Code.POSTERIZE,
    auto_augment.solarize: Code.SOLARIZE,
    auto_augment.solarize_add: Code.SOLARIZE_ADD,
    auto_augment.auto_contrast: Code.AUTO_CONTRAST,
    auto_augment.equalize: Code.EQUALIZE,
    auto_augment.brightness: Code.BRIGHTNESS,
    auto_augment.color: Code.COLOR,
    auto_augment.contrast: Code.CONTRAST,
    auto_augment.sharpness: Code.SHARPNESS,
    auto_augment.shear_x: Code.SHEAR_X,
    auto_augment.translate_x_rel: Code.TRANSLATE_X,
    auto_augment.shear_y: Code.SHEAR_Y,
    auto_augment.translate_y_rel: Code.TRANSLATE_Y,
    auto_augment.rotate: Code.ROTATE,
}
