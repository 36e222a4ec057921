"""What benchmarks/evidence.yaml says: claims, the trainings that test them, and the checks that decide.

    claims:
      E9:
        title: ...                           what is asked
        paper: ...                           the paper's number
        checks:                              what must be so for the claim to hold
          - {better: STUDY / ROW, than: STUDY / ROW}
          - {matches: STUDY / ROW, to: STUDY / ROW, within: 1}       points that it may be below the other
          - {cheaper: STUDY / ROW, than: STUDY / ROW}                in MACs
          - {reaches: STUDY / ROW, value: 95.5}
    studies:                                 the most telling first
      STUDY:
        claims: [E9]
        table: cvt-position                  of `weft ablate`, or a file beside evidence.yaml
        size: nano                           the table's small networks, or those of the paper
        rows: [...]                          by default all
        data: cifar10
        img_size: 32
        batch: 128
        recipe: small-data
        lengths: {0.2: 30, 1: 15}            part of the training pictures: epochs of a row that is not longer
        settings: {...}                      any of `weft keys`
        init: STUDY                          weights from the same row of another study
        alone: true                          nothing runs beside it, since it is timed
        seeds: 1                             at most so many

`STUDY / ROW / 0.2` is a row with another part of the pictures than the study's largest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from weft.documents import read_yaml
from weft.errors import WeftError, did_you_mean
from weft.study.ablate.plan import choose_network
from weft.study.ablate.tables import FOLDER, Network, Table, TableRow, read_table, table_names
from weft.study.cells.cell import Cell, cell_folder

DESIGN = Path(__file__).with_name("evidence.yaml")
SAVE_MINUTES = 0.5  # a visit to a GPU is short, and what was begun goes on in the next
READERS = 2  # processes of each cell beside a GPU, where several cells share the cores; they change no picture
WEIGHTS = "model.safetensors"
BASES = {"better": "than", "cheaper": "than", "matches": "to"}  # of a check with two sides: where the other is


@dataclass(frozen=True)
class DataSet:
    """A set of pictures: where it lies below the folder of data, or the name of an embedded one."""

    source: str
    pictures: int  # that train
    classes: int
    note: str = ""


@dataclass(frozen=True)
class Place:
    """A cell within the design: which row of which study, with which part of the pictures, from which seed."""

    study: str
    row: str
    part: float
    seed: int = 0


@dataclass(frozen=True)
class Study:
    """One table on one set of pictures."""

    name: str
    claims: tuple[str, ...]
    table: str
    size: str
    data: str
    img_size: int
    batch: int
    recipe: str
    lengths: Mapping[float, int]
    rows: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    init: str = ""
    alone: bool = False
    seeds: int = 0

    @property
    def trained(self) -> list[TableRow]:
        table = load_table(self.table)
        known = {row.name: row for row in table.trained(published=False)}
        for name in self.rows:
            if name not in known:
                raise WeftError(f"{self.name}: {self.table} has no row {name!r}." + did_you_mean(name, list(known)))
        return [known[name] for name in self.rows or known]

    def network(self, row: TableRow) -> Network:
        return choose_network(load_table(self.table), row, self.size, small=self.size == "nano")

    def counted(self, seeds: int) -> int:
        """How many of so many seeds are trained."""
        return min(seeds, self.seeds or seeds)

    def places(self, seeds: int) -> Iterator[Place]:
        """All rows with the first seed, then with the next: what is done first can be compared. Small parts first."""
        for part in sorted(self.lengths):
            for seed in range(self.counted(seeds)):
                for row in self.trained:
                    yield Place(self.name, row.name, part, seed)

    def cell(self, place: Place) -> Cell:
        """The training at a place, with the names of data and weights in place of where they lie."""
        row = next(row for row in self.trained if row.name == place.row)
        network, epochs = self.network(row), max(1, round(self.lengths[place.part] * row.epochs))
        settings = {
            **row.settings,
            **{"augment.img_size": self.img_size, "run.batch": self.batch},
            **{"run.epochs": epochs, "run.minutes": 0, "run.val_epochs": epochs, "run.save_minutes": SAVE_MINUTES},
            "data.fraction": round(place.part * row.fraction, 6),
            **({"model.init": self.init} if self.init else {}),
            **self.settings,
        }
        return Cell(self.data, network.model, place.seed, dict(network.switches), settings, self.recipe)


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it is decided here."""

    name: str
    title: str
    paper: str
    checks: tuple[Mapping[str, Any], ...]
    note: str = ""


@dataclass(frozen=True)
class Design:
    """All of it, in the order in which it is trained."""

    data: dict[str, DataSet]
    claims: dict[str, Claim]
    studies: dict[str, Study]

    def chosen(self, names: list[str]) -> list[Study]:
        """Studies by their names or those of their claims; all, where none is named."""
        known = [*self.claims, *self.studies]
        for name in names:
            if name not in known:
                raise WeftError(f"There is no claim or study {name!r}." + did_you_mean(name, known))
        return [s for s in self.studies.values() if not names or {s.name, *s.claims} & {*names}]

    def key(self, place: Place) -> str:
        """The same for the same training, wherever data lie: what a row in a file of results is known by.

        Of one that begins with another's weights, also which training they are from.
        """
        cell = self.studies[place.study].cell(place)
        if self.studies[place.study].init:
            cell = replace(cell, settings={**cell.settings, "model.init": self.key(self.source(place))})
        return cell.key

    def places_by_key(self, seeds: int) -> dict[str, list[Place]]:
        """The places that each training serves: of equal cells in several studies one is trained."""
        found: dict[str, list[Place]] = {}
        for place in (place for study in self.studies.values() for place in study.places(seeds)):
            found.setdefault(self.key(place), []).append(place)
        return found

    def comparisons(self, seeds: int) -> Iterator[list[Place]]:
        """The places that are compared with one another: all rows of a study, and both sides of a check."""
        for study in self.studies.values():
            for _, places in groupby(study.places(seeds), key=lambda place: (place.part, place.seed)):
                yield [*places]
        for check in (check for claim in self.claims.values() for check in claim.checks):
            kind = next(iter(check))
            if kind in BASES:
                sides = [self.parse(check[kind]), self.parse(check[BASES[kind]])]
                for seed in range(min(self.studies[side.study].counted(seeds) for side in sides)):
                    yield [replace(side, seed=seed) for side in sides]

    def resolved(self, place: Place, data: Path, work: Path, gpu: bool) -> Cell:
        """The cell with the places of data and weights on this machine; a GPU's is never gone on with on a CPU."""
        study = self.studies[place.study]
        cell = study.cell(place)
        settings = dict(cell.settings)
        settings.setdefault("data.workers", READERS if gpu else 0)
        if study.init:
            settings["model.init"] = str(cell_folder(work, self.resolved(self.source(place), data, work, gpu)) / "run")
        elif "model.init" in settings:
            settings["model.init"] = str(data.absolute() / settings["model.init"])
        return replace(cell, data=locate(self.data[cell.data].source, data), settings=settings)

    def source(self, place: Place) -> Place:
        """Where the first weights of a training come from: the same row and seed, trained on all pictures."""
        init = self.studies[self.studies[place.study].init]
        return replace(place, study=init.name, part=max(init.lengths))

    def parse(self, reference: str) -> Place:
        """`STUDY / ROW` or `STUDY / ROW / PART`."""
        name, row, *part = reference.split(" / ")
        if name not in self.studies or row not in [one.name for one in self.studies[name].trained]:
            raise WeftError(f"{DESIGN.name}: {reference!r} is no row of a study.")
        found = float(part[0]) if part else max(self.studies[name].lengths)
        if found not in self.studies[name].lengths:
            raise WeftError(f"{DESIGN.name}: {reference!r}: {name} does not train on that part of the pictures.")
        return Place(name, row, found)


def locate(source: str, data: Path) -> str:
    """A path below the folder of data: of `camvid:camvid` only what follows the colon; `demo:` needs none."""
    kind, _, path = source.rpartition(":")
    if kind == "demo":
        return source
    return f"{kind}:{data.absolute() / path}" if kind else str(data.absolute() / path)


@cache
def load_table(name: str) -> Table:
    return read_table(FOLDER / f"{name}.yaml" if name in table_names() else DESIGN.parent / name)


def read_design(file: Path = DESIGN) -> Design:
    content = read_yaml(file)
    return Design(
        data={name: DataSet(**entry) for name, entry in content["data"].items()},
        claims={
            name: Claim(name, **{**entry, "checks": tuple(entry.get("checks", ()))})
            for name, entry in content["claims"].items()
        },
        studies={
            name: Study(name, **{**entry, "claims": tuple(entry["claims"]), "rows": tuple(entry.get("rows", ()))})
            for name, entry in content["studies"].items()
        },
    )
