"""Masks as users get them: objects in Python, shares of the area as text, PNG files with a palette and overlays."""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.data.given import GivenPictures
from weft.data.preprocessing import Preprocessing
from weft.documents import to_json
from weft.files import write_atomic
from weft.report.overlay import background, paint_mask, palette
from weft.report.text import to_csv
from weft.tasks.results import ResultFolder
from weft.tasks.segment.losses import resized
from weft.tasks.task import ResultTexts

if TYPE_CHECKING:
    from PIL import Image

CHUNK = 2**26  # numbers that exist at once while answers are brought to a picture's size
HINT = "Masks and overlays are written with --out FOLDER."


@dataclass(frozen=True)
class MaskPrediction:
    name: str
    mask: np.ndarray | None  # (H, W) uint8, positions in the predictor's classes
    error: str = ""  # why there is none


def class_map(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, h, w) scores to (H, W) uint8: the likeliest class after resizing, a few classes at a time."""
    at_once = max(1, CHUNK // (size[0] * size[1]))
    best, which = resized(scores[None, :1].float(), size)[0, 0], scores.new_zeros(size, dtype=torch.uint8)
    for start in range(1, len(scores), at_once):
        value, index = resized(scores[None, start : start + at_once].float(), size)[0].max(dim=0)
        which = torch.where(value > best, (index + start).to(torch.uint8), which)
        best = torch.maximum(value, best)
    return which


class MaskWriter:
    """The predictions for many pictures as text and, where there is a folder, as masks, overlays and predictions.json.

    A mask is a PNG coded as those of training were: `values` stand for the classes, or are their `colours`, 0xRRGGBB.
    """

    def __init__(
        self,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        found: GivenPictures,
        out: Path | None,
        top: int,
        values: Sequence[int],
        colours: bool,
    ):
        self.classes, self.top, self.palette = classes, top, palette(classes)
        self.values, self.colours = values, colours
        self.names, self.shares, self.errors, self.rows = found.names, [], [], []
        self.folder = ResultFolder(out, found, preprocessing) if out is not None else None

    def add(self, index: int, prediction: MaskPrediction) -> None:
        parts = {} if prediction.mask is None else shares(prediction.mask, self.classes)
        self.shares.append(parts)
        self.errors.append(prediction.error)
        if self.folder is None:
            return
        row: dict[str, Any] = {"name": prediction.name, "error": prediction.error}
        if prediction.mask is not None:
            file = self.folder.file(index, ".png")
            if self.colours:
                write_colours(file, prediction.mask, self.values)
            else:
                write_values(file, prediction.mask, self.values, self.palette)
            skip = background(self.classes)
            self.folder.write_overlay(
                index, paint_mask(self.folder.picture(index), prediction.mask, self.palette, skip=skip)
            )
            row |= {"mask": file.name, "shares": parts}
        self.rows.append(row)

    def _shown(self, number: int) -> int | str:
        """Names what stands for a class in the written masks."""
        return f"#{self.values[number]:06x}" if self.colours else self.values[number]

    def close(self) -> ResultTexts:
        if self.folder is not None:
            pairs = zip(self.classes, self.palette, strict=True)
            legend = [
                {"id": i, "value": self._shown(i), "name": n, "colour": f"#{c.tobytes().hex()}"}
                for i, (n, c) in enumerate(pairs)
            ]
            self.folder.write_json({"classes": legend, "pictures": self.rows})
        rows = [
            {"name": name, "shares": parts, "error": error}
            for name, parts, error in zip(self.names, self.shares, self.errors, strict=True)
        ]
        return ResultTexts(
            json=to_json(rows, indent=1) + "\n",
            csv=shares_csv(self.names, self.shares, self.errors, self.classes),
            lines=list(shares_lines(self.names, self.shares, self.errors, self.top)),
            hint="" if all(self.errors) else HINT,
        )


def mask_dict(prediction: MaskPrediction, classes: Sequence[str]) -> dict[str, Any]:
    """Height and width, parts of the area, and the mask as a PNG whose values are positions in the classes."""
    assert prediction.mask is not None
    file = io.BytesIO()
    mask_image(prediction.mask, range(len(classes)), palette(classes)).save(file, "PNG")
    return {
        "size": list(prediction.mask.shape),
        "shares": shares(prediction.mask, classes),
        "mask": base64.b64encode(file.getvalue()).decode(),
    }


def mask_image(mask: np.ndarray, values: Sequence[int], palette: np.ndarray) -> "Image.Image":
    """(H, W) classes as an image that has the value of each class, and its colour in the palette."""
    from PIL import Image

    table = np.zeros((max(values) + 1, 3), np.uint8)
    table[np.array(values)] = palette
    image = Image.fromarray(np.array(values, np.uint8)[mask])
    image.putpalette(table.tobytes())
    return image


def write_values(file: Path, mask: np.ndarray, values: Sequence[int], palette: np.ndarray) -> None:
    """(H, W) classes as the PNG of `mask_image`."""
    image = mask_image(mask, values, palette)
    write_atomic(file, lambda path: image.save(path, "PNG"))


def write_colours(file: Path, mask: np.ndarray, values: Sequence[int]) -> None:
    """(H, W) classes as a PNG in RGB that has the colour of each class, given as 0xRRGGBB."""
    from PIL import Image

    table = np.array([[value >> 16, value >> 8 & 255, value & 255] for value in values], np.uint8)
    image = Image.fromarray(table[mask])
    write_atomic(file, lambda path: image.save(path, "PNG"))


def shares(mask: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """The part of the area that each class has, the largest first; classes that do not occur are left out."""
    counts = np.bincount(mask.ravel(), minlength=len(classes))
    order: list[int] = np.argsort(-counts, kind="stable").tolist()
    return {classes[i]: float(counts[i] / mask.size) for i in order if counts[i]}


def shares_lines(
    names: Sequence[str], shares: Sequence[dict[str, float]], errors: Sequence[str], top: int
) -> Iterator[str]:
    """For each picture the classes with the largest parts of its area."""
    width = max(map(len, names), default=0)
    for name, parts, error in zip(names, shares, errors, strict=True):
        said = "  ".join(f"{label} {100 * part:.1f} %" for label, part in list(parts.items())[:top])
        yield f"{name:<{width}}  {said or 'cannot be read: ' + error}"


def shares_csv(
    names: Sequence[str], shares: Sequence[dict[str, float]], errors: Sequence[str], classes: Sequence[str]
) -> str:
    """A line for each picture, a column for each class."""
    rows = (
        [name, *("" if error else f"{parts.get(label, 0.0):.6g}" for label in classes), error]
        for name, parts, error in zip(names, shares, errors, strict=True)
    )
    return to_csv([["name", *classes, "error"], *rows])
