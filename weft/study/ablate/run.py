"""`weft ablate`: trains every row of a table with every seed, and says which differences are larger than noise."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from weft.documents import read_json
from weft.engine.lock import locked
from weft.errors import WeftError
from weft.files import write_text
from weft.report.text import columns
from weft.run.data import absolute
from weft.study.ablate.budget import fit_into_time
from weft.study.ablate.costs import as_lists, cost_in_paper
from weft.study.ablate.plan import (
    QUICK,
    QUICK_EPOCHS,
    AblationPlan,
    AblationRequest,
    Execution,
    check_same,
    describe,
    find_costs,
    make_plan,
    read_plan,
    write_plan,
)
from weft.study.ablate.published import check_published, estimate, estimate_line, estimate_table
from weft.study.ablate.report import write_reports
from weft.study.ablate.summary import Study, summarise
from weft.study.ablate.tables import Table
from weft.study.cells.cell import Cell, Result, cell_folder, read_result
from weft.study.cells.workers import MayStart, run_cells
from weft.words import many

RUNS = "runs.json"  # the runs of each row, for whoever goes on from their weights
BEFORE_A_PLAN = {"state", "cells", "workers.txt"}  # what a study's folder may hold without one

Watch = Callable[[Study, dict[str, str]], None]  # the study so far, and the state of the cells by their keys


def run_ablation(table: Table, request: AblationRequest, how: Execution, watch: Watch | None = None) -> Study:
    """Plans the study or goes on with it, trains what is not trained yet, and returns the results of all cells.

    `watch` is called about once a second. The minutes of the request are those of this call: where cells take longer
    than was planned, those of later seeds are left out.
    """
    draft = draft_plan(table, request, how)  # refuses what is wrong before anything is written
    cells_of(table, draft, how.seeds)  # and weights that are not there
    if request.as_published:
        say_costs(table, draft, how)
    with locked(how.folder):
        return train_cells(table, find_plan(draft, table, how), how, watch)


def plan_ablation(table: Table, request: AblationRequest, how: Execution) -> None:
    """Says what a study would cost as published, and trains nothing."""
    say_costs(table, draft_plan(table, request, how), how)


def say_costs(table: Table, plan: AblationPlan, how: Execution) -> None:
    how.say(f"Timing a few training steps of {many(len(table.trained(published=True)), 'row')} first.")
    found = list(estimate(table, plan, how))
    for line in columns(estimate_table(found), right=(2, 3, 4, 5)):
        how.say(line)
    how.say(estimate_line(found, how))


# The plan -----------------------------------------------------------------------------------------------------------


def draft_plan(table: Table, request: AblationRequest, how: Execution) -> AblationPlan:
    """All but costs and length. Writes nothing, and refuses what an earlier call did not ask for."""
    folder, init = how.folder, absolute(request.init) if request.init else ""
    request = replace(request, data=absolute(request.data), init=init)
    if request.as_published:
        check_published(table)
    earlier = read_plan(folder)
    if earlier is not None:  # the same networks, wherever it goes on
        plan = make_plan(table, request, torch.device(earlier.device), workers=1, quick=earlier.recipe == QUICK)
        check_same(earlier, plan, folder)
        return replace(plan, folder=str(folder.absolute()))
    if folder.exists() and not {entry.name for entry in folder.iterdir()} <= BEFORE_A_PLAN:
        raise WeftError(f"{folder} already exists and holds no study; choose another --out.")
    plan = make_plan(table, request, how.first_device, how.workers, quick=request.epochs <= QUICK_EPOCHS)
    return replace(plan, folder=str(folder.absolute()))


def find_plan(draft: AblationPlan, table: Table, how: Execution) -> AblationPlan:
    """The plan of an earlier call, for the rows that the table has now; or a new one."""
    earlier = read_plan(how.folder)
    if earlier is not None:
        check_same(earlier, draft, how.folder)
        plan = replace(earlier, networks=draft.networks, folder=draft.folder)
        if as_lists(asdict(plan)["networks"]) != as_lists(asdict(earlier)["networks"]):
            how.say("the rows of the table have changed: their costs are measured again")
            plan = replace(plan, costs=find_costs(plan, how))
        said = f"{how.folder}: on with {describe(plan)}"
    else:
        plan = choose_size(replace(draft, costs=find_costs(draft, how)), table, how)
        said = describe(plan)
    write_plan(plan, how.folder)
    how.say(said)
    return plan


def choose_size(plan: AblationPlan, table: Table, how: Execution) -> AblationPlan:
    """How long the cells are: as was asked for, or as the time allows; and with that, what recipe they have."""
    if plan.request.as_published:
        return plan
    if plan.request.epochs:
        return replace(plan, epochs=plan.request.epochs)
    plan = fit_into_time(plan, table, how)
    if plan.epochs <= QUICK_EPOCHS or plan.request.recipe:
        return plan
    long = make_plan(table, plan.request, how.first_device, how.workers, quick=False)
    same = (long.img_size, long.networks) == (plan.img_size, plan.networks)
    costs = plan.costs if same else find_costs(long, how)
    return replace(long, epochs=plan.epochs, fraction=plan.fraction, costs=costs, folder=plan.folder)


# The cells ----------------------------------------------------------------------------------------------------------


def train_cells(table: Table, plan: AblationPlan, how: Execution, watch: Watch | None) -> Study:
    """Trains the cells that have no result yet, and writes the reports on all."""
    full = {row.name: cost for row in table.rows if (cost := cost_in_paper(row, table.source))}
    cells = cells_of(table, plan, how.seeds)
    results: dict[str, Result] = {}

    def look(states: dict[str, str]) -> None:
        for cell in cells.values():
            if states.get(cell.key) == "done" and cell.key not in results and (found := read_result(how.folder, cell)):
                results[cell.key] = found
        if watch is not None:
            watch(summarise(table, plan, cells, results, full, how.seeds), states)

    minutes = plan.request.minutes
    in_time = may_start_until(how.begin + 60 * minutes) if minutes else None
    runs: dict[str, dict[int, str]] = {}
    for (name, seed), cell in cells.items():
        runs.setdefault(name, {})[seed] = f"cells/{cell.key}/run"
    write_text(how.folder / RUNS, json.dumps(runs, indent=2))
    later = {row.name for row in table.rows if row.init in plan.networks}  # they begin where others ended
    waves = [[cell for (name, _), cell in cells.items() if (name in later) == last] for last in (False, True)]
    found = []
    for wave in filter(None, waves):
        found += run_cells(how.folder, wave, jobs=how.jobs, device=how.device, watch=look, may_start=in_time)
    study = summarise(table, plan, cells, {result.cell.key: result for result in found}, full, how.seeds)
    write_reports(study, how.folder)
    return study


def may_start_until(end: float) -> MayStart:
    """Cells of the first seed, without which there is no table, and of the others those that are over by `end`.

    A cell is expected to take as long as its row did with an earlier seed, or else as the slowest so far.
    """

    def may_start(cell: Cell, done: Sequence[Result]) -> bool:
        over = [result for result in done if not result.error]
        same = [result for result in over if replace(result.cell, seed=0).key == replace(cell, seed=0).key]
        expected = max((result.seconds for result in same or over), default=0.0)
        return cell.seed == 0 or time.monotonic() + expected <= end

    return may_start


def cells_of(table: Table, plan: AblationPlan, seeds: int) -> dict[tuple[str, int], Cell]:
    """By row and seed. All rows come with the first seed, then with the next: what is done first can be compared."""
    rows = table.trained(plan.request.as_published)
    cells = {(row.name, seed): plan.cell(row, seed) for seed in range(seeds) for row in rows}
    for row, seed in ((row, seed) for seed in range(seeds) for row in rows):
        weights = ""
        if plan.request.as_published and (row.init, seed) in cells:
            weights = str(cell_folder(Path(plan.folder), cells[row.init, seed]) / "run")
        elif plan.request.init:
            weights = find_weights(Path(plan.request.init), row.init or row.name, seed)
        if weights:
            cell = cells[row.name, seed]
            cells[row.name, seed] = replace(cell, settings={**cell.settings, "model.init": weights})
    if plan.request.init and not any("model.init" in cell.settings for cell in cells.values()):
        raise WeftError(f"--init {plan.request.init}: it has no row of the same name as one of {table.name}'s.")
    return cells


def find_weights(study: Path, row: str, seed: int) -> str:
    """The run of a row in another study, with the same seed or else with the first; "" where it has no such row."""
    try:
        runs = read_json(study / RUNS)
    except (OSError, ValueError):
        raise WeftError(f"--init {study}: there is no {RUNS}, so it is no study of `weft ablate`.") from None
    return str(study / runs[row].get(str(seed), runs[row]["0"])) if row in runs else ""
