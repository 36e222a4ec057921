"""Compiling kernels before they are needed, on all cores: a model has some dozens, and each takes a second or more.

Triton's front end is Python, so that threads would wait for each other. Processes that are forked do not: each compiles
its share and leaves it in Triton's cache on disk, where this process finds it.
"""

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from weft.kernels.switch import has_triton, interpreted, kernels_are_on
from weft.processes import end, fork, still_alive

TIMEOUT = 300.0  # seconds for all kernels; whoever takes longer hangs, and is ended
NUMBER = struct.Struct("i")
PIPE = 1 << 16  # bytes that a pipe holds: 16,000 numbers, more than any model has kernels
SLOW = ("weft.kernels.triton.depthwise", "weft.kernels.triton.qkv")  # written out tap by tap: five seconds and more
Task = Callable[[], Any]
Waiting = tuple[Future[Any], Task]


def compile_ahead(dry_run: Callable[[], Any], workers: int = os.cpu_count() or 1, limit: float = math.inf) -> bool:
    """Compiles all kernels that `dry_run` would launch, on `workers` cores at once; Triton keeps them for next time.

    It launches none: what `dry_run` computes means nothing, and the caller has to undo what it changes. A kernel that
    cannot be compiled is left to the launch that needs it, which says why. True where it was given up, as soon as it
    was seen to take more than `limit` seconds.
    """
    if not (torch.cuda.is_available() and kernels_are_on() and has_triton()) or interpreted():
        return False
    import triton

    from weft.kernels.triton import launch

    asked: dict[Any, Any] = {}
    tasks, token = _Tasks(asked), launch.dry_run_keys.set(asked)
    try:
        with (
            triton.AsyncCompileMode(tasks, ignore_errors=True),
            torch.autograd.set_multithreading_enabled(False),  # all of these are this thread's
            tasks,
        ):
            dry_run()
            return tasks.run(workers, limit)
    finally:
        launch.dry_run_keys.reset(token)


class _Tasks(Executor):
    """Collects what Triton wants compiled, until `run`; leaving it gives up what was not run.

    `asked` are the kernels of the dry run: Triton wants the last of them.
    """

    def __init__(self, asked: dict[Any, Any]) -> None:
        self.asked = asked
        self.waiting: list[Waiting] = []
        self.slow: list[Task] = []

    def submit(self, fn: Task, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, fn))
        if next(reversed(self.asked.values())).__module__ in SLOW:
            self.slow.append(fn)
        return future

    def run(self, workers: int, limit: float) -> bool:
        """Compiles what the cache has not in other processes; then this one finds it there. True where given up."""
        self.waiting = find_missing(self.waiting)
        if self.waiting and workers > 1 and hasattr(os, "fork"):
            # What takes longest comes first; else what was met last, in backward passes.
            missing = [task for _, task in reversed(self.waiting)]
            if compile_in_processes(sorted(missing, key=lambda task: task not in self.slow), workers, limit=limit):
                return True
            workers = 1
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(_resolve, self.waiting))
        return False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future, _ in self.waiting:
            if future.cancel():
                future.set_running_or_notify_cancel()  # or Triton would wait for it


class _NotCached(Exception):
    """Raised in the place of compiling a kernel."""


def find_missing(waiting: list[Waiting]) -> list[Waiting]:
    """Those of `waiting` that Triton's cache does not have; the others have their kernels now.

    As a run begins for the second time none is missing, and to fork processes that find that out takes a second.
    """
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    usual: Any = knobs.cache.manager_class or FileCacheManager

    class OnlyCached(usual):
        def get_group(self, filename: str) -> dict[str, str]:
            group = super().get_group(filename) or {}
            if filename not in group and threading.get_ident() == here:  # others compile what they need
                raise _NotCached
            return group

    if not waiting or knobs.compilation.always_compile:
        return waiting
    missing, here = [], threading.get_ident()
    with knobs.cache.scope():
        knobs.cache.manager_class = OnlyCached
        for future, compile in waiting:
            try:
                future.set_result(compile())
            except Exception:  # whatever else is wrong is seen once more where it is compiled
                missing.append((future, compile))
    return missing


def _resolve(task: Waiting) -> None:
    future, compile = task
    try:
        future.set_result(compile())
    except Exception as error:
        future.set_exception(error)


def compile_in_processes(
    tasks: Sequence[Task], workers: int, timeout: float = TIMEOUT, limit: float = math.inf
) -> bool:
    """Runs all tasks in forked processes, for what they leave on disk: neither results nor errors come back.

    True where it was given up: it had taken `limit` seconds, or was going to by what was done so far.
    """
    numbers, entry = os.pipe()  # from which each process takes the next task's number
    os.write(entry, b"".join(NUMBER.pack(i) for i in range(len(tasks)))[:PIPE])
    os.close(entry)  # so that it ends behind the last
    begun = time.monotonic()
    processes = fork(min(workers, len(tasks)), lambda _: _serve(tasks, numbers))
    try:
        while processes and (seconds := time.monotonic() - begun) < timeout:
            done = len(tasks) - _waiting(numbers) - len(processes)
            if seconds > limit or (done > workers and seconds * len(tasks) / done > limit):
                return True
            processes = still_alive(processes)
            time.sleep(0.01)
    finally:
        os.close(numbers)
        end(processes)
    return False


def _waiting(numbers: int) -> int:
    """How many tasks nobody has taken yet: what is left in the pipe, as the system says it without taking anything."""
    import fcntl
    import termios

    return NUMBER.unpack(fcntl.ioctl(numbers, termios.FIONREAD, bytes(NUMBER.size)))[0] // NUMBER.size


def _serve(tasks: Sequence[Task], numbers: int) -> None:
    """The life of a child: it touches no GPU, and is silent, since the parent will say what is wrong."""
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    while number := os.read(numbers, NUMBER.size):
        with contextlib.suppress(Exception):
            _make_launcher(tasks[NUMBER.unpack(number)[0]]())


def _make_launcher(kernel: Any) -> None:
    """Until Triton 3.6 or so, each new list of types also has a C function to launch it, compiled by gcc."""
    from triton.runtime.driver import driver

    active: Any = driver.active
    active.launcher_cls(kernel.src, kernel.metadata)
