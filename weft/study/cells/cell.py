"""Cells of a study: short trainings, each in a folder of its own, each made once.

    STUDY/cells/KEY/cell.json      what is trained: model, switches, data, settings, seed
    STUDY/cells/KEY/run/           the run of `weft train`; a kill leaves its last state, and the next call goes on
    STUDY/cells/KEY/log.txt        what the run said
    STUDY/cells/KEY/result.json    written at the end, whole or not at all: where it is, the cell is over

A cell is trained by a worker (weft.study.cells.workers), a process that outlives its cells but not its parent.
"""

import contextlib
import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.documents import read_json
from weft.errors import WeftError
from weft.files import write_text
from weft.report.text import SCORES

RESULT = "result.json"
PROTOCOL = {"data.protocol": "split"}  # who compares will choose, and test pictures are not for that
LEFT_OUT = "left out: no time"  # a result's error where a cell was not begun


@dataclass(frozen=True)
class Cell:
    """One training: a model with its switches, on data, within a budget, from one seed."""

    data: str
    model: str
    seed: int = 0
    switches: Mapping[str, Any] = field(default_factory=dict)  # arguments of the model
    settings: Mapping[str, Any] = field(default_factory=dict)  # keys of `weft keys`, by their full or short names
    recipe: str = ""

    @property
    def key(self) -> str:
        """A name for the folder: the same for the same content."""
        content = json.dumps(asdict(self), sort_keys=True)
        return f"{self.model}-{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


@dataclass(frozen=True)
class Result:
    cell: Cell
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last validation: top1, loss, ...
    curve: list[dict[str, Any]] = field(default_factory=list)  # a row for each epoch: train_loss, val_top1, seconds
    speed: float = 0.0  # pictures per second in training; 0 of a single step, which has no time between two
    seconds: float = 0.0  # of the whole cell: start, training, evaluation
    memory: int = 0  # bytes of the GPU, at most, with pictures that are kept there; 0 on a CPU
    error: str = ""  # why there are no metrics, in one line; the next call tries again

    @property
    def score(self) -> float | None:
        """Top-1 of classifiers, and what else the tasks are judged by."""
        return next((self.metrics[name] for name in SCORES if self.metrics.get(name) is not None), None)


def whole_epochs(epochs: float, part: float) -> tuple[int, float]:
    """A whole number of epochs, and a part of the pictures that leaves the work as it was: 1.67 of 60 %: 2 of 50 %."""
    whole = max(1, round(epochs))
    if part * epochs > whole:  # more than all pictures
        whole = math.ceil(epochs)
    return whole, part * epochs / whole


def cell_folder(study: Path, cell: Cell) -> Path:
    return study / "cells" / cell.key


def read_result(study: Path, cell: Cell) -> Result | None:
    """The result of a finished cell. None where it is not finished, or its file is damaged or of another cell."""
    try:
        content = read_json(cell_folder(study, cell) / RESULT)
        result = Result(**{**content, "cell": Cell(**content["cell"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    same = result.cell.key == cell.key and isinstance(result.metrics, dict) and isinstance(result.curve, list)
    return result if same and result.score is not None else None


def describe_progress(study: Path, cell: Cell) -> str:
    """How far the training of a cell is: `epoch 2.5/10`."""
    try:
        rows = _metric_rows(cell_folder(study, cell) / "run")
    except OSError:
        return "starting"
    epoch = max((row.get("epoch", 0) for row in rows), default=0)
    epochs = cell.settings.get("run.epochs")
    return f"epoch {epoch:.1f}" + (f"/{epochs}" if epochs else "")


def read_curve(study: Path, cell: Cell) -> list[float]:
    """The validation score after each epoch so far."""
    try:
        rows = [row for row in _metric_rows(cell_folder(study, cell) / "run") if row["kind"] == "epoch"]
    except OSError:
        return []
    scores = (Result(cell, {name: row.get(f"val_{name}") for name in SCORES}).score for row in rows)
    return [score for score in scores if score is not None]


# In the worker --------------------------------------------------------------------------------------------------


def train_cell(folder: Path, device: str) -> Result:
    """Trains what `folder`/cell.json says, or resumes it, and writes its result."""
    import torch

    from weft.engine.lock import STATE, locked

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    cell = Cell(**read_json(folder / "cell.json"))
    begin = time.monotonic()
    with locked(folder), open(folder / "log.txt", "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        reported = _train(cell, folder / "run", device)
        rows = _metric_rows(folder / "run")
        curve = [row for row in rows if row["kind"] == "epoch"]
        result = Result(
            cell,
            metrics=reported or {key[4:]: value for key, value in curve[-1].items() if key.startswith("val_")},
            curve=curve,
            speed=_speed(rows),
            seconds=time.monotonic() - begin,
            memory=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        )
        if result.score is None:
            raise WeftError("there are no validation pictures to compare by; name some with --val")
        write_text(folder / RESULT, json.dumps(asdict(result)))
        shutil.rmtree(folder / "run" / STATE.parent, ignore_errors=True)  # nobody goes on with it, and it is large
    return result


def _train(cell: Cell, run: Path, device: str) -> dict[str, float]:
    """Without a report: the last validation says what is compared.

    Where a set's published protocol was asked for, the numbers of its test part are returned, and compared.
    """
    from weft.run.train import train

    settings: dict[str, Any] = {**PROTOCOL, **cell.settings}
    published = settings["data.protocol"] == "published"
    if _has_state(run):
        trained = train(resume=run, device=device, allow_changes=True)
    else:
        shutil.rmtree(run, ignore_errors=True)
        settings = {"run.report": published, **settings}
        model = {"seed": cell.seed, "model": cell.model, "model.args": dict(cell.switches)}
        trained = train(cell.data, recipe=cell.recipe, out=run, device=device, **{**model, **settings})
    return {name: value for name, value in trained.metrics.items() if published and isinstance(value, int | float)}


def _has_state(run: Path) -> bool:
    """Whether a run has a state to resume from; a damaged one is as good as none."""
    from weft.engine.state import read_header

    try:
        read_header(run)
    except WeftError:
        return False
    return True


def _speed(rows: list[dict[str, Any]]) -> float:
    speeds = [row["pictures_per_second"] for row in rows if row["kind"] == "step" and row["pictures_per_second"]]
    return statistics.median(speeds or [0.0])


def _metric_rows(run: Path) -> list[dict[str, Any]]:
    from weft.engine.log import METRICS, read_rows

    return read_rows(run / METRICS)
