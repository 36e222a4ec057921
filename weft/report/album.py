"""Pictures for a report, painted at the size at which they are shown, so that lines are equally wide in all of them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.read import BadPicture
from weft.report.overlay import read_visible
from weft.report.page import data_uri

if TYPE_CHECKING:
    from weft.data.preprocessing import Preprocessing
    from weft.data.sources.source import Source
    from weft.data.split import Split

SIDE = 400  # pixels of the longer side of a painted picture, which is shown smaller
WORST, RANDOM, TRAINING = 6, 6, 12  # pictures shown, at most

Panels = dict[str, np.ndarray]  # what is shown side by side: title to picture


class Album:
    """Pictures of an evaluation with what was to be found and what was said.

    `panels(row, picture, position)` paints one: its row in the evaluation, the picture at its own size, its position
    in the source. `text(row)` says how good the answer is.
    """

    def __init__(
        self,
        names: Sequence[str],
        source: "Source",
        split: "Split",
        preprocessing: "Preprocessing",
        panels: Callable[[int, np.ndarray, int], Panels],
        text: Callable[[int], str],
    ):
        self.names, self.source, self.preprocessing = names, source, preprocessing
        self.panels, self.text = panels, text
        self.where = {source.names[i]: int(i) for i in split.reported}

    def random(self, seed: int) -> list[dict[str, Any]]:
        n = len(self.names)
        return self.strips(np.random.default_rng(seed).choice(n, min(RANDOM, n), replace=False).tolist())

    def strips(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """{"name", "text", "panels": [(title, data URI), ...]} of each row."""
        return [{"name": self.names[row], "text": self.text(row), "panels": self._look(row)} for row in rows]

    def _look(self, row: int) -> list[tuple[str, str]]:
        """The panels of a picture; a single one without a picture where its file has gone since."""
        try:
            position = self.where[self.names[row]]
            painted = self.panels(row, read_visible(self.source.open(position), self.preprocessing), position)
        except (KeyError, BadPicture, OSError):
            return [("picture", "")]
        return [(title, data_uri(picture, SIDE)) for title, picture in painted.items()]


def fitted(size: tuple[int, ...]) -> tuple[int, int]:
    """Height and width at which a picture of this size is painted."""
    scale = SIDE / max(size[:2])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def resized(picture: np.ndarray) -> np.ndarray:
    """(h, w, 1 or 3) uint8 at the size at which it is painted."""
    from PIL import Image

    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    height, width = fitted(picture.shape)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def nearest(mask: np.ndarray) -> np.ndarray:
    """(H, W) at the size at which it is painted: values are chosen, never mixed."""
    sizes = zip(fitted(mask.shape), mask.shape, strict=True)
    rows, columns = ((2 * np.arange(n) + 1) * side // (2 * n) for n, side in sizes)
    return mask[rows[:, None], columns]


def css(table: np.ndarray) -> list[str]:
    """(n, 3) uint8 as colours of a page."""
    return [f"#{colour.tobytes().hex()}" for colour in table]


def weakest(rows: list[dict[str, Any]], key: str) -> list[str]:
    """A sentence on the class with the lowest figure, or on those that are not found at all; none for one class."""
    lost = [row["name"] for row in rows if not row[key]]
    if len(rows) < 2:
        return []
    if len(lost) > 1:
        return [f"{len(lost)} of {len(rows)} classes are not found at all, such as {lost[0]}."]
    lowest = min(rows, key=lambda row: row[key] or 0.0)
    return [f"The weakest class is {lowest['name']} ({lowest[key] or 0.0:.2f})."]
