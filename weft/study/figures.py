"""Plots of a study as PNG and SVG files for papers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.files import write_atomic

INKS = ("#1f6f78", "#d98032", "#7a5ea8", "#bb2d3b", "#3d6186", "#5a6776")  # the colours of the pages
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "weft", "font.size": 8, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e1e5ea"}


def write_figure(folder: Path, name: str, draw: Callable[[Any], None], panels: int = 1) -> None:
    """`draw(axes)` as NAME.png and NAME.svg, `axes` being one, or a list of several."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.9 * panels, 2.9), layout="constrained")
        draw(figure.subplots(1, panels))
        for ending, unsaid in (("png", {"Software": None}), ("svg", {"Date": None})):
            write_atomic(
                folder / f"{name}.{ending}",
                lambda path, unsaid=unsaid: figure.savefig(path, dpi=200, metadata=unsaid),
            )
