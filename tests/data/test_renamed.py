"""Targets counted in the classes of another source."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_masks import INDEX, tree
from weft.data.boxes.objects import Objects
from weft.data.masks.folders import open_masks
from weft.data.sources.renamed import RenamedTargets, in_classes, match_classes
from weft.errors import WeftError


def test_renumbered(tmp_path: Path) -> None:
    source = open_masks(str(tree(tmp_path, "images/a.jpg masks/a.png")))
    targets = in_classes(source, ["class 2", "other", "class 0", "class 1"]).targets
    np.testing.assert_array_equal(targets(0), np.select([v == INDEX for v in range(3)], [2, 3, 0], 255))
    with pytest.raises(WeftError, match="'class 0'"):
        in_classes(source, ["class 1", "class 2"])


def test_masks_of_unknown_classes_are_ignored(tmp_path: Path) -> None:
    source = open_masks(str(tree(tmp_path, "images/a.jpg masks/a.png")))
    found, kept, notes = match_classes(source, np.arange(1), ["class 2", "Class 0", "x"], {"class 1": "x"})
    np.testing.assert_array_equal(found.targets(0), np.select([v == INDEX for v in range(3)], [255, 2, 0], 255))
    assert kept.tolist() == [0]
    assert "What is of classes that the model does not have, left out: 'class 0' (if it is 'Class 0'" in notes[1]
    with pytest.raises(WeftError, match="'class 0'"):
        match_classes(source, np.arange(1), ["cat", "dog"], {})


def test_objects_of_unknown_classes_are_left_out() -> None:
    boxes = np.arange(12, dtype=np.float32).reshape(3, 4)
    shapes = [[[0, 0, 1, 1, 1, 0]], [[2, 2, 3, 3, 3, 2]], [[4, 4, 5, 5, 5, 4]]]
    objects = Objects(boxes, np.array([0, 1, 2]), np.array([False, False, True]), boxes[:, 0], shapes, (9, 9))
    found = RenamedTargets(lambda index: objects, [5, -1, 0])(0)
    assert (found.labels.tolist(), found.crowd.tolist(), found.size) == ([5, 0], [False, True], (9, 9))
    np.testing.assert_array_equal(found.boxes, boxes[[0, 2]])
    assert found.shapes == [shapes[0], shapes[2]]
