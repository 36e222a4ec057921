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

from weft.catalog.measured import SMALL_SIDE
from weft.config import Config
from weft.data.sources.source import fingerprint
from weft.documents import read_json
from weft.engine.device import pick_device
from weft.errors import WeftError
from weft.files import write_text
from weft.models.registry import check_name
from weft.run.recipes import find_recipe
from weft.study.ablate.costs import Cost, count_cost, measure_throughput
from weft.study.ablate.tables import Network, Table, TableRow
from weft.study.cells.cell import Cell, whole_epochs
from weft.study.cells.setup import Say, open_study_data
from weft.study.cells.workers import cores, threads_per_worker, worker_devices
from weft.tasks.choose import usual_side
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
    as_published: bool = False  # each row with the paper's recipe, length and size
    init: str = ""  # a study whose rows give those of this one their first weights


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
    sizes: dict[str, int] = field(default_factory=dict)  # by row, where it is not `img_size`
    lengths: dict[str, int] = field(default_factory=dict)  # epochs by row; else they are `epochs`
    folder: str = ""  # of the study

    def size(self, row: str) -> int:
        return self.sizes.get(row, self.img_size)

    def cell(self, row: TableRow, seed: int, epochs: int | None = None, fraction: float | None = None) -> Cell:
        """A row's training with one seed."""
        if epochs is None or fraction is None:
            common = self.lengths.get(row.name, self.epochs)
            epochs, fraction = whole_epochs(common * row.epochs, self.fraction * row.fraction)
        network = self.networks[row.name]
        length = {
            "run.epochs": epochs,
            "run.val_epochs": epochs,
            "data.fraction": round(self.request.fraction * fraction, 6),
        }
        recipe = row.recipe if self.request.as_published else self.recipe
        if self.request.as_published and "run.steps" not in self.settings:
            length |= steps_of(recipe, epochs, fraction)
        settings = {**self.settings, **row.settings, **length}
        return Cell(self.request.data, network.model, seed, dict(network.switches), settings, recipe)


def steps_of(recipe: str, epochs: float, fraction: float) -> dict[str, Any]:
    """The steps of a recipe that counts in them, where a row is as long as it: its epochs are rounded."""
    settings = find_recipe(recipe)
    as_long = fraction == 1 and settings.get("run.epochs") == epochs
    return {"run.steps": settings["run.steps"]} if as_long and "run.steps" in settings else {}


# Making one ---------------------------------------------------------------------------------------------------------


def make_plan(table: Table, request: AblationRequest, device: torch.device, workers: int, quick: bool) -> AblationPlan:
    """Opens the data and decides what a run would decide for the base row; the other rows follow it.

    As published, each row has its own recipe. `quick`: the recipe of short trainings, where none was asked for.
    """
    published = request.as_published
    as_paper = {"data.protocol": "published"} if published else {}  # which trains on all, and reports on the test part
    if request.model not in OWN_SIZES:
        check_name(request.model)
        if not table.model:
            raise WeftError(f"{table.name}: every row names its own model, so --model {request.model} replaces none.")
    rows = {row.name: row for row in table.trained(published)}
    given = {**as_paper, **request.settings, **({"augment.img_size": request.img_size} if request.img_size else {})}
    given |= {"data.source": request.data, "data.fraction": request.fraction}
    first = table.base if table.base in rows else next(iter(rows))
    opened_by = rows[first].recipe if published else request.recipe
    study = open_study_data(given, opened_by, device, say=lambda line: None)
    dense = not task_class(study.data.source.task).whole_pictures
    affordable = device.type != "cpu" and usual_side(study.data.report) > SMALL_SIDE
    small = request.model == "nano" or (not request.model and not affordable and not published)
    networks = {name: choose_network(table, row, request.model, small) for name, row in rows.items()}
    recipe = request.recipe or (QUICK if quick and not dense else study.recipe())
    recipes = {name: row.recipe if published else recipe for name, row in rows.items()}

    def filled(name: str, more: dict[str, Any]) -> Config:
        own = {"model.name": networks[name].model, "model.args": dict(networks[name].switches)}
        return study.filled(recipes[name], own, {**more, **rows[name].settings})

    base = filled(first, {})
    readers = {} if device.type == "cpu" else {"data.workers": max(1, min(8, cores() // workers))}
    shared = study.shared(base)
    of_recipes = ("augment.img_size", "run.batch") if published else ()  # each has its own
    own = {key: study.given[key] for key in request.settings if published or key != "run.batch"}  # a number in `shared`
    more = {**table.steps_on(request.data), **(as_paper if study.data.split.report_on == "test" else {})}
    shared = {key: value for key, value in shared.items() if key not in of_recipes} | (more if published else {})
    settings = {**shared, **readers, **own}
    configs = {name: filled(name, settings) for name in networks}
    sizes = {name: config.augment.img_size for name, config in configs.items()}
    return AblationPlan(
        request=request,
        fingerprint=str(fingerprint(study.data.source)),
        recipe=recipes[first],
        img_size=base.augment.img_size,
        classes=len(study.data.source.classes),
        channels=base.data.channels,
        pictures=study.pictures,
        settings=settings,
        networks={name: network_of(config, dense) for name, config in configs.items()},
        device=str(device),
        sizes={name: size for name, size in sizes.items() if size != base.augment.img_size},
        lengths={name: table.length or config.run.epochs for name, config in configs.items()} if published else {},
    )


def network_of(config: Config, dense: bool) -> Network:
    """The network that a run with these settings trains."""
    model = config.model
    return Network(model.name, model.args, model.head, model.head_args) if dense else Network(model.name, model.args)


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
    shape, device = (plan.classes, plan.channels), how.first_device
    threads = threads_per_worker(worker_devices(str(device), how.jobs))
    sizes = {name: plan.size(name) for name in plan.networks}
    speeds = measure_throughput(plan.networks, sizes, *shape, device, threads)
    counts = {name: count_cost(network, sizes[name], *shape) for name, network in plan.networks.items()}
    return {name: replace(cost, throughput=speeds[name]) for name, cost in counts.items() if cost is not None}


def describe(plan: AblationPlan) -> str:
    if plan.request.as_published:
        return f"{many(len(plan.networks), 'row')} as published, on {plan.pictures:,} pictures"
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
        content = read_json(study / PLAN)
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


REQUESTED = ("as_published", "init", "model", "minutes", "epochs", "img_size", "fraction", "recipe")
