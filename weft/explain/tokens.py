"""The pixels that the tokens of VT are made of: figure 6 of the paper.

Row 1, A: which pixels make each token, as the tokenizer weighs them. Row 2, W A: which pixels each token meets, by way
of the tokens l' that it attends to with the weights W of the transformer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.explain.attention.capture import LayerAttention


@dataclass(frozen=True)
class TokenMaps:
    """The maps of a VT module's tokens, for a batch of pictures."""

    name: str  # of the VT module
    maps: Tensor  # (B, L, h, w): each adds up to 1 over the pixels
    interactions: Tensor | None  # (B, L, h, w), likewise; None where no transformer relates the tokens

    def of(self, picture: int) -> "TokenMaps":
        """Those of one picture, (1, L, h, w), on the host."""
        one = slice(picture, picture + 1)
        met = None if self.interactions is None else self.interactions[one].cpu()
        return TokenMaps(self.name, self.maps[one].cpu(), met)


def token_maps(layers: "Sequence[LayerAttention]") -> list[TokenMaps]:
    """The maps of every VT module among the `layers` that `attention_of` found; none in models without such modules."""
    relations = {_module(layer.name): layer for layer in layers if layer.kind == "tokens"}
    found = []
    for layer in layers:
        if layer.kind == "tokenizer" and layer.keys.grid is not None:
            made = _mean_over_heads(layer)[..., layer.keys.extra :]  # (B, L, h * w)
            related = relations.get(_module(layer.name))
            # A recurrent tokenizer passes some tokens on as they are; those have no pixels of their own.
            weights = None if related is None else _mean_over_heads(related)[:, : made.shape[1], : made.shape[1]]
            shape = layer.keys.grid.height, layer.keys.grid.width
            met = None if weights is None else (weights @ made).unflatten(2, shape)
            found.append(TokenMaps(_module(layer.name), made.unflatten(2, shape), met))
    return found


def _mean_over_heads(layer: "LayerAttention") -> Tensor:
    return torch.cat([rows.mean(dim=1) for _, rows in layer.chunks()], dim=1)  # (B, queries, keys)


def _module(name: str) -> str:
    """Of which module the layer is a part; one in a list, as the tokenizers of VT-FPN's levels, stands for itself."""
    parent, _, last = name.rpartition(".")
    return name if last.isdigit() else parent
