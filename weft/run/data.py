"""The data of a run: opened, split and checked before anything else happens, even the import of torch."""

import contextlib
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config import Config, DataConfig, override, read_yaml
from weft.data.check.amounts import measure_targets
from weft.data.check.check import QUICK_SECONDS, DataReport, check
from weft.data.check.duplicates import find_copies
from weft.data.check.headers import QuickLook, add_thumbnails
from weft.data.early import EarlyPixels, decode_early
from weft.data.sources.open import open_configured
from weft.data.sources.source import Source
from weft.data.split import Split, check_can_split, holds_out, make_split
from weft.engine.start import RunStart
from weft.errors import WeftError
from weft.run.place import check_out, check_source, is_restarted
from weft.run.recipes import AUTO, find_recipe
from weft.words import shell

if TYPE_CHECKING:
    from weft.engine.device import World

EMBEDDED = "demo:"  # the beginning of names that are no paths
IMPORT_SECONDS = 5.0  # in which a look that goes on beside the import of torch costs nobody time


@dataclass
class RunData:
    source: Source
    split: Split
    report: DataReport
    fingerprint: str = ""  # of the source, where it is known already
    pixels: EarlyPixels | None = None

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Within it no picture is decoded in the background: its processes are no job of somebody else's."""
        return contextlib.nullcontext() if self.pixels is None else self.pixels.rest()


@dataclass
class EarlyLook:
    """The pictures that `config` asks for, and what goes on in other processes: a look at them, decoding them."""

    config: DataConfig
    source: Source
    look: QuickLook
    pixels: EarlyPixels | None


@contextlib.contextmanager
def looking_early(
    start: RunStart, given: dict[str, Any], recipe: str, config: str, out: str
) -> Iterator[EarlyLook | None]:
    """Lists the pictures of a run to be and lets other processes look at them, while this one imports torch.

    What needs no torch to be refused is refused here. None among processes that share the work, and where a run goes
    on.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" or (out and is_restarted(Path(out))):
        yield None
        return
    with start.phase("listing"):
        asked = {**(read_yaml(config) if config else {}), **given}
        asked |= absolute_paths(override(Config(), asked))
        settings = override(Config(), {**(find_recipe(recipe) if recipe not in ("", AUTO) else {}), **asked})
        check_source(settings)
        check_out(out, settings, restarted=False)
        data = settings.data
        source = open_configured(data)
    look = QuickLook(source, data.max_pixels, QUICK_SECONDS + IMPORT_SECONDS)
    pixels = None
    try:
        if data.keep != "no" and data.workers:
            pixels = decode_early(source, data.channels, data.max_pixels)
        yield EarlyLook(data, source, look, pixels)
    finally:
        look.close()
        if pixels is not None:
            pixels.close()


def open_sources(config: Config, world: "World") -> Source:
    """The pictures. One process of each machine opens them first, so that shards are indexed once and not by all."""
    for turn in (True, False):
        with world.propagate_errors():
            if world.is_local_main == turn:
                source = open_configured(config.data)
    return source  # pyright: ignore[reportPossiblyUnboundVariable]


def open_data(config: Config, world: "World", say: Any, early: EarlyLook | None = None) -> RunData:
    """Opens, splits and checks the pictures, unless `early` has begun with the same ones."""
    early = early if early is not None and early.config == config.data else None
    source = open_sources(config, world) if early is None else early.source
    split, report = world.on_main(lambda: split_and_check(source, config, early and early.look))
    for line in [*report.lines(), *describe_protocol(split)]:
        say(line)
    errors = [problem.text for problem in report.problems if problem.severity == "error"]
    with world.propagate_errors():
        if errors:
            val = ["--data.val", config.data.val] if config.data.val else []
            raise WeftError(
                f"{errors[0].rstrip('.')} (`{shell('weft', 'check', config.data.source, *val)}` shows "
                + ("the rest)." if errors[1:] else "it).")
            )
    split = without(split, source, report.bad)
    report = world.on_main(lambda: measure_targets(source, split.train, report))
    if early is None:
        return RunData(source, split, report)
    return RunData(source, split, report, early.look.fingerprint(), early.pixels)


def split_and_check(source: Source, config: Config, look: QuickLook | None = None) -> tuple[Split, DataReport]:
    """Looks at the pictures, so that the split can keep copies on one side, and says what was found."""
    data = config.data
    check_can_split(source, data)
    scan = (look or QuickLook(source, data.max_pixels, QUICK_SECONDS)).result()
    if holds_out(source, data) and scan.complete:
        add_thumbnails(source, scan, data.max_pixels)
    # What a look had no time for must not decide who validates: the next one might be faster.
    split = make_split(source, data, config.run.seed, find_copies(scan) if scan.complete else None)
    return split, check(source, split, quick=True, config=data, scan=scan)


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


def relocated(config: DataConfig, place: str) -> DataConfig:
    """The same data at another place, with what lies inside them: masks, a class file, validation pictures."""
    old, new = Path(config.source), absolute(place)

    def follow(path: str) -> str:
        inside = path and Path(path).is_absolute() and Path(path).is_relative_to(old)
        return str(Path(new, Path(path).relative_to(old))) if inside else path

    return replace(
        config, source=new, val=follow(config.val), masks=follow(config.masks), classes=follow(config.classes)
    )


def is_there(source: str) -> bool:
    """Whether a path, a pattern or NAME:ROOT leads anywhere."""
    return any(map(os.path.exists, (source, source.partition(":")[2]))) or bool(glob.glob(source))


def check_there(source: str) -> None:
    """Raises where a source leads nowhere or to an empty folder, without a look at those that hold something."""
    if not is_there(source) or (os.path.isdir(source) and not os.listdir(source)):
        open_configured(DataConfig(source=source))


def absolute(path: str) -> str:
    """A path, a pattern of shards, or the root in NAME:ROOT; a mere name stays what it is."""
    if path.startswith(EMBEDDED):
        return path
    name, colon, root = path.rpartition(":") if not Path(path).exists() else ("", "", path)
    leads_somewhere = Path(root).exists() or ("/" in root and Path(root).parent.exists())
    return f"{name}{colon}{Path(root).absolute()}" if leads_somewhere else path
