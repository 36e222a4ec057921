"""Augmentation policies of pictures that Pillow has no mode for: 16 bits, floats, other than 1 or 3 channels.

timm draws as it does for bytes; its operations are done here on (C, H, W) float32. Shears, translations and rotations
are timm's, channel by channel. What changes values takes these from 0 to 1: bytes and 16 bits by the largest value
there is, floats by the least and the largest of the picture at hand, since nobody knows their range. Saturation is
that of three channels; others have none to change.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from weft.config import AugmentConfig
from weft.data.augment.policies import policy_settings, timm_policy
from weft.data.preprocessing import Preprocessing, to_pillow

GREY = (0.299, 0.587, 0.114)  # of red, green and blue


def is_wide(preprocessing: Preprocessing) -> bool:
    """Whether pictures are for this module."""
    return preprocessing.depth != 8 or preprocessing.channels not in (1, 3)


def wide_policy(config: AugmentConfig, preprocessing: Preprocessing) -> Callable[[Tensor], Tensor]:
    """timm's policy by timm's string, or torchvision's TrivialAugment, of (C, H, W) tensors."""
    wide = WideOperations(preprocessing)
    if config.policy == "trivial":
        return partial(wide.on_floats, wide.trivial)
    policy = timm_policy(config.policy, policy_settings(config, preprocessing))
    pairs = policy.policy if isinstance(policy, auto_augment.AutoAugment) else [policy.ops]
    for op in [op for pair in pairs for op in pair]:
        op.aug_fn = partial(wide.perform, op.aug_fn)
    mixes = isinstance(policy, auto_augment.AugMixAugment)
    return partial(wide.on_floats, partial(mix_chains, policy) if mixes else policy)


def wide_jitter(strength: float, preprocessing: Preprocessing) -> Callable[[Tensor], Tensor]:
    """torchvision's ColorJitter of brightness, contrast and saturation alike, in an order drawn."""
    wide = WideOperations(preprocessing)
    return partial(wide.on_floats, partial(wide.jitter, strength))


class WideOperations:
    """timm's operations on float32 pictures of any range and number of channels."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.depth = preprocessing.depth
        self.top = 255.0 if preprocessing.depth == 8 else 1.0
        self.fill = [mean * self.top for mean in preprocessing.mean]

    def on_floats(self, change: Callable[[Tensor], Tensor], picture: Tensor) -> Tensor:
        """A change of float32 pictures as one of what the readers give; bytes are rounded."""
        changed = change(picture.float())
        return changed.round().clamp(0, 255).to(torch.uint8) if picture.dtype == torch.uint8 else changed

    def perform(
        self, operation: Callable[..., Any], picture: Tensor, *args: Any, resample: Any = (), fillcolor: Any = None
    ) -> Tensor:
        """Does what timm's `operation` would; `fillcolor` is timm's, for bytes."""
        if operation in VALUES:
            low, span = self._range(picture)
            return VALUES[operation]((picture - low) / span, *args).clamp(0, 1) * span + low if span else picture
        mode = random.choice(resample) if isinstance(resample, tuple) else resample
        return torch.cat(
            [
                F.pil_to_tensor(operation(to_pillow(channel[None]), *args, resample=mode, fillcolor=fill))
                for channel, fill in zip(picture, self.fill, strict=True)
            ]
        )

    def _range(self, picture: Tensor) -> tuple[float, float]:
        """The least value that counts, and how far it is to the largest."""
        if self.depth < 32:
            return 0.0, self.top
        low, high = (side.item() for side in picture.aminmax())
        return low, high - low

    def trivial(self, picture: Tensor) -> Tensor:
        """torchvision's TrivialAugmentWide: one operation, with any strength."""
        operation, argument = random.choice(TRIVIAL)
        if operation is None:
            return picture
        strength = random.choice((-1, 1)) * random.randrange(BINS) / (BINS - 1)
        args = () if argument is None else (argument(strength),)
        return self.perform(operation, picture, *args, resample=Image.Resampling.NEAREST)

    def jitter(self, strength: float, picture: Tensor) -> Tensor:
        for operation in random.sample((auto_augment.brightness, auto_augment.contrast, auto_augment.color), 3):
            picture = self.perform(operation, picture, random.uniform(max(0.0, 1 - strength), 1 + strength))
        return picture


def mix_chains(policy: Any, picture: Tensor) -> Tensor:
    """timm's AugMix, without the detour over bytes: chains of operations, added up and blended with the picture."""
    weights = np.random.dirichlet([policy.alpha] * policy.width)
    share = np.random.beta(policy.alpha, policy.alpha)
    mixed = torch.zeros_like(picture)
    for weight in weights:
        changed = picture
        for op in np.random.choice(policy.ops, policy.depth if policy.depth > 0 else np.random.randint(1, 4)):
            changed = op(changed)
        mixed += float(weight) * changed
    return torch.lerp(picture, mixed, float(share))


# Values from 0 to 1 -------------------------------------------------------------------------------------------------


def posterize(x: Tensor, bits: int) -> Tensor:
    """2^bits steps; large magnitudes ask for fewer than one."""
    steps = 2 ** max(bits, 0)
    return x if bits >= 8 else (x * steps).floor().clamp(max=steps - 1) / steps


def solarize(x: Tensor, threshold: float) -> Tensor:
    return torch.where(255 * x < threshold, x, 1 - x)


def solarize_add(x: Tensor, add: float) -> Tensor:
    return torch.where(255 * x < 128, x + add / 255, x)


def auto_contrast(x: Tensor) -> Tensor:
    """Each channel stretched to the whole range."""
    low, high = x.flatten(1).aminmax(dim=1, keepdim=True)
    span = (high - low)[..., None]
    return torch.where(span > 0, (x - low[..., None]) / span.clamp(min=1e-12), x)


def equalize(x: Tensor) -> Tensor:
    """Each value becomes the part of its channel's values that are smaller, so that all are equally frequent."""
    flat = x.flatten(1).contiguous()
    ranks = torch.searchsorted(flat.sort(dim=1).values, flat).float()
    most = ranks.amax(1, keepdim=True)  # 0: all are alike
    return torch.where(most > 0, ranks / most.clamp(min=1), flat).view_as(x)


def brightness(x: Tensor, factor: float) -> Tensor:
    return x * factor


def color(x: Tensor, factor: float) -> Tensor:
    return torch.lerp(grey(x), x, factor)


def contrast(x: Tensor, factor: float) -> Tensor:
    return torch.lerp(grey(x).mean((1, 2), keepdim=True), x, factor)


def sharpness(x: Tensor, factor: float) -> Tensor:
    """Towards and away from what a 3 x 3 kernel of 1 around 5 makes of it; pixels on the edge stay as they are."""
    smooth = x.clone()
    if min(x.shape[1:]) > 2:
        around = 9 * torch.nn.functional.avg_pool2d(x, 3, stride=1)
        smooth[:, 1:-1, 1:-1] = (around + 4 * x[:, 1:-1, 1:-1]) / 13
    return torch.lerp(smooth, x, factor)


def gaussian_blur(x: Tensor, radius: float) -> Tensor:
    side = min(2 * math.ceil(3 * radius) + 1, 2 * min(x.shape[1:]) - 1)  # a margin is mirrored within the picture
    return F.gaussian_blur(x, [side, side], [radius, radius])


def grey(x: Tensor) -> Tensor:
    """(1, H, W) of three channels; others each for themselves."""
    return (x * x.new_tensor(GREY)[:, None, None]).sum(0, keepdim=True) if len(x) == 3 else x


VALUES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    auto_augment.invert: lambda x: 1 - x,
    auto_augment.posterize: posterize,
    auto_augment.solarize: solarize,
    auto_augment.solarize_add: solarize_add,
    auto_augment.auto_contrast: auto_contrast,
    auto_augment.equalize: equalize,
    auto_augment.brightness: brightness,
    auto_augment.color: color,
    auto_augment.contrast: contrast,
    auto_augment.sharpness: sharpness,
    auto_augment.desaturate: lambda x, factor: color(x, min(1.0, max(0.0, 1 - factor))),
    auto_augment.gaussian_blur: gaussian_blur,
    auto_augment.gaussian_blur_rand: lambda x, factor: gaussian_blur(x, random.uniform(0.1, 2 * factor)),
}


# TrivialAugment: each operation with its argument, from a strength between -1 and 1 --------------------------------

BINS = 31  # strengths of either sign
TRIVIAL: list[tuple[Callable[..., Any] | None, Callable[[float], float] | None]] = [
    (None, None),
    (auto_augment.auto_contrast, None),
    (auto_augment.equalize, None),
    (auto_augment.posterize, lambda strength: 8 - round(6 * abs(strength))),
    (auto_augment.solarize, lambda strength: 255 * (1 - abs(strength))),
    (auto_augment.rotate, lambda strength: 135 * strength),
    (auto_augment.shear_x, lambda strength: 0.99 * strength),
    (auto_augment.shear_y, lambda strength: 0.99 * strength),
    (auto_augment.translate_x_abs, lambda strength: 32 * strength),
    (auto_augment.translate_y_abs, lambda strength: 32 * strength),
    (auto_augment.brightness, lambda strength: 1 + 0.99 * strength),
    (auto_augment.color, lambda strength: 1 + 0.99 * strength),
    (auto_augment.contrast, lambda strength: 1 + 0.99 * strength),
    (auto_augment.sharpness, lambda strength: 1 + 0.99 * strength),
]
