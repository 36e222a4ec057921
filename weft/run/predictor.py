"""Using what was trained: `weft.load(folder).predict(pictures)`.

Pictures are read through the loader, the preprocessing and the batches of training's validation, so all agree.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import timm.data
import torch
from torch import Tensor, nn

from weft.config import Config, DataConfig, override, read_yaml
from weft.data.given import GivenPictures, Progress
from weft.data.loader import Batch, PictureSource, eval_batches, reading_workers
from weft.data.preprocessing import Preprocessing
from weft.documents import read_json
from weft.engine.device import is_out_of_memory, pick_device, pick_precision
from weft.errors import WeftError, check_positive
from weft.fast.fuse import fuse
from weft.fast.swap import fast_on
from weft.heads.folder import open_model
from weft.models.weights.folder import fetch_model
from weft.tasks.choose import size_in_use
from weft.tasks.registry import UNNAMED, task_class
from weft.tasks.task import Task, TaskFacts

if TYPE_CHECKING:
    from weft.explain.compare import Explained
    from weft.explain.subject import Subject

WORTH_COMPILING = 20_000  # pictures; fewer are done before kernels are compiled
TOP = 5  # classes that are named for a picture
HUB = "hub:"  # before the name of a repository of the Hugging Face Hub
SCORE = 0.5  # objects that the model is less sure of are left out, unless asked for


class Predictor:
    """A trained model with all that is needed to use it."""

    def __init__(self, model: nn.Module, task: Task):
        self.model, self.task = model.to(task.device).eval(), task
        self.classes, self.preprocessing = task.classes, task.preprocessing
        self.device, self.dtype = task.device, task.dtype

    @property
    def multilabel(self) -> bool:
        return self.task.multilabel

    def predict(
        self,
        pictures: Any,
        top: int = TOP,
        *,
        score: float = SCORE,
        batch: int = 0,
        workers: int = -1,
        progress: Progress | None = None,
    ) -> list[Any]:
        """The model's answer to each picture: a `Prediction`, `MaskPrediction` or `ObjectPrediction`, by its task.

        A picture that cannot be read has an `error`; the others are not touched by that.

        Args:
            pictures: a file, a folder with all below it, a pattern such as "*.jpg", a table with a path in each line, a
                Pillow image, an (H, W) or (H, W, C) array, or a list of these.
            top: how many classes a classifier names.
            score: objects that a detector is less sure of are left out.
            batch: pictures at once; 0: as in validation.
            workers: processes that read; -1: where it pays.
            progress: is told how many pictures are done, of how many.
        """
        found = GivenPictures(pictures, self.task.name)
        return list(self.stream(found, top=top, score=score, batch=batch, workers=workers, progress=progress))

    def stream(
        self,
        found: GivenPictures,
        *,
        top: int = TOP,
        score: float = SCORE,
        batch: int = 0,
        workers: int = -1,
        progress: Progress | None = None,
    ) -> Iterator[Any]:
        """The predictions one after the other, so that the masks of thousands need not be kept."""
        check_positive(top=top, batch=batch or self.task.eval_batch)
        for read in self.read(found, np.arange(len(found.names)), batch, workers, progress):
            rows = {index: self.task.unreadable(found.names[index], why) for index, why in read.bad}
            answers = self.answers(read.pictures) if len(read.pictures) else []
            for row, (index, answer) in enumerate(zip(read.index.tolist(), answers, strict=True)):
                name = found.names[index]
                if isinstance(answer, str):
                    rows[index] = self.task.unreadable(name, answer)
                else:
                    rows[index] = self.task.prediction(name, answer, read, row, top=top, score=score)
            for index in sorted(rows):
                yield rows[index]

    def read(
        self, source: PictureSource, indices: np.ndarray, batch: int, workers: int, progress: Progress | None
    ) -> Iterator[Batch]:
        """The pictures at `indices` as the model sees them, in batches."""
        if len(indices) >= WORTH_COMPILING and self.task.config.run.fast:
            fast_on(self.model, self.device)
        batch, workers, done = batch or self.task.eval_batch, reading_workers(workers, len(indices)), 0
        pin = self.device.type == "cuda"
        for read in eval_batches(source, self.preprocessing, indices, batch=batch, workers=workers, pin=pin):
            yield read
            done += len(read.index) + len(read.bad)
            if progress:
                progress(done, len(indices))

    def for_inference(self) -> "Predictor":
        """One that answers alike, up to rounding, and on a CPU sooner: with a copy of the model as it is now."""
        if self.device.type != "cpu" or not self.task.config.run.fast:
            return self
        return Predictor(fuse(self.model), self.task)

    @torch.no_grad()
    def infer(self, pictures: Any) -> Any:
        """The task's answers to pictures as `preprocessing.picture` gives them: (B, C, h, w), or a list."""
        return self.task.infer(self.model, pictures)

    def answers(self, pictures: Any) -> list[Any]:
        """The task's answer to each picture, as `infer` takes them, or one line on why there is none."""
        try:
            answers = self.infer(pictures)
            answers = list(answers.float().cpu() if isinstance(answers, Tensor) else answers)  # the host waits once
            return [answer if is_finite(answer) else "the model's answer is no number" for answer in answers]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if len(pictures) == 1:
            return ["too large for the memory of this device; shrink it, or try --device cpu"]
        return [self.answers(pictures[i : i + 1])[0] for i in range(len(pictures))]

    def explain(
        self,
        pictures: Any,
        *,
        against: "Predictor | None" = None,
        layers: Sequence[str] = (),
        masks: str | os.PathLike[str] = "",
        of: str = "",
        progress: Callable[[int, int, str], None] | None = None,
    ) -> "Explained":
        """Looks into the model by pictures, given as for `predict`: Grad-CAM, attention, receptive fields, numbers.

        Args:
            against: another model, to be shown side by side.
            layers: of Grad-CAM, by their names in the model; by default the last that the answer depends on.
            masks: a folder with a mask for each picture, of the same name; whatever is not 0 is foreground.
            of: the class whose Grad-CAM is shown; by default of each picture the likeliest.
            progress: is told how many steps are done, of how many, and what part of the work it was.

        Returns:
            What was found, with `.exhibits()` and `.write(folder)`.
        """
        from weft.explain.compare import explain_subjects  # here, since every training imports this file

        subjects = [predictor.subject() for predictor in (self, against) if predictor is not None]
        return explain_subjects(subjects, pictures, layers=layers, masks=masks, of=of, progress=progress)

    def subject(self) -> "Subject":
        """The model as `weft.explain` looks into it."""
        from weft.explain.maps import trunk_of
        from weft.explain.subject import Subject

        model = self.task.explained(self.model)
        trunk: Any = trunk_of(model)
        name = getattr(trunk, "pretrained_cfg", {}).get("architecture") or type(trunk).__name__
        return Subject(
            name,
            model,
            self.preprocessing,
            list(self.classes),
            self.task.name,
            scores_classes=self.task.scores_classes,
            per_pixel=self.task.per_pixel,
            multilabel=self.multilabel,
        )


def is_finite(answer: Any) -> bool:
    """Whether a task's answer to one picture, a tensor or several by name, is made of numbers."""
    parts = answer.values() if isinstance(answer, Mapping) else [answer]
    return all(bool(part.isfinite().all()) for part in parts if isinstance(part, Tensor))


# A run or model folder ------------------------------------------------------------------------------------------


def load(folder: str | os.PathLike[str], device: str = "auto", settings: Mapping[str, Any] | None = None) -> Predictor:
    """Opens what was trained or converted: a run, any folder that `save_model` wrote, or "hub:OWNER/NAME".

    A run is computed with as training validated it; classes without names have their numbers. `settings` are others of
    how it is used, such as {"test.flip": True}, which is the one that a classifier has.
    """
    name = os.fspath(folder)
    folder = fetch_model(name.removeprefix(HUB)) if name.startswith(HUB) else Path(name)
    model, stored = open_model(folder)
    entry = stored.get("weft", {})
    kind = task_class(entry.get("task", UNNAMED))
    if kind.whole_pictures and (others := [key for key in settings or () if key != "test.flip"]):
        raise WeftError(f"{folder} holds a classifier, to which {', '.join(others)} does not apply.")
    where, dtype, config = pick_device(device), torch.float32, override(Config(), entry.get("settings", {}))
    if (folder / "config.yaml").is_file():
        config = override(config, read_yaml(folder / "config.yaml"))
        if not (config.run.precision == "fp16" and where.type == "cpu"):
            dtype = pick_precision(config.run, where)
        if config.run.channels_last:
            model.to(memory_format=torch.channels_last)
    used = {"model.head": entry["head"]} if "head" in entry else {}
    config = override(config, {**used, **(settings or {})})
    preprocessing = entry.get("preprocessing")
    preprocessing = Preprocessing.from_dict(preprocessing) if preprocessing else timms_preprocessing(model)
    if not kind.whole_pictures:
        preprocessing = replace(preprocessing, size=size_in_use(config.test, preprocessing.size))
    facts = TaskFacts(
        classes=stored.get("label_names") or [str(i) for i in range(stored["num_classes"])],
        preprocessing=preprocessing,
        device=where,
        dtype=dtype,
        multilabel=bool(entry.get("multilabel", False)),
        **facts_of_data(folder, entry),
    )
    task = kind(config, facts)
    task.set_up(model)
    return Predictor(model, task)


def facts_of_data(folder: Path, entry: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Facts of the task that depend on the data it was trained on: from a run's report, or a model's `entry`."""
    file = folder / "data_report.json"
    report = read_json(file) if file.is_file() else entry or {}
    if not isinstance(report, Mapping):
        raise WeftError(f"{file} is not a report that Weft wrote.")
    return {key: report[key] for key in ("unlearned", "mask_values", "mask_colours") if key in report}


def timms_preprocessing(model: nn.Module) -> Preprocessing:
    """timm's own, for a model that was not trained here."""
    data = timm.data.resolve_model_data_config(model)
    channels, height, width = data["input_size"]
    return Preprocessing(
        size=(height, width),
        channels=channels,
        depth=8,
        mean=_for_channels(data["mean"], channels),
        std=_for_channels(data["std"], channels),
        interpolation=data["interpolation"],
        crop_pct=data["crop_pct"],
        crop_mode=data["crop_mode"],
        max_pixels=DataConfig.max_pixels,
    )


def _for_channels(values: Iterable[float], channels: int) -> tuple[float, ...]:
    """One number for each channel: their mean where there are other channels than the model's authors had."""
    values = tuple(values)
    return values if len(values) == channels else (sum(values) / len(values),) * channels
