"""A model as a folder: `model.safetensors` and `config.json`, in the layout that timm opens as "local-dir:FOLDER"."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
from torch import nn

from weft.errors import WeftError, check_writable
from weft.files import write_atomic
from weft.models._timm import save_config_for_hf
from weft.models.base import HybridModel


def save_model(model: nn.Module, folder: str | os.PathLike[str], label_names: Sequence[str] | None = None) -> Path:
    """Writes `model` into a new or empty `folder`, with the names of its classes where they are given.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it once Weft is imported. The configuration is
    written last, and each file under a temporary name first, so a folder with a `config.json` is complete.
    """
    folder = Path(folder)
    hybrid = _check_savable(model)
    if label_names is not None and len(label_names) != hybrid.num_classes:
        raise WeftError(f"label_names has {len(label_names)} names; the model has {hybrid.num_classes} classes.")
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    write_atomic(folder / "model.safetensors", lambda path: safetensors.torch.save_file(weights, path))
    write_atomic(folder / "config.json", lambda path: _save_config(hybrid, path, label_names))
    return folder


def _check_savable(model: nn.Module) -> HybridModel:
    """Raises unless timm can build `model` again from its name and arguments."""
    if not isinstance(model, HybridModel) or not hasattr(model, "model_args"):
        raise WeftError(
            f"{type(model).__name__} cannot be saved; expected what weft.create_model or timm.create_model made."
        )
    if model.fused:
        raise WeftError("A fused copy cannot be saved; save the model it was made from and fuse again after loading.")
    rebuilt = timm.create_model(model.pretrained_cfg["architecture"], device="meta", **_arguments(model))
    if rebuilt.state_dict().keys() != model.state_dict().keys():
        raise WeftError("A model that has lost layers cannot be saved; save it before prune_intermediate_layers.")
    return model


def _arguments(model: HybridModel) -> dict[str, Any]:
    args = {**model.model_args, "global_pool": model.global_pool}
    return {**args, "num_classes": model.num_classes, "in_chans": model.in_chans}


def _save_config(model: HybridModel, path: Path, label_names: Sequence[str] | None) -> None:
    shell = copy.copy(model)  # the same parameters under another configuration
    cfg = shell.pretrained_cfg = dict(model.pretrained_cfg)
    size = model.model_args.get("img_size", cfg["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    cfg.update(input_size=(model.in_chans, height, width), num_classes=model.num_classes)
    if model.in_chans != 3:
        cfg["first_conv"] = None  # else timm adapts the weights from 3 channels, which they do not have
    labels = {"label_names": list(label_names)} if label_names else {}
    save_config_for_hf(shell, path, labels, _arguments(model))  # type: ignore[arg-type]  it wants a Path
