"""The geometry of small charts: what a template needs to draw one as SVG, in the units of its view box.

Colours and lines belong to the page, so that a chart follows its light or dark theme; nothing here knows of markup.
"""

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 38  # margins: room for the labels of the axes
MOST_POINTS = 400  # in a line: more would not be seen

Point = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    title: str  # shown under the pointer


@dataclass(frozen=True)
class Line:
    name: str
    pieces: list[str]  # each the `points` of a polyline; where a value is missing or not finite the line is broken
    dots: list[Dot]  # empty where there are so many points that only the line is shown
    dashed: bool = False
    ink: int = 1  # the number of its colour


@dataclass(frozen=True)
class Chart:
    title: str
    x_name: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]
    mark: Dot | None = None  # the one point that matters
    legend: bool = False
    height: int = HEIGHT
    width: int = WIDTH
    left: int = LEFT
    right: int = WIDTH - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` onto the view box from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = field(default=False, kw_only=True)

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    *,
    x_name: str = "epoch",
    show: Callable[[float], str] = "{:.4g}".format,
    show_x: Callable[[float], str] | None = None,
    mark: tuple[Point, str] | None = None,
    zero: bool = False,
    linear: bool = False,
    height: int = HEIGHT,
    dashed: Collection[str] = (),
    inks: Mapping[str, int] | None = None,
) -> Chart | None:
    """A chart of named lines, or None where none of them has a point; `show` writes a value of the y axis.

    The x axis has whole numbers only, such as epochs, unless `show_x` says how to write others. `zero`: the y axis
    starts there; else, unless it is to be `linear`, it is logarithmic where the values span more than a factor of 300.
    `dashed`: names of lines.
    `inks`: the numbers of their colours, where these mean the same beyond this chart.
    """
    finite = {name: [p for p in points if math.isfinite(p[1])] for name, points in lines.items()}
    everything = [point for points in finite.values() for point in points]
    if not everything:
        return None
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    y_values, log = _y_ticks(min(ys), max(ys), zero, linear)
    x_low, x_high = (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 1, xs[0] + 1)
    x = Axis(x_low, x_high, LEFT, WIDTH - RIGHT)
    x_values = nice_ticks(x_low, x_high, 8, whole=show_x is None)
    y = Axis(y_values[0], y_values[-1], height - BOTTOM, TOP, log=log)
    return Chart(
        title,
        x_name,
        [Tick(x(v), (show_x or "{:g}".format)(v)) for v in x_values if x_low <= v <= x_high],
        [Tick(y(v), label) for v, label in zip(y_values, _labels(y_values, show, log), strict=True)],
        [
            replace(_line(name, points, x, y, show), dashed=name in dashed, ink=(inks or {}).get(name, i))
            for i, (name, points) in enumerate(((n, p) for n, p in lines.items() if finite[n]), start=1)
        ],
        Dot(x(mark[0][0]), y(mark[0][1]), mark[1]) if mark and math.isfinite(mark[0][1]) else None,
        inks is not None or sum(map(bool, finite.values())) > 1,
        height,
    )


def nice_ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Round numbers, at most about `most`, the first at or below `low`, the last at or above `high`."""
    step = 10.0 ** math.floor(math.log10(max((high - low) / most, sys.float_info.min)))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _y_ticks(low: float, high: float, zero: bool, linear: bool) -> tuple[list[float], bool]:
    if low > 0 and high / low > 300 and not (zero or linear):
        return [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)], True
    low = min(low, 0.0) if zero else low
    if low == high == 0:
        return nice_ticks(0.0, 1.0), False
    if high - low <= max(1e-9 * max(abs(high), abs(low)), sys.float_info.min):  # a flat line runs through the middle
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    return nice_ticks(low, high), False


def _labels(values: list[float], show: Callable[[float], str], log: bool) -> list[str]:
    """`show` of each value; the empty text between powers of ten that would stand too close."""
    every = math.ceil(len(values) / 6) if log else 1
    return [show(value) if i % every == 0 else "" for i, value in enumerate(values)]


def _line(name: str, points: Sequence[Point], x: Axis, y: Axis, show: Callable[[float], str]) -> Line:
    points = _thin(points)
    breaks = [i for i, (_, value) in enumerate(points) if not math.isfinite(value)]
    pieces = [points[a + 1 : b] for a, b in pairwise([-1, *breaks, len(points)])]
    finite = [point for piece in pieces for point in piece]
    dots = [Dot(x(a), y(b), f"{name}, {a:g}: {show(b)}") for a, b in finite] if len(finite) <= 100 else []
    return Line(name, [" ".join(f"{x(a):g},{y(b):g}" for a, b in piece) for piece in pieces if piece], dots)


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    """Means of neighbours, so that at most MOST_POINTS are left; a run of values that are not finite stays a gap."""
    group = math.ceil(len(points) / MOST_POINTS)
    if group <= 1:
        return points
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
