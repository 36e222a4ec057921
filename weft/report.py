"""The page of a run, report.html: how good the model is, where it errs, what it learned from, how to repeat and use it.

Here the numbers and pictures are collected; `templates/report.html.j2` says how they look.
"""

import dataclasses
import math
import platform
import shlex
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.config import Config
from weft.engine.log import METRICS, read_rows
from weft.files import write_text
from weft.page import data_uri, render
from weft.plots import Chart, Point, line_chart

if TYPE_CHECKING:
    from weft.analysis.errors import Evaluation
    from weft.data.check import DataReport
    from weft.data.sources import Source
    from weft.data.split import Split
    from weft.data.transforms import Preprocessing

MATRIX_CLASSES = 40  # a larger confusion matrix cannot be read; the confused pairs say the same
AUGMENTED, PREDICTIONS, MISTAKES = 24, 24, 16  # pictures shown, at most
PAIRS, PAIRS_ALONE, PAIR_PICTURES = 5, 12, 6  # confused pairs beside a matrix and without one
NAMES = 100  # of left-out files and of a problem's files
PACKAGES = "torch", "torchvision", "timm"
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
SIDE = 128  # pixels of a thumbnail, which is shown smaller


def write_report(
    run: Path,
    *,
    config: Config,
    evaluation: "Evaluation",
    source: "Source",
    split: "Split",
    preprocessing: "Preprocessing",
    augmented: Tensor,
    data_report: "DataReport",
    command: str,
) -> Path:
    """Writes `run`/report.html, one file that needs no other, and returns its path.

    `run` holds metrics.jsonl and the model; `evaluation` is that of the validation pictures, `augmented` a
    (B, C, H, W) batch as the model was shown it in training, before normalisation; `command` repeats the run.
    """
    history, metrics = read_history(run), evaluation.metrics()
    album = Album(evaluation, source, split, preprocessing)
    matrix = not evaluation.multilabel and len(evaluation.classes) <= MATRIX_CLASSES
    page = render(
        "report.html.j2",
        folder=run.resolve().name,
        shell_folder=shlex.quote(run.resolve().name),
        config=config,
        evaluation=evaluation,
        source=source,
        preprocessing=preprocessing,
        data_report=data_report,
        command=command,
        history=history,
        metrics=metrics,
        data=data_name(config.data.source),
        verdict=verdict(metrics, evaluation),
        seconds=in_units(max((row["seconds"] for row in history.epochs), default=0.0), SECONDS),
        parameters=in_units(_parameters(run), COUNTS),
        epochs_planned=0 if config.run.minutes else math.ceil(config.run.epochs + config.optim.cooldown_epochs),
        charts=curves(history, many_classes=len(evaluation.classes) >= 20),
        matrix=matrix,
        per_class=worst_first(metrics),
        pairs=album.pairs(PAIRS if matrix else PAIRS_ALONE, PAIR_PICTURES),
        mistakes=album.mistakes(MISTAKES),
        predictions=album.random(PREDICTIONS, config.run.seed),
        augmented=[data_uri(visible(picture), SIDE) for picture in augmented[:AUGMENTED]],
        calibration=None if evaluation.multilabel else reliability_chart(metrics),
        counts=counts(source, split),
        most_names=NAMES,
        settings=settings(config),
        versions={"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        machine=machine(config.run.device),
        date=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
    )
    write_text(run / "report.html", page)
    return run / "report.html"


@dataclass(frozen=True)
class History:
    """The rows of metrics.jsonl by kind, in order."""

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def best(self) -> dict[str, Any] | None:
        return next((row for row in reversed(self.epochs) if row["best"]), None)


def read_history(run: Path) -> History:
    """A step that was done again after a rollback counts once, as it went last."""
    rows = {(row["kind"], row["step"], row.get("text")): row for row in read_rows(run / METRICS)}
    ordered = sorted(rows.values(), key=lambda row: row["step"])
    return History(*([row for row in ordered if row["kind"] == kind] for kind in ("step", "epoch", "event")))


def data_name(source: str) -> str:
    """What to call the data: the last part of a path, the set's name in NAME:ROOT."""
    name, colon, _ = source.partition(":")
    if colon and name.isidentifier() and len(name) > 1:  # C: is a drive
        return source if name == "demo" else name
    return Path(source).name or source


def verdict(metrics: dict[str, Any], evaluation: "Evaluation") -> list[str]:
    """The result in plain sentences."""
    seen = [row for row in metrics["per_class"] if row["n"]]
    if not seen:
        return ["There were no validation pictures with a label, so how good the model is was not measured."]
    if evaluation.multilabel:
        weakest = min(seen, key=lambda row: row["ap"])
        guess = evaluation.labels.mean(0)[[row["n"] > 0 for row in metrics["per_class"]]].mean()
        return [
            f"The mean average precision is {metrics['map']:.2f}: 1 would be perfect, guessing gives {guess:.2f}.",
            f"The weakest class is {weakest['name']} ({weakest['ap']:.2f}).",
        ]
    low, high = (round(100 * bound) for bound in metrics["top1_interval"])
    first = f"Of 100 new pictures about {100 * metrics['top1']:.0f} would be named correctly ({low} to {high})."
    weakest = min(seen, key=lambda row: row["recall"])
    lost = sum(row["recall"] == 0 for row in seen)
    if lost > 1:
        return [first, f"{lost} of {len(seen)} classes are not recognised at all, such as {weakest['name']}."]
    if weakest["recall"] == 1:
        return [first, "No class has a mistake."]
    return [first, f"The weakest class is {weakest['name']}: about {100 * weakest['recall']:.0f} of 100 are found."]


def curves(history: History, *, many_classes: bool) -> dict[str, Chart | None]:
    """The charts of a run; None where nothing was recorded."""
    steps, epochs, best = history.steps, history.epochs, history.best
    timed = [row for row in steps if row["pictures_per_second"]]  # the first step has nothing to be timed against
    score, name = ("val_map", "mAP") if any("val_map" in row for row in epochs) else ("val_top1", "top-1")
    scores = {name: _points(epochs, score)}
    if name == "mAP" or many_classes:
        scores |= {"top-5": _points(epochs, "val_top5"), "F1": _points(epochs, "val_f1")}
    mark = ((best["epoch"], best[score]), f"best: epoch {best['epoch']}, {100 * best[score]:.1f} %") if best else None
    losses = {
        "each step": _points(steps, "loss"),
        "training": _points(epochs, "train_loss"),
        "validation": _points(epochs, "val_loss"),
    }
    return {
        "score": line_chart(
            "Validation accuracy" if name == "top-1" else "Validation", scores, show=_percent, mark=mark
        ),
        "loss": line_chart("Loss", losses),
        "lr": line_chart(
            "Learning rate", {"learning rate": sorted(_points(steps, "lr") + _points(epochs, "lr"))}, zero=True
        ),
        "grad_norm": line_chart("Norm of the gradient", {"norm": _points(steps, "grad_norm")}),
        "speed": line_chart("Pictures per second", {"per second": _points(timed, "pictures_per_second")}, zero=True),
    }


def _points(rows: list[dict[str, Any]], key: str) -> list[Point]:
    return [(row["epoch"], row[key] if row[key] is not None else float("nan")) for row in rows if key in row]


def _percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def reliability_chart(metrics: dict[str, Any]) -> Chart | None:
    bins = [(bin["confidence"], bin["accuracy"]) for bin in metrics["reliability"] if bin["n"]]
    return line_chart(
        "How often a stated probability is right",
        {"as it should be": [(0.0, 0.0), (1.0, 1.0)], "this model": bins},
        x_name="stated probability",
        show=_percent,
        show_x=_percent,
        height=360,
    )


def worst_first(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the per-class table; classes without a picture last."""
    key = "ap" if "map" in metrics else "f1"
    return sorted(metrics["per_class"], key=lambda row: (row["n"] == 0, row[key]))


def counts(source: "Source", split: "Split") -> dict[str, Any]:
    """Pictures of each class in each part: {"parts": {"train": 80, ...}, "rows": [{"name", "train", ...}], "most"}."""
    parts = {"train": split.train, "val": split.val, "test": split.test}
    parts = {name: indices for name, indices in parts.items() if len(indices)}
    columns = {name: _per_class(source, indices) for name, indices in parts.items()}
    rows = [
        {"name": label, **{name: int(column[i]) for name, column in columns.items()}}
        for i, label in enumerate(source.classes)
    ]
    most = max((sum(row[name] for name in columns) for row in rows), default=0)
    return {"parts": {name: len(indices) for name, indices in parts.items()}, "rows": rows, "most": max(most, 1)}


def _per_class(source: "Source", indices: np.ndarray) -> np.ndarray:
    labels = source.labels[indices]
    return labels.sum(0) if source.multilabel else np.bincount(labels, minlength=len(source.classes))


class Album:
    """Pictures of the evaluation, as the model saw them, with what it said."""

    def __init__(self, evaluation: "Evaluation", source: "Source", split: "Split", preprocessing: "Preprocessing"):
        self.evaluation, self.source, self.preprocessing = evaluation, source, preprocessing
        self.where = {source.names[i]: int(i) for i in split.val}

    def random(self, most: int, seed: int) -> list[dict[str, Any]]:
        n = len(self.evaluation.names)
        chosen = np.random.default_rng(seed).choice(n, min(most, n), replace=False)
        return [self.figure(i) for i in chosen]

    def mistakes(self, most: int) -> list[dict[str, Any]]:
        """Those that the model was surest of, first."""
        return [self.figure(mistake.index) for mistake in self.evaluation.worst(most)]

    def pairs(self, most: int, pictures: int) -> list[dict[str, Any]]:
        """The classes most often taken for others, with examples."""
        confused = [] if self.evaluation.multilabel else self.evaluation.confused_pairs(most)
        return [
            {"truth": p.truth, "said": p.said, "n": p.n, "pictures": [self.figure(i) for i in p.index[:pictures]]}
            for p in confused
        ]

    def figure(self, i: int) -> dict[str, Any]:
        """Picture `i` of the evaluation: its name and look, the truth, what the model said and how sure it was."""
        logits, labels = self.evaluation.logits[i], self.evaluation.labels[i]
        if self.evaluation.multilabel:
            said, truth = np.flatnonzero(logits > 0).tolist(), np.flatnonzero(labels).tolist()
            probabilities = torch.from_numpy(logits).double().sigmoid()
        else:
            said, truth = [int(logits.argmax())], [int(labels)]
            probabilities = torch.from_numpy(logits).double().softmax(0)
        name = self.evaluation.names[i]
        return {
            "name": name,
            "src": self._look(name),
            "right": said == truth,
            "truth": [self.evaluation.classes[c] for c in truth],
            "said": [(self.evaluation.classes[c], float(probabilities[c])) for c in said],
        }

    def _look(self, name: str) -> str:
        """The picture as a data URI; empty where its file has gone since."""
        from weft.data.read import BadPicture

        try:
            return data_uri(visible(self.preprocessing.picture(self.source.open(self.where[name]))), SIDE)
        except (KeyError, BadPicture, OSError):
            return ""


def visible(picture: Tensor) -> np.ndarray:
    """A (C, H, W) picture for human eyes: (H, W, 1 or 3) uint8, its first three channels.

    Eight bits in up to four channels are taken for grey or colour as they are. Of anything else (16 bit, float, many
    bands) the values between the first and the last hundredth are stretched over the range, else most would be black.
    """
    channels = len(picture)
    pixels = picture[: 3 if channels >= 3 else 1].permute(1, 2, 0).cpu().numpy()
    if picture.dtype == torch.uint8 and channels <= 4:
        return pixels
    pixels = np.nan_to_num(pixels.astype(np.float32))
    low, high = np.percentile(pixels, (1, 99), axis=(0, 1) if channels > 4 else None)  # bands: each by itself
    return (255 * ((pixels - low) / np.maximum(high - low, 1e-6)).clip(0, 1)).round().astype(np.uint8)


def settings(config: Config) -> list[dict[str, Any]]:
    """Every setting with its value, its line of help and whether it differs from the default."""
    rows = []
    for section in dataclasses.fields(config):
        chosen, default = getattr(config, section.name), getattr(Config(), section.name)
        for key in dataclasses.fields(chosen):
            value, usual = getattr(chosen, key.name), getattr(default, key.name)
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            row = {"key": f"{section.name}.{key.name}", "value": shown, "help": key.metadata["help"]}
            rows.append(row | {"changed": value != usual})
    return rows


def machine(device: str) -> str:
    """What the run was computed on; no host name."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count() if device in ("auto", "cuda") else 1
        return torch.cuda.get_device_name() + (f" (one of {count})" if count > 1 else "")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def in_units(value: float, units: dict[str, float]) -> tuple[str, str]:
    """A number of three digits or so and the last of the growing `units` that it reaches: ("7.15", "min")."""
    reached = [name for name, size in units.items() if value >= size]
    unit = reached[-1] if reached else next(iter(units))
    return f"{value / units[unit]:.3g}", unit


def _parameters(run: Path) -> int:
    from weft.analysis.cost import count_parameters
    from weft.models.folder import open_model

    return count_parameters(open_model(run)[0])
