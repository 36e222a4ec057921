"""Looks into a model: what it decides by, what its attention does, how far it sees. Pictures in, numbers out.

`exhibits` says how the findings are shown, `figures` and `page` draw them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import WeftError
from weft.explain.attention.capture import LayerAttention, attention_layers, attention_of, left_out
from weft.explain.attention.measures import AttentionNumbers, attention_numbers, mean_numbers
from weft.explain.attention.rollout import rollout
from weft.explain.explanation import Explanation, HeadMaps, PictureView
from weft.explain.invariance import robustness
from weft.explain.maps import block_layers, default_layer, name_in_trunk
from weft.explain.pictures import MOST, NamedPictures, PictureBatch, read_pictures
from weft.explain.receptive import receptive_fields
from weft.explain.saliency import grad_cam
from weft.explain.similarity import FEWEST, Similarity, feature_similarity
from weft.explain.subject import Subject
from weft.explain.tokens import token_maps
from weft.report.overlay import background, visible
from weft.words import many

SHOWN = 8  # pictures that are drawn
CLOSELY = 3  # of these, pictures whose heads and tokens are drawn
SHOWN_LAYERS = 3  # attention layers whose heads are drawn
FIELD_PICTURES = 16  # that the receptive field is averaged over

T = TypeVar("T")
Progress = Callable[[int, int, str], None]  # steps done, of how many, and what part of the work it was


def explain(
    subject: Subject,
    found: NamedPictures,
    *,
    layers: Sequence[str] = (),
    masks: Mapping[str, Path] | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Everything that applies to this model, and a note on what does not.

    Args:
        subject: the model.
        found: the pictures.
        layers: of Grad-CAM; by default the one that `default_layer` knows.
        masks: a file for each picture, by the picture's name.
        progress: is told of every step.
    """
    explanation = Explanation(subject, list(layers))
    unmasked: list[str] = []
    batches = read_pictures(found, subject, masks, explanation.unreadable, unmasked)
    explanation.pictures = sum(len(batch.names) for batch in batches)
    if unmasked:
        explanation.notes.append(f"{many(len(unmasked), 'picture')} without a mask, such as {unmasked[0]}")
    if len(found.names) > MOST:
        explanation.notes.append(f"Only the first {MOST} of {len(found.names)} pictures were used.")
    steps = list(_Analysis(explanation, batches).steps())
    for done, (part, step) in enumerate(steps, start=1):
        step()
        if progress:
            progress(done, len(steps), f"{subject.name}: {part}")
    return explanation


def look(subject: Subject, batch: PictureBatch) -> Explanation:
    """Grad-CAM, attention and tokens of a few pictures, without the numbers over many: what can be waited for."""
    explanation = Explanation(subject, [], pictures=len(batch.names))
    analysis = _Analysis(explanation, [batch])
    analysis.begin()
    x = subject.see(batch.pictures)
    explanation.views = make_views(explanation, batch, x, analysis.attention(x))
    return explanation


class _Analysis:
    """The work on one model, in steps that each add to its explanation."""

    def __init__(self, explanation: Explanation, batches: list[PictureBatch]) -> None:
        self.explanation, self.batches = explanation, batches
        self.subject, self.model, self.notes = explanation.subject, explanation.subject.model, explanation.notes
        self.has_attention = bool(attention_layers(self.model))
        self.measured: list[list[AttentionNumbers]] = []  # for each batch

    def begin(self) -> None:
        """Chooses the layer of Grad-CAM, and notes what does not apply to this model."""
        subject, model, notes = self.subject, self.model, self.notes
        self._check_answers()
        if not subject.scores_classes:
            notes.append("Grad-CAM needs one score for a picture, which a detector does not give.")
        elif not self.explanation.layers:
            layers = _or_note(self.explanation, lambda: [_default_cam(subject, self.batches[0])])
            self.explanation.layers = layers or []
        if not self.has_attention:
            notes.append("None of the model's layers has attention that can be read.")
        notes += [f"{name_in_trunk(model, name)}: {why}" for name, why in left_out(model).items()]

    def _check_answers(self) -> None:
        """Raises where the model says nothing: every map of it would be empty, or no number."""
        if not self.subject.per_picture or not self.batches:
            return
        with torch.no_grad():
            answers = self.model(self.subject.see(self.batches[0].pictures[:1]))
        if not answers.isfinite().any():
            raise WeftError(f"{self.subject.name}: its answer is no number; its weights are damaged, or far too large.")

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The part of the work that each step belongs to, and the step; notes on what does not apply come first."""
        subject, notes = self.subject, self.notes
        self.begin()
        first = f"Grad-CAM and attention, {many(self.explanation.pictures, 'picture')}"
        for batch in self.batches:
            yield first, lambda batch=batch: self.look_at(batch)
        yield first, self.summarise_attention
        yield "receptive fields", self.find_fields
        if comparable(self.batches):
            yield "similarity of layers", self.compare_layers
        else:
            notes.append(f"The similarity of layers needs at least {FEWEST} pictures of one size.")
        if subject.per_picture and not subject.multilabel:
            yield "robustness to scale and shift", self.measure_robustness
        else:
            notes.append("Robustness to scale and shift is measured only for classifiers with one class per picture.")

    def inputs(self) -> Iterator[Tensor]:
        return (self.subject.see(batch.pictures) for batch in self.batches)

    def attention(self, x: Tensor) -> list[LayerAttention]:
        attention = attention_of(self.model, x) if self.has_attention else []
        return [replace(layer, name=name_in_trunk(self.model, layer.name)) for layer in attention]

    def look_at(self, batch: PictureBatch) -> None:
        """Grad-CAM, rollout and heads of the pictures that are drawn; attention of all in numbers."""
        x = self.subject.see(batch.pictures)
        attention = self.attention(x)
        if attention:
            masks = None if batch.masks is None else batch.masks.to(x.device)
            self.measured.append(attention_numbers(attention, masks=masks))
        room = SHOWN - len(self.explanation.views)
        if room > 0:
            self.explanation.views += make_views(self.explanation, batch, x, attention)[:room]

    def summarise_attention(self) -> None:
        rows = mean_numbers(self.measured) if self.measured else []
        self.explanation.attention = rows
        if rows and not any(row.distance for row in rows):
            self.notes.append("Its tokens have no positions, which the distance and the locality of attention need.")
        shares = [row.foreground.uniform for row in rows if row.foreground]
        if shares and not 0 < shares[0] < 1:
            self.notes.append(f"The masks have no {'background' if shares[0] else 'foreground'} to compare with.")

    def find_fields(self) -> None:
        size = self.batches[0].pictures.shape[1:]
        same = [batch.pictures for batch in self.batches if batch.pictures.shape[1:] == size]
        x = self.subject.see(torch.cat([one for some in same for one in some.split(1)][:FIELD_PICTURES]))
        self.explanation.fields = _or_note(self.explanation, lambda: receptive_fields(self.model, x)) or []

    def compare_layers(self) -> None:
        def compare() -> Similarity:
            return feature_similarity(self.model, self.inputs(), block_layers(self.model))

        self.explanation.similarity = _or_note(self.explanation, compare)

    def measure_robustness(self) -> None:
        known, device = all(label >= 0 for batch in self.batches for label in batch.labels), self.subject.device
        labels = (torch.tensor(batch.labels, device=device) if known else None for batch in self.batches)
        self.explanation.robustness = robustness(self.model, zip(self.inputs(), labels, strict=True))


def comparable(batches: Sequence[PictureBatch]) -> bool:
    """Whether the similarity of layers can be estimated."""
    return any(len(batch.names) >= FEWEST for batch in batches)


def _or_note(explanation: Explanation, work: Callable[[], T]) -> T | None:
    """The result of the work, or None and a note on why it does not apply to this model."""
    try:
        return work()
    except WeftError as error:
        if str(error) not in explanation.notes:
            explanation.notes.append(str(error))
        return None


# Pictures that are drawn --------------------------------------------------------------------------------------------


def _default_cam(subject: Subject, batch: PictureBatch) -> str:
    """The layer that Grad-CAM shows by default; raises where it gives no map."""
    layer = default_layer(subject.model)
    grad_cam(subject.model, subject.see(batch.pictures)[:1], layer)
    return layer


def make_views(
    explanation: Explanation, batch: PictureBatch, x: Tensor, attention: list[LayerAttention]
) -> list[PictureView]:
    """The pictures of one batch as the model sees them, `x`, and attends to them."""
    subject, answers = explanation.subject, _answers(explanation.subject, x)
    classes, sureness = answers or (None, None)
    cams = {layer: grad_cam(subject.model, x, layer, classes).cpu() for layer in explanation.layers}
    rolled = _or_note(explanation, lambda: rollout(attention).cpu()) if attention else None  # (B, h, w)
    tokens = token_maps(attention)
    maps = [layer for layer in attention if layer.kind == "map" and layer.keys.grid is not None]
    chosen = [maps[i] for i in np.linspace(0, len(maps) - 1, min(SHOWN_LAYERS, len(maps))).round().astype(int)]
    rows = []
    for i, (name, label) in enumerate(zip(batch.names, batch.labels, strict=True)):
        view = PictureView(
            name, visible(batch.pictures[i], brighten=True), truth=subject.classes[label] if label >= 0 else ""
        )
        if classes is not None and sureness is not None:
            view.answer, view.sureness = subject.classes[int(classes[i])], float(sureness[i])
            view.of_pixels = subject.per_pixel
        view.cams = {layer: _to_one(cam[i]) for layer, cam in cams.items()}
        view.rollout = None if rolled is None else rolled[i].numpy()
        if len(explanation.views) + i < CLOSELY:
            point = _strongest_pixel(next(iter(view.cams.values()), np.zeros((1, 1))), (x.shape[2], x.shape[3]))
            view.heads = [_head_maps(layer, i, point) for layer in chosen]
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


def _strongest_pixel(values: np.ndarray, size: tuple[int, int]) -> tuple[int, int]:
    """The pixel where a map is largest, the middle where it is the same everywhere."""
    if values.max() == values.min():
        return size[0] // 2, size[1] // 2
    row, column = divmod(int(values.argmax()), values.shape[1])
    return int((row + 0.5) * size[0] / values.shape[0]), int((column + 0.5) * size[1] / values.shape[1])


def _head_maps(layer: LayerAttention, picture: int, point: tuple[int, int]) -> HeadMaps:
    """Of the class token or, where there is none, of the place at `point`."""
    asking, keys = layer.queries.grid, layer.keys.grid
    assert keys is not None
    query = 0 if layer.queries.extra or asking is None else asking.index(*point)
    row = layer.rows(query, query + 1)[picture, :, 0, layer.keys.extra :]  # (heads, h * w)
    maps = row.unflatten(1, (keys.height, keys.width)).float().cpu().numpy()
    return HeadMaps(layer.name, maps, None if layer.queries.extra else point)


# Two models ---------------------------------------------------------------------------------------------------------


def similarity_between(explanations: Sequence[Explanation], found: NamedPictures) -> Similarity | None:
    """How alike the layers of two models are; None and a note at the second where that cannot be said."""
    one, other = (explanation.subject for explanation in explanations)
    batches, others = (read_pictures(found, subject, None, [], []) for subject in (one, other))
    if not comparable(batches) or not comparable(others):  # as the notes say
        return None
    if [batch.names for batch in batches] != [batch.names for batch in others]:
        note = f"Its layers are not compared with those of {one.name}, which groups the pictures by other sizes."
        explanations[1].notes.append(note)
        return None

    def compare() -> Similarity:
        inputs, as_other = ((s.see(b.pictures) for b in bs) for s, bs in ((one, batches), (other, others)))
        layers, other_layers = block_layers(one.model), block_layers(other.model)
        return feature_similarity(one.model, inputs, layers, other.model, other_layers, as_other)

    return _or_note(explanations[1], compare)
