"""Evaluation of what was trained: `weft eval`, and the end of every training."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from weft.config import Config, DataConfig, override, read_yaml
from weft.data.given import Progress
from weft.data.sources.open import open_configured
from weft.data.sources.source import Source
from weft.data.split import load_split
from weft.documents import read_json
from weft.errors import WeftError, check_choice
from weft.run.predictor import Predictor
from weft.tasks.registry import task_class


def evaluate(
    predictor: Predictor,
    source: Source,
    indices: np.ndarray,
    *,
    batch: int = 0,
    workers: int = -1,
    progress: Progress | None = None,
) -> Any:
    """The model's answers to the pictures at `indices`, next to the truth, which is matched by class name.

    Returns the `Evaluation` of the model's task. Pictures that cannot be read are left out, as in training.
    """
    task = predictor.task
    if source.task != task.name:
        wanted = task_class(source.task).purpose
        raise WeftError(f"{source.root} is data to {wanted}; the model was trained to {task.purpose}.")
    collector = task.collector(source, indices)
    for read in predictor.read(collector.source, indices, batch, workers, progress):
        if len(read.pictures):
            collector.update(predictor.infer(read.pictures), read)
    return collector.evaluation()


# What `weft eval` looks at --------------------------------------------------------------------------------------

SPLITS = ("train", "val", "test", "all")


def find_pictures(folder: str | os.PathLike[str], data: str = "", split: str = "") -> tuple[Source, np.ndarray, str]:
    """The source to evaluate on, which of its pictures, and one line that says so.

    Without `data`, or where `data` is what the run was trained on, these are the pictures that it reports on: those
    it kept for validation, or the test part of a known set. Of other data the validation pictures are taken, or else
    the test pictures, or else all; of a known set in its published protocol the test pictures come first.
    """
    if split:
        check_choice("split", split, SPLITS)
    config, own = _data_config(Path(folder)), (Path(folder) / "split.json").is_file()
    if data and not (own and _same_place(data, config.source)):
        source, whose = open_configured(config, data), ""
        parts = {name: np.flatnonzero(source.splits == name) for name in SPLITS[:3]}
        known = source.published and config.protocol == "published"  # where validation pictures train
        order = ("test", "val") if known else ("val", "test")
        split = split or next((name for name in order if len(parts[name])), "all")
    elif own:
        source, parts, reported = _own_data(Path(folder), config)
        whose, split = ", by the run's own split", split or reported
    else:
        raise WeftError(f"{folder} has no data of its own; say which: weft eval {folder} DATA")
    parts["all"] = np.arange(len(source))
    if not len(parts[split]):
        others = [name for name in SPLITS if len(parts[name])]
        raise WeftError(f"{source.root} has no {split} pictures; choose --split {' or '.join(others)}.")
    what = {"train": "training ", "val": "validation ", "test": "test ", "all": ""}[split]
    return source, parts[split], f"{len(parts[split]):,} {what}pictures of {source.root}{whose}"


def _data_config(folder: Path) -> DataConfig:
    """Settings of the data that a run was trained on; of a model folder that is no run, its task alone."""
    if (folder / "config.yaml").is_file():
        return override(Config(), read_yaml(folder / "config.yaml")).data
    stored = read_json(folder / "config.json")
    return DataConfig(task=stored.get("weft", {}).get("task", "auto"))


def _same_place(data: str, other: str) -> bool:
    return data == other or (os.path.exists(data) and os.path.exists(other) and os.path.samefile(data, other))


def _own_data(folder: Path, config: DataConfig) -> tuple[Source, dict[str, np.ndarray], str]:
    """The data of a run, its parts, and the one that it reports on."""
    source = open_configured(config)
    split = load_split(folder / "split.json", source)
    return source, {"train": split.train, "val": split.val, "test": split.test}, split.report_on
