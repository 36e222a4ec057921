"""Accuracies that models reach in a time, as they were measured: read by whoever chooses a model for a run.

measured.json: benchmarks/choices.py writes the rows of a CPU, from trainings by `weft train`; those of a GPU were taken
from the results that their `source` names. A row is a model at a size of pictures: how many of them it trains on in a
second, and the accuracy after it has seen so many. What a time allows is then a matter of reading: pictures that the
machine can see in it, and the accuracy that goes with them.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from weft.catalog.catalog import catalog

SMALL, PHOTO = "small", "photo"  # kinds of pictures: those that are taken as they are, and larger ones
SMALL_SIDE = 64
BEYOND = 10  # times as many pictures as were measured, of which something is still said

# Multiply-adds of forward passes in a second of training, on the machines of the table: of models that are not in it.
USUAL_MACS = {"cpu": 12e9, "cuda": 15e12}


@dataclass(frozen=True)
class Measured:
    """A model at a size, how fast it trains, and what it reaches."""

    kind: str
    model: str
    size: int
    speed: dict[str, float]  # pictures a second by device, on the machine of the table
    curve: list[tuple[float, float]]  # pictures seen, and the accuracy then, in order
    data: str  # what was trained on
    args: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # of what benchmarks/choices.py did not measure

    def at(self, size: int) -> "Measured":
        """The same for pictures of another size, as if only their number of pixels mattered."""
        times = (self.size / size) ** 2
        return replace(self, size=size, speed={device: times * speed for device, speed in self.speed.items()})

    def reached(self, seen: float) -> float:
        """The accuracy after so many pictures: straight lines over their logarithm.

        Beyond the last point errors go on to fall as a power of the pictures, half as steeply as before it and to half
        of what they were there at most.
        """
        points = [(math.log(pictures), accuracy) for pictures, accuracy in self.curve]
        x, last = math.log(max(seen, 1.0)), points[-1]
        if len(points) == 1:
            return last[1]
        (x0, y0), (x1, y1) = next(((a, b) for a, b in pairwise(points) if x <= b[0]), (points[-2], last))
        if x <= last[0]:
            return max(0.0, y0 + (y1 - y0) / (x1 - x0) * (x - x0))
        power = max(0.0, math.log((1 - y0) / (1 - y1))) / (x1 - x0) / 2
        return 1 - (1 - y1) * max(0.5, math.exp(-power * (x - x1)))


@cache
def measured() -> list[Measured]:
    stored = json.loads((files("weft.catalog") / "measured.json").read_text())
    return [Measured(**{**row, "curve": [(seen, reached) for seen, reached in row["curve"]]}) for row in stored["rows"]]


def best(rows: Iterable[Measured], device: str, pace: float, seconds: float, seen: float = 0.0) -> Measured | None:
    """The row that reaches most within `seconds` of training, on a machine `pace` times as fast as the table's.

    Args:
        rows: among which to choose; those that were not timed on such a device are left out.
        seen: pictures that a run is to see, where that is not left to the time: then of the rows that can see so
            many within it, or the fastest where none can.
    """
    timed = [row for row in rows if device in row.speed]
    if seen:
        in_time = [row for row in timed if seen <= seconds * pace * row.speed[device]]
        timed = in_time or sorted(timed, key=lambda row: -row.speed[device])[:1]

    def sees(row: Measured) -> float:
        return seen or seconds * pace * row.speed[device]

    known = [row for row in timed if row.curve[0][0] <= 2 * sees(row)]  # of others nothing is known so early
    if not known:
        return min(timed, key=lambda row: row.curve[0][0] / sees(row), default=None)
    return max(known, key=lambda row: row.reached(sees(row)))


def errors_left(kind: str, seen: float, times: float) -> float | None:
    """The part of the errors that is left when `times` as many pictures are seen; None where that was not measured."""
    rows = [row for row in measured() if row.kind == kind and len(row.curve) > 1]
    rows = [row for row in rows if row.curve[0][0] <= seen <= BEYOND * row.curve[-1][0] / times]
    parts = [(1 - row.reached(times * seen)) / (1 - row.reached(seen)) for row in rows]
    return sum(parts) / len(parts) if parts else None


def usual_speed(model: str, size: int, device: str) -> float | None:
    """Pictures a second in training, from the multiply-adds of the catalogue; None for models that are not in it."""
    infos = [info for info in catalog() if info.name.split(".")[0] == model]
    if not infos:
        return None
    return USUAL_MACS[device] / (infos[0].macs * (size / infos[0].img_size) ** 2)
