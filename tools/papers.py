"""Writes docs/papers.md: every table and figure of the papers in order, and the command that repeats it. `make docs`.

The order, and what has no results, is in tools/papers.yaml; what a table needs, and how it deviates, comes from its
file in `weft/study/ablate/tables`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from weft.catalog.papers import PAPERS
from weft.heads import DETECTORS
from weft.run.recipes import find_recipe
from weft.study.ablate.costs import Cost, cost_in_paper, count_cost
from weft.study.ablate.published import published_config, published_length
from weft.study.ablate.tables import FOLDER, Table, TableRow, read_table
from weft.words import many

ROOT = Path(__file__).parents[1]
LIST, PAGE = ROOT / "tools" / "papers.yaml", ROOT / "docs" / "papers.md"
FLOPS = 50e12  # of an H200 in training, where nothing was measured: as in the heads of the recipes
PICTURES = {  # that train, as the papers have them
    "imagenet": ("ImageNet-1k", 1_281_167),
    "cifar10": ("CIFAR-10", 50_000),
    "cifar100": ("CIFAR-100", 50_000),
    "inaturalist-2018": ("iNaturalist 2018", 437_513),
    "inaturalist-2019": ("iNaturalist 2019", 265_240),
    "stanford-cars": ("Stanford Cars", 8_144),
    "flowers102": ("Flowers-102", 2_040),
    "oxford-iiit-pet": ("Oxford-IIIT Pets", 3_680),
    "ade20k": ("ADE20K", 20_210),
    "coco": ("COCO 2017", 118_287),
    "coco-stuff-54": ("COCO-Stuff", 118_287),
    "lip": ("Look Into Person", 30_462),
}
HEAD = """# The papers, table by table

Every table and figure of the five papers in order: the command that repeats it here, what that takes, what deviates.
Written by `tools/papers.py`, in part from the files of the tables; a test tries that every command parses and plans.
Nothing on this page was trained with Weft to its end: the numbers to compare with are the papers'.

`--as-published` trains each row with the paper's recipe, epochs, batch and size, once (`--seeds 3` for more), and
says first what that costs on your machine; `--plan` says only that. Without it the same command trains all rows
within `--minutes 30`, on any pictures: `weft ablate ceit-leff my_pictures`. [Ablations](ablations.md) has the rest.

Hours are those of one H200 for all rows, with one seed: epochs and pictures of the paper by the pictures per second
that `weft train` was measured to train ([performance.md](performance.md)), or, where that is not known, by 50
TFLOP/s: an estimate. Rows that a paper cites from others, and for which there is no recipe here, are not in them.
`ROOT` is the folder of a [set](data.md), `RUN` that of a run.
"""


@dataclass(frozen=True)
class Entry:
    """A table or figure: a table of `weft ablate`, or commands."""

    where: str  # "Table 4", "Figure 1"
    title: str = ""  # of tables: their own
    tables: Sequence[str] = ()
    commands: Sequence[str] = ()
    text: str = ""


def entries(paper: str) -> list[Entry]:
    return [Entry(**entry) for entry in yaml.safe_load(LIST.read_text(encoding="utf-8"))[paper]]


# Hours --------------------------------------------------------------------------------------------------------------


@cache
def measured() -> dict[tuple[str, str, int], float]:
    """Pictures per second of training on an H200, by model, head and size."""
    results = ROOT / "benchmarks" / "results"
    plain = json.loads(max(results.glob("gpu_speed-*.json")).read_text())["rows"]
    dense = json.loads(max(results.glob("dense_speed-*.json")).read_text())["rows"]
    found = {
        (row["model"], "", 224): row["pictures_per_second"]
        for row in plain
        if (row["kind"], row["column"], row["error"]) == ("train", "replay", "")
    }
    return found | {(row["model"], row["head"], row["size"]): row["training"] for row in dense}


def planned(row: TableRow) -> int:
    return find_recipe(row.recipe)["run.epochs"]


def hours(table: Table, row: TableRow, name: str) -> tuple[float | None, bool]:
    """Of one training on a set, and whether its speed was measured; None of a detector, which nobody has counted."""
    assert row.full is not None
    config, (_, pictures) = published_config(row, row.full, **table.steps_on(name)), PICTURES[name]
    size, head = config.augment.img_size, row.full.head
    epochs, part = published_length(table, row, config, pictures)
    speed = measured().get((row.full.model, head, size)) if not row.full.switches else None
    exact = speed is not None
    if speed is None and head not in DETECTORS and (macs := count(row, size)):
        speed = FLOPS / (6e9 * macs)  # three passes, two operations each
    return (epochs * part * pictures / speed / 3600 if speed else None), exact


def count(row: TableRow, size: int) -> float | None:
    """MACs in G at the size of training, with the head."""
    network = row.full
    assert network is not None
    key = f"{network} {size}"
    if key not in COUNTED:
        known = size == 224 and not network.head
        COUNTED[key] = cost_in_paper(row) if known else count_cost(network, size, classes=150 if network.head else 1000)
    found = COUNTED[key]
    return found.macs if found else None


COUNTED: dict[str, Cost | None] = {}


def needs(table: Table) -> str:
    """Rows, epochs, recipes, data and hours, in sentences."""
    rows = table.trained(published=True)
    lengths = sorted({round((table.length or planned(row)) * row.epochs) for row in rows})
    recipes = ", ".join(f"`{name}`" for name in dict.fromkeys(row.recipe for row in rows))
    sets = "; ".join(on_set(table, rows, name) for name in table.data)
    others = len(table.rows) - len(rows)
    cited = f" {many(others, 'other row')} cited, or not here." if others else ""
    return f"{many(len(rows), 'training')} of {_either(lengths)} epochs ({recipes}), on {sets}.{cited}"


def on_set(table: Table, rows: list[TableRow], name: str) -> str:
    """A set, and the hours of all rows on it."""
    label, _ = PICTURES[name]
    label += "".join(f", {steps:,} steps" for steps in table.steps_on(name).values())
    found = [hours(table, row, name) for row in rows]
    known = [value for value, _ in found if value is not None]
    if not known:
        return f"{label}: not computed, the second stage depends on what is found"
    exact = [was_measured for _, was_measured in found]
    how = "measured" if all(exact) else "in part measured" if any(exact) else "estimated"
    spent, silent = sum(known), len(found) - len(known)
    if silent:  # detectors that nobody has timed: their second stage depends on what is found
        how = f"measured, for {len(known)} of these; the others are not computed"
    return f"{label}: {spent:,.{0 if spent >= 10 else 1}f} hours, {how}"


def _either(values: list[int]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])]) if len(values) > 1 else str(values[0])


# The page -----------------------------------------------------------------------------------------------------------


def commands(entry: Entry) -> Iterator[str]:
    for name in entry.tables:
        data = read_table(FOLDER / f"{name}.yaml").data[-1]
        yield f"weft ablate {name} {data}:ROOT --as-published"
    yield from entry.commands


def section(entry: Entry) -> Iterator[str]:
    tables = [read_table(FOLDER / f"{name}.yaml") for name in entry.tables]
    title = entry.title or tables[0].title
    yield f"\n### {entry.where}: {title}\n"
    if listed := list(commands(entry)):
        yield from ("```sh", *listed, "```\n")
    yield from ([entry.text, ""] if entry.text and not tables else [])
    for table in tables:
        yield ""  # else a list before it goes on
        yield f"{needs(table)}{f' {entry.text}' if entry.text and table is tables[0] else ''}\n"
        said = [text for text in table.differs if "stand-in" not in text and "1x is" not in text]
        yield from [f"- {text.rstrip('.')}." for text in said]


def page() -> str:
    lines = [HEAD.rstrip()]
    for paper in PAPERS:
        lines.append(f"\n## {paper.name} ([arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}))")
        for entry in entries(paper.name):
            lines += section(entry)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return f"{text.rstrip()}\n"


def main() -> None:
    PAGE.write_text(page())
    print(f"Wrote {PAGE.name}")


if __name__ == "__main__":
    main()
