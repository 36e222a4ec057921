"""The findings about one model: numbers, and what is drawn of some pictures."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from weft.explain.attention.measures import AttentionNumbers
from weft.explain.invariance import Robustness
from weft.explain.receptive import Field
from weft.explain.similarity import Similarity
from weft.explain.subject import Subject
from weft.explain.tokens import TokenMaps
from weft.words import many

TOLD = 3  # unreadable pictures that the terminal names


@dataclass(frozen=True)
class HeadMaps:
    """The attention of one token in each head of a layer."""

    layer: str
    maps: np.ndarray  # (heads, h, w)
    asked: tuple[int, int] | None  # the pixel whose token it is; None: the class token


@dataclass
class PictureView:
    """One picture as a model sees it."""

    name: str
    pixels: np.ndarray  # (H, W, 1 or 3) uint8
    answer: str = ""  # the class whose Grad-CAM is shown
    sureness: float | None = None
    of_pixels: bool = False  # sureness is the part of the pixels that a segmenter gives to the class
    truth: str = ""  # where it is known
    cams: dict[str, np.ndarray] = field(default_factory=dict)  # layer -> (h, w), the largest is 1
    rollout: np.ndarray | None = None  # (h, w)
    heads: list[HeadMaps] = field(default_factory=list)
    tokens: list[TokenMaps] = field(default_factory=list)  # of this picture alone: (1, L, h, w)

    @property
    def share(self) -> str:
        return f"{100 * (self.sureness or 0):.0f} %{' of the pixels' if self.of_pixels else ''}"


@dataclass
class Explanation:
    """Everything that was found about one model."""

    subject: Subject
    layers: list[str]  # of Grad-CAM
    views: list[PictureView] = field(default_factory=list)
    pictures: int = 0  # that were read
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # pictures that were not, and why
    fields: list[Field] = field(default_factory=list)
    attention: list[AttentionNumbers] = field(default_factory=list)
    similarity: Similarity | None = None
    robustness: list[Robustness] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what does not apply, and why

    def lines(self) -> Iterator[str]:
        """The answers and the most telling numbers, for a terminal."""
        read = many(self.pictures, "picture") + (f", {len(self.unreadable)} unreadable" if self.unreadable else "")
        yield f"{self.subject.name}: {read}"
        for name, why in self.unreadable[:TOLD]:
            yield f"  {name}: {why}"
        for view in self.views:
            if view.answer:
                truth = f" (truth: {view.truth})" if view.truth else ""
                yield f"  {view.name}: {view.answer} {view.share}{truth}"
        for last in self.fields[-1:]:
            yield f"  receptive field of {last.layer}: half of it in a square of {last.side(0.5):.0f} pixels"
        distances = [row.distance.mean for row in self.attention if row.distance and row.kind == "map"]
        if distances:
            yield f"  attention distance: {distances[0]:.1f} pixels in the first layer, {distances[-1]:.1f} in the last"
        for note in self.notes:
            yield f"  {note}"

    def to_dict(self) -> dict[str, Any]:
        """All numbers, and the small maps behind the pictures, for JSON."""
        return {
            "model": self.subject.name,
            "task": self.subject.task,
            "trained": self.subject.trained,
            "pictures": self.pictures,
            "unreadable": [{"name": name, "error": why} for name, why in self.unreadable],
            "shown": [_view_dict(view) for view in self.views],
            "receptive_fields": [one.numbers() for one in self.fields],
            "attention": [numbers.to_dict() for numbers in self.attention],
            "similarity": asdict(self.similarity) if self.similarity else None,
            "robustness": [asdict(row) for row in self.robustness],
            "notes": self.notes,
        }


def _view_dict(view: PictureView) -> dict[str, Any]:
    row: dict[str, Any] = {"name": view.name, "answer": view.answer, "sureness": view.sureness, "truth": view.truth}
    row["grad_cam"] = {layer: _listed(cam) for layer, cam in view.cams.items()}
    row["rollout"] = None if view.rollout is None else _listed(view.rollout)
    return row


def _listed(values: np.ndarray) -> list[Any]:
    return np.round(values.astype(np.float64), 5).tolist()
