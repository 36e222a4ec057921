"""Pictures that somebody named: files, folders, patterns, images, arrays."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.read import BadPicture, decode
from weft.data.sources.source import PICTURE_ENDINGS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.data.preprocessing import Preprocessing

MANY = 500
WORTH_COMPILING = 20_000  # pictures; fewer are done before kernels are compiled
Progress = Callable[[int, int], None]  # pictures done, of how many


class Found:
    """Pictures that somebody named, as the loader wants them."""

    multilabel = False

    def __init__(self, pictures: Any, task: str = "classify"):
        self.task: Any = task
        entries = list(_find(pictures))
        self.names = [name or f"picture {i}" for i, (name, _) in enumerate(entries)]
        self.files = [file for _, file in entries]
        self.labels = np.zeros(len(entries), np.int64)

    def open(self, index: int) -> Any:
        if isinstance(self.files[index], BadPicture):
            raise self.files[index]
        return self.files[index]

    def target(self, index: int) -> None:
        """What is to be found there is not known."""


def look(file: Any, preprocessing: "Preprocessing") -> np.ndarray:
    """(H, W, 1 or 3) uint8: a picture at its own size for human eyes, dark ones brightened; raises BadPicture."""
    from weft.data.preprocessing import to_channels_first
    from weft.report.overlay import visible

    pixels = decode(file, channels=preprocessing.channels, max_pixels=preprocessing.max_pixels)
    return visible(to_channels_first(pixels, preprocessing.depth), brighten=True)


def reading_workers(wanted: int, pictures: int) -> int:
    """Processes that read: as many as are wanted; -1: where it pays, which is from a few hundred pictures on."""
    if wanted >= 0:
        return wanted
    return min(8, (os.cpu_count() or 1) // 2) if pictures > MANY else 0


def fast_for_many(model: "nn.Module", device: "torch.device", pictures: int) -> None:
    """`weft.fast(model)` on a GPU that is to see so many pictures that it pays."""
    if pictures >= WORTH_COMPILING:
        from weft.fast.swap import fast_on

        fast_on(model, device)


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
        below = (p for p in sorted(Path(path).rglob("*")) if p.suffix.lower() in PICTURE_ENDINGS)
        files = [p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        nothing = "a folder without pictures"
    else:
        files = [Path(path)] if os.path.exists(path) else [Path(p) for p in sorted(glob.glob(path, recursive=True))]
        nothing = "no such file or folder"
    for file in files:
        yield _shown(str(file)), file
    if not files:
        yield _shown(path), BadPicture(nothing)


def _shown(path: str) -> str:
    """A path that can be printed, whatever bytes the file system has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
