"""Batches from worker processes, the same whatever the number of workers, because every draw comes with its seed."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from weft.data.augment.pairs import align
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture, header
from weft.data.sampler import Draw, SamplingPlan
from weft.data.targets import TargetKind
from weft.errors import WeftError

T = TypeVar("T")

PREFETCH = 2  # batches each worker makes ahead
FEW = 500  # pictures that are read before worker processes have started
GRACE = 30  # seconds a worker lives on after SIGTERM


class PictureSource(Protocol):
    """The part of a `Source` that the loader needs; `GivenPictures` has it, too."""

    labels: np.ndarray
    multilabel: bool

    @property
    def kind(self) -> TargetKind: ...

    @property
    def names(self) -> Sequence[str]: ...

    def open(self, index: int) -> Any: ...

    def target(self, index: int) -> Any:
        """A mask or objects; None where they are to be predicted. Not called where the targets are labels."""


@dataclass
class Batch:
    """Pictures and what belongs to them; files that could not be read are left out and named in `bad`.

    | targets | labels |
    |---|---|
    | labels | (B,) int64, or (B, classes) float32 where there are several per picture |
    | masks, training | (B, h, w) uint8 |
    | masks, evaluation | list of (H, W) uint8, as large as the pictures are on disk |
    | objects, training | list of {"boxes": (n, 4), "labels": (n,), "masks": (n, h, w) where there are shapes} |
    | objects, evaluation | list of `Objects`, in pixels of the pictures on disk |
    """

    pictures: Any  # (B, C, h, w) uint8 or float32; lists of (C, h, w) beside objects and where sizes differ; or drawn
    labels: Any
    index: Tensor  # (B,) int64, positions in the source
    bad: list[tuple[int, str]]
    sizes: list[tuple[int, int]] = field(default_factory=list)  # upright, on disk; in evaluation, but not of labels

    def pin_memory(self) -> "Batch":  # the DataLoader calls it
        return replace(self, pictures=_pinned(self.pictures), labels=_pinned(self.labels), index=_pinned(self.index))


def _pinned(items: Any) -> Any:
    if isinstance(items, Tensor):
        return items.pin_memory()
    if isinstance(items, dict):
        return {key: _pinned(value) for key, value in items.items()}
    return [_pinned(item) for item in items] if isinstance(items, list) else items


@dataclass
class DrawnPictures:
    """Pictures that are kept on the device, and what is drawn for them: in place of the pictures of a `Batch`."""

    index: Tensor  # (B,) int64, their positions
    rows: Tensor  # (B, columns) float32, a row for each

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both on the device, without waiting for it."""
        index, rows = self.index, self.rows
        if device.type == "cuda" and not index.is_cuda:
            index, rows = index.pin_memory(), rows.pin_memory()
        return index.to(device, non_blocking=True), rows.to(device, non_blocking=True)


def drawn_batches(
    shapes: np.ndarray,
    stand_ins: np.ndarray,
    labels: np.ndarray,
    draw: Callable[[np.random.Generator, np.ndarray], np.ndarray],
    plan: SamplingPlan,
    steps: Iterable[int],
) -> Generator[Batch]:
    """This rank's batches of kept pictures: `draw` makes rows for all pictures of a step, of these heights and widths.

    `stand_ins` has a picture for each position, and `labels` is over all positions, too.
    """
    for step in steps:
        index = stand_ins[plan.positions(step)]
        rows = draw(plan.generator(step), shapes[index])[plan.mine]
        mine = torch.from_numpy(index[plan.mine])
        kind = torch.float32 if labels.ndim == 2 else torch.int64
        yield Batch(
            DrawnPictures(mine, torch.from_numpy(rows)), torch.from_numpy(labels[mine.numpy()]).to(kind), mine, []
        )


def train_batches(
    source: PictureSource, augmentation: Any, plan: SamplingPlan, steps: Iterable[int], *, workers: int, pin: bool
) -> Generator[Batch]:
    """This rank's batches of the given steps, augmented. Workers end with the last batch or when it is closed."""
    reader = _Reader(source, augmentation.preprocessing, augmentation)
    yield from read_ahead(reader, (plan.step(step) for step in steps), workers=workers, pin=pin)


def eval_batches(
    source: PictureSource,
    preprocessing: Preprocessing,
    indices: np.ndarray,
    *,
    batch: int,
    workers: int,
    pin: bool,
    rank: int = 0,
    world: int = 1,
) -> Generator[Batch]:
    """Every world-th picture of `indices` from the rank-th on, each exactly once, in order; the last batch is short."""
    mine = np.asarray(indices)[rank::world].tolist()
    draws = ([Draw(index, 0) for index in mine[i : i + batch]] for i in range(0, len(mine), batch))
    reader = _Reader(source, preprocessing, None)
    yield from read_ahead(reader, draws, workers=min(workers, -(-len(mine) // batch)), pin=pin)


def reading_workers(wanted: int, pictures: int) -> int:
    """Processes that read: as many as are wanted; -1: where it pays, which is from a few hundred pictures on."""
    if wanted >= 0:
        return wanted
    return min(8, (os.cpu_count() or 1) // 2) if pictures > FEW else 0


def check_shared_memory(batch_bytes: int, workers: int) -> None:
    """Raises where the shared memory cannot hold the batches that are under way between workers and trainer."""
    if workers == 0 or not os.path.isdir("/dev/shm"):
        return
    stat = os.statvfs("/dev/shm")
    free, needed = stat.f_bavail * stat.f_frsize, batch_bytes * (workers * PREFETCH + 1)
    if free < needed:
        raise WeftError(
            f"/dev/shm has {free / 2**20:.0f} MiB free; {workers} workers need {needed / 2**20:.0f} MiB. "
            f"Give the container more (docker run --shm-size={-(-2 * needed // 2**30)}g) or set data.workers to 0."
        )


class _Reader(Dataset[Batch]):
    """A list of draws in, a batch out. Lives in the workers."""

    def __init__(self, source: PictureSource, preprocessing: Preprocessing, augmentation: Any) -> None:
        self.source, self.preprocessing, self.augmentation = source, preprocessing, augmentation

    def __getitem__(self, draws: list[Draw]) -> Batch:
        examples, index, bad = [], [], []
        for draw in draws:
            try:
                examples.append(self._example(draw))
                index.append(draw.index)
            except BadPicture as why:
                bad.append((draw.index, str(why)))
        pictures, targets, sizes = (list(column) for column in zip(*examples, strict=True)) if examples else ([],) * 3
        labels = self._labels(index, targets)
        sizes = [size for size in sizes if size is not None]
        return Batch(self._stacked(pictures), labels, torch.tensor(index, dtype=torch.int64), bad, sizes)

    def _example(self, draw: Draw) -> tuple[Tensor, Any, tuple[int, int] | None]:
        """Picture, target unless that is a label, and the size on disk where the answer is wanted at that size."""
        try:
            file = self.source.open(draw.index)
            if not self.source.kind.dense:
                return self._picture(file, draw.seed), None, None
            target = self.source.target(draw.index)
            if self.augmentation is not None:
                return *self.augmentation.pair(file, target, draw.seed), None
            found = header(file)
            target = target if target is None else align(target, found)
            target = torch.from_numpy(target) if isinstance(target, np.ndarray) else target
            return self.preprocessing.picture(file), target, (found.height, found.width)
        except BadPicture:
            raise
        except OSError as error:
            raise BadPicture(error.strerror or str(error)) from None
        except Exception as error:
            name = self.source.names[draw.index]
            raise RuntimeError(f"While reading {name!r}: {type(error).__name__}: {error}") from error

    def _picture(self, file: Any, seed: int) -> Tensor:
        if self.augmentation is None:
            return self.preprocessing.picture(file)
        return self.augmentation.picture(file, seed)

    def _labels(self, index: list[int], targets: list[Any]) -> Any:
        if self.source.kind.dense:
            stacked = self.source.kind.stacked and self.augmentation is not None and targets
            return torch.stack(targets) if stacked else targets
        labels = torch.from_numpy(np.asarray(self.source.labels[index]))
        return labels.to(torch.float32 if self.source.multilabel else torch.int64)

    def _stacked(self, pictures: list[Tensor]) -> Any:
        """One tensor where that is possible."""
        if not self.source.kind.stacked or len({picture.shape for picture in pictures}) > 1:
            return pictures
        if pictures:
            return torch.stack(pictures)
        dtype = torch.uint8 if self.preprocessing.depth == 8 else torch.float32
        return torch.empty(0, self.preprocessing.channels, *self.preprocessing.size, dtype=dtype)


def read_ahead(reader: Dataset[T], wanted: Iterable[Any], *, workers: int, pin: bool = False) -> Generator[T]:
    """Gives what the reader makes of each of `wanted`, in order; workers end with the last, or when this is closed."""
    loader = DataLoader(
        reader,
        batch_size=None,  # the reader makes the batches
        sampler=wanted,
        collate_fn=_as_it_is,  # torch's would make tensors of arrays, in shared memory, of which there may be little
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=PREFETCH if workers else None,
        multiprocessing_context=_context() if workers else None,
        worker_init_fn=_start_worker if workers else None,
        generator=torch.Generator(),  # its own, so that the caller's draws do not depend on us
    )
    iterator = iter(loader)
    try:
        yield from iterator
    finally:
        if workers:
            _end_workers(iterator)


def _as_it_is(answer: T) -> T:
    return answer


def _end_workers(iterator: Any) -> None:
    """Ends them now, else they live while a traceback holds the iterator. One that hangs in C never sees SIGTERM."""
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():
            worker.kill()


def _context() -> BaseContext:
    """How workers start: forked on Linux, which takes no time and asks nothing of the user's script.

    A process that uses CUDA may be forked as long as the child does not use it, and readers never do. Nor do they use
    the threads that OpenMP has in a process that has computed, which a fork leaves behind: see `_start_worker`.
    """
    if sys.platform == "linux":
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    context.set_forkserver_preload(["weft.data.loader", "timm.data"])
    return context


def _start_worker(_: int) -> None:
    """Ctrl-C and SIGTERM reach the whole process group, but the trainer still wants the batches of its last step."""
    torch.set_num_threads(1)  # before all else: more, of a pool that was inherited without its threads, never answer
    threading.Thread(target=_die_with_trainer, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, GRACE))


def _die_with_trainer() -> None:
    """torch's own watch looks at the parent process, which is the fork server where there is one, and that lives on."""
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)
