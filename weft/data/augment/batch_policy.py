"""timm's RandAugment, and colour jitter, for pictures that stay on the device and steps that are recorded and replayed.

`draw` makes all numbers of a batch at once on the host, with timm's distribution, as float32 rows, one for each
picture; calling the object with pictures and rows does what they say. On a GPU these are always the same kernels with
the same shapes. `device_policy` is for pictures that come from readers: there timm itself draws.
"""

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.device_policy import CODES, fits
from weft.data.augment.policies import UniformRandAugment, policy_settings, timm_policy
from weft.data.augment.wide import is_wide
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError
from weft.kernels.ops.augment import Code, Step, augment_step
from weft.kernels.switch import usable


class BatchSteps(Protocol):
    """Changes of pictures that are drawn for a whole batch."""

    columns: int

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """(count, columns) float32, all that is random about `count` pictures."""
        ...

    def __call__(self, pictures: Tensor, rows: Tensor) -> Tensor:
        """(B, C, h, w) uint8 pictures after the steps of their (B, columns) rows on the same device."""
        ...


def can_batch(config: AugmentConfig, channels: int, depth: int) -> bool:
    """Whether policy and colour jitter can be done here, or there are none; else the readers have to do them."""
    if config.policy:
        return fits(config.policy, channels, depth)
    return not config.color_jitter or (depth == 8 and channels in (1, 3))


def batch_steps(config: AugmentConfig, preprocessing: Preprocessing) -> BatchSteps | None:
    """The policy, or colour jitter, which as in timm is left out beside one; None where neither is asked for."""
    if config.policy:
        return BatchPolicy(config, preprocessing)
    return BatchJitter(config, preprocessing) if config.color_jitter else None


@torch.no_grad()
def perform_rows(pictures: Tensor, rows: Tensor, fill: tuple[int, ...]) -> Tensor:
    """The steps of all rows, one after the other; kernels where the device has them, else plain PyTorch."""
    step = augment_step.run if usable(rows) else augment_step.reference
    for first in range(0, rows.shape[1], len(Step)):
        pictures = step(pictures, rows, first, fill)
    return pictures


# A policy -------------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """timm's way from a magnitude to the argument of an operation, for all pictures at once.

    argument = max(least, start + direction * min(most, scale * magnitude / 10)), the product rounded down if `whole`.
    """

    scale: float = 0.0
    start: float = 0.0
    direction: int = 1  # 0: either, at random
    whole: bool = False
    most: float = math.inf
    least: float = -math.inf


AWAY = Level(0.9, start=1, direction=0, least=0.1)  # from a factor of 1, "increasing"
FACTOR = Level(1.8, start=0.1)
LEVELS = {
    "AutoContrast": Level(),
    "Equalize": Level(),
    "Invert": Level(),
    "Rotate": Level(30, direction=0),
    "Posterize": Level(4, whole=True),
    "PosterizeIncreasing": Level(4, start=4, direction=-1, whole=True),
    "PosterizeOriginal": Level(4, start=4, whole=True),
    "Solarize": Level(256, whole=True, most=256),
    "SolarizeIncreasing": Level(256, start=256, direction=-1, whole=True, most=256),
    "SolarizeAdd": Level(110, whole=True, most=128),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), FACTOR),
    **dict.fromkeys(("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"), AWAY),
    **dict.fromkeys(("ShearX", "ShearY"), Level(0.3, direction=0)),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), Level(0.45, direction=0)),
}


class BatchPolicy:
    """timm's RandAugment by its string, as `device_policy.fits` allows it; each of its layers is a step of a row."""

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        if not fits(config.policy, preprocessing.channels, preprocessing.depth):
            raise WeftError(
                f"augment.policy={config.policy!r} with {preprocessing.channels} channels of {preprocessing.depth} "
                "bits cannot be done batch by batch, only rand-... without blurring of 8-bit grey or RGB pictures."
            )
        policy = timm_policy(config.policy, policy_settings(config, preprocessing))
        uniform = isinstance(policy, UniformRandAugment)
        self.layers: int = policy.layers if uniform else policy.num_layers
        self.weights: np.ndarray | None = None if uniform else policy.choice_weights
        self.columns = len(Step) * self.layers
        self._take_over(policy.ops)

    def _take_over(self, ops: list[Any]) -> None:
        """timm's settings of operations, which but for names are those of the first."""
        first = ops[0]
        self.prob, self.magnitude = first.prob, first.magnitude
        self.noise: float = first.magnitude_std
        self.most: float = first.magnitude_max or 10
        self.fill: tuple[int, ...] = first.kwargs["fillcolor"]
        modes = first.kwargs["resample"]
        self.modes = np.array(modes if isinstance(modes, tuple) else [modes], dtype=int)
        self.names = [op.name for op in ops]
        self.codes = np.array([CODES[op.aug_fn] for op in ops])
        self._levels = [np.array(column) for column in zip(*(LEVELS[name] for name in self.names), strict=True)]

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """(count, columns) float32, with timm's distribution, though not its order of draws."""
        chosen = self._choose(generator, count)  # (count, layers)
        arguments = self.arguments(chosen, self._magnitudes(generator, chosen.shape), _signs(generator, chosen.shape))
        codes, done = self.codes[chosen], generator.random(chosen.shape) <= self.prob
        angles = np.where(codes == Code.ROTATE, np.radians(arguments), 0.0)
        rows = np.empty((*chosen.shape, len(Step)), dtype=np.float32)
        rows[..., Step.CODE] = np.where(done, codes, Code.NOTHING)
        rows[..., Step.BY] = np.where(codes == Code.ROTATE, np.cos(angles), arguments)
        rows[..., Step.SINE] = np.sin(angles)
        rows[..., Step.MODE] = self.modes[generator.integers(len(self.modes), size=chosen.shape)]
        return rows.reshape(count, self.columns)

    def arguments(self, chosen: np.ndarray, magnitudes: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """timm's arguments of the operations with the numbers `chosen`."""
        scale, start, direction, whole, most, least = (column[chosen] for column in self._levels)
        amount = magnitudes / 10 * scale
        amount = np.minimum(np.where(whole, np.trunc(amount), amount), most)
        return np.maximum(start + np.where(direction == 0, signs, direction) * amount, least)

    def __call__(self, pictures: Tensor, rows: Tensor) -> Tensor:
        return perform_rows(pictures, rows, self.fill)

    def _choose(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Which operations: any, or by weights and then none twice. Those whose waiting times, of rates that are their
        weights, end first are as if drawn one after the other."""
        if self.weights is None:
            return generator.integers(len(self.names), size=(count, self.layers))
        waiting = generator.exponential(size=(count, len(self.names))) / self.weights
        return np.argsort(waiting, axis=1)[:, : self.layers]

    def _magnitudes(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if math.isinf(self.noise):
            drawn = generator.uniform(0, self.magnitude, shape)
        else:
            drawn = generator.normal(self.magnitude, self.noise, shape)
        return drawn.clip(0, self.most)


def _signs(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 1 - 2 * generator.integers(2, size=shape)


# Colour jitter --------------------------------------------------------------------------------------------------

JITTERED = (Code.BRIGHTNESS, Code.CONTRAST, Code.COLOR)


class BatchJitter:
    """torchvision's ColorJitter of brightness, contrast and saturation alike, one step each, in an order drawn."""

    columns = len(Step) * len(JITTERED)

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        if is_wide(preprocessing):
            raise WeftError("augment.color_jitter can be done batch by batch of 8-bit grey or RGB pictures alone.")
        self.range = max(0.0, 1 - config.color_jitter), 1 + config.color_jitter
        self.fill = (0,) * preprocessing.channels  # nothing comes from outside

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """(count, columns) float32, with torchvision's distribution."""
        rows = np.zeros((count, len(JITTERED), len(Step)), dtype=np.float32)
        rows[..., Step.CODE] = generator.permuted(np.tile(JITTERED, (count, 1)), axis=1)
        rows[..., Step.BY] = generator.uniform(*self.range, rows.shape[:2])
        return rows.reshape(count, self.columns)

    def __call__(self, pictures: Tensor, rows: Tensor) -> Tensor:
        return perform_rows(pictures, rows, self.fill)
