"""`weft ablate`: trains every row of a table with every seed, and says which differences are larger than noise."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from weft.engine.state import locked
from weft.study.ablate.costs import cost_in_paper
from weft.study.ablate.plan import Plan, Wish, draft_plan, find_plan
from weft.study.ablate.report import write_reports
from weft.study.ablate.summary import Study, summarise
from weft.study.ablate.tables import Table
from weft.study.cells.cells import Cell, Result, read_result
from weft.study.cells.workers import Begins, run_cells

Watch = Callable[[Study, dict[str, str]], None]  # what is known, and the state of the cells by their keys


def ablate(
    table: Table,
    wish: Wish,
    out: Path,
    *,
    seeds: int = 3,
    jobs: int = 0,
    device: str = "auto",
    say: Callable[[str], None] = print,
    watch: Watch | None = None,
) -> Study:
    """Plans the study or goes on with it, trains what is not trained yet, and returns what was found.

    `watch` is called about once a second. The minutes of the wish are those of this sitting: where cells take longer
    than was planned, those of later seeds are left out.
    """
    begin = time.monotonic()
    draft = draft_plan(table, wish, out, jobs, device)  # refuses what is wrong before anything is written
    with locked(out):
        plan = find_plan(draft, table, out, seeds, jobs, device, begin, say)
        return run(table, plan, out, seeds, jobs, device, begin, watch)


def run(
    table: Table, plan: Plan, out: Path, seeds: int, jobs: int, device: str, begin: float, watch: Watch | None
) -> Study:
    full = {row.name: cost for row in table.rows if row.full is not None and (cost := cost_in_paper(row.full))}
    cells = cells_of(table, plan, seeds)
    results: dict[str, Result] = {}

    def look(states: dict[str, str]) -> None:
        for cell in cells.values():
            if states[cell.key] == "done" and cell.key not in results and (found := read_result(out, cell)):
                results[cell.key] = found
        if watch is not None:
            watch(summarise(table, plan, cells, results, full, seeds), states)

    begins = in_time(begin + 60 * plan.wish.minutes) if plan.wish.minutes else None
    found = run_cells(out, list(cells.values()), jobs=jobs, device=device, watch=look, begins=begins)
    study = summarise(table, plan, cells, {result.cell.key: result for result in found}, full, seeds)
    write_reports(study, out)
    return study


def in_time(end: float) -> Begins:
    """Cells of the first seed, without which there is no table, and of the others those that are over by `end`.

    A cell is expected to take as long as its row did with an earlier seed, or else as the slowest so far.
    """

    def begins(cell: Cell, done: Sequence[Result]) -> bool:
        over = [result for result in done if not result.error]
        same = [result for result in over if replace(result.cell, seed=0).key == replace(cell, seed=0).key]
        expected = max((result.seconds for result in same or over), default=0.0)
        return cell.seed == 0 or time.monotonic() + expected <= end

    return begins


def cells_of(table: Table, plan: Plan, seeds: int) -> dict[tuple[str, int], Cell]:
    """By row and seed. All rows come with the first seed, then with the next: what is done first can be compared."""
    rows = [row for row in table.rows if not row.missing]
    return {(row.name, seed): plan.cell(row, seed) for seed in range(seeds) for row in rows}
