"""The pictures that come with the package."""

import numpy as np
from PIL import Image
from pycocotools import mask as reference

from tests.helpers.made_boxes import unpacked
from tests.helpers.made_data import refused
from weft.data.boxes.coco import open_coco
from weft.data.boxes.shapes import box_of
from weft.data.demo import nuclei, open_nuclei
from weft.data.sources.open import open_source
from weft.data.sources.source import fingerprint


def test_embedded_nuclei_as_objects_and_as_masks():
    objects, masks = open_nuclei("detect"), open_nuclei("segment")
    numbers = np.concatenate([nuclei("train")[1], nuclei("val")[1]])
    assert objects.classes == ["nucleus"]
    assert masks.classes == ["background", "nucleus"]
    assert objects.splits.tolist() == masks.splits.tolist() == ["train"] * 224 + ["val"] * 64
    assert objects.labels.shape == (288, 1)
    assert objects.labels.all()
    assert fingerprint(objects) != fingerprint(masks)
    for i in range(0, 288, 24):
        found = objects.target(i)
        assert len(found) == numbers[i].max()
        drawn = np.zeros((256, 256), np.uint8)
        for k, shape in enumerate(found.shapes, 1):
            mask = reference.decode(reference.frPyObjects(shape, 256, 256)).astype(bool)
            drawn[mask] = k
            assert found.boxes[k - 1].tolist() == box_of(mask).tolist()
            assert found.area[k - 1] == mask.sum()
        assert np.array_equal(drawn, numbers[i])
        assert np.array_equal(masks.target(i), (numbers[i] > 0).astype(np.uint8))


def test_embedded_nuclei_are_the_published_ones(tmp_path):
    """Those of validation; in one of them two nuclei share a pixel, which one has here."""
    theirs = open_coco(str(unpacked(tmp_path, "nuclei-dsb2018")))
    ours = open_nuclei("detect")
    theirs_at, ours_at = (np.flatnonzero(source.splits == "val") for source in (theirs, ours))
    other = 0
    for i, k in zip(theirs_at, ours_at, strict=True):
        assert np.array_equal(np.asarray(Image.open(theirs.open(i))), ours.open(k))
        assert np.abs(theirs.target(i).boxes - ours.target(k).boxes).max() <= 1
        other += int((theirs.target(i).area != ours.target(k).area).sum())
    assert other == 1


def test_the_demo():
    source = open_source("demo:fashion")
    assert [(source.splits == split).sum() for split in ("train", "val", "test")] == [6000, 1000, 0]
    assert np.shape(source.open(6999)) == (28, 28)
    assert len(source.classes) == 10


def test_nuclei_have_no_labels():
    refused("demo:nuclei", "masks and objects, but no labels", task="classify")
