"""Figures as files for papers, drawn by matplotlib: white ground, text that can be edited, no dates."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INKS = ("#1f6f78", "#d98032", "#7a5ea8", "#bb2d3b", "#3d6186", "#5a6776")  # the colours of the pages
SETTINGS: Any = {
    **{"svg.fonttype": "none", "svg.hashsalt": "weft", "font.size": 8, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e1e5ea", "axes.axisbelow": True},
}
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 200, "metadata": {"Software": None}, "pil_kwargs": {"compress_level": 4}},
    "svg": {"dpi": 200, "metadata": {"Date": None}},
    "webp": {"dpi": 130, "pil_kwargs": {"quality": 82}},
}


def write_figure(
    folder: Path, stem: str, draw: Callable[[], "Figure"], endings: Sequence[str] = ("png", "svg")
) -> None:
    """Writes what `draw` makes as STEM.png and STEM.svg."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure = draw()
        for ending in endings:
            write_atomic(folder / f"{stem}.{ending}", partial(figure.savefig, **FORMATS[ending]))


def new_figure(width: float, height: float, layout: str | None = "constrained") -> "Figure":
    """In inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)  # pyright: ignore[reportArgumentType]


def plots(count: int, width: float = 3.9, height: float = 2.9) -> tuple["Figure", list["Axes"]]:
    """A figure of plots side by side, and their axes."""
    figure = new_figure(count * width, height)
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    for each in axes:
        each.grid(True)
    return figure, axes
