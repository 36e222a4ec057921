"""Policies for 16 bits, floats and many channels, against timm's on Pillow images of bytes."""

import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment
from torchvision.transforms import v2

from tests.helpers.made_pictures import MEAN, picture, preprocessing
from weft.config import AugmentConfig
from weft.data.augment.picture import Augmentation, drawing_from
from weft.data.augment.wide import TRIVIAL, VALUES, WideOperations, wide_policy
from weft.data.preprocessing import Preprocessing, to_channels_first

BICUBIC = Image.Resampling.BICUBIC
ARGUMENTS = {
    "posterize": [1, 3, 8],
    "solarize": [0, 77, 256],
    "solarize_add": [0, 40, 110],
    "rotate": [-29.7, 13.0],
    "gaussian_blur": [0.1, 1.3],
    "desaturate": [0.5, 0.8],
    **{name: [0.1, 0.73, 1.9] for name in ("brightness", "color", "contrast", "sharpness")},
    **{name: [-0.29, 0.11] for name in ("shear_x", "shear_y", "translate_x_rel", "translate_y_rel")},
    **{name: [-7.3, 20.0] for name in ("translate_x_abs", "translate_y_abs")},
}
ROUGH = {  # Pillow equalises in whole steps of a 255th of the pixels, and blurs by boxes; mean and largest difference
    auto_augment.equalize: (6, 12),
    auto_augment.gaussian_blur: (2, 12),
}
OPERATIONS = {op for op in auto_augment.NAME_TO_OP.values() if op is not auto_augment.gaussian_blur_rand}
CASES = [(op, arg) for op in sorted(OPERATIONS, key=repr) for arg in ARGUMENTS.get(op.__name__, [None])]
POLICIES = ["rand-m9-mstd0.5-inc1", "rand-m9-n3-mstd0.5-tweights", "original", "v0r", "3a", "augmix-m3", "trivial"]


def perform(operation, values: torch.Tensor, arg, normal: Preprocessing) -> torch.Tensor:
    args = () if arg is None else (arg,)
    return WideOperations(normal).perform(operation, values, *args, resample=BICUBIC)


@pytest.mark.parametrize(("operation", "arg"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_operations_are_timms(operation, arg, mode: str) -> None:
    """A picture of bytes, as 16 bits have it: what differs is the rounding to bytes."""
    image = picture(60, 80).convert(mode)
    channels = len(image.getbands())
    fill = tuple(round(255 * mean) for mean in MEAN[:channels])
    args = () if arg is None else (arg,)
    expected = to_channels_first(operation(image, *args, resample=BICUBIC, fillcolor=fill), 8).float()
    normal = preprocessing(depth=16, channels=channels, mean=tuple(value / 255 for value in fill))
    values = to_channels_first(image, 8) / 255
    difference = (255 * perform(operation, values, arg, normal).clamp(0, 1) - expected).abs()
    mean, most = ROUGH.get(operation, (0.75, 2))
    assert difference.mean() < mean
    assert difference.quantile(0.999) < most


@given(st.sampled_from(CASES), st.floats(0.01, 1000), st.floats(-100, 100))
def test_floats_may_have_any_range(case, scale: float, least: float) -> None:
    """Whatever unit they are measured in, the same picture comes out."""
    values = to_channels_first(picture(24, 30), 8) / 255
    values = (values - values.min()) / (values.max() - values.min())
    found = perform(*case[:1], values, case[1], preprocessing(depth=32, mean=(0.2,) * 3))
    other = preprocessing(depth=32, mean=(0.2 * scale + least,) * 3)
    moved = (perform(case[0], values * scale + least, case[1], other) - least) / scale
    steps = case[0] in (auto_augment.posterize, auto_augment.solarize, auto_augment.solarize_add)
    close = (moved - found).abs() < 1e-3 + 1e-4 * abs(least) / scale
    assert close.float().mean() > (0.95 if steps else 0.999)  # a value on the edge of a step may fall to either side


@pytest.mark.parametrize("operation", VALUES, ids=lambda op: op.__name__)
def test_a_flat_picture_of_floats_stays(operation) -> None:
    flat = torch.full((1, 9, 9), -3.5)
    arg = ARGUMENTS.get(operation.__name__.removesuffix("_rand"), [None])[0]
    assert torch.equal(perform(operation, flat, arg, preprocessing(depth=32, channels=1, mean=(0.0,))), flat)


@pytest.mark.parametrize("policy", [*POLICIES, ""])
@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint16), (3, np.uint16), (2, np.float32), (5, np.uint8)])
def test_policies_keep_the_depth(policy: str, channels: int, dtype) -> None:
    """A function of the seed alone, of the kind and range that was there; more values than bytes have stay apart."""
    rng = np.random.default_rng(0)
    top = np.iinfo(dtype).max if np.dtype(dtype).kind == "u" else 1
    pixels = (rng.random((40, 50, channels)) * top).astype(dtype)
    normal = preprocessing(depth=8 * np.dtype(dtype).itemsize, channels=channels, mean=(0.4,) * channels)
    augmentation = Augmentation(AugmentConfig(policy=policy, color_jitter=0.4), normal)
    again = pickle.loads(pickle.dumps(augmentation))
    found = [augmentation.picture(pixels, seed) for seed in range(20)]
    assert all(torch.equal(again.picture(pixels, seed), found[seed]) for seed in reversed(range(20)))
    assert len({tensor.numpy().tobytes() for tensor in found}) == 20
    for tensor in found:
        assert (tensor.dtype, tensor.shape) == (torch.uint8 if top == 255 else torch.float32, (channels, 32, 32))
        assert tensor.isfinite().all()
        assert top == 1 or (tensor.min() >= 0 and tensor.max() <= max(1, top % 65535))
    if top != 255:
        assert sum(len(tensor.unique()) > 256 for tensor in found) > 10


def test_trivial_draws_as_torchvision() -> None:
    """The same operations, with the same least and largest arguments."""
    names = {"ShearX": "shear_x", "ShearY": "shear_y", "TranslateX": "translate_x_abs", "TranslateY": "translate_y_abs"}
    names |= {name: name.lower() for name in ("Rotate", "Brightness", "Color", "Contrast", "Sharpness", "Posterize")}
    names |= {"Solarize": "solarize", "AutoContrast": "auto_contrast", "Equalize": "equalize", "Identity": ""}
    ours = {getattr(operation, "__name__", ""): argument for operation, argument in TRIVIAL}
    space = v2.TrivialAugmentWide._AUGMENTATION_SPACE
    assert {names[name] for name in space} == ours.keys()
    for name, (magnitudes, signed) in space.items():
        argument, theirs = ours[names[name]], magnitudes(31, 32, 32)
        assert (argument is None) == (theirs is None)
        if theirs is not None:
            factor = 255 if name == "Solarize" else 1  # a part of the range
            offset = 1 if name in ("Brightness", "Color", "Contrast", "Sharpness") else 0
            ends = [factor * float(theirs[i]) + offset for i in (0, -1)]
            assert [argument(0.0), argument(1.0)] == pytest.approx(ends)
            assert (argument(-1.0) != argument(1.0)) == signed


def test_one_policy_for_all_depths() -> None:
    """timm draws the same operations for 16 bits as for 8: with one seed, the same picture."""
    image, config = picture(32, 32), AugmentConfig(policy="rand-m9-mstd0.5-inc1", interpolation="bicubic")
    normal = preprocessing(depth=16)
    policy, bytes_policy = wide_policy(config, normal), Augmentation(config, preprocessing())._steps[0]
    values = to_channels_first(image, 8) / 255
    for seed in range(30):
        with drawing_from(seed):
            ours, after = policy(values), random.random()
        with drawing_from(seed):
            theirs, after_theirs = bytes_policy(to_channels_first(image, 8)), random.random()
        theirs = theirs if isinstance(theirs, torch.Tensor) else to_channels_first(theirs, 8)
        assert after == after_theirs
        assert (255 * ours.clamp(0, 1) - theirs.float()).abs().median() < 3
