"""Evaluation of what was trained: `weft eval`, and the end of every training."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.config import Config, DataConfig, override, read_yaml
from weft.data.given import Progress
from weft.data.sources.open import open_configured
from weft.data.sources.renamed import match_classes
from weft.data.sources.source import Source, fingerprint
from weft.data.split import load_split, stored_fingerprint
from weft.documents import read_json
from weft.errors import WeftError, check_choice
from weft.run.data import is_there, relocated
from weft.run.predictor import Predictor, is_finite
from weft.tasks.registry import task_class
from weft.words import shell


def evaluate(
    predictor: Predictor,
    source: Source,
    indices: np.ndarray,
    *,
    batch: int = 0,
    workers: int = -1,
    progress: Progress | None = None,
    unreadable: list[str] | None = None,
) -> Any:
    """The model's answers to the pictures at `indices`, next to the truth, which is matched by class name.

    Returns the `Evaluation` of the model's task. Pictures that cannot be read are left out, as in training; their names
    are added to `unreadable`. Raises where not one answer is made of numbers: nothing was measured then.
    """
    task = predictor.task
    if source.task != task.name:
        wanted = task_class(source.task).purpose
        raise WeftError(f"{source.root} is data to {wanted}; the model was trained to {task.purpose}.")
    collector, finite, answered = task.collector(source, indices), False, False
    for read in predictor.read(collector.source, indices, batch, workers, progress):
        if unreadable is not None:
            unreadable += [source.names[index] for index, _ in read.bad]
        if len(read.pictures):
            answers = predictor.infer(read.pictures)
            finite, answered = finite or any(map(is_finite, answers)), True
            collector.update(answers, read)
    if answered and not finite:
        raise WeftError("Not one answer of the model is a number: its weights are damaged, or far too large.")
    return collector.evaluation()


def in_models_classes(
    predictor: Predictor, source: Source, indices: np.ndarray, renamed: Mapping[str, str]
) -> tuple[Source, np.ndarray, list[str]]:
    """Pictures with the classes of the model: those that have one, and lines on the others, see `match_classes`."""
    classes, numbers = predictor.classes, [str(i) for i in range(len(predictor.classes))]
    same = source.classes == classes or (classes == numbers and len(source.classes) == len(classes))
    if source.task != predictor.task.name or source.valid is not None or (same and not renamed):
        return source, indices, []
    return match_classes(source, indices, classes, renamed)


# What `weft eval` looks at --------------------------------------------------------------------------------------

SPLITS = ("train", "val", "test", "all")


def find_pictures(folder: str | os.PathLike[str], data: str = "", split: str = "") -> tuple[Source, np.ndarray, str]:
    """The source to evaluate on, which of its pictures, and one line that says so.

    Without `data`, or where `data` is what the run was trained on, or a copy of that, these are the pictures that it
    reports on: those it kept for validation, or the test part of a known set. Of other data the validation pictures are
    taken, or else the test pictures, or else all; of a known set in its published protocol the test part comes first.
    """
    if split:
        check_choice("split", split, SPLITS)
    folder = Path(folder)
    config, own = _data_config(folder), (folder / "split.json").is_file()
    copy = moved_copy(folder, config, data) if data and own and not _same_place(data, config.source) else None
    if copy is not None:
        parts, reported = _own_parts(folder, copy)
        source, whose, split = copy, ", by the run's own split: they are a copy of its data", split or reported
    elif data and not (own and _same_place(data, config.source)):
        source, whose = open_configured(config, data), ""
        parts = {name: np.flatnonzero(source.splits == name) for name in SPLITS[:3]}
        known = source.published and config.protocol == "published"  # where validation pictures train
        order = ("test", "val") if known else ("val", "test")
        split = split or next((name for name in order if len(parts[name])), "all")
    elif own:
        source = _own_data(folder, config)
        parts, reported = _own_parts(folder, source)
        whose, split = ", by the run's own split", split or reported
    else:
        raise WeftError(f"{folder} has no data of its own; say which: {shell('weft', 'eval', folder, 'DATA')}")
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


def _own_data(folder: Path, config: DataConfig) -> Source:
    try:
        return open_configured(config)
    except WeftError as error:
        if is_there(config.source):
            raise
        told = f"If it was moved, say where to: {shell('weft', 'eval', folder, 'DATA')}"
        raise WeftError(f"{error} {told}") from None


def moved_copy(folder: Path, config: DataConfig, place: str) -> Source | None:
    """The data of a run at another place; None where other data lie there."""
    try:
        source = open_configured(relocated(config, place))
    except WeftError:  # whoever opens it as other data says what is wrong
        return None
    return source if fingerprint(source) == stored_fingerprint(folder / "split.json") else None


def _own_parts(folder: Path, source: Source) -> tuple[dict[str, np.ndarray], str]:
    """The parts of a run's data, and the one that it reports on."""
    split = load_split(folder / "split.json", source)
    return {"train": split.train, "val": split.val, "test": split.test}, split.report_on
