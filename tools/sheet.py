"""Paper and pens of the pictures: boxes, lines, text that is measured before it is set, and the SVG they make."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

if TYPE_CHECKING:
    from tools.flow import Node

KINDS = {  # told apart by people with any kind of colour vision, and never the only sign
    "convolution": "#2F7FB8",
    "attention": "#DB7F22",
    "mlp": "#2A9777",
    "norm": "#98A3B3",
    "head": "#7D5BA6",
    "token": "#B8336A",
    "other": "#C9D0DA",
}
WORDS = {"mlp": "MLP", "token": "learned tokens, positions", "other": "no parameters"}
INK, GREY, LINE, CARD, PANEL, BAR = "#1F2937", "#5B6675", "#D3DAE4", "#FBFCFE", "#F1F4F9", "#64748B"
CLASS_TOKEN = KINDS["token"]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"

# Widths in em, as in DejaVu Sans, the widest of the usual fonts.
_WIDTHS = {
    **dict.fromkeys("'ijlIJ", 0.3),
    **dict.fromkeys(",. \u00a0·/:;|f-", 0.36),
    **dict.fromkeys("t()[]!r", 0.42),
    **dict.fromkeys('"*_`–szc?L', 0.56),
    **dict.fromkeys("CUHNDG", 0.77),
    **dict.fromkeys("&OQw+=×→", 0.84),
    **dict.fromkeys("M%m@W", 0.99),
}


def width(text: str, size: float, bold: bool = False) -> float:
    return sum(_WIDTHS.get(letter, 0.66) for letter in text) * size * (1.1 if bold else 1.0)


def fit(text: str, size: float, room: float, bold: bool = False) -> str:
    """`text`, shortened until it fits."""
    if width(text, size, bold) <= room:
        return text
    while text and width(text + "…", size, bold) > room:
        text = text[:-1]
    return text.rstrip(" ,·") + "…"


def wrap(text: str, size: float, room: float) -> list[str]:
    """Lines that fit; "3 × 3" and "64 → 192" are not torn apart unless they must be."""
    words = re.sub(" ([×→]) ", "\u00a0\\1\u00a0", text).split(" ")
    lines: list[str] = []
    pieces = [word.split("\u00a0") if width(word, size) > room else [word] for word in words]
    for word in chain.from_iterable(pieces):
        if lines and width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        elif word:
            lines.append(word)
    return [fit(line.strip(" ·").replace("\u00a0", " "), size, room) for line in lines]


def number(n: int) -> str:
    """Three digits and a unit: 17.9 M."""
    for unit, letter in ((10**9, "\u00a0G"), (10**6, "\u00a0M"), (10**3, "\u00a0k")):
        if n >= unit:
            value = n / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{letter}"
    return str(n) if n else "–"


def share(value: int, total: int) -> str:
    percent = 100 * value / total
    return "" if not value else f"{percent:.1f} %" if percent >= 0.1 else "< 0.1 %"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Sheet:
    """Collects what is drawn, in layers: panels, lines, boxes."""

    def __init__(self, title: str, about: str):
        self.title, self.about = title, about
        self.layers: list[list[str]] = [[], [], []]
        self.inside = False

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str | None, radius: float, layer: int = 2
    ) -> None:
        edge = f' stroke="{stroke}"' if stroke else ""
        round_ = f' rx="{_n(radius)}"' if radius else ""
        self.layers[layer].append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="{fill}"{edge}{round_}/>'
        )

    @contextmanager
    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        stroke: str,
        radius: float,
        node: Node | None = None,
        group: str = "box",
    ) -> Iterator[None]:
        """A rectangle and, inside the `with`, what stands in it. A box of the main column carries its costs."""
        costs = f' data-parameters="{node.parameters}" data-macs="{node.macs}"' if node is not None else ""
        self.layers[2].append(f'<g class="{group}"{costs}>')
        self.rect(x, y, w, h, fill, stroke, radius)
        yield
        self.layers[2].append("</g>")

    def text(
        self, x: float, y: float, text: str, size: float, fill: str, bold: bool = False, anchor: str = "start"
    ) -> None:
        if text:
            weight = ' font-weight="600"' if bold else ""
            end = f' text-anchor="{anchor}"' if anchor != "start" else ""
            self.layers[2].append(
                f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}"{weight}{end}>{escape(text)}</text>'
            )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        arrow: bool = False,
        dash: bool = False,
        front: bool = False,
    ) -> None:
        """A line with round corners at right angles, and a head where it arrives; behind the boxes, or in front."""
        layer = self.layers[2 if front else 1]
        (x0, y0), (x1, y1) = points[-2:]
        head = ""
        if arrow:  # the line ends inside the head
            length = max(abs(x1 - x0) + abs(y1 - y0), 1e-9)
            ux, uy = (x1 - x0) / length, (y1 - y0) / length
            points = [*points[:-1], (x1 - 5 * ux, y1 - 5 * uy)]
            bx, by = x1 - 7 * ux, y1 - 7 * uy
            head = f"{_n(x1)},{_n(y1)} {_n(bx + 3.5 * uy)},{_n(by + 3.5 * ux)} {_n(bx - 3.5 * uy)},{_n(by - 3.5 * ux)}"
        path = f"M{_n(points[0][0])} {_n(points[0][1])}"
        for i in range(1, len(points)):
            (ax, ay), (x, y) = points[i - 1], points[i]
            if i < len(points) - 1:
                nx, ny = points[i + 1]
                into, out = max(abs(x - ax), abs(y - ay)), max(abs(nx - x), abs(ny - y))
                r = min(5.0, into / 2, out / 2)
                sx, sy = x - r * _sign(x - ax), y - r * _sign(y - ay)
                ex, ey = x + r * _sign(nx - x), y + r * _sign(ny - y)
                path += f"L{_n(sx)} {_n(sy)}Q{_n(x)} {_n(y)} {_n(ex)} {_n(ey)}"
            else:
                path += f"L{_n(x)} {_n(y)}"
        dashes = ' stroke-dasharray="5 3"' if dash else ""
        layer.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        if head:
            layer.append(f'<polygon points="{head}" fill="{colour}"/>')

    def badge(self, x: float, y: float, letter: str) -> None:
        self.layers[2].append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="9.5" fill="{INK}"/>')
        self.text(x, y + 4, letter, 11, "#FFFFFF", bold=True, anchor="middle")

    def plus(self, x: float, y: float) -> None:
        self.layers[2].append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="9" fill="#FFFFFF" stroke="{INK}"/>')
        self.layers[2].append(
            f'<path d="M{_n(x - 5)} {_n(y)}H{_n(x + 5)}M{_n(x)} {_n(y - 5)}V{_n(y + 5)}" stroke="{INK}"/>'
        )

    def heading(self, x: float, name: str, title: str, cfg: dict[str, Any], parameters: int, macs: int) -> float:
        self.text(x, 58, name, 26, INK, bold=True)
        paper = " · ".join(str(cfg[key]) for key in ("paper_name", "paper_ids") if cfg.get(key))
        self.text(x, 82, fit(paper, 13, 1050), 13, GREY)
        size = " × ".join(str(side) for side in cfg["input_size"][1:])
        totals = f"{title} · {parameters:,} parameters · {macs:,} MACs for one picture of {size}"
        self.text(x, 104, totals, 13, INK)
        return 140

    def finish(self, wide: float, y: float, class_token: bool) -> str:
        x = 36.0
        self.rect(32, y - 8, wide - 64, 1, LINE, None, 0)
        used = "".join(self.layers[2])
        for kind, colour in KINDS.items():
            if colour not in used:
                continue
            word = WORDS.get(kind, kind)
            self.rect(x, y + 10, 12, 12, colour, None, 3)
            self.text(x + 18, y + 20, word, 12, GREY)
            x += 18 + width(word, 12) + 20
        if class_token:
            self.line([(x, y + 16), (x + 26, y + 16)], CLASS_TOKEN, dash=True)
            self.text(x + 32, y + 20, "class token", 12, GREY)
        return self.svg(wide, y + 48)

    def svg(self, wide: float, high: float) -> str:
        body = "\n".join(entry for layer in self.layers for entry in layer)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(wide)}" height="{_n(high)}"'
            f' viewBox="0 0 {_n(wide)} {_n(high)}" role="img" aria-label={quoteattr(self.title)}'
            f' font-family="{FONT}">\n<title>{escape(self.title)}</title>\n'
            f'<rect x="0.5" y="0.5" width="{_n(wide - 1)}" height="{_n(high - 1)}" rx="16" fill="{CARD}"'
            f' stroke="{LINE}"/>\n{body}\n</svg>\n'
        )


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
