"""One model, or two side by side, looked into by the same pictures; then figures and a page."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path, PurePath
from typing import Any

from weft.data.given import GivenPictures
from weft.data.sources.source import PICTURE_ENDINGS
from weft.errors import WeftError, check_writable, did_you_mean
from weft.explain.exhibits import Exhibit, exhibits
from weft.explain.explain import MOST, Explanation, Progress, Subject, explain, similarity_between
from weft.explain.page import write_explanation

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
