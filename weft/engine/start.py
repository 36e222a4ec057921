"""The start of a run: when it began, what its time went into until the first step, and work that is done side by side.

Needs no torch, so that the import of torch is one of the phases.
"""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.words import clean

IMPORTED = time.monotonic()
SLOW_IMPORT = 60.0  # seconds from the start of a process to here that are still believed


@dataclass
class RunStart:
    """When a run began, on the clock of time.monotonic(), and the phases that it has had since."""

    began: float = field(default_factory=time.monotonic)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)  # seconds after `began`: from, to
    of_process: bool = False  # whether the process is the command's own, and has imported nothing heavy yet

    @classmethod
    def of_command(cls) -> "RunStart":
        """From the moment somebody pressed Enter; from now where the process has had another life, with torch in it."""
        return cls() if "torch" in sys.modules else cls(process_began(), of_process=True)

    def announce(self, what: str) -> None:
        """Says a line before the silence of imports, which may last for a minute where a machine is busy."""
        if self.of_process and what and os.environ.get("RANK", "0") == "0":
            print(f"{clean(what)}: starting", flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self.seconds()
        try:
            yield
        finally:
            self.phases[name] = (begin, self.seconds())

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """The phase of imports, in which nobody looks for garbage: that is a tenth of the time, and there is none."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            with self.phase("imports"):
                yield
        finally:
            if was_on:
                gc.enable()

    def row(self, step: int) -> dict[str, Any]:
        """The row of metrics.jsonl, at the first step that is done."""
        phases = {name: [round(second, 3) for second in phase] for name, phase in self.phases.items()}
        return {"kind": "start", "step": step, "seconds": round(self.seconds(), 3), "phases": phases}


def process_began() -> float:
    """When this process began, as time.monotonic() counts; where the system does not say, when this was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on
        after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        began = time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return IMPORTED
    return began if 0 <= IMPORTED - began < SLOW_IMPORT else IMPORTED


def side_by_side(work: Callable[[], Any], *others: Callable[[], Any]) -> None:
    """Does `work` in this thread, which may fork, and the others beside it; raises an error when all are over.

    The others import nothing for the first time: a process that is forked meanwhile would wait for that forever.
    """
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        beside = [pool.submit(copy_context().run, other) for other in others]
        work()
    for other in beside:
        other.result()
