"""A dense model as a folder: the files of `weft.models.weights.folder`, head and arguments in the "weft" entry."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from weft.config import Config, override
from weft.errors import WeftError
from weft.files import write_tensors, write_text
from weft.heads import make_segmenter
from weft.heads.rcnn import make_detector
from weft.models.weights.convert import load_weights
from weft.version import __version__

OUTSIDE = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}  # timm reads files


@dataclass(frozen=True)
class Plan:
    """All that makes a dense model, but its weights."""

    task: str  # segment or detect
    name: str  # of the backbone, as timm has it
    args: Mapping[str, Any]  # of the backbone
    channels: int
    head: str
    head_args: Mapping[str, Any]
    classes: Sequence[str]


def build(plan: Plan, config: Config, backbone: nn.Module | None = None) -> nn.Module:
    """The model, around a backbone that has its weights already where one is given."""
    if backbone is None:
        backbone = timm.create_model(plan.name, num_classes=0, in_chans=plan.channels, **plan.args)
    if plan.task == "segment":
        return make_segmenter(backbone, plan.head, len(plan.classes), **plan.head_args)
    return make_detector(backbone, plan.head, len(plan.classes), test=config.test, **plan.head_args)


def write_dense(
    folder: Path, plan: Plan, weights: Mapping[str, Tensor], *, preprocessing: dict[str, Any], config: Config
) -> None:
    """Writes or rewrites the model of a run, with all that is needed to use it, into its `folder`, which exists."""
    used = {f"test.{key}": value for key, value in vars(config.test).items()}
    used |= {"augment.img_size": config.augment.img_size, "model.head": plan.head}
    content = {
        "architecture": plan.name,
        "num_classes": len(plan.classes),
        "model_args": {**plan.args, "in_chans": plan.channels},
        "label_names": list(plan.classes),
        "weft": {
            "task": plan.task,
            "head": plan.head,
            "head_args": dict(plan.head_args),
            "preprocessing": preprocessing,
            "settings": used,
            "version": __version__,
        },
    }
    write_tensors(folder / "model.safetensors", {key: value.contiguous() for key, value in weights.items()})
    write_text(folder / "config.json", json.dumps(content, indent=2))


def open_dense(folder: Path, config: dict[str, Any]) -> nn.Module:
    """The model of which `config` is the content of config.json, with all of its weights."""
    try:
        entry, args = config["weft"], dict(config["model_args"])
        settings = override(Config(), entry["settings"])
        channels, classes = args.pop("in_chans"), config["label_names"]
        if not timm.is_model(config["architecture"]) or OUTSIDE & args.keys():
            raise ValueError(f"{config['architecture']!r} is no model, or has arguments that lead out of the folder")
        plan = Plan(entry["task"], config["architecture"], args, channels, entry["head"], entry["head_args"], classes)
        model = build(plan, settings)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeftError(f"{folder}/config.json cannot be built: {why}") from None
    load_whole(model, load_weights(folder / "model.safetensors"), f"{folder}/model.safetensors")
    return model


def load_whole(model: nn.Module, weights: Mapping[str, Tensor], file: str) -> None:
    """Every tensor of the model must be there and fit."""
    own = model.state_dict()
    odd = sorted(k for k in {*own, *weights} if k not in own or k not in weights or own[k].shape != weights[k].shape)
    if odd:
        expected, found = (tuple(tensors[odd[0]].shape) if odd[0] in tensors else "none" for tensors in (own, weights))
        raise WeftError(
            f"{file} does not fit the model: {len(odd)} tensors differ, such as {odd[0]}: expected {expected},"
            f" found {found}."
        )
    model.load_state_dict(dict(weights))


def load_dense_init(model: nn.Module, weights: Mapping[str, Tensor], init: str) -> list[str]:
    """Starts from another dense model: its backbone must fit, and of the head what fits is taken."""
    own = model.state_dict()
    here, there = _backbone(own), _backbone(weights)
    weights = {here + key.removeprefix(there) if key.startswith(there) else key: weights[key] for key in weights}
    fits = {key for key in own if key in weights and weights[key].shape == own[key].shape}
    odd = [key for key in own if key not in fits and key.startswith(here)]
    if odd:
        raise WeftError(f"{init} has another backbone: {len(odd)} tensors differ, such as {odd[0]}; give its --model.")
    model.load_state_dict({key: weights[key] if key in fits else value for key, value in own.items()})
    new = sorted({".".join(key.split(".")[:2]) for key in own.keys() - fits})
    return [f"{' and '.join(new)} for other classes or another head: new"] if new else []


def _backbone(weights: Mapping[str, Tensor]) -> str:
    """How the backbone's tensors begin: a detector's lies within what torchvision calls so, beside the pyramid."""
    return "backbone.body." if any(key.startswith("backbone.body.") for key in weights) else "backbone."
