"""Tables as text: columns for people who read a terminal, CSV for programs."""

import csv
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from weft.words import some

PAIRS = 5  # confusions that are named
SCORES = {  # what decides about a model; of masks and boxes, masks do
    **{"top1": "top-1", "map": "mAP", "miou": "mIoU"},
    **{"mask_ap": "mask AP", "box_ap": "box AP"},
}


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines whose columns are as wide as their widest cell, those in `right` set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def confusion_line(pairs: Sequence[dict[str, Any]], amount: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """The classes most often taken for others, and how often, in one line; none where nothing was confused."""
    named = [f"{pair['truth']} taken for {pair['said']} ({amount(pair)})" for pair in pairs[:PAIRS]]
    if named:
        yield ""
        yield f"Most confused: {', '.join(named)}"


def unlearned_line(classes: Sequence[str]) -> Iterator[str]:
    """Says which classes the numbers do not cover; nothing where they cover all."""
    if classes:
        yield f"Not measured: {some(classes)}, for training had no example of {'it' if len(classes) == 1 else 'them'}."


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def to_csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
