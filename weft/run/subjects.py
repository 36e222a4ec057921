"""Subjects of `weft explain`: the models of runs, and models by their names."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset

from weft.engine.device import pick_device
from weft.errors import WeftError
from weft.explain.subject import Subject
from weft.models.registry import check_name, takes_size
from weft.run.build import create
from weft.run.predictor import load, timms_preprocessing

SEED = 0  # of random weights


def open_subjects(run: str, against: str = "", device: str = "auto", *, pretrained: bool = False) -> list[Subject]:
    """The model of a run, and the one it is shown beside: each a run or model folder, or the name of a model.

    `pretrained` gives models by name their published weights; otherwise they have random ones.
    """
    places = [run, against] if against else [run]
    if pretrained and all(map(os.path.exists, places)):
        raise WeftError(f"{run} has weights of its own; --init pretrained is for models given by their names.")
    first = open_subject(run, device, pretrained=pretrained)
    if not against:
        return [first]
    second = open_subject(against, device, like=first, pretrained=pretrained)
    return told_apart([first, second], places)


def told_apart(subjects: Sequence[Subject], places: Sequence[str | os.PathLike[str]]) -> list[Subject]:
    """Where models have the same name, with as much of the end of their places as sets these apart."""
    names, paths = [subject.name for subject in subjects], [Path(place).resolve() for place in places]
    named = []
    for subject, path in zip(subjects, paths, strict=True):
        same = [other.parts for name, other in zip(names, paths, strict=True) if name == subject.name and other != path]
        n = next(n for n in range(1, len(path.parts) + 1) if all(o[-n:] != path.parts[-n:] for o in same))
        tail = PurePath(*path.parts[-n:]).as_posix()
        named.append(replace(subject, name=f"{subject.name} ({tail})") if names.count(subject.name) > 1 else subject)
    return named


def open_subject(run: str, device: str = "auto", like: Subject | None = None, *, pretrained: bool = False) -> Subject:
    """A run or model folder; or a model by name, with published weights, or with random ones for the data of `like`."""
    if os.path.exists(run):
        return load(run, device).subject()
    if os.sep in run:
        raise WeftError(f"{run} does not exist; give a run or model folder, or the name of a model.")
    check_name(run)
    subject = _pretrained(run) if pretrained else _random(run, like)
    return replace(subject, model=subject.model.to(pick_device(device)).eval())


def _pretrained(name: str) -> Subject:
    """A model as it was published: its weights, its classes, its way to see pictures."""
    model = create(name, {}, None, None, pretrained=True)
    return Subject(f"{name}, pretrained", model, timms_preprocessing(model), class_names(model))


def _random(name: str, like: Subject | None) -> Subject:
    """A model for the classes and pictures of `like`."""
    sized = like is not None and like.preprocessing.crop_mode != "fit" and takes_size(name)
    args = {"img_size": like.preprocessing.size} if like is not None and sized else {}
    classes = like.classes if like is not None and like.per_picture else [f"class {i}" for i in range(1000)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = create(name, args, len(classes), like.preprocessing.channels if like else 3, pretrained=False)
    preprocessing = like.preprocessing if like else timms_preprocessing(model)
    return Subject(f"{name}, random weights", model, preprocessing, classes, trained=False)


def class_names(model: Any) -> list[str]:
    """ImageNet's names of the classes of a published model; their numbers where they are not ImageNet's."""
    subset = infer_imagenet_subset(model)
    known = ImageNetInfo(subset).label_descriptions() if subset else ()
    return list(known) if len(known) == model.num_classes else [f"class {i}" for i in range(model.num_classes)]
