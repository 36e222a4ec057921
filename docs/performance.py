"""Writes the tables of docs/performance.md from the newest measurements: `python -m docs.performance`.

Text between `<!-- NAME -->` and `<!-- end -->` is replaced, all else stays as it was written.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from speed_table import PUBLISHED, WORDS, Line, newest, table  # noqa: E402

from weft.kernels.case import all_cases  # noqa: E402
from weft.kernels.choose import MEASURED  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"


def markdown(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def where(results: dict[str, Any]) -> Iterator[str]:
    versions, machine = results["versions"], results["machine"]
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "timm", "transformers") if name in versions
    )
    rates = results.get("rates", {})
    ceilings = (
        f"; memory {rates['copy'] / 1e12:.2f} TB/s, matrix products {rates['matrix'] / 1e12:.0f} TFLOP/s"
        if rates
        else ""
    )
    cpu = f" on a machine with {machine['cores']} cores of an {machine['cpu']}" if machine["gpu"] else ""
    yield f"{machine['gpu'] or machine['cpu']}{cpu}; {packages}, {results['date']}{ceilings}."
    measured = {line.part for line in table(results)}
    if missing := [words for part, words in WORDS.items() if part not in measured]:
        yield ""
        yield f"Not measured: {'; '.join(missing)}."


def by_pair(results: dict[str, Any]) -> dict[Any, dict[str, Line]]:
    found: dict[Any, dict[str, Line]] = {}
    for line in table(results):
        found.setdefault(line.pair, {})[line.part] = line
    return found


def speed(results: dict[str, Any]) -> Iterator[str]:
    yield from picture("How many times as fast as the peer", "speed.png")
    for kind in ("inference", "training step"):
        measured = {line.part for line in table(results)}
        parts = [part for part, words in WORDS.items() if words.startswith(kind) and part in measured]
        if parts:
            yield from ratios(results, parts)
            yield ""


def ratios(results: dict[str, Any], parts: list[str]) -> Iterator[str]:
    """Pictures per second of us and the peer, and the ratio with its goal."""

    def cell(line: Line | None) -> str:
        if line is None:
            return "–"
        if line.peer is None or line.ratio is None:
            return f"{line.ours:,.0f}"
        goal = "" if line.goal is None else f" (goal {line.goal:g})"
        ratio = f"**{line.ratio:.2f}**" if line.goal and line.ratio >= line.goal else f"{line.ratio:.2f}"
        return f"{line.ours:,.0f} to {line.peer:,.0f}: {ratio}{goal}"

    rows = []
    for pair, lines in by_pair(results).items():
        peer = pair.peer if pair.peer == PUBLISHED else f"`{pair.peer}`"
        rows.append([f"`{pair.ours}`", peer, *(cell(lines.get(part)) for part in parts)])
    yield from markdown(["model", "peer", *(WORDS[part] for part in parts)], rows)


def growth(results: dict[str, Any]) -> Iterator[str]:
    models = {row["model"]: row["peer"] for row in results.get("growth", []) if row["peer"] and not row["error"]}
    if not models:
        yield "Not measured yet."
        return
    pairs = (f"`{name}` and its peer `{peer}`" for name, peer in models.items())
    yield f"Measured so far: {', '.join(pairs)}."
    yield ""
    yield from picture("Pictures per second over batch and size", "speed-growth.png")


def picture(title: str, name: str) -> Iterator[str]:
    """One that benchmarks/plot_speed.py drew."""
    if (PAGE.parent / "pictures" / name).exists():
        yield f"![{title}](pictures/{name})"
        yield ""


def memory(results: dict[str, Any]) -> Iterator[str]:
    """Peaks of the training step, whole and per picture."""
    rows = {(row["part"], row["model"]): row for row in results["rows"]}

    def cell(part: str, model: str) -> str:
        row = rows.get((part, model))
        if row is None or row["gib"] is None:
            return "–"
        return f"{row['gib']:.2f} GiB, {1024 * row['gib'] / row['batch']:.0f} MiB a picture"

    parts = [part for part in ("train", "train-compiled") if any(row == part for row, _ in rows)]
    header = [f"{whose}, {WORDS[part].split(', ')[1]}" for part in parts for whose in ("ours", "peer's")]
    lines = (
        [f"`{pair.ours}`", *(cell(part, name) for part in parts for name in (pair.ours, pair.peer))]
        for pair in by_pair(results)
    )
    yield from markdown(["model", *header], lines)


def floors(results: dict[str, Any]) -> Iterator[str]:
    """Milliseconds of a batch, in the fastest way that was measured, over the least that it could take."""

    def cell(line: Line | None) -> list[str]:
        if line is None or line.floor is None:
            return ["–", "–"]
        return [f"{line.milliseconds:.2f} ms", f"{line.milliseconds / line.floor:.1f}"]

    rows = []
    for pair, lines in by_pair(results).items():
        least = results.get("floors", {}).get(pair.ours, {})
        row = [f"`{pair.ours}`"]
        for kind, is_training in (("inference", False), ("train", True)):
            measured = [line for part, line in lines.items() if part.startswith("train") == is_training]
            best = min(measured, key=lambda line: line.milliseconds, default=None)
            row += [f"{least[kind]:.2f} ms" if kind in least else "–", *cell(best)]
        rows.append(row)
    times = ["time", "times the floor"]
    yield from markdown(["model", "floor of inference", *times, "floor of training", *times], rows)


def kernels(results: dict[str, Any]) -> Iterator[str]:
    """From the table that comes with Weft: all shapes of an operation in one row."""
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for gpu, operations in measured.items():
        yield f"{gpu}:"
        yield ""
        rows = []
        for name, shapes in sorted(operations.items()):
            gains = [shape["gain"] for shape in shapes if shape["gain"] > 0]
            if gains:
                rows.append([f"`{name}`", str(len(shapes)), f"{min(gains):.1f} to {max(gains):.1f}"])
        yield from markdown(["operation", "shapes", "times as fast as its twin"], rows)
        without = sorted({case.operation for case in all_cases()[0]} - operations.keys())
        if without:
            yield ""
            yield f"Not measured yet, and run with their defaults: {', '.join(f'`{name}`' for name in without)}."


def curves(results: dict[str, Any]) -> Iterator[str]:
    if not results.get("curves"):
        yield "Not measured yet."
        return
    yield from picture("Losses with kernels and without", "speed-curves.png")
    rows = (
        [
            f"`{name}`",
            *(f"{curve['apart'][run][part]:.3f}" for part in ("first", "all") for run in ("kernels", "float32")),
        ]
        for name, curve in results["curves"].items()
    )
    steps = ("first 25 steps", "all 200 steps")
    header = [f"{part}: {run}" for part in steps for run in ("kernels", "float32")]
    yield from markdown(["model", *header], rows)


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "where": where,
    "speed": speed,
    "growth": growth,
    "memory": memory,
    "floors": floors,
    "kernels": kernels,
    "curves": curves,
}


def fill(page: str, results: dict[str, Any]) -> str:
    for name, make in TABLES.items():
        text = "\n".join(make(results)).strip()
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, text=text: f"{m[1]}\n{text}\n\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), json.loads(newest().read_text())), encoding="utf-8")
    print(f"Wrote {PAGE.name}")


if __name__ == "__main__":
    main()
