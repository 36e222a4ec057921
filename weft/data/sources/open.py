"""Finds out what a path or a name stands for: class folders, a table, shards, masks, boxes, NAME:ROOT or the demo.

`open_source` reads names and labels, never pixels. `join` adds the validation pictures of a second source.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.config import DataConfig
from weft.data import demo
from weft.data.boxes import coco as boxes
from weft.data.masks import folders as mask_folders
from weft.data.masks import sets as mask_sets
from weft.data.sources import folders, named, shards, tables
from weft.data.sources.renamed import in_classes, relabelled
from weft.data.sources.source import ARCHIVES, PICTURE_ENDINGS, JoinedReaders, Names, Source, evaluated
from weft.errors import WeftError, did_you_mean
from weft.words import many


def open_configured(config: DataConfig, source: str = "") -> Source:
    """The source that a run is configured for, with the pictures it validates on; or another one, read likewise."""
    settings: Any = dict(task=config.task, masks=config.masks, classes=config.classes, ignore=config.ignore)
    found = open_source(source or config.source, group="" if source else config.group, **settings)
    if config.val and not source:
        found = join(found, open_source(config.val, **{**settings, "task": found.task, "masks": ""}))
    return found


def open_source(
    source: str, *, group: str = "", task: str = "auto", masks: str = "", classes: str = "", ignore: Sequence[int] = ()
) -> Source:
    """Finds out what `source` is and reads its names and labels; WeftError says what is wrong with it, in one line.

    Args:
        source: a folder, a file or NAME:ROOT.
        group: a column of a table, or a regular expression on names, whose first bracket (or whole match) is the group.
        task: auto, classify, segment or detect; auto: what the layout is for.
        masks: segment: a folder of masks that does not lie beside the pictures.
        classes: segment: a file with the names, values or colours of the classes.
        ignore: segment: mask values that do not count.
    """
    path = Path(source).expanduser()
    if path.exists() and not path.is_dir() and not path.is_file():  # which would be waited for
        raise WeftError(f"{source} is a pipe or a device, and no data.")
    found = _open_dense(source, task, masks, classes, ignore) or _open(source, group)
    if not len(found):
        raise WeftError(f"{source} has no pictures with labels.")
    if task not in ("auto", found.task):
        raise WeftError(f"data.task={task} does not fit {source}, which was read as {found.layout}.")
    if group and found.groups is None:
        _group_by_name(found, group)
    return found


def _open_dense(source: str, task: str, masks: str, classes: str, ignore: Sequence[int]) -> Source | None:
    """Pictures with masks or boxes; None where `source` holds neither."""
    path = Path(source).expanduser()
    name, colon, root = source.partition(":")
    name = name.lower().replace("_", "-")
    found = None
    if task == "classify":
        return None
    if not path.exists() and colon and name == "demo" and root == "nuclei":
        return demo.open_nuclei("detect" if task == "detect" else "segment")
    if not path.exists() and colon and name in {**mask_sets.MASK_SETS, **boxes.BOX_SETS}:
        folder = Path(root).expanduser()
        if not root or not folder.is_dir():
            raise WeftError(f"{source}: after the colon comes the folder that holds the set; {root!r} is not a folder.")
        found = {**mask_sets.MASK_SETS, **boxes.BOX_SETS}[name](source, folder)
    elif path.is_dir() and task != "detect" and (masks or (task == "segment" and mask_folders.recognise(path))):
        found = mask_folders.open_masks(source, masks=masks, classes=classes, ignore=ignore)
    elif (path.is_dir() or path.suffix.lower() == ".json") and boxes.recognise(path):
        found = boxes.open_boxes(source)
    elif path.is_dir() and mask_folders.recognise(path):
        found = mask_folders.open_masks(source, masks=masks, classes=classes, ignore=ignore)
    if found is not None and found.task == "detect" and task == "segment":
        found = mask_folders.semantic_from_objects(found)
    return found


def _open(source: str, group: str) -> Source:
    path = Path(source).expanduser()
    scheme, colon, rest = source.partition(":")
    if not source:
        raise WeftError("No data given; name a folder of pictures, a CSV file, shards, or demo:fashion.")
    if not path.exists() and colon and len(scheme) > 1 and os.sep not in scheme:
        if rest.startswith("//"):
            raise WeftError(f"{source} is not on this machine; fetch it first and give the folder.")
        return named.open_named(scheme, rest)
    if not path.exists() and re.search(r"[*?{]", source):
        return shards.open_shards(source)
    if not path.exists():
        known = f" The set of that name is {source}:FOLDER." if named.is_known(source) else _nearby(path)
        raise WeftError(f"{source} does not exist.{known}")
    if path.is_dir():
        return shards.open_shards(source) if shards.holds_shards(path) else folders.open_folders(source)
    kind = path.suffix.lower()
    if kind in ARCHIVES:
        raise WeftError(f"{source} is an archive; unpack it and give the folder.")
    if kind == ".tar":
        return shards.open_shards(source)
    if kind in (".csv", ".tsv", ".txt"):
        return tables.open_table(source, group)
    if kind in PICTURE_ENDINGS:
        raise WeftError(f"{source} is a single picture; give a folder that has a folder for each class.")
    known = "a folder, a .csv, .tsv or .json file, .tar shards or NAME:ROOT"
    raise WeftError(f"{source} is not data that Weft reads: {known}.")


def join(source: Source, val: Source) -> Source:
    """`source` with the validation pictures of another source, whose classes it must have.

    Validation pictures that `source` has of its own are left out.
    """
    if source.multilabel != val.multilabel or source.kind != val.kind or val.valid is not None:
        raise WeftError(f"{val.root} cannot validate {source.root}: their pictures have different kinds of labels.")
    if source.kind.dense:
        val = in_classes(val, source.classes)
    own, other = np.flatnonzero(source.splits != "val"), evaluated(val)
    notes = [*source.notes, *(f"{val.root}: {note}" for note in val.notes)]
    if len(own) < len(source):
        unused = many(len(source) - len(own), "validation picture")
        notes.append(f"Left out {unused} of {source.root}: those of {val.root} are used.")
    labels = relabelled(val, source.classes, other)
    blocks = None
    if source.blocks is not None or val.blocks is not None:
        first, second = (np.zeros(len(s), int) if s.blocks is None else s.blocks for s in (source, val))
        blocks = np.concatenate([first[own], second[other] + first.max() + 1])
    groups = None
    if source.groups is not None and val.groups is not None:
        groups = np.concatenate([source.groups[own], val.groups[other]])
    return Source(
        root=source.root,
        layout=f"{source.layout}; validation: {val.layout} in {val.root}",
        classes=source.classes,
        names=Names([*(source.names.raw(i) for i in own), *(b"val:" + val.names.raw(i) for i in other)]),
        labels=np.concatenate([source.labels[own], labels]),
        reader=JoinedReaders([(source.reader, own), (val.reader, other)]),
        splits=np.concatenate([source.splits[own], np.full(len(other), "val")]),
        multilabel=source.multilabel,
        groups=groups,
        blocks=blocks,
        notes=notes,
        task=source.task,
        targets=None if source.targets is None else JoinedReaders([(source.targets, own), (val.targets, other)]),
    )


def _group_by_name(source: Source, pattern: str) -> None:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise WeftError(f"data.group={pattern!r} is not a regular expression ({error}).") from None
    matches = [expression.search(name) for name in source.names]
    if not any(matches):
        raise WeftError(f"data.group={pattern!r} matches none of the names, such as {source.names[0]!r}.")
    # a picture without a group is a group of its own
    groups = [(m[1] or "") if m and expression.groups else m[0] if m else "" for m in matches]
    alone = groups.count("")
    source.groups = np.array([g or f"alone: {name}" for g, name in zip(groups, source.names, strict=True)])
    if alone:
        left = many(alone, "picture")
        source.notes.append(f"{left} without a group by {pattern!r}; each counts as a group of its own.")


def _nearby(path: Path) -> str:
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""
