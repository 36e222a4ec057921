"""Checks the objects of a set before anything is trained on them, and names files, objects and numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.data.boxes.annotations import Annotations, Faults
from weft.data.boxes.shapes import extent
from weft.data.check.findings import Problem, Severity, quantiles
from weft.data.check.scan import LookLimits, look_at_all
from weft.data.read import BadPicture, OpenedPicture
from weft.data.sources.source import Source
from weft.words import many

NOTHING = "without objects: there is nothing to learn"
NO_OTHERS = ", and no others: there is nothing to learn"
LARGE = 8.0  # pixels; of smaller boxes nobody can say whether their shapes lie in them
FAULTS: dict[str, tuple[Severity, str, str]] = {  # kind to severity, what is counted, and what is said of it
    "mixed-up": ("error", "sign", "that corners and sides of boxes are mixed up; COCO expects x, y, width, height"),
    "offset": ("error", "sign", "that class numbers are off by one"),
    "split-picture": ("error", "picture", "listed in two splits; counted in the first"),
    "malformed": ("warning", "object", "that cannot be understood; left out"),
    "not-a-number": ("warning", "object", "whose box is not a number; left out"),
    "no-area": ("warning", "object", "with a box less than a pixel wide or high, or none at all; left out"),
    "outside": ("warning", "object", "with a box that reaches beyond the picture; clipped"),
    "unknown-class": ("warning", "object", "of a class that has no name; left out"),
    "unknown-picture": ("warning", "object", "of a picture that is not listed; left out"),
    "missing-picture": ("warning", "picture", "with objects that cannot be found; left out"),
    "duplicate-id": ("warning", "id", "given twice; the same object counts once"),
    "repeated-picture": ("warning", "picture", "listed twice; counted once, with all objects"),
    "same-name": ("warning", "name", "of two categories or more, which count as different classes; merge them if not"),
    "few-points": ("warning", "polygon", "of fewer than three points; left out"),
    "no-shape": ("warning", "object", "without a shape among others that have one; the box is taken for it"),
}


@dataclass
class BoxFindings:
    problems: list[Problem] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)  # of each class, without crowds, in the pictures looked at
    sizes: dict[str, float] = field(default_factory=dict)  # quantiles of the root of objects' areas, in pixels
    parts: dict[str, float] = field(default_factory=dict)  # and of the root of boxes' areas over the pictures'
    bad: dict[str, str] = field(default_factory=dict)  # name of the picture to a reason: to be left out of training
    looked_at: int = 0


@dataclass
class ObjectSummary:
    """The part that is kept of one picture: columns of its objects without crowds."""

    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pixels: np.ndarray = field(default_factory=lambda: np.empty(0))  # square roots of areas
    parts: np.ndarray = field(default_factory=lambda: np.empty(0))  # sides of boxes over sides of the picture
    crowds: int = 0
    wrong: str = ""  # why the picture cannot be used with these objects
    far: str = ""  # an object whose shape lies elsewhere than its box


def check_boxes(source: Source, limits: LookLimits) -> BoxFindings:
    """Looks at the objects, and at the headers of their pictures.

    Pictures that cannot be read are not counted here. Those whose objects cannot be used are a warning up to the part
    `bad_files` of all.
    """
    answers = look_at_all(source, lambda index: _summarise(source, index, limits.max_pixels), limits)
    answers = sorted(answers, key=lambda answer: answer[0])
    looks = {index: answer for index, answer in answers if isinstance(answer, ObjectSummary)}
    labels, pixels, parts = (
        np.concatenate([getattr(look, column) for look in (ObjectSummary(), *looks.values())])
        for column in ("labels", "pixels", "parts")
    )
    return BoxFindings(
        problems=[*_faults(source), *_of_pictures(source, looks, limits.bad_files)],
        objects=np.bincount(labels, minlength=len(source.classes)).tolist(),
        sizes=quantiles(pixels),
        parts=quantiles(parts),
        bad={source.names[i]: look.wrong for i, look in looks.items() if look.wrong},
        looked_at=len(looks),
    )


def _summarise(source: Source, index: int, max_pixels: int) -> ObjectSummary:
    with OpenedPicture(source.open(index), max_pixels) as opened:
        header = opened.header
    height, width = header.height, header.width
    try:
        objects = source.target(index)
        spans = [extent(shape) for shape in objects.shapes]
    except BadPicture as error:
        return ObjectSummary(wrong=str(error))
    masks = {tuple(shape["size"]) for shape in objects.shapes if isinstance(shape, dict)} - {objects.size}
    if masks:
        return ObjectSummary(
            wrong=f"run lengths for height and width {list(masks.pop())}; expected {list(objects.size)}"
        )
    fits = [None, (height, width), (width, height) if header.orientation >= 5 else None]
    if objects.size not in fits:
        return ObjectSummary(
            wrong=f"annotated at {objects.size[1]} x {objects.size[0]} pixels, but has {width} x {height}"
        )
    found = ObjectSummary(crowds=int(objects.crowd.sum()))
    boxes, found.labels = objects.boxes[~objects.crowd], objects.labels[~objects.crowd]
    found.pixels = np.sqrt(objects.area[~objects.crowd])
    found.parts = np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) / (height * width))
    for i in [i for i, span in enumerate(spans) if _apart(objects.boxes[i], span)][:1]:
        what = f"object {i + 1} of {len(spans)}, {source.classes[objects.labels[i]]},"
        found.far = f"{what} has the box {_written(objects.boxes[i])} and a shape that spans {_written(spans[i])}"
    return found


def _apart(box: np.ndarray, shape: np.ndarray) -> bool:
    """Whether two boxes share less than half of what they cover together."""
    sides = box[2:] - box[:2]
    if sides.min() < LARGE:
        return False
    shared = np.clip(np.minimum(box[2:], shape[2:]) - np.maximum(box[:2], shape[:2]), 0, None).prod()
    return bool(shared < 0.5 * (sides.prod() + (shape[2:] - shape[:2]).prod() - shared))


def _faults(source: Source) -> Iterator[Problem]:
    """The mistakes that were noticed when the annotations were read."""
    for faults in _read_faults(source.targets):
        for kind, (severity, what, text) in FAULTS.items():
            if n := faults.counts[kind]:
                named = faults.named[kind]
                yield Problem(severity, kind, f"{many(n, what)} {text}.", [*named], dict(named), count=n)


def _read_faults(targets: Any) -> Iterator[Faults]:
    """Of one file, or of each that was joined or renamed."""
    if isinstance(targets, Annotations):
        yield targets.faults
    for inner in getattr(targets, "readers", [getattr(targets, "targets", None)]):
        if inner is not None:
            yield from _read_faults(inner)


def _of_pictures(source: Source, looks: dict[int, ObjectSummary], bad_files: float) -> Iterator[Problem]:
    def problem(severity: Severity, kind: str, what: str, text: str, details: dict[int, str], n: int = 0) -> Problem:
        """`n` of `what`, where that is not the number of pictures."""
        text = f"{many(n or len(details), what)} {text}."
        return Problem.at(source.names, [*details], severity, kind, text, lambda i: details[i])

    if bad := {i: look.wrong for i, look in looks.items() if look.wrong}:
        severity = "error" if len(bad) > bad_files * len(looks) else "warning"
        yield problem(severity, "unfit-objects", "picture", "with objects that do not fit; left out of training", bad)
    if far := {i: look.far for i, look in looks.items() if look.far}:
        yield problem("warning", "shape-elsewhere", "picture", "with a shape that lies elsewhere than its box", far)
    if crowds := {i: many(look.crowds, "object") for i, look in looks.items() if look.crowds}:
        learned = any(len(look.labels) for look in looks.values())
        text = "marked as crowd or difficult" + ("; neither learned nor counted as missed" if learned else NO_OTHERS)
        yield problem(
            "note" if learned else "error", "crowd", "object", text, crowds, sum(look.crowds for look in looks.values())
        )
    if empty := {i: "" for i, look in looks.items() if not (len(look.labels) or look.crowds or look.wrong)}:
        most = 2 * len(empty) > len(looks)
        text = "without objects; " + ("is that right for most of them?" if most else "kept as examples of background")
        severity = "error" if len(empty) == len(looks) else "warning" if most else "note"
        yield problem(severity, "no-objects", "picture", text if severity != "error" else NOTHING, empty)


def _written(box: np.ndarray) -> str:
    return "[" + ", ".join(f"{value:.1f}" for value in box) + "]"
