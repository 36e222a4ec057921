"""A dense model as a folder: the files of `weft.models.weights.folder`, head and arguments in the "weft" entry.

The "head" there tells such a folder from that of a classifier, and a segmenter from a detector.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from weft.config import Config, override
from weft.errors import WeftError, check_choice
from weft.files import write_tensors, write_text
from weft.heads import DETECTORS, SEGMENTERS, make_segmenter
from weft.heads.rcnn import make_detector
from weft.models.weights.folder import load_saved, open_classifier, read_model_config
from weft.models.weights.former import former_args
from weft.version import __version__

OUTSIDE = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}  # timm reads files


@dataclass(frozen=True)
class DenseSpec:
    """All that makes a dense model, but its weights."""

    task: str  # for config.json; the head decides
    name: str  # of the backbone, as timm has it
    args: Mapping[str, Any]  # of the backbone
    channels: int
    head: str
    head_args: Mapping[str, Any]
    classes: Sequence[str]


def build_dense(spec: DenseSpec, config: Config, backbone: nn.Module | None = None) -> nn.Module:
    """The model, around a backbone that has its weights already where one is given."""
    check_choice("head", spec.head, (*SEGMENTERS, *DETECTORS))
    if backbone is None:
        backbone = timm.create_model(spec.name, num_classes=0, in_chans=spec.channels, **spec.args)
    if spec.head in SEGMENTERS:
        return make_segmenter(backbone, spec.head, len(spec.classes), **spec.head_args)
    return make_detector(backbone, spec.head, len(spec.classes), test=config.test, **spec.head_args)


def write_dense(
    folder: Path, spec: DenseSpec, weights: Mapping[str, Tensor], *, preprocessing: dict[str, Any], config: Config
) -> None:
    """Writes or rewrites the model of a run, with all that is needed to use it, into its `folder`, which exists."""
    used = {f"test.{key}": value for key, value in vars(config.test).items()}
    used |= {"augment.img_size": config.augment.img_size, "model.head": spec.head}
    content = {
        "architecture": spec.name,
        "num_classes": len(spec.classes),
        "model_args": {**spec.args, "in_chans": spec.channels},
        "label_names": list(spec.classes),
        "weft": {
            "task": spec.task,
            "head": spec.head,
            "head_args": dict(spec.head_args),
            "preprocessing": preprocessing,
            "settings": used,
            "version": __version__,
        },
    }
    write_tensors(folder / "model.safetensors", {key: value.contiguous() for key, value in weights.items()})
    write_text(folder / "config.json", json.dumps(content, indent=2))


def open_model(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier or dense model in a folder, with all of its weights, and the content of config.json."""
    config = read_model_config(folder)
    open_one = open_dense if "head" in config.get("weft", {}) else open_classifier
    return open_one(folder, config), config


def open_dense(folder: Path, config: dict[str, Any]) -> nn.Module:
    """The model of which `config` is the content of config.json, with all of its weights."""
    try:
        entry, args = config["weft"], dict(config["model_args"])
        settings = override(Config(), entry["settings"])
        channels, classes = args.pop("in_chans"), config["label_names"]
        if not timm.is_model(config["architecture"]) or OUTSIDE & args.keys():
            raise ValueError(f"{config['architecture']!r} is no model, or has arguments that lead out of the folder")
        args |= former_args(config["architecture"], args, folder / "model.safetensors")
        head, head_args = entry["head"], entry["head_args"]
        spec = DenseSpec(entry["task"], config["architecture"], args, channels, head, head_args, classes)
        model = build_dense(spec, settings)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeftError(f"{folder}/config.json cannot be built: {why}") from None
    load_saved(model, folder, f"{head} on {config['architecture']}, {len(classes)} classes")
    return model


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
