"""Pictures with boxes around objects, and maybe their shapes: COCO's JSON here, `voc` and `yolo` beside it.

| Where | What is looked for |
|---|---|
| a `.json` file | its pictures beside it, in a folder called as its split, in `images/` or `data/`, or one level up |
| a folder | `annotations/instances_train2017.json`, `instances_val.json`, `train/_annotations.coco.json`, any one file |
"""

import json
import math
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import voc, yolo
from weft.data.annotations import Gathering, box_source
from weft.data.read import BadPicture
from weft.data.shapes import box_of, draw
from weft.data.sources import Files, Names, Source, listed, natural, some, split_of
from weft.data.tables import _missing as missing_files
from weft.errors import WeftError

MAX_JSON = 8_000_000_000  # bytes; the largest published set has 5
NOT_OBJECTS = ("captions", "person_keypoints", "panoptic", "stuff", "image_info")  # COCO's other files
WINDOW = 1 << 16  # bytes of a file that are looked at to recognise it

Key = tuple[int, Any]  # the file's number, and an id in it


def recognise(path: Path) -> str:
    """ "coco", "voc" or "yolo" where `path` holds boxes, else nothing. Looks at names and a few kilobytes."""
    if path.suffix.lower() == ".json" and path.is_file():
        return "coco" if _has_boxes(path) else ""
    if path.is_dir() and _coco_files(path):
        return "coco"
    return "voc" if voc.recognise(path) else "yolo" if yolo.recognise(path) else ""


def open_boxes(source: str, *, task: str = "auto") -> Source:
    """COCO, VOC or YOLO data, whichever it is."""
    path = Path(source).expanduser()
    kind = recognise(path) or ("coco" if path.suffix.lower() == ".json" else "")
    if not kind:
        raise WeftError(
            f"{source} holds no boxes that Weft finds: expected a COCO JSON file, VOC's Annotations/*.xml, or YOLO's "
            "labels/ beside images/."
        )
    return {"coco": open_coco, "voc": voc.open_voc, "yolo": yolo.open_yolo}[kind](source)


def open_coco(source: str) -> Source:
    path = Path(source).expanduser()
    files = [path] if path.is_file() else _coco_files(path)
    if not files:
        raise WeftError(f"{source} holds no COCO JSON file with boxes.")
    reading = _Reading(source)
    for file in _by_split(source, files) if path.is_dir() else files:
        reading.read(file, split="" if path.is_file() else _split(file))
    return reading.finish(path if path.is_dir() else None, files)


class _Reading:
    """What the files of a set hold, before it is put together."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.objects = Gathering()
        self.faults = self.objects.faults
        self.files: list[Path] = []
        self.splits: list[str] = []
        self.pictures: list[dict[Any, tuple[str, int, int]]] = []  # of each file: id to name, height and width
        self.categories: list[dict[Any, str]] = []  # id to name

    def read(self, file: Path, split: str) -> None:
        self.number = len(self.files)
        self.files.append(file)
        self.splits.append(split)
        self.pictures.append({})
        self.categories.append({})
        self.ids: dict[Any, tuple[Any, ...]] = {}
        take = {"images": self._picture, "annotations": self._object, "categories": self._category}
        for kind, record in _records(file):
            try:
                take[kind](record)
            except (AttributeError, BadPicture, KeyError, TypeError, ValueError, OverflowError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
                identity = record.get("id") if isinstance(record, dict) else None
                self.faults.add("malformed", f"{file.name} {kind} {identity}", what)
        for kind, found in (("images", self.pictures), ("categories", self.categories)):
            if not found[-1]:
                raise WeftError(f"{file} has no {kind}; expected COCO's lists images, annotations and categories.")

    def finish(self, root: Path | None, given: list[Path]) -> Source:
        folders = [_picture_folder(f, [name for name, _, _ in p.values()]) for f, p in zip(self.files, self.pictures)]
        root = root or folders[0]
        positions, paths, sizes, splits = self._place(root, folders)
        classes, numbers, notes = self._classes()
        names = Names(paths)
        reader = Files(root, names)
        size_column = np.array(sizes, np.int32).reshape(-1, 2)
        targets = self.objects.finish(names, positions, numbers, size_column, reader)
        files = listed([posixpath.relpath(file, root) if file.is_relative_to(root) else file.name for file in given])
        return box_source(self.source, f"COCO boxes in {files}", classes, names, reader, splits, targets, notes)

    def _picture(self, record: dict[str, Any]) -> None:
        name = str(record["file_name"]).replace("\\", "/")
        size = [int(record.get(side) or 0) for side in ("height", "width")]
        if min(size) < 0 or max(size) >= 1 << 31:
            raise ValueError(f"a size of {size[1]} x {size[0]}")
        found = self.pictures[-1].setdefault(record["id"], (name, *size))
        if found != (name, *size):
            self.faults.add("duplicate-id", name, f"has the id {record['id']} of {found[0]} and is left out")

    def _category(self, record: dict[str, Any]) -> None:
        name = str(record["name"])
        if name in self.categories[-1].values():
            name = f"{name} {record['id']}"
        if self.categories[-1].setdefault(record["id"], name) != name:
            self.faults.add("duplicate-id", name, f"has the category id of {self.categories[-1][record['id']]}")

    def _object(self, record: dict[str, Any]) -> None:
        picture, category = (self.number, record["image_id"]), (self.number, record["category_id"])
        identity = record.get("id", len(self.objects.numbers))
        shape = self._shape(record.get("segmentation"), picture, identity)
        box = record.get("bbox") or _around(shape)
        left, top, width, height = map(float, box)
        same = (picture, category, *box)
        if self.ids.setdefault(identity, same) is not same:
            self.faults.add("duplicate-id", self._name(picture), f"has another object with the id {identity}")
            if self.ids[identity] == same:
                return
        area = record.get("area")
        self.objects.add(
            picture,
            category,
            (left, top, left + width, top + height),
            number=identity if isinstance(identity, int) else len(self.objects.numbers),
            crowd=bool(record.get("iscrowd")),
            area=float(area) if area and not math.isinf(float(area)) else math.nan,
            shape=json.dumps(shape, separators=(",", ":")).encode() if shape else b"",
        )

    def _shape(self, shape: Any, picture: Key, identity: Any) -> Any:
        """Run lengths as they are; polygons without the parts that have no inside."""
        if isinstance(shape, dict):
            return {"size": shape["size"], "counts": shape["counts"]}
        parts = shape or []
        if parts and not isinstance(parts[0], list):
            parts = [parts]
        good = [part for part in parts if len(part) >= 6 and len(part) % 2 == 0]
        if len(good) < len(parts):
            points = min(len(part) for part in parts if len(part) < 6 or len(part) % 2)
            words = f"object {identity} has a polygon of {points} numbers, which are {points / 2:g} points"
            self.faults.add("few-points", self._name(picture), words)
        return good

    def _name(self, picture: Key) -> str:
        return self.pictures[-1].get(picture[1], (f"image {picture[1]}",))[0]

    def _place(self, root: Path, folders: list[Path]) -> tuple[dict[Key, int], list[str], list[Any], list[str]]:
        """Positions of pictures by their keys, -1 for those that are not there; and names, sizes and splits."""
        positions: dict[Key, int] = {}
        paths: list[str] = []
        sizes, splits, place = [], [], {}
        for number, (folder, pictures) in enumerate(zip(folders, self.pictures, strict=True)):
            prefix = os.path.relpath(folder, root)
            there = {key: posixpath.normpath(posixpath.join(prefix, name)) for key, (name, _, _) in pictures.items()}
            missing = missing_files(root, list(there.values()))
            for key, path in there.items():
                if path in missing or path.startswith(("../", "/")):
                    self.faults.add("missing-picture", path, "is no file in that folder")
                    positions[number, key] = -1
                    continue
                if path in place:
                    first = place[path]
                    kind = "double-picture" if splits[first] == self.splits[number] else "split-picture"
                    self.faults.add(kind, path, f"is listed again as image {key} of {self.files[number].name}")
                positions[number, key] = place.setdefault(path, len(paths))
                if place[path] == len(paths):
                    paths.append(path)
                    sizes.append(pictures[key][1:])
                    splits.append(self.splits[number])
        if not paths:
            wanted = some([name for name, _, _ in self.pictures[0].values()], 2)
            raise WeftError(
                f"{self.files[0]}: none of its pictures is there, such as {wanted}; looked in {folders[0]}."
            )
        return positions, paths, sizes, splits

    def _classes(self) -> tuple[list[str], dict[Key, int], list[str]]:
        """Classes in the order of their ids, first file first, and the number of each category of each file."""
        classes: dict[str, int] = {}
        numbers: dict[Key, int] = {}
        for number, categories in enumerate(self.categories):
            for identity in sorted(categories, key=lambda identity: natural(str(identity))):
                numbers[number, identity] = classes.setdefault(categories[identity], len(classes))
        notes = []
        ids = [identity for identity in self.categories[0] if isinstance(identity, int)]
        if ids and max(ids) - min(ids) >= len(ids):
            notes.append(f"The {len(ids)} category ids from {min(ids)} to {max(ids)} have gaps; classes count without.")
        return list(classes), numbers, notes


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """("images", {...}), ("annotations", {...}), ... one at a time, so that a large file is never all objects at once."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise WeftError(f"{path} has more than {MAX_JSON // 10**9} GB; split it.")
        text = path.read_text(encoding="utf-8-sig")
        yield from _parsed(text)
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeftError):
            raise
        raise WeftError(f"{path} is no COCO JSON file: {' '.join(str(error).split())}.") from None


def _parsed(text: str) -> Iterator[tuple[str, Any]]:
    decode = json.JSONDecoder().raw_decode
    blank = re.compile(r"[ \t\r\n]*")

    def after(position: int, letters: str) -> tuple[str, int]:
        """The next letter, which must be one of `letters`, and the position of what follows it."""
        position = blank.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[position : position + 1] not in [*letters]:
            found = text[position : position + 1] or "the end"
            raise ValueError(f"expected {' or '.join(letters)} at letter {position}, found {found}")
        return text[position], blank.match(text, position + 1).end()  # pyright: ignore[reportOptionalMemberAccess]

    letter, at = after(0, "{")
    while letter != "}":
        key, at = decode(text, at)
        _, at = after(at, ":")
        if key not in ("images", "annotations", "categories") or text[at : at + 1] != "[":
            _, at = decode(text, at)
        else:
            letter, at = after(at, "[")
            if text[at : at + 1] == "]":
                letter, at = "]", at + 1
            while letter != "]":
                record, at = decode(text, at)
                letter, at = after(at, ",]")
                yield key, record
        letter, at = after(at, ",}")


def _around(shape: Any) -> list[float]:
    """Left, top, width and height of a shape that has no box."""
    if not shape:
        raise ValueError("neither a box nor a shape")
    if isinstance(shape, dict):
        left, top, right, bottom = box_of(draw(shape, *shape["size"])).tolist()
    else:
        points = np.concatenate([np.reshape(part, (-1, 2)) for part in shape])
        (left, top), (right, bottom) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    return [left, top, right - left, bottom - top]


def _coco_files(folder: Path) -> list[Path]:
    """COCO's files with boxes in a folder, its annotations/ and its split folders."""
    inner = [folder / name for name in _folders(folder) if split_of(name) or name.lower() in ("annotations", "labels")]
    found = [path for place in (folder, *inner) for path in sorted(place.glob("*.json")) if path.is_file()]
    return [path for path in found if not path.name.startswith((".", *NOT_OBJECTS)) and _has_boxes(path)]


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return []


def _has_boxes(path: Path) -> bool:
    """Whether a JSON file seems to hold objects with boxes or shapes, by the look of a few windows."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for start in sorted({max(0, (size - WINDOW) * i // 8) for i in range(9)}, reverse=True):
                file.seek(start)
                window = file.read(WINDOW)
                if b'"image_id"' in window and (b'"bbox"' in window or b'"segmentation"' in window):
                    return True
    except OSError:
        pass
    return False


def _split(file: Path) -> str:
    """By the file's name, `instances_train2017.json`, else by its folder's, `valid/_annotations.coco.json`."""
    words = [*re.split(r"[_.\- ]+", file.stem)[::-1], file.parent.name]
    return next(filter(None, map(split_of, words)), "")


def _by_split(source: str, files: list[Path]) -> list[Path]:
    """At most one file for each split."""
    found: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: not file.name.startswith("instances")):
        split = _split(file)
        if split in found and found[split].name.startswith("instances") == file.name.startswith("instances"):
            where = f"for {split}" if split else "which do not say their split"
            raise WeftError(f"{source} has {found[split].name} and {file.name}, both {where}; give one of the files.")
        found.setdefault(split, file)
    if len(found) > 1:
        found.pop("", None)
    return [found[split] for split in ("train", "val", "test", "") if split in found]


def _picture_folder(file: Path, names: list[str]) -> Path:
    """Of the usual places the one that holds most of a sample of the pictures."""
    words = [file.stem, *re.split(r"[_. ]+", file.stem)[::-1]]
    inside = ["", *(word for word in words if word), *(f"images/{word}" for word in words if word), "images", "data"]
    places = [base / place for base in (file.parent, file.parent.parent) for place in inside]
    sample = names[:: max(1, len(names) // 16)]
    return max(places, key=lambda place: sum(os.path.isfile(place / name) for name in sample))


def _named(open_set: Callable[[str], Source]) -> Callable[[str, Path], Source]:
    def read(given: str, root: Path) -> Source:
        source = open_set(str(root))
        source.root = given
        return source

    return read


BOX_SETS = {"coco": _named(open_coco), "voc-detect": _named(voc.open_voc)}  # NAME:ROOT
