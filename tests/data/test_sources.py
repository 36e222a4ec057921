"""Every layout of data: what is read is what torchvision and tarfile read, and what is wrong is said in one line."""

import json
import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import datasets

from tests.helpers.made_data import pairs, picture, png, refused, sharded, table, tree, write_shard
from weft.config import DataConfig
from weft.data.sources import source as sources
from weft.data.sources.open import join, open_source
from weft.data.sources.source import Names, evaluated, fingerprint, natural
from weft.data.split import load_split, make_split, save_split
from weft.errors import WeftError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# Class folders


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("data.zip", ("unpack",)),
        ("data.tar.gz", ("unpack",)),
        ("1.png", ("a single picture",)),
        ("data.parquet", ("not data that Weft reads",)),
    ],
)
def test_files_that_are_no_data(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"x")
    refused(tmp_path / name, *words)


def test_places_that_do_not_exist(tmp_path):
    (tmp_path / "pictures").mkdir()
    refused(tmp_path / "picturs", "does not exist", "Did you mean 'pictures'?")
    refused("https://somewhere/data", "not on this machine")
    refused("", "No data given")
    refused("cifra10:/nowhere", "Did you mean 'cifar10'?")
    refused("demo:fashon", "Did you mean 'fashion'?")


def test_one_class_cannot_be_trained_but_evaluated(tmp_path):
    source = open_source(str(tree(tmp_path, "a/1.png", "a/2.png")))
    assert len(evaluated(source)) == 2
    with pytest.raises(WeftError, match="only one class"):
        make_split(source, DataConfig(), 0)


def test_numbers_count_naturally(tmp_path):
    source = open_source(str(tree(tmp_path, *(f"{i}/1.png" for i in (10, 2, 1, 33)))))
    assert source.classes == ["1", "2", "10", "33"]


@given(st.lists(st.text(max_size=6), unique=True), st.randoms())
def test_natural_order_is_total(names, random):
    expected = sorted(names, key=natural)
    random.shuffle(names)
    assert sorted(names, key=natural) == expected


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


def test_the_data_is_never_written_to(tmp_path):
    root = tmp_path / "data"
    tree(root, *(f"{label}/{i}.png" for label in "ab" for i in range(3)))
    write_shard(root / "shards" / "train-0.tar", {"x.png": b"1", "x.cls": b"0", "y.png": b"2", "y.cls": b"1"})
    table(root, "path,label\n0.png,a\n1.png,b\n2.png,a\n3.png,b")
    before = {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        for source in (root, root / "labels.csv", root / "shards", f"caltech101:{root}", f"inaturalist-2021:{root}"):
            try:
                opened = open_source(str(source))
            except WeftError:
                continue
            make_split(opened, DataConfig(), 0)
            fingerprint(opened)
        assert before == {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}
    finally:
        for path in before:
            path.chmod(0o755)


def test_groups_from_names(tmp_path):
    tree(tmp_path, "a/p1_1.png", "a/p1_2.png", "b/p2_1.png", "b/other.png")
    source = open_source(str(tmp_path), group=r"/(p\d+)_")
    assert source.groups is not None
    groups = dict(zip(source.names, source.groups, strict=True))
    assert groups["a/p1_1.png"] == groups["a/p1_2.png"] == "p1"
    assert len(set(groups.values())) == 3
    assert "1 picture without a group" in " ".join(source.notes)
    refused(tmp_path, "matches none of the names", group="patient")
    refused(tmp_path, "not a regular expression", group="(")


# Tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_delimiters_and_encodings(tmp_path, delimiter, encoding):
    rows = [
        ["Image Path", "LABEL", "Split"],
        ["0.png", "caf\u00e9", "train"],
        ["./1.png", "b", "VAL"],
        ["2.png", "b", ""],
    ]
    path = table(tmp_path, "\r\n".join(delimiter.join(row) for row in rows), encoding=encoding)
    source = open_source(path)
    assert pairs(source) == {"0.png": "caf\u00e9", "1.png": "b", "2.png": "b"}
    assert source.splits.tolist() == ["train", "val", ""]
    assert source.open(1) == tmp_path / "1.png"
    assert ("Windows-1252" in " ".join(source.notes)) == (encoding == "cp1252")


@pytest.mark.parametrize("separator", ["|", ";", ", ", ","])
def test_several_labels_in_a_cell(tmp_path, separator):
    cells = [["cat", "dog"], ["dog"], [], ["cat"]]
    path = table(tmp_path, "file,labels\n" + "\n".join(f'{i}.png,"{separator.join(c)}"' for i, c in enumerate(cells)))
    source = open_source(path)
    assert source.multilabel
    assert source.classes == ["cat", "dog"]
    assert source.labels.tolist() == [[name in cell for name in source.classes] for cell in cells]


def test_a_comma_may_belong_to_a_name(tmp_path):
    path = table(tmp_path, 'file,label\n0.png,"tench, Tinca tinca"\n1.png,"goldfish, Carassius"\n2.png,"ox, Bos"')
    assert open_source(path).classes == ["goldfish, Carassius", "ox, Bos", "tench, Tinca tinca"]


def test_columns_of_0_and_1(tmp_path):
    source = open_source(table(tmp_path / "many", "id,cat,dog,age\n0.png,1,1,3\n1.png,0,0,4\n2.png,0,1,5"))
    assert source.multilabel
    assert source.classes == ["cat", "dog"]
    assert source.labels.tolist() == [[True, True], [False, False], [False, True]]
    source = open_source(table(tmp_path / "one", "id,cat,dog\n0.png,1,0\n1.png,0,1"))
    assert pairs(source) == {"0.png": "cat", "1.png": "dog"}


def test_repeated_and_unlabelled_rows_are_noted(tmp_path):
    source = open_source(table(tmp_path, "path,label\n0.png,a\n./0.png,a\n1.png,b\n2.png,\n,b"))
    assert list(source.names) == ["0.png", "1.png"]
    assert "1 repeated row" in " ".join(source.notes)
    assert "2 rows without" in " ".join(source.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,label\n0.png,a\n9.png,b", ("1 of 2 files do not exist", "9.png")),
        ("path,label\n0.png,a\n0.png,b", ("0.png has different labels", "|")),
        ("path,label,split\n0.png,a,train\n0.png,a,val", ("0.png is in 'train' and in 'val'",)),
        ("path,label,split\n0.png,a,holdout", ("'holdout' is not one of",)),
        ("path,label\n0.png,a,b", ("row 2 has 3 cells", "quotes")),
        ("0.png,a\n1.png,b", ("first line must name the columns",)),
        ("path,size\n0.png,5", ("none called label",)),
        ("path,label\n", ("has no rows",)),
        ("path,label\n0.png,\0", ("is not a text file",)),
    ],
)
def test_wrong_tables(tmp_path, text, words):
    refused(table(tmp_path, text), *words)


def test_a_few_missing_files_are_left_out(tmp_path):
    tree(tmp_path, *(f"p/{i}.png" for i in range(200)))
    rows = [f"p/{i}.png,{i % 2}" for i in range(202)]
    source = open_source(table(tmp_path, "\n".join(["path,label", *rows])))
    assert len(source) == 200
    assert "2 files that cannot be found" in " ".join(source.notes)


def test_group_columns(tmp_path):
    path = table(tmp_path, "path,label,Patient,group\n0.png,a,x,g\n1.png,b,x,h\n2.png,b,,h")
    grouped = {name: open_source(path, group=name).groups for name in ("", "patient", r"^\d")}
    assert [*map(str, grouped[""])] == ["g", "h", "h"]  # type: ignore[arg-type]
    assert len(set(grouped["patient"])) == 2  # type: ignore[arg-type]
    assert [*map(str, grouped[r"^\d"])] == ["0", "1", "2"]  # type: ignore[arg-type]
    refused(path, "Did you mean 'Patient'?", group="pateint")


@settings(max_examples=150, deadline=None)
@given(st.text('pathlbe,;\t|\n\r"01 .ngx\0\u00fc') | st.text("01.,png\n").map(lambda rest: f"path,label\n{rest}"))
def test_any_table_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("table") / "labels.csv"
    path.write_bytes(content.encode("utf-8" if len(content) % 2 else "cp1252"))
    with suppress(WeftError):
        open_source(str(path))


# Fingerprints, joining, columns


def test_fingerprint_sees_names_sizes_and_labels_not_times(tmp_path):
    tree(tmp_path, "a/1.png", "a/2.png", "b/1.png")

    def now() -> str:
        return fingerprint(open_source(str(tmp_path)))

    seen = {now()}
    os.utime(tmp_path / "a/1.png", (0, 0))
    assert now() in seen
    for change in (
        lambda: (tmp_path / "a/1.png").write_bytes(b"longer" * 100),
        lambda: (tmp_path / "a/1.png").rename(tmp_path / "a/3.png"),
        lambda: (tmp_path / "a/2.png").rename(tmp_path / "b/2.png"),
        lambda: (tmp_path / "b/2.png").unlink(),
    ):
        change()
        assert now() not in seen
        seen.add(now())


def test_fingerprint_of_many_files_looks_at_some(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STATED_FILES", 3)
    source = open_source(str(tree(tmp_path, *(f"{label}/{i}.png" for label in "ab" for i in range(4)))))
    asked = []
    size = sources._size
    monkeypatch.setattr(sources, "_size", lambda path: asked.append(path) or size(path))
    fingerprint(source)
    assert len(asked) == 3


def test_join_maps_classes_by_name(tmp_path):
    tree(tmp_path, *(f"t/{label}/{i}.png" for label in "abc" for i in range(2)), "v/c/0.png", "v/a/0.png")
    joined = join(open_source(str(tmp_path / "t")), open_source(str(tmp_path / "v")))
    assert len(set(joined.names)) == 8
    split = make_split(joined, DataConfig(), 0)
    assert [joined.classes[joined.labels[i]] for i in split.val] == ["a", "c"]
    assert [joined.open(i) for i in split.val] == [tmp_path / "v/a/0.png", tmp_path / "v/c/0.png"]
    assert len(split.train) == 6
    assert fingerprint(joined)
    tree(tmp_path, "v/A/0.png", "v/d/0.png")
    with pytest.raises(WeftError, match="training does not have: 'A', 'd'"):
        join(open_source(str(tmp_path / "t")), open_source(str(tmp_path / "v")))


def test_join_takes_the_validation_pictures_of_both_kinds(tmp_path):
    tree(tmp_path, *(f"t/{split}/{label}/0.png" for split in ("train", "val", "test") for label in "ab"))
    sharded(tmp_path / "v", 2, prefix="val")
    (tmp_path / "v/classes.txt").write_text("a\nb")
    joined = join(open_source(str(tmp_path / "t")), open_source(str(tmp_path / "v")))
    assert [(joined.splits == split).sum() for split in ("train", "val", "test")] == [2, 10, 2]
    assert "2 validation pictures" in " ".join(joined.notes)
    assert joined.blocks is not None
    assert len(joined.blocks) == len(joined) == 14
    assert joined.open(13) == png(9)


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_names_are_a_list_of_strings(texts):
    names = pickle.loads(pickle.dumps(Names(texts)))
    assert list(names) == texts
    assert [names[i] for i in range(len(names))] == texts
    assert names[-2:] == texts[-2:]
    with pytest.raises(IndexError):
        names[len(texts)]


def test_the_demo():
    source = open_source("demo:fashion")
    assert [(source.splits == split).sum() for split in ("train", "val", "test")] == [6000, 1000, 0]
    assert np.shape(source.open(6999)) == (28, 28)
    assert len(source.classes) == 10


def test_json_of_a_split_is_small_and_legible(tmp_path):
    source = open_source("demo:fashion")
    save_split(make_split(source, DataConfig(), 0), source, tmp_path / "split.json")
    content = json.loads((tmp_path / "split.json").read_text())
    assert content["rest"] == "train"
    assert content["val"]["val/"][:2] == ["0", "1"]
