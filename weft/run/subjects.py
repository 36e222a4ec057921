"""`weft explain` and `weft.load(run).explain(...)`: runs and names of models as subjects, then analysis and files."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path, PurePath
from typing import Any

import torch

from weft.data.given import GivenPictures
from weft.data.sources.source import PICTURE_ENDINGS
from weft.engine.device import pick_device
from weft.errors import WeftError, check_writable, did_you_mean
from weft.explain.exhibits import Exhibit, exhibits
from weft.explain.explain import MOST, Explanation, Progress, Subject, explain, similarity_between
from weft.explain.maps import trunk_of
from weft.explain.page import write_explanation
from weft.run.build import check_name, create, takes_size
from weft.run.predict_dense import DensePredictor
from weft.run.predictor import Predictor, load, timms_preprocessing

SEED = 0  # of random weights
OUTPUTS = {  # of the tasks' models: whether they score classes, and whether for each pixel
    "classify": dict(scores_classes=True, per_pixel=False),
    "segment": dict(scores_classes=True, per_pixel=True),
    "detect": dict(scores_classes=False, per_pixel=False),
}
LIKE_PICTURES = "put the masks into folders of the same names as the pictures"


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
    of: str = "",
    progress: Progress | None = None,
) -> Explained:
    """Looks into one model, or two, by the same pictures; `layers`, of Grad-CAM, are those of the first model."""
    if of:
        subjects = [asked_for(subject, of) for subject in subjects]
    if len({subject.name for subject in subjects}) < len(subjects):
        subjects = [replace(subject, name=f"{subject.name} ({i})") for i, subject in enumerate(subjects, start=1)]
    found = GivenPictures(pictures)
    mask_files = find_masks(masks, found.names[:MOST]) if masks else None
    if masks and not mask_files:
        raise WeftError(f"{masks} has no mask for any of the pictures; a mask has the name of its picture.")
    explanations = []
    for i, subject in enumerate(subjects):

        def tell(done: int, of: int, part: str, before: int = i) -> None:
            if progress:
                progress(before * of + done, len(subjects) * of, part)

        chosen = layers if i == 0 else ()
        explanations.append(explain(subject, found, layers=chosen, masks=mask_files, progress=tell))
    return Explained(explanations, similarity_between(explanations, found) if len(subjects) == 2 else None)


def asked_for(subject: Subject, name: str) -> Subject:
    """The subject, whose Grad-CAM is to be that of a class."""
    if not subject.scores_classes:
        raise WeftError("Grad-CAM of a class is shown of classifiers and segmenters, not of detectors.")
    if name not in subject.classes:
        near = did_you_mean(name, subject.classes) or f" It has {', '.join(subject.classes[:3])} and others."
        raise WeftError(f"{subject.name} has no class {name!r}.{near}")
    return replace(subject, asked=subject.classes.index(name))


def find_masks(folder: str | os.PathLike[str], names: Iterable[str]) -> dict[str, Path]:
    """The masks of pictures: of the same name without ending and, where several have it, in the same folders.

    Raises where the folders do not tell whose mask it is.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeftError(f"{folder} is no folder of masks; give one with a mask for each picture, of the same name.")

    def fit(pair: tuple[str, Path]) -> int:
        """How many of the innermost folders of a picture and of a mask have the same names."""
        folders = [reversed(PurePath(path).parts[:-1]) for path in (pair[0], pair[1].relative_to(folder))]
        return len(list(takewhile(lambda two: two[0] == two[1], zip(*folders, strict=False))))

    files: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in PICTURE_ENDINGS:
            files[file.stem].append(file)
    pairs = [(name, file) for name in dict.fromkeys(names) for file in files[PurePath(name).stem]]
    found: dict[str, Path] = {}
    taken: dict[Path, str] = {}
    for _, alike in groupby(sorted(pairs, key=fit, reverse=True), key=fit):
        for name, file in [(name, file) for name, file in alike if name not in found and file not in taken]:
            if name in found:
                raise WeftError(f"{name} may have the mask {found[name]} or {file}; {LIKE_PICTURES}.")
            if file in taken:
                raise WeftError(f"The mask {file} may be that of {taken[file]} or {name}; {LIKE_PICTURES}.")
            found[name], taken[file] = file, name
    return found


# Subjects -----------------------------------------------------------------------------------------------------------


def open_subjects(run: str, against: str = "", device: str = "auto") -> list[Subject]:
    """The model of a run, and the one it is shown beside: each a run or model folder, or the name of a model."""
    first = open_subject(run, device)
    if not against:
        return [first]
    second = open_subject(against, device, like=first)
    return told_apart([first, second], [run, against])


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


def open_subject(run: str, device: str = "auto", like: Subject | None = None) -> Subject:
    """A run or model folder; or a model by name, with random weights, for the classes and pictures of `like`."""
    if os.path.exists(run):
        return subject_of(load(run, device))
    if os.sep in run:
        raise WeftError(f"{run} does not exist; give a run or model folder, or the name of a model.")
    check_name(run)
    sized = like is not None and like.preprocessing.crop_mode != "fit" and takes_size(run)
    args = {"img_size": like.preprocessing.size} if like is not None and sized else {}
    classes = like.classes if like is not None and like.per_picture else [f"class {i}" for i in range(1000)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = create(run, args, len(classes), like.preprocessing.channels if like else 3, pretrained=False)
    preprocessing = like.preprocessing if like else timms_preprocessing(model)
    model = model.to(pick_device(device)).eval()
    return Subject(f"{run}, random weights", model, preprocessing, classes, trained=False)


def subject_of(predictor: Predictor | DensePredictor) -> Subject:
    """A model that `weft.load` opened; of a detector its backbone."""
    model: Any = predictor.model
    task, multilabel = "classify", False
    if isinstance(predictor, DensePredictor):
        task = predictor.task.name
        model = model if OUTPUTS[task]["scores_classes"] else model.backbone
    else:
        multilabel = predictor.multilabel
    trunk: Any = trunk_of(model)
    name = getattr(trunk, "pretrained_cfg", {}).get("architecture") or type(trunk).__name__
    classes = list(predictor.classes)
    return Subject(name, model, predictor.preprocessing, classes, task, multilabel=multilabel, **OUTPUTS[task])
