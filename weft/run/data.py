"""The data of a run: opened, split and checked before anything else happens."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.config import Config
from weft.data.check.amounts import measure_targets
from weft.data.check.check import DataReport, check
from weft.data.sources.open import open_configured
from weft.data.sources.source import Source
from weft.data.split import Split, make_split
from weft.engine.device import World
from weft.errors import WeftError


@dataclass
class RunData:
    source: Source
    split: Split
    report: DataReport


def open_sources(config: Config, world: World) -> Source:
    """The pictures. One process of each machine opens them first, so that shards are indexed once and not by all."""
    for turn in (True, False):
        with world.propagate_errors():
            if world.is_local_main == turn:
                source = open_configured(config.data)
    return source  # pyright: ignore[reportPossiblyUnboundVariable]


def open_data(config: Config, world: World, say: Any) -> RunData:
    source = open_sources(config, world)
    with world.propagate_errors():
        split = make_split(source, config.data, config.run.seed)
    report: DataReport = world.on_main(lambda: check(source, split, quick=True, config=config.data))
    for line in [*report.lines(), *describe_protocol(split)]:
        say(line)
    errors = [problem.text for problem in report.problems if problem.severity == "error"]
    with world.propagate_errors():
        if errors:
            raise WeftError(
                f"{errors[0].rstrip('.')} (`weft check {config.data.source}` shows "
                + ("the rest)." if errors[1:] else "it).")
            )
    split = without(split, source, report.bad)
    report = world.on_main(lambda: measure_targets(source, split.train, report))
    return RunData(source, split, report)


def describe_protocol(split: Split) -> list[str]:
    """A line on what is measured by what, where a set's published protocol decides that."""
    if split.report_on != "test":
        return []
    chosen = f"{len(split.val):,} held out to choose the best epoch" if len(split.val) else "the last epoch is kept"
    trained, tested = f"{len(split.train):,} pictures to train on", f"{len(split.test):,} test pictures at the end"
    return [f"published protocol: {trained}, {chosen}; {tested}"]


def without(split: Split, source: Source, bad: dict[str, str]) -> Split:
    """The split without unreadable files, of which the check has found few enough."""
    if not bad:
        return split
    left_out = np.array([name in bad for name in source.names])
    return replace(
        split, **{part: idx[~left_out[idx]] for part, idx in vars(split).items() if isinstance(idx, np.ndarray)}
    )


def absolute_paths(config: Config) -> dict[str, str]:
    """Data and initial weights by paths that still lead there when the run is resumed from another folder."""
    named = {"data.source": config.data.source, "data.val": config.data.val}
    beside = {"data.masks": config.data.masks, "data.classes": config.data.classes}  # here, or in the source
    named |= {key: path for key, path in beside.items() if Path(path).exists()}
    named |= {"model.init": config.model.init, "loss.teacher": config.loss.teacher}
    return {key: absolute(path) for key, path in named.items() if path}


def absolute(path: str) -> str:
    """A path, a pattern of shards, or the root in NAME:ROOT; a mere name stays what it is."""
    name, colon, root = path.rpartition(":") if not Path(path).exists() else ("", "", path)
    leads_somewhere = Path(root).exists() or ("/" in root and Path(root).parent.exists())
    return f"{name}{colon}{Path(root).absolute()}" if leads_somewhere else path
