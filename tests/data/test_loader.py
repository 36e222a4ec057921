"""Batches are the same from any number of workers; workers end, stay small, and say what went wrong where."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.places import ROOT
from weft.config import AugmentConfig
from weft.data import loader
from weft.data.augment.picture import Augmentation
from weft.data.loader import Batch, check_shared_memory, eval_batches, train_batches
from weft.data.preprocessing import Preprocessing
from weft.data.read import MAX_PIXELS
from weft.data.sampler import SamplingPlan
from weft.data.targets import LABELS
from weft.errors import WeftError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
HALF = (0.5, 0.5, 0.5)
NORMAL = Preprocessing((16, 16), 3, 8, HALF, HALF, "bicubic", 0.9, "center", MAX_PIXELS)
AUGMENTATION = Augmentation(AugmentConfig(policy="rand-m9-mstd0.5-inc1"), NORMAL)


class Noise:
    """A source that makes its pictures; some are broken, one is missing, one is a bug."""

    kind = LABELS

    def __init__(self, count: int = 40, multilabel: bool = False, broken: tuple[int, ...] = (), bug: int = -1) -> None:
        self.names = [f"{i}.png" for i in range(count)]
        self.multilabel, self.broken, self.bug = multilabel, broken, bug
        self.labels = np.eye(4, dtype=bool)[np.arange(count) % 4] if multilabel else np.arange(count) % 4

    def open(self, index: int) -> np.ndarray | bytes | Path:
        if index == self.bug:
            raise ZeroDivisionError("a bug")
        if index in self.broken:
            return b"no picture" if index % 2 else Path("missing.png")
        return np.random.default_rng(index).integers(0, 256, (24, 20, 3), dtype=np.uint8)

    def target(self, index: int) -> None:
        raise AssertionError("labels are not read with the picture")


def training(source: Noise, workers: int, steps: range = range(7)) -> list[Batch]:
    plan = SamplingPlan(np.arange(len(source.names)), batch=8, seed=0)
    return list(train_batches(source, AUGMENTATION, plan, steps, workers=workers, pin=False))


def same(a: list[Batch], b: list[Batch]) -> bool:
    assert len(a) == len(b)
    fields = ("pictures", "labels", "index")
    equal = all(torch.equal(getattr(x, f), getattr(y, f)) for x, y in zip(a, b, strict=True) for f in fields)
    return equal and all(x.bad == y.bad for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_context", lambda: multiprocessing.get_context(method))
    source = Noise(broken=(3, 4))
    torch.manual_seed(7)
    expected = training(source, 0)
    drawn = torch.rand(1)
    assert same(training(source, 2), expected)
    assert same(training(source, 2, range(3, 7)), expected[3:])  # resuming is asking for later steps
    torch.manual_seed(7)
    assert torch.rand(1) == drawn  # the caller's generator was not touched
    batch = expected[0]
    assert batch.pictures.dtype == torch.uint8
    assert batch.labels.tolist() == [i % 4 for i in batch.index.tolist()]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_sees_every_picture_once(world: int, workers: int) -> None:
    source, indices = Noise(23, multilabel=True, broken=(5, 8)), np.arange(2, 23)
    batches = [
        b
        for rank in range(world)
        for b in eval_batches(source, NORMAL, indices, batch=4, workers=workers, pin=False, rank=rank, world=world)
    ]
    seen = [i for b in batches for i in b.index.tolist()]
    bad = dict(entry for b in batches for entry in b.bad)
    assert sorted(seen + list(bad)) == indices.tolist()
    assert bad.keys() == {5, 8}
    assert "No such file" in bad[8]
    for b in batches:
        assert b.labels.dtype == torch.float32
        for i, tensor in zip(b.index.tolist(), b.pictures, strict=True):
            assert torch.equal(tensor, NORMAL.picture(source.open(i)))


def test_a_batch_without_any_readable_picture() -> None:
    (batch,) = eval_batches(Noise(3, broken=(0, 1, 2)), NORMAL, np.arange(3), batch=8, workers=0, pin=False)
    assert batch.pictures.shape == (0, 3, 16, 16)
    assert len(batch.bad) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_bugs_reach_the_trainer_with_the_name(workers: int) -> None:
    with pytest.raises(RuntimeError, match=r"While reading '7\.png': ZeroDivisionError: a bug"):
        training(Noise(bug=7), workers)


def test_closing_ends_the_workers() -> None:
    plan = SamplingPlan(np.arange(40), batch=4, seed=0)
    batches = train_batches(Noise(), AUGMENTATION, plan, range(1000), workers=2, pin=False)
    for _ in range(4):  # so that both workers have started
        next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:  # Ctrl-C and SIGTERM go to the whole group, and are the trainer's to answer
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    for _ in range(10):
        next(batches)
    batches.close()
    assert not any(worker.is_alive() for worker in workers)


class Stuck(Noise):
    """Its fifth picture is never read: the reader hangs outside of Python, where no signal is answered."""

    def open(self, index: int) -> np.ndarray | bytes | Path:
        lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        for _ in range(2 if index == 4 else 1):
            library.pthread_mutex_lock(lock)
        return super().open(index)


@LINUX
def test_closing_ends_a_worker_that_hangs() -> None:
    batches = eval_batches(Stuck(), NORMAL, np.arange(40), batch=4, workers=1, pin=False)
    next(batches)
    (worker,) = multiprocessing.active_children()
    batches.close()
    worker.join(timeout=20)
    assert not worker.is_alive()


@LINUX
def test_memory_of_workers_does_not_grow() -> None:
    plan = SamplingPlan(np.arange(400), batch=8, seed=0)
    used = []
    for i, _ in enumerate(
        train_batches(Noise(400), AUGMENTATION, plan, range(3 * plan.steps_per_epoch), workers=1, pin=False)
    ):
        if i % plan.steps_per_epoch == plan.steps_per_epoch - 5:  # before the worker has gone
            (worker,) = multiprocessing.active_children()
            _, resident, shared, *_ = map(int, Path(f"/proc/{worker.pid}/statm").read_text().split())
            used.append((resident - shared) * os.sysconf("SC_PAGE_SIZE"))
    assert used[2] - used[0] < 8 * 2**20


ORPHANS = """
import multiprocessing, sys
sys.path.insert(0, sys.argv[2])
import numpy as np, torch
from tests.data.test_loader import AUGMENTATION, Noise, SamplingPlan, loader, train_batches
if __name__ == "__main__":
    loader._context = lambda: multiprocessing.get_context(sys.argv[1])
    plan = SamplingPlan(np.arange(40), batch=4, seed=0)
    batches = train_batches(Noise(), AUGMENTATION, plan, range(10**6), workers=2, pin=False)
    next(batches)
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    while True:
        next(batches)
"""


@LINUX
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_do_not_outlive_a_killed_trainer(method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ORPHANS)
    root = str(ROOT)
    trainer = subprocess.Popen([sys.executable, tmp_path / "train.py", method, root], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    workers = trainer.stdout.readline().split()
    assert len(workers) == 2
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    stop = time.monotonic() + 60
    while any(running(int(worker)) for worker in workers):
        assert time.monotonic() < stop
        time.sleep(0.1)


def running(process: int) -> bool:
    """Whether a process exists and is not merely waiting to be counted among the dead."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@LINUX
def test_small_shared_memory_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    check_shared_memory(2**20, 0)
    usual = os.statvfs("/dev/shm")
    small = os.statvfs_result((4096, 4096, *[2**14] * 3, *tuple(usual)[5:]))  # docker's 64 MiB
    monkeypatch.setattr(loader.os, "statvfs", lambda _: small)
    check_shared_memory(2**20, 4)
    with pytest.raises(WeftError, match=r"64 MiB free; 4 workers need 288 MiB.*--shm-size=1g.*data\.workers"):
        check_shared_memory(2**25, 4)
