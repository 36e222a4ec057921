"""Polygons and run lengths, drawn and encoded as by pycocotools."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from pycocotools import mask as reference

from tests.helpers.made_boxes import SQUARE
from weft.data.boxes.shapes import area_of, box_of, draw, encode, extent
from weft.data.read import BadPicture


@given(arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40)))
@settings(max_examples=60, deadline=None)
def test_run_lengths_are_those_of_pycocotools(mask):
    theirs = reference.encode(np.asfortranarray(mask.astype(np.uint8)))
    ours = encode(mask)
    assert ours == {"size": theirs["size"], "counts": theirs["counts"].decode()}
    json.dumps(ours)
    plain = {"size": theirs["size"], "counts": _counts(mask)}
    for shape in (ours, theirs, plain):
        assert np.array_equal(draw(shape, *mask.shape), mask)
        assert area_of(shape) == mask.sum()
        assert np.array_equal(extent(shape), box_of(mask))
    left, top, width, height = reference.toBbox(theirs)
    assert box_of(mask).tolist() == [left, top, left + width, top + height]


def _counts(mask: np.ndarray) -> list[int]:
    counts, now = [0], False
    for value in mask.T.ravel().tolist():
        if value != now:
            counts.append(0)
        counts[-1] += 1
        now = value
    return counts


def test_a_large_mask_keeps_its_run_lengths():
    """Runs of more than 2 ** 20 pixels take five letters."""
    mask = np.zeros((3000, 3000), bool)
    mask[:, 1500:] = True
    mask[7, 3] = True
    assert encode(mask)["counts"] == reference.encode(np.asfortranarray(mask.view(np.uint8)))["counts"].decode()
    assert np.array_equal(draw(encode(mask), 3000, 3000), mask)


coordinate = st.one_of(st.integers(-20, 60), st.integers(-200, 600).map(lambda x: x / 10), st.floats(-20, 60))


@given(
    st.lists(st.lists(st.tuples(coordinate, coordinate), min_size=3, max_size=9), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 40),
)
@settings(max_examples=120, deadline=None)
def test_polygons_are_drawn_as_by_pycocotools(polygons, height, width):
    shape = [[float(value) for point in polygon for value in point] for polygon in polygons]
    theirs = reference.decode(reference.merge(reference.frPyObjects(shape, height, width)))
    assert np.array_equal(draw(shape, height, width), theirs)


def test_area_of_polygons_is_what_is_inside():
    assert area_of([SQUARE, [10, 0, 14, 0, 10, 4]]) == 16 + 8
    assert area_of([SQUARE[::-1]]) == 16
    assert extent([SQUARE, [10, 0, 14, 0, 10, 4]]).tolist() == [1, 0, 14, 5]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([[1, 2, 3, 4]], "2 points"),
        ([[1, 2, 3, 4, 5]], "not a list of numbers"),
        ([["a", 2, 3, 4, 5, 6]], "not a list of numbers"),
        ([[1, 2, 3, float("nan"), 5, 6]], "NaN"),
        ([[0, 0, 1e12, 0, 0, 1e12]], "far beyond"),
        ({"size": [9, 8], "counts": [72]}, "[9, 8]"),
        ({"size": [8, 9], "counts": [71]}, "sum to 71"),
        ({"size": [8, 9], "counts": [80, -8]}, "negative or longer"),
        ({"size": [4, 4], "counts": [2**62] * 3 + [2**62 + 16]}, "negative or longer"),  # whose sum overflows to 16
        ({"size": [8, 9], "counts": [71.5, 0.5]}, "without counts"),
        ({"size": [8, 9], "counts": "\x01"}, "characters"),
        ({"size": [8, 9], "counts": "P"}, "characters"),
        ({"size": [8, 9], "counts": "ooooooooooooooo0"}, "too large"),
        ({"size": [8, 9]}, "without counts"),
        ({"counts": [72]}, "size"),
        ({"size": [1 << 30, 1 << 30], "counts": [1 << 60]}, "pixels"),
    ],
)
def test_shapes_that_cannot_be_drawn_say_why(shape, words):
    with pytest.raises(BadPicture) as error:
        draw(shape, 8, 9)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
