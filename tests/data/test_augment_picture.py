"""Training's pictures, against timm's crops and policies."""

import io
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

from tests.helpers.made_pictures import MEAN, STD, picture, preprocessing
from weft.config import AugmentConfig
from weft.data.augment.picture import Augmentation, random_box
from weft.errors import WeftError


@pytest.mark.parametrize("size", [(50, 70), (10, 300), (300, 10), (1, 1)])
def test_random_box_is_timms(size: tuple[int, int]) -> None:
    image = Image.new("L", size[::-1])
    for seed in range(50):
        random.seed(seed)
        expected = RandomResizedCropAndInterpolation.get_params(image, (0.08, 1), (3 / 4, 4 / 3))
        random.seed(seed)
        assert random_box(size, [0.08, 1], [3 / 4, 4 / 3]) == expected


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_training_crop_is_timms_up_to_rounding(interpolation: str) -> None:
    image = picture(90, 120)
    config = AugmentConfig(interpolation=interpolation, flip=0.0)
    theirs = RandomResizedCropAndInterpolation(32, interpolation=interpolation)
    for seed in range(8):
        random.seed(seed)
        expected = torch.from_numpy(np.array(theirs(image))).permute(2, 0, 1)
        difference = (Augmentation(config, preprocessing()).picture(image, seed).int() - expected.int()).abs()
        assert difference.max() <= 2
        assert difference.float().mean() < 0.05


def test_shrinking_decoder_shows_the_same() -> None:
    buffer = io.BytesIO()
    picture(900, 1200).save(buffer, "JPEG", quality=95)
    augmentation = Augmentation(AugmentConfig(scale=[0.5, 1.0]), preprocessing(size=(96, 96)))
    for seed in range(5):
        small, whole = augmentation.picture(buffer.getvalue(), seed), augmentation.picture(picture(900, 1200), seed)
        assert (small.int() - whole.int()).abs().float().mean() < 5


@pytest.mark.parametrize("crop", ["random-resized", "random", "resize"])
def test_crops_have_the_size(crop: str) -> None:
    for shape in ((32, 32), (10, 50), (50, 10), (100, 90)):
        config = AugmentConfig(crop=crop, pad=4, interpolation="random", vflip=0.5)  # type: ignore[arg-type]
        assert Augmentation(config, preprocessing()).picture(picture(*shape), 1).shape == (3, 32, 32)


POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m9-n3-mstd0.5-tweights",
    "original",
    "v0r-mstd0.5",
    "3a",
    "augmix-m3",
    "trivial",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_is_a_function_of_the_seed(policy: str, channels: int) -> None:
    normal = preprocessing(channels=channels, mean=MEAN[:channels], std=STD[:channels])
    augmentation = Augmentation(AugmentConfig(policy=policy, color_jitter=0.4), normal)
    image = picture(40, 50)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(1).item()
    first = [augmentation.picture(image, 2**62 + seed) for seed in range(20)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    augmentation.picture(image, 5)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == before  # the caller's draws are its own
    again = pickle.loads(pickle.dumps(augmentation))  # as workers get it
    assert all(torch.equal(again.picture(image, 2**62 + seed), first[seed]) for seed in reversed(range(20)))
    assert len({tensor.numpy().tobytes() for tensor in first}) == 20


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (dict(policy="rnd-m9"), {}, "Did you mean 'rand'"),
        (dict(policy="rand-q9"), {}, "not one of timm"),
        (dict(policy="rand-q9"), dict(depth=16), "not one of timm"),
    ],
)
def test_policies_that_do_not_fit_are_refused(config: dict, changes: dict, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        Augmentation(AugmentConfig(**config), preprocessing(**changes))
