"""The size of a study that one can afford: network, pictures, epochs, the same for every row and seed.

What was decided is written to STUDY/plan.json, so that a later sitting trains the same cells.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from weft.config import Config
from weft.data.sources.source import fingerprint
from weft.engine.device import pick_device
from weft.errors import WeftError
from weft.files import write_text
from weft.run.build import check_name
from weft.run.choose import SMALL, usual_side
from weft.run.session import absolute
from weft.study.ablate.costs import Cost, count, measure, plain
from weft.study.ablate.tables import Network, Row, Table
from weft.study.cells.cells import Cell, Result, whole_epochs
from weft.study.cells.settle import Say, open_study
from weft.study.cells.workers import cores, places, run_cells, threads
from weft.words import many

PLAN = "plan.json"
OWN_SIZES = ("", "nano", "paper")  # of the table's networks; all else is a model's name
OURS = {"state", "cells", "workers.txt"}  # what there is before a plan
QUICK, QUICK_EPOCHS = "quick", 30  # up to so many, light augmentation is better
PILOT_STEPS = 8  # of a short training of each row, which says how long an epoch takes
WHOLE_EPOCHS = 5  # from so many on all pictures are used; below, fewer, so that the time is filled
LEAST_STEPS = 10  # of a cell
MOST_PARTS = 12  # of an epoch: 1.6667 is five of three
SPARE = 0.92  # of the time; the rest is for what takes longer than planned


@dataclass(frozen=True)
class Wish:
    """What was asked for; 0 and "" are left to the plan. More seeds may be asked for later, and nothing else."""

    data: str
    model: str = ""  # nano, paper, or a model in the place of the table's
    minutes: float = 0.0
    epochs: int = 0
    img_size: int = 0
    fraction: float = 1.0
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    wish: Wish
    fingerprint: str  # of the data
    recipe: str
    img_size: int
    classes: int
    channels: int
    pictures: int  # that train where `fraction` is 1
    settings: dict[str, Any]  # of every cell
    networks: dict[str, Network]  # by the name of the row
    epochs: int = 0
    fraction: float = 1.0
    costs: dict[str, Cost] = field(default_factory=dict)
    device: str = ""

    def cell(self, row: Row, seed: int, epochs: int | None = None, fraction: float | None = None) -> Cell:
        """A row's training with one seed."""
        if epochs is None or fraction is None:
            epochs, fraction = whole_epochs(self.epochs * row.epochs, self.fraction * row.fraction)
        network = self.networks[row.name]
        length = {
            "run.epochs": epochs,
            "run.val_epochs": epochs,
            "data.fraction": round(self.wish.fraction * fraction, 6),
        }
        settings = {**self.settings, **row.settings, **length}
        return Cell(self.wish.data, network.model, seed, dict(network.switches), settings, self.recipe)


def draft_plan(table: Table, wish: Wish, study: Path, jobs: int, device: str) -> Plan:
    """All but costs and length. Writes nothing, and refuses what an earlier sitting was not asked for."""
    wish = replace(wish, data=absolute(wish.data))
    earlier = read_plan(study)
    if earlier is not None:  # the same networks, wherever it goes on
        plan = make_plan(table, wish, torch.device(earlier.device), workers=1, quick=earlier.recipe == QUICK)
        check_same(earlier, plan, study)
        return plan
    if study.exists() and not {entry.name for entry in study.iterdir()} <= OURS:
        raise WeftError(f"{study} already exists and holds no study; choose another --out.")
    return make_plan(table, wish, pick_device(device), len(places(device, jobs)), quick=wish.epochs <= QUICK_EPOCHS)


def find_plan(
    draft: Plan, table: Table, study: Path, seeds: int, jobs: int, device: str, begin: float, say: Say
) -> Plan:
    """The plan of an earlier sitting, for the rows that the table has now; or a new one."""
    earlier = read_plan(study)
    if earlier is not None:
        check_same(earlier, draft, study)
        plan = replace(earlier, networks=draft.networks)
        if plain(asdict(plan)["networks"]) != plain(asdict(earlier)["networks"]):
            say("the rows of the table have changed: costs are found anew")
            plan = replace(plan, costs=find_costs(plan, pick_device(device), jobs))
        said = f"{study}: on with {describe(plan)}"
    else:
        plan = replace(draft, costs=find_costs(draft, pick_device(device), jobs))
        plan = choose_size(plan, table, study, seeds, jobs, device, begin, say)
        said = describe(plan)
    write_text(study / PLAN, json.dumps(asdict(plan), indent=2))
    say(said)
    return plan


def choose_size(
    plan: Plan, table: Table, study: Path, seeds: int, jobs: int, device: str, begin: float, say: Say
) -> Plan:
    """How long the cells are: as was asked for, or as the time allows; and with that, what recipe they have."""
    if plan.wish.epochs:
        return replace(plan, epochs=plan.wish.epochs)
    plan = fit_into_time(plan, table, study, seeds, jobs, device, begin, say)
    if plan.epochs <= QUICK_EPOCHS or plan.wish.recipe:
        return plan
    long = make_plan(table, plan.wish, pick_device(device), len(places(device, jobs)), quick=False)
    same = (long.img_size, long.networks) == (plan.img_size, plan.networks)
    costs = plan.costs if same else find_costs(long, pick_device(device), jobs)
    return replace(long, epochs=plan.epochs, fraction=plan.fraction, costs=costs)


def describe(plan: Plan) -> str:
    pictures = round(plan.fraction * plan.pictures)
    models = dict.fromkeys(network.model for network in plan.networks.values())
    length = f"{many(plan.epochs, 'epoch')} of {pictures:,} pictures at {plan.img_size} pixels"
    return f"{', '.join(models)}: {length}, recipe {plan.recipe}"


# What does not depend on time ---------------------------------------------------------------------------------------


def make_plan(table: Table, wish: Wish, device: torch.device, workers: int, quick: bool) -> Plan:
    """Opens the data and decides what a run would decide for the base row; the other rows follow it.

    `quick`: the recipe of short trainings, where none was asked for.
    """
    if wish.model not in OWN_SIZES:
        check_name(wish.model)
        if not table.model:
            raise WeftError(f"{table.name}: every row names its own model, so --model {wish.model} has no place.")
    given = {**wish.settings, **({"augment.img_size": wish.img_size} if wish.img_size else {})}
    given |= {"data.source": wish.data, "data.fraction": wish.fraction}
    study = open_study(given, wish.recipe, device, say=lambda line: None)
    data, dense = study.data, study.data.source.task != "classify"
    small = wish.model == "nano" or (not wish.model and (device.type == "cpu" or usual_side(data.report) <= SMALL))
    networks = {row.name: choose_network(table, row, wish.model, small) for row in table.rows if not row.missing}
    recipe = wish.recipe or (QUICK if quick and not dense else study.recipe())

    def filled(network: Network, more: dict[str, Any] | None = None) -> Config:
        return study.filled(recipe, {"model.name": network.model, "model.args": dict(network.switches)}, more)

    base = filled(networks[table.base])
    readers = {} if device.type == "cpu" else {"data.workers": max(1, min(8, cores() // workers))}
    own = {key: study.given[key] for key in wish.settings if key != "run.batch"}  # the base has that as a number
    settings = {**study.shared(base), **readers, **own}
    networks = {
        name: Network(network.model, filled(network, settings).model.args) for name, network in networks.items()
    }
    return Plan(
        wish=wish,
        fingerprint=str(fingerprint(data.source)),
        recipe=recipe,
        img_size=base.augment.img_size,
        classes=len(data.source.classes),
        channels=base.data.channels,
        pictures=study.pictures,
        settings=settings,
        networks=networks,
        device=str(device),
    )


def choose_network(table: Table, row: Row, wanted: str, small: bool) -> Network:
    """The row's network at the size that is trained."""
    assert row.full is not None
    if wanted not in OWN_SIZES:
        replaced = row.full.model == table.model  # rows that name their own model keep it
        return Network(wanted, row.full.switches) if replaced else row.full
    if small and row.nano is None and wanted == "nano":
        raise WeftError(f"{table.name}: row {row.name!r} has no stand-in for --model nano; write one under `nano`.")
    return row.nano if small and row.nano is not None else row.full


def find_costs(plan: Plan, device: torch.device, jobs: int) -> dict[str, Cost]:
    shape = plan.img_size, plan.classes, plan.channels
    speeds = measure(plan.networks, *shape, device, threads(places(str(device), jobs)))
    counts = {name: count(network, *shape) for name, network in plan.networks.items()}
    return {name: replace(cost, throughput=speeds[name]) for name, cost in counts.items() if cost is not None}


# What does ------------------------------------------------------------------------------------------------------


def fit_into_time(
    plan: Plan, table: Table, study: Path, seeds: int, jobs: int, device: str, begin: float, say: Say
) -> Plan:
    """Trains a few rows for a few steps, and from how long that took chooses epochs and pictures for all."""
    batch, pictures = plan.settings["run.batch"], plan.pictures
    rows = [row for row in table.rows if not row.missing]
    workers = len(places(device, jobs))
    fraction = min(1.0, PILOT_STEPS * batch / pictures)
    say(f"{plan.wish.minutes:g} minutes: a few steps first, to see how long they take")
    pilots = choose_pilots(rows, table.base, plan.costs, workers)
    cells = [plan.cell(row, seed=0, epochs=1, fraction=fraction) for row in pilots]
    results = run_cells(study, cells, jobs=jobs, device=device)
    if results[0].error:
        raise WeftError(f"{table.base} cannot be trained here: {results[0].error.rstrip('.')}.")
    paces = find_paces(rows, dict(zip((row.name for row in pilots), results, strict=True)), plan.costs, batch)
    seconds = (SPARE * 60 * plan.wish.minutes - (time.monotonic() - begin)) * workers
    lengths = [
        choose_length(rows, paces, pictures=pictures, batch=batch, seeds=count, seconds=seconds)
        for count in range(seeds, 0, -1)
    ]
    epochs, part, fits = next((length for length in lengths if length[2]), lengths[-1])  # rather short than few seeds
    if not lengths[0][2]:
        what = f"for all of {many(seeds, 'seed')}" if fits else "even for one seed, which will take longer"
        say(f"{plan.wish.minutes:g} minutes are too few {what}; what is left out is said in the table")
    return replace(plan, epochs=epochs, fraction=part)


def throughput(costs: dict[str, Cost], name: str) -> float:
    """0 where it is not known."""
    return (costs[name].throughput or 0.0) if name in costs else 0.0


def choose_pilots(rows: list[Row], base: str, costs: dict[str, Cost], workers: int) -> list[Row]:
    """The base row and the slowest others, as many as are trained at once."""
    others = sorted((row for row in rows if row.name != base), key=lambda row: throughput(costs, row.name))
    return [*(row for row in rows if row.name == base), *others[: max(0, workers - 1)]]


@dataclass(frozen=True)
class Pace:
    speed: float  # pictures per second in training
    beside: float  # seconds of a cell for everything else


def find_paces(rows: list[Row], pilots: dict[str, Result], costs: dict[str, Cost], batch: int) -> dict[str, Pace]:
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
    rows: list[Row], paces: dict[str, Pace], *, pictures: int, batch: int, seeds: int, seconds: float
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


# On disk --------------------------------------------------------------------------------------------------------


def read_plan(study: Path) -> Plan | None:
    try:
        content = json.loads((study / PLAN).read_text(encoding="utf-8"))
        content["wish"] = Wish(**content["wish"])
        content["networks"] = {name: Network(**network) for name, network in content["networks"].items()}
        content["costs"] = {name: Cost(**cost) for name, cost in content["costs"].items()}
        return Plan(**content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise WeftError(f"{study / PLAN} is damaged; choose another --out, or remove it to plan anew.") from None


def check_same(earlier: Plan, now: Plan, study: Path) -> None:
    """Raises where an earlier sitting was asked for something else: its cells would not belong together."""
    names = {"data": "", "settings": "settings"} | {key: f"--{key.replace('_', '-')}" for key in WISHES}
    for key, option in names.items():
        before, after = getattr(earlier.wish, key), getattr(now.wish, key)
        if before != after:
            raise WeftError(
                f"{study} was started with {option or 'the data'} {before or 'left out'}, not {after or 'left out'};"
                " go on as it was started, or choose another --out."
            )
    if earlier.fingerprint != now.fingerprint:
        raise WeftError(
            f"The pictures of {now.wish.data} have changed since {study} was started; choose another --out."
        )
    if earlier.img_size != now.img_size:
        raise WeftError(
            f"{study} was started with pictures of {earlier.img_size} pixels, and the base row now has {now.img_size};"
            " choose another --out."
        )


WISHES = ("model", "minutes", "epochs", "img_size", "fraction", "recipe")
