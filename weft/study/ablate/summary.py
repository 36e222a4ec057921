"""The results of a study's cells put together: a line for each row of the table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.study.ablate.costs import Cost
from weft.study.ablate.plan import AblationPlan
from weft.study.ablate.tables import Table, TableRow
from weft.study.cells.cell import LEFT_OUT, SCORES, Cell, Result
from weft.study.statistics import Difference, difference_by_seed, mean_sd

ONLY = {"published": "only --as-published", "short": "cited by the paper, not trained"}  # why a row was not


@dataclass(frozen=True)
class SummaryLine:
    """The figures of a row: here, and in the paper."""

    row: TableRow
    full: Cost | None = None  # of the network of the paper's size
    cost: Cost | None = None  # of the network that is trained
    scores: dict[int, float] = field(default_factory=dict)  # by seed, as parts of one
    mean: float | None = None
    sd: float | None = None
    difference: Difference | None = None  # to its base row; None for that itself
    paper: float | None = None  # its score there, in per cent
    paper_difference: float | None = None  # in points
    model: str = ""  # that is trained
    is_trained: bool = True
    errors: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The row by what was trained, with the paper's name beside it where that is another network."""
        stands_in = self.model and self.row.full is not None and self.row.full.model != self.model
        return f"{self.model} ({self.row.name})" if stands_in else self.row.name

    @property
    def verdict(self) -> str:
        if self.row.missing:
            return f"not here: {self.row.missing}"
        if not self.is_trained:
            return ONLY[self.row.only]
        if self.errors and not self.scores:
            return f"failed: {self.errors[0]}"
        if self.row.base == self.row.name:
            return "base"
        if self.difference is None:
            return ""
        larger = self.difference.larger_than_noise
        return "too few seeds: no verdict" if larger is None else "larger than noise" if larger else "within noise"


@dataclass(frozen=True)
class Study:
    """An ablation study with the results so far."""

    table: Table
    plan: AblationPlan
    lines: tuple[SummaryLine, ...]
    seeds: int
    done: int  # cells
    left_out: int  # cells for which there was no time
    score: str  # what the accuracy is called
    paper_column: str  # the paper's figure beside it, such as top1, or the name of a set

    @property
    def cells(self) -> int:
        return self.seeds * sum(line.is_trained for line in self.lines)


def summarise(
    table: Table,
    plan: AblationPlan,
    cells: dict[tuple[str, int], Cell],
    results: dict[str, Result],
    full: dict[str, Cost],
    seeds: int,
) -> Study:
    """The study as it stands; `results` by the keys of the cells, `full`: costs at the paper's size, by row."""
    scores: dict[str, dict[int, float]] = {row.name: {} for row in table.rows}
    errors: dict[str, list[str]] = {row.name: [] for row in table.rows}
    for (name, seed), cell in cells.items():
        result = results.get(cell.key)
        if result is not None and result.score is not None:
            scores[name][seed] = result.score
        elif result is not None and result.error != LEFT_OUT:
            errors[name].append(result.error)
    score = score_name(list(results.values()))
    column = table.score_column(plan.request.data, score)
    paper = {row.name: row.paper.get(column) for row in table.rows}
    lines = []
    for row in table.rows:
        mean, sd = mean_sd(list(scores[row.name].values()))
        lines.append(
            SummaryLine(
                row,
                full=full.get(row.name),
                cost=plan.costs.get(row.name),
                scores=scores[row.name],
                mean=mean,
                sd=sd,
                difference=difference_by_seed(scores[row.name], scores[row.base]) if row.base != row.name else None,
                paper=paper[row.name],
                model=plan.networks[row.name].model if row.name in plan.networks else "",
                is_trained=row.is_trained(plan.request.as_published),
                paper_difference=_minus(paper[row.name], paper[row.base]) if row.base != row.name else None,
                errors=tuple(errors[row.name]),
            )
        )
    done = sum(len(found) for found in scores.values())
    left_out = sum(cell.key in results and results[cell.key].error == LEFT_OUT for cell in cells.values())
    return Study(table, plan, tuple(lines), seeds, done, left_out, SCORES.get(score, "accuracy"), column)


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def score_name(results: Sequence[Result]) -> str:
    """Score that the cells are judged by; "" where none is done."""
    return next((name for result in results for name in SCORES if result.metrics.get(name) is not None), "")
