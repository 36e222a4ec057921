"""The model of a run: made by name, with the weights it starts from."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.models import adapt_input_conv
from torch import Tensor, nn

from weft.config import Config, ModelConfig
from weft.errors import WeftError
from weft.heads.features import any_size
from weft.heads.folder import DenseSpec, build_dense, load_dense_init, write_dense
from weft.models.base import HybridModel
from weft.models.registry import takes, takes_size
from weft.models.weights.convert import load_weights
from weft.models.weights.folder import write_model
from weft.models.weights.host import load_host
from weft.models.weights.layouts import filter_published
from weft.run.initial import PRETRAINED, create_pretrained, host_weights, is_host, weights_folder
from weft.tasks.registry import task_class


@dataclass(frozen=True)
class Made:
    model: nn.Module
    changed: list[str]  # what is new in it where it starts from weights
    write: Callable[[Path, nn.Module, dict[str, Tensor], dict[str, Any]], None]  # folder, model, weights, preprocessing


def make_model(config: Config, *, classes: list[str], size: tuple[int, int], multilabel: bool = False) -> Made:
    """The model of a run: what timm makes of its name, or that as the backbone of a head."""
    name, init, channels = config.model.name, config.model.init, config.data.channels
    alone = task_class(config.data.task).whole_pictures
    args = model_args(config.model, size if alone else (config.augment.img_size, config.augment.img_size))
    if alone:
        model = create(name, args, len(classes), channels, init == PRETRAINED)
        changed = _begin_with(model, init, name)
        used = {"test.flip": True} if config.test.flip else {}
        about: Any = dict(classes=classes, multilabel=multilabel, settings=used, args=args)
        return Made(model, changed, partial(_write, about=about))
    args = {**any_size(name), **args}
    backbone = create(name, args, 0, channels, init == PRETRAINED)
    weights = load_weights(weights_folder(init)) if init and init != PRETRAINED and not is_host(init) else {}
    is_dense = any(key.startswith("backbone.") for key in weights)
    changed = [] if is_dense else _begin_with(backbone, init, name, weights)
    spec = DenseSpec(config.data.task, name, args, channels, config.model.head, config.model.head_args, classes)
    model = build_dense(spec, config, backbone)
    if is_dense:
        changed = load_dense_init(model, weights, init)
    return Made(model, changed, partial(_write_dense, spec=spec, config=config))


def model_args(config: ModelConfig, size: tuple[int, int]) -> dict[str, Any]:
    """Arguments of timm.create_model beside classes and channels."""
    args = {**config.args, **({"drop_path_rate": config.drop_path} if config.drop_path is not None else {})}
    if config.drop:
        args["drop_rate"] = config.drop
    if config.proj_drop and takes(config.name, "proj_drop_rate"):
        args["proj_drop_rate"] = config.proj_drop
    if takes_size(config.name):
        args["img_size"] = size
    return args


def create(name: str, args: dict[str, Any], classes: int | None, channels: int | None, pretrained: bool) -> nn.Module:
    """timm's model of this name, for so many classes and channels; None: as many as it was published with."""
    make = create_pretrained if pretrained else timm.create_model
    try:
        return make(name, num_classes=classes, in_chans=channels, **args)
    except WeftError:
        raise
    except TypeError as error:
        raise WeftError(f"{name} does not take these arguments: {error}") from None


def _write(
    folder: Path,
    model: nn.Module,
    weights: dict[str, Tensor],
    preprocessing: dict[str, Any],
    *,
    about: Any,
) -> None:
    write_model(model, folder, weights=weights, preprocessing=preprocessing, **about)


def _write_dense(
    folder: Path,
    model: nn.Module,
    weights: dict[str, Tensor],
    preprocessing: dict[str, Any],
    *,
    spec: DenseSpec,
    config: Config,
) -> None:
    write_dense(folder, spec, weights, preprocessing=preprocessing, config=config)


# Weights to start from ------------------------------------------------------------------------------------------


def _begin_with(model: nn.Module, init: str, name: str, weights: dict[str, Tensor] | None = None) -> list[str]:
    """Gives a model the weights that `init` names, if any, which may have been read already; a line on what is new."""
    if is_host(init):
        stride = getattr(model, "bottleneck_stride", "") or "3x3"
        new = load_host(model, host_weights(init, name), stride)
        layers = sorted({".".join(key.split(".")[:2]) for key in new})
        return [f"{', '.join(layers[:4])}{' and more' * (len(layers) > 4)}, which the host has not: new"]
    if not init or init == PRETRAINED:
        return []
    return load_init(model, weights or load_weights(weights_folder(init)), init)


def load_init(model: nn.Module, found: dict[str, Tensor], init: str) -> list[str]:
    """Loads the weights of a run, a model folder or a file, `init`; returns one line for each thing that differs.

    A classifier for other classes starts anew, positions of another picture size are interpolated, a first convolution
    of three channels is adapted to others. Any other difference is an error that names the tensors.
    """
    own, state = model.state_dict(), _filter(found, model)
    changed = [
        f"{k} resized from {tuple(v.shape)}" for k, v in found.items() if k in state and state[k].shape != v.shape
    ]
    for key, value in state.items():
        if key in own and _is_first_conv(value, own[key]):
            state[key] = adapt_input_conv(own[key].shape[1], value)
            changed.append(f"{key} adapted from {value.shape[1]} to {own[key].shape[1]} channels")
    heads = tuple(f"{name}." for name in _classifier_names(model))
    fits = {key for key in own if key in state and state[key].shape == own[key].shape}
    odd = [key for key in [*own, *state] if key not in fits and not key.startswith(heads)]
    if odd:
        shapes = [tuple(tensors[odd[0]].shape) if odd[0] in tensors else "none" for tensors in (own, state)]
        raise WeftError(
            f"{init} does not fit the model: {len(set(odd))} tensors differ, such as {odd[0]} (expected {shapes[0]},"
            f" found {shapes[1]}); give the --model and --model.args that it was trained with."
        )
    new = sorted(own.keys() - fits)
    if new:
        changed.append(f"{' and '.join(new)} for other classes: new")
    model.load_state_dict({key: state[key] if key in fits else value for key, value in own.items()})
    return changed


def _filter(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights under the model's names, positions at its size: for Weft's models, and for timm's by timm's rules."""
    if isinstance(model, HybridModel):
        return filter_published(state, model)
    timms_filter: Any = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    return timms_filter(state, model) if timms_filter else state


def _is_first_conv(found: Tensor, wanted: Tensor) -> bool:
    same = found.ndim == wanted.ndim == 4 and (found.shape[0], *found.shape[2:]) == (wanted.shape[0], *wanted.shape[2:])
    return same and found.shape[1] == 3 != wanted.shape[1]


def _classifier_names(model: nn.Module) -> list[str]:
    cfg: Any = model.pretrained_cfg
    classifier = cfg["classifier"]
    return list(classifier) if isinstance(classifier, tuple | list) else [classifier]
