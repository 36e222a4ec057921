"""What was predicted, as files: masks with a palette, overlays, and JSON that others read.

A mask is a PNG whose pixel values are positions in the model's classes. Objects are written as COCO's results:
`image_id` counts the pictures from 1 in the order in which they were found, `category_id` the classes from 1; beside
them stand the names, which are what to go by.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from weft.data.given import GivenPictures
from weft.errors import check_writable
from weft.files import write_atomic, write_text
from weft.report.overlay import background, paint_mask, paint_objects, palette, read_visible
from weft.run.predict_dense import DensePredictor, MaskPrediction, ObjectPrediction

LONGEST = 200  # bytes of a file's name, so that endings fit in


class Writer:
    """Writes predictions into a new folder, picture by picture."""

    def __init__(self, folder: Path, predictor: DensePredictor, found: GivenPictures, score: float):
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.found, self.preprocessing, self.score = folder, found, predictor.preprocessing, score
        self.classes, self.palette = predictor.classes, palette(predictor.classes)
        self.files, self.rows, self.segments = file_names(found.names), [], predictor.task.name == "segment"

    def add(self, index: int, prediction: MaskPrediction | ObjectPrediction) -> None:
        """The files of one picture; none where it could not be read."""
        if isinstance(prediction, MaskPrediction):
            row = {"name": prediction.name, "error": prediction.error}
            if prediction.mask is not None:
                file = self._mask(index, prediction.mask)
                row |= {"mask": file.name, "shares": shares(prediction.mask, self.classes)}
            self.rows.append(row)
        elif not prediction.error:
            self.rows += coco_rows(prediction, index + 1, self.classes)
            some = prediction.above(self.score)
            picture = read_visible(self.found.open(index), self.preprocessing)
            painted = paint_objects(picture, some.boxes, some.labels, some.scores, some.masks, self.classes)
            self._overlay(index, painted)

    def close(self) -> None:
        """predictions.json, when all pictures are done."""
        content: Any = self.rows
        if self.segments:
            pairs = zip(self.classes, self.palette, strict=True)
            legend = [{"id": i, "name": n, "colour": f"#{c.tobytes().hex()}"} for i, (n, c) in enumerate(pairs)]
            content = {"classes": legend, "pictures": self.rows}
        write_text(self.folder / "predictions.json", json.dumps(content, indent=1) + "\n")

    def _mask(self, index: int, mask: np.ndarray) -> Path:
        file = self.folder / f"{self.files[index]}.png"
        write_mask(file, mask, self.palette)
        picture = read_visible(self.found.open(index), self.preprocessing)
        self._overlay(index, paint_mask(picture, mask, self.palette, skip=background(self.classes)))
        return file

    def _overlay(self, index: int, painted: np.ndarray) -> None:
        from PIL import Image

        file = self.folder / f"{self.files[index]}.overlay.jpg"
        write_atomic(file, lambda path: Image.fromarray(painted).save(path, "JPEG", quality=92))


def write_mask(file: Path, mask: np.ndarray, palette: np.ndarray) -> None:
    """(H, W) uint8 as a PNG whose values are those of the mask and whose palette has their colours."""
    from PIL import Image

    image = Image.fromarray(mask)
    image.putpalette(palette.tobytes())
    write_atomic(file, lambda path: image.save(path, "PNG"))


def file_names(names: Sequence[str]) -> list[str]:
    """A name without ending for each picture, all different, also where capitals do not count.

    Equal ones get the folders before them, then the ending, and at last a number.
    """
    paths = [PurePath(name) for name in names]
    depth = max((len(path.parts) for path in paths), default=1)
    stages = [lambda path, n=n: "_".join([*path.parts[-1 - n : -1], path.stem]) for n in range(depth)]
    chosen: dict[int, str] = {}
    for stage in [*stages, lambda path: f"{path.stem}_{path.suffix[1:]}"]:
        wanted = {i: _short(stage(path)) for i, path in enumerate(paths) if i not in chosen}
        seen = Counter(name.casefold() for name in [*wanted.values(), *chosen.values()])
        chosen |= {i: name for i, name in wanted.items() if seen[name.casefold()] == 1}
    taken = {name.casefold() for name in chosen.values()}
    for i in sorted(set(range(len(paths))) - chosen.keys()):
        tries = (f"{_short(paths[i].stem)}_{n}" for n in range(1, len(paths) + 1))
        chosen[i] = next(name for name in tries if name.casefold() not in taken)
        taken.add(chosen[i].casefold())
    return [chosen[i] for i in range(len(paths))]


def _short(name: str) -> str:
    return name.replace("/", "").replace("\\", "").encode()[-LONGEST:].decode(errors="ignore") or "picture"


def shares(mask: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """The part of the area that each class has, the largest first; classes that do not occur are left out."""
    counts = np.bincount(mask.ravel(), minlength=len(classes))
    order: list[int] = np.argsort(-counts, kind="stable").tolist()
    return {classes[i]: float(counts[i] / mask.size) for i in order if counts[i]}


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
