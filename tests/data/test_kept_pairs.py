"""Pictures with masks or objects on the device: what comes out is what readers make of the same draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_augment_kept import kept
from tests.data.test_pairs import preprocessing, rectangles, scene
from weft.config import AugmentConfig
from weft.data.augment.kept_pairs import KeptMasks, KeptObjects, KeptPairs
from weft.data.augment.pairs import DetectAugmentation, SegmentAugmentation
from weft.errors import WeftError

SIZES = [(40, 61), (64, 64), (23, 90), (17, 19)]


def config(**changes) -> AugmentConfig:
    usual = dict(img_size=32, crop="random", rescale=[0.4, 2.2], class_limit=0.6, photometric=1.0, vflip=0.5)
    return AugmentConfig(**{**usual, "interpolation": "random", **changes})


def on_device(pairs: KeptPairs, files: list, targets: list, seeds: range) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Pictures are kept once; then index and rows of one batch, and the targets that readers send with it."""
    pairs.keep(kept([pairs.decode(file, target) for file, target in zip(files, targets, strict=True)]), np.empty(0))
    drawn = [pairs.pair(file, target, seed) for file, target, seed in zip(files, targets, seeds, strict=True)]
    return torch.arange(len(files)), torch.stack([row for row, _ in drawn]), [target for _, target in drawn]


@pytest.mark.parametrize("channels", [1, 3])
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0]), st.sampled_from([(0, 0), (48, 80)]))
def test_masks_and_pictures_are_those_of_the_readers(channels, seed, photometric, size):
    rng = np.random.default_rng(seed)
    augmentation = SegmentAugmentation(
        config(photometric=photometric),
        preprocessing(size=size, channels=channels, mean=(0.45,) * channels, std=(0.2,) * channels),
        (32, 32),
    )
    files = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]
    masks = [scene(*size, seed=seed)[1] for size in SIZES]
    pairs, seeds = KeptMasks(augmentation), range(seed, seed + len(files))
    index, rows, _ = on_device(pairs, files, masks, seeds)
    pictures, targets = pairs.augmented(index, rows), pairs.masks(index, rows)
    for i, drawn in enumerate(seeds):
        picture, mask = augmentation.pair(files[i], masks[i], drawn)
        assert torch.equal(targets[i], mask)
        off = (pictures[i].int() - picture.int()).abs()
        assert off.max() <= (
            3 if photometric else 1
        )  # a value that is one off, at a contrast of 1.5 and in other colours
        assert (off > 0).float().mean() < 0.001


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_objects_and_pictures_are_those_of_the_readers(seed):
    rng = np.random.default_rng(seed)
    augmentation = DetectAugmentation(config(), preprocessing(size=(32, 53)))
    files = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]
    objects = [rectangles(h, w, [[1, 1, w // 2, h - 1], [w // 2, 2, w - 1, h // 2]]) for h, w in SIZES]
    pairs, seeds = KeptObjects(augmentation), range(seed, seed + len(files))
    index, rows, targets = on_device(pairs, files, objects, seeds)
    pictures = pairs.augmented(index, rows)
    for i, drawn in enumerate(seeds):
        picture, target = augmentation.pair(files[i], objects[i], drawn)
        assert target.keys() == targets[i].keys()
        assert all(torch.equal(targets[i][key], value) for key, value in target.items())
        assert ((pictures[i].int() - picture.int()).abs() > 0).float().mean() < 0.001


def test_what_is_not_known_is_left_to_the_readers():
    for changes, deep in ((dict(interpolation="lanczos"), 8), (dict(), 16)):
        augmentation = SegmentAugmentation(config(**changes), replace(preprocessing(), depth=deep), (32, 32))
        with pytest.raises(WeftError, match=f"device is not for pictures of {deep} bits"):
            KeptMasks(augmentation)
    with pytest.raises(WeftError, match=r"windows of one size, not for augment\.crop=resize"):
        KeptObjects(DetectAugmentation(config(crop="resize"), preprocessing()))


@pytest.mark.parametrize("photometric", [0.0, 1.0])
def test_rehearsal_needs_no_picture(photometric):
    """With and without the pictures, of which the first may be smaller than the window."""
    pairs = KeptMasks(SegmentAugmentation(config(photometric=photometric), preprocessing(), (32, 32)))
    pairs.rehearse(3, torch.device("cpu"))
    assert pairs.pictures is None
    on_device(pairs, [np.zeros((5, 6, 3), np.uint8)], [np.zeros((5, 6), np.uint8)], range(1))
    pairs.rehearse(3, torch.device("cpu"))
