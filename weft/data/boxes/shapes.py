"""Shapes as COCO writes them, polygons and run lengths, to masks and back.

| What a shape is | |
|---|---|
| `[[x, y, x, y, ...], ...]` | polygons, in pixels; an object may have several parts |
| `{"size": [H, W], "counts": [...]}` | run lengths, down one column after the other, the background's first |
| `{"size": [H, W], "counts": "..."}` | the same, packed into letters of 6 bits |

Masks are those of pycocotools, to the pixel.
"""

import operator
from typing import Any

import numpy as np

from weft.data.read import MAX_PIXELS, BadPicture

FINE = 5  # polygons are followed in steps of a fifth of a pixel
MOST_STEPS = 2_000_000  # a polygon that is longer, 400,000 pixels, lies mostly outside any picture


def draw(shape: Any, height: int, width: int) -> np.ndarray:
    """(H, W) bool; raises BadPicture where a shape cannot be drawn."""
    if isinstance(shape, dict):
        runs, *size = _runs(shape)
        if size != [height, width]:
            raise BadPicture(f"run lengths for height and width {size}; expected {[height, width]}")
        return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T
    columns = np.zeros((width, height), bool)
    for polygon in shape:
        _fill(columns, polygon)
    return columns.T


def box_of(mask: np.ndarray) -> np.ndarray:
    """(4,) float32: left, top, right and bottom edge of what is set; zeros where nothing is."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return np.zeros(4, np.float32)
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], np.float32)


def extent(shape: Any) -> np.ndarray:
    """(4,) float32: left, top, right and bottom edge of a shape."""
    if isinstance(shape, dict):
        runs, height, _ = _runs(shape)
        return _span(runs, height)
    points = np.concatenate([_points(polygon) for polygon in shape])
    return np.concatenate([points.min(axis=0), points.max(axis=0)]).astype(np.float32)


def area_of(shape: Any) -> float:
    """Pixels of run lengths; of polygons the area inside, without drawing them."""
    if isinstance(shape, dict):
        return float(_runs(shape)[0][1::2].sum())
    area = 0.0
    for polygon in shape:
        x, y = _points(polygon).T
        area += abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2
    return float(area)


def encode(mask: np.ndarray) -> dict[str, Any]:
    """A mask (H, W) as packed run lengths, ready for JSON."""
    flat = np.asarray(mask, bool).T.ravel()
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    runs = np.diff(np.concatenate([[0] if flat[:1].any() else [], [0], ends, [flat.size]]).astype(np.int64))
    return {"size": [int(side) for side in mask.shape], "counts": pack(runs)}


def _runs(shape: dict[str, Any]) -> tuple[np.ndarray, int, int]:
    """Run lengths, which fill the mask, and its height and width."""
    counts = shape.get("counts")
    try:
        height, width = map(int, shape["size"])
        if isinstance(counts, str | bytes):
            runs = _unpack(counts.encode("ascii", "replace") if isinstance(counts, str) else counts)
        else:
            runs = np.array([operator.index(count) for count in counts], np.int64)  # pyright: ignore[reportOptionalIterable]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise BadPicture("run lengths without counts, or without a size of two whole numbers") from None
    if min(height, width) < 1 or height * width > MAX_PIXELS:
        raise BadPicture(f"run lengths for a picture of {width} x {height} pixels")
    if ((runs < 0) | (runs > height * width)).any():  # before they are summed, lest the sum overflow
        raise BadPicture(f"run lengths that are negative or longer than {height} x {width} pixels")
    if runs.sum() != height * width:
        raise BadPicture(f"run lengths that sum to {runs.sum()}; expected {height} x {width} = {height * width}")
    return runs, height, width


def _span(runs: np.ndarray, height: int) -> np.ndarray:
    """As `box_of` the mask, which is not drawn."""
    ends = np.cumsum(runs)[1::2][runs[1::2] > 0]  # of what is set
    starts = ends - runs[1::2][runs[1::2] > 0]
    if not len(ends):
        return np.zeros(4, np.float32)
    (left, top), (right, bottom) = ((at // height, at % height) for at in (starts, ends - 1))
    if (left != right).any():  # one goes on at the top of the next column
        top, bottom = np.array([0]), np.array([height - 1])
    return np.array([left.min(), top.min(), right.max() + 1, bottom.max() + 1], np.float32)


def _unpack(letters: bytes) -> np.ndarray:
    """Run lengths from letters of 6 bits from "0" on: 5 bits of a number, lowest first, and whether more follow.

    The highest bit is the sign. From the fourth number on, each is the difference to the last but one.
    """
    values = np.frombuffer(letters, np.uint8).astype(np.int64) - 48
    if not len(values) or values.min() < 0 or values.max() > 63 or values[-1] & 32:
        raise BadPicture("packed run lengths with characters that do not belong there")
    last = np.flatnonzero(values & 32 == 0)
    first = np.concatenate([[0], last[:-1] + 1])
    digit = np.arange(len(values)) - np.repeat(first, last - first + 1)
    if digit.max() > 7:
        raise BadPicture("packed run lengths with a number that is too large")
    numbers = np.add.reduceat((values & 31) << (5 * digit), first)
    numbers -= np.where(values[last] & 16, 1 << (5 * (digit[last] + 1)), 0)
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers


def pack(runs: np.ndarray) -> str:
    numbers = runs.copy()
    numbers[3:] -= runs[1:-2]
    letters = []  # of each number, one digit after the other
    more = np.ones(len(numbers), bool)
    while more.any():
        digit, numbers = numbers & 31, numbers >> 5
        written, more = more, more & (numbers != np.where(digit & 16, -1, 0))
        letters.append(np.where(written, (digit | more << 5) + 48, 0))
    table = np.stack(letters, axis=1).astype(np.uint8)  # (numbers, digits), 0 after the last
    return table[table > 0].tobytes().decode("ascii")


def _points(polygon: Any) -> np.ndarray:
    """(n, 2) float64."""
    try:
        points = np.array(polygon, np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise BadPicture("a polygon that is not a list of numbers x, y, x, y, ...") from None
    if len(points) < 3 or not np.isfinite(points).all():
        raise BadPicture(f"a polygon of {len(points)} points" + (", some of them NaN" if len(points) > 2 else ""))
    return points


def _fill(columns: np.ndarray, polygon: Any) -> None:
    """Sets what is inside, in a mask (W, H).

    The outline is followed on a grid five times as fine. Wherever it passes the middle of a column, everything below
    changes sides; so each pixel is inside after an odd number of changes above it.
    """
    width, height = columns.shape
    start = np.trunc(FINE * _points(polygon) + 0.5)  # (n, 2)
    way = np.roll(start, -1, axis=0) - start
    if np.abs(way).sum() > MOST_STEPS:
        raise BadPicture("a polygon that reaches far beyond the picture")
    steps = np.abs(way).max(axis=1).astype(np.int64)
    # edges are stepped through from their smaller end, so that two objects share the same line
    flip = way[np.arange(len(way)), np.where(np.abs(way[:, 0]) >= np.abs(way[:, 1]), 0, 1)] < 0
    origin = np.where(flip[:, None], start + way, start)
    slope = np.where(flip[:, None], -way, way) / np.maximum(steps, 1)[:, None]
    edge = np.repeat(np.arange(len(steps)), steps + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(steps + 1) - steps - 1, steps + 1)
    step = np.where(flip[edge], steps[edge] - step, step)
    path = np.trunc(origin[edge] + slope[edge] * step[:, None] + 0.5)  # (steps, 2), all along the outline
    lower = np.minimum(path[1:], path[:-1])[path[1:, 0] != path[:-1, 0]]
    column, row = ((lower + 0.5) / FINE - 0.5).T
    passed = (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    row = np.ceil(np.clip(row[passed], 0, height))
    change = (column[passed] * height + row).astype(np.int64)
    if len(change):
        first, last = change.min(), change.max()
        inside = np.cumsum(np.bincount(change - first)) % 2 == 1
        columns.reshape(-1)[first:last] |= inside[:-1]
