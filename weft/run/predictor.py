"""Using what was trained: `weft.load(folder).predict(pictures)`, and evaluation on pictures whose labels are known.

Both read pictures through the loader, the preprocessing and the batches of training's validation, so all three agree.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import timm.data
import torch
from torch import Tensor, nn

from weft.config import Config, DataConfig, override, read_yaml
from weft.data.given import GivenPictures, Progress
from weft.data.loader import Batch, eval_batches, reading_workers
from weft.data.preprocessing import Preprocessing
from weft.data.sources.open import open_configured
from weft.data.sources.renamed import in_classes, relabelled
from weft.data.sources.source import Source
from weft.data.split import load_split
from weft.engine.device import pick_device, pick_precision
from weft.errors import WeftError, check_choice, check_positive
from weft.heads.folder import open_model
from weft.run.predict_dense import DensePredictor, fast_for_many
from weft.tasks.classify.evaluate import Evaluation, nearest_valid
from weft.tasks.classify.task import EVAL_BATCH

if TYPE_CHECKING:
    from weft.run.subjects import Explained

DENSE = {
    "segment": "weft.tasks.segment.evaluate",
    "detect": "weft.tasks.detect.evaluate",
}  # imported where there is need


@dataclass(frozen=True)
class Prediction:
    name: str
    labels: list[str]  # the likeliest first
    probabilities: list[float]  # of these labels; they add up to 1 over all classes, unless a picture may have several
    error: str = ""  # why there are none


class Predictor:
    """A model with all that is needed to use it."""

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        classes: list[str],
        multilabel: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        self.model = model.to(device).eval()
        self.preprocessing, self.classes, self.multilabel = preprocessing, classes, multilabel
        self.device, self.dtype = device, dtype

    @torch.no_grad()
    def logits(self, pictures: Tensor) -> Tensor:
        """(B, classes) float32 of (B, C, h, w) pictures as `preprocessing.picture` gives them."""
        x = self.preprocessing.normalise(pictures.to(self.device, non_blocking=True))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(x).float()

    def predict(
        self,
        pictures: Any,
        top: int = 5,
        *,
        batch: int = EVAL_BATCH,
        workers: int = -1,
        progress: Progress | None = None,
    ) -> list[Prediction]:
        """What the model sees in pictures: a file, a folder with all below it, a pattern such as "*.jpg", a Pillow
        image, an (H, W) or (H, W, C) array, or a list of these.

        A picture that cannot be read has an `error`; the others are not touched by that.
        """
        check_positive(top=top, batch=batch)
        found = GivenPictures(pictures)
        predictions = [Prediction(name, [], []) for name in found.names]
        for done, scores in self._run(found, np.arange(len(found.names)), batch, workers, progress):
            scale = torch.sigmoid if self.multilabel else torch.nn.Softmax(dim=1)
            values, order = scale(scores.double()).sort(dim=1, descending=True, stable=True)
            for i, p, classes in zip(done.index.tolist(), values.tolist(), order.tolist(), strict=True):
                labels = [self.classes[c] for c in classes[:top]]
                predictions[i] = replace(predictions[i], labels=labels, probabilities=p[:top])
            for i, why in done.bad:
                predictions[i] = replace(predictions[i], error=why)
        return predictions

    def explain(
        self,
        pictures: Any,
        *,
        against: "Predictor | DensePredictor | None" = None,
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
        from weft.run.subjects import explain_subjects, subject_of

        subjects = [subject_of(predictor) for predictor in (self, against) if predictor is not None]
        return explain_subjects(subjects, pictures, layers=layers, masks=masks, of=of, progress=progress)

    def _run(
        self, source: Any, indices: np.ndarray, batch: int, workers: int, progress: Progress | None
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Batches and their (B, classes) logits, on the host."""
        fast_for_many(self.model, self.device, len(indices))
        count = 0
        pin = self.device.type == "cuda"
        workers = reading_workers(workers, len(indices))
        for read in eval_batches(source, self.preprocessing, indices, batch=batch, workers=workers, pin=pin):
            empty = torch.zeros(0, len(self.classes))  # not all models take a batch of no pictures
            yield read, self.logits(read.pictures).cpu() if len(read.pictures) else empty
            count += len(read.index) + len(read.bad)
            if progress:
                progress(count, len(indices))


def evaluate(
    predictor: Predictor | DensePredictor,
    source: Source,
    indices: np.ndarray,
    *,
    batch: int = EVAL_BATCH,
    workers: int = -1,
    progress: Progress | None = None,
) -> Any:
    """What `predictor` says about the pictures at `indices`, next to the truth, which is matched by class name: an
    `Evaluation`, a `SegmentEvaluation` or a `DetectEvaluation`, all with `.metrics()`.

    Pictures that cannot be read are left out, as in training.
    """
    task = predictor.task.name if isinstance(predictor, DensePredictor) else "classify"
    if source.task != task:
        verbs = {"classify": "name pictures as a whole", "segment": "segment", "detect": "detect objects"}
        raise WeftError(f"{source.root} is data to {verbs[source.task]}; the model was trained to {verbs[task]}.")
    if isinstance(predictor, DensePredictor):
        source = in_classes(source, predictor.classes)
        collect = importlib.import_module(DENSE[task]).collect
        workers = reading_workers(workers, len(indices))
        fast_for_many(predictor.model, predictor.device, len(indices))
        return collect(predictor.task, predictor.model, source, indices, workers=workers, progress=progress)
    truth, valid = _truth(predictor, source, indices)
    row = {index: i for i, index in enumerate(np.asarray(indices).tolist())}
    logits, rows = [np.zeros((0, len(predictor.classes)), np.float32)], []
    for read, scores in predictor._run(source, indices, batch, workers, progress):
        logits.append(scores.numpy())
        rows += [row[index] for index in read.index.tolist()]
    if not rows:
        raise WeftError(f"{source.root}: none of the {len(indices)} pictures to evaluate can be read.")
    scores, labels = np.concatenate(logits), truth[rows]
    if valid is not None:
        labels = nearest_valid(scores, valid[rows])
    names = [source.names[indices[i]] for i in rows]
    return Evaluation(names, predictor.classes, predictor.multilabel, scores, labels)


def _truth(predictor: Predictor, source: Source, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Labels, and all labels that count as right where the source has several, in the model's classes."""
    classes = predictor.classes
    if _numbered(classes) and len(source.classes) == len(classes):
        classes = source.classes  # a published model without names: the order of the classes is all there is
    if source.multilabel and not predictor.multilabel:
        raise WeftError(f"{source.root} has several labels per picture; the model was trained on one.")
    labels = relabelled(source, classes, indices)
    if predictor.multilabel and not source.multilabel:
        labels = np.eye(len(classes), dtype=bool)[labels]
    if source.valid is None:
        return labels, None
    return labels, relabelled(replace(source, labels=source.valid, multilabel=True), classes, indices)


def _numbered(classes: list[str]) -> bool:
    return classes == [str(i) for i in range(len(classes))]


# A run or model folder ------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str], device: str = "auto", settings: Mapping[str, Any] | None = None
) -> Predictor | DensePredictor:
    """Opens what was trained or converted: a run, or any folder that `save_model` wrote.

    A run is computed with as training validated it; classes without names have their numbers. A model that segments
    or detects takes other `settings` of how it is used, such as {"test.flip": True}.
    """
    folder = Path(folder)
    model, stored = open_model(folder)
    classes = stored.get("label_names") or [str(i) for i in range(stored["num_classes"])]
    entry = stored.get("weft", {})
    preprocessing = entry.get("preprocessing")
    preprocessing = Preprocessing.from_dict(preprocessing) if preprocessing else timms_preprocessing(model)
    where, dtype, config = pick_device(device), torch.float32, override(Config(), entry.get("settings", {}))
    if (folder / "config.yaml").is_file():
        config = override(config, read_yaml(folder / "config.yaml"))
        if not (config.run.precision == "fp16" and where.type == "cpu"):
            dtype = pick_precision(config.run, where)
        if config.run.channels_last:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if entry.get("task", "classify") != "classify":
        config = override(config, settings or {})
        return _dense(model, config, entry, classes, preprocessing, where, dtype)
    if settings:
        raise WeftError(f"{folder} holds a classifier, to which {', '.join(settings)} does not apply.")
    return Predictor(model, preprocessing, classes, bool(entry.get("multilabel", False)), where, dtype)


def _dense(
    model: Any,
    config: Config,
    entry: dict[str, Any],
    classes: list[str],
    preprocessing: Preprocessing,
    device: torch.device,
    dtype: torch.dtype,
) -> DensePredictor:
    """A segmenter or detector, used as `config.test` says."""
    from weft.run.choose import LONG_SIDE
    from weft.tasks.registry import make_task

    test, shapes = config.test, entry["head"] == "mask-rcnn"
    if test.short_side:
        preprocessing = replace(preprocessing, size=(test.short_side, round(LONG_SIDE * test.short_side)))
    if entry["task"] == "detect":
        if test.flip or test.scales != [1.0]:
            raise WeftError("A detector looks at a picture once; leave out test.flip and test.scales.")
        heads = model.roi_heads  # torchvision's names
        heads.score_thresh, heads.nms_thresh, heads.detections_per_img = test.score, test.nms, test.detections
    common: dict[str, Any] = dict(classes=classes, preprocessing=preprocessing, device=device, dtype=dtype)
    return DensePredictor(model, make_task(entry["task"], config, has_shapes=shapes, **common), preprocessing, device)


def timms_preprocessing(model: nn.Module) -> Preprocessing:
    """What timm would do, for a model that was not trained here."""
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


# What `weft eval` looks at --------------------------------------------------------------------------------------

SPLITS = ("val", "test", "all")


def find_pictures(folder: str | os.PathLike[str], data: str = "", split: str = "") -> tuple[Source, np.ndarray, str]:
    """The source to evaluate on, which of its pictures, and one line that says so.

    Without `data`, or where `data` is what the run was trained on, these are the pictures that it kept for
    validation. Of other data the validation pictures are taken, or else the test pictures, or else all.
    """
    if split:
        check_choice("split", split, SPLITS)
    config, own = _data_config(Path(folder)), (Path(folder) / "split.json").is_file()
    if data and not (own and _same_place(data, config.source)):
        source, whose = open_configured(config, data), ""
        parts = {name: np.flatnonzero(source.splits == name) for name in SPLITS[:2]}
        split = split or next((name for name in parts if len(parts[name])), "all")
    elif own:
        source, parts = _own_data(Path(folder), config)
        whose, split = ", by the run's own split", split or "val"
    else:
        raise WeftError(f"{folder} has no data of its own; say which: weft eval {folder} DATA")
    parts["all"] = np.arange(len(source))
    if not len(parts[split]):
        others = [name for name in SPLITS if len(parts[name])]
        raise WeftError(f"{source.root} has no {split} pictures; choose --split {' or '.join(others)}.")
    what = {"val": "validation pictures", "test": "test pictures", "all": "pictures"}[split]
    return source, parts[split], f"{len(parts[split]):,} {what} of {source.root}{whose}"


def _data_config(folder: Path) -> DataConfig:
    """What a run was trained on; of a model folder that is no run, nothing but its task."""
    if (folder / "config.yaml").is_file():
        return override(Config(), read_yaml(folder / "config.yaml")).data
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return DataConfig(task=stored.get("weft", {}).get("task", "auto"))


def _same_place(data: str, other: str) -> bool:
    return data == other or (os.path.exists(data) and os.path.exists(other) and os.path.samefile(data, other))


def _own_data(folder: Path, config: DataConfig) -> tuple[Source, dict[str, np.ndarray]]:
    source = open_configured(config)
    split = load_split(folder / "split.json", source)
    return source, {"val": split.val, "test": split.test}
