"""Files that name the classes of masks."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_masks import INDEX, tree
from weft.data.masks.classes import read_classes
from weft.data.masks.folders import open_masks
from weft.data.read import BadPicture
from weft.errors import WeftError


@pytest.mark.parametrize(
    ("name", "text", "names", "values"),
    [
        ("c.txt", "sky\ntraffic light\nclass 3\n", ["sky", "traffic light", "class 3"], [0, 1, 2]),
        ("c.txt", "0 sky\n7: traffic light\n", ["sky", "traffic light"], [0, 7]),
        ("c.tsv", "sky\t3\nroad\t4\n", ["sky", "road"], [3, 4]),
        ("c.csv", "class,id\nsky,3\nroad,4\n", ["sky", "road"], [3, 4]),
        ("c.txt", "64 128 64\tAnimal\n192 0 128\t\tBig Arch\n", ["Animal", "Big Arch"], [0x408040, 0xC00080]),
        ("c.csv", '"name","r","g","b"\n"Animal",64,128,64\n', ["Animal"], [0x408040]),
        ("labelmap.txt", "# label:color_rgb:parts:actions\nAnimal:64,128,64::\n", ["Animal"], [0x408040]),
        ("c.txt", "\ufeffsky\r\nroad\r\n\r\n", ["sky", "road"], [0, 1]),
        ("c.json", ["sky", "road"], ["sky", "road"], [0, 1]),
        ("c.json", {"sky": 3, "road": 1}, ["sky", "road"], [3, 1]),
        ("c.json", {"sky": [0, 0, 255]}, ["sky"], [255]),
        ("c.json", {"labels": {"0": "background", "1": "liver"}}, ["background", "liver"], [0, 1]),
        ("c.json", {"labels": {"background": 0, "liver": 1}}, ["background", "liver"], [0, 1]),
        ("c.json", [{"name": "sky", "id": 4}, {"name": "road", "id": 2}], ["sky", "road"], [4, 2]),
        ("c.json", {"categories": [{"name": "sky", "id": 4, "color": [0, 1, 0]}]}, ["sky"], [256]),
    ],
)
def test_class_file(tmp_path: Path, name: str, text, names: list[str], values: list[int]) -> None:
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    found = read_classes(tmp_path / name)
    assert (found.names, found.values) == (names, values)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.txt", "", "names no classes"),
        ("c.txt", "sky\nsky\n", "class more than once: 'sky'"),
        ("c.txt", "1 sky\n1 road\n", "value more than once: '1'"),
        ("c.txt", "1 sky\n300 road\n", "'road' is not between 0 and 255"),
        ("c.txt", "1 2 300 sky\n", "'sky' is not three numbers"),
        ("c.json", "{", "not a valid JSON"),
        ("c.json", '{"sky": 1.5}', "'sky': 1.5 is not a class"),
        ("c.json", '{"sky": [1, 2]}', "three numbers"),
        ("c.json", '{"sky": 1, "road": [1, 2, 3]}', "give all of them the same"),
        ("c.json", "3", "names no classes"),
    ],
)
def test_class_files_that_are_wrong(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    tree(tmp_path, "images/a.jpg masks/a.png")
    with pytest.raises(WeftError, match=re.escape(words)):
        open_masks(str(tmp_path), classes=name)
    with pytest.raises(WeftError, match="is not a file"):
        open_masks(str(tmp_path), classes="nowhere.txt")


def test_names_that_are_ignored(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png")
    (tmp_path / "classes.txt").write_text("background\nUn_labelled\nroad\nvoid\n".replace("Un_", "Un"))
    source = open_masks(str(tmp_path))
    assert source.classes == ["background", "road"]
    assert any("Ignored by name: 'Unlabelled', 'void'" in note for note in source.notes)
    np.testing.assert_array_equal(source.target(0), np.select([INDEX == 0, INDEX == 2], [0, 1], 255))


def test_names_for_values_with_gaps(tmp_path: Path) -> None:
    values = np.array([[0, 128, 200, 128, 255]] * 3, np.uint8)
    tree(tmp_path, "images/a.jpg masks/a.png", values=values)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    source = open_masks(str(tmp_path))
    np.testing.assert_array_equal(source.target(0)[0], [0, 1, 2, 1, 255])
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")  # four names for three values: which is not clear
    with pytest.raises(BadPicture, match="128 in 6 pixels and 200 in 3 pixels are not classes"):
        open_masks(str(tmp_path)).target(0)
