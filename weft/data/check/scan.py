"""One look at every picture of a source: what its header says, whether it decodes, and what finds its copies.

`read_all` decodes every picture. `read_headers` is for the moment before training: headers and the ends of files, as
many as fit a time budget, and the bytes only of files that another file equals in size.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
    thumbs: np.ndarray | None = None  # (N, 16, 16) uint8 where pixels were decoded


def read_all(source: Source, max_pixels: int, progress: Progress | None = None) -> Scan:
    """Decodes every picture once, in threads: Pillow lets go of the interpreter while it decodes."""
    scan = Scan(np.zeros(len(source), RECORD), np.empty(0, int), thumbs=np.zeros((len(source), THUMB, THUMB), np.uint8))
    assert scan.thumbs is not None

    def look(index: int) -> tuple[Header, int, int, bool, np.ndarray]:
        file = source.open(index)
        found, size = _header(file, max_pixels)
        pixels = decode(file, channels=found.channels, max_pixels=max_pixels, at_least=(64, 64))
        blank = bool((pixels == pixels[0, 0]).all())
        return found, size, _hash(found, pixels), blank, _thumb(pixels)

    for index, answer in in_threads(look, range(len(source)), progress):
        if isinstance(answer, str):
            scan.bad[index] = answer
            continue
        found, size, digest, blank, scan.thumbs[index] = answer
        _store(scan, index, found, size, digest, blank)
    return _finish(scan)


def read_headers(source: Source, max_pixels: int, seconds: float, progress: Progress | None = None) -> Scan:
    """Headers and ends of files, in random order, so that what the time allows is a fair sample."""
    scan = Scan(np.zeros(len(source), RECORD), np.empty(0, int))

    def look(index: int) -> tuple[Header, int]:
        file = source.open(index)
        found, size = _header(file, max_pixels)
        if isinstance(file, Path | bytes) and not _ends_well(file, found.format):
            decode(file, channels=found.channels, max_pixels=max_pixels, at_least=(64, 64))  # raises if it is so
        return found, size

    order = np.random.default_rng(0).permutation(len(source)).tolist()
    for index, answer in in_threads(look, order, progress, deadline=time.monotonic() + 0.6 * seconds):
        if isinstance(answer, str):
            scan.bad[index] = answer
        else:
            _store(scan, index, answer[0], answer[1], 0, False)
    scan = _finish(scan)
    alike = _repeated(scan.records[scan.read][["size", "width", "height"]])
    digests = in_threads(
        lambda i: _hash_bytes(source.open(i)), scan.read[alike].tolist(), None, time.monotonic() + 0.4 * seconds
    )
    for index, digest in digests:
        scan.records["hash"][index] = 0 if isinstance(digest, str) else digest
    return scan


def viewable(pixels: np.ndarray) -> Image.Image:
    """A decoded picture of any depth and number of channels as a Pillow image that people can look at."""
    if pixels.dtype != np.uint8:  # values of 12 bits in files of 16 would all be black
        low, high = float(pixels.min()), float(pixels.max())
        scale = 255 / max(high - low, 1e-30)
        pixels = np.clip(pixels * np.float32(scale) - low * scale, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] < 3 else np.ascontiguousarray(pixels[..., :3]))


def _header(file: Any, max_pixels: int) -> tuple[Header, int]:
    size = os.path.getsize(file) if isinstance(file, Path) else len(file) if isinstance(file, bytes) else -1
    if size == 0:
        raise BadPicture("an empty file")
    found = header(file)
    if found.width * found.height * found.frames > max_pixels:
        raise BadPicture(f"{found.width} x {found.height} pixels are more than data.max_pixels={max_pixels}")
    return found, size


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


def _thumb(pixels: np.ndarray) -> np.ndarray:
    """(16, 16) uint8."""
    return np.asarray(viewable(pixels).convert("L").resize((THUMB, THUMB), Image.Resampling.BILINEAR))


def _hash(found: Header, pixels: np.ndarray) -> int:
    """Of the pixels; JPEGs may have been shrunk while decoding, so the whole size counts, too."""
    kind = f"{found.width} {found.height} {pixels.shape} {pixels.dtype}".encode()
    return _digest(kind, np.ascontiguousarray(pixels).tobytes())


def _hash_bytes(file: Any) -> int:
    if isinstance(file, Path | bytes):
        return _digest(file.read_bytes() if isinstance(file, Path) else file)
    pixels = np.asarray(file)
    return _digest(f"{pixels.shape} {pixels.dtype}".encode(), np.ascontiguousarray(pixels).tobytes())


def _digest(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") or 1


def _repeated(keys: np.ndarray) -> np.ndarray:
    """(N,) bool: which keys occur more than once."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[inverse] > 1


def _store(scan: Scan, index: int, found: Header, size: int, digest: int, blank: bool) -> None:
    shape = (found.format, found.mode, found.width, found.height, found.channels, found.depth)
    scan.records[index] = (*shape, found.frames, found.orientation, size, digest, blank)
    if found.profile:
        scan.profiles[index] = found.profile


def _finish(scan: Scan) -> Scan:
    scan.read = np.flatnonzero(scan.records["width"] > 0)
    return scan


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


def in_threads(
    look: Callable[[int], Any], order: Iterable[int], progress: Progress | None, deadline: float = float("inf")
) -> Iterator[tuple[int, Any]]:
    """(position, answer) for each position, or a reason as text where a picture cannot be read; stops at `deadline`."""

    def safely(index: int) -> Any:
        try:
            return look(index)
        except (BadPicture, WeftError) as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)

    order = list(order)
    limit = Image.MAX_IMAGE_PIXELS  # `read` sets it for each picture; with many at once the last one would stay
    Image.init()  # Pillow loads its formats when they are first needed, which threads must not do at once
    try:
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(order), CHUNK):
                chunk = order[start : start + CHUNK]
                yield from zip(chunk, pool.map(safely, chunk), strict=True)
                if progress is not None:
                    progress(start + len(chunk), len(order))
                if time.monotonic() > deadline:
                    return
    finally:
        Image.MAX_IMAGE_PIXELS = limit
