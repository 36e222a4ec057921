"""Boxes as Pascal VOC writes them: an XML file for each picture.

| Layout | Splits |
|---|---|
| `Annotations/*.xml` and `JPEGImages/`, also inside `VOC2007/`, `VOC2012/`, `VOCdevkit/` | `ImageSets/Main/*.txt` |
| XML beside pictures, or in `annotations/` beside `images/` | folders called train, val, test; else none |

Objects marked `difficult` are not learned and not counted, as crowds are: so does VOC's own evaluation.
"""

import posixpath
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from weft.data.boxes.annotations import ObjectColumns, box_source
from weft.data.sources.folders import list_folder
from weft.data.sources.source import PICTURE_ENDINGS, Files, Names, Source, ending, natural, split_of
from weft.errors import WeftError
from weft.words import listed, many

MAX_XML = 10_000_000  # bytes
ANNOTATIONS = ("Annotations", "annotations", "")  # folders of the XML files, and of the pictures
PICTURES = ("JPEGImages", "images", "Images", "")


def recognise(path: Path) -> bool:
    return path.is_dir() and next(_places(path), None) is not None


def open_voc(source: str) -> Source:
    root = Path(source).expanduser()
    objects, notes = ObjectColumns(), list[str]()
    paths: list[str] = []
    sizes, splits, positions = [], [], {}
    for base, split in _places(root):
        folder = next(base / name for name in ANNOTATIONS if _has_xml(base / name))
        pictures = _pictures(base)
        lists = _lists(base)
        unlisted = 0
        for file in sorted(_xml_files(folder), key=lambda file: natural(file.name)):
            if lists and file.stem not in lists:
                unlisted += 1
                continue
            name = posixpath.relpath(file, root)
            tree = _parse(file)
            if isinstance(tree, str):
                objects.faults.add("malformed", name, tree)
                continue
            written = tree.findtext("filename", "").replace("\\", "/").rpartition("/")[2]
            path = pictures.get(file.stem) or pictures.get(written)
            if path is None:
                objects.faults.add("missing-picture", name, f"describes {written or file.stem}, which does not exist")
                continue
            positions[name] = len(paths)
            paths.append(posixpath.relpath(path, root))
            sizes.append([_whole(tree.findtext(f"size/{side}")) for side in ("height", "width")])
            splits.append(lists.get(file.stem, split))
            _add(objects, name, tree)
        if unlisted:
            notes.append(f"Left out {many(unlisted, 'XML file')} in {folder} that no list of ImageSets/Main names.")
    if not paths:
        raise WeftError(f"{source} has no pictures with XML files of boxes; expected Annotations/ beside JPEGImages/.")
    _from_zero(objects)
    classes = sorted((str(key) for key in objects.class_keys), key=natural)
    names, numbers = Names(paths), {name: i for i, name in enumerate(classes)}
    reader = Files(root, names)
    targets = objects.finish(names, positions, numbers, np.array(sizes, np.int32), reader)
    under = listed([split for split in ("train", "val", "test") if split in splits])
    layout = "VOC boxes" + (f", {under}" if under else "")
    return box_source(source, layout, classes, names, reader, splits, targets, notes)


def _places(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders that hold XML files and pictures, and their splits."""
    folders = sorted(list_folder(root).folders)
    inner = [(root / name, split_of(name)) for name in folders if split_of(name)]
    inner += [(root / name, "") for name in folders if name.startswith("VOC")]
    inner += [(root / "VOCdevkit" / f"VOC{year}", "") for year in range(2005, 2013)]
    for place, split in [(root, ""), *inner]:
        if any(_has_xml(place / name) for name in ANNOTATIONS):
            yield place, split


def _has_xml(folder: Path) -> bool:
    """Whether there are XML files, and one of the first is about objects."""
    return any(map(_is_annotation, islice(_xml_files(folder), 20)))


def _xml_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*.xml") if path.is_file())


def _is_annotation(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"<annotation" in stream.read(4096)
    except OSError:
        return False


def _pictures(base: Path) -> dict[str, Path]:
    """Stem and name to path."""
    found: dict[str, Path] = {}
    for folder in (base / name for name in PICTURES):
        for name in sorted(list_folder(folder).files) if folder.is_dir() else ():
            if ending(name) in PICTURE_ENDINGS:
                found.setdefault(name, folder / name)
                found.setdefault(PurePath(name).stem, folder / name)
    return found


def _lists(base: Path) -> dict[str, str]:
    """Stem to split. Lists of one class, `dog_train.txt`, do not count, nor does trainval where train is there."""
    found: dict[str, str] = {}
    for name, split in (("trainval", "train"), ("train", "train"), ("val", "val"), ("test", "test")):
        file = base / "ImageSets" / "Main" / f"{name}.txt"
        if file.is_file():
            found.update(
                (line.split()[0], split) for line in file.read_text("utf-8", "replace").splitlines() if line.strip()
            )
    return found


class _NoDoctype(ElementTree.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """Called before any entity is declared: they could name other files, or grow without end."""
        raise ValueError("a document type, which no annotation needs")


def _parse(file: Path) -> Any:
    """The tree, or a reason why there is none."""
    try:
        if file.stat().st_size > MAX_XML:
            return f"is larger than {MAX_XML // 10**6} MB"
        parser = ElementTree.XMLParser(target=_NoDoctype())
        parser.feed(file.read_bytes())
        return parser.close()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        return f"is not an XML file of boxes: {' '.join(str(error).split())}"


def _add(objects: ObjectColumns, name: str, tree: Any) -> None:
    for number, entry in enumerate(tree.iterfind("object"), 1):
        label = (entry.findtext("name") or "").strip()
        corners = [entry.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
        try:
            box = [float(corner) for corner in corners]
        except (TypeError, ValueError):
            box = None
        if box is None or not label:
            objects.faults.add("malformed", name, f"object {number} has the name {label!r} and the box {corners}")
            continue
        objects.add(name, label, box, number=number, crowd=_whole(entry.findtext("difficult")) > 0)


def _from_zero(objects: ObjectColumns) -> None:
    """VOC counts pixels from 1 and includes the last one; files in which a box begins at 0 count edges from 0."""
    boxes = np.frombuffer(objects.boxes, np.float64).reshape(-1, 4)
    if len(boxes) and not (boxes[:, :2] < 1).any():
        boxes[:, :2] -= 1


def _whole(text: str | None) -> int:
    try:
        return max(0, min(int(float(text or 0)), 1 << 30))
    except (ValueError, OverflowError):
        return 0
