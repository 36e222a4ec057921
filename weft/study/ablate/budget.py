"""A time budget as epochs and pictures: a few rows are trained for a few steps, and what that took decides."""

import math
import time
from dataclasses import dataclass, replace
from fractions import Fraction

from weft.errors import WeftError
from weft.study.ablate.costs import Cost
from weft.study.ablate.plan import AblationPlan, Execution
from weft.study.ablate.tables import Table, TableRow
from weft.study.cells.cell import Result
from weft.study.cells.workers import run_cells
from weft.words import many

PILOT_STEPS = 8  # of a short training of each row, which says how long an epoch takes
WHOLE_EPOCHS = 5  # from so many on all pictures are used; below, fewer, so that the time is filled
LEAST_STEPS = 10  # of a cell
MOST_PARTS = 12  # of an epoch: 1.6667 is five of three
SPARE = 0.92  # of the time; the rest is for what takes longer than planned


def fit_into_time(plan: AblationPlan, table: Table, how: Execution) -> AblationPlan:
    """Trains a few rows for a few steps, and from how long that took chooses epochs and pictures for all."""
    batch, pictures, minutes = plan.settings["run.batch"], plan.pictures, plan.request.minutes
    rows = table.trained(published=False)
    fraction = min(1.0, PILOT_STEPS * batch / pictures)
    how.say(f"{minutes:g} minutes: a few steps first, to see how long they take")
    pilots = choose_pilots(rows, table.base, plan.costs, how.workers)
    cells = [plan.cell(row, seed=0, epochs=1, fraction=fraction) for row in pilots]
    results = run_cells(how.folder, cells, jobs=how.jobs, device=how.device)
    if results[0].error:
        raise WeftError(f"{table.base} cannot be trained here: {results[0].error.rstrip('.')}.")
    paces = find_paces(rows, dict(zip((row.name for row in pilots), results, strict=True)), plan.costs, batch)
    seconds = (SPARE * 60 * minutes - (time.monotonic() - how.begin)) * how.workers
    lengths = [
        choose_length(rows, paces, pictures=pictures, batch=batch, seeds=count, seconds=seconds)
        for count in range(how.seeds, 0, -1)
    ]
    epochs, part, fits = next((length for length in lengths if length[2]), lengths[-1])  # rather short than few seeds
    if not lengths[0][2]:
        what = f"for all of {many(how.seeds, 'seed')}" if fits else "even for one seed, which will take longer"
        how.say(f"{minutes:g} minutes are too few {what}; the table says what is left out")
    return replace(plan, epochs=epochs, fraction=part)


def throughput(costs: dict[str, Cost], name: str) -> float:
    """Pictures per second of a row's network in inference; 0 where that is not known."""
    return (costs[name].throughput or 0.0) if name in costs else 0.0


def choose_pilots(rows: list[TableRow], base: str, costs: dict[str, Cost], workers: int) -> list[TableRow]:
    """The base row and the slowest others, as many as are trained at once."""
    others = sorted((row for row in rows if row.name != base), key=lambda row: throughput(costs, row.name))
    return [*(row for row in rows if row.name == base), *others[: max(0, workers - 1)]]


@dataclass(frozen=True)
class Pace:
    """How fast a row trains."""

    speed: float  # pictures per second in training
    beside: float  # seconds of a cell for everything else


def find_paces(rows: list[TableRow], pilots: dict[str, Result], costs: dict[str, Cost], batch: int) -> dict[str, Pace]:
    """How fast each row trains: as its pilot did, or, by the throughputs of inference, in proportion to the first."""
    found = {}
    for name, result in pilots.items():
        if not result.error:
            last = result.curve[-1]
            trained = batch * last["step"]
            speed = result.speed or trained / last["seconds"]  # of a single step with all that was beside it
            found[name] = Pace(speed, max(0.0, result.seconds - trained / speed))
    base, first = next(iter(found.items()))
    for row in rows:
        ratio = throughput(costs, row.name) / (throughput(costs, base) or math.inf)
        found.setdefault(row.name, Pace(first.speed * (ratio or 1.0), first.beside))
    return found


def choose_length(
    rows: list[TableRow], paces: dict[str, Pace], *, pictures: int, batch: int, seeds: int, seconds: float
) -> tuple[int, float, bool]:
    """Epochs and part of the pictures that fill `seconds` of work, and whether the least that makes sense fits.

    The epochs are such that those of every row are whole: multiples of three where one takes 1.67 times as many.
    """
    step = math.lcm(*(Fraction(row.epochs).limit_denominator(MOST_PARTS).denominator for row in rows))
    beside = sum(seeds * paces[row.name].beside for row in rows)
    epoch = sum(seeds * row.epochs * row.fraction * pictures / paces[row.name].speed for row in rows)
    fitting = (seconds - beside) / epoch
    if fitting >= max(WHOLE_EPOCHS, step):
        return int(fitting) // step * step, 1.0, True
    least = min(1.0, LEAST_STEPS * batch / pictures)
    epochs = step * math.ceil(max(fitting, least) / step)
    return epochs, round(max(fitting, least) / epochs, 4), fitting >= least
