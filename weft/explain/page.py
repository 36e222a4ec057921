"""The folder that `weft explain` writes: figures for papers, explain.json with the numbers, and one page for all."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from weft.documents import to_json
from weft.explain.exhibits import READING, Exhibit, Lines, Matrix, Sheet
from weft.explain.explain import Progress
from weft.explain.explanation import Explanation
from weft.explain.figures import write_figures
from weft.explain.heat import SIDE, colours
from weft.files import write_text
from weft.report.charts import Chart, line_chart
from weft.report.page import data_uri, render

PAGE, NUMBERS = "explain.html", "explain.json"


def write_explanation(
    folder: Path,
    explanations: Sequence[Explanation],
    exhibits: Sequence[Exhibit],
    cross: Any = None,
    progress: Progress | None = None,
) -> Path:
    """Writes everything into `folder`, which exists; returns the page."""
    stems = write_figures(exhibits, folder, progress)
    content = {"models": [e.to_dict() for e in explanations], "similarity_between": asdict(cross) if cross else None}
    write_text(folder / NUMBERS, to_json(content, indent=1) + "\n")
    write_text(folder / PAGE, page(explanations, exhibits, stems))
    return folder / PAGE


def page(explanations: Sequence[Explanation], exhibits: Sequence[Exhibit], stems: Sequence[str]) -> str:
    pairs = zip(exhibits, stems, strict=True)
    sections = [
        {"kind": kind, "title": READING[kind][0], "reading": READING[kind][1], "parts": [_part(*pair) for pair in same]}
        for kind, same in groupby(pairs, key=lambda pair: pair[0].kind)
    ]
    return render("explain.html.j2", explanations=explanations, sections=sections)


def _part(exhibit: Exhibit, stem: str) -> dict[str, Any]:
    """An exhibit as the template takes it."""
    part: dict[str, Any] = {"detail": exhibit.detail, "stem": stem}
    if isinstance(exhibit, Sheet):
        return part | _sheet(exhibit)
    if isinstance(exhibit, Lines):
        return part | {"form": "chart", "chart": _chart(exhibit), "labels": exhibit.labels}
    return part | _matrix(exhibit)


def _sheet(sheet: Sheet) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "panels": [
                {"src": data_uri(panel.pixels, SIDE) if panel.pixels is not None else "", "caption": panel.caption}
                for panel in panels
            ],
        }
        for name, panels in sheet.rows
    ]
    width = max(len(row["panels"]) for row in rows)
    return {"form": "sheet", "columns": sheet.columns, "rows": rows, "width": width}


def _chart(lines: Lines) -> Chart | None:
    points = {curve.name: list(zip(curve.xs, curve.ys, strict=True)) for curve in lines.curves}
    show_x: Callable[[float], str] | None = None if lines.labels or lines.kind == "shift" else "{:g}".format
    how: Any = dict(x_name=lines.x_name, show="{:.3g}".format, show_x=show_x, zero=True)
    how |= {"dashed": [curve.name for curve in lines.curves if curve.dashed]}
    inks = {curve.name: 1 + curve.model for curve in lines.curves} if lines.models > 1 else None
    return line_chart(lines.y_name, points, **how, inks=inks)


def _matrix(matrix: Matrix) -> dict[str, Any]:
    """Each cell: its colour, its value."""
    cells = [
        [{"colour": colour, "value": value} for colour, value in zip(_hex(row), row.tolist(), strict=True)]
        for row in matrix.values
    ]
    rows = list(zip(matrix.rows, cells, strict=True))
    return {"form": "matrix", "columns": matrix.columns, "rows": rows, "scale": _hex(np.linspace(0, 1, 9))}


def _hex(values: np.ndarray) -> list[str]:
    inks = (255 * colours(values.clip(0, 1))).round().astype(np.uint8)
    return [f"#{ink.tobytes().hex()}" for ink in inks]
