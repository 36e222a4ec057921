"""The report of `weft check` for people: a table in the terminal, and one offline page with the pictures concerned."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.check.findings import DataReport, Problem
from weft.data.check.scan import viewable
from weft.data.read import BadPicture, decode, header
from weft.data.sources.source import Source
from weft.files import write_text
from weft.report.page import data_uri, render
from weft.words import clean

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 12  # pictures, or pairs, of one problem
BARS = 200  # classes in the page's table
COLOURS = {"error": "red", "warning": "yellow", "note": "blue"}


def print_report(report: DataReport, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(clean(f"{report.root}: {report.layout}"), style="bold"))
    classes = Table(box=None, pad_edge=False)
    classes.add_column("class")
    for side in report.counts:
        classes.add_column(side, justify="right")
    classes.add_column("")
    totals = [sum(counts) for counts in zip(*report.counts.values(), strict=True)]
    for i in range(min(len(totals), 20)):
        numbers = [str(counts[i]) for counts in report.counts.values()]
        bar = Text("█" * round(30 * totals[i] / max(*totals, 1)), style="cyan")
        classes.add_row(Text(clean(report.classes[i])), *numbers, bar)
    if len(totals) > 20:
        classes.add_row(Text(f"and {len(totals) - 20} more", style="dim"))
    classes.add_row(Text("all", style="bold"), *(str(sum(counts)) for counts in report.counts.values()))
    console.print(classes)
    console.print(Text(clean(report.summary()), style="dim"))
    for note in report.notes:
        console.print(Text(clean(note), style="dim"))
    problems = Table(box=None, pad_edge=False, show_header=False)
    for problem in report.problems:
        style = COLOURS[problem.severity]
        problems.add_row(Text(problem.severity, style=f"bold {style}"), Text(clean(problem.text)))
        for line in _examples(problem):
            problems.add_row("", Text(clean(line), style="dim"))
    if report.problems:
        console.print()
        console.print(problems)
    console.print()
    console.print(Text(report.verdict(), style="bold"))


def write_page(report: DataReport, source: Source, path: str | Path) -> None:
    """One offline HTML file: what was found, and each problem with the pictures concerned."""
    wanted = {name for problem in report.problems for name in _pictured(problem)}
    positions = {name: i for i, name in enumerate(source.names) if name in wanted}
    pictures = {name: _picture(source, i) for name, i in positions.items()}
    totals = [sum(counts) for counts in zip(*report.counts.values(), strict=True)]
    values: dict[str, Any] = dict(
        report=report,
        pictures=pictures,
        totals=totals,
        most=max(totals, default=0) or 1,
        tallest=max((n for _, _, n in report.sizes), default=0) or 1,
        shown=SHOWN,
        bars=BARS,
    )
    write_text(Path(path), render("check.html.j2", **values))


def _examples(problem: Problem) -> list[str]:
    if problem.pairs:
        found = [str(pair) for pair in problem.pairs[:3]]
    else:
        found = [f"{name}  {problem.details.get(name, '')}".rstrip() for name in problem.names[:3]]
    return found + ([f"and {problem.count - 3} more"] if problem.count > 3 else [])


def _pictured(problem: Problem) -> list[str]:
    """Names whose pictures the page shows."""
    if problem.pairs:
        return [name for pair in problem.pairs[:SHOWN] for name in (pair.first, pair.second)]
    return problem.names[:SHOWN]


def _picture(source: Source, index: int) -> str:
    """A data URI, or nothing where the picture cannot be read."""
    try:
        file = source.open(index)
        return data_uri(viewable(decode(file, channels=header(file).channels, at_least=(160, 160))))
    except (BadPicture, OSError):
        return ""
