"""The place of a new run: whether it can have it, and its folder. Needs no torch, so that a refusal comes at once."""

import contextlib
import itertools
from pathlib import Path

from weft.config import Config
from weft.engine.lock import STATE, is_unfinished_start, job_suffix, last_lock_holder
from weft.errors import WeftError, check_writable
from weft.words import shell


def check_source(config: Config) -> None:
    """Raises unless somebody said what to train on."""
    if not config.data.source:
        raise WeftError("Say what to train on: weft train DATA. `weft train demo:fashion` needs no data of your own.")


def check_out(out: str, config: Config, restarted: bool, is_main: bool = True, processes: int = 1) -> None:
    """Raises unless the run can have its folder: not among the pictures, and over nothing that exists."""
    folder = Path(out or "runs")
    for source in filter(None, (config.data.source, config.data.val)):
        pictures = Path(source).expanduser()
        if pictures.is_dir() and folder.resolve().is_relative_to(pictures.resolve()):
            raise WeftError(f"{folder} lies inside the data, {source}; choose a place outside of it with --out.")
    if out and (folder / STATE).exists():
        go_on = shell("weft", "train", "--resume", out)
        raise WeftError(f"{out} holds a run; go on with it: {go_on}; or choose another --out.")
    if out and not restarted and is_main and not is_unfinished_start(folder):
        check_writable(folder)
    if not out and processes > 1:
        raise WeftError("Say where to write with --out, so that a restarted process finds the run again.")


def new_folder(out: str, config: Config) -> Path:
    """The run's folder: as asked for, or the first free runs/DATA-MODEL-N."""
    name = Path(config.data.source.replace(":", "-")).stem or "data"
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        return Path(out)
    for number in itertools.count(1):
        folder = Path("runs") / f"{name}-{config.model.name}-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("there is always one more number")


def is_restarted(folder: Path) -> bool:
    """Whether torchrun starts this command again after a failure: then a process of the same job used the folder."""
    return bool(job_suffix()) and last_lock_holder(folder).endswith(job_suffix())
