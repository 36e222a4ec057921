"""The page of a run, report.html: how good the model is, where it errs, what it learned from, how to repeat and use it.

Here is what the reports of all tasks have in common; each task adds what is special to it, and the templates say how it
looks.
"""

import dataclasses
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.catalog.cost import count_parameters
from weft.config import Config
from weft.files import write_text
from weft.report.charts import Chart, Point, line_chart
from weft.report.page import render
from weft.words import shell

if TYPE_CHECKING:
    from weft.data.check.check import DataReport
    from weft.data.loader import Batch
    from weft.data.preprocessing import Preprocessing
    from weft.data.sources.source import Source
    from weft.data.split import Split

NAMES = 100  # of left-out files and of a problem's files
PACKAGES = "torch", "torchvision", "timm"
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class RunReport:
    """The facts that the page of a run is made from."""

    folder: Path  # of the run
    rows: list[dict[str, Any]]  # of metrics.jsonl
    config: Config
    evaluation: Any  # of the pictures that are reported
    source: "Source"
    split: "Split"
    preprocessing: "Preprocessing"
    augmented: "Batch"  # pictures as the model was shown them in training, before normalisation
    data_report: "DataReport"
    command: str  # that repeats the run
    predictor: Any  # the run's model; a report of segmentation asks it about the pictures that are shown

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return self.evaluation.metrics()

    @cached_property
    def history(self) -> "History":
        return History.of(self.rows)


def write_report(
    run: RunReport, page: Callable[[RunReport], tuple[str, dict[str, Any]]], outlook: Sequence[str] = ()
) -> Path:
    """Writes report.html, one file that needs no other, into the run's folder and returns its path.

    `page` gives the template, and what it needs beside what all pages have; `outlook`: sentences behind the verdict.
    """
    template, values = page(run)
    write_text(run.folder / "report.html", render(template, **_common_values(run), outlook=outlook, **values))
    return run.folder / "report.html"


def _common_values(run: RunReport) -> dict[str, Any]:
    config, history, name = run.config, run.history, run.folder.resolve().name
    return dict(
        folder=name,
        shell_folder=shell(name),
        config=config,
        evaluation=run.evaluation,
        source=run.source,
        preprocessing=run.preprocessing,
        data_report=run.data_report,
        command=run.command,
        history=history,
        metrics=run.metrics,
        data=data_name(config.data.source),
        seconds=in_units(max((row["seconds"] for row in history.epochs), default=0.0), SECONDS),
        parameters=in_units(count_parameters(run.predictor.model), COUNTS),
        epochs_planned=_epochs_planned(config),
        reported={"val": "validation", "test": "test"}[run.split.report_on],
        chosen=bool(len(run.split.val)),
        parts={name: len(indices) for name, indices in _parts(run.split).items()},
        most_names=NAMES,
        settings=settings(config),
        versions={"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        machine=machine(config.run.device),
        date=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
    )


def _epochs_planned(config: Config) -> int:
    """0 where the length was not given in epochs."""
    if config.run.minutes or config.run.steps:
        return 0
    return math.ceil(config.run.epochs + config.optim.cooldown_epochs)


@dataclass(frozen=True)
class History:
    """The rows of metrics.jsonl by kind, in order."""

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def best(self) -> dict[str, Any] | None:
        return next((row for row in reversed(self.epochs) if row["best"]), None)

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "History":
        """A step that was done again after a rollback counts once, as it went last."""
        last = {(row["kind"], row["step"], row.get("text")): row for row in rows}
        ordered = sorted(last.values(), key=lambda row: row["step"])
        return cls(*([row for row in ordered if row["kind"] == kind] for kind in ("step", "epoch", "event")))


def data_name(source: str) -> str:
    """A name for the data: the last part of a path, the set's name in NAME:ROOT."""
    name, colon, _ = source.partition(":")
    if colon and name.isidentifier() and len(name) > 1:  # C: is a drive
        return source if name == "demo" else name
    return Path(source).name or source


def curves(history: History, scores: dict[str, str], title: str = "Validation") -> dict[str, Chart | None]:
    """The charts of a run; None where nothing was recorded. `scores`: names and keys, the one that decides first."""
    steps, epochs, best = history.steps, history.epochs, history.best
    timed = [row for row in steps if row["pictures_per_second"]]  # the first step has nothing to be timed against
    deciding = next(iter(scores.values()))
    mark = None
    if best and best.get(deciding) is not None:
        mark = (best["epoch"], best[deciding]), f"best: epoch {best['epoch']}, {100 * best[deciding]:.1f} %"
    losses = {
        "each step": _points(steps, "loss"),
        "training": _points(epochs, "train_loss"),
        "validation": _points(epochs, "val_loss"),
    }
    return {
        "score": line_chart(
            title, {name: _points(epochs, key) for name, key in scores.items()}, show=percent, mark=mark, linear=True
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


def percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def counts(source: "Source", split: "Split") -> dict[str, Any]:
    """Pictures of each class in each part: {"parts": ["train", ...], "rows": [{"name", "train", ...}], "most"}."""
    parts = _parts(split)
    columns = {name: _per_class(source, indices) for name, indices in parts.items()}
    rows = [
        {"name": label, **{name: int(column[i]) for name, column in columns.items()}}
        for i, label in enumerate(source.classes)
    ]
    most = max((sum(row[name] for name in columns) for row in rows), default=0)
    return {"parts": list(parts), "rows": rows, "most": max(most, 1)}


def _parts(split: "Split") -> dict[str, np.ndarray]:
    """Who trains, validates and tests, as far as there are any."""
    parts = {"train": split.train, "val": split.val, "test": split.test}
    return {name: indices for name, indices in parts.items() if len(indices)}


def _per_class(source: "Source", indices: np.ndarray) -> np.ndarray:
    labels = source.labels[indices]
    return labels.sum(0) if source.multilabel else np.bincount(labels, minlength=len(source.classes))


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
    """The processor or GPU that the run was computed on; no host name."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count() if device in ("auto", "cuda") else 1
        return torch.cuda.get_device_name() + (f" (one of {count})" if count > 1 else "")
    return f"{processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """The name of the processor's model; its kind, where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def in_units(value: float, units: dict[str, float]) -> tuple[str, str]:
    """A number of three digits or so and the last of the growing `units` that it reaches: ("7.15", "min")."""
    reached = [name for name, size in units.items() if value >= size]
    unit = reached[-1] if reached else next(iter(units))
    return f"{value / units[unit]:.3g}", unit
