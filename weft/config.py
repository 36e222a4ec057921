"""Every setting of a training run: typed, checked, read from YAML and the command line, written back as YAML.

A run's settings are laid over each other: the defaults here, a recipe, a configuration file, options. What is still
open then (`auto`) is chosen from data and device by `weft.run.choose`, and the result is written to config.yaml.
"""

import dataclasses
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from weft.documents import NestedTooDeeply, parse_yaml
from weft.documents import read_yaml as read_document
from weft.errors import WeftError, did_you_mean


def key(default: Any, help: str, **limits: float) -> Any:
    """A setting with its default, one line of explanation, which `weft keys` prints, and limits.

    Limits are `least` and `most`, or `above` and `below`, which exclude the number itself.
    """
    metadata = {"help": help, "limits": limits}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


Balance = Literal["none", "sampler", "loss", "logit-adjust"]
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest", "random"]
Optimizer = Literal["adamw", "sgd", "rmsprop"]
Schedule = Literal["cosine", "poly", "step", "exponential", "constant"]
Task = Literal["auto", "classify", "segment", "detect"]
Head = Literal["auto", "linear", "fpn", "vt-fpn", "upernet", "faster-rcnn", "mask-rcnn"]
LossKind = Literal["auto", "ce", "bce", "ohem", "focal", "dice", "ce+dice"]


@dataclass(frozen=True)
class DataConfig:
    source: str = key(
        "", "folder, CSV, TSV or COCO JSON file, shards (*.tar), NAME:ROOT of a known set, demo:fashion, demo:nuclei"
    )
    task: Task = key("auto", "auto: segment where there are masks, detect where there are boxes, else classify")
    masks: str = key("", "segmentation: the folder of the masks, where it does not lie beside the pictures")
    classes: str = key("", "segmentation: a file with the names, values or colours of the classes; docs/data.md")
    ignore: list[int] = key([], "segmentation: mask values that count in neither loss nor metric, beside 255")
    val: str = key("", "a second source, for validation, where the first does not hold it")
    protocol: Literal["published", "split"] = key(
        "published", "a known set: all but its test part trains and that is reported; or as data of your own is split"
    )
    val_fraction: float | None = key(
        None,
        "part of the training pictures held out; none: 0.2, at most 5,000 pictures; nothing where there is a validation"
        " split or a published protocol",
        above=0,
        below=1,
    )
    folds: int = key(0, "k of a k-fold split; 0: a single split", least=0)
    fold: int = key(0, "which fold is held out, from 0", least=0)
    group: str = key("", "pictures of one group stay on one side: a CSV column, or a regular expression on file names")
    fraction: float = key(1.0, "train on a stratified part of the training pictures", above=0, most=1)
    channels: int = key(0, "channels of the model's input; 0: as the pictures have", least=0)
    balance: Balance = key("none", "against class imbalance: draw rare classes more often, weigh, or shift the logits")
    workers: int = key(-1, "processes that read pictures; -1: from the machine, 0: none", least=-1, most=1024)
    keep: Literal["auto", "device", "memory", "no"] = key(
        "auto", "decode pictures once and keep them: on the device that trains, in memory, or not; auto: what fits"
    )
    max_pixels: int = key(178_956_970, "larger pictures are refused before they are decoded", least=1)
    leaks: Literal["error", "warn", "ignore"] = key("error", "when a training picture is also a validation picture")
    bad_files: float = key(0.01, "stop when more than this part of the files cannot be read", least=0, most=1)


@dataclass(frozen=True)
class ModelConfig:
    name: str = key("auto", "a model of `weft models`, or any of timm's")
    head: Head = key(
        "auto", "what turns features into answers; auto: linear, fpn, mask-rcnn or faster-rcnn by the task"
    )
    head_args: dict[str, Any] = key({}, "arguments of the head, such as {channels: 128}; --model.head_args.KEY VALUE")
    args: dict[str, Any] = key({}, "arguments of the model, such as {ce_unit: dense}; --model.args.KEY VALUE")
    init: str = key(
        "",
        "weights to start from: a run or model folder, a checkpoint file, `pretrained`, `host`, host:NAME or host:FILE,"
        " the name of weights that come with Weft, or `scratch` for none",
    )
    drop_path: float | None = key(None, "stochastic depth; none: the model's default", least=0, below=1)
    drop: float = key(0.0, "dropout before the classifier", least=0, below=1)
    proj_drop: float = key(0.0, "dropout in the residual branches, of models that have it there", least=0, below=1)
    freeze: str = key("", "what stays as it is: `backbone`, `norm`, or the beginning of parameter names, with commas")
    frozen_mode: bool = key(False, "train in eval mode: BatchNorm and drop path frozen (CeiT's fine-tuning at 384)")


@dataclass(frozen=True)
class AugmentConfig:
    img_size: int = key(0, "side of the training pictures in pixels; 0: chosen from data and model", least=0)
    crop: Literal["random-resized", "random", "resize"] = key("random-resized", "how a picture is cut to size")
    pad: int = key(0, "pixels of margin before a `random` crop", least=0)
    scale: list[float] = key([0.08, 1.0], "area of the random resized crop, smallest and largest part")
    ratio: list[float] = key([0.75, 1.3333333333333333], "aspect ratio of the random resized crop")
    rescale: list[float] = key([0.5, 2.0], "segmentation: the picture is resized by a factor between these, then cut")
    class_limit: float = key(
        0.75, "segmentation: cut again while one class fills more of the window; 1: off", above=0, most=1
    )
    photometric: float = key(
        0.0, "segmentation, detection: strength of brightness, contrast, saturation and hue", least=0
    )
    short_sides: list[int] = key(
        [], "detection: the short side is one of these, drawn for each picture; empty: img_size"
    )
    long_side: int = key(0, "detection: the long side is at most this; 0: 1.6667 times the short side", least=0)
    cut_short_sides: list[int] = key(
        [], "detection: half of the pictures are resized to one of these and cut before that; empty: none"
    )
    cut_sides: list[int] = key([384, 600], "detection: height and width of what is cut then, smallest and largest")
    flip: float = key(0.5, "probability of a horizontal flip", least=0, most=1)
    vflip: float = key(0.0, "probability of a vertical flip", least=0, most=1)
    policy: str = key("", "timm's string, such as rand-m9-mstd0.5-inc1, original (AutoAugment), trivial; empty: none")
    on_device: Literal["auto", "yes", "no"] = key(
        "auto", "do the policy batch by batch on the GPU, not in the readers; auto: where one trains and can do it"
    )
    color_jitter: float = key(0.0, "brightness, contrast, saturation; ignored where a policy is given", least=0)
    erase: float = key(0.0, "probability of random erasing, with noise", least=0, most=1)
    mixup: float = key(0.0, "alpha of mixup; 0: off", least=0)
    cutmix: float = key(0.0, "alpha of cutmix; 0: off", least=0)
    mix_prob: float = key(1.0, "part of the batches that are mixed", least=0, most=1)
    mix_until: float = key(
        1.0, "part of the run in which batches are mixed; what is left sees whole pictures", least=0, most=1
    )
    switch_prob: float = key(0.5, "part of the mixed batches that get cutmix where both are on", least=0, most=1)
    repeats: int = key(1, "repeated augmentation: draws of one picture in an epoch of unchanged length", least=1)
    interpolation: Interpolation = key("bicubic", "of training pictures; evaluation uses bicubic where this is random")
    eval_crop: float = key(
        0.0, "part of the resized picture that evaluation keeps; 0: the model's own", least=0, most=1
    )
    eval_resize: Literal["", "center", "squash"] = key("", "evaluation: short side then centre, or straight to size")


@dataclass(frozen=True)
class OptimConfig:
    name: Optimizer = key("adamw", "AdamW, SGD with Nesterov off, or RMSProp")
    lr: float = key(1e-3, "peak learning rate for a batch of lr_batch pictures", above=0)
    lr_batch: int = key(0, "the learning rate grows linearly with batch / lr_batch; 0: it does not", least=0)
    weight_decay: float = key(0.05, "not on biases, norms and what the model exempts", least=0)
    momentum: float = key(0.9, "of SGD and RMSProp", least=0, below=1)
    betas: list[float] = key([0.9, 0.999], "of AdamW")
    eps: float = key(1e-8, "of AdamW and RMSProp", above=0)
    alpha: float = key(0.9, "decay of RMSProp's squared average", least=0, below=1)
    layer_decay: float = key(1.0, "learning rate factor from each layer to the one before; 1: off", above=0, most=1)
    clip: float = key(0.0, "largest norm of the gradient; 0: no clipping", least=0)
    schedule: Schedule = key("cosine", "how the learning rate falls")
    warmup_epochs: float = key(0.0, "epochs of linear warm-up", least=0)
    warmup_lr: float = key(1e-6, "learning rate at the start of the warm-up, scaled as lr is", least=0)
    min_lr: float = key(1e-5, "learning rate at the end of the cosine, scaled as lr is", least=0)
    cooldown_epochs: float = key(0.0, "epochs at min_lr after the cosine, on top of run.epochs", least=0)
    power: float = key(
        1.0, "of the poly schedule, which falls to min_lr as (1 - part of the run) to this power", above=0
    )
    step_epochs: float = key(30.0, "epochs between two steps of the step schedule", above=0)
    milestones: list[float] = key([], "epochs at which the step schedule steps instead, such as [8, 11]")
    gamma: float = key(0.1, "factor of each step, or of each epoch of the exponential schedule", above=0, most=1)


@dataclass(frozen=True)
class LossConfig:
    kind: LossKind = key("auto", "ce, bce (several labels per picture); segmentation: ce, ohem, focal, dice, ce+dice")
    focal_gamma: float = key(2.0, "how much easy pixels are played down by the focal loss", least=0)
    ohem: float = key(0.25, "part of a picture's pixels, the hardest, that the ohem loss counts", above=0, most=1)
    aux_weight: float = key(0.4, "segmentation: weight of the auxiliary head of UPerNet", least=0)
    smoothing: float = key(0.0, "label smoothing", least=0, below=1)
    teacher: str = key("", "distillation: a run folder, or a timm model with pretrained weights")
    distill: Literal["soft", "hard"] = key("soft", "learn the teacher's probabilities, or its decision")
    temperature: float = key(1.0, "softens both sides of soft distillation", above=0)
    distill_weight: float = key(0.5, "weight of distillation; the labels get the rest", least=0, most=1)


@dataclass(frozen=True)
class RunConfig:
    epochs: int = key(100, "passes over the training pictures", least=1)
    steps: int = key(0, "length in optimiser steps, as some papers count; 0: run.epochs decides", least=0)
    minutes: float = key(0.0, "time budget: as many epochs as fit, the schedule stretched to them; 0: none", least=0)
    batch: int = key(0, "pictures per optimiser step over all processes; 0: chosen from the data", least=0)
    micro_batch: int = key(
        0, "pictures at once on one device; 0: as memory allows. The batch stays what it is", least=0
    )
    seed: int = key(0, "of everything random", least=0, below=2**63)
    ema: float = key(0.0, "decay of the weight average, such as 0.9998; 0: off", least=0, below=1)
    ema_eval: bool = key(True, "evaluate and keep the average rather than the raw weights")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "auto: bf16 on GPUs that have it, and on CPUs where minutes are given and it is faster; else fp32"
    )
    compile: bool = key(False, "torch.compile the training step's model")
    fast: bool = key(True, "fused forms: weft.fast on a GPU; weft.fuse in serve on a CPU")
    replay: bool = key(
        True, "GPU: record the model's launches once and replay them; not with fsdp, sync_bn, deterministic, detection"
    )
    threads: int = key(
        0, "threads of a CPU that compute; 0: as many as are fastest here, tried out", least=0, most=1024
    )
    channels_last: bool = key(False, "memory format of the input and of convolution weights")
    device: str = key("auto", "auto, cpu, cuda or cuda:N")
    sync_bn: bool = key(False, "BatchNorm statistics over all processes (CUDA)")
    fsdp: bool = key(False, "shard parameters and optimiser over the processes, for models that do not fit")
    val_epochs: int = key(1, "validate after so many epochs, and after the last one", least=1)
    patience: int = key(0, "stop after so many epochs without a better validation; 0: never", least=0)
    save_minutes: float = key(5.0, "also save within an epoch, so often", least=0)
    report: bool = key(True, "at the end evaluate the kept model once more, in detail, and write report.html")
    tensorboard: bool = key(False, "also write curves for TensorBoard (pip install tensorboard)")
    deterministic: bool = key(False, "only deterministic algorithms on GPUs, slower; the CPU always is")


@dataclass(frozen=True)
class TestConfig:
    """How a model is used, in validation, `weft eval` and `weft predict` alike; of a classifier `flip` alone."""

    mode: Literal["auto", "whole", "slide"] = key(
        "auto", "segmentation: the whole picture at once, or in windows; auto: whole"
    )
    window: int = key(0, "side of a window; 0: the size of training", least=0)
    overlap: float = key(0.333, "part of a window that the next one covers again", least=0, below=1)
    scales: list[float] = key([1.0], "sizes over which answers are averaged, as parts of the picture's")
    flip: bool = key(False, "classification, segmentation: average with the answer to the mirrored picture")
    short_side: int = key(
        0, "pictures are resized to this short side; 0: segmentation keeps, detection as in training", least=0
    )
    long_side: int = key(0, "with short_side: the long side is at most this; 0: 1.6667 times the short side", least=0)
    score: float = key(0.05, "detection: answers below this are left out", least=0, below=1)
    nms: float = key(0.5, "detection: of boxes that overlap more than this, the surest stays", above=0, most=1)
    detections: int = key(100, "detection: answers per picture, at most", least=1)


@dataclass(frozen=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    run: RunConfig = field(default_factory=RunConfig)
    test: TestConfig = field(default_factory=TestConfig)


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with "section.key" set to other values; text, as the command line gives it, becomes the key's type."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in _sections()}
    for dotted, value in values.items():
        section, name, *rest = [*dotted.split("."), ""] if "." not in dotted else dotted.split(".")
        if (section, name) in (("model", "args"), ("model", "head_args")) and len(rest) == 1:
            sections[section][name][rest[0]] = _plain(value)
            continue
        if rest or name not in sections.get(section, ()):
            raise WeftError(f"Unknown setting {dotted!r}." + did_you_mean(dotted, list(known_keys())))
        sections[section][name] = _typed(dotted, value, _sections()[section][name])
        _check_limits(dotted, sections[section][name])
    return Config(**{name: kind(**sections[name]) for name, kind in get_type_hints(Config).items()})


def split_model(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments in NAME:key=value,key=value, as a name with arguments is written in a command."""
    name, colon, rest = text.partition(":")
    args = {}
    for item in re.split(r",(?=\w+=)", rest) if colon else ():  # a comma within a list stays
        argument, _, value = item.partition("=")
        if not argument.isidentifier() or not value:
            raise WeftError(f"{text}: {item!r} is not an argument of a model, such as ce_unit=dense.")
        args[argument] = _plain(value)
    return name, args


def read_yaml(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The "section.key" values of a YAML file with one mapping for each section."""
    path = Path(file)
    if not path.is_file():
        raise WeftError(f"{path} does not exist; give a YAML file such as a run's config.yaml.")
    content = read_document(path) or {}
    if not isinstance(content, dict) or not all(isinstance(section, dict) for section in content.values()):
        raise WeftError(f"{path} must hold sections of keys, such as `optim:` and below it `lr: 0.001`.")
    return {f"{section}.{name}": value for section, keys in content.items() for name, value in keys.items()}


def to_yaml(config: Config) -> str:
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def known_keys() -> Iterator[str]:
    for section, keys in _sections().items():
        yield from (f"{section}.{name}" for name in keys)


def describe_keys() -> list[list[str]]:
    """A row for every setting: key, type, default, help."""
    rows = []
    for section, keys in _sections().items():
        for item in dataclasses.fields(get_type_hints(Config)[section]):
            default = item.default_factory() if callable(item.default_factory) else item.default
            kind = _type_name(keys[item.name])
            rows.append([f"{section}.{item.name}", kind, json.dumps(default), item.metadata["help"]])
    return rows


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(choice or '""' for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(kind))
    return "none" if kind is type(None) else (get_origin(kind) or kind).__name__


@cache
def _sections() -> dict[str, dict[str, Any]]:
    """Section name to key to type."""
    return {name: get_type_hints(kind) for name, kind in get_type_hints(Config).items()}


def _check_limits(dotted: str, value: Any) -> None:
    section, name = dotted.split(".")
    limits = get_type_hints(Config)[section].__dataclass_fields__[name].metadata["limits"]
    tests = {"least": operator.ge, "most": operator.le, "above": operator.gt, "below": operator.lt}
    if value is not None and not all(tests[word](value, limit) for word, limit in limits.items()):
        words = " and ".join(
            f"{word.replace('least', 'at least').replace('most', 'at most')} {limit:g}"
            for word, limit in limits.items()
        )
        raise WeftError(f"{dotted}={value!r} must be {words}.")


def _typed(dotted: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`; "3e-4" is a number, "0,11" a list, "none" is None where None is allowed."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = [choice or "(empty)" for choice in get_args(kind)]
            hint = did_you_mean(str(value), choices)
            raise WeftError(f"{dotted}={value!r} does not exist; choose from {', '.join(choices)}.{hint}")
        return value
    if get_origin(kind) in (Union, UnionType):
        return None if _plain(value) is None else _typed(dotted, value, get_args(kind)[0])
    plain = _plain(value) if kind is not str else value
    if kind is float and type(plain) is int:
        plain = float(plain)
    if get_origin(kind) is list and (isinstance(plain, list) or isinstance(value, str)):
        items = plain if isinstance(plain, list) else str(value).split(",")  # 0,11 or a single number
        return [_typed(dotted, item, get_args(kind)[0]) for item in items]
    if type(plain) is not (get_origin(kind) or kind) or (kind is float and not math.isfinite(plain)):
        name = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}.get(kind, "a list")
        raise WeftError(f"{dotted}={value!r} is not {name}.")
    return plain


def _plain(value: Any) -> Any:
    """The value that YAML would read, and numbers such as 1e-3, which YAML 1.1 takes for text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if not value.lstrip("+-").isdigit() else int(value)
    except ValueError:
        pass
    try:
        return parse_yaml(value, "A setting") if value.lower() != "none" else None
    except NestedTooDeeply:
        raise
    except WeftError:
        return value
