"""The output of a layer as a (B, h, w, C) map: of Weft's models, of timm's, and of those under a head that segments.

Layers are modules by their names, as `model.named_modules()` has them. Their outputs come as maps with the channels
last or in front, as tokens with or without a class token, or as a map and a class token; which it is shows in the
shape and in the strides that the model says it has.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.errors import WeftError, did_you_mean
from weft.models.base import HybridModel
from weft.models.vitae import ViTAE

STAGES = 5  # at most so many levels of a model are shown


def trunk_of(model: nn.Module) -> nn.Module:
    """The network that sees the picture: the model itself, or what a head for segmentation or detection stands on."""
    while not hasattr(model, "feature_info"):
        inner = next((getattr(model, name) for name in ("backbone", "trunk", "body") if hasattr(model, name)), None)
        if inner is None:
            return model
        model = inner
    return model


def name_in_trunk(model: nn.Module, name: str) -> str:
    """The name that a module of the model has in its trunk."""
    trunk = trunk_of(model)
    return name.removeprefix(next(f"{above}." if above else "" for above, m in model.named_modules() if m is trunk))


def layer_of(model: nn.Module, name: str) -> nn.Module:
    modules = dict(trunk_of(model).named_modules())
    if not name or name not in modules:
        known = [known for known in modules if known]
        some = ", ".join(_offered(trunk_of(model))[-STAGES:] or known[:STAGES])
        raise WeftError(f"The model has no layer {name!r}.{did_you_mean(name, known) or f' Some that it has: {some}.'}")
    return modules[name]


def levels(model: nn.Module) -> list[str]:
    """The layers whose maps the model offers as features, from the picture on."""
    trunk = trunk_of(model)
    found = _offered(trunk)
    if not found:
        raise WeftError(f"{type(trunk).__name__} does not say which of its layers give maps; name one with --layer.")
    return found


def _offered(trunk: Any) -> list[str]:
    modules = dict(trunk.named_modules())
    infos = [info["module"] for info in getattr(trunk, "feature_info", [])]
    return [name for name in infos if name in modules]  # a trunk under a head has lost the last ones


def stage_layers(model: nn.Module) -> list[str]:
    """At most `STAGES` of the levels, the first and the last among them."""
    names = levels(model)
    chosen = np.linspace(0, len(names) - 1, min(STAGES, len(names))).round().astype(int)
    return [names[i] for i in chosen]


def block_layers(model: nn.Module) -> list[str]:
    """All blocks, and the levels that are not made of blocks, from the picture on."""
    trunk = trunk_of(model)
    modules = [name for name, _ in trunk.named_modules()]
    blocks = [name for name in modules if re.search(r"(?:^|\.)(?:blocks|layer\d)\.\d+$", name)]
    others = [name for name in levels(model) if not any(block.startswith(f"{name}.") for block in blocks)]
    return [name for name in modules if name in {*blocks, *others}]


def default_layer(model: nn.Module) -> str:
    """The last layer whose map the classifier hears of.

    ViTAE: the attention of the last normal cell, as in the paper's figure 4. Where a class token is classified, the
    map behind the last block has no say any more, and that in front of it is meant. Else the last level.
    """
    trunk: Any = trunk_of(model)
    pool = getattr(trunk, "global_pool", None)
    if isinstance(trunk, ViTAE) and pool != "token" and hasattr(trunk, "head"):
        return f"blocks.{len(trunk.blocks) - 1}.attn"
    lists = [name for name, _ in trunk.named_modules() if name.split(".")[-1] == "blocks"]
    if pool == "token" and trunk is model and lists:
        blocks: Any = layer_of(trunk, lists[-1])
        above = lists[-1].removesuffix("blocks")
        return f"{lists[-1]}.{len(blocks) - 2}" if len(blocks) > 1 else f"{above}embed"
    return levels(model)[-1]


@contextmanager
def record_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The outputs of the layers once the model has run. Fused paths see the hooks and let the layers be called."""
    out: dict[str, Any] = {}
    handles = []
    for name in names:

        def keep(_module: nn.Module, _inputs: Any, output: Any, name: str = name) -> None:
            out[name] = output

        handles.append(layer_of(model, name).register_forward_hook(keep))
    try:
        yield out
    finally:
        for handle in handles:
            handle.remove()


def tensor_of(output: Any, name: str) -> Tensor:
    """The output of a layer; where that is a map and a class token, the map."""
    y = output[0] if isinstance(output, tuple | list) and len(output) else output
    if not isinstance(y, Tensor):
        raise WeftError(f"The layer {name!r} gives no map of the picture; choose another.")
    return y


def as_map(y: Tensor, size: tuple[int, int], model: nn.Module, name: str) -> Tensor:
    """(B, h, w, C), a view of what the layer `name` puts out for pictures of `size`; raises where that is no map."""
    trunk = trunk_of(model)
    if y.dim() == 4:
        return y if _channels_last(y, size, trunk) else y.permute(0, 2, 3, 1)
    if y.dim() == 3:
        prefixes = {0, getattr(trunk, "num_prefix_tokens", 0)}
        for height, width in _grids(size, trunk):
            for prefix in prefixes:
                if prefix + height * width == y.shape[1]:
                    return y[:, prefix:].unflatten(1, (height, width))
    other = default_layer(model)
    hint = f"one such as {other!r}" if name != other else "another"
    raise WeftError(f"The layer {name!r} gives no map of the picture; choose {hint}.")


def _grids(size: tuple[int, int], trunk: Any) -> list[tuple[int, int]]:
    """Rows and columns of the maps that the model can have."""
    strides = sorted({info["reduction"] for info in getattr(trunk, "feature_info", [])}) or [4, 8, 14, 16, 32]
    return [(math.ceil(size[0] / s), math.ceil(size[1] / s)) for s in strides]


def _channels_last(y: Tensor, size: tuple[int, int], trunk: nn.Module) -> bool:
    """Whether (B, a, b, c) is (B, h, w, C) and not (B, C, h, w): one of both has the proportions of the picture."""
    last, first = (_misfit(y.shape[1:3], size), _misfit(y.shape[2:4], size))
    if last != first:
        return last < first
    if isinstance(trunk, HybridModel):  # all maps are channels-last in memory
        return y.stride(3) == 1 and y.shape[3] > 1
    return getattr(trunk, "output_fmt", "NCHW") == "NHWC"


def _misfit(grid: Sequence[int], size: tuple[int, int]) -> float:
    """How far a grid is from the shape of the picture; rounding up makes less than half a row's difference."""
    height, width = grid
    return abs(math.log((size[0] / height) / (size[1] / width)))


def picture_sized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, h, w) maps as large as the picture, bilinear."""
    resized = torch.nn.functional.interpolate(maps.unsqueeze(1).float(), size, mode="bilinear", align_corners=False)
    return resized.squeeze(1)
