"""Labels as users get them: objects in Python, lines in a terminal, tables and JSON in files."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from weft.documents import to_json
from weft.report.text import to_csv
from weft.tasks.task import ResultTexts


@dataclass(frozen=True)
class Prediction:
    name: str
    labels: list[str]  # the likeliest first
    probabilities: list[float]  # of these labels; they add up to 1 over all classes, unless a picture may have several
    error: str = ""  # why there are none


def named(name: str, logits: Tensor, classes: list[str], top: int, multilabel: bool) -> Prediction:
    """The `top` likeliest of (classes,) float32 logits on the host."""
    scores = logits.double()
    probabilities = scores.sigmoid() if multilabel else scores.softmax(0)
    values, order = probabilities.sort(descending=True, stable=True)
    return Prediction(name, [classes[c] for c in order[:top].tolist()], values[:top].tolist())


class LabelWriter:
    """The predictions for many pictures as text."""

    def __init__(self, top: int):
        self.top, self.predictions = top, []

    def add(self, index: int, prediction: Prediction) -> None:
        self.predictions.append(prediction)

    def close(self) -> ResultTexts:
        rows = [asdict(prediction) for prediction in self.predictions]
        return ResultTexts(
            json=to_json(rows, indent=2) + "\n",
            csv=labels_csv(self.predictions, self.top),
            lines=list(label_lines(self.predictions)),
        )


def label_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    width = max((len(p.name) for p in predictions), default=0)
    for p in predictions:
        said = "  ".join(f"{label} {100 * x:.1f} %" for label, x in zip(p.labels, p.probabilities, strict=True))
        yield f"{p.name:<{width}}  {said or 'cannot be read: ' + p.error}"


def labels_csv(predictions: Sequence[Prediction], top: int) -> str:
    """A line for each picture: its name, `top` labels with their probabilities, and why there are none."""
    header = ["name", *(f"{column}_{i + 1}" for i in range(top) for column in ("label", "probability")), "error"]
    rows: list[list[Any]] = [header]
    for p in predictions:
        pairs = [cell for pair in zip(p.labels, p.probabilities, strict=True) for cell in pair]
        rows.append([p.name, *(pairs or [""] * (2 * top)), p.error])
    return to_csv(rows)
