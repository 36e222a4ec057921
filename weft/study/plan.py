"""The size of a study that one can afford: network, pictures, epochs, the same for every row and seed.

What was decided is written to STUDY/plan.json, so that a later sitting trains the same cells.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weft.config import Config
from weft.data.findings import many
from weft.data.sources import fingerprint
from weft.engine.build import check_name
from weft.engine.choose import SMALL, usual_side
from weft.engine.device import pick_device
from weft.engine.session import absolute
from weft.errors import WeftError
from weft.files import write_text
from weft.study.cells import Cell, Result
from weft.study.costs import Cost, count, measure
from weft.study.settle import Say, open_study
from weft.study.tables import Network, Row, Table
from weft.study.workers import cores, places, run_cells, threads

PLAN = "plan.json"
OWN_SIZES = ("", "nano", "paper")  # of the table's networks; all else is a model's name
OURS = {"state", "cells", "workers.txt"}  # what there is before a plan
QUICK_EPOCHS = 30  # up to so many, light augmentation is better
PILOT_STEPS = 8  # of a short training of each row, which says how long an epoch takes
WHOLE_EPOCHS = 5  # from so many on all pictures are used; below, fewer, so that the time is filled
LEAST_STEPS = 10  # of a cell
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
        epochs = epochs or max(1, round(self.epochs * row.epochs))
        part = self.fraction * row.fraction if fraction is None else fraction
        network = self.networks[row.name]
        length = {"run.epochs": epochs, "run.val_epochs": epochs, "data.fraction": round(self.wish.fraction * part, 6)}
        settings = {**self.settings, **row.settings, **length}
        return Cell(self.wish.data, network.model, seed, dict(network.switches), settings, self.recipe)


def find_plan(table: Table, wish: Wish, study: Path, seeds: int, jobs: int, device: str, say: Say) -> Plan:
    """The plan of an earlier sitting, if it was for the same; or a new one."""
    begin = time.monotonic()
    wish = replace(wish, data=absolute(wish.data))
    earlier = read_plan(study)
    if earlier is not None:
        plan = make_plan(table, wish, torch.device(earlier.device), workers=1)  # the same networks, wherever it goes on
        check_same(earlier, plan, study)
        say(f"{study}: on with {describe(earlier)}")
        return replace(earlier, networks=plan.networks)
    if study.exists() and not {entry.name for entry in study.iterdir()} <= OURS:
        raise WeftError(f"{study} already exists and holds no study; choose another --out.")
    plan = make_plan(table, wish, pick_device(device), len(places(device, jobs)))
    plan = replace(plan, costs=find_costs(plan, pick_device(device), jobs))
    if wish.epochs:
        plan = replace(plan, epochs=wish.epochs)
    else:
        plan = fit_into_time(plan, table, study, seeds, jobs, device, begin, say)
    study.mkdir(parents=True, exist_ok=True)
    write_text(study / PLAN, json.dumps(asdict(plan), indent=2))
    say(describe(plan))
    return plan


def describe(plan: Plan) -> str:
    pictures = round(plan.fraction * plan.pictures)
    return f"{many(plan.epochs, 'epoch')} of {pictures:,} pictures at {plan.img_size} pixels, recipe {plan.recipe}"


# What does not depend on time ---------------------------------------------------------------------------------------


def make_plan(table: Table, wish: Wish, device: torch.device, workers: int) -> Plan:
    """Opens the data and decides what a run would decide for the base row; the other rows follow it."""
    if wish.model not in OWN_SIZES:
        check_name(wish.model)
    given = {**wish.settings, **({"augment.img_size": wish.img_size} if wish.img_size else {})}
    given |= {"data.source": wish.data, "data.fraction": wish.fraction}
    study = open_study(given, wish.recipe, device, say=lambda line: None)
    data, dense = study.data, study.data.source.task != "classify"
    small = wish.model == "nano" or (not wish.model and (device.type == "cpu" or usual_side(data.report) <= SMALL))
    networks = {row.name: choose_network(table, row, wish.model, small) for row in table.rows if not row.missing}
    short = bool(wish.minutes) or wish.epochs < QUICK_EPOCHS
    recipe = wish.recipe or ("quick" if short and not dense else study.recipe())

    def filled(network: Network, more: dict[str, Any] | None = None) -> Config:
        return study.filled(recipe, {"model.name": network.model, "model.args": dict(network.switches)}, more)

    base = filled(networks[table.base])
    readers = {} if device.type == "cpu" else {"data.workers": max(1, min(8, cores() // workers))}
    settings = {**study.shared(base), **readers, **{key: study.given[key] for key in wish.settings}}
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
    speeds = measure(plan.networks, plan.img_size, device, threads(places(str(device), jobs)))
    counts = {
        name: count(network, plan.img_size, plan.classes, plan.channels) for name, network in plan.networks.items()
    }
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
    epochs, part, fits = choose_length(rows, paces, pictures=pictures, batch=batch, seeds=seeds, seconds=seconds)
    if not fits:
        say(f"{plan.wish.minutes:g} minutes are too few for {many(seeds * len(rows), 'cell')}; it will take longer")
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
            trained = batch * max(row["step"] for row in result.curve)
            found[name] = Pace(result.speed, max(0.0, result.seconds - trained / result.speed))
    base, first = next(iter(found.items()))
    for row in rows:
        ratio = throughput(costs, row.name) / (throughput(costs, base) or math.inf)
        found.setdefault(row.name, Pace(first.speed * (ratio or 1.0), first.beside))
    return found


def choose_length(
    rows: list[Row], paces: dict[str, Pace], *, pictures: int, batch: int, seeds: int, seconds: float
) -> tuple[int, float, bool]:
    """Epochs and part of the pictures that fill `seconds` of work, and whether the least that makes sense fits."""
    beside = sum(seeds * paces[row.name].beside for row in rows)
    epoch = sum(seeds * row.epochs * row.fraction * pictures / paces[row.name].speed for row in rows)
    fitting = (seconds - beside) / epoch
    if fitting >= WHOLE_EPOCHS:
        return int(fitting), 1.0, True
    least = min(1.0, LEAST_STEPS * batch / pictures)
    epochs = math.ceil(max(fitting, least))
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


WISHES = ("model", "minutes", "epochs", "img_size", "fraction", "recipe")
