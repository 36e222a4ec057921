"""YAML and JSON from anybody: one line for whatever is wrong; JSON that other programs read."""

import json
import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from weft.documents import DEEPEST, NestedTooDeeply, parse_json, parse_yaml, read_json, read_yaml, to_json
from weft.errors import WeftError


@pytest.mark.parametrize("read", [parse_json, parse_yaml])
@pytest.mark.parametrize("levels", [DEEPEST + 1, 3_000, 100_000])
def test_nesting_has_a_limit(read: Callable[[str, str], Any], levels):
    levels = min(levels, 1_000) if read is parse_yaml else levels  # which is slow
    with pytest.raises(NestedTooDeeply, match=r"^the file is nested"):
        read("[" * levels + "]" * levels, "the file")
    assert read("[" * (DEEPEST - 1) + "]" * (DEEPEST - 1), "the file")[0]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_json, ""),
        (parse_json, '{"a": 1'),
        (parse_json, "9" * 5000),  # more digits than Python reads
        (parse_yaml, "a: b: c"),
        (parse_yaml, "a: 2020-13-45"),  # a date that is none
        (parse_yaml, "a: " + "9" * 5000),
        (parse_yaml, "!!python/object/apply:os.system [true]"),
        (parse_yaml, "a: &a [*a]"),
        (parse_yaml, "a: \x07"),
    ],
)
def test_what_is_no_document_gets_one_line(read, text):
    with pytest.raises(WeftError, match=r"^the file is") as error:
        read(text, "the file")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_only_text_files_are_read(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00\x81")
    for name in ("pipe", "noise"):
        with pytest.raises(WeftError, match=name):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


def test_json_has_no_nan():
    content = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": True}
    assert json.loads(to_json(content)) == {"a": [1.5, None, [None, {"b": None}]], "c": True}
    assert to_json([1, 2.5], indent=1) == json.dumps([1, 2.5], indent=1)
