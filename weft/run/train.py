"""`weft.train` and `weft train`: from a data source to a run folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.config import Config, override
from weft.engine.lock import check_state
from weft.engine.start import RunStart
from weft.errors import WeftError
from weft.run.result import Run

SHORT = {  # options that are used so often that they have no section
    "data": "data.source",
    "val": "data.val",
    "fraction": "data.fraction",
    "balance": "data.balance",
    "task": "data.task",
    "model": "model.name",
    "head": "model.head",
    "init": "model.init",
    "freeze": "model.freeze",
    "img_size": "augment.img_size",
    "lr": "optim.lr",
    "teacher": "loss.teacher",
    "epochs": "run.epochs",
    "minutes": "run.minutes",
    "batch": "run.batch",
    "seed": "run.seed",
    "device": "run.device",
    "patience": "run.patience",
}


def train(
    data: str | os.PathLike[str] = "",
    *,
    recipe: str = "",
    config: str | os.PathLike[str] = "",
    out: str | os.PathLike[str] = "",
    resume: str | os.PathLike[str] = "",
    allow_changes: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Trains a classifier, or, on pictures with masks or boxes, a model that segments or detects.

    Args:
        data: a folder, a CSV or COCO file, shards, a known set, or demo:fashion. docs/data.md has them all.
        recipe: a name of `weft recipes`, or a YAML file; by default chosen from the data.
        config: a YAML file of settings, such as an earlier run's config.yaml.
        out: the folder to make; by default a new one under runs/.
        resume: a run folder to go on with, and nothing else.
        allow_changes: resume although data or settings have changed.
        quiet: say nothing but errors.
        **settings: `epochs=30`, `model="ceit_tiny"` and so on; and every key of `weft keys`, with two underscores
            for the dot: `optim__lr=1e-3`.
    """
    options: dict[str, Any] = dict(recipe=recipe, config=config, out=out, resume=resume)
    return train_since(RunStart(), data, **options, allow_changes=allow_changes, quiet=quiet, **settings)


def train_since(
    start: RunStart,
    data: str | os.PathLike[str] = "",
    *,
    recipe: str = "",
    config: str | os.PathLike[str] = "",
    out: str | os.PathLike[str] = "",
    resume: str | os.PathLike[str] = "",
    allow_changes: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """`train`, for which time counts from `start`: the command began before this could be called."""
    given = name_settings({**({"data": os.fspath(data)} if data else {}), **settings})
    if not quiet:
        start.announce(os.fspath(resume or data or config))
    if resume:
        for name, value in (("recipe", recipe), ("config", config), ("out", out)):
            if value:
                raise WeftError(f"--resume goes on with the run as it is in its folder; leave out --{name}.")
        check_state(Path(resume))
        with start.importing():
            from weft.run.resume import resume_run
        return resume_run(Path(resume), given, allow_changes=allow_changes, quiet=quiet, start=start)

    from weft.run.data import looking_early

    with looking_early(start, given, recipe, os.fspath(config), os.fspath(out)) as early:
        with start.importing():
            from weft.run.start import start_run
        return start_run(
            given, recipe=recipe, config=os.fspath(config), out=os.fspath(out), quiet=quiet, start=start, early=early
        )


def name_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their full names, "optim.lr", from short ones and from Python's `optim__lr`."""
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    named = {key.replace("__", "."): value for key, value in plain.items() if value is not None}
    named = {SHORT.get(key.replace("-", "_"), key): value for key, value in named.items()}
    if named.get("run.batch") == "auto":
        named["run.batch"] = 0
    override(Config(), named)  # an unknown key or a wrong value is said before anything else happens
    return named
