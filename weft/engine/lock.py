"""The folder of a run: who holds its lock, whether it has a state. Needs no torch."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.errors import WeftError

STATE = Path("state") / "last.safetensors"
LOCK = Path("state") / "lock"
SETTINGS = ("config.yaml", "data_report.json", "split.json")  # written before the first state


def check_state(run: Path) -> None:
    """Raises where a run has no state to go on from."""
    if not (run / STATE).is_file():
        raise WeftError(f"{run} has no state to resume from: expected {run / STATE}.")


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keeps a second run out of the folder. The system frees the lock when the process ends, however it ends."""
    (run / "state").mkdir(parents=True, exist_ok=True)
    with open(run / LOCK, "a+", encoding="utf-8") as file:
        _lock(file, run)
        remove_leftovers(run)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}{job_suffix()}")
        file.flush()
        yield


def last_lock_holder(run: Path) -> str:
    """The process that locked a folder last, or still does."""
    try:
        return (run / LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""


def is_unfinished_start(run: Path) -> bool:
    """Whether a run was ended here before it had a state, and nothing else lies here: then the next try may have it."""
    if not (run / LOCK).is_file() or (run / STATE).exists():
        return False
    known = {LOCK.parent.name, *SETTINGS}
    return all(entry.name in known or entry.name.startswith(".saving-") for entry in run.iterdir())


def forget_start(run: Path) -> None:
    """Removes what a run has left that ended before it had a state; the caller holds the lock."""
    if is_unfinished_start(run):
        remove_leftovers(run)
        with contextlib.suppress(OSError):  # an open file stays on Windows; the next try may have it
            for name in (*SETTINGS, LOCK):
                (run / name).unlink(missing_ok=True)
            (run / LOCK.parent).rmdir()


def remove_leftovers(run: Path) -> None:
    """Removes half-written files of killed writers, which never have their real names; the caller holds the lock."""
    for folder in (run, run / LOCK.parent):
        for leftover in folder.glob(".saving-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def job_suffix() -> str:
    """`, job NAME`: torchrun's name of all attempts of one job; where it has none, the process that is torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f", job {os.getppid() if name == 'none' else name}" if name else ""


def _lock(file: Any, run: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two runs are still kept apart by the folder's content
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone: forked readers do not inherit it
    except OSError:
        file.seek(0)
        raise WeftError(f"{run} is in use by {file.read() or 'another process'}; choose another --out.") from None
