"""Augmentation policies of a picture by timm's strings, and torchvision's TrivialAugment.

They are for 8 bits and 1 or 3 channels; `wide` has them for others. `ops` has faster forms of some of timm's
operations, `device_policy` does whole batches on the device.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image
from timm.data import auto_augment
from timm.data.transforms import str_to_pil_interp
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from weft.config import AugmentConfig
from weft.data.augment.ops import TENSOR_OPS, posterize
from weft.data.preprocessing import Canvas, Preprocessing, to_pillow
from weft.errors import WeftError, did_you_mean

POLICIES = ("rand", "original", "originalr", "v0", "v0r", "3a", "augmix", "trivial")


def make_policy(config: AugmentConfig, preprocessing: Preprocessing) -> Callable[[Canvas], Canvas]:
    """timm's policy by timm's string, or torchvision's TrivialAugment; takes tensors or Pillow images."""
    settings = policy_settings(config, preprocessing)
    if config.policy == "trivial":
        return partial(on_pillow, v2.TrivialAugmentWide(fill=list(settings["img_mean"])))
    policy = timm_policy(config.policy, settings)
    if isinstance(policy, auto_augment.AugMixAugment):  # which blends Pillow images
        for op in policy.ops:
            op.aug_fn = posterize if op.aug_fn is auto_augment.posterize else op.aug_fn
        return partial(on_pillow, policy)
    pairs = policy.policy if isinstance(policy, auto_augment.AutoAugment) else [policy.ops]
    for op in [op for pair in pairs for op in pair]:
        quick = TENSOR_OPS.get(op.aug_fn)
        op.aug_fn = partial(on_pillow, op.aug_fn) if quick is None else partial(_on_tensor, quick)
    return policy


def policy_settings(config: AugmentConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    """timm's settings of a policy, beside its string."""
    fill = tuple(min(255, round(255 * mean)) for mean in preprocessing.mean)
    settings: dict[str, Any] = dict(translate_const=int(min(preprocessing.size) * 0.45), img_mean=fill)
    if config.interpolation != "random":  # and Pillow rotates and shears with nothing finer than bicubic
        mode = "bicubic" if config.interpolation == "lanczos" else config.interpolation
        settings["interpolation"] = str_to_pil_interp(mode)
    return settings


def timm_policy(policy: str, settings: dict[str, Any] | None = None) -> Any:
    """timm's own object; where it draws from two generators without need, ours that draws from one."""
    name = policy.split("-")[0]
    if name not in POLICIES:
        known, near = ", ".join(POLICIES), did_you_mean(name, POLICIES)
        raise WeftError(f"augment.policy={policy!r} does not exist; a policy begins with one of {known}.{near}")
    try:
        if name == "augmix":
            return auto_augment.augment_and_mix_transform(policy, {**(settings or {}), "translate_pct": 0.3})
        if name != "rand":
            return auto_augment.auto_augment_transform(policy, settings)
        made = auto_augment.rand_augment_transform(policy, settings)
    except (AssertionError, ValueError, KeyError):
        raise WeftError(
            f"augment.policy={policy!r} is not one of timm's policies; try rand-m9-mstd0.5-inc1 or original."
        ) from None
    return UniformRandAugment(made.ops, made.num_layers) if made.choice_weights is None else made


@dataclass(frozen=True)
class UniformRandAugment:
    """timm's RandAugment, but drawing from `random` like all of its operations: seeding NumPy as well takes longer."""

    ops: list[Callable[[Canvas], Canvas]]
    layers: int

    def __call__(self, canvas: Canvas) -> Canvas:
        for op in random.choices(self.ops, k=self.layers):
            canvas = op(canvas)
        return canvas


def on_pillow(function: Callable[..., Canvas], canvas: Canvas, *args: Any, **kwargs: Any) -> Canvas:
    """Only an operation that is really drawn pays for the conversion."""
    return function(canvas if isinstance(canvas, Image.Image) else to_pillow(canvas), *args, **kwargs)


def _on_tensor(function: Callable[..., Tensor], canvas: Canvas, *args: Any, **kwargs: Any) -> Tensor:
    return function(F.pil_to_tensor(canvas) if isinstance(canvas, Image.Image) else canvas, *args, **kwargs)
