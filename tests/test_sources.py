"""Every layout of data: what is read is what torchvision and tarfile read, and what is wrong is said in one line."""

import io
import json
import os
import pickle
import tarfile
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import datasets

from weft.config import DataConfig
from weft.data import shards, sources
from weft.data.sources import Names, evaluated, fingerprint, join, natural, open_source
from weft.data.split import load_split, make_split, save_split
from weft.errors import WeftError


def picture(path: Path, colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (colour % 256, 10, 20)).save(path, "PNG")
    return path


def tree(root: Path, *paths: str) -> Path:
    """Files under `root`; a path that ends with / is an empty folder."""
    for i, path in enumerate(paths):
        if path.endswith("/"):
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            picture(root / path, i)
    return root


def table(root: Path, text: str, name: str = "labels.csv", encoding: str = "utf-8") -> str:
    tree(root, *(f"{i}.png" for i in range(4)))
    (root / name).write_bytes(text.encode(encoding))
    return str(root / name)


def pairs(source) -> dict[str, str]:
    return {name: source.classes[label] for name, label in zip(source.names, source.labels, strict=True)}


def refused(source, *words: str, **options) -> str:
    """Opening fails with one line that has all `words`."""
    with pytest.raises(WeftError) as error:
        open_source(str(source), **options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


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
        (("a/1.png", "A/1.png"), "'A', 'a' differ only by case"),
        (("a/1.png", "a /1.png"), "'a', 'a ' differ only by case"),
        (("a/1.png", "b/1.png", "lies.png"), "1 pictures that lie beside"),
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
        (("1.png", "2.png"), ("holds 2 pictures and no class folders", "CSV")),
        (("train/1.png", "val/1.png"), ("train holds 1 pictures and no class folders",)),
        (("images/1.png", "masks/1.png"), ("segmentation or detection", "masks/")),
        (("train/images/1.png", "train/labels/1.png"), ("segmentation or detection", "labels/")),
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
        ("1.png", ("one picture",)),
        ("data.parquet", ("no data Weft reads",)),
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
    with pytest.raises(WeftError, match="one class only"):
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
    assert "1 broken links" in " ".join(source.notes)


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
    assert "1 pictures have no group" in " ".join(source.notes)
    refused(tmp_path, "matches no name", group="patient")
    refused(tmp_path, "no regular expression", group="(")


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
    assert "1 rows are there twice" in " ".join(source.notes)
    assert "2 rows without" in " ".join(source.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,label\n0.png,a\n9.png,b", ("1 of 2 files do not exist", "9.png")),
        ("path,label\n0.png,a\n0.png,b", ("0.png has different labels", "|")),
        ("path,label,split\n0.png,a,train\n0.png,a,val", ("0.png is in 'train' and in 'val'",)),
        ("path,label,split\n0.png,a,holdout", ("'holdout' is none of",)),
        ("path,label\n0.png,a,b", ("row 2 has 3 cells", "quotes")),
        ("0.png,a\n1.png,b", ("first line must name the columns",)),
        ("path,size\n0.png,5", ("none called label",)),
        ("path,label\n", ("has no rows",)),
        ("path,label\n0.png,\0", ("is no text",)),
    ],
)
def test_wrong_tables(tmp_path, text, words):
    refused(table(tmp_path, text), *words)


def test_a_few_missing_files_are_left_out(tmp_path):
    tree(tmp_path, *(f"p/{i}.png" for i in range(200)))
    rows = [f"p/{i}.png,{i % 2}" for i in range(202)]
    source = open_source(table(tmp_path, "\n".join(["path,label", *rows])))
    assert len(source) == 200
    assert "2 files do not exist" in " ".join(source.notes)


def test_group_columns(tmp_path):
    path = table(tmp_path, "path,label,Patient,group\n0.png,a,x,g\n1.png,b,x,h\n2.png,b,,h")
    grouped = {name: open_source(path, group=name).groups for name in ("", "patient", r"^\d")}
    assert [*map(str, grouped[""])] == ["g", "h", "h"]  # type: ignore[arg-type]
    assert len(set(grouped["patient"])) == 2  # type: ignore[arg-type]
    assert [*map(str, grouped[r"^\d"])] == ["0", "1", "2"]  # type: ignore[arg-type]
    refused(path, "Did you mean 'Patient'?", group="pateint")


# Shards


def write_shard(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


member_names = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0/\\.:", exclude_categories=["Cs"]), min_size=1).map(
        lambda name: name * (1 + 150 // len(name.encode())) if len(name) % 3 == 0 else name
    ),
    min_size=1,
    max_size=6,
    unique=True,
)


@settings(max_examples=60, deadline=None)
@given(member_names, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.data())
def test_headers_are_read_as_tarfile_reads_them(tmp_path_factory, names, format, data):
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 511, 512, 513, 9000]), min_size=len(names), max_size=len(names)))
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write_shard(
        path, {f"{n}.jpg": bytes([i + 1]) * s for i, (n, s) in enumerate(zip(names, sizes, strict=True))}, format
    )
    with open(path, "rb", buffering=0) as file, tarfile.open(path) as peer:
        found = list(shards._members(path, shards.Window(file)))
        assert found == [(info.name, info.offset_data, info.size) for info in peer if info.isreg()]


def test_folders_links_and_long_prefixes(tmp_path):
    path = tmp_path / "a.tar"
    picture(tmp_path / "in" / "d" / ("p" * 90) / ("q" * 60 + ".png"))
    (tmp_path / "in/link.png").symlink_to("d")
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(tmp_path / "in", arcname="in")
    with open(path, "rb", buffering=0) as file, tarfile.open(path) as peer:
        found = list(shards._members(path, shards.Window(file)))
        assert found == [(info.name, info.offset_data, info.size) for info in peer if info.isreg()]
        assert len(found) == 1


def png(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


LABELLED = {
    "cls numbers": ({"cls": [b"0", b"2\n"]}, ["0", "1", "2"], [0, 2]),
    "cls names": ({"cls": [b"dog", b"cat"]}, ["cat", "dog"], [1, 0]),
    "json numbers": ({"json": [b'{"label": 1}', b'{"label": 0, "x": 1}']}, ["0", "1"], [1, 0]),
    "json names": ({"json": [b'{"class": "b"}', b'{"class": "a"}']}, ["a", "b"], [1, 0]),
    "txt": ({"txt": [b"b", b"a"]}, ["a", "b"], [1, 0]),
    "cls before json": ({"json": [b'{"label": 1}', b"{}"], "cls": [b"0", b"1"]}, ["0", "1"], [0, 1]),
    "several": ({"json": [b'{"labels": ["a", "b"]}', b'{"labels": []}']}, ["a", "b"], [[True, True], [False, False]]),
}


@pytest.mark.parametrize("kind", LABELLED)
def test_labels_of_shards(tmp_path, kind):
    labels, classes, expected = LABELLED[kind]
    members = {f"k{i}.PNG": png(i) for i in range(2)}
    members |= {f"k{i}.{ending}": contents[i] for ending, contents in labels.items() for i in range(2)}
    write_shard(tmp_path / "s.tar", members)
    source = open_source(str(tmp_path / "s.tar"))
    assert source.classes == classes
    assert source.labels.tolist() == expected
    assert list(source.names) == ["s.tar/k0.PNG", "s.tar/k1.PNG"]
    assert [source.open(i) for i in range(2)] == [png(0), png(1)]


def test_classes_beside_the_shards(tmp_path):
    write_shard(tmp_path / "s.tar", {"a.png": png(0), "a.cls": b"1", "b.png": png(1), "b.cls": b"-1"})
    (tmp_path / "classes.txt").write_text("cat\ndog\nowl\n")
    source = open_source(str(tmp_path))
    assert (source.classes, source.labels.tolist()) == (["cat", "dog", "owl"], [1])
    assert "1 pictures without a label" in " ".join(source.notes)
    (tmp_path / "classes.txt").write_text("cat\n")
    refused(tmp_path, "class 1 does not fit 1 names")


def sharded(root: Path, shards_: int = 4, each: int = 5, prefix: str = "train") -> Path:
    for s in range(shards_):
        keys = range(s * each, (s + 1) * each)
        members = {f"{k:03}.{end}": value for k in keys for end, value in (("png", png(k)), ("cls", b"%d" % (k % 2)))}
        write_shard(root / f"{prefix}-{s:04}.tar", members)
    return root


def test_splits_patterns_and_blocks(tmp_path):
    sharded(sharded(tmp_path), 1, prefix="validation")
    source = open_source(str(tmp_path))
    assert source.layout == "5 tar shards (4 train, 1 val)"
    assert source.blocks is not None
    assert np.array_equal(source.blocks, np.repeat(range(5), 5))
    assert source.splits.tolist() == ["train"] * 20 + ["val"] * 5
    assert len(open_source(f"{tmp_path}/train-{{0000..0002}}.tar")) == 15
    assert len(open_source(f"{tmp_path}/train-000{{1,3}}.tar")) == 10
    assert open_source(f"{tmp_path}/train-*.tar").names[0] == "train-0000.tar/000.png"
    refused(f"{tmp_path}/train-{{0000..0009}}.tar", "there is no", "train-0004.tar")
    refused(f"{tmp_path}/nothing-*.tar", "there is no")


def test_archives_beside_class_folders_are_no_shards(tmp_path):
    tree(tmp_path, "train/a/1.png", "train/b/1.png")
    sharded(tmp_path, 1, prefix="val")
    assert open_source(str(tmp_path)).layout == "class folders under train/"
    sharded(sharded(tmp_path / "s/train") / "../val", 1)
    source = open_source(str(tmp_path / "s"))
    assert source.names[0] == "train/train-0000.tar/000.png"
    assert source.splits.tolist() == ["train"] * 20 + ["val"] * 5


def _opened(source) -> list[bytes]:
    return [source.open(i) for i in range(len(source))]


def test_shards_in_worker_processes(tmp_path):
    source = open_source(str(sharded(tmp_path)))
    here = _opened(source)
    assert here == [png(k) for k in range(20)]
    with get_context("fork").Pool(2) as pool:  # it inherits open files, whose positions it must not share
        assert pool.map(_opened, [source] * 8) == [here] * 8
    assert _opened(pickle.loads(pickle.dumps(source))) == here  # as spawned processes get it


def test_the_index_is_kept_and_made_again_when_a_shard_changes(tmp_path, monkeypatch):
    sharded(tmp_path, 2)
    first, calls = open_source(str(tmp_path)), []
    read = shards._index
    monkeypatch.setattr(shards, "_index", lambda path: calls.append(path.name) or read(path))
    again = open_source(str(tmp_path))
    assert not calls
    assert (list(again.names), again.labels.tolist()) == (list(first.names), first.labels.tolist())
    write_shard(tmp_path / "train-0001.tar", {"new.png": png(3), "new.cls": b"1"})
    assert "train-0001.tar/new.png" in open_source(str(tmp_path)).names
    assert calls == ["train-0001.tar"]
    for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.npz"):
        file.write_bytes(b"broken")
    assert len(open_source(str(tmp_path))) == 6


def test_without_a_writable_cache_shards_are_read_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(open_source(str(sharded(tmp_path / "s")))) == 20


@pytest.mark.parametrize("name", ["../out.png", "/etc/out.png", "a/../../out.png", "..\\out.png", "C:\\out.png"])
def test_members_that_point_out_of_the_archive_are_refused(tmp_path, name):
    refused(write_shard(tmp_path / "s.tar", {name: png(0), "a.cls": b"0"}), "is refused", "points out of the archive")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3600), st.integers(0, 255)), max_size=4), st.integers(0, 3600), st.booleans())
def test_any_damage_is_survived_or_told(tmp_path_factory, changes, end, mended):
    path = tmp_path_factory.mktemp("tar") / "s.tar"
    write_shard(path, {"\u00fc" * 120 + ".png": b"1", "b.cls": b"0", "b.png": b"22"})
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[place] = value
    for start in range(0, 3584, 512) if mended else ():  # with the right sums again, so that the rest is looked at
        total = sum(content[start : start + 148]) + 256 + sum(content[start + 156 : start + 512])
        content[start + 148 : start + 156] = b"%06o\0 " % total
    path.write_bytes(content[:end] if end % 2 else content)
    with suppress(WeftError):
        _opened(open_source(str(path)))


@settings(max_examples=150, deadline=None)
@given(st.text('pathlbe,;\t|\n\r"01 .ngx\0\u00fc') | st.text("01.,png\n").map(lambda rest: f"path,label\n{rest}"))
def test_any_table_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("table") / "labels.csv"
    path.write_bytes(content.encode("utf-8" if len(content) % 2 else "cp1252"))
    with suppress(WeftError):
        open_source(str(path))


def test_damaged_shards(tmp_path):
    good = write_shard(tmp_path / "s.tar", {"a.cls": b"0", "a.png": bytes(5000)}).read_bytes()
    cases = {
        "is cut off": good[:4000],
        "no tar file, or is damaged at byte 0": b"hello" * 400,
        "is damaged at byte 1024": good[:1030] + b"x" + good[1031:],
        "is an empty file": b"",
        "holds no pictures": bytes(10240),
    }
    for i, (words, content) in enumerate(cases.items()):
        (tmp_path / f"{i}.tar").write_bytes(content)
        refused(tmp_path / f"{i}.tar", words)
    refused(write_shard(tmp_path / "n.tar", {"a.png": b"1"}), "no picture has a label")


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_compressed_shards_are_refused(tmp_path, mode):
    with tarfile.open(tmp_path / "s.tar", f"w:{mode}") as tar:
        tar.addfile(tarfile.TarInfo("a.png"))
    refused(tmp_path / "s.tar", "is compressed", "plain .tar")
    (tmp_path / "f").mkdir()
    (tmp_path / "s.tar").rename(tmp_path / f"f/s.tar.{mode}")
    refused(tmp_path / "f", "is compressed")


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
