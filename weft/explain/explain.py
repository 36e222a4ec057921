"""Looks into a model: what it decides by, what its attention does, how far it sees. Pictures in, numbers out.

`exhibits` says how the findings are shown, `figures` and `explain_page` draw them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.data.masks.values import read_raw, upright
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture, header
from weft.errors import WeftError
from weft.explain import (
    AttentionNumbers,
    Robustness,
    Similarity,
    attention_layers,
    attention_numbers,
    attention_of,
    feature_similarity,
    left_out,
    mean_numbers,
    robustness,
    rollout,
)
from weft.explain.maps import block_layers, default_layer, in_trunk
from weft.explain.receptive import Field, receptive_fields
from weft.explain.saliency import grad_cam
from weft.explain.similarity import FEWEST
from weft.explain.tokens import TokenMaps, token_maps
from weft.report.overlay import background, visible
from weft.words import many

BATCH = 8
MOST = 256  # pictures that the numbers are taken over
SHOWN = 8  # pictures that are drawn
CLOSELY = 3  # of these, pictures whose heads and tokens are drawn
SHOWN_LAYERS = 3  # attention layers whose heads are drawn
TOLD = 3  # unreadable pictures that the terminal names
FIELD_PICTURES = 16  # that the receptive field is averaged over

T = TypeVar("T")
Progress = Callable[[int, int, str], None]  # steps done, of how many, and what part of the work it was


@dataclass(frozen=True)
class Subject:
    """A model to look into, in eval mode on its device, and how it sees pictures."""

    name: str
    model: nn.Module  # of a detector the backbone
    preprocessing: Preprocessing
    classes: list[str]
    task: str = "classify"  # as explain.json has it
    scores_classes: bool = True  # False: it gives features alone, as a detector's backbone does
    per_pixel: bool = False  # classes are scored for each pixel, {"out": (B, K, h, w)}; else for the picture, (B, K)
    multilabel: bool = False
    trained: bool = True
    asked: int | None = None  # the class whose Grad-CAM is wanted; None: of each picture the likeliest

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def per_picture(self) -> bool:
        """Whether classes are scored for the picture as a whole."""
        return self.scores_classes and not self.per_pixel

    def see(self, pictures: Tensor) -> Tensor:
        """(B, C, h, w) of `Read` as the model takes them, on its device: of one batch at a time, to save memory."""
        return self.preprocessing.normalise(pictures.to(self.device))


@dataclass(frozen=True)
class Heads:
    """What one token attends to in each head of a layer."""

    layer: str
    maps: np.ndarray  # (heads, h, w)
    asked: tuple[int, int] | None  # the pixel whose token it is; None: the class token


@dataclass
class View:
    """One picture as a model sees it."""

    name: str
    pixels: np.ndarray  # (H, W, 1 or 3) uint8
    answer: str = ""  # the class whose Grad-CAM is shown
    sureness: float | None = None
    of_pixels: bool = False  # sureness is the part of the pixels that a segmenter gives to the class
    truth: str = ""  # where it is known
    cams: dict[str, np.ndarray] = field(default_factory=dict)  # layer -> (h, w), the largest is 1
    rollout: np.ndarray | None = None  # (h, w)
    heads: list[Heads] = field(default_factory=list)
    tokens: list[TokenMaps] = field(default_factory=list)  # of this picture alone: (1, L, h, w)

    @property
    def share(self) -> str:
        return f"{100 * (self.sureness or 0):.0f} %{' of the pixels' if self.of_pixels else ''}"


@dataclass
class Explanation:
    """What was found out about one model."""

    subject: Subject
    layers: list[str]  # of Grad-CAM
    views: list[View] = field(default_factory=list)
    pictures: int = 0  # that were read
    bad: list[tuple[str, str]] = field(default_factory=list)  # pictures that were not, and why
    fields: list[Field] = field(default_factory=list)
    attention: list[AttentionNumbers] = field(default_factory=list)
    similarity: Similarity | None = None
    robustness: list[Robustness] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what does not apply, and why

    def lines(self) -> Iterator[str]:
        """The answers and the most telling numbers, for a terminal."""
        read = many(self.pictures, "picture") + (f", {len(self.bad)} unreadable" if self.bad else "")
        yield f"{self.subject.name}: {read}"
        for name, why in self.bad[:TOLD]:
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
            "unreadable": [{"name": name, "error": why} for name, why in self.bad],
            "shown": [_view_dict(view) for view in self.views],
            "receptive_fields": [one.numbers() for one in self.fields],
            "attention": [numbers.to_dict() for numbers in self.attention],
            "similarity": asdict(self.similarity) if self.similarity else None,
            "robustness": [asdict(row) for row in self.robustness],
            "notes": self.notes,
        }


def _view_dict(view: View) -> dict[str, Any]:
    row: dict[str, Any] = {"name": view.name, "answer": view.answer, "sureness": view.sureness, "truth": view.truth}
    row["grad_cam"] = {layer: _listed(cam) for layer, cam in view.cams.items()}
    row["rollout"] = None if view.rollout is None else _listed(view.rollout)
    return row


def _listed(values: np.ndarray) -> list[Any]:
    return np.round(values.astype(np.float64), 5).tolist()


# The pictures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Pictures of one size, ready for the model."""

    names: list[str]
    labels: list[int]  # the classes of the pictures; -1: not known
    pictures: Tensor  # (B, C, h, w) as `preprocessing.picture` gives them
    masks: Tensor | None  # (B, h, w) bool: what is foreground


def read_pictures(
    found: Any, subject: Subject, masks: Mapping[str, Path] | None, bad: list[tuple[str, str]], bare: list[str]
) -> list[Read]:
    """The first `MOST` of them, in batches; those that cannot be read go to `bad`, why some have no mask to `bare`."""
    reads: list[Read] = []
    for i, name in enumerate(found.names[:MOST]):
        try:
            file = found.open(i)
            picture = subject.preprocessing.picture(file)[None]
        except BadPicture as error:
            bad.append((name, str(error)))
            continue
        try:
            mask = None if masks is None else _mask(masks.get(name), file, subject.preprocessing)[None]
        except BadPicture as error:
            mask = bare.append(f"{name}: {error}")
        row, last = Read([name], [label_of(subject, name)], picture, mask), reads[-1] if reads else None
        alike = last and last.pictures.shape[1:] == picture.shape[1:] and (last.masks is None) == (mask is None)
        if last and alike and len(last.names) < BATCH:
            reads[-1] = _joined(last, row)
        else:
            reads.append(row)
    if not reads:
        why = f": {bad[0][0]}: {bad[0][1]}" if bad else "; name files, folders or patterns"
        raise WeftError(f"No picture can be read{why}.")
    return reads


def _joined(one: Read, other: Read) -> Read:
    masks = None if one.masks is None or other.masks is None else torch.cat([one.masks, other.masks])
    pictures = torch.cat([one.pictures, other.pictures])
    return Read(one.names + other.names, one.labels + other.labels, pictures, masks)


def label_of(subject: Subject, name: str) -> int:
    """The class that the folder of a picture names, which may itself have a / in it; -1: none."""
    folder = os.path.dirname(name.replace("\\", "/"))
    fitting = [c for c in subject.classes if f"/{folder}".endswith(f"/{c}")] if subject.per_picture else []
    return subject.classes.index(max(fitting, key=len)) if fitting else -1


def _mask(file: Path | None, picture: Any, preprocessing: Preprocessing) -> Tensor:
    """(h, w) bool: the mask of a picture, cut as the picture is; whatever is not 0, or not black, is foreground."""
    if file is None:
        raise BadPicture("there is none of the same name")
    values = read_raw(file, preprocessing.max_pixels).pixels  # of a palette the positions, not the colours
    foreground = np.any(values, axis=2) if values.ndim == 3 else values > 0
    cut = replace(preprocessing, channels=1, depth=8, mean=(0.0,), std=(1.0,), interpolation="nearest")
    return cut.picture(upright(255 * foreground.astype(np.uint8), header(picture)))[0] > 0


# The findings -------------------------------------------------------------------------------------------------------


def explain(
    subject: Subject,
    found: Any,
    *,
    layers: Sequence[str] = (),
    masks: Mapping[str, Path] | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Everything that applies to this model, and a note on what does not.

    Args:
        found: `weft.data.given.GivenPictures`.
        layers: of Grad-CAM; by default the one that `default_layer` knows.
        masks: a file for each picture, by the picture's name.
    """
    explanation = Explanation(subject, list(layers))
    bare: list[str] = []
    reads = read_pictures(found, subject, masks, explanation.bad, bare)
    explanation.pictures = sum(len(read.names) for read in reads)
    if bare:
        explanation.notes.append(f"{many(len(bare), 'picture')} without a mask, such as {bare[0]}")
    if len(found.names) > MOST:
        explanation.notes.append(f"The first {MOST} of {len(found.names)} pictures are looked at.")
    steps = list(_steps(explanation, reads))
    for done, (part, step) in enumerate(steps, start=1):
        step()
        if progress:
            progress(done, len(steps), f"{subject.name}: {part}")
    return explanation


def _steps(explanation: Explanation, reads: list[Read]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The steps of the work, each of which adds to the explanation, and the part that each belongs to."""
    subject, notes, model = explanation.subject, explanation.notes, explanation.subject.model
    if not subject.scores_classes:
        notes.append("Grad-CAM asks for one score of a picture, which a detector does not have.")
    elif not explanation.layers:
        explanation.layers = _or_note(explanation, lambda: [_default_cam(subject, reads[0])]) or []
    readable = attention_layers(model)
    if not readable:
        notes.append("None of the model's layers has attention that could be read.")
    notes += [f"{in_trunk(model, name)}: {why}" for name, why in left_out(model).items()]

    measured: list[list[AttentionNumbers]] = []

    def inputs() -> Iterator[Tensor]:
        return (subject.see(read.pictures) for read in reads)

    def look(read: Read) -> None:
        x = subject.see(read.pictures)
        found = attention_of(model, x) if readable else []
        found = [replace(layer, name=in_trunk(model, layer.name)) for layer in found]
        if found:
            measured.append(attention_numbers(found, masks=read.masks.to(x.device) if read.masks is not None else None))
        room = SHOWN - len(explanation.views)
        if room > 0:
            explanation.views += views(explanation, read, x, found)[:room]

    def summarise() -> None:
        explanation.attention = mean_numbers(measured) if measured else []
        if measured and not any(row.distance for row in explanation.attention):
            notes.append("Its tokens have no places; the distance and the neighbourhood of attention need them.")
        shares = [row.foreground.uniform for row in explanation.attention if row.foreground]
        if shares and not 0 < shares[0] < 1:
            notes.append(f"The masks have no {'background' if shares[0] else 'foreground'} to compare with.")

    def fields() -> None:
        same = [read.pictures for read in reads if read.pictures.shape[1:] == reads[0].pictures.shape[1:]]
        x = subject.see(torch.cat([one for some in same for one in some.split(1)][:FIELD_PICTURES]))
        explanation.fields = _or_note(explanation, lambda: receptive_fields(model, x)) or []

    def similarity() -> None:
        explanation.similarity = _or_note(explanation, lambda: feature_similarity(model, inputs(), block_layers(model)))

    def robust() -> None:
        known = all(label >= 0 for read in reads for label in read.labels)
        labels = (torch.tensor(read.labels, device=subject.device) if known else None for read in reads)
        explanation.robustness = robustness(model, zip(inputs(), labels, strict=True))

    looking = f"Grad-CAM and attention, {many(explanation.pictures, 'picture')}"
    for read in reads:
        yield looking, lambda read=read: look(read)
    yield looking, summarise
    yield "receptive fields", fields
    if comparable(reads):
        yield "similarity of layers", similarity
    else:
        notes.append(f"The similarity of layers needs at least {FEWEST} pictures of one size.")
    if subject.per_picture and not subject.multilabel:
        yield "robustness to scale and shift", robust
    else:
        notes.append("Robustness to scale and shift is measured of classifiers with one class per picture.")


def comparable(reads: Sequence[Read]) -> bool:
    """Whether the similarity of layers can be estimated."""
    return any(len(read.names) >= FEWEST for read in reads)


def _or_note(explanation: Explanation, work: Callable[[], T]) -> T | None:
    """What the work gives, or None and a note on why it does not apply to this model."""
    try:
        return work()
    except WeftError as error:
        if str(error) not in explanation.notes:
            explanation.notes.append(str(error))
        return None


def _default_cam(subject: Subject, read: Read) -> str:
    """The layer that Grad-CAM shows by default; raises where it gives no map."""
    layer = default_layer(subject.model)
    grad_cam(subject.model, subject.see(read.pictures)[:1], layer)
    return layer


def views(explanation: Explanation, read: Read, x: Tensor, found: list[Any]) -> list[View]:
    """The pictures of one batch as the model sees them; `found` is its attention."""
    subject, answers = explanation.subject, _answers(explanation.subject, x)
    classes, sureness = answers or (None, None)
    cams = {layer: grad_cam(subject.model, x, layer, classes).cpu() for layer in explanation.layers}
    rolled = _or_note(explanation, lambda: rollout(found).cpu()) if found else None  # (B, h, w)
    tokens = token_maps(found)
    maps = [layer for layer in found if layer.kind == "map" and layer.keys.grid is not None]
    chosen = [maps[i] for i in np.linspace(0, len(maps) - 1, min(SHOWN_LAYERS, len(maps))).round().astype(int)]
    rows = []
    for i, (name, label) in enumerate(zip(read.names, read.labels, strict=True)):
        view = View(name, visible(read.pictures[i], brighten=True), truth=subject.classes[label] if label >= 0 else "")
        if classes is not None and sureness is not None:
            view.answer, view.sureness = subject.classes[int(classes[i])], float(sureness[i])
            view.of_pixels = subject.per_pixel
        view.cams = {layer: _to_one(cam[i]) for layer, cam in cams.items()}
        view.rollout = None if rolled is None else rolled[i].numpy()
        if len(explanation.views) + i < CLOSELY:
            point = _strongest(next(iter(view.cams.values()), np.zeros((1, 1))), (x.shape[2], x.shape[3]))
            view.heads = [_heads(layer, i, point) for layer in chosen]
            view.tokens = [module.of(i) for module in tokens]
        rows.append(view)
    return rows


@torch.no_grad()
def _answers(subject: Subject, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The class of each picture and how sure the model is; of a segmenter the class of most pixels, and its part.

    The background is asked for where there is nothing else. Where a class was asked for it is that one.
    """
    if not subject.scores_classes:
        return None
    answer, asked = subject.model(x), subject.asked
    if subject.per_pixel:
        given = answer["out"].argmax(dim=1).flatten(1)  # (B, h * w)
        parts = F.one_hot(given, answer["out"].shape[1]).double().mean(dim=1)  # (B, K)
        plain = torch.zeros_like(parts[0]).index_fill(0, torch.tensor(background(subject.classes), dtype=torch.long), 1)
        likeliest = (parts - plain.to(parts)).argmax(dim=1)
    else:
        parts = answer.double().sigmoid() if subject.multilabel else answer.double().softmax(dim=1)
        likeliest = parts.argmax(dim=1)
    classes = likeliest if asked is None else torch.full_like(likeliest, asked)
    return classes, parts.gather(1, classes[:, None]).squeeze(1)


def _to_one(values: Tensor) -> np.ndarray:
    return (values / values.max().clamp(min=1e-30)).float().numpy()


def _strongest(values: np.ndarray, size: tuple[int, int]) -> tuple[int, int]:
    """The pixel where a map is largest, the middle where it is the same everywhere."""
    if values.max() == values.min():
        return size[0] // 2, size[1] // 2
    row, column = divmod(int(values.argmax()), values.shape[1])
    return int((row + 0.5) * size[0] / values.shape[0]), int((column + 0.5) * size[1] / values.shape[1])


def _heads(layer: Any, picture: int, point: tuple[int, int]) -> Heads:
    """Of the class token or, where there is none, of the place at `point`."""
    query = 0 if layer.queries.extra else layer.queries.grid.index(*point)
    row = layer.rows(query, query + 1)[picture, :, 0, layer.keys.extra :]
    maps = row.unflatten(1, (layer.keys.grid.height, layer.keys.grid.width)).float().cpu().numpy()
    return Heads(layer.name, maps, None if layer.queries.extra else point)


def similarity_between(explanations: Sequence[Explanation], found: Any) -> Similarity | None:
    """How alike the layers of two models are; None and a note at the second where that cannot be said."""
    one, other = (explanation.subject for explanation in explanations)
    reads, others = (read_pictures(found, subject, None, [], []) for subject in (one, other))
    if not comparable(reads) or not comparable(others):  # as the notes say
        return None
    if [read.names for read in reads] != [read.names for read in others]:
        note = f"Its layers are not compared with those of {one.name}, for which other pictures are of one size."
        explanations[1].notes.append(note)
        return None

    def compare() -> Similarity:
        inputs, as_other = ((s.see(r.pictures) for r in rs) for s, rs in ((one, reads), (other, others)))
        layers, other_layers = block_layers(one.model), block_layers(other.model)
        return feature_similarity(one.model, inputs, layers, other.model, other_layers, as_other)

    return _or_note(explanations[1], compare)
