"""Draws models, as they are and not as somebody remembers them: one SVG per model, read off the live modules.

    python -m tools.draw [MODEL ...] [--out docs/pictures]

Without names, every picture of a model that is in the folder is drawn again. On the left the way from the picture to
the logits; on the right the inside of each kind of block, drawn by `blocks.py`. `flow.py` watches the model.
"""

from __future__ import annotations

import argparse
import string
from itertools import product
from pathlib import Path
from typing import Any

import timm
from torch import nn

import weft  # noqa: F401  registers the models
from tools.blocks import Block, Plan, plan
from tools.flow import Node, Shape, chain, costs_by_kind, describe, facts, watch
from tools.sheet import BAR, CLASS_TOKEN, GREY, INK, KINDS, LINE, PANEL, Sheet, fit, number, share, width, wrap

LEFT, WIDE = 32, 600  # the main column
MAP_LANE, TOKEN_LANE = LEFT + 34, LEFT + 304  # where the map and the class token run down
COSTS = ((LEFT + 354, "parameters"), (LEFT + 474, "macs"))  # the two columns of numbers
COST_WIDE = 100
TEXT_END = LEFT + 344
RIGHT, BLOCK_WIDE = LEFT + WIDE + 36, 520
BAND, PAD, HEADER = 38, 12, 34


class Column:
    """The main column: boxes one below the other, those of a stage inside a panel."""

    def __init__(self, root: Node, model: nn.Module):
        self.root, self.model = root, model
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        self.picture = root.inputs[0]
        self.boxes: list[Node] = []
        self.panel_of: dict[Node, Node] = {}
        self.chips: dict[Node, list[Node]] = {}  # learned tokens, by the box that reads them first
        self.letters: dict[Any, str] = {}
        for node in root.inside:
            if _opens(node):
                for child in node.inside:
                    self._add(child, node)
            else:
                self._add(node, None)
        self.sources = {box: self._resolve(box.sources) for box in self.boxes}
        self.ends = self._resolve(root.ends)
        for node in [n for sources in self.sources.values() for n in sources if n.type == "parameter"]:
            first = next(box for box in self.boxes if node in self.sources[box])
            if node not in self.chips.setdefault(first, []):
                self.chips[first].append(node)

    def _add(self, node: Node, panel: Node | None) -> None:
        if node.type != "parameter":
            self.boxes.append(node)
            if panel is not None:
                self.panel_of[node] = panel

    def _resolve(self, sources: dict[Node, set[bool]]) -> dict[Node, set[bool]]:
        """Sources as boxes: a stage stands for the box that made what it returns, its input for its own sources."""
        found: dict[Node, set[bool]] = {}
        for node, flags in sources.items():
            node = node.group or node
            if node in self.boxes or node is self.root or node.type == "parameter":
                found[node] = found.get(node, set()) | flags
            else:
                inside = any(self.panel_of.get(box) is node and sources is box.sources for box in self.boxes)
                for inner, more in self._resolve(node.sources if inside else node.ends).items():
                    kept = flags & more or more
                    found[inner] = found.get(inner, set()) | kept
        return found

    # Words ------------------------------------------------------------------------------------------------------

    def size(self, shape: Shape) -> str:
        if len(shape) == 4:
            height, wide, channels = _map(shape)
            return f"{height} × {wide} × {channels}"
        if len(shape) == 3:
            length, channels = shape[1:]
            if self.prefix and length > 1 and any(length == 1 + h * w for h, w in self._grids()):
                return f"1 + {length - 1} tokens × {channels}"
            return f"{length} × {channels}" if length == 1 else f"{length} tokens × {channels}"
        return " × ".join(map(str, shape[1:]))

    def _grids(self) -> set[tuple[int, int]]:
        shapes = [shape for box in self.boxes for shape in box.outputs if len(shape) == 4]
        return {_map(shape)[:2] for shape in shapes}

    def stride(self, shape: Shape) -> str:
        if len(shape) != 4 or shape == self.picture:
            return ""
        return f"stride {round(max(self.picture[2:]) / max(_map(shape)[:2]))}"

    # Drawing ----------------------------------------------------------------------------------------------------

    def draw(self, sheet: Sheet, y: float) -> float:
        for x, name in COSTS:
            sheet.text(x, y + 36, {"macs": "MACs", "parameters": "parameters"}[name], 11, GREY)
        first = Node("input", "", "picture", outputs=[self.picture])
        last = Node("output", "", "logits", inputs=self.root.outputs)
        order = [first, *self.boxes, last]
        sources = {box: {first if s is self.root else s: f for s, f in self.sources[box].items()} for box in self.boxes}
        sources[last] = {first if s is self.root else s: f for s, f in self.ends.items()}
        y = self._terminal(sheet, y, "picture", self.size(self.picture))
        panel_top = 0.0
        for i, node in enumerate(order[1:], start=1):
            before, panel = self.panel_of.get(order[i - 1]), self.panel_of.get(node)
            top = y
            if before is not None and before is not panel:
                y += PAD
                sheet.rect(LEFT, panel_top, WIDE, y - panel_top, PANEL, LINE, 12, layer=0)
            label_y = y + BAND / 2
            chips = self.chips.get(node, [])
            y += (24 if node is last or i == 1 else BAND) + 32 * bool(chips)
            if panel is not None and before is not panel:
                panel_top = y
                self._head(sheet, panel, y)
                y += HEADER
            self._lanes(sheet, order, sources, i, top, y, label_y)
            for k, chip in enumerate(chips):
                self._chip(sheet, chip, TOKEN_LANE + 190 * k, label_y + 6, y)
            if node is last:
                y = self._terminal(sheet, y, "logits", self.size(last.inputs[0]))
            else:
                top, y = y, self._box(sheet, node, sources[node], y, inset=PAD if panel is not None else 0)
                if _tokens_only(sources[node]):  # the map goes past
                    sheet.line([(MAP_LANE, top), (MAP_LANE, y)], INK)
        return y

    def _terminal(self, sheet: Sheet, y: float, word: str, size: str) -> float:
        with sheet.box(LEFT, y, 232, 34, INK, INK, 17):
            sheet.text(LEFT + 20, y + 22, word, 13, "#FFFFFF", bold=True)
            sheet.text(LEFT + 212, y + 22, size, 12, "#DDE3EC", anchor="end")
        return y + 34

    def _head(self, sheet: Sheet, panel: Node, y: float) -> None:
        name = fit(panel.name, 12, 130)
        sheet.text(LEFT + 56, y + 22, name, 12, GREY)
        x = LEFT + 64 + width(name, 12)
        sheet.text(x, y + 22, fit(panel.title, 14, COSTS[0][0] - 10 - x, True), 14, INK, bold=True)
        for x, cost in COSTS:
            value, total = getattr(panel, cost), getattr(self.root, cost)
            sheet.text(x, y + 22, number(value), 12, INK)
            sheet.text(x + COST_WIDE, y + 22, share(value, total), 11, GREY, anchor="end")

    def _lanes(
        self,
        sheet: Sheet,
        order: list[Node],
        sources: dict[Node, dict[Node, set[bool]]],
        i: int,
        top: float,
        bottom: float,
        label_y: float,
    ) -> None:
        """The lines from the box above, and from those further up, to the box below or past it."""
        at = {node: k for k, node in enumerate(order)}
        for lane, token in ((MAP_LANE, False), (TOKEN_LANE, True)):
            live = [
                (at[source], k)
                for k, node in enumerate(order)
                for source, flags in sources.get(node, {}).items()
                if source in at and token in flags and at[source] < i <= k
            ]
            if not live:
                continue
            colour = CLASS_TOKEN if token else INK
            arrives = any(k == i for _, k in live)
            sheet.line([(lane, top), (lane, bottom)], colour, arrow=arrives, dash=token)
            maker = order[max(a for a, _ in live)]
            if order[i - 1] is maker and 1 < i < len(order) - 1:
                self._label(sheet, lane + 12, label_y + 4, maker, order[i], token, arrives)

    def _label(self, sheet: Sheet, x: float, y: float, maker: Node, reader: Node, token: bool, arrives: bool) -> None:
        made = [s for s in _last(maker.outputs) if _is_token(s, self.prefix) == token] or _last(maker.outputs)
        if token:
            words = f"class token, {self.size(made[0])}"
            if arrives and maker.times > 1 and (1, maker.times, made[0][-1]) in reader.inputs:
                words = f"class tokens of {maker.times} blocks, {maker.times} × {made[0][-1]}"
            sheet.text(x, y, words, 12, CLASS_TOKEN)
            return
        words = ", ".join(dict.fromkeys(self.size(shape) for shape in made))
        sheet.text(x, y, words, 12, INK, bold=True)
        x += width(words, 12, True) + 10
        note = self.stride(made[0])
        if reader.module is getattr(self.model, "head", self) and len(reader.inputs[0]) == 2 and len(made[0]) > 2:
            note = f'global_pool="{getattr(self.model, "global_pool", "")}" → {self.size(reader.inputs[0])}'
        sheet.text(x, y, note, 12, GREY)

    def _chip(self, sheet: Sheet, chip: Node, x: float, y: float, bottom: float) -> None:
        name, size = fit(chip.name, 12, 110), self.size(chip.outputs[0])
        wide = width(name, 12, True) + width(size, 11) + 34
        colour = CLASS_TOKEN if _is_token(chip.outputs[0], self.prefix) else KINDS["token"]
        sheet.line([(x, y + 26), (x, bottom)], colour, arrow=True, dash=True)
        with sheet.box(x - 16, y, wide, 26, "#FFFFFF", colour, 13, chip):
            sheet.text(x - 4, y + 17, name, 12, colour, bold=True)
            sheet.text(x - 16 + wide - 12, y + 17, size, 11, GREY, anchor="end")

    def _box(self, sheet: Sheet, node: Node, sources: dict[Node, set[bool]], y: float, inset: float) -> float:
        x = LEFT + 120 if _tokens_only(sources) else LEFT + inset
        room = TEXT_END - x - 18
        layers = chain(node)
        title, words = node.title, facts(node)
        if layers is not None and len(layers) <= 4:
            words = " · ".join(describe(layer) for layer in layers)
        if layers == [node]:
            title, words = describe(node), ""
            if width(f"{node.name}  {title}", 13, True) > room:
                title, _, words = title.partition(", ")
        lines = wrap(words, 12, room)
        height = 44 + 16 * len(lines)
        letter = self.letters.get(_form(node), "")
        with sheet.box(x, y, LEFT + WIDE - inset - x, height, "#FFFFFF", LINE, 8, node):
            _stripe(sheet, node, x, y, height)
            cursor = x + 18
            if letter:
                sheet.badge(cursor + 9, y + 22, letter)
                cursor += 26
            name = fit(node.name, 12, room * 0.45)
            sheet.text(cursor, y + 27, name, 12, GREY)
            cursor += width(name, 12) + (8 if name else 0)
            times = f"× {node.times}" if node.times > 1 else ""
            left = TEXT_END - cursor - (width(times, 14, True) + 8 if times else 0)
            size = 14 if layers != [node] else 13
            heading = fit(title, size, left, bold=True)
            sheet.text(cursor, y + 27, heading, size, INK, bold=True)
            if times:
                sheet.text(cursor + width(heading, size, True) + 8, y + 27, times, 14, INK, bold=True)
            for k, line in enumerate(lines):
                sheet.text(x + 18, y + 46 + 16 * k, line, 12, GREY)
            for left_edge, cost in COSTS:
                self._cost(sheet, node, cost, left_edge, y + (height - 44) / 2)
        return y + height

    def _cost(self, sheet: Sheet, node: Node, cost: str, x: float, y: float) -> None:
        value, total = getattr(node, cost), getattr(self.root, cost)
        sheet.text(x, y + 22, number(value), 12, INK, bold=True)
        sheet.text(x + COST_WIDE, y + 22, share(value, total), 11, GREY, anchor="end")
        sheet.rect(x, y + 28, COST_WIDE, 4, "#E6EAF1", None, 2)
        if value:
            sheet.rect(x, y + 28, max(round(COST_WIDE * value / total, 1), 2), 4, BAR, None, 2)


def _tokens_only(sources: dict[Node, set[bool]]) -> bool:
    return bool(sources) and all(flags == {True} for flags in sources.values())


def _stripe(sheet: Sheet, node: Node, x: float, y: float, height: float) -> None:
    """What a box is made of: its MACs by kind, from the commonest down."""
    kinds = costs_by_kind(node)
    total, top, room = sum(kinds.values()), y + 8, height - 16
    for kind in sorted(kinds, key=lambda k: (-kinds[k], k)):
        part = room * kinds[kind] / total
        sheet.rect(x + 6, round(top, 1), 5, round(max(part, 0.1), 1), KINDS[kind], None, 0)
        top += part


def _opens(node: Node) -> bool:
    """A stage: it runs a list of modules that have shortcuts or attention inside."""
    if node.module is None or node.times > 1:
        return False
    lists = [name for name, child in node.module.named_children() if isinstance(child, nn.ModuleList | nn.Sequential)]
    blocks = [step for step in node.steps if step.name.split(".")[0] in lists or type(node.module) is nn.Sequential]
    return any(part.type in ("sum", "product") for block in blocks for part in block.walk())


def _map(shape: Shape) -> tuple[int, int, int]:
    """Height, width and channels of a map, whichever way it lies: pictures are drawn square, so two sides are equal."""
    _, a, b, c = shape
    return (b, c, a) if b == c and a != b else (a, b, c)


def _last(shapes: list[Shape]) -> list[Shape]:
    return list(dict.fromkeys(shapes))


def _is_token(shape: Shape, prefix: int) -> bool:
    return bool(prefix) and len(shape) == 3 and shape[1] == 1


def _form(node: Node) -> tuple[str, frozenset[str]]:
    """Boxes of one form share a letter: the same class, made of the same classes."""
    return node.title, frozenset(part.title for part in node.walk())


def _representatives(column: Column) -> list[Node]:
    """For each form that has an inside worth a look, the box with the most work."""
    best: dict[Any, Node] = {}
    for box in column.boxes:
        layers = chain(box)
        told = not box.steps or (layers is not None and len(layers) <= 4)  # in the words of its box
        if not told and (_form(box) not in best or box.macs > best[_form(box)].macs):
            best[_form(box)] = box
    return list(best.values())


def _ends(start: dict[int, float], plans: list[dict[int, Plan]], places: tuple[int, ...]) -> dict[int, float]:
    ends = dict(start)
    for sides, x in zip(plans, places, strict=True):
        ends[x] += 54 + sides[x].height
    return ends


def draw(name: str) -> str:
    """The picture of one model as SVG."""
    model = timm.create_model(name, device="meta")
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    root = watch(model, tuple(cfg["input_size"]))
    column = Column(root, model)
    chosen = _representatives(column)
    column.letters = {_form(node): string.ascii_uppercase[i] for i, node in enumerate(chosen)}

    sheet = Sheet(f"{name}: the architecture", root.title)
    top = sheet.heading(LEFT + 4, name, root.title, cfg, root.parameters, root.macs)
    bottom = column.draw(sheet, top)
    # Blocks go beside the column or below it, whichever makes the sheet shortest.
    inside = [node.members[0] if node.members else node for node in chosen]
    plans = [{RIGHT: plan(node, BLOCK_WIDE), LEFT: plan(node, WIDE)} for node in inside]
    start = {RIGHT: top - 28, LEFT: bottom + 12}
    places = min(
        product((RIGHT, LEFT), repeat=len(plans)), key=lambda places: max(_ends(start, plans, places).values())
    )
    ends = dict(start)
    for node, sides, x in zip(chosen, plans, places, strict=True):
        ends[x] = Block(sheet, column.size).draw(sides[x], x, ends[x] + 28, column.letters[_form(node)], node)
    wide = RIGHT + BLOCK_WIDE + LEFT if chosen else LEFT + WIDE + LEFT
    return sheet.finish(wide, max(bottom, *ends.values()) + 28, bool(column.prefix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = sorted(path.stem for path in args.out.glob("*.svg") if timm.is_model(path.stem))
    for name in args.models or drawn:
        path = args.out / f"{name}.svg"
        path.write_text(draw(name), encoding="utf-8")
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
