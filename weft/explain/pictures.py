"""The pictures that a model is looked into with, in batches, with their classes and masks where these are known."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.data.masks.values import read_raw, upright
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture, header
from weft.data.sources.source import PICTURE_ENDINGS
from weft.errors import WeftError
from weft.explain.subject import Subject

BATCH = 8
MOST = 256  # pictures that the numbers are taken over
LIKE_PICTURES = "put the masks into folders with the same names as the pictures'"


class NamedPictures(Protocol):
    """Pictures by number, such as `weft.data.given.GivenPictures`."""

    names: list[str]

    def open(self, index: int) -> Any:
        """A file, or what else `Preprocessing.picture` takes."""
        ...


@dataclass(frozen=True)
class PictureBatch:
    """Pictures of one size, ready for the model."""

    names: list[str]
    labels: list[int]  # the classes of the pictures; -1: not known
    pictures: Tensor  # (B, C, h, w) as `preprocessing.picture` gives them
    masks: Tensor | None  # (B, h, w) bool: what is foreground


def read_pictures(
    found: NamedPictures,
    subject: Subject,
    masks: Mapping[str, Path] | None,
    unreadable: list[tuple[str, str]],
    unmasked: list[str],
) -> list[PictureBatch]:
    """The first `MOST` pictures, in batches of one size.

    Those that cannot be read are added to `unreadable`, and why some have no mask to `unmasked`.
    """
    batches: list[PictureBatch] = []
    for i, name in enumerate(found.names[:MOST]):
        try:
            file = found.open(i)
            picture = subject.preprocessing.picture(file)[None]
        except BadPicture as error:
            unreadable.append((name, str(error)))
            continue
        try:
            mask = None if masks is None else _mask(masks.get(name), file, subject.preprocessing)[None]
        except BadPicture as error:
            mask = unmasked.append(f"{name}: {error}")
        row, last = PictureBatch([name], [label_of(subject, name)], picture, mask), batches[-1] if batches else None
        alike = last and last.pictures.shape[1:] == picture.shape[1:] and (last.masks is None) == (mask is None)
        if last and alike and len(last.names) < BATCH:
            batches[-1] = _joined(last, row)
        else:
            batches.append(row)
    if not batches:
        why = f": {unreadable[0][0]}: {unreadable[0][1]}" if unreadable else "; name files, folders or patterns"
        raise WeftError(f"No picture can be read{why}.")
    return batches


def _joined(one: PictureBatch, other: PictureBatch) -> PictureBatch:
    masks = None if one.masks is None or other.masks is None else torch.cat([one.masks, other.masks])
    pictures = torch.cat([one.pictures, other.pictures])
    return PictureBatch(one.names + other.names, one.labels + other.labels, pictures, masks)


def label_of(subject: Subject, name: str) -> int:
    """The class that the folder of a picture names, which may itself have a / in it; -1: none."""
    folder = os.path.dirname(name.replace("\\", "/"))
    fitting = [c for c in subject.classes if f"/{folder}".endswith(f"/{c}")] if subject.per_picture else []
    return subject.classes.index(max(fitting, key=len)) if fitting else -1


def _mask(file: Path | None, picture: Any, preprocessing: Preprocessing) -> Tensor:
    """(h, w) bool: the mask of a picture, cut as the picture is; whatever is not 0, or not black, is foreground."""
    if file is None:
        raise BadPicture("there is none of the same name")
    values = read_raw(file, preprocessing.max_pixels).pixels  # of a palette the positions, not the colours
    foreground = np.any(values, axis=2) if values.ndim == 3 else values > 0
    cut = replace(preprocessing, channels=1, depth=8, mean=(0.0,), std=(1.0,), interpolation="nearest")
    return cut.picture(upright(255 * foreground.astype(np.uint8), header(picture)))[0] > 0


def find_masks(folder: str | os.PathLike[str], names: Iterable[str]) -> dict[str, Path]:
    """The masks of pictures: of the same name without ending and, where several have it, in the same folders.

    Raises where the folders do not tell whose mask it is.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeftError(f"{folder} is not a folder; --masks takes one with a mask for each picture, of the same name.")

    def fit(pair: tuple[str, Path]) -> int:
        """How many of the innermost folders of a picture and of a mask have the same names."""
        folders = [reversed(PurePath(path).parts[:-1]) for path in (pair[0], pair[1].relative_to(folder))]
        return len(list(takewhile(lambda two: two[0] == two[1], zip(*folders, strict=False))))

    files: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in PICTURE_ENDINGS:
            files[file.stem].append(file)
    pairs = [(name, file) for name in dict.fromkeys(names) for file in files[PurePath(name).stem]]
    found: dict[str, Path] = {}
    taken: dict[Path, str] = {}
    for _, alike in groupby(sorted(pairs, key=fit, reverse=True), key=fit):
        for name, file in [(name, file) for name, file in alike if name not in found and file not in taken]:
            if name in found:
                raise WeftError(f"{name} could have the mask {found[name]} or {file}; {LIKE_PICTURES}.")
            if file in taken:
                raise WeftError(f"The mask {file} could be that of {taken[file]} or {name}; {LIKE_PICTURES}.")
            found[name], taken[file] = file, name
    return found
