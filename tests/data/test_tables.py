"""Tables of paths and labels."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.made_data import pairs, refused, table, tree
from weft.data.sources.open import open_source
from weft.errors import WeftError


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
