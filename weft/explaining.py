"""`weft explain` and `weft.load(run).explain(...)`: runs and names of models as subjects, then analysis and files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.analysis.exhibits import Exhibit, exhibits
from weft.analysis.explain import Explanation, Progress, Subject, explain, similarity_between
from weft.analysis.explain_page import write_explanation
from weft.analysis.maps import trunk_of
from weft.data.sources import PICTURE_ENDINGS
from weft.engine.build import check_name, create, takes_size
from weft.engine.device import pick_device
from weft.errors import WeftError, check_writable
from weft.pictures import Found
from weft.predict import Predictor, load, timms_preprocessing
from weft.predict_dense import DensePredictor

SEED = 0  # of random weights


@dataclass(frozen=True)
class Explained:
    """What was found out about a model, or about two."""

    explanations: list[Explanation]
    cross: Any  # the similarity of the layers of both, a `Similarity`, or None

    def exhibits(self) -> list[Exhibit]:
        return exhibits(self.explanations, self.cross)

    def write(self, folder: str | os.PathLike[str], progress: Progress | None = None) -> Path:
        """Figures, numbers and the page explain.html, whose path is returned, into a new or empty folder."""
        folder = Path(folder)
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return write_explanation(folder, self.explanations, self.exhibits(), self.cross, progress)


def explain_subjects(
    subjects: Sequence[Subject],
    pictures: Any,
    *,
    layers: Sequence[str] = (),
    masks: str | os.PathLike[str] = "",
    progress: Progress | None = None,
) -> Explained:
    """Looks into one model, or two, by the same pictures; `layers`, of Grad-CAM, are those of the first model."""
    if len({subject.name for subject in subjects}) < len(subjects):
        subjects = [replace(subject, name=f"{subject.name} ({i})") for i, subject in enumerate(subjects, start=1)]
    found, mask_files = Found(pictures), find_masks(masks) if masks else None
    explanations = []
    for i, subject in enumerate(subjects):

        def tell(done: int, of: int, part: str, before: int = i) -> None:
            if progress:
                progress(before * of + done, len(subjects) * of, part)

        chosen = layers if i == 0 else ()
        explanations.append(explain(subject, found, layers=chosen, masks=mask_files, progress=tell))
    return Explained(explanations, similarity_between(subjects, found) if len(subjects) == 2 else None)


def find_masks(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The masks in a folder, by their names without ending."""
    if not Path(folder).is_dir():
        raise WeftError(f"{folder} is no folder of masks; give one with a mask for each picture, of the same name.")
    return {file.stem: file for file in sorted(Path(folder).rglob("*")) if file.suffix.lower() in PICTURE_ENDINGS}


# Subjects -----------------------------------------------------------------------------------------------------------


def open_subjects(run: str, against: str = "", device: str = "auto") -> list[Subject]:
    """The model of a run, and the one it is shown beside: each a run or model folder, or the name of a model."""
    first = open_subject(run, device)
    if not against:
        return [first]
    second = open_subject(against, device, like=first)
    if first.name == second.name:
        first, second = (
            replace(subject, name=f"{subject.name} ({Path(place).resolve().name})")
            for subject, place in ((first, run), (second, against))
        )
    return [first, second]


def open_subject(run: str, device: str = "auto", like: Subject | None = None) -> Subject:
    """A run or model folder; or a model by name, with random weights, for the classes and pictures of `like`."""
    if os.path.exists(run):
        return subject_of(load(run, device))
    if os.sep in run:
        raise WeftError(f"{run} does not exist; give a run or model folder, or the name of a model.")
    check_name(run)
    sized = like is not None and like.preprocessing.crop_mode != "fit" and takes_size(run)
    args = {"img_size": like.preprocessing.size} if like is not None and sized else {}
    classes = like.classes if like is not None and like.task == "classify" else [f"class {i}" for i in range(1000)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = create(run, args, len(classes), like.preprocessing.channels if like else 3, pretrained=False)
    preprocessing = like.preprocessing if like else timms_preprocessing(model)
    model = model.to(pick_device(device)).eval()
    return Subject(f"{run}, random weights", model, preprocessing, classes, trained=False)


def subject_of(predictor: Predictor | DensePredictor) -> Subject:
    """What `weft.load` opened; of a detector its backbone."""
    model: Any = predictor.model
    task, multilabel = "classify", False
    if isinstance(predictor, DensePredictor):
        task = predictor.task.name
        model = model.backbone if task == "detect" else model
    else:
        multilabel = predictor.multilabel
    trunk: Any = trunk_of(model)
    name = getattr(trunk, "pretrained_cfg", {}).get("architecture") or type(trunk).__name__
    return Subject(name, model, predictor.preprocessing, list(predictor.classes), task, multilabel)
