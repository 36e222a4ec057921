"""Ablation tables as YAML files: rows are switches of a model, with the paper's figures beside them.

`weft/study/ablate/tables` has those of the five papers; anybody's own are of the same form:

    title: Position embeddings of my model       what the rows are about
    model: cvt_13                                of every row that names none
    nano: cvt_nano                               its stand-in for short runs; leave it out where there is none
    base: none                                   the row that the others are compared with; by default the first
    rows:
      - name: none
      - name: every stage
        switches: {pos_embed: every}             arguments of the model
        base: none                               where it is compared with another row than the table's base
        epochs: 2                                times as many as the other rows, and
        fraction: 0.5                            a part of their pictures
        settings: {optim.weight_decay: 0.1}      any key of `weft keys`
        paper: {parameters: 20.4, top1: 81.5}    M, macs in G, per cent: as printed; only of what `columns` names

A row that cannot be made here says why under `missing`, and stays in the table. How the paper itself trains is for
`weft ablate --as-published`:

    recipe: cvt-imagenet                         of every row that names none
    length: 100                                  epochs of its rows, where they are not the recipe's
    steps: {flowers102: 500}                     optimiser steps on one of the sets, where they are not the recipe's
    data: [imagenet]                             the sets that it trains on; of several, each has a column of top-1
    settings: {model.head: fpn}                  of every row, however it is trained
    rows:
      - name: every stage
        recipe: cvt-384                          its own
        init: none                               the row whose weights it begins with, here or in `--init STUDY`
        only: published                          not in a short study; short: not as published, the paper cites it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.config import Config, override
from weft.documents import read_yaml
from weft.errors import WeftError, did_you_mean

FOLDER = Path(__file__).parent / "tables"
SCORES = ("top1", "miou", "mask_ap", "box_ap")  # what a row is judged by, and
COLUMNS = ("parameters", "macs", "throughput", *SCORES, "miou_scales")  # what else a paper may print of it
ONLY = ("published", "short")


@dataclass(frozen=True)
class Network:
    """A model and the arguments it is made with, and the head over it, where there is one."""

    model: str
    switches: Mapping[str, Any] = field(default_factory=dict)
    head: str = ""
    head_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableRow:
    """A row as its file has it."""

    name: str
    full: Network | None  # of the paper's size; None where there is no such network here
    nano: Network | None  # its stand-in for short runs
    base: str = ""  # the row it is compared with
    settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: float = 1.0
    fraction: float = 1.0
    paper: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""  # of the paper
    init: str = ""  # the row whose weights it begins with in the paper
    only: str = ""  # "published" or "short": how it is trained, where not in both ways
    note: str = ""
    missing: str = ""

    def is_trained(self, published: bool) -> bool:
        """Whether it takes part in a study that is as published, or in a short one."""
        return not self.missing and self.only in ("", "published" if published else "short")


@dataclass(frozen=True)
class Table:
    """An ablation table as its file has it."""

    name: str
    title: str
    base: str
    rows: tuple[TableRow, ...]
    model: str = ""  # of the rows that name none; "" where all do
    paper: str = ""  # such as "CvT"
    table: str = ""  # such as "5"
    columns: tuple[str, ...] = ()  # what the paper prints
    data: tuple[str, ...] = ()  # the sets that the paper trains on
    length: int = 0  # epochs in the paper; 0: those of the recipes
    steps: Mapping[str, int] = field(default_factory=dict)  # by set, where they are not those of the recipes
    differs: tuple[str, ...] = ()  # what is not as in the paper, beside data, size and length

    @property
    def source(self) -> str:
        """`CvT, table 5`; nothing of an own table."""
        where = f"table {self.table}" if self.table.isdigit() else self.table  # or a figure, a section
        return f"{self.paper}, {where}" if self.paper else ""

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have a column each, of top-1."""
        return self.data if len(self.data) > 1 else ()

    def score_column(self, data: str, score: str = "") -> str:
        """The column whose figures are compared: that of the set, `data`, or of what was scored; "" where none is."""
        wanted = (data.partition(":")[0], score, *SCORES)
        return next((name for name in wanted if name in (*self.sets, *self.columns)), "")

    def steps_on(self, data: str) -> dict[str, Any]:
        """The setting of the paper's steps on a set, where its recipe has others."""
        steps = self.steps.get(data.partition(":")[0])
        return {"run.steps": steps} if steps else {}

    def trained(self, published: bool) -> list[TableRow]:
        return [row for row in self.rows if row.is_trained(published)]


def table_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def find_table(name: str) -> Table:
    """One of the papers' by its name, or any YAML file by its path; with models that exist and take their switches."""
    if name in table_names():
        return check_models(FOLDER / f"{name}.yaml")
    if Path(name).suffix in (".yaml", ".yml"):
        return check_switches(check_models(Path(name)), name)
    raise WeftError(f"No table is called {name!r}; `weft ablate` lists them." + did_you_mean(name, table_names()))


def check_models(file: Path) -> Table:
    """The table of a file, once all its models were found."""
    table = read_table(file)

    import timm

    import weft.models  # noqa: F401  registers them

    for row in table.rows:
        for network, key in ((row.full, "model"), (row.nano, "nano")):
            if network is not None and not timm.is_model(network.model.split(".")[0]):
                said = f"{key}: there is no model {network.model!r}; `weft models` lists Weft's own."
                near = did_you_mean(network.model.split(".")[0], timm.list_models())
                raise WeftError(f"{file}: row {row.name!r}: {said}{near}")
    return table


def check_switches(table: Table, file: str) -> Table:
    """The table, once all its networks could be made; the papers' need no such look, their tests have it."""
    from weft.study.search.space import create_network

    for row in table.rows:
        for network in (row.full, row.nano):
            try:
                if network is not None:
                    create_network(network.model, {**network.switches, "device": "meta"})
            except WeftError as error:
                raise WeftError(f"{file}: row {row.name!r}: {error}") from None
            except (AssertionError, ValueError, RuntimeError):
                pass  # it may fit pictures of another size; its cell says so
    return table


# Reading --------------------------------------------------------------------------------------------------------

TABLE_KEYS = {
    "title": str,
    "paper": str,
    "table": (str, int),
    "columns": list,
    "data": list,
    "recipe": str,
    "length": int,
    "steps": dict,
    "settings": dict,
    "differs": list,
    "model": str,
    "nano": (str, dict),
    "base": (str, int),
    "rows": list,
}
ROW_KEYS = {
    "name": (str, int),
    "model": str,
    "switches": dict,
    "nano": (str, dict),
    "base": (str, int),
    "settings": dict,
    "epochs": (int, float),
    "fraction": (int, float),
    "paper": dict,
    "recipe": str,
    "init": (str, int),
    "only": str,
    "note": str,
    "missing": str,
}
NANO_KEYS = {"model": str, "switches": dict}


def read_table(file: Path) -> Table:
    """The table of a file; what is wrong in it is said with the key and the file."""
    content = _load(file)
    _check(content, TABLE_KEYS, ("title", "rows"), f"{file}")
    columns = tuple(content.get("columns", ()))
    for column in columns:
        if column not in COLUMNS:
            raise WeftError(f"{file}: columns: {column!r} does not exist; choose from {', '.join(COLUMNS)}.")
    for name, steps in content.get("steps", {}).items():
        if name not in content.get("data", ()) or type(steps) is not int or steps < 1:
            raise WeftError(f"{file}: steps: {name}: {steps!r} must be a number of steps on one of the sets in `data`.")
    if not content["rows"]:
        raise WeftError(f"{file}: rows is empty; a table needs at least two.")
    rows = [_row(row, number, content, columns, file) for number, row in enumerate(content["rows"], 1)]
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise WeftError(f"{file}: two rows are called {name!r}; give each its own name.")
    base = str(content.get("base", names[0]))
    for where, wanted in [("base", base), *((f"row {row.name!r}: base", row.base) for row in rows if row.base)]:
        if wanted not in names:
            raise WeftError(f"{file}: {where}: no row is called {wanted!r}." + did_you_mean(wanted, names))
        if rows[names.index(wanted)].missing:
            raise WeftError(f"{file}: {where}: {wanted!r} is missing here, so nothing can be compared with it.")
    if rows[names.index(base)].only == "published":
        raise WeftError(f"{file}: base: {base!r} is not in short studies; compare with another row.")
    return Table(
        name=file.stem,
        title=content["title"],
        base=base,
        rows=tuple(replace(row, base=row.base or base) for row in rows),
        model=content.get("model", ""),
        paper=content.get("paper", ""),
        table=str(content.get("table", "")),
        columns=columns,
        data=tuple(map(str, content.get("data", ()))),
        length=content.get("length", 0),
        steps=content.get("steps", {}),
        differs=tuple(map(str, content.get("differs", ()))),
    )


def _load(file: Path) -> Any:
    try:
        return read_yaml(file)
    except FileNotFoundError:
        raise WeftError(f"{file} does not exist; give a YAML file, or a name that `weft ablate` lists.") from None


def _check(content: Any, keys: Mapping[str, Any], needed: tuple[str, ...], where: str) -> None:
    """Raises unless `content` is a mapping with `needed` and otherwise only `keys`, each of its type."""
    if not isinstance(content, dict):
        raise WeftError(f"{where} must be a mapping with {' and '.join(needed) or ', '.join(keys)}.")
    for key in needed:
        if key not in content:
            raise WeftError(f"{where}: {key} is missing.")
    for key, value in content.items():
        if key not in keys:
            raise WeftError(f"{where}: unknown key {key!r}." + did_you_mean(str(key), list(keys)))
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise WeftError(f"{where}: {key}: {value!r} is not {_named(keys[key])}.")


def _named(kind: Any) -> str:
    first = kind[0] if isinstance(kind, tuple) else kind
    return {str: "text", list: "a list", dict: "a mapping", int: "a number"}[first]


def _row(content: Any, number: int, table: dict[str, Any], columns: tuple[str, ...], file: Path) -> TableRow:
    where = f"{file}: row {number}"
    _check(content, ROW_KEYS, ("name",), where)
    where = f"{file}: row {content['name']!r}"
    for key, most in (("epochs", 1000), ("fraction", 1)):
        if not 0 < content.get(key, 1) <= most:
            raise WeftError(f"{where}: {key}: {content[key]!r} must be above 0 and at most {most}.")
    if content.get("only", "published") not in ONLY:
        raise WeftError(f"{where}: only: {content['only']!r} does not exist; choose from {', '.join(ONLY)}.")
    for key, value in content.get("paper", {}).items():
        if key not in (*columns, *table.get("data", ())):
            raise WeftError(f"{where}: paper: {key!r} is not one of the table's columns.")
        if type(value) not in (int, float):
            raise WeftError(f"{where}: paper: {key}: {value!r} is not a number.")
    settings = {**table.get("settings", {}), **content.get("settings", {})}
    try:
        override(Config(), settings)
    except WeftError as error:
        raise WeftError(f"{where}: settings: {error}") from None
    missing = content.get("missing", "")
    full, nano = (None, None) if missing else _networks(content, table, settings, where)
    return TableRow(
        name=str(content["name"]),
        full=full,
        nano=nano,
        base=str(content.get("base", "")),
        settings=settings,
        epochs=float(content.get("epochs", 1)),
        fraction=float(content.get("fraction", 1)),
        paper=content.get("paper", {}),
        recipe=content.get("recipe", table.get("recipe", "")),
        init=str(content.get("init", "")),
        only=content.get("only", ""),
        note=content.get("note", ""),
        missing=missing,
    )


def _networks(
    row: dict[str, Any], table: dict[str, Any], settings: dict[str, Any], where: str
) -> tuple[Network, Network | None]:
    """The row's network, and its stand-in: the row's own switches over those of the stand-in."""
    model = row.get("model", table.get("model"))
    if not model:
        raise WeftError(f"{where}: model is missing, and the table names none.")
    switches = row.get("switches", {})
    head = {"head": settings.get("model.head", ""), "head_args": settings.get("model.head_args", {})}
    given: Any = row.get("nano") or (None if "model" in row else table.get("nano"))
    if given is None:
        return Network(model, switches, **head), None
    nano: dict[str, Any] = {"model": given} if isinstance(given, str) else given
    _check(nano, NANO_KEYS, (), f"{where}: nano")
    small = Network(nano.get("model", model), {**switches, **nano.get("switches", {})}, **head)
    return Network(model, switches, **head), small
