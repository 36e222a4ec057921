"""Attention rollout (Abnar and Zuidema 2020): which pixels the answer has seen, through all layers of attention.

Every layer passes on half of what it gets, by its shortcut, and half as its attention, in the mean over the heads, has
it. Rollout multiplies these matrices. Asked from one token it needs one vector, which goes back from the last layer to
the first: memory is that of a map, and maps of any sizes can follow each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.explain.attention.capture import Grid, LayerAttention


def rollout(layers: list[LayerAttention], query: tuple[float, float] | None = None) -> Tensor:
    """(B, h, w) parts of the answer that come from the tokens of the first map.

    They sum to 1, less what stays in class tokens, which start the same for all pictures. The answer is the class token
    or, without one, the mean of the map or of a Visual Transformer's tokens; with `query` it is what the last map has
    at this pixel, (y, x).
    """
    if not layers:
        raise WeftError("rollout takes the layers that attention_of returns, and was given none.")
    state = _answer(layers, query)
    for layer in reversed(layers):
        BACK[layer.kind](state, layer)
    if state.grid is None:
        raise WeftError(f"rollout must end in pixels, but {layers[0].name} attends to none; leave no layer out.")
    return state.map.unflatten(1, (state.grid.height, state.grid.width))


@dataclass
class _State:
    """Parts of the answer that come, at some place in the model, from what there is: (B, how many) each."""

    extra: Tensor  # class tokens
    tokens: Tensor  # of a Visual Transformer
    map: Tensor
    grid: Grid | None  # of the map
    later: list[Tensor]  # (B, 1) of the class tokens behind the layers that are still to come: what CeiT's LCA asked

    def moved_to(self, grid: Grid) -> Tensor:
        """The map on another grid."""
        if self.grid is None:
            return self.map.new_zeros(len(self.map), grid.height * grid.width)
        return spread(self.map, self.grid, grid)


def _answer(layers: list[LayerAttention], query: tuple[float, float] | None) -> _State:
    maps = [layer for layer in layers if layer.kind != "layers"]
    for layer in layers:
        if not maps or (layer.kind == "layers" and len(layer.keys) != len(maps)):
            raise WeftError(
                f"{layer.name} attends to {len(layer.keys)} layers, but {len(maps)} were given; leave none out."
            )
    last = maps[-1]
    some = last.rows(0, 1)
    nothing = some.new_zeros(last.pictures, 0)
    state = _State(nothing, nothing, nothing, None, [])
    grid = last.queries.grid
    if query is not None:
        if grid is None:
            raise WeftError(f"{last.name}, the last layer, has no pixels to start from; leave out `query`.")
        state.grid, state.map = grid, some.new_zeros(last.pictures, grid.height * grid.width)
        state.map[:, grid.index(*query)] = 1
    elif last.kind in ("tokens", "tokenizer"):
        state.tokens = some.new_full((last.pictures, last.queries.extra), 1 / last.queries.extra)
    elif last.queries.extra:
        state.extra = some.new_zeros(last.pictures, last.queries.extra)
        state.extra[:, 0] = 1
    elif grid is not None:
        state.grid, state.map = grid, some.new_full((last.pictures, grid.height * grid.width), 1 / len(last.queries))
    return state


def ask(layer: LayerAttention, parts: Tensor) -> Tensor:
    """(B, queries) parts -> (B, keys): whom they come from by the attention of this layer, padding left out."""
    asked = parts.new_zeros(layer.pictures, len(layer.keys))
    for start, rows in layer.chunks():
        shares = parts[:, None, start : start + rows.shape[2]] / rows.sum(dim=3) / layer.heads  # (B, heads, queries)
        asked += torch.einsum("bhq,bhqk->bk", shares, rows)
    return asked


def _back_map(state: _State, layer: LayerAttention) -> None:
    queries, keys = layer.queries, layer.keys
    assert keys.grid is not None, layer.name
    grid = queries.grid or keys.grid  # in the last block of a fused CvT the class token alone asks
    known = min(queries.extra, state.extra.shape[1])
    extra, pixels = state.extra.new_zeros(layer.pictures, queries.extra), state.moved_to(grid)
    extra[:, :known] = state.extra[:, :known]
    if state.later:
        extra[:, :1] += state.later.pop()
    asked = ask(layer, torch.cat([extra, pixels], dim=1)[:, : len(queries)])
    state.extra = (extra + asked[:, : keys.extra]) / 2
    state.map, state.grid = (pixels + spread(asked[:, keys.extra :], keys.grid, grid)) / 2, grid


def _back_layers(state: _State, layer: LayerAttention) -> None:
    """CeiT's LCA: half of the answer is the last class token, half are those of all layers."""
    if not state.extra.shape[1]:  # a pixel is asked
        return
    asked = ask(layer, state.extra)
    asked[:, -1:] += state.extra
    state.later = list((asked / 2).split(1, dim=1))
    state.extra = torch.zeros_like(state.extra)


def _back_tokens(state: _State, layer: LayerAttention) -> None:
    if state.tokens.shape[1] != len(layer.queries):
        raise WeftError(f"{layer.name} relates the tokens of several maps, but rollout follows only one.")
    state.tokens = (state.tokens + ask(layer, state.tokens)) / 2


def _back_tokenizer(state: _State, layer: LayerAttention) -> None:
    """Tokens have no shortcut, except for those that a recurrent tokenizer passes on as they are."""
    assert layer.keys.grid is not None
    asking = state.tokens[:, : layer.queries.extra]
    state.map = state.moved_to(layer.keys.grid) + ask(layer, asking)
    state.grid = layer.keys.grid
    state.tokens = torch.cat([torch.zeros_like(asking), state.tokens[:, layer.queries.extra :]], dim=1)


def _back_projector(state: _State, layer: LayerAttention) -> None:
    assert layer.queries.grid is not None
    pixels = state.moved_to(layer.queries.grid)
    tokens = state.tokens if state.tokens.shape[1] else pixels.new_zeros(layer.pictures, len(layer.keys))
    state.tokens = tokens + ask(layer, pixels) / 2
    state.map, state.grid = pixels / 2, layer.queries.grid


BACK = {
    "map": _back_map,
    "layers": _back_layers,
    "tokens": _back_tokens,
    "tokenizer": _back_tokenizer,
    "projector": _back_projector,
}


def spread(parts: Tensor, source: Grid, target: Grid) -> Tensor:
    """(B, tokens of `source`) -> (B, tokens of `target`): each token's part goes to those that it shares area with.

    Tokens have equal tiles of the picture here, so that even parts stay even. By their centres, of which strided keys
    have the first at the picture's edge, some places would be favoured in every layer.
    """
    if source == target:
        return parts
    rows = _overlap(source.height, target.height).to(parts)
    columns = _overlap(source.width, target.width).to(parts)
    return torch.einsum("bij,ki,lj->bkl", parts.unflatten(1, (source.height, source.width)), rows, columns).flatten(1)


def _overlap(source: int, target: int) -> Tensor:
    """(target, source): the part of each of `source` equal pieces of a length that is in each of `target` others."""
    a, b = (torch.linspace(0, 1, count + 1, dtype=torch.float64) for count in (source, target))
    return source * (torch.minimum(a[1:], b[1:, None]) - torch.maximum(a[:-1], b[:-1, None])).clamp(min=0)


def nearest(grid: Grid, others: Grid) -> Tensor:
    """For each token of `others` the nearest one of `grid`; of two, the one below or to the right."""
    steps = (others.centers() - torch.tensor(grid.start)) / torch.tensor(grid.step)
    row, column = (steps + 0.5).floor().long().unbind(1)  # round() would take the even one of two
    return row.clamp(0, grid.height - 1) * grid.width + column.clamp(0, grid.width - 1)
