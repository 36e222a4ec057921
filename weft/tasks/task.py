"""What training, evaluation and prediction ask of a task: `Classify`, `Segment` and `Detect` answer."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from weft.data.loader import Batch


class Meter(Protocol):
    """Adds up the validation of one epoch."""

    def update(self, answers: Any, batch: Batch) -> None:
        """`answers`: what `Task.infer` gave for the batch."""
        ...

    def reduce(self) -> None:
        """Adds up over all processes; each calls it once, at the end."""
        ...

    def result(self) -> dict[str, float]:
        """`{"loss": ..., "top1": ...}`: what goes into metrics.jsonl with "val_" before each name."""
        ...


class Evaluation(Protocol):
    """What a model says about pictures whose answers are known."""

    def metrics(self) -> dict[str, Any]:
        """JSON-ready; has the entries of `Meter.result`, to the last digit."""
        ...


class Task(Protocol):
    name: str  # classify, segment or detect
    classes: list[str]
    score: str  # the entry of `Meter.result` that decides which model is kept; more is better
    counts_hits: bool  # whether an answer is right or wrong, so that training has an accuracy
    can_replay: bool  # whether `loss` calls the model with one tensor, and launches depend on its shape alone
    eval_batch: int  # pictures at once in validation, `weft eval` and `weft predict`
    augmentation: Any  # what the loader gives training pictures to

    def augmented(self, batch: Batch, seed: int) -> Any:
        """The batch's pictures as training sees them, before they are normalised."""
        ...

    def prepare(self, batch: Batch, seed: int) -> tuple[Any, Any]:
        """Inputs and targets on the device, normalised: tensors or lists of equal length, to be cut into parts."""
        ...

    def loss(self, forward: Callable[..., Any], x: Any, y: Any, denominator: float) -> tuple[Tensor, Tensor]:
        """The SUM of the pictures' losses over `denominator`, and how many (parts of) pictures were answered rightly.

        So the parts of a batch add up to the batch; exactly, but for detectors, whose losses are no sums over pictures.

        `forward` is the model in training mode, compiled or not; it runs under autocast, the losses in float32.
        """
        ...

    def infer(self, model: nn.Module, pictures: Any) -> Any:
        """What the model, in evaluation mode, says about pictures as the preprocessing gives them."""
        ...

    def meter(self) -> Meter: ...

    def dummy_batch(self, count: int) -> Batch:
        """A batch of grey pictures with some targets, of the largest size that training has."""
        ...


def cut(items: Any, parts: int) -> list[Any]:
    """A tensor or a list in `parts` portions, whose lengths differ by one at most, the longer ones first."""
    if isinstance(items, Tensor):
        return list(items.tensor_split(parts))
    return [[items[i] for i in part] for part in np.array_split(np.arange(len(items)), parts)]


def to_device(items: Any, device: torch.device) -> Any:
    """A tensor, or lists and dictionaries of them, on the device, without waiting for it."""
    if isinstance(items, Tensor):
        return items.to(device, non_blocking=True)
    if isinstance(items, dict):
        return {key: to_device(value, device) for key, value in items.items()}
    return [to_device(item, device) for item in items]
