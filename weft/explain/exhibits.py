"""The findings about one model, or two side by side, as things to show: sheets of pictures, lines, matrices.

An exhibit knows its title, what it shows and how to read it in two sentences; how it is drawn is the business of
`figures` (PNG and SVG), of the page and of the gallery in docs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from weft.explain.attention.measures import AttentionNumbers, Measure
from weft.explain.explanation import Explanation, PictureView
from weft.explain.heat import as_panel, draw_cross, draw_squares, heat_over, heat_panel
from weft.explain.receptive import INSIDE
from weft.explain.similarity import Similarity

COLUMNS = 8  # panels in a row
EVEN = 0.95  # a map whose smallest value is this part of the largest says nothing about places
READING = {
    "grad-cam": (
        "Grad-CAM",
        "Bright places of the layer's map speak for the class that the model answers, dark ones do not. A model that"
        " looks at the background for an object, or at a logo for a car, shows it here.",
    ),
    "rollout": (
        "Attention rollout",
        "Attention followed through all layers back to the picture: how much of each place can reach the answer by"
        " attention and the shortcuts beside it; the number is the largest as a multiple of an even one. It says where"
        " information may come from, not whether it speaks for or against the class.",
    ),
    "heads": (
        "Attention, head by head",
        "What one token attends to in each head: the class token where the layer has one, else the place that the cross"
        " marks, where Grad-CAM is strongest. The number is the largest weight as a multiple of an even one: near 1 the"
        " head looks at everything alike, a large number with a spot at the cross is local.",
    ),
    "tokens": (
        "Visual tokens",
        "Upper rows: the pixels that tokens of a VT module are made of, the seven most selective ones; lower rows: the"
        " pixels that each meets by way of the tokens it attends to. Bright places far from those above are long-range"
        " interactions; the number is the largest weight as a multiple of an even one.",
    ),
    "receptive-field": (
        "Effective receptive field",
        "How strongly the centre of each stage's map depends on every pixel; colours follow the root, for weak places"
        " to show. The squares are as large as the pixels that hold 50 % and 95 % of it: a small one in a large one"
        " sees details here and context everywhere.",
    ),
    "distance": (
        "Attention distance",
        "The mean distance, in pixels, from a token to what it attends to; lines are means of the heads, which figures"
        " show as dots, broken ones are even attention. Low in early layers means that attention does what a"
        " convolution could do for less.",
    ),
    "local-ratio": (
        "Local attention",
        "The part of the attention that stays in the 3 x 3 neighbourhood of its token, the mean of the heads. Beside it"
        " stands what attention without any preference would have.",
    ),
    "entropy": (
        "Entropy of attention",
        "Entropy divided by that of even attention: 1 looks at everything alike, 0 at a single token. Lines are means"
        " of the heads, which figures show as dots.",
    ),
    "foreground": (
        "Attention on the foreground",
        "Attention on a pixel of the foreground, on average, divided by that on a pixel of the background, as the masks"
        " have them. Above 1 the layer prefers the objects, at 1 it does not know them.",
    ),
    "similarity": (
        "Similarity of layers (CKA)",
        "How alike the features of two layers are over these pictures: 1 is the same up to rotation and scale; it takes"
        " some hundred pictures. Bright blocks are layers that change little; a dark border between two blocks is where"
        " the representation turns.",
    ),
    "scale": (
        "Robustness to scale",
        "What becomes of the answers when pictures are enlarged or shrunk. A flat line is a model that does not mind.",
    ),
    "shift": (
        "Robustness to shift",
        "What becomes of the answers when pictures are moved by so many pixels. A flat line is a model that does not"
        " mind; teeth with the period of a stride are aliasing.",
    ),
}


@dataclass(frozen=True)
class Panel:
    pixels: np.ndarray | None  # (H, W, 3) uint8; None: an empty place
    caption: str = ""


@dataclass(frozen=True)
class Sheet:
    """Rows of panels, such as a picture for each model."""

    kind: str
    detail: str  # what sets it apart from others of its kind, such as a picture's name; or ""
    columns: list[str]  # above the columns; or none
    rows: list[tuple[str, list[Panel]]]


@dataclass(frozen=True)
class Curve:
    name: str
    xs: list[float]
    ys: list[float]
    spread: list[list[float]]  # what each y is the mean of; or none
    model: int = 0  # whose it is: a model has the same colour in all exhibits
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    kind: str
    detail: str
    x_name: str
    y_name: str
    curves: list[Curve]
    labels: list[tuple[str, list[str]]]  # of each model: the layers that the whole numbers of the x axis stand for
    models: int = 1  # that are looked at, whether or not they have curves here


@dataclass(frozen=True)
class Matrix:
    kind: str
    detail: str
    rows: list[str]
    columns: list[str]
    values: np.ndarray  # (rows, columns), from 0 to 1


Exhibit = Sheet | Lines | Matrix


def title(exhibit: Exhibit) -> str:
    return READING[exhibit.kind][0] + (f", {exhibit.detail}" if exhibit.detail else "")


def reading(exhibit: Exhibit) -> str:
    return READING[exhibit.kind][1]


def exhibits(explanations: Sequence[Explanation], cross: Similarity | None = None) -> list[Exhibit]:
    """Everything there is to show; `cross`: the similarity between layers of the first and of the second model."""
    return [
        *_cams(explanations),
        *_rollouts(explanations),
        *_heads(explanations),
        *_tokens(explanations),
        *_fields(explanations),
        *_attention(explanations),
        *_similarities(explanations, cross),
        *_robustness(explanations),
    ]


# Sheets -------------------------------------------------------------------------------------------------------------


def _cams(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    columns = [(e, layer) for e in explanations for layer in e.layers]
    if not columns:
        return
    rows = []
    for views in _same_pictures(explanations):
        panels = [Panel(as_panel(views[0].pixels), views[0].truth)]
        for explanation, layer in columns:
            view = views[explanations.index(explanation)]
            cam = view.cams[layer]
            same = "" if cam.min() < EVEN * cam.max() else "\nthe same everywhere"
            panels.append(Panel(heat_over(view.pixels, cam), _answer(view) + same))
        rows.append((_short(views[0].name), panels))
    yield Sheet("grad-cam", "", ["picture", *(f"{e.subject.name}\n{layer}" for e, layer in columns)], rows)


def _rollouts(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    having = [e for e in explanations if any(view.rollout is not None for view in e.views)]
    if not having:
        return
    rows = []
    for views in _same_pictures(having):
        panels = [_weighed(view, view.rollout) if view.rollout is not None else Panel(None) for view in views]
        rows.append((_short(views[0].name), [Panel(as_panel(views[0].pixels)), *panels]))
    yield Sheet("rollout", "", ["picture", *(e.subject.name for e in having)], rows)


def _weighed(view: PictureView, values: np.ndarray, name: str = "", asked: tuple[int, int] | None = None) -> Panel:
    """Attention over the picture, colours from the smallest to the largest weight or, where that is less, to twice an
    even one: what hardly differs is not to look as if it did.
    """
    times_even = values / max(values.mean(), 1e-30)
    painted = heat_over(view.pixels, times_even, float(times_even.min()), 2.0)
    if asked:
        painted = draw_cross(painted, asked, view.pixels.shape[:2])
    times = f"up to {times_even.max():.3g}\u00a0x"  # a space that does not break
    return Panel(painted, f"{name}, {times}" if name else times)


def _same_pictures(explanations: Sequence[Explanation]) -> Iterator[list[PictureView]]:
    """The views of each picture that all models could read."""
    of_name = [{view.name: view for view in e.views} for e in explanations]
    for name in of_name[0]:
        if all(name in views for views in of_name):
            yield [views[name] for views in of_name]


def _heads(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    for explanation in explanations:
        for view in explanation.views:
            rows = []
            for found in view.heads:
                first = Panel(None) if rows else Panel(as_panel(view.pixels), "picture")
                panels = [
                    _weighed(view, values, f"head {i + 1}", found.asked)
                    for i, values in enumerate(found.maps[: COLUMNS - 1])
                ]
                rows.append((found.layer, [first, *panels]))
            if rows:
                yield Sheet("heads", f"{explanation.subject.name}, {_short(view.name)}", [], rows)


def _tokens(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    """Of each VT module the tokens that are most alone with their pixels."""
    for explanation in explanations:
        for view in explanation.views:
            rows = []
            for module in view.tokens:
                first = Panel(None) if rows else Panel(as_panel(view.pixels), "picture")
                made = module.maps[0].double()  # (L, h, w)
                chosen = (made * made.clamp(min=1e-30).log()).sum(dim=(1, 2)).topk(min(COLUMNS - 1, len(made))).indices
                for name, maps in (("made of", module.maps), ("meets", module.interactions)):
                    if maps is not None:
                        order = sorted(chosen.tolist())
                        panels = [_weighed(view, maps[0, i].float().numpy(), f"token {i + 1}") for i in order]
                        rows.append((f"{module.name}\n{name}", [first, *panels]))
                        first = Panel(None)
            if rows:
                yield Sheet("tokens", f"{explanation.subject.name}, {_short(view.name)}", [], rows)


def _fields(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    rows = []
    for explanation in explanations:
        panels = []
        for field in explanation.fields:
            sides = [field.side(part) for part in INSIDE]
            painted = draw_squares(heat_panel(np.sqrt(field.values)), field.values.shape, field.centre, sides)
            panels.append(Panel(painted, f"{field.layer}\n{sides[0]:.0f} and {sides[1]:.0f} pixels"))
        if panels:
            rows.append((explanation.subject.name, panels))
    if rows:
        yield Sheet("receptive-field", "", [], rows)


def _answer(view: PictureView) -> str:
    return f"{view.answer} {view.share}" if view.sureness is not None else view.answer


def _short(name: str, most: int = 16) -> str:
    """The end of a picture's name, without folder and ending."""
    stem = PurePath(name).stem or name
    return stem if len(stem) <= most else "…" + stem[1 - most :]


# Lines --------------------------------------------------------------------------------------------------------------


def _attention(explanations: Sequence[Explanation]) -> Iterator[Lines]:
    """The numbers of each layer of attention on the map; the first layer is 1."""
    yield from _layer_lines(explanations, "distance", "pixels", lambda row: row.distance, floor=True)
    yield from _layer_lines(explanations, "local-ratio", "part in 3 x 3", lambda row: row.local_ratio, floor=True)
    yield from _layer_lines(explanations, "entropy", "of even attention", _relative_entropy)
    yield from _layer_lines(explanations, "foreground", "times the background", lambda row: row.contrast)


def _relative_entropy(row: AttentionNumbers) -> Measure | None:
    """In units of what even attention has; None where there is one key, which leaves nothing to choose."""
    even = row.entropy.uniform
    return Measure([value / even for value in row.entropy.heads], 1.0) if even else None


def _layer_lines(
    explanations: Sequence[Explanation],
    kind: str,
    y_name: str,
    measure: Callable[[AttentionNumbers], Measure | None],
    floor: bool = False,
) -> Iterator[Lines]:
    """`floor`: what even attention has is drawn as well."""
    curves, labels = [], []
    for i, explanation in enumerate(explanations):
        rows = [row for row in explanation.attention if row.kind in ("map", "tokenizer") and measure(row) is not None]
        found = [m for row in rows if (m := measure(row)) is not None]
        xs = [float(x) for x in range(1, len(rows) + 1)]
        if rows:
            curves.append(Curve(explanation.subject.name, xs, [m.mean for m in found], [m.heads for m in found], i))
            labels.append((explanation.subject.name, [row.name for row in rows]))
        if rows and floor:
            name = f"{explanation.subject.name}, even attention"
            curves.append(Curve(name, xs, [m.uniform for m in found], [], i, dashed=True))
    if curves:
        yield Lines(kind, "", "layer", y_name, curves, labels, len(explanations))


def _robustness(explanations: Sequence[Explanation]) -> Iterator[Lines]:
    """The pictures as they are, scale 1 or shift 0, belong to the line."""
    for kind, x_name, same in (("scale", "scale", 1.0), ("shift", "shift in pixels", 0.0)):
        known = all(row.accuracy is not None for e in explanations for row in e.robustness)
        curves = []
        for i, explanation in enumerate(explanations):
            rows = [row for row in explanation.robustness if row.kind == kind]
            points = {row.change: row.accuracy if known else row.agreement for row in rows}
            if rows:
                points[same] = rows[0].accuracy_before if known else 1.0
                xs = sorted(points)
                curves.append(Curve(explanation.subject.name, xs, [float(points[x] or 0.0) for x in xs], [], i))
        if curves:
            y_name = "answers that are right" if known else "answers that stay"
            yield Lines(kind, "", x_name, y_name, curves, [], len(explanations))


# Matrices -----------------------------------------------------------------------------------------------------------


def _similarities(explanations: Sequence[Explanation], cross: Similarity | None) -> Iterator[Matrix]:
    for explanation in explanations:
        if explanation.similarity:
            yield _matrix(explanation.similarity, explanation.subject.name)
    if cross:
        first, second = (e.subject.name for e in explanations[:2])
        yield _matrix(cross, f"{first} (rows) and {second} (columns)")


def _matrix(similarity: Similarity, detail: str) -> Matrix:
    return Matrix("similarity", detail, similarity.rows, similarity.columns, np.array(similarity.cka))
