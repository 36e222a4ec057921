"""A model as a folder: `model.safetensors` and `config.json`, in the layout that timm opens as "local-dir:FOLDER"."""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from weft.errors import WeftError
from weft.models._timm import save_config_for_hf


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Writes `model` into a new or empty `folder`.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` opens it once Weft is imported. The configuration is
    written last, and each file under a temporary name first, so a folder with a `config.json` is complete.
    """
    folder = Path(folder)
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    _write(folder / "model.safetensors", lambda path: safetensors.torch.save_file(weights, path))
    _write(folder / "config.json", lambda path: _save_config(model, path))
    return folder


def check_writable(folder: Path) -> None:
    """Raises unless `folder` can be made or is an empty folder: nothing is ever overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeftError(f"{folder} already exists and is not an empty folder; choose another place.")


def _save_config(model: Any, path: Path) -> None:
    shell = copy.copy(model)  # the same parameters under another configuration
    cfg = shell.pretrained_cfg = dict(model.pretrained_cfg)
    size = model.model_args.get("img_size", cfg["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    cfg["input_size"] = (model.in_chans, height, width)
    if model.in_chans != 3:
        cfg["first_conv"] = None  # else timm adapts the weights from 3 channels, which they do not have
    save_config_for_hf(shell, path, model_args=model.model_args)  # type: ignore[arg-type]  it wants a Path


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """`write(temporary)`, then rename to `path`, both forced to disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        write(temporary)
        os.fsync(handle)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
