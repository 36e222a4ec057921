"""The attention of a model, computed when it is asked for, from queries and keys that were seen during a pass.

    layers = attention_of(model, pictures)
    for layer in layers:
        print(layer.name, layer.heads, layer.rows(0, 1).shape)

A plain model runs as always, with attention that never writes the weights to memory, and gives the same answers to the
last bit; blocks of `weft.fast` compute plainly as long as they are read. What is kept of a layer is as large as its
map; its weights, which are as large as the map squared, exist for as many rows at a time as fit.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import WeftError, did_you_mean
from weft.explain.attention.readers import RecordedAttention, Scores, Shape, Tap, TokenLayout, taps_of
from weft.fast.replay import Replayed

MOST_NUMBERS = 2**24  # of a chunk of rows: 64 MiB
POWERS = (1, 2, 4, 8, 16, 32, 64)  # strides of the families


@dataclass(frozen=True)
class Grid:
    """Where tokens lie in the picture: that in row i and column j is centred at start + step * (i, j), in pixels."""

    height: int
    width: int
    step: tuple[float, float]
    start: tuple[float, float]

    def centers(self) -> Tensor:
        """(height * width, 2) rows and columns of pixels, in float64."""
        y = torch.arange(self.height, dtype=torch.float64) * self.step[0] + self.start[0]
        x = torch.arange(self.width, dtype=torch.float64) * self.step[1] + self.start[1]
        return torch.cartesian_prod(y, x)

    def index(self, y: float, x: float) -> int:
        """The token nearest to a pixel; of two, the one below or to the right."""
        row, column = (math.floor((p - a) / s + 0.5) for p, a, s in zip((y, x), self.start, self.step, strict=True))
        return min(max(row, 0), self.height - 1) * self.width + min(max(column, 0), self.width - 1)


@dataclass(frozen=True)
class Tokens:
    """Queries or keys: `extra` ones that have no place, then those of a grid, row by row.

    Class tokens have no place, nor have the tokens of a Visual Transformer and the layers of CeiT's LCA.
    """

    extra: int
    grid: Grid | None

    def __len__(self) -> int:
        return self.extra + (self.grid.height * self.grid.width if self.grid else 0)


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer for a batch of pictures.

    `kind` says who asks whom:
        "map"         the tokens of a map and their class token ask these tokens
        "tokenizer"   the tokens of a Visual Transformer ask the pixels
        "tokens"      they ask each other
        "projector"   the pixels ask them
        "layers"      the last class token asks those of all layers: CeiT's LCA
    """

    name: str
    kind: str
    heads: int
    queries: Tokens
    keys: Tokens
    pictures: int
    parts: list[Scores] = field(repr=False)

    @property
    def device(self) -> torch.device:
        return self.parts[0].q.device

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """(B, heads, stop - start, keys) weights, 0 outside a window.

        A row sums to 1, but for what falls on padding, which takes part in CSWin and in timm's Swin.
        """
        stop = len(self.queries) if stop is None else stop
        parts = [part.rows(start, stop) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def chunks(self, start: int = 0, stop: int | None = None, most: int = MOST_NUMBERS) -> Iterator[tuple[int, Tensor]]:
        """These rows in pieces of at most `most` numbers, or of one row: (index of the first row, rows)."""
        stop = len(self.queries) if stop is None else stop
        keys = max(part.k.shape[2] for part in self.parts)
        step = max(most // (self.pictures * self.heads * keys), 1)
        for first in range(start, stop, step):
            yield first, self.rows(first, min(first + step, stop))

    def received(self) -> Tensor:
        """(B, heads, keys) attention that each key gets in the mean over all queries."""
        return sum((rows.sum(dim=2) for _, rows in self.chunks()), torch.zeros(())) / len(self.queries)


def attention_layers(model: nn.Module) -> list[str]:
    """Names of the layers whose attention can be read."""
    return [tap.name for tap in taps_of(_bare_model(model))[0]]


def left_out(model: nn.Module) -> dict[str, str]:
    """Layers whose attention cannot be read, and why."""
    return taps_of(_bare_model(model))[1]


@torch.no_grad()
def attention_of(model: nn.Module, pictures: Tensor, layers: Sequence[str] | None = None) -> list[LayerAttention]:
    """The attention of a model in evaluation mode for (B, C, H, W) pictures, layer by layer as they run.

    `layers`: names, or patterns such as "stages.2.*"; by default all that `attention_layers` names.
    """
    model = _bare_model(model)
    if model.training:
        raise WeftError("attention_of takes a model in evaluation mode; call model.eval() first.")
    with record_attention(model, (pictures.shape[2], pictures.shape[3]), layers) as found:
        model(pictures)
    for layer in found:
        if layer.pictures != len(pictures):
            raise WeftError(
                f"{layer.name} splits its attention in a way that cannot be read; leave it out of `layers`."
            )
    return found


@contextmanager
def record_attention(
    model: nn.Module, size: tuple[int, int], layers: Sequence[str] | None = None
) -> Iterator[list[LayerAttention]]:
    """Reads the pass that `model` makes, inside the `with`, over pictures of this height and width.

    The list is filled at the end of the `with`. A layer that runs twice is kept as it was the last time.
    """
    model = _bare_model(model)
    found: dict[str, LayerAttention] = {}
    order: list[LayerAttention] = []
    handles: list[Any] = []
    try:
        for tap in _chosen(model, layers):
            handles += tap.hooks(partial(_keep, found, tap, size))
        yield order
    finally:
        for handle in handles:
            handle.remove()
        order[:] = found.values()


def _bare_model(model: nn.Module) -> nn.Module:
    """Without what records or compiles it: there hooks would not be called."""
    if isinstance(model, Replayed):
        return _bare_model(model.model)
    return getattr(model, "_orig_mod", model)


def _chosen(model: nn.Module, layers: Sequence[str] | None) -> list[Tap]:
    taps, reasons = taps_of(model)
    if not taps:
        why = "; ".join(f"{name} {reason}" for name, reason in list(reasons.items())[:1]) or "it has no such layer"
        raise WeftError(f"{type(model).__name__} has no attention that can be read: {why}.")
    if layers is None:
        return taps
    names = [tap.name for tap in taps]
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            why = f": {reasons[pattern]}." if pattern in reasons else f".{did_you_mean(pattern, names)}"
            raise WeftError(f"No attention layer is called {pattern!r}{why} There are {', '.join(names)}.")
    return [tap for tap in taps if any(fnmatchcase(tap.name, pattern) for pattern in layers)]


def _keep(found: dict[str, LayerAttention], tap: Tap, size: Shape, recorded: RecordedAttention) -> None:
    found.pop(tap.name, None)
    queries, keys, tile = recorded.queries, recorded.keys, None
    if recorded.map is not None:
        tile = _tile(recorded.map, size)
    elif tap.kind == "map":
        queries = keys = _placed(len(queries), size)
        tile = (size[0] / queries.shape[0], size[1] / queries.shape[1]) if queries.shape else None
    found[tap.name] = LayerAttention(
        tap.name,
        tap.kind,
        sum(part.q.shape[1] for part in recorded.parts),
        _tokens(queries, tile),
        _tokens(keys, tile),
        len(recorded.parts[0].q),
        recorded.parts,
    )


def _placed(length: int, size: Shape) -> TokenLayout:
    """`length` tokens as a grid with the shape of the picture, behind as few others as possible."""
    for extra in range(length):
        count = length - extra
        height = max(round((count * size[0] / size[1]) ** 0.5), 1)
        width = count // height
        if height * width == count and abs(height * size[1] - width * size[0]) < max(size):
            return TokenLayout(extra, (height, width))
    return TokenLayout(length)


def _tokens(side: TokenLayout, tile: tuple[float, float] | None) -> Tokens:
    if side.shape is None or tile is None:
        return Tokens(side.extra, None)
    step = tile[0] * side.step[0], tile[1] * side.step[1]
    start = tile[0] * side.first[0], tile[1] * side.first[1]
    return Tokens(side.extra, Grid(*side.shape, step, start))


def _tile(shape: Shape, size: Shape) -> tuple[float, float]:
    """Height and width in pixels of what one token of a map stands for.

    Strides are powers of two; pictures that these do not divide are padded, or cut by less than one token.
    """

    def error(stride: int) -> tuple[bool, float]:
        counts = [(pixels / stride, tokens) for pixels, tokens in zip(size, shape, strict=True)]
        return any(math.ceil(count) != tokens for count, tokens in counts), max(abs(c - t) for c, t in counts)

    stride = min(POWERS, key=error)
    return (stride, stride) if error(stride)[1] < 1 else (size[0] / shape[0], size[1] / shape[1])
