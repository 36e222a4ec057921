"""One `Source` of pictures with labels, masks or objects, whatever they were read from; `open` finds out what that is.

A source is columns rather than an object per picture, because a set may have 14 million of them.
"""

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from weft.data.targets import KINDS, TargetKind, TaskName
from weft.words import some

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_ENDINGS = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".npy"),
}
ARCHIVES = (".zip", ".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev", "eval"), "val"),
    **dict.fromkeys(("test", "testing", "testset"), "test"),
}
STATED_FILES = 100_000  # of larger sets the fingerprint looks at the sizes of so many, evenly spaced


class Names(Sequence[str]):
    """Many names in one buffer: a fraction of a list's memory, and nothing that worker processes would copy.

    A name is kept as the bytes it has on disk; what is not UTF-8 is shown as \\xff, so that it can always be printed.
    """

    def __init__(self, names: Iterable[str | bytes]) -> None:
        raw = [name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name for name in names]
        self.ends = np.cumsum([len(name) for name in raw], dtype=np.int64)
        self.buffer = b"".join(raw)

    @classmethod
    def stored(cls, buffer: bytes, ends: np.ndarray) -> "Names":
        names = cls([])
        names.buffer, names.ends = buffer, ends
        return names

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "backslashreplace")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("utf-8", "backslashreplace") for name in self.raws())

    def raw(self, index: SupportsIndex) -> bytes:
        position = range(len(self))[index]  # negative ones count from the end, others raise
        return self.buffer[self.ends[position - 1] if position else 0 : self.ends[position]]

    def raws(self) -> Iterator[bytes]:
        return (self.buffer[start:end] for start, end in pairwise([0, *self.ends.tolist()]))

    def path(self, index: SupportsIndex) -> str:
        return self.raw(index).decode("utf-8", "surrogateescape")


@dataclass
class Source:
    """Pictures and what is known of them, as columns; pixels, masks and objects are read when they are asked for."""

    root: str  # what the user gave
    layout: str  # one sentence on what was found: "class folders under train/ and val/"
    classes: list[str]
    names: Names  # (N,), unique
    labels: np.ndarray  # (N,) int64, zeros for masks; (N, classes) bool where `multilabel`, for objects: what occurs
    reader: Callable[[int], Any]  # and `.sizes(positions)`: bytes in each file, or the pixels themselves
    splits: np.ndarray  # (N,) of "train", "val", "test", or "" where the layout does not say
    multilabel: bool = False
    groups: np.ndarray | None = None  # (N,) of str
    blocks: np.ndarray | None = None  # (N,) int: the shard a picture lies in; None: random access is cheap
    notes: list[str] = field(default_factory=list)
    valid: np.ndarray | None = None  # (N, classes) bool: every label that counts as right (ImageNet-ReaL)
    task: TaskName = "classify"  # what the pictures can teach a model
    published: bool = False  # a known set, whose own split is that of the papers
    targets: Any = None  # reads (H, W) uint8 masks or `Objects` by position, and has `.sizes` as the reader has

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int) -> "Path | bytes | np.ndarray | Image":
        """The picture at a position: its file, encoded or decoded. Safe in worker processes."""
        return self.reader(index)

    def target(self, index: int) -> Any:
        """The mask or the `Objects` of the picture at a position. Safe in worker processes."""
        return self.targets(index)

    @property
    def kind(self) -> TargetKind:
        """Labels, masks or objects."""
        return KINDS[self.task]

    @property
    def has_shapes(self) -> bool:
        """Whether objects have shapes, not only boxes."""
        return self.kind.may_have_shapes and self.targets.has_shapes


class Files:
    """Reads pictures that are files, by their paths relative to `root`."""

    def __init__(self, root: str | os.PathLike[str], paths: Names) -> None:
        self.root, self.paths = str(root), paths

    def __call__(self, index: int) -> Path:
        return Path(self.root, self.paths.path(index))

    def sizes(self, positions: range) -> bytes:
        return b"".join(_size(os.path.join(self.root, self.paths.path(i))).to_bytes(8, "little") for i in positions)


class Pixels:
    """Reads pictures that are arrays: (N, H, W) or (N, H, W, C)."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def __call__(self, index: int) -> np.ndarray:
        return self.pixels[index]

    def sizes(self, positions: range) -> bytes:
        return self.pixels[positions.start : positions.stop : positions.step].tobytes()


class JoinedReaders:
    """Reads chosen pictures of several readers, one after the other."""

    def __init__(self, parts: Sequence[tuple[Any, np.ndarray]]) -> None:
        self.readers = [reader for reader, _ in parts]
        self.part = np.repeat(np.arange(len(parts), dtype=np.int8), [len(positions) for _, positions in parts])
        self.position = np.concatenate([positions for _, positions in parts])

    def __call__(self, index: int) -> Any:
        return self.readers[self.part[index]](int(self.position[index]))

    def sizes(self, positions: range) -> bytes:
        one = ((self.readers[self.part[i]], int(self.position[i])) for i in positions)
        return b"".join(reader.sizes(range(position, position + 1)) for reader, position in one)

    @property
    def has_shapes(self) -> bool:  # where these are objects
        return all(reader.has_shapes for reader in self.readers)


def fingerprint(source: Source) -> str:
    """Changes when names, labels, splits or sizes of files change.

    Times do not count: each machine of a run has its own copy. No file is opened, and of more than 100,000 files as
    many, evenly spaced, are asked for their size, because that takes minutes where a disk is far away.
    """
    digest = hashlib.blake2b(digest_size=16)
    step = -(-len(source) // STATED_FILES)
    shape = f"{len(source)} {source.labels.shape} {source.classes}"
    sizes = source.reader.sizes(range(0, len(source), step))  # type: ignore[attr-defined]
    for part in (shape.encode("utf-8", "surrogatepass"), source.names.buffer, source.names.ends.tobytes(), sizes):
        digest.update(part)
    digest.update(np.ascontiguousarray(source.labels).tobytes())
    if source.targets is not None:
        digest.update(source.targets.sizes(range(0, len(source), step)))
    digest.update("".join(split[:2] or "-" for split in source.splits.tolist()).encode())
    return digest.hexdigest()


def evaluated(source: Source) -> np.ndarray:
    """Positions that an evaluation of `source` looks at: its validation pictures, else its test pictures, else all."""
    for split in ("val", "test"):
        if (source.splits == split).any():
            return np.flatnonzero(source.splits == split)
    return np.arange(len(source))


def natural(name: str) -> tuple[Any, ...]:
    """A sorting key that puts "2" before "10"."""
    parts = re.split(r"(\d+)", name)
    return (*((part.casefold(), 0) if i % 2 == 0 else ("", int(part)) for i, part in enumerate(parts)), (name, 0))


def ending(name: str) -> str:
    """`.jpg` of `1.JPG`; what is needed of os.path.splitext, which is slow for a million names."""
    return "." + name.rpartition(".")[2].lower()


def split_of(name: str) -> str:
    """The split that a folder, a file or a cell is called after ("Training", "val2017", "dev"), or nothing."""
    return SPLIT_NAMES.get(re.sub(r"[-_ ]?(19|20)\d\d$", "", name.strip().casefold()), "")


def alike(classes: Iterable[str]) -> list[list[str]]:
    """Classes whose names differ only in case or spaces."""
    families: dict[str, list[str]] = {}
    for name in classes:
        families.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    return [family for family in families.values() if len(family) > 1]


def note_alike(classes: Iterable[str]) -> list[str]:
    return [
        f"Classes {some(family)} differ only in case or spaces and count as {len(family)}; rename them if they are one."
        for family in alike(classes)
    ]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
