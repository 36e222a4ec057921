"""WebDataset shards: tar files in which the members of a picture share a name, `abc.jpg abc.cls`.

The headers of a shard are read once and kept in the user's cache folder; then any picture is one read at an offset, so
shards are shuffled, split and resumed as folders are. Nothing is ever unpacked.
"""

import glob
import hashlib
import json
import os
import re
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, compress, product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import BadZipFile

import numpy as np

from weft.data.sources.folders import list_folder
from weft.data.sources.source import PICTURE_ENDINGS, SPLIT_NAMES, Names, Source, natural, note_alike, split_of
from weft.documents import parse_json
from weft.errors import WeftError
from weft.files import write_atomic
from weft.words import many, some

BLOCK = 512
STRIDE = 8192  # bytes read at once: a header, a short label and often the next header
LARGEST_LABEL = 1 << 20
LABELS = {".cls": 0, ".json": 1, ".txt": 2}  # where a picture has several of them, the first of these counts
JSON_KEYS = ("label", "labels", "cls", "class", "class_name", "target")
TAR = re.compile(r"\.(tar|tgz)(\.\w+)?$", re.IGNORECASE)
OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)")  # absolute, of another drive, or upwards
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}


class ShardIndex(NamedTuple):
    """The pictures of one shard."""

    keys: Names  # names of the members
    offsets: np.ndarray  # (N,) int64
    sizes: np.ndarray  # (N,) int64
    labels: Names  # JSON: 3, "cat", ["cat", "dog"], or nothing


class ShardReader:
    """Reads pictures at their offsets."""

    def __init__(self, paths: list[str], shard: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self.paths, self.shard, self.offsets, self.lengths = paths, shard, offsets, lengths

    def __call__(self, index: int) -> bytes:
        file = _opened(self.paths[self.shard[index]], os.getpid(), threading.get_ident())
        file.seek(self.offsets[index])
        return file.read(self.lengths[index])

    def sizes(self, positions: range) -> bytes:
        return self.lengths[positions.start : positions.stop : positions.step].tobytes()


@lru_cache(maxsize=64)
def _opened(path: str, process: int, thread: int) -> BinaryIO:
    """A file of which nobody else moves the position."""
    return open(path, "rb")  # until the cache drops it


def open_shards(source: str) -> Source:
    """A shard, a folder of shards, or a pattern such as `train-{0000..0099}.tar`."""
    root, paths = _find(source)
    with ThreadPoolExecutor(8) as pool:  # the disk, or the network behind it, takes the time
        indices = list(pool.map(_cached_index, paths))
    notes: list[str] = []
    shard_names = [path.relative_to(root).as_posix() for path in paths]
    shard_splits = [_split(name) for name in shard_names]
    shard = np.repeat(np.arange(len(paths), dtype=np.int32), [len(index.keys) for index in indices])
    if not len(shard):
        raise WeftError(f"{source} holds no pictures; expected members such as abc.jpg and abc.cls.")
    classes, labels, labelled = _labels(source, root, indices)
    if not labelled.all():
        notes.append(f"Left out {many((~labelled).sum(), 'picture')} without a label.")
    prefixes = [f"{name}/".encode("utf-8", "surrogateescape") for name in shard_names]
    keys = chain.from_iterable(index.keys.raws() for index in indices)
    shard = shard[labelled]
    offsets = np.concatenate([index.offsets for index in indices])[labelled]
    lengths = np.concatenate([index.sizes for index in indices])[labelled]
    counts = Counter(shard_splits)
    parts = ", ".join(f"{counts[split]} {split}" for split in ("train", "val", "test") if counts[split])
    return Source(
        root=source,
        layout=many(len(paths), "tar shard") + (f" ({parts})" if parts else ""),
        classes=classes,
        names=Names(prefixes[i] + key for i, key in zip(shard, compress(keys, labelled), strict=True)),
        labels=labels[labelled],
        reader=ShardReader([str(path) for path in paths], shard, offsets, lengths),
        splits=np.array(shard_splits)[shard],
        multilabel=labels.ndim == 2,
        blocks=shard,
        notes=[*notes, *note_alike(classes)],
    )


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds tar files and no class folders, beside which an archive may lie."""
    return bool(_shards_in(folder))


def _shards_in(folder: Path) -> list[Path]:
    """Tar files of a folder, or of its folders for train and val; compressed ones too, to be refused with a reason."""
    top = list_folder(folder)
    found = [folder / name for name in top.files if TAR.search(name)]
    for name in top.folders:
        inner = [folder / name / file for file in list_folder(folder / name).files if TAR.search(file)]
        if not inner or not split_of(name):
            return []
        found += inner
    return found


def _find(source: str) -> tuple[Path, list[Path]]:
    """The folder that names count from, and the shards."""
    path = Path(source).expanduser()
    if path.is_dir():
        root, found = path, _shards_in(path)
    elif path.is_file():
        root, found = path.parent, [path]
    else:
        root = Path(re.split(r"[*?{\[]", str(path))[0] + "x").parent
        found = []
        for pattern in _expand(str(path)):
            matches = [*filter(os.path.isfile, glob.glob(pattern))]
            if not matches:
                raise WeftError(f"{source}: there is no {pattern}.")
            found += map(Path, matches)
    return root, sorted(set(found), key=lambda path: natural(str(path)))


def _expand(pattern: str) -> list[str]:
    """`a-{00..02}.tar` and `{a,b}.tar` as the shell expands them."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = []
    for i, piece in enumerate(pieces):
        bounds = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
        if i % 2 == 0:
            choices.append([piece])
        elif bounds:
            choices.append([f"{n:0{len(bounds[1])}}" for n in range(int(bounds[1]), int(bounds[2]) + 1)])
        else:
            choices.append(piece.split(","))
    return ["".join(parts) for parts in product(*choices)]


def _split(name: str) -> str:
    """The split that a shard is called after: train-0001.tar, val/0001.tar, imagenet-validation-01.tar."""
    *folders, file = name.split("/")
    words = re.split(r"[^a-z]+", file.removesuffix(".tar").lower())
    return next((split for split in (*map(split_of, folders), *(SPLIT_NAMES.get(w, "") for w in words)) if split), "")


def _labels(source: str, root: Path, indices: list[ShardIndex]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Classes, labels ((N,) int64 or (N, classes) bool), and which pictures have one."""
    numbers: dict[bytes, int] = {}
    texts = (text for index in indices for text in index.labels.raws())
    which = np.array([numbers.setdefault(text, len(numbers)) for text in texts])  # (N,) into the different labels
    values = [json.loads(text) if text else None for text in numbers]
    labelled = np.array([value is not None for value in values])[which]
    if not labelled.any():
        raise WeftError(
            f"{source}: no picture has a label; expected members such as abc.cls or abc.json. "
            "If it holds class folders, unpack it."
        )
    several = any(isinstance(value, list) for value in values)
    rows = [[] if value is None else value if isinstance(value, list) else [value] for value in values]
    used = {value for row in rows for value in row}
    classes = _class_names(source, root, used)
    number = {name: i for i, name in enumerate(classes)}
    rows = [[value if isinstance(value, int) else number[value] for value in row] for row in rows]
    if not several:
        return classes, np.array([row[0] if row else -1 for row in rows], np.int64)[which], labelled
    wide = np.zeros((len(rows), len(classes)), bool)
    for target, row in zip(wide, rows, strict=True):
        target[row] = True
    return classes, wide[which], labelled


def _class_names(source: str, root: Path, used: set[Any]) -> list[str]:
    """From classes.txt beside the shards, a name in each line; else the names, or numbers, that occur."""
    file, known = root / "classes.txt", []
    if file.is_file():
        known = [line.strip() for line in file.read_text(encoding="utf-8-sig", errors="replace").splitlines()]
        known = [line for line in known if line]
    if all(isinstance(value, int) for value in used):
        if min(used) < 0:
            raise WeftError(f"{source} has the class {min(used)}; classes count from 0.")
        if known and max(used) >= len(known):
            raise WeftError(f"{source} has the class {max(used)}, but {file} only {len(known)} names, from 0 on.")
        return known or [str(i) for i in range(max(used) + 1)]
    if not all(isinstance(value, str) for value in used):
        raise WeftError(f"{source} mixes numbers and names as labels ({some(sorted(map(str, used)))}); use one kind.")
    if unknown := sorted(used - set(known)) if known else []:
        raise WeftError(f"{source} has classes that {file} lacks: {some(unknown)}.")
    return known or sorted(used, key=natural)


def _cached_index(path: Path) -> ShardIndex:
    """The index of a shard, from the cache where the file has the size and the time it had."""
    try:
        state = path.stat()
        place = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{1}".encode("utf-8", "surrogateescape")
        cached = _cache_folder() / f"{hashlib.blake2b(place, digest_size=16).hexdigest()}.npz"
    except (OSError, RuntimeError) as error:
        raise WeftError(f"{path} cannot be read: {error}.") from None
    try:
        with np.load(cached, allow_pickle=False) as file:
            keys, labels = (Names.stored(file[name].tobytes(), file[f"{name}_ends"]) for name in ("keys", "labels"))
            return ShardIndex(keys, file["offsets"], file["sizes"], labels)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        index = _index(path)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cached, lambda temporary: np.savez(temporary, allow_pickle=False, **_columns(index)))
    except OSError:
        pass  # without a cache the next start is only slower
    return index


def _columns(index: ShardIndex) -> dict[str, np.ndarray]:
    texts = {"keys": index.keys, "labels": index.labels}
    columns = {name: np.frombuffer(names.buffer, np.uint8) for name, names in texts.items()}
    ends = {f"{name}_ends": names.ends for name, names in texts.items()}
    return {**columns, **ends, "offsets": index.offsets, "sizes": index.sizes}


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "weft", "shards")


def _index(path: Path) -> ShardIndex:
    """Reads every header of a shard, and the labels."""
    pictures: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, tuple[int, bytes]] = {}
    with open(path, "rb", buffering=0) as file:
        window = ReadAhead(file)
        for name, offset, size in _checked_members(path, window):
            folder, slash, base = name.rpartition("/")
            stem, _, extension = base.partition(".")
            key, ending = folder + slash + stem, "." + extension.lower().rpartition(".")[2]
            if not stem:
                continue  # hidden, such as ._abc.jpg
            if ending in PICTURE_ENDINGS and (key not in pictures or pictures[key][0].endswith(".npy")):
                pictures[key] = (name, offset, size)
            elif ending in LABELS and size <= LARGEST_LABEL and LABELS[ending] < labels.get(key, (9,))[0]:
                labels[key] = (LABELS[ending], _label(ending, window.read(offset, size)))
    names, offsets, sizes = zip(*pictures.values(), strict=True) if pictures else ((), (), ())
    texts = Names(labels.get(key, (9, b""))[1] for key in pictures)
    return ShardIndex(Names(names), np.array(offsets, np.int64), np.array(sizes, np.int64), texts)


def _label(ending: str, content: bytes) -> bytes:
    """A label as JSON, or nothing where there is none to be found."""
    if ending == ".cls" and content.isdigit():
        return content.lstrip(b"0") or b"0"
    text = content.decode("utf-8", "replace").strip()
    value: Any = text or None
    if ending == ".json":
        try:
            value = parse_json(text, "a label")
        except WeftError:
            value = None
        if isinstance(value, dict):
            value = next((value[key] for key in JSON_KEYS if key in value), None)
    elif re.fullmatch(r"-?\d+", text):
        value = int(text)
    parts = value if isinstance(value, list) else [value]
    if value == -1:  # what test sets have
        return b""
    return json.dumps(value).encode() if all(type(part) in (int, str) for part in parts) else b""


class ReadAhead:
    """A file of which a stretch is in memory, for reading forwards in small pieces."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.start, self.content = file, 0, b""
        self.total = os.fstat(file.fileno()).st_size

    def read(self, offset: int, size: int) -> bytes:
        if not self.start <= offset <= offset + size <= self.start + len(self.content):
            self.file.seek(offset)
            self.start, self.content = offset, self.file.read(max(size, STRIDE))
        return self.content[offset - self.start : offset - self.start + size]


def _checked_members(path: Path, window: ReadAhead) -> Iterator[tuple[str, int, int]]:
    try:
        yield from _members(path, window)
    except WeftError:
        raise
    except ValueError:  # a number that is none
        raise WeftError(f"{path} is not a tar file, or is damaged.") from None


def _members(path: Path, window: ReadAhead) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every plain file of a tar archive (ustar, GNU and pax)."""
    offset, longer = 0, {}  # what an extra header says about the next member
    while offset < window.total:
        header = window.read(offset, BLOCK)
        if not any(header):
            return
        _check_header(path, header, offset)
        kind, start = header[156:157], offset + BLOCK
        size = int(longer.get(b"size", b"-1")) if kind in b"07\0" else -1
        size = _number(header[124:136]) if size < 0 else size
        offset = start
        if kind not in b"123456":  # links, devices and folders have no content
            offset += -(-size // BLOCK) * BLOCK
        if start + size > window.total and offset > start:
            raise WeftError(f"{path} is cut off: it ends before the content of its last member; copy it again.")
        if kind == b"L":
            longer[b"path"] = window.read(start, size).rstrip(b"\0")
        elif kind == b"x":
            longer.update(_pax_records(window.read(start, size)))
        elif kind in b"07\0":
            yield _safe_name(path, longer.get(b"path") or _name(header)), start, size
        if kind not in b"LKxg":
            longer = {}
    if not window.total:
        raise WeftError(f"{path} is an empty file.")


def _check_header(path: Path, header: bytes, offset: int) -> None:
    """Raises unless the sum of the bytes is the one that the header tells, its own digits counted as blanks."""
    digits = header[148:156]
    # the low half of Adler-32 is 1 + the sum, modulo 65521, and much quicker than a sum over bytes
    found = (zlib.adler32(header) & 0xFFFF) - 1 - sum(digits) + 8 * ord(" ")
    if digits.strip(b" \0").isdigit() and (_number(digits) - found) % 65521 == 0:
        return
    packed = [name for magic, name in COMPRESSED.items() if header.startswith(magic) and not offset]
    if packed:
        raise WeftError(
            f"{path} is compressed ({packed[0]}); unpack it to a plain .tar, in which pictures can be found."
        )
    raise WeftError(f"{path} is not a tar file, or is damaged at byte {offset}.")


def _number(field: bytes) -> int:
    """Octal digits, or a binary number where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _pax_records(content: bytes) -> dict[bytes, bytes]:
    """`LENGTH KEY=VALUE` and a line feed, again and again."""
    records = {}
    while content:
        length, blank, _ = content.partition(b" ")
        if not blank or not length.isdigit() or int(length) <= len(length) + 1:
            break
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key] = value
        content = content[int(length) :]
    return records


def _safe_name(path: Path, raw: bytes) -> str:
    name = raw.decode("utf-8", "surrogateescape").removeprefix("./")
    if OUTSIDE.search(name):
        raise WeftError(f"{path} is refused: its member {name!r} points outside the archive.")
    return name
