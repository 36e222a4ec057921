"""A study as text: lines for the terminal, table.md and table.html in its folder, the paper's figures beside ours."""

from collections.abc import Sequence
from pathlib import Path

from weft.catalog.papers import PAPERS
from weft.files import write_text
from weft.heads import DETECTORS
from weft.report.text import SCORES
from weft.study.ablate.costs import Cost
from weft.study.ablate.plan import describe
from weft.study.ablate.summary import Study, SummaryLine
from weft.study.ablate.tables import Table
from weft.study.statistics import CONFIDENCE, DASH, ENOUGH, format_difference, format_score
from weft.words import many


def write_reports(study: Study, folder: Path) -> None:
    from weft.report.page import render

    write_text(folder / "table.md", as_markdown(study))
    page = render(
        "ablate.html.j2",
        study=study,
        title=title(study.table),
        result_header=result_header(study),
        results=[(line, result_row(line)) for line in study.lines],
        costs=[cost_row(line) for line in study.lines],
        notes=notes(study),
        forest=Forest(study.lines),
        describe=describe(study.plan),
    )
    write_text(folder / "table.html", page)


# Rows of text ---------------------------------------------------------------------------------------------------


def short_header(study: Study) -> list[str]:
    return ["row", *COSTS, scored(study), "difference", "verdict", "paper"]


def short_row(line: SummaryLine) -> list[str]:
    """For a terminal: the row that was trained, and the paper's score with its difference."""
    paper = percent_as_printed(line.paper)
    if line.paper_difference is not None:
        paper += f" ({line.paper_difference:+.1f})"
    return [line.name, *costs(line.cost), score(line), format_difference(line.difference), line.verdict, paper]


def result_header(study: Study) -> list[str]:
    printed = f"paper: {COLUMN_NAMES.get(study.paper_column, study.paper_column) or 'score'}"
    return ["row", scored(study), "difference", printed, "paper: difference", "verdict"]


def result_row(line: SummaryLine) -> list[str]:
    printed = percent_as_printed(line.paper)
    apart = DASH if line.paper_difference is None else f"{line.paper_difference:+.1f}"
    return [line.name, score(line), format_difference(line.difference), printed, apart, line.verdict]


COLUMN_NAMES = {**SCORES, "macs": "MACs", "miou_scales": "mIoU, several scales"}
COSTS = ["parameters", "MACs", "pictures/s"]
COST_HEADER = [
    *("row", "paper: parameters", "paper: MACs", "here: parameters", "here: MACs"),
    *(f"trained: {name}" for name in COSTS),
]


def cost_row(line: SummaryLine) -> list[str]:
    """The paper's figures, the same network here, and the network that was trained."""
    paper = line.row.paper
    printed = [f"{paper[key]:g} {unit}" if key in paper else DASH for key, unit in (("parameters", "M"), ("macs", "G"))]
    here = [f"{line.full.parameters / 1e6:.2f} M", f"{line.full.macs:.2f} G"] if line.full else [DASH, DASH]
    return [line.name, *printed, *here, *costs(line.cost)]


def scored(study: Study) -> str:
    return f"{study.score} (mean ± sd)"


def costs(cost: Cost | None) -> list[str]:
    if cost is None:
        return [DASH] * len(COSTS)
    macs = f"{cost.macs:.2f} G" if cost.macs >= 1 else f"{1000 * cost.macs:.1f} M"
    return [f"{cost.parameters / 1e6:.2f} M", macs, f"{cost.throughput:,.0f}" if cost.throughput else DASH]


def score(line: SummaryLine) -> str:
    return DASH if line.mean is None else f"{format_score(line.mean, line.sd)} %"


def percent_as_printed(value: float | None) -> str:
    """With as many digits as papers print: one, or two."""
    return DASH if value is None else f"{value:.1f}" if value == round(value, 1) else f"{value:.2f}"


# Pages ----------------------------------------------------------------------------------------------------------


def notes(study: Study) -> list[str]:
    """Everything one must know to read the table."""
    table, plan = study.table, study.plan
    said = [
        f"Trained here: {describe(plan)}; {many(study.seeds, 'seed')}; the score is that of the last epoch on the "
        f"validation pictures. {study.done} of {many(study.cells, 'cell')} are done.{left_out(study)}",
        f"A difference is that to the row's base, in points, paired seed by seed, with Student's {CONFIDENCE:.0%} "
        "interval: larger than noise where the interval leaves out zero; one seed has none, nor have fewer than "
        f"{ENOUGH} with one and the same difference. Of twenty rows that differ in nothing, one "
        "will look so. Seeds vary first weights, order, augmentation and, where the data have none of their own, the "
        "validation pictures.",
    ]
    bases = {line.row.base for line in study.lines}
    if len(bases) > 1:
        said.append(
            "Bases: "
            + "; ".join(f"{line.row.name} to {line.row.base}" for line in study.lines if line.row.base != line.row.name)
            + "."
        )
    with_head = any(network.head for network in plan.networks.values())
    if table.paper:
        said.append(
            f"The paper's figures are those of {table.source}, on {' and '.join(table.data) or 'ImageNet-1k'} with its "
            "own recipe; 'here' is the same network, counted "
            + ("with its head at the paper's size." if with_head else "at 224 pixels or its own, 1,000 classes.")
        )
        if any(paper.name == table.paper and not paper.counts_attention for paper in PAPERS):
            said.append(f"MACs here include the products of attention; those of {table.paper} leave them out.")
    if any(network.head in DETECTORS for network in plan.networks.values()):
        said.append("Trained detectors: MACs of backbone and pyramid; what the rest costs depends on the objects.")
    stand_ins: dict[str, list[str]] = {}
    for line in study.lines:
        full, here = line.row.full, plan.networks.get(line.row.name)
        if full is not None and here is not None and here.model != full.model:
            stand_ins.setdefault(f"{here.model} for {full.model}", []).append(line.row.name)
    if stand_ins:
        named = "; ".join(f"{pair} ({', '.join(names)})" for pair, names in stand_ins.items())
        said.append(f"Trained were stand-ins: {named}.")
    said += [f"{text.rstrip('.')}." for text in table.differs]
    said += [f"{line.row.name}: {line.row.note.rstrip('.')}." for line in study.lines if line.row.note]
    said += [f"{line.row.name} failed: {error}" for line in study.lines for error in dict.fromkeys(line.errors)]
    return said


def left_out(study: Study) -> str:
    if not study.left_out:
        return ""
    return f" {many(study.left_out, 'cell')} of later seeds had no time left; the same command goes on with them."


def title(table: Table) -> str:
    return f"{table.title} ({table.source})" if table.source else table.title


def as_markdown(study: Study) -> str:
    results = markdown_table([result_header(study), *(result_row(line) for line in study.lines)])
    paid = markdown_table([COST_HEADER, *(cost_row(line) for line in study.lines)])
    listed = "".join(f"- {note}\n" for note in notes(study))
    return f"# {title(study.table)}\n\n{results}\n## Costs\n\n{paid}\n## How to read it\n\n{listed}"


def markdown_table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows]
    return "".join([lines[0], "|---|" + "---:|" * (len(rows[0]) - 1) + "\n", *lines[1:]])


class Forest:
    """Differences to the base with their intervals, one below the other, and the paper's: geometry for an SVG."""

    LEFT, RIGHT, STEP, TOP = 250, 740, 26, 26

    def __init__(self, lines: Sequence[SummaryLine]) -> None:
        self.lines = [line for line in lines if line.difference is not None]
        values = [0.0]
        for line in self.lines:
            assert line.difference is not None
            found = (line.difference.low, line.difference.mean, line.difference.high)
            values += [100 * value for value in found if value is not None]
            values += [] if line.paper_difference is None else [line.paper_difference]
        margin = 0.05 * (max(values) - min(values)) or 1.0
        self.low, self.high = min(values) - margin, max(values) + margin
        self.height = self.TOP + self.STEP * len(self.lines) + 30

    def x(self, points: float) -> float:
        return round(self.LEFT + (points - self.low) / (self.high - self.low) * (self.RIGHT - self.LEFT), 1)

    def y(self, index: int) -> int:
        return self.TOP + self.STEP * index + self.STEP // 2

    def ticks(self) -> list[float]:
        from weft.report.charts import nice_ticks

        return [tick for tick in nice_ticks(self.low, self.high) if self.low <= tick <= self.high]
