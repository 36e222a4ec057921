"""Objects of many pictures as columns, into which COCO, VOC and YOLO files are read.

`ObjectColumns` takes objects one by one, in any order. `finish` sorts them by picture, clips boxes to the picture and
leaves out what cannot be right. Whatever was wrong is kept in `faults`, for `weft check` to name.
"""

import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import area_of
from weft.data.read import OpenedPicture
from weft.data.sources.source import Names, Source, note_alike

LISTED = 1000  # faults of a kind that are named; all are counted
OUTSIDE = 1.0  # pixels that a box may reach over the edge without being mentioned
OUTSIDE_PART = 0.005  # the same where boxes are fractions of the picture
SMALLEST = 1.0  # pixels; narrower boxes are left out
SUSPECT = 0.1  # part of the boxes that must look wrong before all are suspected
UNKNOWN = -2


class Faults:
    """Mistakes in annotations: kind to picture to a few words that name object and number."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: dict[str, dict[str, str]] = {}

    def add(self, kind: str, name: str, words: str) -> None:
        self.counts[kind] += 1
        named = self.named.setdefault(kind, {})
        if name in named:
            if not named[name].endswith(" ..."):
                named[name] += " ..."
        elif len(named) < LISTED:
            named[name] = words


@dataclass
class Annotations:
    """Reads `Objects` by position, from columns: an object for each of a million boxes would fill the memory."""

    ends: np.ndarray  # (N,): where the objects of each picture end
    boxes: np.ndarray  # (M, 4) float32: left, top, right, bottom
    labels: np.ndarray  # (M,) int32
    crowd: np.ndarray  # (M,) bool
    area: np.ndarray  # (M,) float32, NaN where the file does not say
    numbers: np.ndarray  # (M,) int64: the annotation's id, or its line or place in the file
    shapes: Names | None  # (M,) JSON of COCO segmentations, "" where an object has none
    picture_sizes: np.ndarray  # (N, 2) int32, height and width; 0 where only the picture itself knows
    reader: Callable[[int], Any]  # pictures, for those whose size is not written down
    relative: bool  # boxes and shapes are fractions of the picture
    faults: Faults

    @property
    def has_shapes(self) -> bool:
        return self.shapes is not None

    def rows(self, index: int) -> slice:
        return slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))

    def __call__(self, index: int) -> Objects:
        rows = self.rows(index)
        size = self.size(index)
        boxes, labels, crowd = self.boxes[rows], self.labels[rows].astype(np.int64), self.crowd[rows]
        shapes = [self.shape(row) for row in range(rows.start, rows.stop)] if self.shapes is not None else []
        if self.relative:
            scale = np.array([size[1], size[0]], np.float64)
            boxes = (boxes * np.tile(scale, 2)).astype(np.float32)
            shapes = [[(np.reshape(part, (-1, 2)) * scale).ravel().tolist() for part in shape] for shape in shapes]
        shapes = [shape or _rectangle(box) for shape, box in zip(shapes, boxes, strict=True)] if shapes else []
        area = np.array([*map(self._area, self.area[rows], boxes, shapes or [None] * len(boxes))], np.float32)
        return Objects(boxes, labels, crowd, area, shapes, size)

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of a picture as it was annotated."""
        height, width = self.picture_sizes[index].tolist()
        if height and width:
            return height, width
        with OpenedPicture(self.reader(index), max_pixels=None) as opened:
            return opened.header.height, opened.header.width

    def shape(self, row: int) -> Any:
        assert self.shapes is not None
        written = self.shapes.raw(row)
        return json.loads(written) if written else None

    def sizes(self, positions: range) -> bytes:
        """Changes when an object changes."""
        digest = hashlib.blake2b(digest_size=16)
        for index in positions:
            rows = self.rows(index)
            for column in (self.boxes, self.labels, self.crowd):
                digest.update(column[rows].tobytes())
            if self.shapes is not None and rows.stop > rows.start:
                start = int(self.shapes.ends[rows.start - 1]) if rows.start else 0
                digest.update(self.shapes.buffer[start : int(self.shapes.ends[rows.stop - 1])])
        return digest.digest()

    def occurrence(self, classes: int) -> np.ndarray:
        """(N, classes) bool: which classes occur in a picture, crowds apart."""
        found = np.zeros((len(self.ends), classes), bool)
        picture = np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))
        found[picture[~self.crowd], self.labels[~self.crowd]] = True
        return found

    @staticmethod
    def _area(known: float, box: np.ndarray, shape: Any) -> float:
        if not math.isnan(known):
            return known
        return area_of(shape) if shape else float((box[2] - box[0]) * (box[3] - box[1]))


def box_source(
    source: str,
    layout: str,
    classes: list[str],
    names: Names,
    reader: Any,
    splits: list[str],
    targets: Annotations,
    notes: list[str],
) -> Source:
    """The source that COCO, VOC and YOLO data become."""
    return Source(
        root=source,
        layout=layout + (", with shapes" if targets.has_shapes else ""),
        classes=classes,
        names=names,
        labels=targets.occurrence(len(classes)),
        reader=reader,
        splits=np.array(splits, "<U5"),
        multilabel=True,
        notes=[*notes, *note_alike(classes)],
        task="detect",
        targets=targets,
    )


class ObjectColumns:
    """Objects on their way into columns. Pictures and classes go by whatever names their file gives them."""

    def __init__(self, *, relative: bool = False) -> None:
        self.relative, self.faults = relative, Faults()
        self.picture_keys: dict[Hashable, int] = {}
        self.class_keys: dict[Hashable, int] = {}
        self.pictures, self.labels, self.numbers = array("q"), array("q"), array("q")
        self.boxes, self.area = array("d"), array("d")
        self.crowd = bytearray()
        self.shapes: list[bytes] = []

    def add(
        self,
        picture: Hashable,
        label: Hashable,
        box: Sequence[float],
        *,
        number: int,
        crowd: bool = False,
        area: float = math.nan,
        shape: bytes = b"",
    ) -> None:
        """`box`: left, top, right, bottom; `shape`: JSON; `number` names the object."""
        left, top, right, bottom = map(float, box)
        at = self.picture_keys.setdefault(picture, len(self.picture_keys))
        kind = self.class_keys.setdefault(label, len(self.class_keys))
        # whatever can fail has been done: columns stay of one length
        self.boxes.extend((left, top, right, bottom))
        self.pictures.append(at)
        self.labels.append(kind)
        self.numbers.append(number)
        self.area.append(area)
        self.crowd.append(crowd)
        self.shapes.append(shape)

    def finish(
        self,
        names: Names,
        positions: Mapping[Any, int],
        classes: Mapping[Any, int],
        picture_sizes: np.ndarray,
        reader: Callable[[int], Any],
    ) -> Annotations:
        """`positions` in `names` of the pictures, -1 for one that is left out; `classes`: their numbers."""
        pictures = np.array([positions.get(key, UNKNOWN) for key in self.picture_keys], np.int64)
        pictures = pictures[np.array(self.pictures, np.int64)]
        labels = np.array([classes.get(key, UNKNOWN) for key in self.class_keys], np.int64)
        labels = labels[np.array(self.labels, np.int64)]
        known = self._known(names, pictures, labels, classes)
        boxes = np.array(self.boxes, np.float64).reshape(-1, 4)[known]
        kept, boxes = self._clean(names, pictures[known], known, boxes, picture_sizes)
        kept = kept[np.argsort(pictures[known][kept], kind="stable")]
        rows = known[kept]
        shapes = Names(self.shapes[i] for i in rows)
        shaped = np.diff(shapes.ends, prepend=0) > 0
        has_shapes = bool(shaped.any() and shaped.mean() >= 0.5)  # else boxes are what this set is about
        for i in rows[~shaped] if has_shapes else ():
            self._fault("no-shape", names[pictures[i]], i, "has a box and no shape")
        return Annotations(
            ends=np.cumsum(np.bincount(pictures[rows], minlength=len(names))),
            boxes=boxes[kept].astype(np.float32),
            labels=labels[rows].astype(np.int32),
            crowd=np.frombuffer(bytes(self.crowd), bool)[rows],
            area=np.array(self.area, np.float32)[rows],
            numbers=np.array(self.numbers, np.int64)[rows],
            shapes=shapes if has_shapes else None,
            picture_sizes=picture_sizes,
            reader=reader,
            relative=self.relative,
            faults=self.faults,
        )

    def repeats(self, row: int, picture: Hashable, label: Hashable, box: Sequence[float]) -> bool:
        """Whether an object is the one at `row` once more."""
        same = (self.picture_keys.get(picture), self.class_keys.get(label)) == (self.pictures[row], self.labels[row])
        return same and self.boxes[4 * row : 4 * row + 4] == array("d", box)

    def _known(self, names: Names, pictures: np.ndarray, labels: np.ndarray, classes: Mapping[Any, int]) -> np.ndarray:
        """Positions of objects whose picture and class are there."""
        keys = [_last(key) for key in self.picture_keys]
        for i in np.flatnonzero(pictures == UNKNOWN):
            self._fault("unknown-picture", f"image {keys[self.pictures[i]]}", i, "belongs to it")
        keys = [_last(key) for key in self.class_keys]
        unnamed = np.flatnonzero((pictures >= 0) & (labels == UNKNOWN))
        for i in unnamed:
            self._fault("unknown-class", names[pictures[i]], i, f"has the class {keys[self.labels[i]]}")
        used, named = ([key for key in map(_last, given) if type(key) is int] for given in (keys, classes))
        if len(unnamed) and used and named:
            above = max(used) == max(named) + 1 and min(used) > min(named)
            below = min(used) == min(named) - 1 and max(used) < max(named)
            if above or below:
                words = f"of objects are {min(used)} to {max(used)}, those with names {min(named)} to {max(named)}"
                self.faults.add("offset", "classes", f"{words}: one of the two seems to count from 1")
        return np.flatnonzero((pictures >= 0) & (labels >= 0))

    def _clean(
        self, names: Names, pictures: np.ndarray, rows: np.ndarray, boxes: np.ndarray, picture_sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which of the objects at `rows` stay, and their boxes (rows, 4), clipped."""
        edge = np.ones((len(boxes), 2)) if self.relative else picture_sizes[pictures, ::-1].astype(np.float64)
        edge[edge == 0] = np.inf  # width and height of the picture
        finite = np.logical_and.reduce(np.isfinite(boxes), axis=1)
        clipped = np.clip(np.where(finite[:, None], boxes, 0), 0, np.tile(edge, 2))
        sides = clipped[:, 2:] - clipped[:, :2]
        narrow = finite & ((sides < (0 if self.relative else SMALLEST)) | (sides <= 0)).any(axis=1)
        reach = np.abs(clipped - boxes) > (OUTSIDE_PART if self.relative else OUTSIDE)
        outside = finite & ~narrow & reach.any(axis=1)
        for kind, chosen in (("not-a-number", ~finite), ("no-area", narrow), ("outside", outside)):
            for i in np.flatnonzero(chosen):
                left, top, right, bottom = boxes[i]
                box = f"reaches from x {left:g}, y {top:g} to x {right:g}, y {bottom:g}"
                of = "" if self.relative or np.isinf(edge[i]).any() else f" of {edge[i][0]:g} x {edge[i][1]:g} pixels"
                self._fault(kind, names[pictures[i]], rows[i], box + of)
        self._suspect(boxes[finite], edge[finite], int(outside.sum()))
        return np.flatnonzero(finite & ~narrow), clipped

    def _suspect(self, boxes: np.ndarray, edge: np.ndarray, outside: int) -> None:
        """Corners read as left, top, width and height, or the other way round."""
        width_height = boxes[:, 2:] - boxes[:, :2]
        if not len(boxes):
            return
        as_corners = ((width_height > boxes[:, :2]) & (width_height <= edge + OUTSIDE)).all(axis=1)
        if outside >= SUSPECT * len(boxes) and as_corners.mean() >= 1 - SUSPECT / 10:
            words = "reach beyond their pictures, but would fit as left, top, right, bottom"
            self.faults.add("mixed-up", f"{outside} of {len(boxes)} boxes", words)
        negative = (width_height < 0).any(axis=1)
        if negative.sum() >= SUSPECT * len(boxes):
            words = "end before they begin; are they left, top, width, height?"
            self.faults.add("mixed-up", f"{negative.sum()} of {len(boxes)} boxes", words)

    def _fault(self, kind: str, name: str, i: Any, words: str) -> None:
        self.faults.add(kind, name, f"object {self.numbers[i]} {words}")


def _last(key: Any) -> Any:
    """The name of a picture or a class in its file: keys of several files have the file's number before it."""
    return key[-1] if isinstance(key, tuple) else key


def _rectangle(box: np.ndarray) -> list[list[float]]:
    """A box as a polygon, for an object without a shape among others that have one."""
    left, top, right, bottom = box.tolist()
    return [[left, top, right, top, right, bottom, left, bottom]]
