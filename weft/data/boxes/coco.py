"""Pictures with boxes around objects, and maybe their shapes: COCO's JSON here, `voc` and `yolo` beside it.

| What is given | What is looked for |
|---|---|
| a `.json` file | its pictures beside it, in a folder called as its split, in `images/` or `data/`, or one level up |
| a folder | `annotations/instances_train2017.json`, `train/_annotations.coco.json`, JSON beside folders of pictures |
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

from weft.data.boxes import voc, yolo
from weft.data.boxes.annotations import ObjectColumns, box_source
from weft.data.boxes.shapes import extent
from weft.data.read import BadPicture
from weft.data.sources.folders import list_folder
from weft.data.sources.source import Files, Names, Source, natural, split_of
from weft.data.sources.tables import missing_files
from weft.errors import WeftError
from weft.words import listed, some

MAX_JSON = 8_000_000_000  # bytes; the largest published set has 5
OTHER_FILES = ("captions", "person_keypoints", "panoptic", "stuff", "image_info")  # of COCO, beside instances
WINDOW = 1 << 16  # bytes of a file that are looked at to recognise it
EMPTY = re.compile(rb'"annotations"\s*:\s*\[\s*\]')  # of pictures in which there is nothing to find

EXPECTED = {  # of a member of each list
    "images": "id, file_name, and height and width as whole numbers",
    "annotations": "image_id, category_id, and a bbox of four numbers or a segmentation",
    "categories": "id and name",
}

_compact = json.JSONEncoder(separators=(",", ":")).encode
Key = tuple[int, Any]  # the file's number, and an id in it


def recognise(path: Path) -> str:
    """ "coco", "voc" or "yolo" where `path` holds boxes, else nothing. Looks at names and a few kilobytes."""
    if path.is_file() and path.suffix.lower() == ".json":
        return "coco" if _has_boxes(path) else ""
    if path.is_dir() and _coco_files(path):
        return "coco"
    return "voc" if voc.recognise(path) else "yolo" if yolo.recognise(path) else ""


def open_boxes(source: str) -> Source:
    """COCO, VOC or YOLO data, whichever it is."""
    path = Path(source).expanduser()
    kind = recognise(path) or ("coco" if path.is_file() and path.suffix.lower() == ".json" else "")
    if not kind:
        expected = "a COCO JSON file, VOC's Annotations/ beside JPEGImages/, or YOLO's labels/ beside images/"
        raise WeftError(f"Weft finds no boxes in {source}; expected {expected}.")
    return {"coco": open_coco, "voc": voc.open_voc, "yolo": yolo.open_yolo}[kind](source)


def open_coco(source: str) -> Source:
    """A COCO JSON file, or a folder with one for each split."""
    path = Path(source).expanduser()
    if path.is_file():
        return CocoReader(source, {"": path}).finish(None)
    files = _coco_files(path)
    if not files:
        raise WeftError(f"{source} and its folders annotations, train and val hold no COCO JSON file with boxes.")
    return CocoReader(source, _by_split(source, files)).finish(path)


class CocoReader:
    """Reads the files of a set, one for each split, and puts them together."""

    def __init__(self, source: str, files: dict[str, Path]) -> None:
        self.source = source
        self.objects = ObjectColumns()
        self.faults = self.objects.faults
        self.splits, self.files = list(files), list(files.values())
        self.pictures: list[dict[Any, tuple[str, int, int]]] = []  # of each file: id to name, height and width
        self.categories: list[dict[Any, str]] = []  # of each file: id to name
        for file in self.files:
            self._read(file)

    def finish(self, root: Path | None) -> Source:
        """`root`: what names of pictures count from; else their folder."""
        names = [[name for name, _, _ in pictures.values()] for pictures in self.pictures]
        folders = [*map(_picture_folder, self.files, names)]
        root = root or folders[0]
        positions, paths, sizes, splits = self._place(root, folders)
        classes, numbers, notes = self._classes()
        names = Names(paths)
        reader = Files(root, names)
        targets = self.objects.finish(names, positions, numbers, np.array(sizes, np.int32), reader)
        layout = f"COCO boxes in {listed([file.name for file in self.files])}"
        return box_source(self.source, layout, classes, names, reader, splits, targets, notes)

    def _read(self, file: Path) -> None:
        self.pictures.append({})
        self.categories.append({})
        self.rows: dict[Any, int] = {}  # of this file: an object's id to where it is kept
        take = {"images": self._picture, "annotations": self._object, "categories": self._category}
        for kind, record in _records(file):
            try:
                take[kind](record)
            except BadPicture as error:
                self._malformed(file, kind, record, str(error))
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
                self._malformed(file, kind, record, f"expected {EXPECTED[kind]}")
        for kind, found in (("images", self.pictures), ("categories", self.categories)):
            if not found[-1]:
                wrong = self.faults.named.get("malformed", {})
                why = next((f": {place} {why}" for place, why in wrong.items() if f", {kind}, " in place), "")
                expected = "; expected COCO's lists images, annotations and categories"
                raise WeftError(f"{file} has no {kind}{f' that can be used{why}' if why else expected}.")

    def _malformed(self, file: Path, kind: str, record: Any, why: str) -> None:
        named = f"id {record.get('id')}" if isinstance(record, dict) else _compact(record)[:40]
        self.faults.add("malformed", f"{file.name}, {kind}, {named}", why)

    def _picture(self, record: dict[str, Any]) -> None:
        name = str(record["file_name"]).replace("\\", "/")
        height, width = (int(record.get(side) or 0) for side in ("height", "width"))
        if min(height, width) < 0 or max(height, width) >= 1 << 31:
            raise BadPicture(f"has a size of {width} x {height}")
        first = self.pictures[-1].setdefault(record["id"], (name, height, width))
        if first[0] != name:
            self.faults.add("duplicate-id", name, f"repeats the image id {record['id']} of {first[0]} and is left out")

    def _category(self, record: dict[str, Any]) -> None:
        name, known = str(record["name"]), self.categories[-1]
        if record["id"] in known:
            first = known[record["id"]]
            self.faults.add("duplicate-id", name, f"repeats the category id {record['id']} of {first} and is left out")
            return
        if name in known.values():
            same = next(identity for identity, other in known.items() if other == name)
            words = f"is the name of the categories {same} and {record['id']}, of which the second is called"
            name = f"{name} {record['id']}"
            self.faults.add("same-name", str(record["name"]), f"{words} {name!r}")
        known[record["id"]] = name

    def _object(self, record: dict[str, Any]) -> None:
        row, file = len(self.objects.numbers), len(self.pictures)
        identity = record.get("id", row)
        picture, category = (file, record["image_id"]), (file, record["category_id"])
        shape = self._shape(record.get("segmentation"), picture, identity)
        left, top, right, bottom = _box(record.get("bbox"), shape)
        area = float(record.get("area") or math.nan)
        first = self.rows.setdefault(identity, row)
        if first != row:
            self.faults.add("duplicate-id", self._name(picture), f"has another object with the id {identity}")
            if self.objects.repeats(first, picture, category, (left, top, right, bottom)):
                return
        self.objects.add(
            picture,
            category,
            (left, top, right, bottom),
            number=identity if isinstance(identity, int) and abs(identity) < 1 << 62 else row,
            crowd=bool(record.get("iscrowd")),
            area=area if math.isfinite(area) and area > 0 else math.nan,  # nan: computed
            shape=_compact(shape).encode() if shape else b"",
        )

    def _shape(self, shape: Any, picture: Key, identity: Any) -> Any:
        """Run lengths as they are; polygons without parts that have no inside."""
        if isinstance(shape, dict):
            return {"size": shape["size"], "counts": shape["counts"]}
        parts = shape or []
        if parts and not isinstance(parts[0], list):
            parts = [parts]
        good = [part for part in parts if len(part) >= 6 and len(part) % 2 == 0]
        if len(good) < len(parts):
            numbers = min(len(part) for part in parts if len(part) < 6 or len(part) % 2)
            words = f"object {identity} has a polygon of {numbers} numbers: {numbers / 2:g} points"
            self.faults.add("few-points", self._name(picture), words)
        return good

    def _name(self, picture: Key) -> str:
        return self.pictures[-1].get(picture[1], (f"image {picture[1]}",))[0]

    def _place(self, root: Path, folders: list[Path]) -> tuple[dict[Key, int], list[str], list[Any], list[str]]:
        """Positions of pictures by their keys, -1 for those that are not there; and names, sizes and splits."""
        positions: dict[Key, int] = {}
        place: dict[str, int] = {}
        sizes: list[tuple[int, int]] = []
        splits: list[str] = []
        for number, (folder, pictures) in enumerate(zip(folders, self.pictures, strict=True), 1):
            inside = os.path.relpath(folder, root)
            paths = {key: posixpath.normpath(posixpath.join(inside, name)) for key, (name, _, _) in pictures.items()}
            missing = missing_files(root, list(paths.values()))
            split = self.splits[number - 1]
            for key, path in paths.items():
                if path in missing or path.startswith(("../", "/")):
                    self.faults.add("missing-picture", path, "is not there")
                    positions[number, key] = -1
                    continue
                at = positions[number, key] = place.setdefault(path, len(place))
                if at < len(sizes):
                    kind = "repeated-picture" if splits[at] == split else "split-picture"
                    self.faults.add(kind, path, f"is listed again in {self.files[number - 1].name}, as image {key}")
                    continue
                sizes.append(pictures[key][1:])
                splits.append(split)
        if not place:
            wanted = some([name for name, _, _ in self.pictures[0].values()], 2)
            raise WeftError(f"{self.files[0]}: none of its pictures ({wanted}) is in {folders[0]} or beside it.")
        return positions, list(place), sizes, splits

    def _classes(self) -> tuple[list[str], dict[Key, int], list[str]]:
        """Classes in the order of their ids, first file first, and the number of each category of each file."""
        classes: dict[str, int] = {}
        numbers: dict[Key, int] = {}
        for file, categories in enumerate(self.categories, 1):
            for identity in sorted(categories, key=lambda identity: natural(str(identity))):
                numbers[file, identity] = classes.setdefault(categories[identity], len(classes))
        ids = sorted(identity for identity in self.categories[0] if isinstance(identity, int)) or [0]
        note = f"The {len(ids)} category ids from {ids[0]} to {ids[-1]} have gaps; classes do not."
        return list(classes), numbers, [note] if ids[-1] - ids[0] >= len(ids) else []


def _box(box: Any, shape: Any) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a COCO box, or of a shape that has none."""
    if box:
        left, top, width, height = map(float, box)
        return left, top, left + width, top + height
    if not shape:
        raise BadPicture("has neither a box nor a shape")
    left, top, right, bottom = extent(shape).tolist()
    return left, top, right, bottom


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """("images", {...}), ("annotations", {...}), ... one at a time: a large file as objects would fill the memory."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise WeftError(f"{path} is larger than {MAX_JSON // 10**9} GB; split it.")
        yield from _parsed(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror}.") from None
    except WeftError:
        raise
    except (ValueError, RecursionError) as error:
        raise WeftError(f"{path} is not a COCO JSON file: {' '.join(str(error).split())}.") from None


def _parsed(text: str) -> Iterator[tuple[str, Any]]:
    """The members of the three lists of a JSON object, whatever their order."""
    decode = json.JSONDecoder().raw_decode
    blanks = re.compile(r"[ \t\r\n]*")

    def skip(at: int) -> int:
        return blanks.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]  it matches nothing, too

    def expect(at: int, *signs: str) -> tuple[str, int]:
        """The next sign, which must be one of `signs`, and where it goes on."""
        at = skip(at)
        if text[at : at + 1] not in signs:
            raise ValueError(f"expected {' or '.join(signs)} at character {at}, found {text[at : at + 1] or 'the end'}")
        return text[at], skip(at + 1)

    sign, at = expect(0, "{")
    while sign != "}":
        key, at = decode(text, at)
        _, at = expect(at, ":")
        if key not in ("images", "annotations", "categories") or text[at : at + 1] != "[":
            _, at = decode(text, at)
        else:
            sign, at = expect(at, "[")
            if text[at : at + 1] == "]":
                sign, at = expect(at, "]")
            while sign != "]":
                record, at = decode(text, at)
                yield key, record
                sign, at = expect(at, ",", "]")
        sign, at = expect(at, ",", "}")


def _coco_files(folder: Path) -> list[Path]:
    """COCO's files with boxes in a folder, its annotations/ and its split folders."""
    inner = [
        name for name in list_folder(folder).folders if split_of(name) or name.lower() in ("annotations", "labels")
    ]
    found = [
        folder / place / name for place in ("", *sorted(inner)) for name in sorted(list_folder(folder / place).files)
    ]
    found = [path for path in found if path.suffix.lower() == ".json" and not path.name.startswith(OTHER_FILES)]
    return [path for path in found if _has_boxes(path)]


def _has_boxes(path: Path) -> bool:
    """Whether a JSON file seems to hold objects with boxes or shapes, or says that there are none, by a few windows."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for start in sorted({max(0, (size - WINDOW) * i // 8) for i in range(9)}, reverse=True):
                file.seek(start)
                window = file.read(WINDOW)
                has_boxes = b'"image_id"' in window and (b'"bbox"' in window or b'"segmentation"' in window)
                if has_boxes or EMPTY.search(window):
                    return True
    except PermissionError as error:  # else pictures with boxes would be taken for pictures without
        raise WeftError(f"{path} cannot be read: {error.strerror}.") from None
    except OSError:
        pass
    return False


def _split(file: Path) -> str:
    """By the file's name, `instances_train2017.json`, else by its folder's, `valid/_annotations.coco.json`."""
    words = [*re.split(r"[_.\- ]+", file.stem)[::-1], file.parent.name]
    return next(filter(None, map(split_of, words)), "")


def _by_split(source: str, files: list[Path]) -> dict[str, Path]:
    """One file for each split; COCO's `instances` go before others."""
    found: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: not file.name.startswith("instances")):
        split = _split(file)
        first = found.setdefault(split, file)
        if first is not file and first.name.startswith("instances") == file.name.startswith("instances"):
            which = f"both for {split}" if split else "neither of which names a split"
            raise WeftError(f"{source} has {first.name} and {file.name}, {which}; give the file instead of the folder.")
    return {split: found[split] for split in ("train", "val", "test") if split in found} or found


def _picture_folder(file: Path, names: list[str]) -> Path:
    """Of the usual places the one that holds most of a sample of the pictures."""
    words = [word for word in (file.stem, *re.split(r"[_. ]+", file.stem)[::-1]) if word]
    inside = ["", *words, *(f"images/{word}" for word in words), "images", "data"]
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
