"""The bar of a step's time is that of the results, and its parts are as long as they take."""

import json
from xml.etree import ElementTree

import pytest

from tools.step_parts import PARTS, PICTURE, ROOT, WIDTH, draw

RESULTS = max((ROOT / "benchmarks" / "results").glob("train_step-*.json"))
SVG = "{http://www.w3.org/2000/svg}"


def test_picture_is_that_of_the_results():
    expected = draw(json.loads(RESULTS.read_text()))
    assert PICTURE.read_text() == expected, "stale: run `python -m tools.step_parts`"


def test_parts_are_as_long_as_they_take():
    made = {"rows": [{"model": "a", "milliseconds": dict(zip(PARTS, (6.0, 2.0, 1.0, 1.0), strict=True))}]}
    bars = [
        rect for rect in ElementTree.fromstring(draw(made)).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None
    ]
    assert [float(bar.attrib["width"]) for bar in bars] == pytest.approx([0.6 * WIDTH, 0.2 * WIDTH, 52, 52], abs=0.1)
