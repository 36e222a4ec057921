"""The interface of a task: all that training, evaluation, prediction and reports ask of one.

A task is a slice. Its folder has everything that is special about it: `task` (a batch, the loss, inference), `choose`
(settings that nobody gave), `metrics`, `evaluate`, `predict` and `report`. Whoever works with a task asks it; only
`weft.tasks.registry` knows tasks by their names.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.given import GivenPictures
from weft.data.keep import KeptPictures
from weft.data.loader import Batch, PictureSource
from weft.data.preprocessing import Preprocessing
from weft.data.sampler import SamplingPlan
from weft.data.sources.source import Source
from weft.tasks.policy import Situation

if TYPE_CHECKING:
    from weft.data.check.findings import DataReport
    from weft.report.run import RunReport


@dataclass(frozen=True)
class TaskFacts:
    """Facts that a task is made from beside the configuration; those with a default matter to some tasks alone."""

    classes: list[str]  # in the order of the model's answers
    preprocessing: Preprocessing
    device: torch.device  # where the model is
    dtype: torch.dtype = torch.float32  # what its products are computed in
    multilabel: bool = False  # classify: whether a picture may have several classes
    labels: np.ndarray | None = None  # of the training pictures; None: nothing is trained
    pixel_counts: list[int] | None = None  # segment: training pixels of each class, for the same
    mask_values: Sequence[int] = ()  # segment: what stands for each class in the files of masks; (): its number
    mask_colours: bool = False  # these are 0xRRGGBB
    unlearned: Sequence[str] = ()  # classes that training has no example of, and that are therefore not measured
    distillation: Callable[[Tensor, Tensor, float], Tensor] | None = None  # classify: a loss to be added


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
    """A model's answers to pictures whose truth is known."""

    def metrics(self) -> dict[str, Any]:
        """JSON-ready; has the entries of `Meter.result`, to the last digit."""
        ...

    def lines(self, metrics: dict[str, Any]) -> Iterator[str]:
        """These numbers as text: the whole, then each class, then what is confused."""
        ...


class Collector(Protocol):
    """Gathers answers to pictures whose truth is known."""

    source: Source  # the pictures, with targets in the model's classes

    def update(self, answers: Any, batch: Batch) -> None:
        """`answers`: what `Task.infer` gave for the batch, which has pictures."""
        ...

    def evaluation(self) -> Evaluation: ...


@dataclass(frozen=True)
class ResultTexts:
    """Predictions as `weft predict` prints or writes them."""

    json: str
    csv: str
    lines: list[str]
    hint: str = ""  # on what else there is
    note: str = ""  # on what was left out, or looks odd


class ResultWriter(Protocol):
    """Takes predictions in the order of the pictures, and writes masks and overlays where a folder was given."""

    def add(self, index: int, prediction: Any) -> None: ...

    def close(self) -> ResultTexts: ...


class Choices(Protocol):
    """Settings of a task that nobody gave, before there is a model: the module `choose` of each."""

    def default_recipe(self, config: Config, pictures: int) -> str:
        """The recipe for so many training pictures."""
        ...

    def auto(self, now: Situation, report: "DataReport") -> tuple[dict[str, Any], list[str]]:
        """The settings of the recipe `auto` for pictures like these, and a line on each choice."""
        ...

    def fill(
        self, config: Config, given: Collection[str], report: "DataReport", device: torch.device
    ) -> tuple[Config, list[str]]:
        """The settings that nobody gave, and a line on each choice. `given`: those that somebody did."""
        ...

    def choose_preprocessing(self, config: Config, report: "DataReport") -> Preprocessing:
        """Of evaluation, but for mean and standard deviation, which are 0 and 1."""
        ...

    def kept_bytes(self, config: Config, report: "DataReport") -> int:
        """About what a picture takes that is kept on the device; 0 where this task or these settings do not allow it.

        `config` has been filled.
        """
        ...

    def check_settings(self, config: Config) -> None:
        """Raises for settings that are not for this task."""
        ...


class KeptTraining(Protocol):
    """Training on pictures that are kept on the device: what happens to a batch of them."""

    decode: Callable[..., Tensor]  # (C, h, w) uint8, as it is kept, of a picture and, where that is dense, its target

    def keep(self, pictures: KeptPictures, labels: np.ndarray) -> None:
        """Takes the training pictures and the labels, both by positions in the source."""
        ...

    def batches(
        self, source: PictureSource, plan: SamplingPlan, steps: Iterable[int], workers: int
    ) -> Generator[Batch]:
        """This process's batches of these steps, with `DrawnPictures`; `Task.prepare` does what was drawn."""
        ...

    def rehearse(self, count: int, device: torch.device) -> None:
        """Prepares so many pictures, with the launches of real ones, which need not be there yet."""
        ...


class Task(Protocol):
    name: ClassVar[str]  # classify, segment or detect
    purpose: ClassVar[str]  # what data are for, in words: "are data to ..."
    choices: ClassVar[Choices]
    whole_pictures: ClassVar[bool]  # whether the answer is about a picture as a whole: a timm model gives it alone
    scores_classes: ClassVar[bool]  # whether the model gives each class a score, for a picture or for each pixel
    per_pixel: ClassVar[bool]  # whether that is for each pixel
    writes_pictures: ClassVar[bool]  # whether predictions can be looked at: masks, overlays
    largest_batch: ClassVar[int]  # that is chosen where nobody said
    can_replay: ClassVar[bool]  # whether `loss` gives the model one tensor, and launches depend on its shape alone
    counts_hits: ClassVar[bool]  # whether an answer is right or wrong, so that training has an accuracy
    shown_metrics: ClassVar[dict[str, str]]  # the parts of `Meter.result` that a terminal shows, and their names
    eval_batch: ClassVar[int]  # pictures at once in validation, `weft eval` and `weft predict`

    config: Config
    classes: list[str]
    preprocessing: Preprocessing
    device: torch.device
    dtype: torch.dtype
    multilabel: bool  # whether a picture as a whole may have several classes
    score: str  # the entry of `Meter.result` that decides which model is kept; more is better
    augmentation: Any  # what the loader gives training pictures to
    kept: KeptTraining | None  # pictures that are kept on the device; None where they are read

    def __init__(self, config: Config, facts: TaskFacts) -> None: ...

    # Training

    @property
    def training_size(self) -> tuple[int, int]:
        """Height and width of a picture as the readers give it to training, or about that."""
        ...

    def augmented(self, batch: Batch, seed: int) -> tuple[Any, Any]:
        """Pictures and targets of the batch as training sees them, before they are normalised and mixed."""
        ...

    def advance(self, part_done: float) -> None:
        """Told before each step, and before what is drawn for it, how much of the run is behind it, from 0 to 1."""
        ...

    def prepare(self, batch: Batch, seed: int) -> tuple[Any, Any]:
        """Inputs and targets on the device, normalised: tensors or lists of equal length, to be cut into parts.

        Of kept pictures the launches are always the same, whatever was drawn.
        """
        ...

    def loss(self, forward: Callable[..., Any], x: Any, y: Any, denominator: float) -> tuple[Tensor, Tensor]:
        """The SUM of the pictures' losses over `denominator`, and how many (parts of) pictures were answered rightly.

        So the parts of a batch add up to the batch; exactly, but for detectors, whose losses are no sums over pictures.

        `forward` is the model in training mode, compiled or not; it runs under autocast, the losses in float32.
        """
        ...

    def meter(self) -> Meter: ...

    def dummy_batch(self, count: int) -> Batch:
        """A batch of grey pictures with some targets, of the largest size that training has."""
        ...

    # Use

    def infer(self, model: nn.Module, pictures: Any) -> Any:
        """The answers of the model, in evaluation mode, to pictures as the preprocessing gives them: one for each."""
        ...

    def set_up(self, model: nn.Module) -> None:
        """Prepares a trained model for use as `config.test` says; raises where that makes no sense."""
        ...

    def explained(self, model: nn.Module) -> nn.Module:
        """The part of a trained model that `weft explain` looks into."""
        ...

    def collector(self, source: Source, indices: np.ndarray) -> Collector:
        """For an evaluation of the pictures at `indices`, whose truth is matched by class name."""
        ...

    def prediction(self, name: str, answer: Any, batch: Batch, row: int, *, top: int, score: float) -> Any:
        """One of `infer`'s answers, that to row `row` of the batch, as users get it."""
        ...

    def unreadable(self, name: str, why: str) -> Any:
        """The prediction for a picture that could not be read, or not be answered."""
        ...

    def to_dict(self, prediction: Any) -> dict[str, Any]:
        """A prediction that has no error as `weft serve` answers it, ready for JSON."""
        ...

    def results(self, pictures: GivenPictures, out: Path | None, *, top: int, score: float) -> ResultWriter:
        """Makes texts of the predictions for these pictures and, where `out` is given, files in that folder."""
        ...

    def report(self, run: "RunReport") -> tuple[str, dict[str, Any]]:
        """The template of a run's page, and the values it needs beside those that all pages have."""
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
