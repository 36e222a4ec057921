"""Boxes and shapes from COCO files, against pycocotools and against what was written."""

import json
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO

from tests.helpers.made_boxes import SPLIT, SQUARE, block, coco, one, pictures, thing, unpacked
from weft.data.boxes.coco import BOX_SETS, open_boxes, open_coco, recognise
from weft.data.boxes.shapes import draw, encode
from weft.data.check.check import check
from weft.data.read import BadPicture
from weft.data.sources.open import open_source
from weft.data.sources.source import fingerprint
from weft.errors import WeftError


@pytest.mark.parametrize(
    ("files", "folders", "splits"),
    [
        (
            ["annotations/instances_train2017.json", "annotations/instances_val2017.json"],
            ["train2017", "val2017"],
            SPLIT,
        ),
        (["instances_train.json", "instances_val.json"], ["train", "val"], SPLIT),
        (["train/_annotations.coco.json", "valid/_annotations.coco.json"], ["train", "valid"], SPLIT),
        (["annotations/train.json", "annotations/val.json"], ["images/train", "images/val"], SPLIT),
        (["annotations/captions_train2017.json", "annotations/instances_train2017.json"], ["", "train2017"], ["train"]),
        (["annotations/instances_default.json"], ["images/default"], [""]),
        (["labels.json"], ["data"], [""]),
        (["result.json"], [""], [""]),
    ],
)
def test_layouts_of_coco(tmp_path, files, folders, splits):
    for file, folder in zip(files, folders, strict=True):
        coco(tmp_path / file, thing(1, [2, 3, 4, 5], image=2), images=2)
        pictures(tmp_path / folder, "1.png", "2.png")
    assert recognise(tmp_path) == "coco"
    source = open_boxes(str(tmp_path))
    assert source.splits.tolist() == [split for split in splits for _ in range(2)]
    assert (source.task, source.multilabel) == ("detect", True)
    assert source.labels.tolist() == [[False], [True]] * len(splits)
    for i in range(len(source)):
        assert source.open(i).is_file()
        assert len(source.target(i)) == i % 2
    assert source.target(1).boxes.tolist() == [[2, 3, 6, 8]]
    assert source.target(1).size == (10, 20)


def test_two_categories_of_one_name_are_found(tmp_path):
    """They stay two classes, since nobody knows what was meant, but not without a word."""
    things = [thing(1, [0, 0, 5, 5]), thing(2, [1, 1, 6, 6], category=4)]
    coco(tmp_path / "a.json", *things, categories={1: "cat", 2: "dog", 4: "cat"})
    pictures(tmp_path, "1.png")
    source = open_coco(str(tmp_path / "a.json"))
    assert source.classes == ["cat", "dog", "cat 4"]
    assert source.target(0).labels.tolist() == [0, 2]
    (problem,) = [problem for problem in check(source, None).problems if problem.kind == "same-name"]
    assert problem.text.startswith("1 name of two categories or more")
    assert problem.details == {"cat": "is the name of the categories 1 and 4, of which the second is called 'cat 4'"}


def test_the_same_ids_in_two_files_are_two_pictures(tmp_path):
    """And classes are matched by name, since each file counts for itself."""
    coco(tmp_path / "instances_train.json", thing(1, [0, 0, 5, 5]), categories={1: "cat", 7: "dog"})
    coco(tmp_path / "instances_val.json", thing(1, [0, 0, 6, 6], category=2), categories={2: "cat", 3: "cow"})
    pictures(tmp_path, "train/1.png", "val/1.png")
    source = open_coco(str(tmp_path))
    assert source.classes == ["cat", "dog", "cow"]
    assert list(source.names) == ["train/1.png", "val/1.png"]
    assert [source.target(i).labels.tolist() for i in range(2)] == [[0], [0]]
    assert source.target(1).boxes.tolist() == [[0, 0, 6, 6]]


def test_gaps_crowds_shapes_and_areas(tmp_path):
    source = one(
        tmp_path,
        thing(5, [1, 1, 4, 4], category=90, segmentation=[SQUARE], area=15.5),
        thing(6, [0, 0, 20, 10], category=3, segmentation=encode(np.ones((10, 20), bool)), iscrowd=1),
        thing(7, [1, 1, 4, 4], category=3, segmentation=[SQUARE]),
        thing(8, [2, 2, 3, 5], category=3, segmentation=[]),
        thing(9, [], category=3, segmentation={"size": [10, 20], "counts": [31, 3, 166]}),
        categories={90: "bear", 3: "cow", 50: "unused"},
    )
    assert source.classes == ["cow", "unused", "bear"]
    assert any("gaps" in note for note in source.notes)
    assert source.targets.has_shapes
    found = source.target(0)
    assert found.labels.tolist() == [2, 0, 0, 0, 0]
    assert found.crowd.tolist() == [False, True, False, False, False]
    assert found.area.tolist() == [15.5, 200, 16, 15, 3]
    assert found.boxes[4].tolist() == [3, 1, 4, 4]
    assert np.array_equal(draw(found.shapes[3], 10, 20), block(2, 2, 5, 7))  # the box, where there is no shape
    assert source.targets.faults.counts == {"no-shape": 1}
    assert source.labels.tolist() == [[True, False, True]]


def test_crowds_alone_are_no_occurrence(tmp_path):
    source = one(tmp_path, thing(1, [0, 0, 5, 5], iscrowd=1))
    assert not source.labels.any()
    assert len(source.target(0)) == 1
    assert not source.targets.has_shapes


def test_a_size_that_is_not_written_down_is_read_from_the_picture(tmp_path):
    file = coco(tmp_path / "boxes.json", thing(1, [2, 3, 4, 5]))
    content = json.loads(file.read_text())
    del content["images"][0]["width"]
    file.write_text(json.dumps(content))
    pictures(tmp_path, "1.png", size=(30, 40))
    assert open_coco(str(file)).target(0).size == (40, 30)


def test_workers_get_the_same_objects(tmp_path):
    source = one(tmp_path, thing(1, [1, 1, 4, 4], segmentation=[SQUARE]))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.target(0).shapes == source.target(0).shapes == [[SQUARE]]


def test_a_changed_box_or_shape_changes_the_fingerprint(tmp_path):
    prints = set()
    for x, last, crowd in ((1, 5, 0), (2, 5, 0), (1, 6, 0), (1, 5, 1), (1, 5, 0)):
        shape = [[*SQUARE[:-1], last]]
        prints.add(fingerprint(one(tmp_path, thing(1, [x, 1, 4, 4], segmentation=shape, iscrowd=crowd))))
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "expected {"),
        ("[1, 2]", "expected {"),
        ('{"images": [', "Expecting value"),
        ('{"images": [{"id": 1} {"id": 2}]}', "expected , or ]"),
        ('{"images": []}', "has no images"),
        ('{"images": [{"id": 1, "file_name": "1.png"}]}', "has no categories"),
        (
            '{"images": [{"id": 1, "file_name": "1.png", "width": -1}]}',
            "can be used: a.json, images, id 1 has a size of",
        ),
        (
            '{"images": [{"id": 1, "file_name": "no.png"}], "categories": [{"id": 1, "name": "a"}]}',
            "none of its pictures",
        ),
        ('{"a": ' + "[" * 100_000, "not a COCO JSON"),
    ],
)
def test_files_that_are_not_coco_get_one_line(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(WeftError) as error:
        open_boxes(str(tmp_path / "a.json"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_two_files_for_one_split_are_refused(tmp_path):
    for name in ("train_a.json", "train_b.json"):
        coco(tmp_path / name, thing(1, [0, 0, 5, 5]))
    with pytest.raises(WeftError, match=r"train_a.json and train_b.json, both for train"):
        open_coco(str(tmp_path))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_survived_or_told(tmp_path_factory, data):
    """Any value of a file replaced by any other: opening works, or one line says why not."""
    root = tmp_path_factory.mktemp("damage")
    pictures(root, "1.png")
    objects = [thing(i, [1, 1, 4, 4], segmentation=[SQUARE]) for i in (1, 2)]
    file = coco(root / "boxes.json", *objects)
    content = json.loads(file.read_text())
    places = [(content, key) for key in content]
    for holder in (record for name in ("images", "annotations", "categories") for record in content[name]):
        places += [(holder, key) for key in holder]
    holder, key = data.draw(st.sampled_from(places))
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
    holder[key] = data.draw(
        st.recursive(
            leaf,
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
            max_leaves=6,
        )
    )
    file.write_text(json.dumps(content))
    try:
        source = open_coco(str(file))
        found = source.target(0)
    except (WeftError, BadPicture) as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert np.isfinite(found.boxes).all()
    assert (found.boxes[:, 2:] - found.boxes[:, :2] >= 1).all()
    assert (found.boxes >= 0).all()
    assert ((found.labels >= 0) & (found.labels < len(source.classes))).all()
    for shape in found.shapes:
        with suppress(BadPicture):
            draw(shape, *found.size)


@pytest.mark.parametrize(("name", "left_out"), [("coco-mini", 1), ("nuclei-dsb2018", 0)])
def test_real_sets_are_read_as_by_pycocotools(tmp_path, name, left_out):
    root = unpacked(tmp_path, name)
    source = open_coco(str(root))
    number = {path: i for i, path in enumerate(source.names)}
    seen = 0
    for file in sorted(root.glob("*.json")):
        theirs = COCO(file)
        classes = {identity: theirs.cats[identity]["name"] for identity in theirs.getCatIds()}
        for identity, image in theirs.imgs.items():
            i = next(number[path] for path in number if path.endswith("/" + image["file_name"]))
            ours, mine = source.target(i), source.targets.numbers[source.targets.rows(i)]
            seen += len(mine)
            assert ours.size == (image["height"], image["width"])
            assert set(mine) <= set(theirs.getAnnIds(identity))
            for k, entry in enumerate(theirs.loadAnns(mine.tolist())):
                x, y, width, height = entry["bbox"]
                np.testing.assert_allclose(ours.boxes[k], [x, y, x + width, y + height], atol=1)  # clipped
                assert source.classes[ours.labels[k]] == classes[entry["category_id"]]
                assert ours.crowd[k] == entry["iscrowd"]
                np.testing.assert_allclose(ours.area[k], entry["area"], rtol=1e-6)
                if identity % 20 == 0:
                    assert np.array_equal(draw(ours.shapes[k], *ours.size), theirs.annToMask(entry))
        seen -= len(theirs.anns)
    assert seen == -left_out


@pytest.mark.parametrize(
    "paths",
    [
        ["cat/1.png", "dog/2.png"],
        ["train/cat/1.png", "val/cat/2.png"],
        ["images/1.png", "masks/1.png"],
        ["images/1.png", "labels/1.png"],
        ["1.png"],
    ],
)
def test_other_data_is_not_taken_for_boxes(tmp_path, paths):
    pictures(tmp_path, *paths)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    (tmp_path / "notes.json").write_text('{"images": [], "categories": []}')
    (tmp_path / Path(paths[0]).parent / "caption.txt").write_text("a cat on a mat\n")
    assert recognise(tmp_path) == ""
    with pytest.raises(WeftError, match="no boxes"):
        open_boxes(str(tmp_path))


def test_sets_by_name(tmp_path):
    coco(tmp_path / "annotations/instances_train2017.json", thing(1, [0, 0, 5, 5]))
    pictures(tmp_path, "train2017/1.png")
    assert BOX_SETS["coco"]("coco:here", tmp_path).root == "coco:here"
    assert set(BOX_SETS) == {"coco", "voc-detect"}


def test_segmentation_of_boxes_is_refused(tmp_path):
    coco(tmp_path / "boxes.json", thing(1, [0, 0, 5, 5]))
    pictures(tmp_path, "1.png")
    with pytest.raises(WeftError, match=r"no shapes from which masks could be drawn"):
        open_source(str(tmp_path), task="segment")
