"""Class folders: `cat/1.jpg dog/2.jpg`, or the same under train/, val/ and test/ by any of their usual names."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.data.sources.source import (
    ARCHIVES,
    PICTURE_ENDINGS,
    Files,
    Names,
    Source,
    alike,
    ending,
    natural,
    note_alike,
    split_of,
)
from weft.errors import WeftError
from weft.words import listed, many, some

JUNK = {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "lost+found", "$recycle.bin"}
# a folder of each kind side by side is segmentation or detection, not two classes
PICTURE_FOLDERS = {"images", "image", "imgs", "jpegimages", "img"}
TARGET_FOLDERS = {"masks", "mask", "labels", "annotations", "segmentationclass", "gt", "annotation"}
COCO = ("coco", "instances", "annotation")  # words in the names of JSON files with boxes


@dataclass
class Listing:
    """The content of one folder, and what was passed over on the way."""

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    junk: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # links that lead nowhere, or to themselves
    loops: list[str] = field(default_factory=list)  # links to a folder that this one lies in
    special: list[str] = field(default_factory=list)  # pipes, sockets, devices: who opens one may wait for ever


def list_folder(path: Path) -> Listing:
    """One `scandir`, which says what is a folder without asking the disk again for each file."""
    found = Listing()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                getattr(found, _kind(entry, path)).append(entry.name)
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror}.") from None
    return found


def _kind(entry: "os.DirEntry[str]", folder: Path) -> str:
    """The list of a `Listing` that an entry belongs to."""
    if entry.name.startswith(".") or entry.name.casefold() in JUNK:
        return "junk"
    try:
        if entry.is_dir():
            up = entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(entry.path))
            return "loops" if up else "folders"
        if entry.is_file():
            return "files"
    except OSError:  # a link to itself
        return "broken"
    return "special" if os.path.exists(entry.path) else "broken"


@dataclass
class LeftOut:
    """Files and folders that were left out under a root, for the notes."""

    junk: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)

    def add(self, listing: Listing, prefix: str = "") -> None:
        """Takes what was passed over in the folder whose entries' names begin with `prefix`."""
        self.junk.update(listing.junk)
        for kind in ("broken", "loops", "special"):
            getattr(self, kind).extend(f"{prefix}{name}" for name in getattr(listing, kind))

    def notes(self) -> list[str]:
        notes = []
        if self.junk:
            notes.append(f"Ignored hidden and system files: {some(list(self.junk))}.")
        if self.endings:
            kinds = ", ".join(f"{n} {kind or 'without an ending'}" for kind, n in self.endings.most_common(5))
            notes.append(f"Left out {many(self.endings.total(), 'file')} that do not end as pictures do: {kinds}.")
        if self.broken:
            notes.append(f"Left out {many(len(self.broken), 'broken link')}: {some(self.broken)}.")
        if self.loops:
            notes.append(f"Left out folders that link back to one above them: {some(self.loops)}.")
        if self.special:
            notes.append(f"Left out pipes, sockets and devices: {some(self.special)}.")
        return notes


class ClassFolder(NamedTuple):
    """The pictures of one class folder."""

    split: str
    label: str
    paths: list[str]


def open_folders(source: str, *, ignore: Collection[str] = ()) -> Source:
    """Class folders, flat or split; `ignore` names folders that are no classes."""
    root, top, notes = descend(Path(source).expanduser())
    splits = _split_folders(root, top)
    passed = LeftOut()
    passed.add(top)
    columns: list[ClassFolder] = []
    for split, folder in splits.items():
        listing = list_folder(root / folder) if folder else top
        if folder:
            passed.add(listing, f"{folder}/")
        _refuse_other_tasks(root / folder, listing.folders)
        if not listing.folders:
            if split != "test" or len(splits) == 1:
                _explain_no_classes(root / folder, listing, top)
            notes.append(f"{folder}/ has no class folders and is not used.")
            continue
        if pictures := _pictures(listing):
            notes.append(f"Left out {many(len(pictures), 'picture')} beside the class folders in {root / folder}.")
        for name in listing.folders:
            if name not in ignore:
                prefix = f"{folder}/{name}" if folder else name
                columns.append(ClassFolder(split, unicodedata.normalize("NFC", name), walk(root, prefix, passed)))
    if "" not in splits and (others := set(top.folders) - set(splits.values())):
        notes.append(f"Folders that are neither train, val nor test are not used: {some(sorted(others))}.")
    return _build(source, root, splits, columns, [*notes, *passed.notes()])


def descend(root: Path) -> tuple[Path, Listing, list[str]]:
    """The folder in which classes or splits begin: archives often unpack into one more folder."""
    top, notes = list_folder(root), []
    while len(top.folders) == 1 and not _pictures(top) and not split_of(top.folders[0]):
        inner = list_folder(root / top.folders[0])
        if not inner.folders or _pictures(inner):
            break  # it is a class
        notes.append(f"Looked into {top.folders[0]}/, the only folder in {root}.")
        root, top = root / top.folders[0], inner
    return root, top, notes


def _split_folders(root: Path, top: Listing) -> dict[str, str]:
    """Split to folder: {"train": "Training", "val": "dev"}, or {"": ""} where the classes lie in `root` itself."""
    found: dict[str, str] = {}
    for name in sorted(top.folders):
        split = split_of(name)
        if split in found:
            raise WeftError(f"{root} has {found[split]}/ and {name}/, both for {split}; rename or move one of them.")
        if split:
            found[split] = name
    if "train" in found or (found and len(found) == len(top.folders)):
        return {split: found[split] for split in ("train", "val", "test") if split in found}
    return {"": ""}


def walk(root: Path, prefix: str, passed: LeftOut) -> list[str]:
    """Paths, relative to `root`, of the pictures in a class folder and the folders below it, in a fixed order."""
    paths: list[str] = []
    way = (os.path.realpath(root / prefix),)  # the folders that led to one
    waiting: list[tuple[str, tuple[str, ...]]] = [(prefix, way)]
    while waiting:
        folder, way = waiting.pop()
        listing = list_folder(root / folder)
        passed.add(listing, f"{folder}/")
        for name in listing.files:
            if ending(name) in PICTURE_ENDINGS:
                paths.append(f"{folder}/{name}")
            else:
                passed.endings[ending(name) if "." in name else ""] += 1
        for name in listing.folders:
            real = os.path.realpath(root / folder / name)
            if any(Path(step).is_relative_to(real) for step in way):
                passed.loops.append(f"{folder}/{name}")
            else:
                waiting.append((f"{folder}/{name}", (*way, real)))
    return sorted(paths)


def _build(source: str, root: Path, splits: dict[str, str], columns: list[ClassFolder], notes: list[str]) -> Source:
    counts = Counter[str]()
    by_split: dict[str, set[str]] = {split: set() for split in splits}
    for column in columns:
        counts[column.label] += len(column.paths)
        if column.paths:
            by_split[column.split].add(column.label)
    classes = sorted((name for name, n in counts.items() if n), key=natural)
    if empty := sorted((name for name, n in counts.items() if not n), key=natural):
        notes.append(f"Classes without pictures are left out: {some(empty)}.")
    if not classes:
        raise WeftError(f"{source}: none of the folders {some(sorted(counts))} holds a picture.")
    _compare_splits(source, by_split, notes)
    notes += note_alike(classes)
    number = {name: i for i, name in enumerate(classes)}
    columns = sorted((c for c in columns if c.paths), key=lambda c: (list(splits).index(c.split), number[c.label]))
    lengths = [len(column.paths) for column in columns]
    names = Names(path for column in columns for path in column.paths)
    under = listed([f"{folder}/" for folder in splits.values() if folder])
    return Source(
        root=source,
        layout="class folders" + (f" under {under}" if under else ""),
        classes=classes,
        names=names,
        labels=np.repeat(np.array([number[column.label] for column in columns], np.int64), lengths),
        reader=Files(root, names),
        splits=np.repeat([column.split for column in columns], lengths),
        notes=notes,
    )


def _compare_splits(source: str, by_split: dict[str, set[str]], notes: list[str]) -> None:
    """Notes classes of val or test that train lacks; raises where a name was only spelt differently there."""
    known = by_split.get("train", set())
    for split in ("val", "test") if known else ():
        unknown = sorted(by_split.get(split, set()) - known, key=natural)
        for family in alike([*known, *unknown]):
            here, there = ([name for name in family if name in names] for names in (known, unknown))
            if here and there:
                raise WeftError(
                    f"{source}: class {here[0]!r} is called {there[0]!r} in {split}; rename one of the two folders."
                )
        if unknown:
            notes.append(f"Classes in {split} that train lacks, which no model can learn: {some(unknown)}.")


def _pictures(listing: Listing) -> list[str]:
    return [name for name in listing.files if ending(name) in PICTURE_ENDINGS]


def _refuse_other_tasks(folder: Path, folders: list[str]) -> None:
    names = {name.casefold() for name in folders}
    if names & PICTURE_FOLDERS and names & TARGET_FOLDERS:
        raise _other_task(folder, f"{min(names & PICTURE_FOLDERS)}/ beside {min(names & TARGET_FOLDERS)}/")


def _other_task(folder: Path, sign: str) -> WeftError:
    return WeftError(
        f"{folder} looks like segmentation or detection data ({sign}), and has no labels to classify by: these are a"
        " folder for each class, or a CSV file. docs/data.md has all layouts that Weft knows."
    )


def _explain_no_classes(folder: Path, listing: Listing, top: Listing) -> None:
    files = [*listing.files, *top.files]
    targets = [name for name in top.folders if name.casefold() in TARGET_FOLDERS]
    boxes = [name for name in files if name.endswith(".json") and any(word in name.lower() for word in COCO)]
    if boxes or targets:
        raise _other_task(folder, boxes[0] if boxes else f"{targets[0]}/")
    if tables := [name for name in listing.files if name.lower().endswith((".csv", ".tsv"))]:
        raise WeftError(f"{folder} has a table, but no class folders; give that file: {folder / tables[0]}")
    if pictures := _pictures(listing):
        raise WeftError(
            f"{folder} holds {many(len(pictures), 'picture')}, but no class folders; sort them into a folder for each "
            "class, or write a CSV file with a path and a label in each line."
        )
    if packed := [name for name in listing.files if name.lower().endswith(ARCHIVES)]:
        raise WeftError(f"{folder} holds archives ({some(packed)}); unpack them first.")
    raise WeftError(f"{folder} is empty; expected a folder for each class, or pictures with masks or boxes.")
