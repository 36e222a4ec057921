"""The results of a search to look at: the front as a plot for papers, and a page with the networks on it."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.files import write_text
from weft.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Chart, Dot, Line, Point, Tick, nice_ticks
from weft.report.figures import INKS, plots, write_figure
from weft.report.page import render
from weft.study.cells.cell import SCORES
from weft.study.search.plan import SearchResult, Trial, short_number
from weft.words import shell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COSTS = {"macs": "MACs", "parameters": "parameters"}


def write_page(folder: Path, found: SearchResult) -> None:
    write_figure(folder, "pareto", partial(draw, found))
    score, cost = SCORES[found.score], COSTS[found.plan.objective]
    write_text(
        folder / "search.html",
        render(
            "search.html.j2",
            found=found,
            space=found.plan.space,
            cost=cost,
            score=score,
            pareto=scatter(f"{score} against {cost}", cost, pareto_points(found), short_number),
            ranks=scatter(
                f"{score} after training against the first judgement",
                "first judgement",
                rank_points(found),
                "{:.4g} %".format,
            ),
            rows=[network_row(found, trial, rank) for rank, trial in enumerate(by_cost(found), start=1)],
            short_number=short_number,
        ),
    )


def by_cost(found: SearchResult) -> list[Trial]:
    return sorted(found.trained or found.front(), key=lambda trial: getattr(trial, found.plan.objective))


def network_row(found: SearchResult, trial: Trial, number: int) -> dict[str, Any]:
    """One network of the page's table."""
    arguments = found.plan.space.arguments(trial.point)
    options = [(f"--model.args.{name}", json.dumps(value)) for name, value in {**found.plan.args, **arguments}.items()]
    command = [
        "weft",
        "train",
        found.plan.data,
        "--model",
        found.plan.model,
        *(word for pair in options for word in pair),
    ]
    return {
        "number": number,
        "trial": trial,
        "on_front": trial in found.front(),
        "choices": {name: format_choice(value) for name, value in arguments.items()},
        "command": shell(*command),
        "ranks": [
            rank(trial.judged, [t.judged for t in found.trained]),
            rank(trial.trained, [t.trained for t in found.trained]),
        ],
    }


def rank(value: float | None, values: Sequence[float | None]) -> int | None:
    """The place of a value among others, 1 for the best."""
    return None if value is None else 1 + sum(other is not None and other > value for other in values)


def format_choice(value: Any) -> str:
    """[[2], [1, 1]] as "2 | 1 1"."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return " | ".join(" ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in v) for v in value)
    return json.dumps(value)


# Plots ----------------------------------------------------------------------------------------------------------


def pareto_points(found: SearchResult) -> dict[str, tuple[list[Point], bool]]:
    """Each set of points, as cost and score, and whether a line joins them."""
    objective = found.plan.objective
    front = [trial for trial in by_cost(found) if trial in found.front()]
    how = "with shared weights" if found.plan.supernet else "after a part of the epochs"
    lines = {f"judged {how}": ([(getattr(t, objective), 100 * t.judged) for t in found.judged], False)}
    if found.trained:
        lines["trained"] = ([(getattr(t, objective), 100 * (t.trained or 0)) for t in found.trained], False)
    return lines | {"front": ([(getattr(t, objective), 100 * (t.trained or t.judged)) for t in front], True)}


def rank_points(found: SearchResult) -> dict[str, tuple[list[Point], bool]]:
    return {"networks": ([(100 * t.judged, 100 * (t.trained or 0)) for t in found.trained], False)}


def scatter(
    title: str, x_name: str, lines: dict[str, tuple[list[Point], bool]], show: Any = "{:.4g}".format
) -> Chart | None:
    everything = [point for points, _ in lines.values() for point in points]
    if len(everything) < 2:
        return None
    ticks = [nice_ticks(*_span(values)) for values in zip(*everything, strict=True)]
    x, y = Axis(ticks[0][0], ticks[0][-1], LEFT, WIDTH - RIGHT), Axis(ticks[1][0], ticks[1][-1], HEIGHT - BOTTOM, TOP)
    return Chart(
        title,
        x_name,
        [Tick(x(value), show(value)) for value in ticks[0]],
        [Tick(y(value), f"{value:g} %") for value in ticks[1]],
        [
            Line(
                name,
                [" ".join(f"{x(a):g},{y(b):g}" for a, b in points)] if joined else [],
                [Dot(x(a), y(b), f"{name}: {b:.2f} %, {show(a)}") for a, b in points],
            )
            for name, (points, joined) in lines.items()
        ],
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest value; of equal ones, a little more on both sides."""
    low, high = min(values), max(values)
    margin = 0.0 if high > low else 0.05 * abs(low) or 1.0
    return low - margin, high + margin


def draw(found: SearchResult) -> "Figure":
    """The front, and beside it both orders."""
    figure, (pareto, orders) = plots(2)
    score, cost = SCORES[found.score], COSTS[found.plan.objective]
    unit, name = (
        (1e9, f"G{cost}") if found.plan.objective == "macs" and found.trials[0].macs > 1e8 else (1e6, f"million {cost}")
    )
    marks = {True: dict(marker="o", ms=4), False: dict(ls="", marker="o", ms=2.5)}
    inks = (INKS[5], INKS[1], INKS[0]) if found.trained else (INKS[5], INKS[0])
    for ink, (label, (points, joined)) in zip(inks, pareto_points(found).items(), strict=True):
        xs, ys = zip(*points, strict=True)
        pareto.plot([x / unit for x in xs], ys, color=ink, label=label, **marks[joined])
    for trial in found.trained if found.score == "top1" else []:  # one standard error of the validation pictures
        part = trial.trained or 0.0
        error = 100 * (part * (1 - part) / found.plan.validated) ** 0.5
        x = getattr(trial, found.plan.objective) / unit
        pareto.errorbar(x, 100 * part, error, color=INKS[1], lw=0.8, capsize=2, zorder=1)
    pareto.set_xlabel(name)
    pareto.set_ylabel(f"{score}, %")
    pareto.legend(fontsize=7)
    for points, _ in rank_points(found).values():
        for x, y in points:
            orders.plot(x, y, "o", color=INKS[1], ms=4)
    tau = f"Kendall's tau {found.tau:.2f}" if found.tau is not None else "not trained yet"
    orders.set_title(tau, fontsize=8)
    orders.set_xlabel(f"{score} by the first judgement, %")
    orders.set_ylabel(f"{score} after training, %")
    return figure
