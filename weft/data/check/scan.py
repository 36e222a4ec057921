"""One look at every picture of a source: what its header says, whether it decodes, and what finds its copies.

`read_all` decodes every picture; `weft.data.check.headers` has the quick look before training.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from weft.data.read import BadPicture, Header, decode, header
from weft.data.sources.source import Source
from weft.errors import WeftError

THUMB = 16  # side of the grey thumbnails that are compared: 256 bytes for each picture
CHUNK = 1024  # pictures on their way at once

RECORD = np.dtype(
    [
        ("format", "U8"),
        ("mode", "U12"),
        ("width", "i4"),
        ("height", "i4"),
        ("channels", "i2"),
        ("depth", "i1"),
        ("frames", "i4"),
        ("orientation", "i1"),
        ("size", "i8"),  # bytes of the file
        ("hash", "u8"),  # equal for copies; 0: not known
        ("blank", "?"),
    ]
)

Progress = Callable[[int, int], object]  # how many are done, of how many


@dataclass
class Scan:
    """Columns over all N pictures, filled in at the positions `read`."""

    records: np.ndarray  # (N,) RECORD
    read: np.ndarray  # sorted positions that were looked at and are pictures
    bad: dict[int, str] = field(default_factory=dict)  # position to reason
    profiles: dict[int, str] = field(default_factory=dict)  # position to a colour profile that is not sRGB
    complete: bool = True  # whether there was time for all pictures, and for comparing them
    thumbs: np.ndarray | None = None  # (N, 16, 16) uint8 where pixels were decoded
    of_pixels: bool = False  # hashes are of pixels, not of files

    @classmethod
    def of(cls, pictures: int) -> "Scan":
        return cls(np.zeros(pictures, RECORD), np.empty(0, int))

    def store(self, index: int, found: Header, size: int, digest: int, blank: bool = False) -> None:
        shape = (found.format, found.mode, found.width, found.height, found.channels, found.depth)
        self.records[index] = (*shape, found.frames, found.orientation, size, digest, blank)
        if found.profile:
            self.profiles[index] = found.profile

    def finished(self) -> "Scan":
        self.read = np.flatnonzero(self.records["width"] > 0)
        return self


def read_all(source: Source, max_pixels: int, progress: Progress | None = None) -> Scan:
    """Decodes every picture once, in threads: Pillow lets go of the interpreter while it decodes."""
    scan = Scan.of(len(source))
    scan.of_pixels = True
    thumbs = scan.thumbs = np.zeros((len(source), THUMB, THUMB), np.uint8)

    def look(index: int) -> tuple[Header, int, int, bool, np.ndarray]:
        file = source.open(index)
        found, size = checked_header(file, max_pixels)
        pixels = decode(file, channels=found.channels, max_pixels=max_pixels, at_least=(64, 64))
        blank = bool((pixels == pixels[0, 0]).all())
        return found, size, _hash(found, pixels), blank, thumbnail(pixels)

    for index, answer in in_threads(look, range(len(source)), progress):
        if isinstance(answer, str):
            scan.bad[index] = answer
            continue
        found, size, digest, blank, thumbs[index] = answer
        scan.store(index, found, size, digest, blank)
    return scan.finished()


def viewable(pixels: np.ndarray) -> Image.Image:
    """A decoded picture of any depth and number of channels as a Pillow image that people can look at."""
    if pixels.dtype != np.uint8:  # values of 12 bits in files of 16 would all be black
        low, high = float(pixels.min()), float(pixels.max())
        scale = 255 / max(high - low, 1e-30)
        pixels = np.clip(pixels * np.float32(scale) - low * scale, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] < 3 else np.ascontiguousarray(pixels[..., :3]))


def checked_header(file: Any, max_pixels: int) -> tuple[Header, int]:
    size = os.path.getsize(file) if isinstance(file, Path) else len(file) if isinstance(file, bytes) else -1
    if size == 0:
        raise BadPicture("an empty file")
    found = header(file)
    if found.width * found.height * found.frames > max_pixels:
        raise BadPicture(f"{found.width} x {found.height} pixels are more than data.max_pixels={max_pixels}")
    return found, size


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """The whole picture in grey: (16, 16) uint8."""
    return np.asarray(viewable(pixels).convert("L").resize((THUMB, THUMB), Image.Resampling.BILINEAR))


def _hash(found: Header, pixels: np.ndarray) -> int:
    """Of the pixels; JPEGs may have been shrunk while decoding, so the whole size counts, too."""
    kind = f"{found.width} {found.height} {pixels.shape} {pixels.dtype}".encode()
    return digest_of(kind, np.ascontiguousarray(pixels).tobytes())


def digest_of(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") or 1


@dataclass(frozen=True)
class LookLimits:
    """How far a look at the targets of all pictures goes."""

    max_pixels: int
    quick: bool = False  # as many as fit into `seconds`, in random order
    seconds: float = 10.0
    bad_files: float = 0.01  # the part of targets that may be bad
    progress: Progress | None = None


def look_at_all(source: Source, look: Callable[[int], Any], limits: LookLimits) -> Iterator[tuple[int, Any]]:
    """(position, answer) within the limits; pictures that cannot be read have none, a disk that failed a text."""
    deadline = time.monotonic() + limits.seconds if limits.quick else float("inf")

    def look_in_time(index: int) -> Any:
        if time.monotonic() > deadline:
            return None
        try:
            return look(index)
        except BadPicture:
            return None

    order = np.random.default_rng(0).permutation(len(source)).tolist() if limits.quick else range(len(source))
    answers = in_threads(look_in_time, order, limits.progress, deadline)
    return ((index, answer) for index, answer in answers if answer is not None)


def try_to(look: Callable[[int], Any], index: int) -> Any:
    """The answer, or a reason as text where the picture cannot be read."""
    try:
        return look(index)
    except (BadPicture, WeftError) as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def in_threads(
    look: Callable[[int], Any], order: Iterable[int], progress: Progress | None, deadline: float = float("inf")
) -> Iterator[tuple[int, Any]]:
    """(position, answer) for each position, or a reason as text where a picture cannot be read; stops at `deadline`."""
    order = list(order)
    limit = Image.MAX_IMAGE_PIXELS  # `read` sets it for each picture; with many at once the last one would stay
    Image.init()  # Pillow loads its formats when they are first needed, which threads must not do at once
    try:
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(order), CHUNK):
                chunk = order[start : start + CHUNK]
                yield from zip(chunk, pool.map(partial(try_to, look), chunk), strict=True)
                if progress is not None:
                    progress(start + len(chunk), len(order))
                if time.monotonic() > deadline:
                    return
    finally:
        Image.MAX_IMAGE_PIXELS = limit
