"""Writes the tables of docs/performance.md, and that of README.md, from the newest measurements of a GPU.

`python -m tools.performance` replaces what is between `<!-- NAME -->` and `<!-- end -->`; all else stays as it is.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_speed import BATCH, PEERS, find, newest, ratio  # noqa: E402

PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
SPEED, NONE = "pictures_per_second", "–"
NAMES = {
    "peer": "peer",
    "published": "published",
    "plain": "plain",
    "fast": "`weft.fast`",
    "fuse": "`weft.fuse`",
    "replay": "`weft train`",
}
README = ("ceit_small", "cvt_13", "cetnet_tiny", "vitae_small", "vt_resnet50")
SMALL = ("ceit_tiny", "ceit_small", "cvt_13", "cetnet_tiny", "vitae_tiny", "vitae_small", "vt_resnet18")
NANO = ("ceit_nano", "vitae_nano", "vt_resnet_nano", "cvt_nano", "cetnet_nano")

Results = dict[str, Any]


def markdown(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def text(value: float | None, form: str = ".2f") -> str:
    return NONE if value is None else format(value, form)


def where(results: Results) -> Iterator[str]:
    versions, machine = results["versions"], results["machine"]
    packages = [f"{name} {versions[name]}" for name in ("torch", "triton", "timm", "transformers") if name in versions]
    cpu = f"on a machine with {machine['cores']} cores of an {machine['cpu']}"
    yield f"{machine['gpu']} {cpu}; {', '.join(packages)}, {results['date']}."


def table(
    results: Results,
    kind: str,
    columns: Iterable[str],
    ratios: Iterable[tuple[str, str]] = (),
    value: str = SPEED,
    form: str = ",.0f",
    models: Iterable[str] = PEERS,
    **names: str,
) -> Iterator[str]:
    """A line for each model that was measured: its numbers, then how many times as fast."""
    columns, ratios, names = list(columns), list(ratios), NAMES | names

    def title(column: str, more: str = "") -> str:
        how, _, compiled = column.partition("-")
        return names[how] + more * bool(compiled)

    def cell(name: str, column: str) -> str:
        return text(find(results, name, kind, column).get(value), form)

    header = [
        "model",
        *(title(column, ", compiled") for column in columns),
        *(f"{title(a)} to {title(b)}" for a, b in ratios),
    ]
    cells = {name: [cell(name, column) for column in columns] for name in models}
    rows = [
        [f"`{name}`", *values, *(text(ratio(results, name, kind, *pair)) for pair in ratios)]
        for name, values in cells.items()
        if set(values) != {NONE}
    ]
    yield from markdown(header, rows) if rows else ["Not measured yet."]


def times(ours: str, other: str) -> Callable[[Results, str], float | None]:
    return lambda results, name: ratio(results, name, "train", ours, other)


def memory(results: Results, name: str) -> float | None:
    ours, theirs = (find(results, name, "train", column).get("gib") for column in ("plain", "peer"))
    return ours / theirs if ours and theirs else None


def first(results: Results, name: str) -> float | None:
    return find(results, name, "first", "fast").get("first_seconds")


COMPILED_TO = "compiled, to the peer compiled"
THREE = ("ceit_small", "cvt_13", "cetnet_tiny")
GOALS = (
    ("plain training, to the peer", ("cvt_13", "vitae_tiny"), times("plain", "peer"), "at least", 1.2),
    ("plain training, to the published code", ("ceit_small",), times("plain", "published"), "at least", 1.2),
    ("plain training, to the peer", ("cetnet_tiny",), times("plain", "peer"), "at least", 0.6),
    ("memory of that, to the peer", ("cetnet_tiny",), memory, "at most", 1.1),
    ("`weft.fast` to plain", tuple(PEERS), times("fast", "plain"), "at least", 1.0),
    ("`weft.fast` to plain", THREE, times("fast", "plain"), "at least", 1.3),
    (f"plain, {COMPILED_TO}", ("ceit_small",), times("plain-compiled", "peer-compiled"), "at least", 0.65),
    (f"plain, {COMPILED_TO}", ("cvt_13",), times("plain-compiled", "peer-compiled"), "at least", 1.5),
    (f"`weft.fast`, {COMPILED_TO}", ("ceit_small",), times("fast-compiled", "peer-compiled"), "at least", 0.75),
    (f"`weft.fast`, {COMPILED_TO}", ("cvt_13",), times("fast-compiled", "peer-compiled"), "at least", 2.0),
    ("seconds of the first step with `weft.fast`", SMALL, first, "at most", 15.0),
    ("seconds of the first step with `weft.fast`", NANO, first, "at most", 8.0),
)


def goals(results: Results) -> Iterator[str]:
    """What was wanted, and what the model reached that is farthest from it."""
    rows = []
    for words, models, measure, sign, goal in GOALS:
        found = {name: value for name in models if (value := measure(results, name)) is not None}
        row = [
            words,
            "all" if models == tuple(PEERS) else ", ".join(f"`{name}`" for name in models),
            f"{sign} {goal:g}",
        ]
        if not found:
            rows.append([*row, NONE, NONE])
            continue
        worst = (min if sign == "at least" else max)(found, key=lambda name: found[name])
        met = found[worst] >= goal if sign == "at least" else found[worst] <= goal
        verdict = "**no**" if not met else "yes" if len(found) == len(models) else "where measured"
        rows.append([*row, f"{found[worst]:.2f} (`{worst}`)", verdict])
    yield from markdown(["", "models", "goal", "the worst of them", "met"], rows)


TRAINING = ("peer", "published", "plain", "fast", "replay")
COMPILED = ("peer-compiled", "plain-compiled", "fast-compiled")


def work(results: Results) -> Iterator[str]:
    """Milliseconds of a step, those that its kernels ran, and how many there were."""
    rows = []
    for name in PEERS:
        for column in ("peer", "published", "plain", "peer-compiled", "plain-compiled"):
            row = find(results, name, "train", column)
            if "kernel_ms" in row and SPEED in row:
                title = NAMES[column.partition("-")[0]] + ", compiled" * column.endswith("compiled")
                step = BATCH["train"] * 1000 / row[SPEED]
                rows.append([f"`{name}`", title, f"{step:.1f}", f"{row['kernel_ms']:.1f}", f"{row['launches']:,}"])
    yield from markdown(["model", "", "step, ms", "its kernels, ms", "kernels"], rows)


TABLES: dict[str, Callable[[Results], Iterator[str]]] = {
    "where": where,
    "training": partial(
        table,
        kind="train",
        columns=TRAINING,
        ratios=[("plain", "peer"), ("plain", "published"), ("fast", "plain"), ("replay", "peer")],
    ),
    "memory": partial(table, kind="train", columns=[*TRAINING, *COMPILED], value="gib", form=".1f"),
    "first": partial(table, kind="first", columns=["fast"], value="first_seconds", form=".1f", models=(*PEERS, *NANO)),
    "compiled": partial(
        table, kind="train", columns=COMPILED, ratios=[(column, "peer-compiled") for column in COMPILED[1:]]
    ),
    "inference": partial(
        table,
        kind="infer",
        columns=("peer", "plain", "fuse", "replay"),
        ratios=[("plain", "peer"), ("fuse", "plain"), ("replay", "peer")],
        replay="`weft.replay`",
    ),
    "inference-compiled": partial(
        table, kind="infer", columns=("peer-compiled", "fuse-compiled"), ratios=[("fuse-compiled", "peer-compiled")]
    ),
    "work": work,
    "goals": goals,
    "speed": partial(
        table, kind="train", columns=TRAINING, ratios=[("fast", "peer"), ("replay", "peer")], models=README
    ),
}


def fill(page: str, results: Results) -> str:
    for name, make in TABLES.items():
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, make=make: "\n".join([m[1], *make(results), "", m[2]]),
            page,
            flags=re.DOTALL,
        )
    return page


def main() -> None:
    path = newest()
    if path is None:
        sys.exit("There are no results yet: run benchmarks/gpu_speed.py on a GPU.")
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), json.loads(path.read_text())), encoding="utf-8")
        print(f"Wrote {page.name}")


if __name__ == "__main__":
    main()
