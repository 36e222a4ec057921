"""The quick look before training: headers and ends of files, as many as fit a time, and what finds equal files.

Python spends more on a header than the disk does, and its threads wait for each other, so processes look where there
are thousands of pictures. They need nothing but the source: who has it early can let them look while torch is imported.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from weft.data.check.scan import THUMB, Progress, Scan, checked_header, digest_of, in_threads, thumbnail, try_to
from weft.data.read import Header, decode, open_file
from weft.data.sources.source import Source, fingerprint

FEW = 2_000  # pictures at which threads have looked before processes have started
PART = 500  # pictures that a process looks at before it answers
SMALL = 1 << 16  # bytes of files that are read whole: a disk fetches no less for a header
THUMBED = 5_000  # pictures at most, and
THUMBED_PIXELS = 250_000_000  # in all of them, of which thumbnails are made: seconds of one core
GRACE = 5.0  # seconds after the deadline in which a process may end its part


class Look(NamedTuple):
    """Facts that are kept of one file; the hash is 0 where it is too large to be read for that alone."""

    header: Header
    size: int
    hash: int


class QuickLook:
    """A look at the pictures of a source, in random order, so that what the time allows is a fair sample.

    It begins at once, in other processes where it can; `result` waits for it, `close` gives it up.
    """

    def __init__(self, source: Source, max_pixels: int, seconds: float) -> None:
        self.source, self.max_pixels, self.seconds = source, max_pixels, seconds
        self.deadline = time.monotonic() + 0.6 * seconds  # the rest is for the bytes of files equal in size
        order = np.random.default_rng(0).permutation(len(source))
        self.parts = [order[start : start + PART] for start in range(0, len(order), PART)]
        self._pool: ProcessPoolExecutor | None = None
        self._answers: list[Future[Scan]] = []
        self._fingerprint: Future[str] | None = None
        if len(source) > FEW and sys.platform == "linux":
            self._start_processes()

    def look(self, index: int) -> Look:
        """Opens a small file once, for its header, its end and its hash."""
        file: Any = self.source.open(index)
        file = _content_if_small(file) if isinstance(file, Path) else file
        found, size = checked_header(file, self.max_pixels)
        if isinstance(file, Path | bytes) and not _ends_well(file, found.format):
            decode(file, channels=found.channels, max_pixels=self.max_pixels, at_least=(64, 64))  # raises if it is so
        return Look(found, size, digest_of(file) if isinstance(file, bytes) and size <= SMALL else 0)

    def look_at_part(self, part: np.ndarray) -> Scan:
        """The scan of these pictures alone, as far as the time allows; keys are numbers within the part."""
        scan = Scan.of(len(part))
        for number, index in enumerate(part.tolist()):
            if time.monotonic() > self.deadline:
                break
            _keep(scan, number, try_to(self.look, index))
        return scan

    def result(self, progress: Progress | None = None) -> Scan:
        scan, answered = Scan.of(len(self.source)), 0
        try:
            for part, found in zip(self.parts, self._scans(), strict=False):
                scan.records[part] = found.records
                scan.bad |= {int(part[number]): reason for number, reason in found.bad.items()}
                scan.profiles |= {int(part[number]): profile for number, profile in found.profiles.items()}
                answered += 1
                if progress is not None:
                    progress(min(answered * PART, len(self.source)), len(self.source))
        finally:
            self.close()
        if not (scan.bad or scan.records["width"].any()):
            answered = 0  # whatever kept them from looking in time, a few pictures have to be looked at
        if rest := self.parts[answered:]:
            for index, answer in in_threads(self.look, np.concatenate(rest).tolist(), progress, self.deadline):
                _keep(scan, index, answer)
        self._compare_large(scan.finished())
        return scan

    def fingerprint(self) -> str:
        """The fingerprint of the source, where a process has found it by now, else nothing."""
        found = self._fingerprint
        return found.result() if found and found.done() and not (found.cancelled() or found.exception()) else ""

    def close(self) -> None:
        """Ends the processes at once: one that was forked while a thread held a lock may wait for it forever."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            self._pool = None

    def _start_processes(self) -> None:
        """Forks: a process that uses CUDA may be forked as long as the child does not use it, and these never do."""
        Image.init()  # here, and not in each of them
        workers = min(len(self.parts), len(os.sched_getaffinity(0)) + 4, 32)  # some wait for the disk
        life = math.ceil(self.deadline - time.monotonic() + GRACE)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of threads, whose locks a child might wait for: see life
                context = multiprocessing.get_context("fork")
                self._pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(self, life))
                self._fingerprint = self._pool.submit(_fingerprint_all)  # of as many files as are asked for
                self._answers = [self._pool.submit(_look_at_part, part) for part in self.parts]
        except (OSError, AssertionError, ImportError, NotImplementedError):
            self.close()  # no more processes, or a daemon, which may have none: threads look

    def _scans(self) -> Iterator[Scan]:
        """Answers of the processes, until one dies, by a picture or for want of memory, or none comes in time."""
        try:
            for answer in self._answers:
                yield answer.result(max(0.0, self.deadline + GRACE - time.monotonic()))
        except (BrokenProcessPool, TimeoutError):
            return

    def _compare_large(self, scan: Scan) -> None:
        """The hashes of files that were not read whole, where another equals them in size."""
        large = scan.read[scan.records["hash"][scan.read] == 0]
        large = large[_repeated(scan.records[large][["size", "width", "height"]])]
        deadline, compared = time.monotonic() + 0.4 * self.seconds, 0
        for index, found in in_threads(lambda i: _hash_bytes(self.source.open(i)), large.tolist(), None, deadline):
            scan.records["hash"][index] = 0 if isinstance(found, str) else found
            compared += 1
        scan.complete = compared == len(large) and len(scan.read) + len(scan.bad) == len(self.source)


def add_thumbnails(source: Source, scan: Scan, max_pixels: int) -> None:
    """Decodes all pictures of a complete look where they are few and small: no clock decides, since a split asks."""
    found = scan.records[scan.read]
    shrunk = np.where(np.isin(found["format"], ("JPEG", "MPO")), 4, 1)  # these are decoded at a part of their size
    pixels = (found["width"].astype(np.int64) * found["height"] // shrunk).sum()
    if len(scan.read) > THUMBED or pixels > THUMBED_PIXELS:
        return
    scan.thumbs = np.zeros((len(source), THUMB, THUMB), np.uint8)  # nothing to see: no copy of anything

    def look(index: int) -> np.ndarray:
        channels = int(scan.records["channels"][index])
        return thumbnail(decode(source.open(index), channels=channels, max_pixels=max_pixels, at_least=(64, 64)))

    for index, answer in in_threads(look, scan.read.tolist(), None):
        if not isinstance(answer, str):
            scan.thumbs[index] = answer


# In a process of the pool ---------------------------------------------------------------------------------------

_look: QuickLook


def _begin(look: QuickLook, life: int) -> None:
    """The beginning of a process that looks. Whatever happens to it or to its parent, it does not live long."""
    global _look
    _look = look
    gc.freeze()  # what was inherited may hold tensors, and freeing those may ask the GPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the parent, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(life)


def _look_at_part(part: np.ndarray) -> Scan:
    return _look.look_at_part(part)


def _fingerprint_all() -> str:
    return fingerprint(_look.source)


# Files ----------------------------------------------------------------------------------------------------------


def _keep(scan: Scan, index: int, answer: Look | str) -> None:
    if isinstance(answer, str):
        scan.bad[index] = answer
    else:
        scan.store(index, answer.header, answer.size, answer.hash)


def _content_if_small(path: Path) -> Path | bytes:
    with open_file(path, buffering=0) as file:
        return file.read() if os.fstat(file.fileno()).st_size <= SMALL else path


def _ends_well(file: Path | bytes, format: str) -> bool:
    """False where the mark is missing that a whole file of this format has at its end. Not proof, but cheap."""
    if isinstance(file, bytes):
        head, tail, size = file[:12], file[-1024:], len(file)
    else:
        with file.open("rb") as stream:
            head = stream.read(12)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 1024))
            tail = stream.read()
    if format in ("JPEG", "MPO"):
        return b"\xff\xd9" in tail
    if format == "PNG":
        return b"IEND" in tail
    if format == "GIF":
        return tail.rstrip(b"\0").endswith(b";")
    if format == "WEBP":
        return int.from_bytes(head[4:8], "little") + 8 <= size
    if format == "BMP":
        return int.from_bytes(head[2:6], "little") <= size
    return format not in ("TIFF", "PPM", "NPY")  # no mark: decode


def _hash_bytes(file: Any) -> int:
    if isinstance(file, Path | bytes):
        return digest_of(file.read_bytes() if isinstance(file, Path) else file)
    pixels = np.asarray(file)
    return digest_of(f"{pixels.shape} {pixels.dtype}".encode(), np.ascontiguousarray(pixels).tobytes())


def _repeated(keys: np.ndarray) -> np.ndarray:
    """(N,) bool: which keys occur more than once."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[inverse] > 1
