"""Boxes as YOLO writes them: a text file for each picture, a line for each object, in fractions of the picture.

| Layout | |
|---|---|
| `images/train/1.jpg`, `labels/train/1.txt` | splits inside; or none |
| `train/images/1.jpg`, `train/labels/1.txt` | splits outside |
| `1.jpg`, `1.txt` | side by side, with `classes.txt`, `obj.names` or a YAML file that has `names` |

A line is `class x y width height`, x and y of the middle, or `class x y x y x y ...`, a polygon. A picture without a
file, or with an empty one, has no objects. Names of classes come from `data.yaml`, `classes.txt` or `obj.names`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.data.boxes.annotations import ObjectColumns, box_source
from weft.data.sources.folders import list_folder
from weft.data.sources.source import PICTURE_ENDINGS, Files, Names, Source, ending, natural, split_of
from weft.documents import parse_yaml
from weft.errors import WeftError
from weft.words import listed

MOST_PART = 2.0  # of a picture: what is larger was written in pixels
MAX_TEXT = 10_000_000  # bytes of one file
NAME_FILES = ("classes.txt", "obj.names", "predefined_classes.txt")


class LabelFolders(NamedTuple):
    """Folders relative to the root."""

    pictures: str
    labels: str
    split: str


def recognise(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in (".yaml", ".yml") and next(_places(path.parent), None) is not None
    return path.is_dir() and next(_places(path), None) is not None


def open_yolo(source: str) -> Source:
    root = Path(source).expanduser()
    root = root.parent if root.is_file() else root
    objects = ObjectColumns(relative=True)
    paths: list[str] = []
    splits: list[str] = []
    for place in _places(root):
        texts = {name.removesuffix(".txt") for name in _files(root / place.labels) if name.endswith(".txt")}
        for name in sorted(_files(root / place.pictures), key=natural):
            if ending(name) in PICTURE_ENDINGS:
                stem = os.path.splitext(name)[0]
                if stem in texts:
                    texts.remove(stem)
                    _read(objects, len(paths), root, os.path.join(place.labels, f"{stem}.txt"))
                paths.append(os.path.join(place.pictures, name))
                splits.append(place.split)
        for stem in sorted(texts - {os.path.splitext(name)[0] for name in NAME_FILES}, key=natural):
            objects.faults.add("missing-picture", os.path.join(place.labels, f"{stem}.txt"), "has no picture")
    if not paths:
        raise WeftError(f"{source} has no pictures beside YOLO's text files; expected images/ beside labels/.")
    notes: list[str] = []
    classes = _classes(root, objects, notes)
    names = Names(paths)
    reader = Files(root, names)
    numbers = {i: i for i in range(len(classes))}
    unknown_sizes = np.zeros((len(paths), 2), np.int32)
    targets = objects.finish(names, {i: i for i in range(len(paths))}, numbers, unknown_sizes, reader)
    under = listed([split for split in ("train", "val", "test") if split in splits])
    layout = "YOLO boxes" + (f", {under}" if under else "")
    return box_source(source, layout, classes, names, reader, splits, targets, notes)


def _places(root: Path) -> Iterator[LabelFolders]:
    """Pairs of a folder with pictures and one with text files."""
    folders = _folders(root)
    if {"images", "labels"} <= folders:
        inner = sorted(_folders(root / "images") & _folders(root / "labels"))
        pairs = [LabelFolders(f"images/{name}", f"labels/{name}", split_of(name)) for name in inner]
        pairs.append(LabelFolders("images", "labels", ""))
    else:
        pairs = [
            LabelFolders(f"{name}/images", f"{name}/labels", split_of(name))
            for name in sorted(folders)
            if split_of(name)
        ]
        if _name_files(root):
            pairs += [LabelFolders(name, name, split_of(name)) for name in ("", *sorted(folders))]
    for pair in pairs:
        pictures = any(ending(name) in PICTURE_ENDINGS for name in _files(root / pair.pictures))
        texts = [name for name in _files(root / pair.labels) if ending(name) == ".txt" and name not in NAME_FILES]
        if pictures and any(_is_label(root / pair.labels / name) for name in sorted(texts)[:20]):
            yield pair


def _folders(folder: Path) -> set[str]:
    return set(list_folder(folder).folders) if folder.is_dir() else set()


def _files(folder: Path) -> list[str]:
    return list_folder(folder).files if folder.is_dir() else []


def _is_label(file: Path) -> bool:
    """Whether a text file begins as YOLO's do: no captions, no lists of names."""
    with file.open("rb") as stream:
        first = stream.read(1 << 16).split(b"\n")[0]
    try:
        return bool(_object([*map(float, first.split())][1:]))
    except ValueError:
        return False


def _name_files(root: Path) -> list[Path]:
    """Where names of classes may be, the best first."""
    found = sorted((*root.glob("*.yaml"), *root.glob("*.yml")), key=lambda path: (path.stem != "data", path.name))
    return [
        *filter(Path.is_file, found),
        *(path for folder in (root, root / "labels") for name in NAME_FILES if (path := folder / name).is_file()),
    ]


def _classes(root: Path, objects: ObjectColumns, notes: list[str]) -> list[str]:
    for file in _name_files(root):
        if file.stat().st_size > MAX_TEXT:
            continue
        text = file.read_text("utf-8", "replace")
        if file.suffix in (".txt", ".names"):
            return [line.strip() for line in text.splitlines() if line.strip()]
        try:
            content = parse_yaml(text, file)
        except WeftError as error:
            raise WeftError(f"{error} Expected a line such as names: [cat, dog].") from None
        found = content.get("names") if isinstance(content, dict) else None
        names = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        if not all(isinstance(name, str | int | float) for name in names):  # YAML can make a short file very large
            raise WeftError(f"{file}: names must be a list of class names, or a mapping from numbers to names.")
        if isinstance(found, dict) and all(type(key) is int and 0 <= key < 100_000 for key in found):
            return [str(found.get(i, i)) for i in range(max(found, default=-1) + 1)]
        if isinstance(found, list):
            return [str(name) for name in found]
    used = [key for key in objects.class_keys if isinstance(key, int) and 0 <= key < 100_000]
    notes.append("No file names the classes (data.yaml, classes.txt): they are named by their numbers.")
    return [str(i) for i in range(max(used, default=-1) + 1)]


def _read(objects: ObjectColumns, picture: int, root: Path, name: str) -> None:
    file = root / name
    if file.stat().st_size > MAX_TEXT:
        objects.faults.add("malformed", name, f"is larger than {MAX_TEXT // 10**6} MB")
        return
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            label, *values = map(float, line.split())
            if max(values, default=0.0) > MOST_PART:
                words = f"line {number} is in pixels; numbers must be fractions from 0 to 1"
                objects.faults.add("malformed", name, words)
                continue
            box, shape = _object(values)
            objects.add(picture, int(label) if label == int(label) else label, box, number=number, shape=shape)
        except (ValueError, OverflowError):
            objects.faults.add("malformed", name, f"line {number} is {line.strip()[:60]!r}")


def _object(values: list[float]) -> tuple[list[float], bytes]:
    """Left, top, right, bottom and, of a polygon, its JSON."""
    if len(values) == 4:
        x, y, width, height = values
        return [x - width / 2, y - height / 2, x + width / 2, y + height / 2], b""
    if len(values) < 6 or len(values) % 2:
        raise ValueError
    box = [min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])]
    return box, json.dumps([values]).encode()
