"""Tar shards: read as tarfile reads them, at offsets that are kept, and refused where they are damaged."""

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

from tests.helpers.made_data import picture, png, refused, sharded, tree, write_shard
from weft.data.sources import shards
from weft.data.sources.open import open_source
from weft.errors import WeftError

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
        found = list(shards._members(path, shards.ReadAhead(file)))
        assert found == [(info.name, info.offset_data, info.size) for info in peer if info.isreg()]


def test_folders_links_and_long_prefixes(tmp_path):
    path = tmp_path / "a.tar"
    picture(tmp_path / "in" / "d" / ("p" * 90) / ("q" * 60 + ".png"))
    (tmp_path / "in/link.png").symlink_to("d")
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(tmp_path / "in", arcname="in")
    with open(path, "rb", buffering=0) as file, tarfile.open(path) as peer:
        found = list(shards._members(path, shards.ReadAhead(file)))
        assert found == [(info.name, info.offset_data, info.size) for info in peer if info.isreg()]
        assert len(found) == 1


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
    assert "1 picture without a label" in " ".join(source.notes)
    (tmp_path / "classes.txt").write_text("cat\n")
    refused(tmp_path, "has the class 1, but")


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
    refused(write_shard(tmp_path / "s.tar", {name: png(0), "a.cls": b"0"}), "is refused", "points outside the archive")


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


def test_damaged_shards(tmp_path):
    good = write_shard(tmp_path / "s.tar", {"a.cls": b"0", "a.png": bytes(5000)}).read_bytes()
    cases = {
        "is cut off": good[:4000],
        "not a tar file, or is damaged at byte 0": b"hello" * 400,
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
