"""What `check_boxes` says of boxes that cannot be right: each fault in one line that names file, object and number."""

import inspect
import json
import math
import re

import numpy as np
import pytest
from PIL import Image

from tests.helpers.made_boxes import SQUARE, coco, one, pictures, thing, voc_object, voc_xml
from weft.data.boxes import annotations, voc, yolo
from weft.data.boxes import coco as boxes
from weft.data.boxes.coco import open_boxes, open_coco
from weft.data.boxes.shapes import encode
from weft.data.check.boxes import FAULTS, check_boxes
from weft.data.check.scan import LookLimits
from weft.data.demo import open_nuclei
from weft.data.read import MAX_PIXELS
from weft.data.sources.renamed import RenamedTargets
from weft.data.sources.source import JoinedReaders

GOOD = thing(100, [1, 1, 4, 4])


def found(source, **more):
    return check_boxes(source, LookLimits(MAX_PIXELS, **more))


def problems(source, **more) -> dict:
    answer = {problem.kind: problem for problem in found(source, **more).problems}
    for problem in answer.values():
        assert "\n" not in problem.text
        assert problem.count >= 1
    return answer


@pytest.mark.parametrize(
    ("kind", "entry", "left", "words"),
    [
        ("outside", thing(7, [15, 2, 9, 3]), 2, ["object 7", "x 24", "20 x 10"]),
        ("outside", thing(7, [-3, 2, 9, 3]), 2, ["object 7", "x -3"]),
        ("no-area", thing(7, [3, 3, 0, 4]), 1, ["object 7", "x 3, y 3 to x 3, y 7"]),
        ("no-area", thing(7, [9, 9, -4, -4]), 1, ["object 7", "to x 5, y 5"]),
        ("no-area", thing(7, [3, 3, 0.5, 4]), 1, ["object 7", "x 3.5"]),
        ("no-area", thing(7, [30, 30, 5, 5]), 1, ["object 7", "x 35", "20 x 10"]),
        ("not-a-number", thing(7, [3, 3, math.nan, 4]), 1, ["object 7", "nan"]),
        ("not-a-number", thing(7, [3, 3, math.inf, 4]), 1, ["object 7", "inf"]),
        ("unknown-class", thing(7, [3, 3, 4, 4], category=9), 1, ["object 7", "class 9"]),
        ("few-points", thing(7, [3, 3, 4, 4], segmentation=[[3, 3, 7, 7]]), 2, ["object 7", "4 numbers", "2 points"]),
        ("few-points", thing(7, [3, 3, 4, 4], segmentation=[[3] * 7]), 2, ["object 7", "3.5 points"]),
        ("duplicate-id", {**GOOD}, 1, ["id 100"]),
        ("duplicate-id", thing(100, [5, 5, 4, 4]), 2, ["id 100"]),
    ],
)
def test_faults_of_an_object(tmp_path, kind, entry, left, words):
    source = one(tmp_path, GOOD, entry)
    problem = problems(source)[kind]
    assert (problem.severity, problem.count, problem.names) == ("warning", 1, ["1.png"])
    for word in words:
        assert word in problem.details["1.png"]
    objects = source.target(0)
    assert len(objects) == left
    assert (objects.boxes >= 0).all()
    assert (objects.boxes <= [20, 10, 20, 10]).all()


@pytest.mark.parametrize("entry", [{"id": 7}, "text", thing(7, [1, 2, 3]), thing(7, []), thing(7, [1, 2, 3, "x"])])
def test_objects_that_cannot_be_understood(tmp_path, entry):
    """And that is said in words of COCO's, not of Python's."""
    problem = problems(one(tmp_path, GOOD, entry))["malformed"]
    assert "boxes.json, annotations" in problem.names[0]
    (detail,) = problem.details.values()
    assert re.match("expected image_id, category_id, and a bbox|has neither a box nor a shape", detail)


def test_boxes_at_the_edge_are_no_fault(tmp_path):
    assert not problems(one(tmp_path, thing(1, [0, 0, 20.4, 10.4]), thing(2, [-0.5, 3, 9, 4])))


def test_pictures_and_ids_that_do_not_match(tmp_path):
    file = coco(
        tmp_path / "boxes.json", GOOD, thing(1, [1, 1, 4, 4], image=5), thing(2, [1, 1, 4, 4], image=3), images=3
    )
    content = json.loads(file.read_text())
    content["images"] += [
        {"id": 1, "file_name": "other.png", "width": 20, "height": 10},
        {"id": 8, "file_name": "2.png", "width": 20, "height": 10},
    ]
    content["annotations"].append(thing(3, [1, 1, 4, 4], image=8))
    file.write_text(json.dumps(content))
    pictures(tmp_path, "1.png", "2.png", "other.png")
    source = open_coco(str(file))
    assert list(source.names) == ["1.png", "2.png"]
    assert [len(source.target(i)) for i in range(2)] == [1, 1]
    said = problems(source)
    assert said["unknown-picture"].details == {"image 5": "object 1 belongs to it"}
    assert said["missing-picture"].names == ["3.png"]
    assert "id 1 of 1.png" in said["duplicate-id"].details["other.png"]
    assert said["repeated-picture"].names == ["2.png"]


def test_a_picture_in_two_splits_is_an_error(tmp_path):
    for split in ("train", "val"):
        coco(tmp_path / f"instances_{split}.json", GOOD)
    pictures(tmp_path, "images/1.png")
    source = open_coco(str(tmp_path))
    assert source.splits.tolist() == ["train"]
    assert problems(source)["split-picture"].severity == "error"


def test_corners_written_as_sides_are_suspected(tmp_path):
    rng = np.random.default_rng(0)
    corners = np.sort(rng.integers(0, (11, 21), (2, 30, 2))[..., ::-1], axis=0)  # left, top; right, bottom
    drawn = [[*map(int, (*low, *high))] for low, high in zip(*corners, strict=True) if (high > low).all()]
    wrong = [thing(i, box) for i, box in enumerate(drawn)]
    right = [thing(i, [x, y, right - x, bottom - y]) for i, (x, y, right, bottom) in enumerate(drawn)]
    assert problems(one(tmp_path / "wrong", *wrong))["mixed-up"].severity == "error"
    assert "mixed-up" not in problems(one(tmp_path / "right", *right))


def test_sides_written_as_corners_are_suspected(tmp_path):
    pictures(tmp_path, "a.png")
    (tmp_path / "a.xml").write_text(voc_xml(voc_object("dog", 8, 2, 6, 6), voc_object("dog", 1, 1, 3, 3)))
    assert "end before they begin" in str(problems(open_boxes(str(tmp_path)))["mixed-up"].details)


@pytest.mark.parametrize(("first", "ids"), [(1, [0, 1]), (0, [1, 2])])
def test_classes_off_by_one_are_suspected(tmp_path, first, ids):
    objects = [thing(i, [1, 1, 4, 4], category=i) for i in ids]
    said = problems(one(tmp_path, *objects, categories={first: "cat", first + 1: "dog"}))
    assert said["offset"].severity == "error"
    assert f"{ids[0]} to {ids[1]}" in said["offset"].details["classes"]
    assert said["unknown-class"].count == 1


def test_lines_of_yolo(tmp_path):
    pictures(tmp_path, "images/1.png", "images/2.png")
    (tmp_path / "labels").mkdir()
    lines = [
        "0 0.5 0.5 0.2 0.2",
        "2 0.5 0.5 0.2 0.2",
        "0 0.9 0.5 0.4 0.2",
        "0 0.5 0.5 nan 0.2",
        "cat 1 2",
        "0 1 2 3 4 5",
    ]
    (tmp_path / "labels/1.txt").write_text("\n".join(lines))
    (tmp_path / "labels/9.txt").write_text(lines[0])
    (tmp_path / "data.yaml").write_text("names: [cat, dog]")
    source = open_boxes(str(tmp_path))
    said = problems(source)
    assert "object 2 has the class 2" in said["unknown-class"].details["images/1.png"]
    assert "object 3 reaches" in said["outside"].details["images/1.png"]
    assert "object 4" in said["not-a-number"].details["images/1.png"]
    assert said["malformed"].details == {"labels/1.txt": "line 5 is 'cat 1 2' ..."}
    assert said["malformed"].count == 2
    assert said["missing-picture"].names == ["labels/9.txt"]
    assert said["no-objects"].names == ["images/2.png"]
    np.testing.assert_allclose(source.target(0).boxes, [[8, 4, 12, 6], [14, 4, 20, 6]], atol=1e-5)


@pytest.mark.parametrize(("size", "fits"), [((20, 10), True), ((10, 20), False), ((40, 20), False)])
def test_pictures_of_another_size(tmp_path, size, fits):
    source = one(tmp_path, GOOD)
    pictures(tmp_path, "1.png", size=size)
    answer = found(source)
    assert (answer.bad == {}) == fits
    if not fits:
        assert answer.bad == {"1.png": f"annotated at 20 x 10 pixels, but has {size[0]} x {size[1]}"}
        assert answer.problems[0].severity == "error"
        assert found(source, bad_files=1.0).problems[0].severity == "warning"


def test_pictures_annotated_before_they_were_turned(tmp_path):
    source = one(tmp_path, GOOD)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (20, 10)).save(tmp_path / "1.png", exif=exif)
    assert not found(source).bad


def test_shapes_that_do_not_fit(tmp_path):
    source = one(
        tmp_path,
        thing(1, [1, 1, 4, 4], segmentation=[SQUARE]),
        thing(2, [1, 0, 9, 10], segmentation=[[11, 1, 19, 1, 19, 9]]),
        thing(3, [1, 1, 4, 4], image=2, segmentation=encode(np.ones((10, 21), bool))),
        thing(4, [1, 1, 4, 4], image=3, segmentation={"size": [10, 20], "counts": [5]}),
        images=3,
    )
    answer = found(source)
    assert "object 2 of 2, cat, has the box [1.0, 0.0, 10.0, 10.0]" in str(answer.problems)
    assert "sum to 5" in answer.bad["3.png"]
    assert "21" in answer.bad["2.png"]


def test_numbers_of_a_good_set(tmp_path):
    source = one(
        tmp_path,
        thing(1, [0, 0, 4, 4]),
        thing(2, [0, 0, 20, 10], image=2, category=2),
        thing(3, [0, 0, 20, 10], image=2, category=2, iscrowd=1),
        images=3,
        categories={1: "cat", 2: "dog"},
    )
    answer = found(source)
    assert answer.objects == [1, 1]
    assert answer.looked_at == 3
    assert answer.sizes["min"] == 4
    assert answer.parts["max"] == 1
    assert {problem.kind: problem.severity for problem in answer.problems} == {"crowd": "note", "no-objects": "note"}


def test_crowds_alone_are_nothing_to_learn(tmp_path):
    source = one(tmp_path, thing(1, [0, 0, 4, 4], iscrowd=1), thing(2, [0, 0, 20, 10], image=2, iscrowd=1), images=2)
    (problem,) = found(source).problems
    assert (problem.severity, problem.count) == ("error", 2)
    assert "nothing to learn" in problem.text


def test_a_quick_check_looks_at_a_sample_and_at_joined_sets(tmp_path):
    source = open_nuclei("detect")
    answer = found(source, quick=True, seconds=0.2)
    assert 0 < answer.looked_at <= len(source)
    other = one(tmp_path, GOOD, thing(7, [3, 3, 0, 4]))
    source.targets = JoinedReaders(
        [(source.targets, np.arange(287)), (RenamedTargets(other.targets, [0]), np.arange(1))]
    )
    assert "no-area" in problems(source, quick=True, seconds=0.2)


def test_every_fault_has_its_words():
    """Each kind that a reader reports is told by the check."""
    text = "".join(map(inspect.getsource, (annotations, boxes, voc, yolo)))
    kinds = set(re.findall(r'(?:add|_fault)\(\s*"([a-z-]+)"', text))
    assert kinds <= set(FAULTS)
    assert len(kinds) > 8
