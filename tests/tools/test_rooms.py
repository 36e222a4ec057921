"""The picture of the rooms is that of the code, and shows what points the wrong way."""

import re
from xml.etree import ElementTree

from tests.helpers.places import ROOT
from tools.layers import LAYERS, find_references
from tools.rooms import WRONG, draw

SVG = "{http://www.w3.org/2000/svg}"


def uses(svg: str) -> dict[tuple[str, str], int]:
    """What the numbers of a picture say to those who point at them."""
    titles = [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")][1:]
    found = [re.fullmatch(r"(\w+) uses (\w+): (\d+)", title) for title in titles]
    return {(match[1], match[2]): int(match[3]) for match in found if match}


def test_picture_is_that_of_the_code():
    """Who uses whom; how often is as it was when the picture was drawn, so that not every import makes it stale."""
    stored = (ROOT / "docs" / "pictures" / "rooms.svg").read_text(encoding="utf-8")
    assert uses(stored).keys() == uses(draw()).keys(), "stale: run `python -m tools.rooms`"


def test_every_room_and_every_use_is_drawn():
    svg = draw()
    shown = uses(svg)
    references = find_references()
    assert sum(shown.values()) == len(references)
    for room in ("run", "data", "models", "kernels"):
        below = {target for origin, target in shown if origin == room}
        assert below == {one.target for one in references if one.origin == room}
    assert shown["weft", "cli"] == 1  # in __main__.py, which is part of the façade
    boxes = [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("class") == "box"]
    drawn = {text.text for box in boxes for text in box.iter(f"{SVG}text")}
    assert drawn == {"weft", *(room for layer in LAYERS[:-1] for room in layer)}


def test_wrong_ways_are_red(tmp_path):
    root = tmp_path / "weft"
    for room in ("data", "models", "tasks"):
        (root / room).mkdir(parents=True)
        (root / room / "__init__.py").touch()
    (root / "__init__.py").touch()
    (root / "tasks" / "task.py").write_text("from weft.data import read\nfrom weft.data import split")
    assert uses(draw(root)) == {("tasks", "data"): 2}
    assert WRONG not in draw(root)
    (root / "data" / "read.py").write_text("from weft.tasks import task")
    assert draw(root).count(f'fill="{WRONG}" stroke') == 1
    (root / "data" / "read.py").write_text("from weft.models import base")  # a neighbour
    assert draw(root).count(f'fill="{WRONG}" stroke') == 1
