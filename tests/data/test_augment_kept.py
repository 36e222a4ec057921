"""Augmentation of kept pictures: the same numbers, applied to one picture as readers do it, give the same picture."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from weft.config import AugmentConfig
from weft.data.augment.kept import CROP_COLUMNS, KeptAugmentation, cut_windows, kept_size, random_boxes, supports
from weft.data.augment.picture import random_box
from weft.data.keep import KeptPictures
from weft.data.preprocessing import Preprocessing, resize
from weft.errors import WeftError
from weft.kernels.ops.crop import MODES

SCALE, RATIO = [0.08, 1.0], [0.75, 4 / 3]


def preprocessing(size: int, channels: int = 3) -> Preprocessing:
    return Preprocessing(
        (size, size), channels, 8, (0.5,) * channels, (0.25,) * channels, "bicubic", 1.0, "center", 10**8
    )


def kept(pictures: list[torch.Tensor]) -> KeptPictures:
    shapes = np.array([picture.shape[1:] for picture in pictures])
    lengths = [picture.numel() for picture in pictures]
    starts = torch.tensor(np.cumsum([0, *lengths[:-1]]))
    flat = torch.cat([picture.flatten() for picture in pictures])
    return KeptPictures(flat, starts, torch.from_numpy(shapes), shapes, len(pictures[0]), np.arange(len(pictures)), [])


def noise(height: int, width: int, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_window_is_that_of_the_padded_picture(channels):
    cfg = AugmentConfig(img_size=8, crop="random", pad=3, flip=0.5, vflip=0.5)
    augmentation = KeptAugmentation(cfg, preprocessing(8, channels))
    pictures = [noise(8, 8, channels), noise(8, 13, channels), noise(11, 8, channels)] * 8
    store = kept(pictures)
    rows = augmentation.draw_crops(np.random.default_rng(0), store.shapes)
    found = augmentation.crop(store, torch.arange(len(pictures)), torch.from_numpy(rows))
    assert {tuple(row[4:6]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for picture, row, got in zip(pictures, rows.astype(int), found, strict=True):
        top, left, _, _, flip, vflip, *_ = row
        assert -3 <= top <= picture.shape[1] + 3 - 8
        window = F.pad(picture, [3] * 4)[:, top + 3 : top + 11, left + 3 : left + 11]
        expected = window.flip([axis for axis, mirror in ((2, flip), (1, vflip)) if mirror])
        assert torch.equal(got, expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
def test_resized_box_is_that_of_the_readers(interpolation):
    cfg = AugmentConfig(img_size=9, crop="random-resized", interpolation=interpolation)
    augmentation = KeptAugmentation(cfg, preprocessing(9))
    pictures = [noise(20, 14), noise(9, 9), noise(13, 31)] * 4
    store = kept(pictures)
    rows = augmentation.draw_crops(np.random.default_rng(1), store.shapes)
    found = augmentation.crop(store, torch.arange(len(pictures)), torch.from_numpy(rows))
    assert len(set(rows[:, 6])) == (2 if interpolation == "random" else 1)
    for picture, row, got in zip(pictures, rows.astype(int), found, strict=True):
        top, left, height, width, flip, _, mode, *_ = row
        expected = resize(picture[:, top : top + height, left : left + width], (9, 9), MODES[mode])
        assert torch.equal(got, expected.flip(2) if flip else expected)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=20), st.integers(0, 99))
def test_boxes_lie_within_their_pictures(sizes, seed):
    shapes = np.array(sizes)
    top, left, height, width = random_boxes(np.random.default_rng(seed), shapes, SCALE, RATIO).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (height >= 1).all()
    assert (width >= 1).all()
    assert (top + height <= shapes[:, 0]).all()
    assert (left + width <= shapes[:, 1]).all()


@pytest.mark.parametrize("size", [(64, 64), (40, 100), (100, 20)])
def test_boxes_have_the_distribution_of_a_single_one(size):
    """timm's own draws, one by one, next to those of a batch: means of place and size, and how often none fitted."""
    count = 4000
    random.seed(0)
    expected = np.array([random_box(size, SCALE, RATIO) for _ in range(count)], dtype=float)
    found = random_boxes(np.random.default_rng(0), np.array([size] * count), SCALE, RATIO)
    error = 5 * expected.std(axis=0) / count**0.5 + 1e-9
    assert (np.abs(found.mean(axis=0) - expected.mean(axis=0)) < 2**0.5 * error).all()
    assert np.abs(found.std(axis=0) - expected.std(axis=0)).max() < 0.06 * max(size)


@pytest.mark.parametrize(
    ("crop", "whole", "size"),
    [
        ("random-resized", [30, 40], [30, 40]),  # small enough
        ("random-resized", [100, 200], [64, 128]),  # twice the 32 of training
        ("random", [100, 200], [32, 64]),
        ("random", [32, 32], [32, 32]),
        ("resize", [100, 200], [32, 32]),
    ],
)
def test_pictures_are_kept_no_larger_than_training_needs(crop, whole, size):
    assert kept_size(crop, whole, (32, 32)) == size
    augmentation = KeptAugmentation(AugmentConfig(img_size=32, crop=crop), preprocessing(32))
    picture = np.random.default_rng(0).integers(0, 256, (*whole, 3), dtype=np.uint8)
    decoded = augmentation.decode(picture)
    assert list(decoded.shape) == [3, *size]
    assert decoded.is_contiguous()
    if size == whole:
        assert np.array_equal(decoded.permute(1, 2, 0), picture)


def test_draws_are_those_of_the_generator_alone():
    cfg = AugmentConfig(img_size=16, policy="rand-m9-mstd0.5-inc1")
    augmentation = KeptAugmentation(cfg, preprocessing(16))
    shapes = np.array([(20, 30)] * 6)
    one, same, other = (augmentation.draw_crops(np.random.default_rng(seed), shapes) for seed in (1, 1, 2))
    assert one.shape == (6, augmentation.columns)
    assert augmentation.columns > CROP_COLUMNS
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        (dict(), True),
        (dict(policy="rand-m9-mstd0.5-inc1"), True),
        (dict(color_jitter=0.3), True),
        (dict(policy="trivial"), False),
        (dict(policy="original"), False),
        (dict(interpolation="lanczos"), False),
        (dict(interpolation="random"), True),
        (dict(interpolation="random", crop="random"), False),
    ],
)
def test_what_is_not_known_is_left_to_the_readers(settings, known):
    assert supports(AugmentConfig(**settings), 3, 8) == known
    assert not supports(AugmentConfig(**settings), 3, 16)


def test_windows_may_leave_the_picture_on_all_sides():
    picture = noise(2, 3, 1)
    rows = torch.tensor([[-1.0, -2, 4, 6, 0, 0, 0, 4, 6]])
    found = cut_windows(kept([picture]), torch.tensor([0]), rows, range(1), (4, 6))
    assert torch.equal(found[0], F.pad(picture, [2, 1, 1, 1]))


def test_deep_pictures_are_refused():
    deep = replace(preprocessing(16), depth=16)
    with pytest.raises(WeftError, match="device is not for 3 channels of 16 bits"):
        KeptAugmentation(AugmentConfig(img_size=16), deep)
