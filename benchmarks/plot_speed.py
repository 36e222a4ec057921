"""Draws docs/pictures/speed*.png from what gpu_models.py wrote: ratios and goals, growth, training curves.

python benchmarks/plot_speed.py [FILE]              by default the newest of benchmarks/results
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from curves import smooth
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from speed_table import PUBLISHED, WORDS, Line, newest, table

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
OURS, THEIRS, GOAL = "#1f77b4", "#7f7f7f", "#d62728"
STYLE = {
    "savefig.dpi": 110,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
}


def ratios(results: dict[str, Any]) -> Figure:
    """A panel for each part of the table: how many times as fast as the peer, and the goal."""
    lines = [line for line in table(results) if line.ratio is not None]
    kinds = {"inference": "inference", "training": "training step"}
    found = {kind: [line for line in lines if WORDS[line.part].startswith(kind)] for kind in kinds}
    found = {kind: lines for kind, lines in found.items() if lines}
    across = max(len({line.part for line in lines}) for lines in found.values())
    figure, grid = plt.subplots(len(found), across, sharey="row", squeeze=False, figsize=(10, 4.2 * len(found)))
    for panels, lines in zip(grid, found.values(), strict=True):
        names = list(dict.fromkeys(_name(line) for line in lines))
        for panel, part in zip(panels, dict.fromkeys(line.part for line in lines), strict=False):
            _bars(panel, [line for line in lines if line.part == part], names)
            panel.set_title(WORDS[part].replace(", ", "\n"), fontsize=9)
        for panel in panels[len({line.part for line in lines}) :]:
            panel.set_axis_off()
        panels[0].set_yticks(range(len(names)), names, fontsize=8)
        panels[0].invert_yaxis()
    note = f"times as fast as the peer in the same run ({PUBLISHED}: in another, eager); red: the goal"
    figure.supxlabel(note, fontsize=9)
    return figure


def _name(line: Line) -> str:
    return f"{line.pair.ours}\nto {line.pair.peer.split('_patch')[0]}"


def _bars(panel: Axes, lines: list[Line], names: list[str]) -> None:
    for line in lines:
        at, ratio = names.index(_name(line)), line.ratio or 0.0
        panel.barh(at, ratio, height=0.62, color=OURS)
        if line.goal is not None:
            panel.plot([line.goal] * 2, [at - 0.42, at + 0.42], color=GOAL, lw=2)
        beside = max(
            [ratio, *([line.goal] if line.goal and 0 <= line.goal - ratio < 0.6 else [])]
        )  # not across its goal
        panel.text(beside, at, f" {ratio:.2f}", va="center", fontsize=8)
    panel.axvline(1, color=THEIRS, lw=1)
    panel.margins(x=0.15)
    panel.grid(axis="y", visible=False)


def growth(results: dict[str, Any]) -> Figure:
    """Pictures per second over the batch at one size, and over the size at one batch."""
    rows = [row for row in results["growth"] if not row["error"]]
    sizes = sorted({row["img_size"] for row in rows})
    many = [row["batch"] for row in rows if row["img_size"] == sizes[-1]]
    pairs = list(dict.fromkeys((row["model"], row["peer"]) for row in rows if row["peer"]))
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(10, 4))
    for i, (ours, peer) in enumerate(pairs):
        for name, style in ((ours, "-o"), (peer, "--s")):
            if name == PUBLISHED:
                continue
            by_batch = [row for row in rows if row["model"] == name and row["img_size"] == sizes[0]]
            by_size = [row for row in rows if row["model"] == name and row["batch"] == max(many)]
            _line(panels[0], by_batch, "batch", name, style, f"C{i}")
            _line(panels[1], by_size, "img_size", name, style, f"C{i}")
    panels[0].set(xscale="log", yscale="log", xlabel=f"batch, {sizes[0]} pixels", ylabel="pictures per second")
    panels[0].set_xticks(sorted({row["batch"] for row in rows}), sorted({row["batch"] for row in rows}))
    panels[1].set(xlabel=f"side of the pictures, batch {max(many)}")
    panels[1].set_xticks(sizes, sizes)
    for panel in panels:
        panel.minorticks_off()
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panels[1].legend(fontsize=8, frameon=False)
    return figure


def _line(panel: Axes, rows: list[dict[str, Any]], key: str, name: str, style: str, color: str) -> None:
    rows = sorted(rows, key=lambda row: row[key])
    values = [row["pictures_per_second"] for row in rows]
    panel.plot([row[key] for row in rows], values, style, color=color, label=name, ms=4, lw=1.5)


def curves(results: dict[str, Any]) -> Figure:
    """The smoothed losses with kernels, without, and without in float32: three lines that rounding keeps apart."""
    found = results["curves"]
    figure, panels = plt.subplots(1, len(found), sharey=True, squeeze=False, figsize=(2.3 * len(found), 2.6))
    for panel, (name, curve) in zip(panels[0], found.items(), strict=True):
        for run, color, width in (("plain", THEIRS, 3.0), ("float32", "0.4", 0.8), ("kernels", OURS, 1.2)):
            panel.plot(smooth(curve["losses"][run]), color=color, lw=width, label=run)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("step")
    panels[0][0].set_ylabel("loss")
    panels[0][-1].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=PICTURES)
    args = parser.parse_args()
    if args.file and not args.file.exists():
        parser.error(f"there is no file {args.file}")
    results = json.loads((args.file or newest()).read_text())
    wanted = {"rows": ("speed", ratios), "growth": ("speed-growth", growth), "curves": ("speed-curves", curves)}
    with matplotlib.rc_context(STYLE):
        for section, (name, draw) in wanted.items():
            if results.get(section):
                path = args.out / f"{name}.png"
                draw(results).savefig(path, metadata={"Software": None})
                print(f"Wrote {path}")


if __name__ == "__main__":
    main()
