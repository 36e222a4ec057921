"""Processes that are forked from this one for a part of its work: their start, whether they are over, their end."""

import gc
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress


def fork(count: int, live: Callable[[int], object]) -> set[int]:
    """Starts up to `count` processes, as many as the system lets; each lives `live` of its number, and no longer.

    They inherit the locks of this one's threads, and may wait for one forever: who starts them has to end them.
    """
    processes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads
        for number in range(count):
            try:
                process = os.fork()
            except OSError:
                break
            if process == 0:
                _live_and_exit(live, number)
            processes.add(process)
    return processes


def _live_and_exit(live: Callable[[int], object], number: int) -> None:
    try:
        gc.disable()  # garbage may hold tensors, and freeing those may ask the GPU
        live(number)
    finally:
        os._exit(0)


def still_alive(processes: set[int]) -> set[int]:
    """Those of `processes`, children of this one, that have not ended."""
    return {process for process in processes if not _is_over(process)}


def end(processes: set[int]) -> None:
    """Kills those that have not ended, and waits until they have."""
    for process in processes:
        if _is_over(process):  # its number may be another's by now
            continue
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _is_over(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] != 0
    except ChildProcessError:  # the system saw to it: who started this one wants to hear of no child
        return True
