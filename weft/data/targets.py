"""Kinds of targets that pictures have: labels, masks, or objects.

Whoever lies between a file and a batch asks the kind (`source.kind.dense`) rather than for the name of a task.
"""

from dataclasses import dataclass
from typing import Literal

TaskName = Literal["classify", "segment", "detect"]


@dataclass(frozen=True)
class TargetKind:
    """How the targets of pictures are read and put into batches."""

    name: str
    dense: bool  # a target is read with its picture and moves with it; else it is a row of the source's labels
    stacked: bool = True  # pictures of one size, and in training their targets, are stacked into one tensor
    may_have_shapes: bool = False  # then the reader of targets says whether they do


LABELS = TargetKind("labels", dense=False)
MASKS = TargetKind("masks", dense=True)
OBJECTS = TargetKind("objects", dense=True, stacked=False, may_have_shapes=True)
KINDS: dict[TaskName, TargetKind] = {"classify": LABELS, "segment": MASKS, "detect": OBJECTS}
