"""Trains the cells of a study in worker processes: side by side, on the GPUs there are or on a CPU.

A worker imports torch once and then trains one cell after the other. It reads the names of folders from its standard
input and answers each with a line; when its input ends, because the parent was killed, it ends at once, too.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from weft.errors import WeftError
from weft.files import write_text
from weft.study.cells.cell import LEFT_OUT, Cell, Result, cell_folder, describe_progress, read_result, train_cell

MOST_ON_CPU = 4  # cells at once where nobody said
WATCH_SECONDS = 1.0

Watch = Callable[[dict[str, str]], None]
MayStart = Callable[[Cell, Sequence[Result]], bool]


def run_cells(
    study: Path,
    cells: Sequence[Cell],
    *,
    jobs: int = 0,
    device: str = "auto",
    watch: Watch | None = None,
    may_start: MayStart | None = None,
) -> list[Result]:
    """The result of each cell; those that are finished are read, the others trained, `jobs` at once.

    Args:
        study: the folder of the study, which the caller has locked.
        cells: what is trained, in this order.
        jobs: 0 is one for each GPU, or as many as a CPU has cores for.
        device: auto, cpu, cuda (all GPUs) or cuda:N.
        watch: called about once a second with the state of every cell, by its key; what it raises ends all trainings.
        may_start: asked before each cell, with the results so far, whether it is still to be trained.
    """
    study.mkdir(parents=True, exist_ok=True)
    return WorkerPool(study, cells, worker_devices(device, jobs), watch, may_start).run()


def say_progress(say: Callable[[str], None], names: Mapping[str, str]) -> Watch:
    """A function to watch cells with, which says a line for each that is over; `names` by their keys."""
    told: set[str] = set()

    def watch(states: dict[str, str]) -> None:
        for key, state in states.items():
            if state.startswith(("done", "failed")) and key not in told:
                told.add(key)
                say(f"{len(told)} of {len(states)}  {names[key]}: {state}")

    return watch


def worker_devices(device: str, jobs: int) -> list[str]:
    """A device for each worker; GPUs take turns."""
    import torch

    from weft.engine.device import pick_device

    first = pick_device(device)
    if first.type != "cuda":
        return [str(first)] * (jobs or min(cores(), MOST_ON_CPU))
    gpus = [device] if ":" in device else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [gpus[i % len(gpus)] for i in range(jobs or len(gpus))]


def threads_per_worker(devices: Sequence[str]) -> int:
    """How many threads each worker on a CPU has."""
    return max(1, cores() // len(devices))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Workers and the cells they take from one list."""

    def __init__(
        self,
        study: Path,
        cells: Sequence[Cell],
        devices: list[str],
        watch: Watch | None,
        may_start: MayStart | None = None,
    ) -> None:
        self.study, self.cells, self.watch, self.may_start = study, cells, watch, may_start
        self.results = {cell.key: result for cell in cells if (result := read_result(study, cell))}
        self.waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in {cell.key: cell for cell in cells if cell.key not in self.results}.values():
            self.waiting.put(cell)
        self.running: dict[str, Cell] = {}
        self.workers: list[subprocess.Popen[str]] = []
        self.devices = devices[: self.waiting.qsize()]
        self.is_over = False

    def run(self) -> list[Result]:
        """Trains what is waiting, and returns the result of every cell."""
        threads = [threading.Thread(target=self.serve, args=(device,), daemon=True) for device in self.devices]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(WATCH_SECONDS / len(threads))
                self.show()
        finally:
            self.is_over = True
            for worker in self.workers:
                worker.kill()  # one that is still training leaves its run's last state
            for thread in threads:
                thread.join()
            for worker in self.workers:
                with worker:  # waits for its end, and closes its pipes
                    pass
        self.show()
        lost = "its worker's thread ended"
        return [self.results.get(cell.key) or Result(cell, error=lost) for cell in self.cells]

    def show(self) -> None:
        """Gives the states of all cells to `watch`."""
        if self.watch is None:
            return
        states = {}
        for cell in self.cells:
            result = self.results.get(cell.key)
            if result is not None:
                failed = result.error if result.error == LEFT_OUT else f"failed: {result.error}"
                states[cell.key] = failed if result.error else "done"
            else:
                states[cell.key] = describe_progress(self.study, cell) if cell.key in self.running else "waiting"
        self.watch(states)

    def serve(self, device: str) -> None:
        """One worker's cells, one after the other; a worker that ends within a cell is replaced for the next."""
        worker = None
        while not self.is_over:
            try:
                cell = self.waiting.get_nowait()
            except queue.Empty:
                break
            if self.may_start is not None and not self.may_start(cell, list(self.results.values())):
                self.results[cell.key] = Result(cell, error=LEFT_OUT)
                continue
            self.running[cell.key] = cell
            try:
                if worker is None or worker.poll() is not None:
                    worker = self.start_worker(device)
                result = self.train_with(worker, cell)
            except OSError as error:  # a full disk, no more processes
                result = Result(cell, error=str(error))
            self.results[cell.key] = result
            del self.running[cell.key]
        if worker is not None and worker.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone
                worker.stdin.close()

    def start_worker(self, device: str) -> "subprocess.Popen[str]":
        environment = dict(os.environ)
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = str(threads_per_worker(self.devices))
        command = [sys.executable, "-m", "weft.study.cells.workers", device]
        with open(self.study / "workers.txt", "ab") as log:  # what a crash says
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the parent alone
            )
        self.workers.append(worker)
        return worker

    def train_with(self, worker: "subprocess.Popen[str]", cell: Cell) -> Result:
        """Has a worker train a cell, and waits for it."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        folder = cell_folder(self.study, cell)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "cell.json", json.dumps(asdict(cell), indent=2))
        worker.stdin.write(f"{folder}\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if not answer:
            said = f"its process ended with exit code {worker.wait()}; see {self.study / 'workers.txt'}"
            return Result(cell, error=said)
        try:
            error = json.loads(answer)
        except ValueError:  # killed while it answered
            worker.wait()
            error = f"its process ended in the middle of an answer: {answer.strip()[:80]!r}"
        result = None if error else read_result(self.study, cell)
        return result or Result(cell, error=error or f"{folder} has no readable result")


# The worker -----------------------------------------------------------------------------------------------------


def main(device: str) -> None:
    """Trains the cells whose folders come in, and answers each with why it failed, or nothing."""
    import weft.models  # noqa: F401  before the first cell is timed
    from weft.engine.kept import remember_kept

    remember_kept()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    orders, sys.stdin = os.fdopen(os.dup(0), encoding="utf-8"), open(os.devnull)  # noqa: SIM115  forked readers close it
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders, folders), daemon=True).start()
    while True:
        folder = Path(folders.get())
        try:
            train_cell(folder, device)
            error = ""
        except (WeftError, OSError) as failed:
            error = " ".join(str(failed).split())
        except Exception as failed:
            traceback.print_exc()
            error = f"{type(failed).__name__}: {' '.join(str(failed).split())[:300]}"
        print(json.dumps(error), file=answers, flush=True)


def _listen(orders: TextIO, folders: "queue.SimpleQueue[str]") -> None:
    for line in orders:
        folders.put(line.rstrip("\n"))
    os._exit(0)  # no more cells, or no parent


if __name__ == "__main__":
    main(sys.argv[1])
