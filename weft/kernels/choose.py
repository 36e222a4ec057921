"""Launch parameters from measurements: a table that comes with Weft, and one that `weft bench --kernels` makes here.

Nothing is tried out while a user waits. A table has for each operation a list of rows: a shape, the launch parameters
that were fastest for it, and how many times faster than the twin they were. A shape that no row has gets the parameters
of the nearest row; a shape far from all of them, or a GPU that no table has, gets the operation's own defaults.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.files import write_text
from weft.kernels.switch import interpreted

Row = dict[str, Any]
FARTHEST = math.log(64)  # a shape so many times as large, or small, says nothing about another
MEASURED = Path(__file__).parent / "measured.json"  # {gpu: {operation: [{"shape": {}, "launch": {}, "gain": 1.0}]}}


def own_table() -> Path:
    """Where this machine's measurements are kept."""
    return Path(torch.hub.get_dir()).parent / "weft" / "kernels.json"


_forced: Row = {}


@contextmanager
def forced(launch: Row) -> Iterator[None]:
    """These launch parameters for every kernel inside a `with`, whatever was measured."""
    global _forced
    before, _forced = _forced, launch
    try:
        yield
    finally:
        _forced = before


def _read(path: Path) -> dict[str, dict[str, list[Row]]]:
    """A table; a broken one, which somebody else may have written, is as good as none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        whole = all(
            {"shape", "launch", "gain"} <= row.keys() for gpu in table.values() for op in gpu.values() for row in op
        )
        return table if whole else {}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


@cache
def _rows(gpu: str, operation: str) -> list[Row]:
    return [row for path in (own_table(), MEASURED) for row in _read(path).get(gpu, {}).get(operation, [])]


def write_row(path: Path, gpu: str, operation: str, row: Row) -> None:
    """Puts a row into a table, in place of the one for the same shape, and uses it from now on."""
    table = _read(path)
    rows = table.setdefault(gpu, {}).setdefault(operation, [])
    rows[:] = [other for other in rows if other["shape"] != row["shape"]] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(table, indent=1, sort_keys=True) + "\n")
    forget()


def forget() -> None:
    """Reads the tables again where they are asked for next."""
    _rows.cache_clear()
    _nearest.cache_clear()
    _chosen.clear()


def _distance(a: Row, b: Row) -> float:
    """How far two shapes are apart: numbers by their ratio, everything else must be equal."""
    if a.keys() != b.keys():
        return math.inf
    total = 0.0
    for key, value in a.items():
        other = b[key]
        if isinstance(value, int) and isinstance(other, int) and value > 0 and other > 0:
            total += abs(math.log(value / other))
        elif value != other:
            return math.inf
    return total


@cache
def _nearest(gpu: str, operation: str, shape: tuple[tuple[str, Any], ...]) -> Row | None:
    wanted = dict(shape)
    rows = [(_distance(wanted, row["shape"]), row) for row in _rows(gpu, operation)]
    distance, row = min(rows, key=lambda pair: pair[0], default=(math.inf, None))
    return row if distance <= FARTHEST else None


@cache
def gpu_name(device: torch.device) -> str:
    return "interpreter" if interpreted() or device.type != "cuda" else torch.cuda.get_device_name(device)


_chosen: dict[tuple[Any, ...], Row] = {}  # every launch asks, so the answer must be at hand


class TwinIsFaster(Exception):
    """What a launcher ends with where measurements say so; the operator then takes its twin."""


def launch_parameters(operation: str, device: torch.device, default: Row, **shape: int | str | bool) -> Row:
    """The parameters that were fastest for the nearest `shape` measured on this kind of GPU, or else `default`.

    `default` may depend on nothing but the shape. Raises TwinIsFaster where the kernel lost.
    """
    key = (operation, device, *shape.values())
    found = _chosen.get(key)
    if found is None:
        row = _nearest(gpu_name(device), operation, tuple(sorted(shape.items())))
        found = {**default, **(row["launch"] if row else {})} if row is None or row["gain"] >= 1.0 else {}
        _chosen[key] = found
    if not found and default and not _forced:
        raise TwinIsFaster
    return {**default, **found, **_forced}
