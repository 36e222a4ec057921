"""Columns of a source: names, natural order, fingerprints."""

import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.made_data import tree
from weft.data.sources import source as sources
from weft.data.sources.open import open_source
from weft.data.sources.source import Names, fingerprint, natural


@given(st.lists(st.text(max_size=6), unique=True), st.randoms())
def test_natural_order_is_total(names, random):
    expected = sorted(names, key=natural)
    random.shuffle(names)
    assert sorted(names, key=natural) == expected


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


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_names_are_a_list_of_strings(texts):
    names = pickle.loads(pickle.dumps(Names(texts)))
    assert list(names) == texts
    assert [names[i] for i in range(len(names))] == texts
    assert names[-2:] == texts[-2:]
    with pytest.raises(IndexError):
        names[len(texts)]
