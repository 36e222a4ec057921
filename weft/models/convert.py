"""Published checkpoints into Weft models.

Each published layout is one entry of LAYOUTS: how to recognise it, and how its keys become ours. Nothing here runs
code from a file: pickles are read by torch's weights-only unpickler, with no way around it.
"""

import argparse
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.layers import resize_rel_pos_bias_table_simple
from timm.models import clean_state_dict
from torch import Tensor, nn

from weft.errors import WeftError, did_you_mean
from weft.models.layers import resize_grid

StateDict = dict[str, Tensor]
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # averaged weights first, as timm does
FIRST_CONVS = ("stages.0.embed.proj.weight", "stem.convs.0.conv.weight")
POSITIONS = {"ceit": ("pos_embed.grid", 16), "pvt": ("stages.0.pos_embed.grid", 4)}  # a position every n pixels
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")


# Layouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    name: str
    family: str  # the first part of the names of the models that can take it
    mark: str  # a key that only this layout has
    to_native: Callable[[StateDict], StateDict]
    model_args: dict[str, Any] = field(default_factory=dict)  # what the weights were made for, where not our default


def _rename(rules: list[tuple[str, str]]) -> Callable[[StateDict], StateDict]:
    """Applies every rule, in order, to every key."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rename(state_dict: StateDict) -> StateDict:
        renamed = {}
        for key, value in state_dict.items():
            for pattern, replacement in compiled:
                key = pattern.sub(replacement, key)
            renamed[key] = value
        return renamed

    return rename


OFFICIAL_CVT = [(r"^stage(\d+)\.", r"stages.\1."), (r"\.patch_embed\.", ".embed.")]

_HF_SELF = r"attention\.attention\."
HUGGING_FACE_CVT = [
    (r"^cvt\.encoder\.stages\.", "stages."),
    (r"embedding\.convolution_embeddings\.projection", "embed.proj"),
    (r"embedding\.convolution_embeddings\.normalization", "embed.norm"),
    (r"\.layers\.", ".blocks."),
    (_HF_SELF + r"convolution_projection_(\w)\w+\.convolution_projection\.convolution", r"attn.conv_proj_\1.conv"),
    (_HF_SELF + r"convolution_projection_(\w)\w+\.convolution_projection\.normalization", r"attn.conv_proj_\1.bn"),
    (_HF_SELF + r"projection_([qkv])\w+", r"attn.proj_\1"),
    (r"attention\.output\.dense", "attn.proj"),  # before the next but one, which would match it
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
]

OFFICIAL_CEIT = [
    (r"^i2t\.backbone\.", "stem.convs.0."),
    (r"^i2t\.proj\.", "proj."),
    (r"^pos_layer_embed$", "lca.pos_layer_embed"),
    (r"^lca\.attn\.proj\.", "lca.proj."),
    (r"\.leff\.conv1\.", ".leff.linear1.linear."),
    (r"\.leff\.bn1\.", ".leff.linear1.bn."),
    (r"\.leff\.conv2\.", ".leff.dwconv.conv."),
    (r"\.leff\.bn2\.", ".leff.dwconv.bn."),
    (r"\.leff\.conv3\.", ".leff.linear2.linear."),
    (r"\.leff\.bn3\.", ".leff.linear2.bn."),
]


def _official_ceit(state_dict: StateDict) -> StateDict:
    state = _rename(OFFICIAL_CEIT)(state_dict)
    for key, value in state.items():
        if ".leff.linear" in key and value.ndim == 4:
            state[key] = value.flatten(1)  # (out, in, 1, 1) -> (out, in)
    for kind in ("weight", "bias"):  # rows q, k, v
        qkv = state.pop(f"lca.attn.qkv.{kind}", None)
        if qkv is not None:
            dim = qkv.shape[0] // 3
            state[f"lca.q.{kind}"], state[f"lca.kv.{kind}"] = qkv[:dim], qkv[dim:]
    positions = state.pop("pos_embed", None)  # (1, 1 + N, C), the class token's first
    if positions is not None:
        state["pos_embed.cls"] = positions[:, :1]
        state["pos_embed.grid"] = _square("pos_embed", positions[0, 1:])
    return state


def _square(key: str, positions: Tensor) -> Tensor:
    """(N, C) positions as a grid; the released networks know square pictures alone."""
    side = math.isqrt(positions.shape[0])
    if side == 0 or side * side != positions.shape[0]:
        raise WeftError(f"{key} has {positions.shape[0]} positions, which is no square; published files are square.")
    return positions.unflatten(0, (side, side))


OFFICIAL_PVT = [
    *((rf"^patch_embed{i + 1}\.", f"stages.{i}.embed.") for i in range(4)),
    *((rf"^block{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    (r"^cls_token$", "stages.3.cls_token"),
    (r"\.attn\.sr\.", ".attn.sr.proj."),
    (r"\.attn\.norm\.", ".attn.sr.norm."),
]


def _official_pvt(state_dict: StateDict) -> StateDict:
    state = _rename(OFFICIAL_PVT)(state_dict)
    for i in range(4):
        positions = state.pop(f"pos_embed{i + 1}", None)  # (1, N, C); in the last stage the class token's first
        if positions is not None:
            if i == 3:
                state["stages.3.pos_embed.cls"], positions = positions[:, :1], positions[:, 1:]
            state[f"stages.{i}.pos_embed.grid"] = _square(f"pos_embed{i + 1}", positions[0])
    return state


OFFICIAL_CSWIN = [
    (r"^stage1_conv_embed\.0\.", "stages.0.embed.proj."),
    (r"^stage1_conv_embed\.2\.", "stages.0.embed.norm."),
    (r"^merge(\d)\.conv\.", r"stages.\1.embed.proj."),
    (r"^merge(\d)\.norm\.", r"stages.\1.embed.norm."),
    *((rf"^stage{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    (r"(blocks\.\d+)\.(qkv|proj)\.", r"\1.attn.\2."),
    (r"\.attns\.(\d)\.get_v\.", r".attn.branches.\1.lepe."),
]


LAYOUTS = (
    Layout("official CvT", "cvt", "stage0.patch_embed.proj.weight", _rename(OFFICIAL_CVT)),
    Layout(
        "Hugging Face CvT",
        "cvt",
        "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight",
        _rename(HUGGING_FACE_CVT),
        dict(act_layer="gelu"),
    ),
    Layout("official CeiT", "ceit", "i2t.backbone.conv.weight", _official_ceit),
    Layout("official PVT", "pvt", "pos_embed4", _official_pvt),
    Layout("official CSWin", "cswin", "stage1_conv_embed.0.weight", _rename(OFFICIAL_CSWIN)),
)


def recognise(state_dict: Mapping[str, Any]) -> Layout | None:
    return next((layout for layout in LAYOUTS if layout.mark in state_dict), None)


def filter_published(state_dict: StateDict, model: nn.Module) -> StateDict:
    """timm's `checkpoint_filter_fn` for every family: any published layout in, ours out, positions resized to fit."""
    layout = recognise(state_dict)
    state = layout.to_native(state_dict) if layout else dict(state_dict)
    expected = model.state_dict()
    for key, value in state.items():
        if key.endswith("pos_embed.grid") and key in expected:
            height, width, _ = expected[key].shape
            state[key] = resize_grid(value, height, width)
        elif key.endswith("relative_position_bias_table") and key in expected:
            places, _ = shape = expected[key].shape  # one row for each of the (2 window - 1) ** 2 distances
            window = (math.isqrt(places) + 1) // 2
            state[key] = resize_rel_pos_bias_table_simple(value, (window, window), shape)
    return state


# Reading --------------------------------------------------------------------------------------------------------


def load_weights(source: str | os.PathLike[str]) -> StateDict:
    """The state dict in a file or in a Hugging Face folder. No code from the file ever runs."""
    path = Path(source)
    if path.is_dir():
        found = next((path / name for name in FOLDER_FILES if (path / name).is_file()), None)
        if found is None:
            raise WeftError(f"{path} has no weights: expected {' or '.join(FOLDER_FILES)} in that folder.")
        path = found
    if not path.is_file():
        raise WeftError(f"{path} does not exist; give a checkpoint file or a Hugging Face folder.")
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
        else:
            content = _load_pickle(path)
    except WeftError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise WeftError(f"{path} is truncated or no checkpoint; expected safetensors or a torch file.") from error
    return _unwrap(content, str(path))


def _load_pickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # DeiT-style trainers store their options
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise
        raise WeftError(f"{path} refers to {found[1]}, which is no tensor; refused. Expected tensors only.") from error


def _unwrap(content: Any, where: str) -> StateDict:
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping) or not content:
        raise WeftError(f"{where} holds no state dict; expected tensors by name, found {type(content).__name__}.")
    for key, value in content.items():
        if not isinstance(key, str) or not _is_weight(value):
            found = f"{value.dtype} {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            raise WeftError(f"{where} holds no state dict; expected dense tensors by name, found {key!r}: {found}.")
    return clean_state_dict(dict(content))


def _is_weight(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_dense and (value.is_floating_point() or value.dtype == torch.int64)  # int64: num_batches_tracked


# Converting -----------------------------------------------------------------------------------------------------


def convert(
    source: str | os.PathLike[str] | Mapping[str, Any], model: str, num_classes: int | None = None
) -> nn.Module:
    """A Weft model with published weights.

    Args:
        source: a checkpoint file, a Hugging Face folder, or a state dict, in any published layout.
        model: the name of the model the weights are for, such as "cvt_13".
        num_classes: what the file must have; by default whatever it has.

    Returns:
        The model in eval mode and float32. Class count, channels and picture size are read off the weights. A Hugging
        Face CvT gets the exact GELU that transformers computes with, an official one the QuickGELU it was trained with.

    Raises:
        WeftError: the file cannot be read safely, or holds something else than `model`.
    """
    is_path = isinstance(source, str | os.PathLike)
    where = os.fspath(source) if is_path else "the state dict"
    state = load_weights(source) if is_path else _unwrap(source, where)
    layout = recognise(state)
    if layout is None:
        known = ", ".join(entry.name for entry in LAYOUTS)
        raise WeftError(f"{where} has none of the layouts {known}; its first key is {next(iter(state))!r}.")
    names = timm.list_models(module=layout.family)
    if model not in [*names, *timm.list_models(module=layout.family, include_tags=True)]:
        raise WeftError(
            f"{where} holds {layout.name} weights, which {model!r} does not take; expected one of"
            f" {', '.join(names)}." + did_you_mean(model, names)
        )
    native, args = _to_native(state, layout, where)
    if num_classes not in (None, args["num_classes"]):
        raise WeftError(f"{where} has {args['num_classes']} classes; expected {num_classes}.")
    converted = timm.create_model(model, device="meta", **args)
    difference = _first_difference(converted.state_dict(), native)
    if difference:
        shapes = {name: timm.create_model(name, device="meta", **args).state_dict() for name in names}
        fits = [name for name in names if not _first_difference(shapes[name], native)]
        hint = f" The weights fit {' or '.join(fits)}." if fits else ""
        raise WeftError(f"{where} does not fit {model}: {difference}.{hint}")
    converted.load_state_dict(native, assign=True)
    cfg: Any = converted.pretrained_cfg
    size = args.get("img_size", cfg["input_size"][1:])
    cfg.update(num_classes=args["num_classes"], input_size=(args["in_chans"], *size))
    return converted.eval()


def _to_native(state: StateDict, layout: Layout, where: str) -> tuple[StateDict, dict[str, Any]]:
    """Our own float32 copy of the weights under our names, and the constructor arguments that can be read off them."""
    try:
        native = layout.to_native(state)
        missing = {"head.weight", "head.bias"} - native.keys()
        if missing:
            raise WeftError(f"{where} has no classifier; expected {' and '.join(sorted(missing))}.")
        classes, _ = native["head.weight"].shape
        _, in_chans, _, _ = next(native[key] for key in FIRST_CONVS if key in native).shape
        args: dict[str, Any] = dict(layout.model_args, num_classes=classes, in_chans=in_chans)
        if layout.family in POSITIONS:
            key, stride = POSITIONS[layout.family]
            height, width, _ = native[key].shape
            args["img_size"] = (stride * height, stride * width)
    except WeftError:
        raise
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise WeftError(
            f"{where} is no {layout.name} checkpoint: its tensors have other names or dimensions."
        ) from error
    for key, value in native.items():
        native[key] = value.detach().clone().float() if value.is_floating_point() else value.clone()
    return native, args


def _first_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    for key, value in expected.items():
        if key not in found:
            return f"expected {key} {tuple(value.shape)}, which is missing"
        if found[key].is_floating_point() != value.is_floating_point():
            return f"expected {key} of type {value.dtype}, found {found[key].dtype}"
        if found[key].shape != value.shape:
            return f"expected {key} {tuple(value.shape)}, found {tuple(found[key].shape)}"
    extra = next((key for key in found if key not in expected), None)
    return f"found {extra}, which the model does not have" if extra else ""
