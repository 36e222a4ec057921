"""Small pictures that are decoded by other processes while this one imports torch, into memory that they share.

What is decoded is what `OpenedPicture.pixels` gives, so that whoever keeps pictures as they are may take it from here,
and the rest from the source. Only a set whose pictures have one size is begun with: of others nobody knows yet how they
will be kept, and large ones are better shrunk by their decoder.
"""

import contextlib
import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.memory import room_on_host
from weft.data.read import BadPicture, OpenedPicture
from weft.data.sources.source import Source
from weft.processes import end, fork, still_alive

FEW = 2_000  # pictures at which a run is done before processes have started
LARGEST = 128 * 128  # pixels of a picture
MOST_BYTES = 2**30  # of all pictures
LOOKED_AT = 8  # pictures from which size and channels of all are concluded
CHUNK = 64  # pictures that a process decodes before others have their turn
PATIENCE = 60.0  # seconds from the beginning after which nobody waits for a process
REST = 0.005  # seconds: small pictures are decoded in less
NICE = 5  # whoever looks at the files, or imports torch, comes first


class EarlyPixels:
    """Pixels of a source's pictures, as far as they are there: each is decoded by a process, or not at all."""

    def __init__(self, source: Source, shape: tuple[int, int, int], max_pixels: int) -> None:
        self.source, self.shape, self.max_pixels = source, shape, max_pixels
        count, one = len(source), math.prod(shape)
        # Shared with the processes, taken as it is written to, given back with the last array that lies in it.
        memory = mmap.mmap(-1, count * (one + 1) + 1)
        self.done = np.frombuffer(memory, np.bool_, count)
        self.pixels = np.frombuffer(memory, np.uint8, count * one, offset=count).reshape(count, *shape)
        self.resting = np.frombuffer(memory, np.bool_, 1, offset=count * (one + 1))
        self.deadline = time.monotonic() + PATIENCE
        workers = min(len(os.sched_getaffinity(0)), -(-count // CHUNK))
        self.processes = fork(workers, lambda number: self._live(number, workers))

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """Within it nobody decodes: for whoever measures what this machine can do."""
        self.resting[:] = True
        time.sleep(REST)  # for the pictures that are being decoded
        try:
            yield
        finally:
            self.resting[:] = False

    def finish(self) -> None:
        """Waits until nobody works on them any more."""
        while self.processes and time.monotonic() < self.deadline:
            self.processes = still_alive(self.processes)
            time.sleep(0.002)
        self._end_processes()

    def close(self) -> None:
        """Ends the processes and gives the memory back, which nobody may look at any more."""
        self._end_processes()
        self.done, self.resting = np.zeros(len(self.source), np.bool_), np.zeros(1, np.bool_)
        self.pixels = np.empty((0, *self.shape), np.uint8)

    def _end_processes(self) -> None:
        end(self.processes)
        self.processes = set()

    def _live(self, number: int, workers: int) -> None:
        """The life of a process: every so many'th chunk is its own."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the parent, which ends this one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(PATIENCE))  # whatever happens to the parent
        os.nice(NICE)
        for start in range(number * CHUNK, len(self.source), workers * CHUNK):
            for index in range(start, min(start + CHUNK, len(self.source))):
                while self.resting[0]:
                    time.sleep(REST)
                self._decode(index)

    def _decode(self, index: int) -> None:
        height, width, channels = self.shape
        try:
            with OpenedPicture(self.source.open(index), self.max_pixels) as opened:
                if (opened.header.height, opened.header.width, opened.header.depth) == (height, width, 8):
                    self.pixels[index] = np.asarray(opened.pixels(channels)).reshape(self.shape)
                    self.done[index] = True
        except (BadPicture, OSError):
            pass  # whoever needs it will say so


def decode_early(source: Source, channels: int, max_pixels: int) -> EarlyPixels | None:
    """Begins to decode all pictures of a source into `channels`, or as many as they have (0), where that may be of use.

    Only on Linux, where memory is shared by a process that is forked, and where kept pictures may take as much of it.
    """
    if sys.platform != "linux" or len(source) <= FEW or source.kind.dense:
        return None
    headers = set()
    try:
        for index in np.linspace(0, len(source) - 1, LOOKED_AT).astype(int).tolist():
            file = source.open(index)
            if not isinstance(file, Path | bytes):
                return None  # nothing to decode
            with OpenedPicture(file, max_pixels) as opened:
                headers.add((opened.header.height, opened.header.width, opened.header.depth, opened.header.channels))
    except (BadPicture, OSError):
        return None
    height, width, depth, found = max(headers)
    channels = channels or found
    fits = height * width * channels * len(source) <= min(MOST_BYTES, room_on_host())
    if len(headers) > 1 or depth != 8 or channels not in (1, 3) or height * width > LARGEST or not fits:
        return None
    try:
        return EarlyPixels(source, (height, width, channels), max_pixels)
    except OSError:  # so much memory may not be shared here: it is taken as pictures are kept
        return None
