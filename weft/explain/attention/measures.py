"""Attention in numbers: how far it reaches, how local it is, how sharp, and whether it is on the object.

    attention_distance      ViTAE, figure 3
    local_ratio             Visual Transformers, figure 5
    attention_entropy       Visual Transformers, section 6
    foreground_attention    Visual Transformers, section 6

All but the entropy are about the tokens of a map: class tokens, which have no place, and padding are left out, and what
remains of a row is counted as the whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.explain.attention.capture import Grid, LayerAttention
from weft.explain.attention.rollout import nearest

EXACT = "donot_use_mm_for_euclid_dist"  # its other ways round near zero
PIECE = 64  # queries whose neighbours and distances are looked at together


@dataclass(frozen=True)
class Measure:
    """A number for each head, and the one that attention has that looks at all keys alike."""

    heads: list[float]
    uniform: float

    @property
    def mean(self) -> float:
        return sum(self.heads) / len(self.heads)


@dataclass(frozen=True)
class AttentionNumbers:
    """The attention of one layer over `n` pictures; None is what does not apply."""

    name: str
    kind: str
    n: int
    entropy: Measure
    distance: Measure | None  # where queries and keys have places in the picture
    local_ratio: Measure | None
    foreground: Measure | None  # where keys have places, and masks are given

    @property
    def contrast(self) -> Measure | None:
        """How often a pixel of the foreground is looked at for once that one of the background is: VT has 1.283.

        None where there is no foreground or no background, or a head that looks at no background at all.
        """
        if self.foreground is None or not 0 < self.foreground.uniform < 1 or max(self.foreground.heads) >= 1:
            return None
        even = self.foreground.uniform / (1 - self.foreground.uniform)
        return Measure([share / (1 - share) / even for share in self.foreground.heads], 1.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"contrast": asdict(self.contrast) if self.contrast else None}


def attention_numbers(layers: Sequence[LayerAttention], masks: Tensor | None = None) -> list[AttentionNumbers]:
    """All numbers of all layers; `masks` as in `foreground_attention`."""
    return [
        AttentionNumbers(
            layer.name,
            layer.kind,
            layer.pictures,
            attention_entropy(layer),
            attention_distance(layer),
            local_ratio(layer),
            None if masks is None else foreground_attention(layer, masks),
        )
        for layer in layers
    ]


def mean_numbers(batches: Sequence[Sequence[AttentionNumbers]]) -> list[AttentionNumbers]:
    """Of several batches of one model, every picture counting the same; of the foreground, all those with masks."""
    return [_mean_of_layer(numbers) for numbers in zip(*batches, strict=True)]


def attention_entropy(layer: LayerAttention) -> Measure:
    """In nats. Looking at all keys alike has log(keys), which VT compares its tokenizers with."""

    def of_rows(rows: Tensor, _: int) -> Tensor:
        total = rows.sum(dim=3)  # 1, but for padding
        return total.log() - torch.special.xlogy(rows, rows).sum(dim=3) / total

    return Measure(_per_head(layer, of_rows, 0, len(layer.queries)), math.log(len(layer.keys)))


def attention_distance(layer: LayerAttention) -> Measure | None:
    """Mean distance, in pixels, from the tokens of a map to those that they look at, weighted as they do.

    None where queries or keys have no places in the picture.
    """
    queries, keys = layer.queries.grid, layer.keys.grid
    if queries is None or keys is None:
        return None
    asking, asked = queries.centers().to(layer.device), keys.centers().to(layer.device)
    return _over_pairs(layer, lambda part: torch.cdist(asking[part], asked, compute_mode=EXACT))


def local_ratio(layer: LayerAttention) -> Measure | None:
    """Part of the attention of a map's tokens that stays in the 3x3 keys around the nearest one.

    None where queries or keys have no places in the picture.
    """
    queries, keys = layer.queries.grid, layer.keys.grid
    if queries is None or keys is None:
        return None
    near = nearest(keys, queries).to(layer.device)  # (queries,)
    rows, columns = (torch.arange(side, device=layer.device) for side in (keys.height, keys.width))

    def neighbours(part: slice) -> Tensor:
        here = near[part, None]
        down, right = (here // keys.width - rows).abs() <= 1, (here % keys.width - columns).abs() <= 1
        return (down[:, :, None] & right[:, None, :]).flatten(1).float()

    return _over_pairs(layer, neighbours)


def foreground_attention(layer: LayerAttention, masks: Tensor) -> Measure | None:
    """Part of the attention that lies on (B, H, W) `masks`, True on the foreground, at the size of the pictures.

    Who looks are class tokens or, where there are none, all queries. None where keys have no places in the picture.
    """
    if layer.keys.grid is None:
        return None
    if len(masks) != layer.pictures:
        raise WeftError(f"{len(masks)} masks do not fit {layer.pictures} pictures.")
    cover = _coverage(masks.to(layer.device), layer.keys.grid)

    def of_rows(rows: Tensor, _: int) -> Tensor:
        return _on_map(layer, rows, cover[:, None, None].to(rows.dtype))

    stop = layer.queries.extra or len(layer.queries)
    return Measure(_per_head(layer, of_rows, 0, stop), float(cover.mean()))


def _per_head(layer: LayerAttention, of_rows: Callable[[Tensor, int], Tensor], start: int, stop: int) -> list[float]:
    """Mean over pictures and queries of the (B, heads, queries) that `of_rows` makes of rows and their first index."""
    total = torch.zeros(layer.heads, dtype=torch.float64, device=layer.device)
    for first, rows in layer.chunks(start, stop):
        total += of_rows(rows, first).double().sum(dim=(0, 2))
    return (total / (layer.pictures * (stop - start))).tolist()


def _over_pairs(layer: LayerAttention, value: Callable[[slice], Tensor]) -> Measure:
    """Mean of what pairs of tokens of the maps have, as much as one looks at the other.

    `value` gives it for a slice of the queries that have places: (queries, keys).
    """
    extra = layer.queries.extra

    def of_rows(rows: Tensor, first: int) -> Tensor:
        here = value(slice(first - extra, first - extra + rows.shape[2]))
        return _on_map(layer, rows, here.to(rows.dtype))

    stop, count = len(layer.queries), len(layer.queries) - extra
    means = (value(slice(i, i + PIECE)).mean(dim=1).sum() for i in range(0, count, PIECE))
    uniform = float(sum(means)) / count
    return Measure(_per_head(layer, of_rows, extra, stop), uniform)


def _on_map(layer: LayerAttention, rows: Tensor, values: Tensor) -> Tensor:
    """(B, heads, queries) means of the values that keys with a place have, weighted as they are looked at."""
    placed = rows[..., layer.keys.extra :]
    return (placed * values).sum(dim=3) / placed.sum(dim=3).clamp(min=torch.finfo(rows.dtype).tiny)


def _coverage(masks: Tensor, grid: Grid) -> Tensor:
    """(B, H, W) -> (B, tokens): the part of a token's tile, as far as it is in the picture, that is foreground."""
    sums = torch.nn.functional.pad(masks.double(), (1, 0, 1, 0)).cumsum(dim=1).cumsum(dim=2)  # of all above and left
    y, x = grid.centers().to(masks.device).unbind(1)

    def edges(centers: Tensor, step: float, side: int) -> tuple[Tensor, Tensor]:
        low, high = ((centers + sign * step / 2).round().long().clamp(0, side) for sign in (-1, 1))
        return low, high

    (top, bottom), (left, right) = edges(y, grid.step[0], masks.shape[1]), edges(x, grid.step[1], masks.shape[2])
    inside = sums[:, bottom, right] - sums[:, top, right] - sums[:, bottom, left] + sums[:, top, left]
    return inside / ((bottom - top) * (right - left)).clamp(min=1)


def _mean_of_layer(numbers: Sequence[AttentionNumbers]) -> AttentionNumbers:
    counts = [one.n for one in numbers]

    def mean(measures: Sequence[Any]) -> Any:
        known, weights = [m for m in measures if m], [n for n, m in zip(counts, measures, strict=True) if m]
        if not known:
            return None
        heads = zip(*(measure.heads for measure in known), strict=True)
        return Measure([_weighted(head, weights) for head in heads], _weighted([m.uniform for m in known], weights))

    fields = ("entropy", "distance", "local_ratio", "foreground")
    means = {field: mean([getattr(one, field) for one in numbers]) for field in fields}
    return AttentionNumbers(numbers[0].name, numbers[0].kind, sum(counts), **means)


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
