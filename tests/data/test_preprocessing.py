"""Evaluation's pictures, against timm's bit for bit."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from tests.helpers.made_pictures import MEAN, STD, picture, preprocessing
from tests.helpers.places import DATA
from weft.config import AugmentConfig
from weft.data.augment.picture import Augmentation
from weft.data.preprocessing import Preprocessing, resize, to_channels_first
from weft.data.read import BadPicture
from weft.errors import WeftError


@pytest.mark.parametrize("shape", [(50, 70), (71, 50), (224, 224), (20, 13)])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize(("crop_pct", "interpolation"), [(0.875, "bicubic"), (1.0, "bilinear"), (0.9, "lanczos")])
def test_evaluation_is_timms_bit_for_bit(shape, crop_mode, crop_pct, interpolation) -> None:
    image = picture(*shape)
    ours = preprocessing(crop_mode=crop_mode, crop_pct=crop_pct, interpolation=interpolation)
    theirs = create_transform(
        32, mean=MEAN, std=STD, crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation
    )
    torch.testing.assert_close(ours.normalise(ours.picture(image)[None])[0], theirs(image), rtol=0, atol=0)
    assert torch.equal(ours.picture(np.asarray(image)), ours.picture(image))


def test_evaluation_of_other_than_squares() -> None:
    """As timm, which takes bilinear here whatever was asked for."""
    ours = preprocessing(size=(24, 40), interpolation="bilinear")
    theirs = create_transform((24, 40), mean=MEAN, std=STD, crop_pct=0.875, interpolation="bilinear")
    for shape in ((50, 70), (90, 60), (24, 40)):
        image = picture(*shape)
        assert torch.equal(ours.normalise(ours.picture(image)[None])[0], theirs(image))


@pytest.mark.parametrize("shape", [(480, 640), (427, 640), (640, 333), (100, 900), (9, 700), (37, 37)])
def test_fitting_is_detections_up_to_rounding(shape: tuple[int, int]) -> None:
    """torchvision's detection models resize by the same factor, and round down where we round to the nearest."""
    from torchvision.models.detection.transform import GeneralizedRCNNTransform

    ours = preprocessing(size=(60, 100), crop_mode="fit", interpolation="bilinear")
    theirs = GeneralizedRCNNTransform(60, 100, [0.0] * 3, [1.0] * 3)
    image = picture(*shape)
    (_, height, width), expected = ours.picture(image).shape, theirs.resize(torch.zeros(3, *shape))[0].shape[1:]
    assert (height, width) == ours.fitted(*shape)
    assert all(0 <= side - other <= 1 for side, other in zip((height, width), expected, strict=True))
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    assert torch.equal(ours.picture(image), to_channels_first(resized, 8))
    kept = preprocessing(size=(0, 0), crop_mode="fit")
    assert torch.equal(kept.picture(image), to_channels_first(image, 8))
    deep = preprocessing(size=(60, 100), crop_mode="fit", depth=16, channels=5)
    assert deep.picture(np.zeros((*shape, 5), np.uint16)).shape == (5, height, width)


def test_evaluation_of_real_pictures() -> None:
    folder = DATA
    files = sorted(folder.rglob("*.JPEG"))[:10]
    if not files:
        pytest.skip("no JPEGs under ../shared/data or WEFT_DATA")
    ours, theirs = preprocessing(size=(224, 224)), create_transform(224, mean=MEAN, std=STD, interpolation="bicubic")
    for file in files:
        expected = theirs(Image.open(file).convert("RGB"))
        assert torch.equal(ours.normalise(ours.picture(file)[None])[0], expected)


@pytest.mark.parametrize(("dtype", "depth", "top"), [("uint16", 16, 65535), ("float32", 32, 1), ("uint8", 8, 255)])
@pytest.mark.parametrize("channels", [1, 5])
def test_other_depths_and_channels(dtype: str, depth: int, top: int, channels: int) -> None:
    plain = (np.linspace(0.1, 0.9, channels) * top).astype(dtype)
    array = np.broadcast_to(plain, (40, 50, channels)).copy()
    normal = preprocessing(depth=depth, channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels)
    for tensor in (normal.picture(array), Augmentation(AugmentConfig(), normal).picture(array, 3)):
        assert tensor.shape == (channels, 32, 32)
        assert tensor.dtype == (torch.uint8 if depth == 8 else torch.float32)
        expected = (torch.tensor(plain.astype(np.float64) / top) - 0.5) / 0.25
        torch.testing.assert_close(normal.normalise(tensor[None])[0, :, 9, 9].double(), expected, atol=1e-5, rtol=0)


def test_depths_meet_in_the_same_range() -> None:
    eight, sixteen = np.array([[0, 128, 255]], np.uint8), np.array([[0, 128 * 257, 65535]], np.uint16)
    assert torch.equal(to_channels_first(sixteen, 8), to_channels_first(eight, 8))
    assert torch.equal(to_channels_first(sixteen, 16), to_channels_first(eight, 16))
    with pytest.raises(BadPicture, match="floating"):
        to_channels_first(np.zeros((1, 1), np.float32), 8)


def test_preprocessing_survives_json() -> None:
    assert Preprocessing.from_dict(preprocessing().to_dict()) == preprocessing()
    with pytest.raises(WeftError, match="interpolation"):
        Preprocessing.from_dict({"size": [3, 3]})


def test_resizing_is_pillows_up_to_rounding() -> None:
    image = picture(100, 120)
    for mode in ("bilinear", "bicubic"):
        for size in ((32, 32), (150, 130), (100, 40), (1, 30), (30, 1), (1, 1)):
            expected = to_channels_first(resize(image, size, mode), 8)
            assert (resize(to_channels_first(image, 8), size, mode).int() - expected.int()).abs().max() <= 2
