"""Boxes and polygons from YOLO's text files."""

import numpy as np
import pytest
from PIL import Image

from tests.helpers.made_boxes import SPLIT, block, pictures
from weft.data.boxes.coco import open_boxes, recognise
from weft.data.boxes.shapes import draw


@pytest.mark.parametrize(
    ("pictures_in", "labels_in", "splits"),
    [
        (["images/train", "images/val"], ["labels/train", "labels/val"], SPLIT),
        (["train/images", "valid/images"], ["train/labels", "valid/labels"], SPLIT),
        (["images"], ["labels"], [""]),
        ([""], [""], [""]),
        (["obj_train_data"], ["obj_train_data"], [""]),
    ],
)
def test_layouts_of_yolo(tmp_path, pictures_in, labels_in, splits):
    for folder, texts in zip(pictures_in, labels_in, strict=True):
        pictures(tmp_path / folder, "1.png", "2.png")
        (tmp_path / texts).mkdir(parents=True, exist_ok=True)
        (tmp_path / texts / "2.txt").write_text("1 0.5 0.5 0.2 0.4\n\n0 0.25 0.5 0.5 1\n")
    (tmp_path / "data.yaml").write_text("nc: 2\nnames: [cat, dog]\n")
    assert recognise(tmp_path) == "yolo"
    for given_as in (tmp_path, tmp_path / "data.yaml"):
        source = open_boxes(str(given_as))
        assert source.splits.tolist() == [split for split in splits for _ in range(2)]
        assert source.classes == ["cat", "dog"]
        assert len(source.target(0)) == 0
        assert source.target(1).size == (10, 20)
        np.testing.assert_allclose(source.target(1).boxes, [[8, 3, 12, 7], [0, 0, 10, 10]], atol=1e-5)
        assert source.target(1).labels.tolist() == [1, 0]
        assert source.target(1).area.tolist() == pytest.approx([16, 100])
        assert not source.targets.has_shapes


def test_yolo_polygons(tmp_path):
    pictures(tmp_path, "images/1.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/1.txt").write_text("0 0.1 0.2 0.4 0.2 0.4 0.6 0.1 0.6\n")
    (tmp_path / "labels/classes.txt").write_text("leaf\n")
    source = open_boxes(str(tmp_path))
    found = source.target(0)
    assert source.classes == ["leaf"]
    np.testing.assert_allclose(found.boxes, [[2, 2, 8, 6]], atol=1e-5)
    assert np.array_equal(draw(found.shapes[0], 10, 20), block(2, 2, 8, 6))
    assert found.area.tolist() == pytest.approx([24])


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("names: {0: a, 2: c}", ["a", "1", "c"]),
        ("names: [x, 7]", ["x", "7"]),
        ("train: images", ["0", "1"]),
        ("- 1", ["0", "1"]),
    ],
)
def test_names_of_yolo_classes(tmp_path, names, classes):
    pictures(tmp_path, "images/1.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/1.txt").write_text("1 0.5 0.5 0.2 0.4\n")
    (tmp_path / "data.yaml").write_text(names)
    assert open_boxes(str(tmp_path)).classes == classes


def test_yolo_follows_the_exif_rotation(tmp_path):
    """Fractions are of the picture as people see it."""
    pictures(tmp_path, "images/1.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (20, 10)).save(tmp_path / "images/1.jpg", exif=exif)
    (tmp_path / "images/1.png").unlink()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/1.txt").write_text("0 0.5 0.5 0.2 0.4\n")
    assert open_boxes(str(tmp_path)).target(0).size == (20, 10)
