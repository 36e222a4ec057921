"""What is painted over pictures: the right pixels in the right colours, and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps

from weft.report.overlay import (
    CROWDED,
    FIRST,
    IGNORE,
    NAMED,
    background,
    border,
    colours,
    paint_mask,
    paint_objects,
    palette,
    seen_by_all,
    visible,
)

PALETTE = np.array([[250, 0, 0], [0, 250, 0], [0, 0, 250]], np.uint8)


def smallest_distance(table):
    """Between two of the colours, for the eyes that see it least."""
    seen = seen_by_all(table)
    apart = np.linalg.norm(seen[:, :, None] - seen[:, None], axis=-1).min(0)
    return apart[~np.eye(len(table), dtype=bool)].min()


def test_colours_are_the_same_whatever_their_number():
    many = colours(255)
    assert len(np.unique(many, axis=0)) == 255
    for k in (0, 1, 2, 19, 150):
        np.testing.assert_array_equal(colours(k), many[:k])


@pytest.mark.parametrize("k", [10, 20])
def test_colours_differ_more_than_the_usual_ones_for_all_eyes(k):
    usual = np.array(colormaps[f"tab{k}"].colors) * 255
    assert smallest_distance(colours(k)) > 1.5 * smallest_distance(usual)


def test_oklab_of_the_corners():
    """White has lightness 1 and no colour; red as in the paper's table."""
    white, red = seen_by_all(np.array([[255, 255, 255], [255, 0, 0]]))[0]
    np.testing.assert_allclose(white, [1, 0, 0], atol=1e-4)
    np.testing.assert_allclose(red, [0.628, 0.225, 0.126], atol=1e-3)


def test_background_is_black_and_others_have_the_first_colours():
    classes = ["Background", "cat", "dog"]
    assert background(classes) == [0]
    np.testing.assert_array_equal(palette(classes), [[0, 0, 0], *FIRST[:2]])
    np.testing.assert_array_equal(palette(["cat", "dog"]), FIRST[:2])


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 3]),
    st.floats(0, 1),
    st.booleans(),
    st.sets(st.integers(0, 2)),
    st.integers(0, 10**6),
)
def test_masks_are_painted_pixel_by_pixel(height, width, channels, alpha, outlines, skip, seed):
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 256, (height, width, channels)).astype(np.uint8)
    mask = rng.choice([0, 1, 2, IGNORE], (height, width)).astype(np.uint8)
    before = picture.copy()
    painted = paint_mask(picture, mask, PALETTE, alpha, outlines, skip)
    np.testing.assert_array_equal(picture, before)
    for y in range(height):
        for x in range(width):
            expected = np.broadcast_to(picture[y, x], 3).astype(float)
            value = mask[y, x]
            around = [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
            edge = any(0 <= b < height and 0 <= a < width and mask[b, a] != value for b, a in around)
            if value != IGNORE and value not in skip:
                expected = PALETTE[value] if outlines and edge else expected * (1 - alpha) + PALETTE[value] * alpha
            assert np.abs(painted[y, x] - expected).max() <= 0.5 + 1e-9


def test_border_of_one_pixel():
    mask = np.zeros((4, 4), np.uint8)
    mask[1, 1] = 1
    assert border(mask).sum() == 5
    assert not border(np.zeros((1, 1), np.uint8)).any()


GREY = np.full((40, 60, 1), 100, np.uint8)


def changed(painted, before=100):
    return (painted != before).any(axis=2)


def test_boxes_are_frames_inside_their_pixels():
    painted = paint_objects(GREY, np.array([[10.0, 5.0, 20.0, 15.0]]), np.array([0]), None, None, ["cell"])
    frame = np.zeros((40, 60), bool)
    frame[5:15, 10:20] = True
    frame[6:14, 11:19] = False
    np.testing.assert_array_equal(changed(painted), frame)
    assert (painted[frame] == FIRST[0]).all()


@pytest.mark.parametrize("n", [3, CROWDED + 1])
def test_masks_are_filled_while_they_are_few(n):
    boxes = np.array([[2 + 5 * (i % 10), 2 + 8 * (i // 10), 6 + 5 * (i % 10), 8 + 8 * (i // 10)] for i in range(n)])
    masks = np.zeros((n, 40, 60), bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = True
    painted = paint_objects(GREY, boxes.astype(float), np.zeros(n, int), None, masks, ["cell"])
    inside = masks.any(0)
    if n > CROWDED:
        for left, top, right, bottom in boxes:
            inside[top + 1 : bottom - 1, left + 1 : right - 1] = False
    np.testing.assert_array_equal(changed(painted), inside)  # one class: no names


def test_few_objects_of_several_classes_have_names():
    boxes, labels = np.array([[10.0, 20.0, 30.0, 38.0], [40.0, 0.0, 58.0, 9.0]]), np.array([0, 1])
    painted = paint_objects(GREY, boxes, labels, np.array([0.9, 0.6]), None, ["cat", "dog"])
    above = painted[5:20, 10:40]
    assert (above == FIRST[0]).all(axis=2).sum() > 50  # a plate in the colour of the class
    assert (above.max(axis=2) < 100).any()  # with dark letters on it
    many = paint_objects(GREY, np.repeat(boxes, 20, 0), np.repeat(labels, 20), None, None, ["cat", "dog"])
    assert not changed(many)[5:20, 10:40].any()


@pytest.mark.parametrize("classes", [["cell"], ["cat", "dog"]])
def test_an_answer_says_its_class_and_score(classes):
    """What is written is what Pillow writes for the same words; without a score one class says nothing."""
    picture = np.full((300, 400, 3), 100, np.uint8)
    box, label = np.array([[100.0, 100.0, 200.0, 200.0]]), np.array([0])
    sure = changed(paint_objects(picture, box, label, np.array([0.93]), None, classes))[85:100]
    less = changed(paint_objects(picture, box, label, np.array([0.93]) / 31, None, classes))[85:100]
    assert sure.any()
    assert sure.sum() > less.sum()  # "93" is wider than "3"
    assert not changed(paint_objects(picture, box, label, None, None, ["cell"]))[85:100].any()


def test_many_objects_have_a_legend_where_there_is_room():
    picture = np.full((300, 400, 3), 100, np.uint8)
    n = NAMED + 1
    boxes = np.array([[4.0 + 24 * i, 4.0, 24.0 + 24 * i, 25.0] for i in range(n)])  # along the upper edge
    labels = (np.arange(n) == 0).astype(int)
    scores = np.linspace(0.9, 0.5, n)
    painted = paint_objects(picture, boxes, labels, scores, None, ["cat", "dog"])
    lower = painted[150:]
    assert changed(lower).any()
    for colour in FIRST[:2]:  # a spot for each class
        assert (lower == colour).all(axis=2).sum() > 20
    one = paint_objects(picture, boxes, labels * 0, scores, None, ["cell"])
    assert changed(one[150:]).any()
    assert not changed(paint_objects(picture, boxes, labels * 0, None, None, ["cell"])[150:]).any()
    tiny = paint_objects(picture[:30, :340], boxes, labels, scores, None, ["cat", "dog"])
    assert not changed(tiny[26:]).any()


def test_the_surest_is_on_top():
    boxes, labels = np.array([[10.0, 10.0, 20.0, 38.0]] * 2), np.array([0, 1])
    masks = np.zeros((2, 40, 60), bool)
    masks[:, 10:38, 10:20] = True
    for scores in ([0.9, 0.3], [0.3, 0.9]):
        painted = paint_objects(GREY, boxes, labels, np.array(scores), masks, ["a", "b"])
        assert tuple(painted[37, 15]) == FIRST[int(np.argmax(scores))]


@given(
    st.lists(st.tuples(*[st.floats(-1e4, 1e4)] * 4), max_size=6),
    st.sampled_from([["x"], ["<b>", "ä" * 50, "\u202e\n"]]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_any_box_can_be_drawn(boxes, classes, size):
    labels = np.arange(len(boxes)) % len(classes)
    picture = np.zeros((*size, 3), np.uint8)
    array = np.array(boxes, np.float32).reshape(-1, 4)
    assert paint_objects(picture, array, labels, np.ones(len(boxes)), None, classes).shape == (*size, 3)


def test_dark_pictures_are_brightened_and_others_left():
    dark = torch.zeros(3, 50, 50, dtype=torch.uint8)
    dark[:, 10:40, 10:40] = 2 * torch.arange(30, dtype=torch.uint8)
    seen = visible(dark, brighten=True)
    assert (seen.dtype, seen.max()) == (np.uint8, 255)
    assert (np.diff(seen[20, 10:40, 0].astype(int)) >= 0).all()
    bright = (torch.arange(2500) % 256).to(torch.uint8).reshape(1, 50, 50)
    np.testing.assert_array_equal(visible(bright, brighten=True), bright.permute(1, 2, 0))
    np.testing.assert_array_equal(visible(dark), dark.permute(1, 2, 0))
    noise = torch.arange(5, dtype=torch.uint8).reshape(1, 1, 5)
    assert visible(noise, brighten=True).max() == round(4 * 255 / 32)
