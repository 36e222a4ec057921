"""Class folders: layouts, names, and what is left out."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from tests.helpers.made_data import pairs, picture, refused, table, tree
from weft.config import DataConfig
from weft.data.sources.open import open_source
from weft.data.split import load_split, make_split, save_split


def test_flat_folders_are_what_torchvision_reads(tmp_path):
    tree(tmp_path, "b/2.png", "b/1.PNG", "a/x/y/deep.jpeg", "a/z.JPG", "c/1.webp")
    source, peer = open_source(str(tmp_path)), datasets.ImageFolder(str(tmp_path))
    expected = {os.path.relpath(path, tmp_path): peer.classes[label] for path, label in peer.samples}
    assert pairs(source) == expected
    assert source.layout == "class folders"
    assert source.open(0) == tmp_path / source.names[0]
    assert set(source.splits) == {""}


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("train", "val", "test"),
        ("training", "validation", "testing"),
        ("Train", "VALID", "Test"),
        ("TRAIN", "dev", ""),
        ("train2017", "val2017", ""),
    ],
)
def test_splits_under_any_usual_name(tmp_path, train, val, test):
    folders = {"train": train, "val": val, "test": test}
    tree(tmp_path, *(f"{folder}/{label}/1.png" for folder in folders.values() if folder for label in "ab"))
    source = open_source(str(tmp_path))
    assert source.classes == ["a", "b"]
    assert {split: name.split("/")[0] for name, split in zip(source.names, source.splits, strict=True)} == {
        split: folder for split, folder in folders.items() if folder
    }
    assert all(f"{folder}/" in source.layout for folder in folders.values() if folder)


def test_what_the_system_leaves_behind_is_ignored_and_noted(tmp_path):
    tree(tmp_path, "a/1.png", "b/1.png", ".ipynb_checkpoints/1.png", "__MACOSX/a/._1.png", "a/.hidden.png")
    tree(tmp_path, "a/.ipynb_checkpoints/1-checkpoint.png")
    for name in ("a/Thumbs.db", "a/notes.txt", ".DS_Store"):
        (tmp_path / name).write_text("x")
    source = open_source(str(tmp_path))
    assert list(source.names) == ["a/1.png", "b/1.png"]
    notes = " ".join(source.notes)
    assert ".ipynb_checkpoints" in notes
    assert "1 .txt" in notes


@pytest.mark.parametrize(
    ("paths", "note"),
    [
        (("a/1.png", "b/1.png", "c/"), "without pictures are left out: 'c'"),
        (
            ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"),
            "train lacks, which no model can learn: 'c'",
        ),
        (("a/1.png", "A/1.png"), "'A', 'a' differ only in case"),
        (("a/1.png", "a /1.png"), "'a', 'a ' differ only in case"),
        (("a/1.png", "b/1.png", "lies.png"), "1 picture beside"),
        (("train/a/1.png", "train/b/1.png", "test/1.png"), "test/ has no class folders"),
        (("train/a/1.png", "train/b/1.png", "models/x/1.png"), "are not used: 'models'"),
        (("data/a/1.png", "data/b/1.png"), "Looked into data/"),
    ],
)
def test_surprises_are_noted(tmp_path, paths, note):
    source = open_source(str(tree(tmp_path, *paths)))
    assert note in " ".join(source.notes)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (("1.png", "2.png"), ("holds 2 pictures, but no class folders", "CSV")),
        (("train/1.png", "val/1.png"), ("train holds 1 picture, but no class folders",)),
        (("train2017/1.png", "val2017/1.png", "annotations/"), ("segmentation or detection", "annotations/")),
        (("train/a/1.png", "train/b/1.png", "val/A/1.png"), ("'a' is called 'A' in val", "rename")),
        (("train/a/1.png", "val/a/1.png", "valid/a/1.png"), ("val/ and valid/", "both for val")),
        (("a/", "b/"), ("none of the folders 'a', 'b' holds a picture",)),
        ((), ("is empty",)),
    ],
)
def test_other_folders_are_refused_with_the_way_out(tmp_path, paths, words):
    refused(tree(tmp_path, *paths), *words)


def test_coco_and_tables_in_a_folder_are_pointed_at(tmp_path):
    tree(tmp_path / "coco", "1.png")
    (tmp_path / "coco/instances_train.json").write_text("{}")
    refused(tmp_path / "coco", "detection", "instances_train.json")
    refused(Path(table(tmp_path / "csv", "path,label")).parent, "give that file", "labels.csv")


def test_numbers_count_naturally(tmp_path):
    source = open_source(str(tree(tmp_path, *(f"{i}/1.png" for i in (10, 2, 1, 33)))))
    assert source.classes == ["1", "2", "10", "33"]


def test_link_loops_end_and_broken_links_are_noted(tmp_path):
    tree(tmp_path, "data/a/1.png", "data/b/1.png", "elsewhere/c/1.png")
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/a/all").symlink_to("/")
    (tmp_path / "data/a/self").symlink_to(tmp_path / "data/a")
    (tmp_path / "data/b/2.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "data/b/3.png").symlink_to(tmp_path / "data/a/1.png")
    (tmp_path / "data/c").symlink_to(tmp_path / "elsewhere/c")  # a class that lies on another disk
    source = open_source(str(tmp_path / "data"))
    assert list(source.names) == ["a/1.png", "b/1.png", "b/3.png", "c/1.png"]
    assert "link back" in " ".join(source.notes)
    assert "1 broken link:" in " ".join(source.notes)


ODD_NAMES = [
    "with blank.png",
    "line\nfeed.png",
    "caf\u00e9.png",
    "cafe\u0301.png",
    "\u732b.PNG",
    "x" * 251 + ".png",
    os.fsdecode(b"not-utf8-\xff.png"),
]


def test_odd_names_are_read_shown_and_stored(tmp_path):
    root = tmp_path / "data"
    for i, name in enumerate(ODD_NAMES):
        picture(root / "a" / name, i)
        picture(root / "b" / name, i)
    source = open_source(str(root))
    assert len(source) == 2 * len(ODD_NAMES) == len(set(source.names))
    for i in range(len(source)):
        source.names[i].encode("utf-8")
        assert Image.open(source.open(i)).size == (4, 4)
    split = make_split(source, DataConfig(), 0)
    save_split(split, source, tmp_path / "split.json")
    assert np.array_equal(load_split(tmp_path / "split.json", source).val, split.val)


def test_decomposed_and_composed_class_names_are_one_class(tmp_path):
    source = open_source(str(tree(tmp_path, "train/\u00e9/1.png", "train/b/1.png", "val/e\u0301/1.png")))
    assert source.classes == ["b", "\u00e9"]
