"""Published checkpoints into Weft models.

Nothing here runs code from a file: pickles are read by torch's weights-only unpickler, with no way around it.
"""

import argparse
import errno
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from weft.errors import WeftError, did_you_mean
from weft.models.registry import FAMILIES
from weft.models.weights.layouts import LAYOUTS, Layout, StateDict, own_layout, recognise
from weft.words import many

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # averaged weights first, as timm does
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")


# Reading --------------------------------------------------------------------------------------------------------


def read_state(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[StateDict, str]:
    """The weights in a file, a folder or a state dict, and what messages call their place."""
    if isinstance(source, str | os.PathLike):
        return load_weights(source), os.fspath(source)
    return _unwrap(source, "the state dict"), "the state dict"


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
    if not os.access(path, os.R_OK):
        raise WeftError(f"{path} cannot be read: {os.strerror(errno.EACCES)}.")
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
        else:
            content = _load_pickle(path)
    except WeftError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise WeftError(f"{path} is truncated or not a checkpoint; expected safetensors or a torch file.") from error
    return _unwrap(content, str(path))


def _load_pickle(path: Path) -> Any:
    try:
        # DeiT-style trainers store their options
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise
        raise WeftError(
            f"{path} refers to {found[1]}, which is not a tensor; refused, give a file of tensors alone."
        ) from error


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
    if odd := [key for key, value in content.items() if not _is_finite(value)]:
        raise WeftError(
            f"{where} holds weights that are no numbers (NaN or infinite) in {many(len(odd), 'tensor')} of"
            f" {len(content)}, such as {odd[0]}: what wrote it had diverged; take an earlier one."
        )
    return clean_state_dict(dict(content))


def _is_weight(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_dense and (value.is_floating_point() or value.dtype == torch.int64)  # int64: num_batches_tracked


def _is_finite(value: Tensor) -> bool:
    value = value.float() if value.itemsize == 1 and value.is_floating_point() else value  # 8 bits have no test
    return bool(value.isfinite().all())


# Converting -----------------------------------------------------------------------------------------------------


def convert(
    source: str | os.PathLike[str] | Mapping[str, Any], model: str, num_classes: int | None = None
) -> nn.Module:
    """A Weft model with published weights.

    Args:
        source: a checkpoint file, a Hugging Face folder, or a state dict, in any published layout, or with the names
            that the model itself has, as `torch.save(model.state_dict(), file)` writes them.
        model: the name of the model the weights are for, such as "cvt_13".
        num_classes: what the file must have; by default whatever it has.

    Returns:
        The model in eval mode and float32. Class count, channels and picture size are read off the weights. A Hugging
        Face CvT gets the exact GELU that transformers computes with, an official one the QuickGELU it was trained with.

    Raises:
        WeftError: the file cannot be read safely, or holds weights of something other than `model`.
    """
    state, where = read_state(source)
    layout = recognise(state) or _recognise_own(state, model)
    if layout is None:
        known = ", ".join([*(entry.name for entry in LAYOUTS), f"that of {model} itself"])
        raise WeftError(f"{where} matches none of the known layouts ({known}); its first key is {next(iter(state))!r}.")
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
    difference = first_difference(converted.state_dict(), native)
    if difference:
        shapes = {name: timm.create_model(name, device="meta", **args).state_dict() for name in names}
        fits = [name for name in names if not first_difference(shapes[name], native)]
        hint = f" The weights fit {' or '.join(fits)}." if fits else ""
        raise WeftError(f"{where} does not fit {model}: {difference}.{hint}")
    converted.load_state_dict(native, assign=True)
    cfg: Any = converted.pretrained_cfg
    size = args.get("img_size", cfg["input_size"][1:])
    cfg.update(num_classes=args["num_classes"], input_size=(args["in_chans"], *size))
    return converted.eval()


def _recognise_own(state: StateDict, model: str) -> Layout | None:
    """The layout of Weft's model of this name, where most of the names are its own."""
    family = next((name for name in FAMILIES if model.split(".")[0] in timm.list_models(module=name)), "")
    if not family:
        return None
    made = timm.create_model(model, device="meta")
    own = made.state_dict().keys()
    return own_layout(family, made) if 2 * len(own & state.keys()) > len(own) else None


def _to_native(state: StateDict, layout: Layout, where: str) -> tuple[StateDict, dict[str, Any]]:
    """Our own float32 copy of the weights under our names, and the constructor arguments that can be read off them."""
    try:
        native = layout.to_native(state)
        missing = {"head.weight", "head.bias"} - native.keys()
        if missing:
            raise WeftError(f"{where} has no classifier; expected {' and '.join(sorted(missing))}.")
        classes, _ = native["head.weight"].shape
        args = dict(layout.model_args, num_classes=classes, **layout.read_args(native))
    except WeftError:
        raise
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise WeftError(f"{where} looks like {layout.name}, but its tensors have other names or dimensions.") from error
    for key, value in native.items():
        native[key] = value.detach().clone().float() if value.is_floating_point() else value.clone()
    return native, args


def first_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    for key, value in expected.items():
        if key not in found:
            return f"expected {key} {tuple(value.shape)}, which is missing"
        if found[key].is_floating_point() != value.is_floating_point():
            return f"expected {key} of type {value.dtype}, found {found[key].dtype}"
        if found[key].shape != value.shape:
            return f"expected {key} {tuple(value.shape)}, found {tuple(found[key].shape)}"
    extra = next((key for key in found if key not in expected), None)
    return f"found {extra}, which the model does not have" if extra else ""
