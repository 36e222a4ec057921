"""Boxes from VOC's XML files."""

from pathlib import Path

import pytest

from tests.helpers.made_boxes import pictures, voc_object, voc_xml
from weft.data.boxes.coco import open_boxes, recognise


@pytest.mark.parametrize(
    ("xml", "folder", "lists", "splits"),
    [
        ("Annotations/{}.xml", "JPEGImages", True, ["train", "val"]),
        ("VOCdevkit/VOC2007/Annotations/{}.xml", "VOCdevkit/VOC2007/JPEGImages", True, ["train", "val"]),
        ("VOC2012/Annotations/{}.xml", "VOC2012/JPEGImages", False, ["", ""]),
        ("annotations/{}.xml", "images", False, ["", ""]),
        ("train/{}.xml", "train", False, ["train", "train"]),
        ("{}.xml", "", False, ["", ""]),
    ],
)
def test_layouts_of_voc(tmp_path, xml, folder, lists, splits):
    pictures(tmp_path / folder, "2.png", "10.png")
    (tmp_path / xml).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / xml.format(2)).write_text(voc_xml(voc_object("dog10", 1, 1, 20, 10), voc_object("dog2", 3, 4, 6, 8)))
    (tmp_path / xml.format(10)).write_text(voc_xml(voc_object("dog2", 2, 2, 5, 5, "<difficult>1</difficult>")))
    if lists:
        main = tmp_path / xml.partition("Annotations")[0] / "ImageSets/Main"
        main.mkdir(parents=True)
        for name, stems in {"train": "2", "val": "10", "trainval": "2\n10", "dog_train": "10 -1"}.items():
            (main / f"{name}.txt").write_text(f"{stems}\n")
    assert recognise(tmp_path) == "voc"
    source = open_boxes(str(tmp_path))
    assert [Path(name).name for name in source.names] == ["2.png", "10.png"]
    assert source.splits.tolist() == splits
    assert source.classes == ["dog2", "dog10"]
    assert source.target(0).boxes.tolist() == [[0, 0, 20, 10], [2, 3, 6, 8]]  # VOC counts from 1 and includes the last
    assert source.target(0).labels.tolist() == [1, 0]
    assert source.target(1).crowd.tolist() == [True]
    assert source.labels.tolist() == [[True, True], [False, False]]
    assert not source.targets.has_shapes


def test_boxes_that_begin_at_zero_count_from_zero(tmp_path):
    pictures(tmp_path, "a.png")
    (tmp_path / "a.xml").write_text(voc_xml(voc_object("dog", 0, 2, 7, 8), size=""))
    source = open_boxes(str(tmp_path))
    assert source.target(0).boxes.tolist() == [[0, 2, 7, 8]]
    assert source.target(0).size == (10, 20)


BOMB = '<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb"><!ENTITY c "&b;&b;&b;&b;&b;">]>' + voc_xml(voc_object("&c;", 1, 1, 9, 9))


SPY = '<!DOCTYPE a [<!ENTITY b SYSTEM "{}">]>' + voc_xml(voc_object("&b;", 1, 1, 9, 9)).replace("{", "{{")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("text", [BOMB, SPY, "<annotation>", "no XML", voc_xml(voc_object("&nbsp;", 1, 1, 9, 9))])
def test_hostile_xml_is_left_out(tmp_path, text, encoding):
    pictures(tmp_path, "a.png", "b.png")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tmp_path / "a.xml").write_text(voc_xml(voc_object("dog", 1, 1, 9, 9)))
    (tmp_path / "b.xml").write_bytes(text.replace("{}", secret.as_uri()).encode(encoding))
    source = open_boxes(str(tmp_path))
    assert source.classes == ["dog"]
    assert list(source.names) == ["a.png"]
    assert source.targets.faults.named["malformed"].keys() == {"b.xml"}
