"""Numbers as text: for people who read a terminal, and for tables."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.run.predictor import Prediction

PAIRS = 5  # confusions that are named


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines whose columns are as wide as their widest cell, those in `right` set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def metric_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """What an evaluation's `metrics()` found: the whole, then each class, then what is confused."""
    if "miou" in metrics:
        yield from _segment_lines(metrics)
    elif "box_ap" in metrics:
        yield from _detect_lines(metrics)
    else:
        yield from _classify_lines(metrics)
    pairs = [f"{p['truth']} taken for {p['said']} ({_amount(p)})" for p in metrics.get("confused_pairs", [])[:PAIRS]]
    if pairs:
        yield f"\nMost confused: {', '.join(pairs)}"


def _amount(pair: dict[str, Any]) -> str:
    """How often; of pixels, the part of the class."""
    return f"{pair['part']:.1%}" if "part" in pair else str(pair["n"])


def _segment_lines(metrics: dict[str, Any]) -> Iterator[str]:
    loss = f"   loss {number(metrics['loss'], 4)}" if "loss" in metrics else ""
    accuracy = f"pixel accuracy {number(metrics['pixel_accuracy'], 4)}"
    yield f"mIoU {number(metrics['miou'], 4)}   {accuracy}   mean accuracy {number(metrics['mean_accuracy'], 4)}{loss}"
    yield ""
    pixels = sum(row["pixels"] for row in metrics["per_class"]) or 1
    rows = [
        [row["name"], f"{row['pixels'] / pixels:.2%}", number(row["iou"]), number(row["accuracy"])]
        for row in metrics["per_class"]
    ]
    yield from columns([["class", "of all pixels", "IoU", "accuracy"], *rows], right=range(1, 4))


def _detect_lines(metrics: dict[str, Any]) -> Iterator[str]:
    kinds = [kind for kind in ("box", "mask") if metrics.get(f"{kind}_ap") is not None]
    parts = {"": "AP", "50": "AP50", "75": "AP75", "_small": "small", "_medium": "medium", "_large": "large"}
    rows = [[kind, *(number(metrics.get(f"{kind}_ap{key}")) for key in parts)] for kind in kinds or ["box"]]
    yield from columns([["", *parts.values()], *rows], right=range(1, 7))
    yield ""
    rows = [
        [row["name"], f"{row['n']:,}", *(number(row.get(f"{kind}_ap")) for kind in kinds)]
        for row in metrics["per_class"]
    ]
    yield from columns([["class", "objects", *(f"{kind} AP" for kind in kinds)], *rows], right=range(1, 4))


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def _classify_lines(metrics: dict[str, Any]) -> Iterator[str]:
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


def prediction_lines(predictions: "list[Prediction]") -> Iterator[str]:
    width = max((len(p.name) for p in predictions), default=0)
    for p in predictions:
        said = "  ".join(f"{label} {100 * x:.1f} %" for label, x in zip(p.labels, p.probabilities, strict=True))
        yield f"{p.name:<{width}}  {said or 'cannot be read: ' + p.error}"


def as_csv(predictions: "list[Prediction]", top: int) -> str:
    """A line for each picture: its name, `top` labels with their probabilities, and why there are none."""
    rows: list[list[Any]] = [
        ["name", *(f"{column}_{i + 1}" for i in range(top) for column in ("label", "probability")), "error"]
    ]
    for p in predictions:
        pairs = [cell for pair in zip(p.labels, p.probabilities, strict=True) for cell in pair]
        rows.append([p.name, *(pairs or [""] * (2 * top)), p.error])
    return _table(rows)


# Masks and objects ----------------------------------------------------------------------------------------------


def shares_lines(
    names: Sequence[str], shares: Sequence[dict[str, float]], errors: Sequence[str], top: int
) -> Iterator[str]:
    """For each picture the classes with the largest parts of its area."""
    width = max(map(len, names), default=0)
    for name, parts, error in zip(names, shares, errors, strict=True):
        said = "  ".join(f"{label} {100 * part:.1f} %" for label, part in list(parts.items())[:top])
        yield f"{name:<{width}}  {said or 'cannot be read: ' + error}"


def shares_csv(
    names: Sequence[str], shares: Sequence[dict[str, float]], errors: Sequence[str], classes: Sequence[str]
) -> str:
    """A line for each picture, a column for each class."""
    rows = (
        [name, *("" if error else f"{parts.get(label, 0.0):.6g}" for label in classes), error]
        for name, parts, error in zip(names, shares, errors, strict=True)
    )
    return _table([["name", *classes, "error"], *rows])


def objects_lines(
    names: Sequence[str], objects: Sequence[list[dict[str, Any]]], errors: Sequence[str]
) -> Iterator[str]:
    """For each picture how many objects of which class; where there is one picture only, each object."""
    width = max(map(len, names), default=0)
    for name, found, error in zip(names, objects, errors, strict=True):
        counts = Counter(row["category_name"] for row in found).most_common()
        said = "  ".join(f"{label} {n}" for label, n in counts) or "nothing"
        yield f"{name:<{width}}  {'cannot be read: ' + error if error else said}"
    if len(names) == 1 and objects[0]:
        header = ["class", "score", "left", "top", "width", "height"]
        rows = [[row["category_name"], f"{row['score']:.2f}", *(f"{v:.0f}" for v in row["bbox"])] for row in objects[0]]
        yield ""
        yield from columns([header, *rows], right=range(1, 6))


def objects_csv(names: Sequence[str], objects: Sequence[list[dict[str, Any]]], errors: Sequence[str]) -> str:
    """A line for each object, and one for each picture that could not be read."""
    rows = [["name", "class", "score", "left", "top", "width", "height", "error"]]
    for name, found, error in zip(names, objects, errors, strict=True):
        rows += [[name, row["category_name"], row["score"], *row["bbox"], ""] for row in found]
        rows += [[name, *[""] * 6, error]] if error else []
    return _table(rows)


def _table(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
