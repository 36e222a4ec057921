"""The size of a study that one can afford: network, pictures, epochs, the same for every row and seed.

The plan is written to STUDY/plan.json, so that a later call trains the same cells.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weft.config import Config
from weft.data.sources.source import fingerprint
from weft.engine.device import pick_device
from weft.errors import WeftError
from weft.files import write_text
from weft.models.registry import check_name
from weft.study.ablate.costs import Cost, count_cost, measure_throughput
from weft.study.ablate.tables import Network, Table, TableRow
from weft.study.cells.cell import Cell, whole_epochs
from weft.study.cells.setup import Say, open_study_data
from weft.study.cells.workers import cores, threads_per_worker, worker_devices
from weft.tasks.choose import SMALL, usual_side
from weft.tasks.registry import task_class
from weft.words import many

PLAN = "plan.json"
OWN_SIZES = ("", "nano", "paper")  # of the table's networks; all else is a model's name
QUICK, QUICK_EPOCHS = "quick", 30  # up to so many, light augmentation is better


@dataclass(frozen=True)
class AblationRequest:
    """The options of a study; 0 and "" are left to the plan. Only more seeds may be asked for later."""

    data: str
    model: str = ""  # nano, paper, or a model in the place of the table's
    minutes: float = 0.0
    epochs: int = 0
    img_size: int = 0
    fraction: float = 1.0
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Execution:
    """Where, how often and with what a study is trained; a later call may have another."""

    folder: Path
    seeds: int = 3
    jobs: int = 0  # cells at once; 0: from the machine
    device: str = "auto"
    say: Say = print
    begin: float = field(default_factory=time.monotonic)

    @property
    def first_device(self) -> torch.device:
        return pick_device(self.device)

    @property
    def workers(self) -> int:
        return len(worker_devices(self.device, self.jobs))


@dataclass(frozen=True)
class AblationPlan:
    """The networks, pictures and settings of all cells."""

    request: AblationRequest
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

    def cell(self, row: TableRow, seed: int, epochs: int | None = None, fraction: float | None = None) -> Cell:
        """A row's training with one seed."""
        if epochs is None or fraction is None:
            epochs, fraction = whole_epochs(self.epochs * row.epochs, self.fraction * row.fraction)
        network = self.networks[row.name]
        length = {
            "run.epochs": epochs,
            "run.val_epochs": epochs,
            "data.fraction": round(self.request.fraction * fraction, 6),
        }
        settings = {**self.settings, **row.settings, **length}
        return Cell(self.request.data, network.model, seed, dict(network.switches), settings, self.recipe)


# Making one ---------------------------------------------------------------------------------------------------------


def make_plan(table: Table, request: AblationRequest, device: torch.device, workers: int, quick: bool) -> AblationPlan:
    """Opens the data and decides what a run would decide for the base row; the other rows follow it.

    `quick`: the recipe of short trainings, where none was asked for.
    """
    if request.model not in OWN_SIZES:
        check_name(request.model)
        if not table.model:
            raise WeftError(f"{table.name}: every row names its own model, so --model {request.model} replaces none.")
    given = {**request.settings, **({"augment.img_size": request.img_size} if request.img_size else {})}
    given |= {"data.source": request.data, "data.fraction": request.fraction}
    study = open_study_data(given, request.recipe, device, say=lambda line: None)
    dense = not task_class(study.data.source.task).whole_pictures
    affordable = device.type != "cpu" and usual_side(study.data.report) > SMALL
    small = request.model == "nano" or (not request.model and not affordable)
    networks = {row.name: choose_network(table, row, request.model, small) for row in table.rows if not row.missing}
    recipe = request.recipe or (QUICK if quick and not dense else study.recipe())

    def filled(network: Network, more: dict[str, Any] | None = None) -> Config:
        return study.filled(recipe, {"model.name": network.model, "model.args": dict(network.switches)}, more)

    base = filled(networks[table.base])
    readers = {} if device.type == "cpu" else {"data.workers": max(1, min(8, cores() // workers))}
    own = {key: study.given[key] for key in request.settings if key != "run.batch"}  # the base has that as a number
    settings = {**study.shared(base), **readers, **own}
    networks = {
        name: Network(network.model, filled(network, settings).model.args) for name, network in networks.items()
    }
    return AblationPlan(
        request=request,
        fingerprint=str(fingerprint(study.data.source)),
        recipe=recipe,
        img_size=base.augment.img_size,
        classes=len(study.data.source.classes),
        channels=base.data.channels,
        pictures=study.pictures,
        settings=settings,
        networks=networks,
        device=str(device),
    )


def choose_network(table: Table, row: TableRow, wanted: str, small: bool) -> Network:
    """The row's network at the size that is trained."""
    assert row.full is not None
    if wanted not in OWN_SIZES:
        replaced = row.full.model == table.model  # rows that name their own model keep it
        return Network(wanted, row.full.switches) if replaced else row.full
    if small and row.nano is None and wanted == "nano":
        raise WeftError(f"{table.name}: row {row.name!r} has no small model for --model nano; name one under `nano`.")
    return row.nano if small and row.nano is not None else row.full


def find_costs(plan: AblationPlan, how: Execution) -> dict[str, Cost]:
    """The costs of every row's network at the size that is trained."""
    shape, device = (plan.img_size, plan.classes, plan.channels), how.first_device
    threads = threads_per_worker(worker_devices(str(device), how.jobs))
    speeds = measure_throughput(plan.networks, *shape, device, threads)
    counts = {name: count_cost(network, *shape) for name, network in plan.networks.items()}
    return {name: replace(cost, throughput=speeds[name]) for name, cost in counts.items() if cost is not None}


def describe(plan: AblationPlan) -> str:
    pictures = round(plan.fraction * plan.pictures)
    models = dict.fromkeys(network.model for network in plan.networks.values())
    length = f"{many(plan.epochs, 'epoch')} of {pictures:,} pictures at {plan.img_size} pixels"
    return f"{', '.join(models)}: {length}, recipe {plan.recipe}"


# On disk ------------------------------------------------------------------------------------------------------------


def write_plan(plan: AblationPlan, study: Path) -> None:
    content = asdict(plan)
    write_text(study / PLAN, json.dumps({"wish": content.pop("request"), **content}, indent=2))


def read_plan(study: Path) -> AblationPlan | None:
    try:
        content = json.loads((study / PLAN).read_text(encoding="utf-8"))
        content["request"] = AblationRequest(**content.pop("wish"))
        content["networks"] = {name: Network(**network) for name, network in content["networks"].items()}
        content["costs"] = {name: Cost(**cost) for name, cost in content["costs"].items()}
        return AblationPlan(**content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise WeftError(
            f"{study / PLAN} is damaged; choose another --out, or remove the file to make a new plan."
        ) from None


def check_same(earlier: AblationPlan, now: AblationPlan, study: Path) -> None:
    """Raises where an earlier call asked for something else: its cells would not belong together."""
    names = {"data": "", "settings": "settings"} | {key: f"--{key.replace('_', '-')}" for key in REQUESTED}
    for key, option in names.items():
        before, after = getattr(earlier.request, key), getattr(now.request, key)
        if before != after:
            raise WeftError(
                f"{study} was started with {option or 'the data'} {before or 'left out'}, not {after or 'left out'};"
                " give the same options, or choose another --out."
            )
    if earlier.fingerprint != now.fingerprint:
        raise WeftError(
            f"The pictures of {now.request.data} have changed since {study} was started; choose another --out."
        )
    if earlier.img_size != now.img_size:
        raise WeftError(
            f"{study} was started with pictures of {earlier.img_size} pixels, and the base row now has {now.img_size};"
            " choose another --out."
        )


REQUESTED = ("model", "minutes", "epochs", "img_size", "fraction", "recipe")
