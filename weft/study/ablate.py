"""`weft ablate`: trains every row of a table with every seed, and says which differences are larger than noise."""

from collections.abc import Callable
from pathlib import Path

from weft.study.cells import Cell, Result, read_result
from weft.study.costs import cost_in_paper
from weft.study.plan import Plan, Wish, find_plan
from weft.study.report import write_reports
from weft.study.summary import Study, summarise
from weft.study.tables import Table
from weft.study.workers import run_cells


def ablate(
    table: Table,
    wish: Wish,
    out: Path,
    *,
    seeds: int = 3,
    jobs: int = 0,
    device: str = "auto",
    say: Callable[[str], None] = print,
    watch: Callable[[Study, dict[str, str]], None] | None = None,
) -> Study:
    """Plans the study or goes on with it, trains what is not trained yet, and returns what was found.

    `watch` is called about once a second with what is known by then, and the state of the cells by their keys.
    """
    plan = find_plan(table, wish, out, seeds, jobs, device, say)
    full = {row.name: cost_in_paper(row.full) for row in table.rows if row.full is not None}
    cells = cells_of(table, plan, seeds)
    results: dict[str, Result] = {}

    def look(states: dict[str, str]) -> None:
        for cell in cells.values():
            if states[cell.key] == "done" and cell.key not in results and (found := read_result(out, cell)):
                results[cell.key] = found
        if watch is not None:
            watch(summarise(table, plan, cells, results, full, seeds), states)

    found = run_cells(out, list(cells.values()), jobs=jobs, device=device, watch=look)
    study = summarise(table, plan, cells, {result.cell.key: result for result in found}, full, seeds)
    write_reports(study, out)
    return study


def cells_of(table: Table, plan: Plan, seeds: int) -> dict[tuple[str, int], Cell]:
    """By row and seed. All rows come with the first seed, then with the next: what is done first can be compared."""
    rows = [row for row in table.rows if not row.missing]
    return {(row.name, seed): plan.cell(row, seed) for seed in range(seeds) for row in rows}
