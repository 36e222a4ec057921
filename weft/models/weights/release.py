"""Weights that come with the package: folders of models, which timm finds by a tag of their architecture.

`released/NAME.TAG` has the weights of `timm.create_model("NAME.TAG", pretrained=True)`, what `weft.load` needs, and a
card. `python -m tools.release` makes such a folder from a run. From those that have seen things of many kinds in
colour, trainings on other pictures may begin.
"""

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from timm.models import DefaultCfg, PretrainedCfg

from weft.documents import read_json

FOLDER = Path(__file__).with_name("released")
OF_MANY_KINDS = "weft_cifar10"  # the tag of weights to begin with
SHARED = 0.5  # of the classes of a set from which on its pictures may be those that the weights have learned from
OF_A_TRAINING = ("num_classes", "in_chans", "img_size", "drop_path_rate", "drop_rate", "proj_drop_rate")
OF_A_FILE = {field.name for field in fields(PretrainedCfg)} - {"url", "hf_hub_id", "hf_hub_filename", "source", "file"}


@cache
def released() -> tuple[str, ...]:
    """Names with their tags, sorted."""
    return tuple(sorted(file.parent.name for file in FOLDER.glob("*/config.json")))


def released_folder(name: str) -> Path:
    return FOLDER / name


def weights_of_many_kinds() -> tuple[str, ...]:
    """The names of weights from which a training on any pictures may begin."""
    return tuple(name for name in released() if name.endswith(f".{OF_MANY_KINDS}"))


def have_learned(classes: Iterable[str]) -> bool:
    """Whether those weights know most of these classes by name.

    Then the pictures that are to judge may be among those they learned from.
    """
    wanted = [label.lower() for label in classes]
    files = [released_folder(name) / "config.json" for name in weights_of_many_kinds()]
    known = {label.lower() for file in files for label in read_json(file)["label_names"]}
    return sum(label in known for label in wanted) > SHARED * len(wanted)


def add_released(default_cfgs: dict[str, DefaultCfg]) -> None:
    """Adds the tags of what is released to the configurations of a family, behind those that are there.

    The bare name stays without weights: it is that of a network for any pictures, which the tag's are not.
    """
    for name in released():
        architecture, _, tag = name.partition(".")
        if architecture in default_cfgs:
            default_cfgs[architecture].cfgs[tag] = _configuration(name)
            default_cfgs[architecture].tags.append(tag)
            default_cfgs[architecture].is_pretrained = True


def _configuration(name: str) -> PretrainedCfg:
    """timm's, of the pictures and classes that the weights are for."""
    folder = released_folder(name)
    content = read_json(folder / "config.json")
    stored = {**content["pretrained_cfg"], "label_names": content.get("label_names")}
    entries: Any = {key: stored[key] for key in OF_A_FILE & stored.keys()}
    for key, value in entries.items():
        entries[key] = tuple(value) if isinstance(value, list) else value
    return PretrainedCfg(**entries, file=str(folder / "model.safetensors"))


def released_args(name: str) -> dict[str, Any]:
    """The arguments that make the network of released weights; none of another name."""
    if name not in released():
        return {}
    args = read_json(released_folder(name) / "config.json").get("model_args") or {}
    return {key: value for key, value in args.items() if key not in OF_A_TRAINING}
