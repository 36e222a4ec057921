"""Exhibits as PNG and SVG files for papers."""

import re
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.explain.exhibits import Exhibit, Lines, Matrix, Panel, Sheet, title
from weft.explain.explain import Progress
from weft.explain.heat import COLOURS
from weft.report.figures import INKS, new_figure, plots, write_figure
from weft.words import clean, many

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("scale", "shift", "entropy")  # from 0 to 1
PANEL, GAP, LINE = 1.35, 0.06, 0.13  # inches: a panel, between two, a line of text


def write_figures(exhibits: Sequence[Exhibit], folder: Path, progress: Progress | None = None) -> list[str]:
    """Each exhibit as `NAME.png` and `NAME.svg` in the folder; the names, without endings."""
    stems = [file_stem(exhibit) for exhibit in exhibits]
    stems = [stem if stems.count(stem) == 1 else f"{stem}-{i + 1}" for i, stem in enumerate(stems)]
    for done, (exhibit, stem) in enumerate(zip(exhibits, stems, strict=True), start=1):
        write_figure(folder, stem, partial(draw, exhibit))
        if progress:
            progress(done, len(stems), many(len(stems), "figure"))
    return stems


def file_stem(exhibit: Exhibit) -> str:
    return re.sub(r"[^\w.]+", "-", f"{exhibit.kind} {exhibit.detail}".strip()).strip("-.")


def draw(exhibit: Exhibit) -> "Figure":
    if isinstance(exhibit, Sheet):
        return _sheet(exhibit)
    return _lines(exhibit) if isinstance(exhibit, Lines) else _matrix(exhibit)


def _sheet(sheet: Sheet) -> "Figure":
    """Places are computed: matplotlib would take minutes to find them for a hundred panels."""
    columns = max(len(panels) for _, panels in sheet.rows)
    heights = [PANEL * max(_aspect(panel) for panel in panels) for _, panels in sheet.rows]
    below = 0.06 + LINE * max((len(panel.caption.splitlines()) for _, row in sheet.rows for panel in row), default=0)
    left = 0.1 + LINE * max(len(name.splitlines()) for name, _ in sheet.rows)
    above = LINE * max((len(name.splitlines()) for name in sheet.columns), default=0) + 0.05
    width, height = left + columns * (PANEL + GAP), above + sum(heights) + below * len(heights)
    figure, top = new_figure(width, height, layout=None), height - above
    for i, name in enumerate(sheet.columns):
        x = left + i * (PANEL + GAP) + PANEL / 2
        figure.text(x / width, (top + 0.03) / height, _plain(name), ha="center", va="bottom")
    for (name, panels), tall in zip(sheet.rows, heights, strict=True):
        middle = (top - tall / 2) / height
        name = _plain(_ending(name, tall))
        figure.text((left - 0.05) / width, middle, name, ha="right", va="center", rotation=90, fontsize=6.5)
        for i, panel in enumerate(panels):
            if panel.pixels is not None:
                x, high = left + i * (PANEL + GAP), PANEL * _aspect(panel)
                axes = figure.add_axes((x / width, (top - high) / height, PANEL / width, high / height))
                axes.imshow(panel.pixels, interpolation="nearest", aspect="auto")
                axes.set_axis_off()
                place = (x + PANEL / 2) / width, (top - high - 0.02) / height
                figure.text(*place, _plain(panel.caption), ha="center", va="top", fontsize=7)
        top -= tall + below
    return figure


def _ending(text: str, inches: float) -> str:
    """As much of the end of each line as there is room for in small print."""
    most = max(4, int(18 * inches))
    return "\n".join(line if len(line) <= most else "…" + line[1 - most :] for line in text.splitlines())


def _aspect(panel: Panel) -> float:
    return 0.0 if panel.pixels is None else panel.pixels.shape[0] / panel.pixels.shape[1]


def _lines(lines: Lines) -> "Figure":
    figure, (axes,) = plots(1, 3.6, 2.5 + LINE * (1 + len(lines.curves) // 2))
    for curve in (curve for curve in lines.curves if not curve.dashed):
        ink = INKS[curve.model % len(INKS)]
        axes.plot(curve.xs, curve.ys, color=ink, marker="o" if not curve.spread else "", ms=3, label=_plain(curve.name))
        for x, values in zip(curve.xs, curve.spread, strict=False):
            axes.plot([x] * len(values), values, ".", color=ink, ms=3.5, alpha=0.45)
    for i, curve in enumerate(curve for curve in lines.curves if curve.dashed):
        label = "broken lines: even attention" if i == 0 else ""
        axes.plot(curve.xs, curve.ys, "--", color=INKS[curve.model % len(INKS)], lw=0.9, label=label)
    axes.set_xlabel(lines.x_name)
    axes.set_ylabel(lines.y_name)
    axes.set_title(_plain(title(lines)), fontsize=8)
    if lines.labels:
        axes.locator_params(axis="x", integer=True)
    most = max(value for curve in lines.curves for values in [curve.ys, *curve.spread] for value in values)
    axes.set_ylim(0, 1.05 * max(most, 1.0 if lines.kind in PARTS else 0.0) or 1.0)
    if len(lines.curves) > 1 or lines.models > 1:
        figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    return figure


def _matrix(matrix: Matrix) -> "Figure":
    height, width = (max(2.6, 0.19 * side + 1.4) for side in matrix.values.shape)
    figure = new_figure(width + 0.6, height)
    axes = figure.subplots()
    image = axes.imshow(matrix.values, cmap=COLOURS, vmin=0, vmax=1)
    axes.set_xticks(np.arange(len(matrix.columns)), [_plain(name) for name in matrix.columns], rotation=90, fontsize=6)
    axes.set_yticks(np.arange(len(matrix.rows)), [_plain(name) for name in matrix.rows], fontsize=6)
    axes.set_title(textwrap.fill(_plain(title(matrix)), 48), fontsize=8)  # no wider than the matrix
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def _plain(text: str) -> str:
    """Without what matplotlib takes for a formula, or complains about in words that have it."""
    return "\n".join(map(clean, text.split("\n"))).replace("$", r"\$")
