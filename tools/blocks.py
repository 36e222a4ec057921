"""The inside of a block: its modules in rows, parallel ones side by side, skip connections in the gutters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.flow import Node, Shape, chain, costs_by_kind, describe, sizes
from tools.sheet import GREY, INK, KINDS, LINE, PANEL, Sheet, fit, number, width, wrap

GAP, HEAD, LANE, PAD = 20, 32, 10, 12
NARROW = 96  # the least width of a cell
WIDE = 260  # from here on a layer is one line


@dataclass
class Cell:
    node: Node
    height: float
    lines: list[tuple[str, str, str]]  # text, how it is set ("name", "layer", "cost"), and the kind of the layer
    inner: Plan | None = None
    x: float = 0.0  # within the plan
    wide: float = 0.0
    y: float = 0.0


@dataclass
class Plan:
    """Where everything goes inside one module; distances from the upper left corner."""

    node: Node
    wide: float
    rows: list[list[Cell]]
    height: float
    skips: list[tuple[Node, Node, str, int]]  # from, to, side, lane


def plan(node: Node, wide: float) -> Plan:
    nodes = node.inside
    real = [n for n in nodes if n.type != "parameter"]
    rows_of = _rows(node, real, wide - 2 * PAD)
    edges = _edges(node, real)
    row_at = {n: i for i, row in enumerate(rows_of) for n in row}
    row_at[node] = -1
    skips: list[tuple[Node, Node, str, int]] = []
    taken: dict[tuple[str, int], list[tuple[int, int]]] = {}
    end = len(rows_of)
    for source, target in sorted(edges, key=lambda e: _row(row_at, e[1], node, end) - row_at[e[0]]):
        first, last = row_at[source], _row(row_at, target, node, end)
        if last - first > 1:
            side = "left" if source is node or source.type == "sum" else "right"
            lane = 0
            while any(a < last and first < b for a, b in taken.get((side, lane), [])):
                lane += 1
            taken.setdefault((side, lane), []).append((first, last))
            skips.append((source, target, side, lane))
    margin = PAD + LANE * (
        1 + max((lane for *_, lane in skips), default=-1)
    )  # on both sides: the middle stays the middle
    inner = wide - 2 * margin
    chips = [n for n in nodes if n.type == "parameter"]
    plan_ = Plan(node, wide, [], 0, skips)
    y = HEAD + GAP
    for row in rows_of:
        beside = [chip for chip in chips if any(chip in n.sources for n in row)]
        chips = [chip for chip in chips if chip not in beside]
        cells = _cells(row + beside, inner, margin)
        high = max(cell.height for cell in cells)
        for cell in cells:
            cell.y = y + (high - cell.height) / 2
        plan_.rows.append(cells)
        y += high + GAP
    plan_.height = y
    return plan_


def _row(row_at: dict[Node, int], target: Node, frame: Node, end: int) -> int:
    return end if target is frame else row_at[target]


def _edges(frame: Node, nodes: list[Node]) -> list[tuple[Node, Node]]:
    """From node to node; the frame stands for its input as a source and for its output as a target.

    A class token that merely joins the map on its way in is left out.
    """
    edges = []
    for node in nodes:
        maps = {
            s for s, flags in node.sources.items() if s.type != "parameter" and not (s is frame and flags == {True})
        }
        tokens = {s for s in node.sources if s.type != "parameter"}
        edges += [(source, node) for source in node.sources if source in (maps or tokens)]
    ends = {(end.group or end): flags for end, flags in frame.ends.items()}
    return edges + [(end, frame) for end, flags in ends.items() if end in nodes or (end is frame and False in flags)]


def _rows(frame: Node, nodes: list[Node], room: float) -> list[list[Node]]:
    """Rows by the longest way from the input; what has an inside of its own gets a row of its own."""
    before: dict[Node, list[Node]] = {node: [] for node in nodes}
    for source, target in _edges(frame, nodes):
        if target is not frame and source is not frame:
            before[target].append(source)
    rank: dict[Node, int] = {}
    for node in nodes:  # in the order of execution, so sources come first
        rank[node] = 1 + max((rank[s] for s in before[node] if s in rank), default=-1)
    place: dict[Node, float] = {}
    rows: list[list[Node]] = []
    most = max(int((room - 2 * LANE + 8) // (NARROW + 8)), 1)
    for level in range(max(rank.values()) + 1):
        row = [node for node in nodes if rank[node] == level]
        row.sort(key=lambda n: sum(place[s] for s in before[n]) / len(before[n]) if before[n] else 0.0)
        for i, node in enumerate(row):
            place[node] = i / max(len(row) - 1, 1)
        small = [node for node in row if _is_small(node) and node.type != "sum"]
        even = -(-len(small) // -(-len(small) // most)) if small else 1  # two rows of three, not four and two
        rows += [small[i : i + even] for i in range(0, len(small), even)]
        rows += [[node] for node in row if node not in small]
    return rows


def _is_small(node: Node) -> bool:
    layers = chain(node)
    return layers is not None and len(layers) <= (10 if node.title == "Sequential" else 4)


def _cells(row: list[Node], room: float, left: float) -> list[Cell]:
    """Cells share the room evenly; a sum needs none of it, and a learned parameter stands at the right."""
    if len(row) == 2 and row[0].type == "sum":
        return [Cell(row[0], 20, [], x=left + room / 2 - 10, wide=20), _chip(row[1], left + room, room / 2 - 30)]
    wide = (room - 8 * (len(row) - 1)) / len(row)
    cells = []
    for i, node in enumerate(row):
        x = left + i * (wide + 8)
        if node.type == "sum":
            cells.append(Cell(node, 20, [], x=x + wide / 2 - 10, wide=20))
        elif not _is_small(node):
            inner = plan(node.members[0] if node.members else node, wide)
            cells.append(Cell(node, inner.height, [], inner, x=x, wide=wide))
        elif node.type == "parameter":
            chip = _chip(node, x + wide, wide)
            cells.append(chip)
        else:
            lines = _lines(node, wide - 26)
            cells.append(Cell(node, 12 + 16 * len(lines), lines, x=x, wide=wide))
    return cells


def _chip(node: Node, right: float, room: float) -> Cell:
    text = fit(f"{node.name}, {sizes(node.outputs[0])}", 11, room - 24)
    wide = width(text, 11) + 24
    return Cell(node, 24, [(text, "chip", "token")], x=right - wide, wide=wide)


def _lines(node: Node, room: float) -> list[tuple[str, str, str]]:
    layers = chain(node) or [node]
    cost = f"{number(node.parameters)} · {number(node.macs)}" if node.parameters or node.macs else ""
    times = f" × {node.times}" if node.times > 1 else ""
    if layers == [node]:
        words = describe(node) + times
        one = f"{node.name}  {words}" if node.name else words
        if room > WIDE and width(one, 12) + width(cost, 11) + 20 < room:
            return [(f"{node.name}\t{words}\t{cost}", "line", node.kind)]
        lines = [(node.name, "name", "")] if node.name else []
        lines += [(line, "text", "") for line in wrap(words, 11, room)]
        return lines + [(line, "cost", "") for line in wrap(cost, 11, room)]
    title = "" if node.title == "Sequential" else node.title
    head = f"{node.name}\t{title}{times}\t{cost}"
    if room > WIDE and width(head, 12, True) + 30 < room:
        lines = [(head, "line", "")]
    else:
        lines = [(node.name, "name", "")]
        lines += [(fit(title + times, 12, room, True), "title", "")] if title else []
    for layer in layers:
        for i, text in enumerate(wrap(describe(layer), 11, room - 14)):
            lines.append((text, "layer" if i == 0 else "more", layer.kind))
    return lines + [(line, "cost", "") for line in wrap(cost, 11, room) if lines[0][1] != "line"]


class Block:
    """Draws plans."""

    def __init__(self, sheet: Sheet, size: Callable[[Shape], str]):
        self.sheet, self.size = sheet, size

    def draw(self, p: Plan, x: float, y: float, letter: str, node: Node) -> float:
        """A block with its letter, beside the main column; returns where it ends."""
        self.sheet.badge(x + 10, y + 8, letter)
        self.sheet.text(x + 28, y + 13, p.node.title, 16, INK, bold=True)
        cursor = x + 28 + width(p.node.title, 16, True) + 10
        where = f"one of {node.times}: {node.path}" if node.times > 1 else node.path
        self.sheet.text(cursor, y + 13, fit(where, 12, x + p.wide - cursor - 130), 12, GREY)
        self.sheet.text(x + p.wide - 12, y + 13, "parameters · MACs", 11, GREY, anchor="end")
        self._plan(p, x, y + 26, depth=0)
        return y + 26 + p.height

    def _plan(self, p: Plan, x: float, y: float, depth: int, name: str = "", times: str = "") -> None:
        sheet = self.sheet
        sheet.rect(x, y, p.wide, p.height, PANEL if depth % 2 == 0 else "#FFFFFF", LINE, 10)
        if depth == 0:
            words, head = "in: " + ", ".join(dict.fromkeys(self.size(shape) for shape in p.node.inputs)), ""
        else:
            heads = getattr(p.node.module, "num_heads", 0)
            head = p.node.title + (f", {heads} head{'s' * (heads > 1)}" if heads else "") + times
            words = name
        cost = f"{number(p.node.parameters)} · {number(p.node.macs)}"
        room = p.wide - 24 - width(cost, 11) - 12
        words = fit(words, 12, room * (0.4 if head else 1))
        sheet.text(x + 12, y + 20, words, 12, GREY)
        if head:
            used = width(words, 12) + 8
            sheet.text(x + 12 + used, y + 20, fit(head, 12, room - used, True), 12, INK, bold=True)
        sheet.text(x + p.wide - 12, y + 20, cost, 11, GREY, anchor="end")
        for row in p.rows:
            for cell in row:
                self._cell(cell, x, y, depth)
        self._arrows(p, x, y)

    def _cell(self, cell: Cell, x: float, y: float, depth: int) -> None:
        sheet, node = self.sheet, cell.node
        left, top = x + cell.x, y + cell.y
        if cell.inner is not None:
            times = f" × {node.times}" if node.times > 1 else ""
            self._plan(cell.inner, left, top, depth + 1, node.name, times)
            return
        if node.type == "sum":
            sheet.plus(left + 10, top + 10)
            return
        round_ = 12 if node.type == "parameter" else 6
        edge = KINDS["token"] if node.type == "parameter" else LINE
        with sheet.box(left, top, cell.wide, cell.height, "#FFFFFF", edge, round_, group="cell"):
            if node.type == "parameter":
                sheet.text(left + 12, top + 16, cell.lines[0][0], 11, KINDS["token"])
                return
            kinds = costs_by_kind(node)
            total, at = sum(kinds.values()), top + 5
            for kind in sorted(kinds, key=lambda k: (-kinds[k], k)):
                part = (cell.height - 10) * kinds[kind] / total
                sheet.rect(left + 5, at, 4, part, KINDS[kind], None, 0)
                at += part
            for i, (text, style, kind) in enumerate(cell.lines):
                self._line(text, style, kind, left + 16, top + 18 + 16 * i, left + cell.wide - 10)

    def _line(self, text: str, style: str, kind: str, x: float, y: float, right: float) -> None:
        sheet = self.sheet
        if style == "line":
            name, words, cost = text.split("\t")
            sheet.text(x, y, name, 12, GREY)
            sheet.text(x + (width(name, 12) + 8 if name else 0), y, words, 12, INK, bold=not kind)
            sheet.text(right, y, cost, 11, GREY, anchor="end")
        elif style in ("layer", "more"):
            if style == "layer":
                sheet.rect(x, y - 8, 8, 8, KINDS[kind], None, 2)
            sheet.text(x + 14, y, text, 11, INK)
        else:
            sheet.text(
                x,
                y,
                text,
                12 if style == "title" else 11,
                INK if style in ("text", "title") else GREY,
                bold=style == "title",
            )

    # Arrows -----------------------------------------------------------------------------------------------------

    def _arrows(self, p: Plan, x: float, y: float) -> None:
        cells = {cell.node: cell for row in p.rows for cell in row}
        row_at = {cell.node: i for i, row in enumerate(p.rows) for cell in row}
        skipped = {(source, target) for source, target, _, _ in p.skips}
        middle = p.wide / 2
        for source, target in _edges(p.node, [n for n in cells if n.type != "parameter"]):
            if (source, target) not in skipped:
                self._straight(p, cells.get(source), cells.get(target) if target is not p.node else None, x, y)
        for row in p.rows:
            for cell in row:
                if cell.node.type == "parameter":
                    self._from_chip(cell, row, x, y)
        for source, target, side, lane in p.skips:
            leave = cells.get(source)
            start_x = leave.x + leave.wide / 2 if leave else middle
            start_y = leave.y + leave.height if leave else HEAD
            if leave is not None:
                start_y = max(c.y + c.height for c in p.rows[row_at[source]])
            gutter = 7 + LANE * lane if side == "left" else p.wide - 7 - LANE * lane
            turn = start_y + 6
            points = [(start_x, (leave.y + leave.height) if leave else HEAD), (start_x, turn), (gutter, turn)]
            arrive = cells.get(target) if target is not p.node else None
            if arrive is None:
                points += [(gutter, p.height - 9), (middle, p.height - 9), (middle, p.height)]
            else:
                row = p.rows[row_at[target]]
                outermost = row[0] if side == "left" else [c for c in row if c.node.type != "parameter"][-1]
                if arrive is outermost and (side == "left" or row[-1] is arrive):
                    edge = arrive.x if side == "left" else arrive.x + arrive.wide
                    at = arrive.y + arrive.height / 2 if arrive.inner is None else arrive.y + HEAD / 2
                    points += [(gutter, at), (edge, at)]
                else:
                    into = arrive.x + arrive.wide / 2
                    above = min(c.y for c in row) - 9
                    points += [(gutter, above), (into, above), (into, arrive.y)]
            self.sheet.line([(x + a, y + b) for a, b in points], INK, arrow=arrive is not None, front=True)

    def _straight(self, p: Plan, source: Cell | None, target: Cell | None, x: float, y: float) -> None:
        top = source.y + source.height if source else HEAD
        bottom = target.y if target else p.height
        spans = [(c.x, c.x + c.wide) if c else (0.0, p.wide) for c in (source, target)]
        narrow, broad = sorted(spans, key=lambda span: span[1] - span[0])
        centre = sum(narrow) / 2
        if target is None and source is not None and abs(centre - p.wide / 2) > 1:  # out at the middle of the module
            points = [(centre, top), (centre, bottom - 9), (p.wide / 2, bottom - 9), (p.wide / 2, bottom)]
        elif broad[0] <= centre <= broad[1]:
            points = [(centre, top), (centre, bottom)]
        else:
            row = next((row for row in p.rows if target in row), [])
            a, b, half = sum(spans[0]) / 2, sum(spans[1]) / 2, min((c.y for c in row), default=bottom) - 9
            points = [(a, top), (a, half), (b, half), (b, bottom)]
        self.sheet.line([(x + a, y + b) for a, b in points], INK, arrow=target is not None, front=True)

    def _from_chip(self, cell: Cell, row: list[Cell], x: float, y: float) -> None:
        reader = next(c for c in row if cell.node in c.node.sources)
        at = y + cell.y + cell.height / 2
        self.sheet.line([(x + cell.x, at), (x + reader.x + reader.wide, at)], KINDS["token"], arrow=True, front=True)
