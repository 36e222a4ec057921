"""The preprocessing inside the graph, next to Pillow's, which evaluation uses."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.made_pictures import picture, preprocessing
from weft.data.preprocessing import cover, fit
from weft.errors import WeftError
from weft.export.preprocess import GraphPreprocessing, covering, fitted

MODES = st.sampled_from([("bicubic", 0.875), ("bilinear", 1.0), ("lanczos", 0.9)])
CROPS = st.sampled_from([("center", (32, 32)), ("center", (24, 40)), ("fit", (32, 56)), ("fit", (0, 0))])
SIDES = st.integers(1, 5000)
UNIT = dict(mean=(0.0,) * 3, std=(1 / 255,) * 3)  # whatever is normalised by these is a pixel from 0 to 255


@settings(max_examples=60)
@example(mode=("bilinear", 1.0), crop=("center", (24, 40)), height=16, wider=12, seed=0)
@given(mode=MODES, crop=CROPS, height=st.integers(8, 150), wider=st.integers(0, 150), seed=st.integers(0, 99))
def test_pixels_are_pillows(mode, crop, height, wider, seed):
    """But for values that lie within rounding of a half, which may go either way: many, where a picture grows.

    Bilinear weights are then small fractions, and more values such halves: 12.7 % was the most of all sides to 60; a
    picture's share varies by 0.6 %. Other filters stay below 8 %.
    """
    rules = preprocessing(crop_mode=crop[0], size=crop[1], interpolation=mode[0], crop_pct=mode[1], **UNIT)
    shown = picture(height, height + wider, seed)
    ours = GraphPreprocessing(rules)(torch.from_numpy(np.array(shown))[None])[0]
    theirs = rules.picture(shown).float()
    assert ours.shape == theirs.shape
    apart = (ours - theirs).abs()
    assert apart.max() < 2.01  # once along the width, and once along the height
    assert (apart > 1.5).float().mean() < 0.02
    assert (apart > 0.5).float().mean() < (0.02 if height > 60 else 0.15 if mode[0] == "bilinear" else 0.1)


@pytest.mark.parametrize("size", [(400, 40), (300, 130), (170, 42)])
def test_tall_pictures(size):
    """Pillow may resize the height first, which rounds otherwise."""
    rules, shown = preprocessing(crop_mode="fit", size=(32, 56), crop_pct=1.0, **UNIT), picture(*size)
    ours = GraphPreprocessing(rules)(torch.from_numpy(np.array(shown))[None])[0]
    assert (ours - rules.picture(shown)).abs().max() < 2.01


@pytest.mark.parametrize(("depth", "channels"), [(16, 1), (32, 1), (16, 5), (8, 5)])
def test_other_depths_and_channels(depth, channels):
    rng = np.random.default_rng(0)
    pixels = rng.random((50, 70, channels)).astype(np.float32)
    raw = pixels if depth == 32 else (pixels * (65535 if depth == 16 else 255)).astype(f"uint{depth}")
    some = dict(mean=(0.5,) * channels, std=(0.25,) * channels, depth=depth, channels=channels)
    rules = preprocessing(size=(32, 32), crop_pct=0.9, **some)
    given = raw if depth == 8 else (raw if depth == 32 else raw / np.float32(65535))
    ours = GraphPreprocessing(rules)(torch.from_numpy(given)[None])
    theirs = rules.normalise(rules.picture(raw)[None])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1.01 / 255 / 0.25 if depth == 8 else 2e-5)


def test_nearest():
    rules, shown = preprocessing(interpolation="nearest", crop_mode="squash", crop_pct=1.0), picture(64, 96)
    ours = GraphPreprocessing(rules)(torch.from_numpy(np.array(shown))[None])
    torch.testing.assert_close(ours, rules.normalise(rules.picture(shown)[None]))


@settings(max_examples=300)
@given(height=SIDES, width=SIDES, target=st.tuples(st.integers(8, 600), st.integers(8, 600)))
def test_sizes(height, width, target):
    """In whole numbers, what evaluation computes in floating point; a half may be rounded otherwise there."""
    assert np.abs(np.subtract(covering(height, width, target), cover([height, width], [*target]))).max() <= 1
    square = (target[0], target[0])
    assert [*covering(height, width, square)] == cover([height, width], [*square])
    limits = (min(target), max(target))
    scale = min(limits[0] / min(height, width), limits[1] / max(height, width))
    if all(abs(side * scale % 1 - 0.5) > 1e-9 for side in (height, width)):
        assert fitted(height, width, limits) == fit((height, width), limits)


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_a_frame_around_pictures_is_refused(mode):
    with pytest.raises(WeftError, match="black frame"):
        GraphPreprocessing(preprocessing(crop_mode=mode, crop_pct=1.15))


def test_unknown_interpolation():
    with pytest.raises(WeftError, match="'hamming' cannot be exported"):
        GraphPreprocessing(preprocessing(interpolation="hamming"))
