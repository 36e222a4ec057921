"""Where pictures and labels come from: one `Source` for class folders, tables, shards, torchvision's sets, the demo.

`open_source` looks at what it is given and reads names and labels, never pixels. A source is columns rather than an
object per picture, because a set may have 14 million of them.
"""

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np

from weft.errors import WeftError, did_you_mean

if TYPE_CHECKING:
    from PIL.Image import Image

    from weft.config import DataConfig

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
    root: str  # what the user gave
    layout: str  # one sentence on what was found: "class folders under train/ and val/"
    classes: list[str]
    names: Names  # (N,), unique
    labels: np.ndarray  # (N,) int64; or (N, classes) bool where `multilabel`. Segment: zeros. Detect: what occurs
    reader: Callable[[int], Any]  # and `.sizes(positions)`: bytes in each file, or the pixels themselves
    splits: np.ndarray  # (N,) of "train", "val", "test", or "" where the layout does not say
    multilabel: bool = False
    groups: np.ndarray | None = None  # (N,) of str
    blocks: np.ndarray | None = None  # (N,) int: the shard a picture lies in; None: random access is cheap
    notes: list[str] = field(default_factory=list)
    valid: np.ndarray | None = None  # (N, classes) bool: every label that counts as right (ImageNet-ReaL)
    task: Literal["classify", "segment", "detect"] = "classify"
    targets: Any = (
        None  # segment: position to (H, W) uint8 mask; detect: position to `Objects`. And `.sizes`, as reader
    )

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int) -> "Path | bytes | np.ndarray | Image":
        """The picture at a position: its file, encoded or decoded. Safe in worker processes."""
        return self.reader(index)

    def target(self, index: int) -> Any:
        """What is to be learned of a picture where that is no label: a mask or `Objects`. Safe in worker processes."""
        return self.targets(index)

    @property
    def has_shapes(self) -> bool:
        """Whether objects have shapes, not only boxes."""
        return self.task == "detect" and self.targets.has_shapes


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


class Parts:
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


def open_configured(config: "DataConfig", source: str = "") -> Source:
    """The source that a run is configured for, with the pictures it validates on; or another one, read likewise."""
    settings: Any = dict(task=config.task, masks=config.masks, classes=config.classes, ignore=config.ignore)
    found = open_source(source or config.source, group="" if source else config.group, **settings)
    if config.val and not source:
        found = join(found, open_source(config.val, **{**settings, "task": found.task, "masks": ""}))
    return found


def open_source(
    source: str, *, group: str = "", task: str = "auto", masks: str = "", classes: str = "", ignore: Sequence[int] = ()
) -> Source:
    """Finds out what `source` is and reads its names and labels; WeftError says what is wrong with it, in one line.

    Args:
        source: a folder, a file or NAME:ROOT.
        group: a column of a table, or a regular expression on names, whose first bracket (or whole match) is the group.
        task: auto, classify, segment or detect; auto: what the layout is for.
        masks: segment: a folder of masks that does not lie beside the pictures.
        classes: segment: a file with the names, values or colours of the classes.
        ignore: segment: mask values that do not count.
    """
    found = _open_dense(source, task, masks, classes, ignore) or _open(source, group)
    if not len(found):
        raise WeftError(f"{source} has no pictures with labels.")
    if task not in ("auto", found.task):
        raise WeftError(f"data.task={task} does not fit {source}, which was read as {found.layout}.")
    if group and found.groups is None:
        _group_by_name(found, group)
    return found


def _open_dense(source: str, task: str, masks: str, classes: str, ignore: Sequence[int]) -> Source | None:
    """Pictures with masks or boxes; None where `source` holds neither."""
    from weft.data import demo
    from weft.data.boxes import coco as boxes
    from weft.data.masks import folders as mask_folders
    from weft.data.masks import sets as mask_sets

    path = Path(source).expanduser()
    name, colon, root = source.partition(":")
    name = name.lower().replace("_", "-")
    found = None
    if task == "classify":
        return None
    if not path.exists() and colon and name == "demo" and root == "nuclei":
        return demo.open_nuclei("detect" if task == "detect" else "segment")
    if not path.exists() and colon and name in {**mask_sets.MASK_SETS, **boxes.BOX_SETS}:
        folder = Path(root).expanduser()
        if not root or not folder.is_dir():
            raise WeftError(f"{source}: after the colon comes the folder that holds the set; {root!r} is none.")
        found = {**mask_sets.MASK_SETS, **boxes.BOX_SETS}[name](source, folder)
    elif path.is_dir() and task != "detect" and (masks or (task == "segment" and mask_folders.recognise(path))):
        found = mask_folders.open_masks(source, masks=masks, classes=classes, ignore=ignore)
    elif (path.is_dir() or path.suffix.lower() == ".json") and boxes.recognise(path):
        found = boxes.open_boxes(source)
    elif path.is_dir() and mask_folders.recognise(path):
        found = mask_folders.open_masks(source, masks=masks, classes=classes, ignore=ignore)
    if found is not None and found.task == "detect" and task == "segment":
        found = mask_folders.semantic_from_objects(found)
    return found


def _open(source: str, group: str) -> Source:
    from weft.data.sources import folders, named, shards, tables

    path = Path(source).expanduser()
    scheme, colon, rest = source.partition(":")
    if not source:
        raise WeftError("No data given; name a folder of pictures, a CSV file, shards, or demo:fashion.")
    if not path.exists() and colon and len(scheme) > 1 and os.sep not in scheme:
        if rest.startswith("//"):
            raise WeftError(f"{source} is not on this machine; fetch it first and give the folder.")
        return named.open_named(scheme, rest)
    if not path.exists() and re.search(r"[*?{]", source):
        return shards.open_shards(source)
    if not path.exists():
        raise WeftError(f"{source} does not exist.{_nearby(path)}")
    if path.is_dir():
        return shards.open_shards(source) if shards.holds_shards(path) else folders.open_folders(source)
    kind = path.suffix.lower()
    if kind in ARCHIVES:
        raise WeftError(f"{source} is an archive; unpack it and give the folder.")
    if kind == ".tar":
        return shards.open_shards(source)
    if kind in (".csv", ".tsv", ".txt"):
        return tables.open_table(source, group)
    if kind in PICTURE_ENDINGS:
        raise WeftError(f"{source} is one picture; give a folder that has a folder for each class.")
    raise WeftError(f"{source} is no data Weft reads: a folder, a .csv, .tsv or .json file, .tar shards, NAME:ROOT.")


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


def join(source: Source, val: Source) -> Source:
    """`source` with the validation pictures of another source, whose classes it must have.

    Validation pictures that `source` has of its own are left out.
    """
    if source.multilabel != val.multilabel or source.task != val.task or val.valid is not None:
        raise WeftError(f"{val.root} cannot validate {source.root}: their pictures have different kinds of labels.")
    if source.task != "classify":
        from weft.data.sources.renamed import in_classes

        val = in_classes(val, source.classes)
    own, other = np.flatnonzero(source.splits != "val"), evaluated(val)
    notes = [*source.notes, *(f"{val.root}: {note}" for note in val.notes)]
    if len(own) < len(source):
        notes.append(f"{len(source) - len(own)} validation pictures of {source.root} are not used: {val.root} is.")
    labels = relabelled(val, source.classes, other)
    blocks = None
    if source.blocks is not None or val.blocks is not None:
        first, second = (np.zeros(len(s), int) if s.blocks is None else s.blocks for s in (source, val))
        blocks = np.concatenate([first[own], second[other] + first.max() + 1])
    groups = None
    if source.groups is not None and val.groups is not None:
        groups = np.concatenate([source.groups[own], val.groups[other]])
    return Source(
        root=source.root,
        layout=f"{source.layout}; validation: {val.layout} in {val.root}",
        classes=source.classes,
        names=Names([*(source.names.raw(i) for i in own), *(b"val:" + val.names.raw(i) for i in other)]),
        labels=np.concatenate([source.labels[own], labels]),
        reader=Parts([(source.reader, own), (val.reader, other)]),
        splits=np.concatenate([source.splits[own], np.full(len(other), "val")]),
        multilabel=source.multilabel,
        groups=groups,
        blocks=blocks,
        notes=notes,
        task=source.task,
        targets=None if source.targets is None else Parts([(source.targets, own), (val.targets, other)]),
    )


def relabelled(source: Source, classes: Sequence[str], positions: np.ndarray) -> np.ndarray:
    """The labels at `positions`, counted in `classes`, which must have every class that occurs there."""
    labels = source.labels[positions]
    used = np.flatnonzero(labels.any(axis=0)) if source.multilabel else np.unique(labels)
    position = {name: i for i, name in enumerate(classes)}
    unknown = [source.classes[i] for i in used if source.classes[i] not in position]
    if unknown:
        hint = did_you_mean(unknown[0], classes)
        raise WeftError(f"{source.root} has classes that training does not have: {some(unknown)}.{hint}")
    if not source.multilabel:
        return np.array([position.get(name, -1) for name in source.classes])[labels]
    wide = np.zeros((len(labels), len(classes)), bool)
    wide[:, [position[source.classes[i]] for i in used]] = labels[:, used]
    return wide


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


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else "".join(words)


def some(names: Sequence[str], most: int = 5) -> str:
    """`'a', 'b' and 7 more`."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def alike(classes: Iterable[str]) -> list[list[str]]:
    """Classes whose names differ only by case or blanks."""
    families: dict[str, list[str]] = {}
    for name in classes:
        families.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    return [family for family in families.values() if len(family) > 1]


def note_alike(classes: Iterable[str]) -> list[str]:
    return [
        f"Classes {some(family)} differ only by case or blanks and count as {len(family)}; if they are one, rename."
        for family in alike(classes)
    ]


def _group_by_name(source: Source, pattern: str) -> None:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise WeftError(f"data.group={pattern!r} is no regular expression ({error}).") from None
    matches = [expression.search(name) for name in source.names]
    if not any(matches):
        raise WeftError(f"data.group={pattern!r} matches no name such as {source.names[0]!r}.")
    # a picture without a group is a group of its own
    groups = [(m[1] or "") if m and expression.groups else m[0] if m else "" for m in matches]
    alone = groups.count("")
    source.groups = np.array([g or f"alone: {name}" for g, name in zip(groups, source.names, strict=True)])
    if alone:
        source.notes.append(f"{alone} pictures have no group by {pattern!r}; each counts as a group of its own.")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _nearby(path: Path) -> str:
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""
