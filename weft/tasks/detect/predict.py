"""Objects as users get them: arrays in Python, lines and tables as text, COCO's results and overlays in files.

In files `image_id` counts the pictures from 1 in the order in which they were found, `category_id` the classes from 1;
beside them stand the names, which are what to go by.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from weft.data.boxes.shapes import draw
from weft.data.given import GivenPictures
from weft.data.preprocessing import Preprocessing
from weft.documents import to_json
from weft.report.overlay import paint_objects
from weft.report.text import columns, to_csv
from weft.tasks.detect.coco import restore
from weft.tasks.results import ResultFolder
from weft.tasks.task import ResultTexts
from weft.words import many

HINT = "Overlays and COCO's JSON are written with --out FOLDER, a table of all objects with --csv FILE."


@dataclass(frozen=True)
class ObjectPrediction:
    """The n objects of a picture, the surest first."""

    name: str
    boxes: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.float32))  # left, top, right, bottom
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # positions in the predictor's classes
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # from 0 to 1
    shapes: list[dict[str, Any]] | None = None  # n COCO run lengths, where the model was trained on shapes
    size: tuple[int, int] = (0, 0)  # height and width of the picture
    error: str = ""  # why there are none

    @property
    def masks(self) -> np.ndarray | None:
        """(n, H, W) bool, made anew each time, because they are large."""
        if self.shapes is None:
            return None
        return np.array([draw(shape, *self.size) for shape in self.shapes], bool).reshape(-1, *self.size)

    def above(self, score: float) -> "ObjectPrediction":
        """Those that the model is at least so sure of."""
        keep = self.scores >= score
        shapes = self.shapes and [shape for shape, kept in zip(self.shapes, keep, strict=True) if kept]
        return replace(self, boxes=self.boxes[keep], labels=self.labels[keep], scores=self.scores[keep], shapes=shapes)


def located(name: str, answer: dict[str, Tensor], shown: tuple[int, int], size: tuple[int, int]) -> ObjectPrediction:
    """A detector's answer to a picture that it was `shown` smaller or larger than its `size`."""
    found = restore(answer, shown, size)
    shapes = found.masks if "masks" in answer else None
    limits = np.array([size[1], size[0]] * 2, np.float32)
    return ObjectPrediction(name, found.boxes.clip(0, limits), found.labels, found.scores, shapes, size)


class ObjectWriter:
    """The predictions for many pictures as text and, where there is a folder, as overlays and predictions.json.

    All of them have the objects that reach `score`, of `most` that a picture may have.
    """

    def __init__(
        self,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        found: GivenPictures,
        out: Path | None,
        *,
        score: float,
        most: int,
    ):
        self.classes, self.names, self.score, self.most = classes, found.names, score, most
        self.objects, self.errors = [], []
        self.folder = ResultFolder(out, found, preprocessing) if out is not None else None

    def add(self, index: int, prediction: ObjectPrediction) -> None:
        some = prediction.above(self.score)
        self.objects.append(coco_rows(some, index + 1, self.classes))
        self.errors.append(prediction.error)
        if self.folder is not None and not prediction.error:
            picture = self.folder.picture(index)
            painted = paint_objects(picture, some.boxes, some.labels, some.scores, some.masks, self.classes)
            self.folder.write_overlay(index, painted)

    def close(self) -> ResultTexts:
        rows = [row for some in self.objects for row in some]
        if self.folder is not None:
            self.folder.write_json(rows)
        return ResultTexts(
            json=to_json(rows, indent=1) + "\n",
            csv=objects_csv(self.names, self.objects, self.errors),
            lines=list(object_lines(self.names, self.objects, self.errors)),
            hint="" if all(self.errors) else HINT,
            note="" if all(self.errors) else self._note(len(rows)),
        )

    def _note(self, objects: int) -> str:
        """How many there are, of which sureness; and whether they are so many that they mean little."""
        note = f"{many(objects, 'object')} with a score of at least {self.score:g} (--score)."
        read = [len(rows) for rows, error in zip(self.objects, self.errors, strict=True) if not error]
        full = sum(count >= self.most for count in read)
        if 2 * full > len(read):
            note += (
                f" {full} of {many(len(read), 'picture')} have {self.most}, as many as may be (test.detections):"
                " the model is hardly trained, or --score too low."
            )
        return note


def objects_dict(prediction: ObjectPrediction, classes: Sequence[str]) -> dict[str, Any]:
    """Height and width, and the objects as COCO's results have them, but for the picture's number and name."""
    rows = coco_rows(prediction, 1, classes)
    own = [{key: value for key, value in row.items() if key not in ("image_id", "file_name")} for row in rows]
    return {"size": list(prediction.size), "objects": own}


def coco_rows(prediction: ObjectPrediction, number: int, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of picture `number` as COCO's results, the surest first."""
    rows = []
    for i, (left, top, right, bottom) in enumerate(prediction.boxes.astype(np.float64).round(2).tolist()):
        label = int(prediction.labels[i])
        row = {"image_id": number, "file_name": prediction.name, "category_id": label + 1}
        row |= {"category_name": classes[label], "score": round(float(prediction.scores[i]), 5)}
        row["bbox"] = [left, top, round(right - left, 2), round(bottom - top, 2)]
        if prediction.shapes is not None:
            row["segmentation"] = prediction.shapes[i]
        rows.append(row)
    return rows


def object_lines(names: Sequence[str], objects: Sequence[list[dict[str, Any]]], errors: Sequence[str]) -> Iterator[str]:
    """For each picture how many objects of which class; where there is one picture only, each object."""
    width = max(map(len, names), default=0)
    for name, found, error in zip(names, objects, errors, strict=True):
        counts = Counter(row["category_name"] for row in found).most_common()
        said = "  ".join(f"{label} {n}" for label, n in counts) or "nothing"
        yield f"{name:<{width}}  {'cannot be read: ' + error if error else said}"
    if len(names) == 1 and objects[0]:
        header = ["class", "score", "left", "top", "width", "height"]
        rows = [[row["category_name"], f"{row['score']:.2f}", *(f"{v:.0f}" for v in row["bbox"])] for row in objects[0]]
        yield ""
        yield from columns([header, *rows], right=range(1, 6))


def objects_csv(names: Sequence[str], objects: Sequence[list[dict[str, Any]]], errors: Sequence[str]) -> str:
    """A line for each object; one without a class for each picture that has none, or could not be read."""
    rows = [["name", "class", "score", "left", "top", "width", "height", "error"]]
    for name, found, error in zip(names, objects, errors, strict=True):
        rows += [[name, row["category_name"], row["score"], *row["bbox"], ""] for row in found]
        rows += [[name, *[""] * 6, error]] if not found else []
    return to_csv(rows)
