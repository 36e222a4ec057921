"""Predictions as files: masks keep their values, names never meet, COCO's own code reads the objects."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from weft.data.boxes.shapes import encode
from weft.report.overlay import palette
from weft.tasks.detect.predict import ObjectPrediction, coco_rows, object_lines, objects_csv
from weft.tasks.results import file_names
from weft.tasks.segment.predict import shares, shares_csv, shares_lines, write_values


@pytest.mark.parametrize("k", [1, 2, 3, 16, 17, 255])
def test_mask_files_hold_the_very_values(tmp_path, k):
    mask = np.random.default_rng(k).integers(0, k, (37, 53)).astype(np.uint8)
    mask.flat[:k] = np.arange(k)
    table = palette(["background", *(f"c{i}" for i in range(1, k))])
    write_values(tmp_path / "mask.png", mask, range(k), table)
    with Image.open(tmp_path / "mask.png") as image:
        assert image.mode == "P"
        np.testing.assert_array_equal(np.asarray(image), mask)
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), table[mask])


@given(
    st.lists(st.sampled_from(["a/x.jpg", "b/x.jpg", "b/x.png", "B/X.jpg", "picture 0", "x_1.png", "é" * 200 + ".png"]))
)
def test_file_names_differ(names):
    made = file_names(names)
    assert len({name.casefold() for name in made}) == len(names)
    assert all("/" not in name and len(name.encode()) < 220 for name in made)


def test_file_names_are_short_where_they_can_be():
    assert file_names(["p/a.jpg", "p/b.c.png"]) == ["a", "b.c"]
    assert file_names(["p/a.jpg", "q/a.jpg", "q/b.jpg"]) == ["p_a", "q_a", "b"]
    assert file_names(["p/a.jpg", "p/a.png"]) == ["a_jpg", "a_png"]
    assert file_names(["a.jpg", "a.jpg"]) == ["a_1", "a_2"]


def test_shares_add_up():
    mask = np.array([[0, 0, 2], [2, 2, 2]], np.uint8)
    assert shares(mask, ["a", "b", "c"]) == {"c": 4 / 6, "a": 2 / 6}


def made_objects(n=5, size=(60, 80)):
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 30, (n, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(8, 28, (n, 2))], 1).round().astype(np.float32)
    masks = np.zeros((n, *size), bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = True
    scores = np.linspace(0.9, 0.1, n, dtype=np.float32)
    labels = np.arange(n) % 2
    return ObjectPrediction("p/a.jpg", boxes, labels, scores, [encode(m) for m in masks], size), masks


def test_masks_of_objects_and_those_above_a_score():
    prediction, masks = made_objects()
    np.testing.assert_array_equal(prediction.masks, masks)
    some = prediction.above(0.5)
    np.testing.assert_array_equal(some.masks, masks[:3])
    assert (len(some.boxes), some.labels.tolist()) == (3, [0, 1, 0])
    assert prediction.above(0.95).masks.shape == (0, 60, 80)
    assert ObjectPrediction("x").masks is None


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_pycocotools_reads_the_objects(tmp_path, capsys, kind):
    """The truth, written as predictions, has an average precision of 1."""
    prediction, masks = made_objects()
    rows = coco_rows(prediction, 1, ["cat", "dog"])
    (tmp_path / "predictions.json").write_text(json.dumps(rows))
    truth = COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": 1, "height": 60, "width": 80, "file_name": "a.jpg"}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": [
            {**row, "id": i + 1, "iscrowd": 0, "area": int(mask.sum())}
            for i, (row, mask) in enumerate(zip(rows, masks, strict=True))
        ],
    }
    truth.createIndex()
    run = COCOeval(truth, truth.loadRes(str(tmp_path / "predictions.json")), kind)
    run.evaluate()
    run.accumulate()
    run.summarize()
    assert run.stats[0] == pytest.approx(1)
    capsys.readouterr()


def test_tables():
    prediction, _ = made_objects()
    rows = coco_rows(prediction, 1, ["cat", "dog"])
    lines = list(object_lines(["a.jpg"], [rows], [""]))
    assert lines[0] == "a.jpg  cat 3  dog 2"
    assert len(lines) == 3 + 5
    assert list(object_lines(["a.jpg", "b.jpg"], [[], []], ["", "torn"])) == [
        "a.jpg  nothing",
        "b.jpg  cannot be read: torn",
    ]
    table = objects_csv(["a.jpg", "b.jpg"], [rows, []], ["", "torn"]).splitlines()
    assert (len(table), table[-1]) == (7, "b.jpg,,,,,,,torn")
    assert list(shares_lines(["a", "b"], [{"x": 0.75, "y": 0.25}, {}], ["", "torn"], 1)) == [
        "a  x 75.0 %",
        "b  cannot be read: torn",
    ]
    assert shares_csv(["a"], [{"y": 0.25}], [""], ["x", "y"]).splitlines() == ["name,x,y,error", "a,0,0.25,"]
