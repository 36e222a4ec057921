"""Numbers as text: for people who read a terminal, and for tables."""

import csv
import io
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.predict import Prediction

PAIRS = 5  # confusions that are named


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines whose columns are as wide as their widest cell, those in `right` set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def metric_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """What `Evaluation.metrics()` found: the whole, then each class, then what is confused."""
    if "map" in metrics:
        f1 = f"F1 {metrics['f1_micro']:.4f} over all labels, {metrics['f1_macro']:.4f} as mean of the classes"
        yield f"mAP {metrics['map']:.4f}   {f1}   loss {metrics['loss']:.4f}"
    else:
        low, high = metrics["top1_interval"]
        top5 = f"   top-5 {metrics['top5']:.2%}" if "top5" in metrics else ""
        yield f"top-1 {metrics['top1']:.2%} (95 % interval {low:.2%} to {high:.2%}){top5}   loss {metrics['loss']:.4f}"
        yield (
            f"calibration error {metrics['ece']:.4f}; {metrics['ece_after_temperature']:.4f} with logits divided by"
            f" {metrics['temperature']:.3f}, a temperature fitted on these pictures"
        )
    yield ""
    keys = [key for key in ("ap", "precision", "recall", "f1") if key in metrics["per_class"][0]]
    rows = [[row["name"], f"{row['n']:,}", *(f"{row[key]:.3f}" for key in keys)] for row in metrics["per_class"]]
    yield from columns([["class", "pictures", *keys], *rows], right=range(1, 2 + len(keys)))
    pairs = [f"{p['truth']} taken for {p['said']} ({p['n']})" for p in metrics.get("confused_pairs", [])[:PAIRS]]
    if pairs:
        yield f"\nMost confused: {', '.join(pairs)}"


def prediction_lines(predictions: "list[Prediction]") -> Iterator[str]:
    width = max((len(p.name) for p in predictions), default=0)
    for p in predictions:
        said = "  ".join(f"{label} {100 * x:.1f} %" for label, x in zip(p.labels, p.probabilities, strict=True))
        yield f"{p.name:<{width}}  {said or 'cannot be read: ' + p.error}"


def as_csv(predictions: "list[Prediction]", top: int) -> str:
    """A line for each picture: its name, `top` labels with their probabilities, and why there are none."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["name", *(f"{column}_{i + 1}" for i in range(top) for column in ("label", "probability")), "error"])
    for p in predictions:
        pairs = [cell for pair in zip(p.labels, p.probabilities, strict=True) for cell in pair]
        table.writerow([p.name, *(pairs or [""] * (2 * top)), p.error])
    return text.getvalue()
