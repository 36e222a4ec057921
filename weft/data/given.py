"""Pictures that somebody named: files, folders, patterns, tables of paths, images, arrays."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from weft.data.read import BadPicture
from weft.data.sources.folders import LeftOut, walk
from weft.data.sources.source import PICTURE_ENDINGS, ending
from weft.data.sources.tables import read_paths
from weft.data.targets import KINDS, TaskName

TABLES = (".csv", ".tsv", ".txt")
Progress = Callable[[int, int], None]  # pictures done, of how many


class GivenPictures:
    """Pictures that somebody named, as the loader wants them."""

    multilabel = False

    def __init__(self, pictures: Any, task: str = "classify"):
        self.kind = KINDS[cast(TaskName, task)]
        entries = list(_find(pictures))
        self.names = [name or f"picture {i}" for i, (name, _) in enumerate(entries)]
        self.files = [file for _, file in entries]
        self.labels = np.zeros(len(entries), np.int64)

    def open(self, index: int) -> Any:
        if isinstance(self.files[index], BadPicture):
            raise self.files[index]
        return self.files[index]

    def target(self, index: int) -> None:
        """Nothing: what the picture shows is not known."""


def _find(pictures: Any) -> Iterator[tuple[str, Any]]:
    """Name and file of each picture, or name and what is wrong with it; what was no file may have no name."""
    if isinstance(pictures, str | os.PathLike):
        yield from _find_files(os.fspath(pictures))
    elif isinstance(pictures, Iterable) and not isinstance(pictures, np.ndarray | bytes):
        for picture in pictures:
            yield from _find(picture)
    else:
        yield getattr(pictures, "filename", ""), pictures


def _find_files(path: str) -> Iterator[tuple[str, Any]]:
    if os.path.isdir(path):
        passed = LeftOut()
        files = [Path(path, name) for name in walk(Path(path), ".", passed)]
        files += (Path(path, name) for name in (*passed.broken, *passed.special) if ending(name) in PICTURE_ENDINGS)
        nothing = "a folder without pictures"
    else:
        files = [Path(path)] if os.path.exists(path) else [Path(p) for p in glob.glob(path, recursive=True)]
        nothing = "no such file or folder"
    if len(files) == 1 and ending(files[0].name) in TABLES and files[0].is_file():
        files, nothing = _listed(files[0]), "a table without paths"
    else:
        files = sorted(files)
    for file in files:
        yield _shown(str(file)), file
    if not files:
        yield _shown(path), BadPicture(nothing)


def _listed(table: Path) -> list[Path]:
    """The files that a table names: counted from its folder or, where nothing lies there, from here."""
    pairs = ((table.parent / name, Path(name)) for name in read_paths(table) if name)
    return [here if os.path.exists(here) and not os.path.exists(beside) else beside for beside, here in pairs]


def _shown(path: str) -> str:
    """A path that can be printed, whatever bytes the file system has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
