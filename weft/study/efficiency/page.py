"""A comparison to look at: one plot for papers with both axes, and a page."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.files import write_text
from weft.report.charts import line_chart
from weft.report.figures import INKS, plots, write_figure
from weft.report.page import render
from weft.study.cells.cell import SCORES
from weft.study.efficiency.comparison import KINDS, Comparison
from weft.study.statistics import DASH, format_difference, format_score

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_page(folder: Path, found: Comparison) -> None:
    write_figure(folder, "compare", partial(draw, found))
    models = list(found.design.common.models)
    charts = []
    for kind, x_name in KINDS.items():
        lines = {model: [(x, 100 * y) for x, y in found.line(model, kind)] for model in models}
        show_x = None if kind == "epochs" else "{:.0%}".format
        charts.append(line_chart(f"{SCORES[found.score]} by {kind}, %", lines, x_name=x_name, show_x=show_x))
    curves = {model: [(x, 100 * y) for x, y in points] for model, points in found.curves.items()}
    charts.append(line_chart(f"{SCORES[found.score]} on the way, %, in the longest training", curves))
    write_text(
        folder / "compare.html",
        render("compare.html.j2", found=found, charts=charts, rows=table(found), score=SCORES[found.score]),
    )


def table(found: Comparison) -> list[list[str]]:
    """The header, and a row for each training that all models have: mean and spread of each model, differences."""
    first, *others = found.design.common.models
    rows = [["", "steps", first, *(word for model in others for word in (model, "difference"))]]
    for kind, xs in found.design.axes.items():
        for x in xs:
            steps = found.steps[kind].get(x)
            cells = [found.design.describe(kind, x), f"{steps:,}" if steps else DASH]
            cells.append(format_score(*found.spread(first, kind, x)))
            for model in others:
                cells.append(format_score(*found.spread(model, kind, x)))
                cells.append(format_difference(found.difference(model, first, kind, x)))
            rows += [cells] if cells not in rows else []  # where both axes meet
    return rows


def draw(found: Comparison) -> "Figure":
    """Epochs to the left, with the longest training's way as a thin line; pictures to the right."""
    figure, axes = plots(len(KINDS))
    for place, (kind, x_name) in zip(axes, KINDS.items(), strict=True):
        for ink, model in zip(INKS * 9, found.design.common.models, strict=False):
            xs, means, sds = [], [], []
            for x in found.scores[model][kind]:
                mean, sd = found.spread(model, kind, x)
                if mean is not None:
                    xs, means, sds = [*xs, x], [*means, 100 * mean], [*sds, 100 * (sd or 0)]
            spread = sds if any(sds) else None
            place.errorbar(xs, means, spread, color=ink, marker="o", ms=4, capsize=2, label=model)
            if kind == "epochs" and model in found.curves:
                way = found.curves[model]
                place.plot([x for x, _ in way], [100 * y for _, y in way], color=ink, lw=0.7, alpha=0.5)
        place.set_xlabel(x_name)
        if kind == "pictures":
            parts = found.design.axes["pictures"]
            place.set_xticks(parts, [f"{part:.0%}" for part in parts])
        else:
            place.set_xticks(found.design.epochs)
    axes[0].set_ylabel(f"{SCORES[found.score]}, %")
    axes[0].legend(fontsize=7)
    return figure
