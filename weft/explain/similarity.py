"""How alike the features of two layers are: linear CKA (Kornblith et al. 2019).

It is 1 for features that are equal up to a rotation, one factor for all and one shift, and near 0 for unrelated ones.
Batches are enough (Nguyen et al. 2021): numerator and denominator are means over batches, every picture counting the
same, of an estimate without bias (Song et al. 2012), in float64. With few pictures it is far from exact, and may even
be below 0.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import WeftError, did_you_mean
from weft.explain.maps import layer_of, trunk_of

FEWEST = 4  # pictures of a batch; fewer leave nothing to estimate
COLUMNS = 2**16  # features that are multiplied at once


@dataclass(frozen=True)
class Similarity:
    """CKA of every layer in `rows` with every layer in `columns`, over `n` pictures."""

    rows: list[str]
    columns: list[str]
    cka: list[list[float]]
    n: int


@torch.no_grad()
def feature_similarity(
    model: nn.Module,
    batches: Iterable[Tensor],
    layers: Sequence[str] | None = None,
    other: nn.Module | None = None,
    other_layers: Sequence[str] | None = None,
    other_batches: Iterable[Tensor] | None = None,
) -> Similarity:
    """CKA between the outputs of layers of a model in evaluation mode, or between those of two models.

    Args:
        batches: (B, C, H, W) pictures, at least four in a batch; a smaller last one is left out.
        layers: names of modules, of a segmenter in its backbone; by default those of `feature_info`.
        other, other_layers: the model whose layers are the columns, and these; by default they are the rows again.
        other_batches: the same pictures as that model takes them, where it does not take them alike.
    """
    rows = feature_layers(model, layers)
    columns = rows if other is None and other_layers is None else feature_layers(other or model, other_layers)
    cka, n = CKA(), 0
    pairs = ((x, x) for x in batches) if other_batches is None else zip(batches, other_batches, strict=True)
    for pictures, same_pictures in pairs:
        if len(pictures) < FEWEST:
            continue
        first = grams(model, pictures, rows)
        cka.add(first, first if columns is rows else grams(other or model, same_pictures, columns))
        n += len(pictures)
    if n == 0:
        raise WeftError(f"CKA needs batches of at least {FEWEST} pictures.")
    return Similarity(rows, columns, cka.matrix().tolist(), n)


class CKA:
    """Linear CKA of all pairs of layers, from batch after batch."""

    def __init__(self) -> None:
        self.cross = self.first = self.second = torch.zeros((), dtype=torch.float64)

    def add(self, first: Tensor, second: Tensor) -> None:
        """(P, B, B) and (Q, B, B) products of the features of every two pictures."""
        n = first.shape[2]
        self.cross = self.cross + n * hsic(first.unsqueeze(1), second.unsqueeze(0)).cpu()  # (P, Q)
        self.first = self.first + n * hsic(first, first).cpu()
        self.second = self.second + n * hsic(second, second).cpu()

    def matrix(self) -> Tensor:
        """(P, Q); 0 for features that are the same for all pictures."""
        norm = (self.first[:, None] * self.second[None, :]).clamp(min=0).sqrt()
        return torch.where(norm > 0, self.cross / norm, 0.0)


def hsic(k: Tensor, m: Tensor) -> Tensor:
    """The Hilbert-Schmidt independence criterion of (..., B, B) products of features, estimated without bias."""
    n = k.shape[-1]
    diagonal = torch.eye(n, dtype=torch.bool, device=k.device)
    k, m = k.masked_fill(diagonal, 0), m.masked_fill(diagonal, 0)
    rows_k, rows_m = k.sum(dim=-1), m.sum(dim=-1)  # (..., B)
    trace = (k * m).sum(dim=(-2, -1))
    means = rows_k.sum(dim=-1) * rows_m.sum(dim=-1) / ((n - 1) * (n - 2))
    return (trace + means - 2 / (n - 2) * (rows_k * rows_m).sum(dim=-1)) / (n * (n - 3))


def gram(features: Tensor) -> Tensor:
    """(B, ...) -> (B, B) products of the features of every two pictures, in float64."""
    pieces = [piece.double() for piece in features.flatten(1).split(COLUMNS, dim=1)]
    return torch.stack([piece @ piece.T for piece in pieces]).sum(dim=0)


def grams(model: nn.Module, pictures: Tensor, layers: Sequence[str]) -> Tensor:
    """(layers, B, B) of one pass. Features are dropped as soon as they are multiplied."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name in layers:

            def see(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                tensors = output if isinstance(output, tuple | list) else [output]
                found[name] = gram(next(x for x in tensors if isinstance(x, Tensor)))

            stack.callback(layer_of(model, name).register_forward_hook(see).remove)
        model(pictures)
    for name in layers:
        if name not in found:
            raise WeftError(f"{name} was not called; a fused model leaves layers out, so give the model itself.")
    return torch.stack([found[name] for name in layers])


def feature_layers(model: nn.Module, layers: Sequence[str] | None) -> list[str]:
    """These layers, or those of `feature_info`; raises for what does not exist."""
    if model.training:
        raise WeftError("feature_similarity takes models in evaluation mode; call model.eval() first.")
    if layers is None:
        info: Any = getattr(model, "feature_info", None)
        if not info:
            raise WeftError(f"{type(model).__name__} does not say which layers have features; name them in `layers`.")
        return [entry["module"] for entry in getattr(info, "info", info)]
    names = [name for name, _ in trunk_of(model).named_modules()]
    for name in layers:
        if name not in names:
            raise WeftError(f"{type(model).__name__} has no layer {name!r}.{did_you_mean(name, names)}")
    return list(layers)
