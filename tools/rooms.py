"""Draws the rooms of the package and who uses whom, read off the code: docs/pictures/rooms.svg, shown in CONTRIBUTING.

    python -m tools.rooms [--out docs/pictures]

Rooms stand on stairs, the highest layer first. What a room uses hangs on the line below it: a number says how many
statements name the room on whose row it lies. Nothing is drawn above the stairs as long as all of them point downwards;
what does not is red.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from tools.layers import FACADE, LAYERS, PACKAGE, find_references
from tools.sheet import GREY, INK, PANEL, Sheet, width, wrap

LEFT, TOP = 32, 132
STEP, ROW, BOX = 45, 42, 28  # from stair to stair, across and down; how high a box is
GAP = 6  # between layers
WORDS = 170  # room for what a room is for
WIRE, WRONG = "#9AA7B8", "#C0392B"
SHADES = ((1, "#E8EFF8"), (4, "#C6DAEE"), (10, "#8DB8DC"), (25, "#2F7FB8"))  # of at least so many statements


class Stairs:
    """Rooms from the upper left to the lower right, and the lines between them."""

    def __init__(self, sheet: Sheet, package: Path):
        self.sheet, self.package = sheet, package
        self.top, *layers = reversed(LAYERS)
        self.rooms = [FACADE, *(room for layer in layers for room in layer)]
        self.layers = [{FACADE: "`import weft`, `python -m weft`"}, *layers]
        self.words = {room: words for layer in self.layers for room, words in layer.items()}
        self.uses = Counter((self._drawn(one.origin), self._drawn(one.target)) for one in find_references(package))
        self.x = {room: LEFT + 14 + STEP * k for k, room in enumerate(self.rooms)}
        self.y: dict[str, float] = {}  # the middles of the boxes
        for number, layer in enumerate(self.layers):
            for room in layer:
                self.y[room] = TOP + ROW * (len(self.y) + 0.5) + GAP * number
        self.wide = LEFT + 14 + STEP * len(self.rooms) + 50 + WORDS + LEFT
        self.bottom = self.y[self.rooms[-1]] + ROW / 2

    def _drawn(self, room: str) -> str:
        """The façade is one box, of several modules."""
        return FACADE if room in self.top else room

    def draw(self) -> None:
        for layer in self.layers:
            first, last = next(iter(layer)), [*layer][-1]
            top, bottom = self.y[first] - ROW / 2, self.y[last] + ROW / 2
            self.sheet.rect(LEFT, top, self.wide - 2 * LEFT, bottom - top, PANEL, None, 8, layer=0)
        for room in self.rooms:
            self._lines(room)
        for room in self.rooms:
            self._room(room)
        for (origin, target), count in sorted(self.uses.items()):
            self._count(origin, target, count)

    def _lines(self, room: str) -> None:
        """Down from a room to what it uses, and along its own row from those that use it."""
        x, y = self.x[room] + 22, self.y[room]
        used = [self.y[target] for origin, target in self.uses if origin == room]
        for end in {max(used, default=y), min(used, default=y)} - {y}:
            self.sheet.line([(x, y), (x, end)], WIRE if end > y else WRONG)
        users = [self.x[origin] + 22 for origin, target in self.uses if target == room]
        if users and min(users) < x:
            self.sheet.line([(min(users), y), (self.x[room], y)], WIRE, arrow=True)
        if users and max(users) > x:
            self.sheet.line([(max(users), y), (self.x[room] + self._wide(room), y)], WRONG, arrow=True)

    def _wide(self, room: str) -> float:
        return max(44, width(room, 13, bold=True) + 20)

    def _room(self, room: str) -> None:
        x, y, wide = self.x[room], self.y[room], self._wide(room)
        with self.sheet.box(x, y - BOX / 2, wide, BOX, "#FFFFFF", INK, 8, group="box"):
            self.sheet.text(x + wide / 2, y + 4.5, room, 13, INK, bold=True, anchor="middle")
        left = x + wide + 12
        lines = wrap(self.words[room].replace("`", ""), 11.5, self.wide - LEFT - 8 - left)
        for k, line in enumerate(lines):
            self.sheet.text(left, y + 4 + 14 * (k - (len(lines) - 1) / 2), line, 11.5, GREY)

    def _count(self, origin: str, target: str, count: int) -> None:
        x, y = self.x[origin] + 22, self.y[target]
        wrong = self.y[target] <= self.y[origin] or any({origin, target} <= {*layer} for layer in self.layers)
        shade = WRONG if wrong else [colour for least, colour in SHADES if count >= least][-1]
        dark = shade in (WRONG, SHADES[-1][1])
        wide = max(24, width(str(count), 11, bold=True) + 12)
        with self.sheet.box(x - wide / 2, y - 10, wide, 20, shade, WRONG if wrong else WIRE, 10, group="cell"):
            self.sheet.layers[2].append(f"<title>{origin} uses {target}: {count}</title>")
            self.sheet.text(x, y + 4, str(count), 11, "#FFFFFF" if dark else INK, bold=True, anchor="middle")


def draw(package: Path = PACKAGE) -> str:
    """The picture as SVG."""
    sheet = Sheet("The rooms of Weft, and which of them use which", "rooms")
    stairs = Stairs(sheet, package)
    sheet.text(LEFT + 4, 58, "The rooms of Weft", 26, INK, bold=True)
    sheet.text(LEFT + 4, 84, "Each line goes down from a room to the rooms that it uses.", 13, INK)
    reading = (
        "Numbers: in how many statements, those inside functions and for types included. Rooms on one ground: a layer."
    )
    sheet.text(LEFT + 4, 106, reading, 13, GREY)
    stairs.draw()
    return sheet.svg(stairs.wide, stairs.bottom + 28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGE.parent / "docs" / "pictures")
    path = parser.parse_args().out / "rooms.svg"
    path.write_text(draw(), encoding="utf-8")
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
