"""Whatever can be named as data is opened or refused in one line; a second source validates."""

import pytest

from tests.helpers.made_data import png, refused, sharded, table, tree, write_shard
from weft.config import DataConfig
from weft.data.sources.open import join, open_source
from weft.data.sources.source import evaluated, fingerprint
from weft.data.split import make_split
from weft.errors import WeftError


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
