"""Pictures with masks: layouts, names, lists of splits, masks drawn from objects."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_masks import INDEX, mask, picture, tree
from weft.data.boxes.objects import Objects
from weft.data.masks.folders import open_masks, recognise, semantic_from_objects
from weft.data.sources.source import Files, Names, Source, fingerprint
from weft.errors import WeftError

LAYOUTS = {
    "side by side": (["images/a.jpg masks/a.png", "images/b.jpg masks/b.png"], {"": 2}),
    "other names": (["JPEGImages/a.jpg SegmentationClass/a.png"], {"": 1}),
    "upper case": (["Images/a.JPG Labels/a.PNG"], {"": 1}),
    "splits inside": (
        ["imgs/train/a.jpg annots/train/a.png", "imgs/val/a.jpg annots/val/a.png"],
        {"train": 1, "val": 1},
    ),
    "ADE20K's splits": (["images/training/a.jpg annotations/training/a.png"], {"train": 1}),
    "other word for a split": (["images/val/a.jpg masks/validation/a.png"], {"val": 1}),
    "splits outside": (
        [
            "train/images/a.jpg train/masks/a.png",
            "valid/images/b.jpg valid/masks/b.png",
            "test/images/c.jpg test/masks/c.png",
        ],
        {"train": 1, "val": 1, "test": 1},
    ),
    "SegNet": (["train/a.png trainannot/a.png", "val/b.png valannot/b.png"], {"train": 1, "val": 1}),
    "splits in names": (
        ["train_images/a.jpg train_masks/a.png", "val/b.jpg val_labels/b_L.png"],
        {"train": 1, "val": 1},
    ),
    "nested": (["images/x/1.jpg masks/x/1.png", "images/y/1.jpg masks/y/1.png"], {"": 2}),
    "masks not nested": (["images/x/1.jpg masks/1.png", "images/y/2.jpg masks/2.png"], {"": 2}),
    "suffix": (["image/a.jpg label/a_mask.png", "image/b.jpg label/b_mask.png"], {"": 2}),
    "both suffixes": (["images/a_sat.jpg masks/a_mask.png"], {"": 1}),
    "whole name": (["img/a.jpg gt/a.jpg.png"], {"": 1}),
    "one more folder": (["set/images/a.jpg set/masks/a.png"], {"": 1}),
    "Cityscapes": (
        ["leftImg8bit/train/x/x_1_leftImg8bit.png gtFine/train/x/x_1_gtFine_labelIds.png"],
        {"train": 1},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(tmp_path: Path, layout: str) -> None:
    pairs, splits = LAYOUTS[layout]
    tree(tmp_path, *pairs)
    assert recognise(tmp_path)
    source = open_masks(str(tmp_path))
    assert {split: int((source.splits == split).sum()) for split in np.unique(source.splits).tolist()} == splits
    assert source.task == "segment"
    assert source.classes == ["class 0", "class 1", "class 2"]
    assert (source.labels == 0).all()
    for i in range(len(source)):
        assert source.open(i).is_file()  # type: ignore[union-attr]
        np.testing.assert_array_equal(source.target(i), INDEX)


@pytest.mark.parametrize(
    "files",
    [
        ["cat/1.jpg", "dog/2.jpg"],
        ["train/cat/1.jpg", "val/cat/2.jpg"],
        ["images/1.jpg", "cat/2.jpg"],
        ["images/1.jpg", "labels/1.txt"],
        ["train/images/1.jpg", "train/labels/1.txt"],
        ["images/train/1.jpg", "labels/train/1.txt"],
        ["train2017/1.jpg", "annotations/instances_train2017.json"],
        ["JPEGImages/1.jpg", "Annotations/1.xml", "ImageSets/Main/train.txt"],
        ["1.jpg"],
        [],
    ],
)
def test_what_is_no_set_of_masks(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        if file.endswith(".jpg"):
            picture(tmp_path / file)
        else:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("0 0.5 0.5 1 1")
    assert not recognise(tmp_path)
    assert not recognise(tmp_path / "not there")
    with pytest.raises(WeftError, match=r"images/ and masks/"):
        open_masks(str(tmp_path))


def test_partners_that_are_missing(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png", "images/b.jpg masks/b.png")
    picture(tmp_path / "images/alone.jpg")
    mask(tmp_path / "masks/orphan.png")
    source = open_masks(str(tmp_path))
    assert len(source) == 2
    assert any("1 picture without a mask" in note and "alone.jpg" in note for note in source.notes)
    assert any("1 mask without a picture" in note and "orphan.png" in note for note in source.notes)


def test_no_partner_at_all(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/z.png")
    with pytest.raises(WeftError, match=r"images/a\.jpg.*masks/z\.png"):
        open_masks(str(tmp_path))


def test_rule_on_names_is_told(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a_mask.png")
    assert "*_mask" in open_masks(str(tmp_path)).layout


@pytest.mark.parametrize("place", ["elsewhere", "pictures/masks"])
def test_masks_elsewhere(tmp_path: Path, place: str) -> None:
    tree(tmp_path, f"pictures/a.jpg {place}/a.png")
    given = str(tmp_path / place) if place == "elsewhere" else "masks"
    source = open_masks(str(tmp_path / "pictures"), masks=given)
    assert list(source.names) == ["a.jpg"]
    np.testing.assert_array_equal(source.target(0), INDEX)
    with pytest.raises(WeftError, match=r"data\.masks='nowhere'"):
        open_masks(str(tmp_path / "pictures"), masks="nowhere")


def test_split_lists(tmp_path: Path) -> None:
    tree(tmp_path, *(f"images/{name}.jpg masks/{name}.png" for name in "abcd"))
    (tmp_path / "valid.txt").write_text("b.jpg\n")
    assert open_masks(str(tmp_path)).splits.tolist() == ["train", "train", "train", "val"]
    (tmp_path / "train.txt").write_text("images/a.jpg masks/a.png\nc\n")
    source = open_masks(str(tmp_path))
    assert source.splits.tolist() == ["train", "train", "val"]
    assert any("1 picture that these lists do not name" in note for note in source.notes)


def test_source_can_go_to_other_processes_and_notices_changes(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png")
    source = open_masks(str(tmp_path))
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.target(0), source.target(0))
    before = fingerprint(source)
    assert before == fingerprint(open_masks(str(tmp_path)))
    assert before != fingerprint(open_masks(str(tmp_path), ignore=[2]))
    mask(tmp_path / "masks/a.png", np.random.default_rng(0).integers(0, 3, (3, 5), np.uint8))
    with (tmp_path / "masks/a.png").open("ab") as file:
        file.write(b"more")
    assert before != fingerprint(open_masks(str(tmp_path)))


def test_masks_from_objects(tmp_path: Path) -> None:
    from pycocotools import mask as coco

    picture(tmp_path / "a.png", (40, 30))
    shapes = [
        [[5.0, 5, 12, 5, 12, 12, 5, 12]],  # small, inside the second
        [[1.0, 2, 30, 3, 20, 28]],
        [[0.0, 0, 39, 0, 39, 6, 0, 6]],  # a crowd
    ]
    rough = [coco.decode(coco.merge(coco.frPyObjects(shape, 30, 40))).astype(bool) for shape in shapes]
    area = np.array([m.sum() for m in rough], np.float32)
    objects = Objects(np.zeros((3, 4), np.float32), np.array([1, 0, 0]), np.array([False, False, True]), area, shapes)

    class Targets:
        has_shapes = True

        def __call__(self, index: int) -> Objects:
            return objects

        def sizes(self, positions: range) -> bytes:
            return b""

    names = Names(["a.png"])
    labels, splits = np.ones((1, 2), bool), np.array([""])
    source = Source("x", "COCO", ["cell", "dot"], names, labels, Files(tmp_path, names), splits, True)
    source.task, source.targets = "detect", Targets()
    semantic = semantic_from_objects(source)
    assert (semantic.task, semantic.classes, semantic.multilabel) == ("segment", ["background", "cell", "dot"], False)
    expected = np.where(rough[0], 2, np.where(rough[1], 1, np.where(rough[2], 255, 0)))
    np.testing.assert_array_equal(semantic.target(0), expected)
    assert fingerprint(semantic)
    with pytest.raises(WeftError, match="no shapes"):
        semantic_from_objects(semantic)
