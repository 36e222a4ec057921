"""The table of gpu_models.py: which models, which peers, which goals, and what the file of results says of them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench import facts

RESULTS = Path(__file__).parent / "results"
PUBLISHED = "published code"  # its training step on an H200, measured once, in the environment it needs
PUBLISHED_STEPS = {"vitae_tiny": 2650.0, "vitae_small": 965.0}  # pictures per second, eager


@dataclass(frozen=True)
class Pair:
    """A model of ours, its peer, and the ratios that are wanted: eager and compiled inference, training."""

    ours: str
    peer: str
    eager: float | None
    compiled: float | None
    train: float

    @property
    def names(self) -> list[str]:
        return [self.ours] if self.peer == PUBLISHED else [self.ours, self.peer]

    def goal(self, part: str) -> float | None:
        """The goals are for both sides in the same way, which "train-wrapped" is not."""
        if part == "train-wrapped":
            return None
        return self.train if part.startswith("train") else self.compiled if part.startswith("compiled") else self.eager


PAIRS = (
    Pair("ceit_tiny", "deit_tiny_patch16_224", 0.65, 0.75, 0.65),
    Pair("ceit_small", "deit_small_patch16_224", 0.75, 0.85, 0.75),
    Pair("ceit_base", "deit_base_patch16_224", 0.85, 0.90, 0.85),
    Pair("cvt_13", "hf:cvt-13", 2.5, 2.0, 2.5),
    Pair("cvt_21", "hf:cvt-21", 2.5, 2.0, 2.5),
    Pair("cetnet_tiny", "swin_tiny_patch4_window7_224", 1.8, 1.3, 1.3),
    Pair("vitae_tiny", PUBLISHED, None, None, 2.5),
    Pair("vitae_small", PUBLISHED, None, None, 2.5),
    Pair("vt_resnet18", "resnet18", 1.0, 1.05, 1.0),
    Pair("vt_resnet50", "resnet50", 1.0, 1.05, 1.0),
)
WORDS = {
    "eager": "inference, eager",
    "replayed": "inference, launches replayed",
    "compiled": "inference, compiled",
    "compiled-replayed": "inference, compiled, launches replayed",
    "train": "training step, eager",
    "train-wrapped": "training step, ours in weft.replay, peer eager",
    "train-replayed": "training step, launches replayed",
    "train-compiled": "training step, compiled",
    "train-compiled-replayed": "training step, compiled, launches replayed",
}


def newest() -> Path:
    """The file that was written last."""
    files = sorted(RESULTS.glob("gpu_models-*.json"))
    if not files:
        raise SystemExit("There are no results yet: run benchmarks/gpu_models.py on a GPU.")
    return files[-1]


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else facts()


@dataclass(frozen=True)
class Line:
    """A pair in one part of the table."""

    pair: Pair
    part: str
    ours: float
    peer: float | None
    ratio: float | None
    goal: float | None
    gib: float | None
    peer_gib: float | None
    milliseconds: float
    floor: float | None  # milliseconds


def table(results: dict[str, Any], pairs: Iterable[Pair] = PAIRS) -> Iterator[Line]:
    """The lines of all pairs that were measured, part by part."""
    rows = {(row["part"], row["model"]): row for row in results.get("rows", []) if not row["error"]}
    floors = results.get("floors", {})
    for part in WORDS:
        for pair in pairs:
            ours, peer = rows.get((part, pair.ours)), rows.get((part, pair.peer))
            if ours is None:
                continue
            theirs = peer["pictures_per_second"] if peer else None
            if pair.peer == PUBLISHED and part.startswith("train"):
                theirs = PUBLISHED_STEPS.get(pair.ours)
            yield Line(
                pair=pair,
                part=part,
                ours=ours["pictures_per_second"],
                peer=theirs,
                ratio=ours["ratio"] or (theirs and ours["pictures_per_second"] / theirs),
                goal=pair.goal(part),
                gib=ours["gib"],
                peer_gib=peer["gib"] if peer else None,
                milliseconds=ours["milliseconds"],
                floor=floors.get(pair.ours, {}).get("train" if part.startswith("train") else "inference"),
            )


def row_lines(pair: Pair, part: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["error"]:
            yield f"{WORDS[part]:24} {row['model']}: {row['error']}"
    for line in table({"rows": rows}, [pair]):
        yield "  ".join(cells(line))


HEADER = ["", "model", "peer", "ours", "peer's", "ratio", "goal", "GiB", "peer's", "ms", "floor ms", "times floor"]


def cells(line: Line) -> list[str]:
    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    goal = number(line.goal) + (" met" if line.goal and line.ratio and line.ratio >= line.goal else "")
    return [
        WORDS[line.part],
        line.pair.ours,
        line.pair.peer,
        number(line.ours, ",.0f"),
        number(line.peer, ",.0f"),
        number(line.ratio),
        goal,
        number(line.gib),
        number(line.peer_gib),
        number(line.milliseconds),
        number(line.floor),
        number(line.floor and line.milliseconds / line.floor),
    ]
