"""Writes docs/gallery.md: what `weft explain` shows, of runs on real data, and how to read it. Run by `make gallery`.

Runs on the same data are shown side by side. The pictures are some that a run kept for validation; where they have
masks, these say what foreground is. Photographs that may not be passed on are drawn as outlines: `--outlines DATA`.
"""

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import ImageNetInfo

from weft.config import Config, override, read_yaml
from weft.errors import WeftError
from weft.explain.exhibits import READING, Exhibit, exhibits
from weft.explain.explain import SHOWN as DRAWN
from weft.explain.explain import explain, similarity_between
from weft.explain.explanation import Explanation, PictureView
from weft.explain.figures import draw, file_stem
from weft.explain.heat import as_panel
from weft.files import write_text
from weft.report.figures import write_figure
from weft.report.overlay import background
from weft.report.run import data_name
from weft.run.evaluate import find_pictures
from weft.run.predictor import load
from weft.run.subjects import told_apart

PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
SHOWN = 4  # pictures in a figure
NUMBERED = re.compile(r"n\d{8}")
MOST = {"heads": 2, "similarity": 3}  # figures of a kind, of each data set, that are enough for a page
SMOOTH = 0.4  # pixels of a picture that it is smoothed by before it is outlined; of the panel it is 1 at least
PAPER = 0.12  # what changes by less than this part of the strong lines stays white
HEAD = """# Gallery: what `weft explain` shows

Written by `tools/gallery.py` from the runs below, on pictures that they kept for validation. `weft explain RUN
PICTURES` makes the same of your run and your pictures, as a page, as PNG and SVG, and as numbers in `explain.json`;
with `--against OTHER` it shows two models side by side.
"""


class Some:
    """Some pictures of a source, from all its classes in turn and named by them."""

    def __init__(self, source: Any, indices: np.ndarray, count: int):
        order = indices[np.argsort(_labels(source)[indices], kind="stable")] if source.task == "classify" else indices
        even = order[np.linspace(0, len(order) - 1, min(count, len(order))).astype(int)]
        step = max(1, len(even) // DRAWN)  # the first pictures, which are drawn, come from everywhere
        self.source, self.indices = source, np.concatenate([even[i::step] for i in range(step)])
        self.names = [self._name(number, i) for number, i in enumerate(self.indices, start=1)]

    def _name(self, number: int, index: int) -> str:
        if self.source.task != "classify":
            return self.source.names[index]
        label = spoken(self.source.classes)[int(_labels(self.source)[index])]
        return f"{label}/{label} {number}"

    def open(self, index: int) -> Any:
        return self.source.open(int(self.indices[index]))

    def masks(self, folder: Path, foreground: Sequence[str]) -> dict[str, Path] | None:
        """What is of the `foreground` classes, by default of all but the background; None where nothing says it."""
        classes = self.source.classes
        named = [i for i, name in enumerate(classes) if name in foreground]
        plain = background(classes)
        chosen = named or ([i for i in range(len(classes)) if i not in plain] if plain else [])
        if self.source.task != "segment" or not chosen:
            return None
        files = {}
        for name, index in zip(self.names, self.indices, strict=True):
            files[name] = folder / f"{index}.png"
            mask = np.isin(self.source.target(int(index)), chosen)
            Image.fromarray(255 * mask.astype(np.uint8)).save(files[name])
        return files


def _labels(source: Any) -> np.ndarray:
    return source.labels.argmax(axis=1) if source.multilabel else source.labels


def spoken(classes: Sequence[str]) -> list[str]:
    """Classes that are numbers of WordNet, as ImageNet's are, by their first names."""
    words = ImageNetInfo()
    return [
        words.label_name_to_description(name).split(",")[0] if NUMBERED.fullmatch(name) else name for name in classes
    ]


def look(runs: Sequence[Path], count: int, foreground: Sequence[str]) -> tuple[list[Explanation], Any]:
    """What is found out about runs on the same data."""
    source, indices, _ = find_pictures(runs[0])
    some = Some(source, indices, count)
    subjects = [load(run).subject() for run in runs]
    subjects = [replace(subject, classes=spoken(subject.classes)) for subject in told_apart(subjects, runs)]
    with tempfile.TemporaryDirectory() as folder:
        masks = some.masks(Path(folder), foreground)
        found = [explain(subject, some, masks=masks) for subject in subjects]
    for explanation in found:
        explanation.views = explanation.views[:: max(1, len(explanation.views) // SHOWN)][:SHOWN]
    for explanation in found[2:]:
        explanation.similarity = None  # two models, and one beside the other, are enough
    return found, similarity_between(found[:2], some) if len(found) > 1 else None


def outlined(view: PictureView) -> PictureView:
    """A picture that is a line drawing, as large as its panel."""
    height, width = view.pixels.shape[:2]
    drawing = outline(view.pixels)
    tall, wide = drawing.shape[:2]
    points = [h.asked and (h.asked[0] * tall // height, h.asked[1] * wide // width) for h in view.heads]
    heads = [replace(h, asked=point) for h, point in zip(view.heads, points, strict=True)]
    return replace(view, pixels=drawing, heads=heads)


def outline(picture: np.ndarray) -> np.ndarray:
    """(H, W, 1 or 3) uint8 -> (h, w, 1) uint8, a panel: dark where the smoothed picture changes, on white."""
    panel = np.sqrt(
        as_panel(picture) @ np.array((0.299, 0.587, 0.114))
    )  # the root: things in the dark have outlines, too
    sigma = max(1.0, SMOOTH * panel.shape[0] / picture.shape[0])
    reach = round(3 * sigma)
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    for _ in range(2):  # down, then across
        longer = np.pad(panel, ((reach, reach), (0, 0)), mode="edge")
        panel = np.sum([weight * longer[i : i + len(panel)] for i, weight in enumerate(bell)], axis=0).T
    change = np.hypot(*np.gradient(panel))
    strong = max(np.percentile(change, 96), 1e-9)
    ink = (change / strong - PAPER).clip(0, 1 - PAPER) / (1 - PAPER)
    return (255 * (1 - 0.9 * ink)).round().astype(np.uint8)[..., None]


def chosen(found: Sequence[Exhibit]) -> list[Exhibit]:
    """All exhibits, but of some kinds only the first picture of the first models."""
    kept: list[Exhibit] = []
    for exhibit in found:
        before = [other for other in kept if other.kind == exhibit.kind]
        again = exhibit.kind in ("heads", "tokens") and _model(exhibit) in map(_model, before)
        if not again and len(before) < MOST.get(exhibit.kind, 1):
            kept.append(exhibit)
    return kept


def _model(exhibit: Exhibit) -> str:
    return exhibit.detail.rpartition(", ")[0]


def write(
    runs: Sequence[Path], pictures: Path, count: int, foreground: Sequence[str], outlines: Sequence[str] = ()
) -> None:
    """`outlines`: data sets whose photographs are not to be shown."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for run in runs:
        groups[data_name(override(Config(), read_yaml(run / "config.yaml")).data.source)].append(run)
    for name in outlines:
        if name not in groups:
            raise WeftError(f"No run is on {name}; the data sets are {', '.join(groups)}.")
    pictures.mkdir(parents=True, exist_ok=True)
    figures: dict[str, list[tuple[str, str]]] = defaultdict(list)  # kind -> (data, file)
    rows = []
    for data, some in groups.items():
        explanations, cross = look(some, count, foreground)
        rows += [_row(data, run, explanation) for run, explanation in zip(some, explanations, strict=True)]
        if data in outlines:
            for explanation in explanations:
                explanation.views = [outlined(view) for view in explanation.views]
        for exhibit in chosen(exhibits(explanations, cross)):
            stem = f"{re.sub(r'[^a-z0-9]+', '-', data.lower())}-{file_stem(exhibit)}"
            write_figure(pictures, stem, partial(draw, exhibit), endings=["webp"])
            figures[exhibit.kind].append((f"{data}{': ' if exhibit.detail else ''}{exhibit.detail}", f"{stem}.webp"))
    write_text(PAGE, page(rows, figures, pictures.name, outlines))


def _row(data: str, run: Path, explanation: Explanation) -> str:
    found = json.loads((run / "evaluation.json").read_text())
    scores = {"top1": "top-1", "miou": "mIoU", "mask_ap": "mask AP", "box_ap": "box AP"}
    score = next((f"{name} {100 * found[key]:.1f} %" for key, name in scores.items() if key in found), "")
    size = " x ".join(map(str, explanation.views[0].pixels.shape[:2]))
    return f"| {data} | `{explanation.subject.name}` | {size} | {score} | {explanation.pictures} |"


def page(
    rows: Sequence[str], figures: dict[str, list[tuple[str, str]]], folder: str, outlines: Sequence[str] = ()
) -> str:
    table = ["| data | model | pixels | validation | pictures looked at |", "| --- | --- | --- | --- | --- |", *rows]
    parts = [HEAD, "\n".join(table)]
    if outlines:
        parts.append(
            f"The photographs of {', '.join(outlines)} may not be passed on: line drawings stand for them here."
        )
    for kind, (title, reading) in READING.items():
        if kind in figures:
            shown = "\n\n".join(
                f"{what}\n\n![{title}, {what}](pictures/{folder}/{file})" for what, file in figures[kind]
            )
            parts.append(f"## {title}\n\n{reading}\n\n{shown}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", nargs="+", type=Path, required=True, help="run folders; those on the same data side by side"
    )
    parser.add_argument("--count", type=int, default=64, help="pictures that numbers are taken over")
    parser.add_argument("--foreground", nargs="*", default=[], help="classes of masks that are foreground")
    parser.add_argument(
        "--outlines", nargs="*", default=[], metavar="DATA", help="data sets whose photographs may not be passed on"
    )
    options = parser.parse_args()
    write(options.runs, PAGE.parent / "pictures" / "gallery", options.count, options.foreground, options.outlines)
