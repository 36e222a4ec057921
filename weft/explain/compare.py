"""One model, or two side by side, looked into by the same pictures; then figures and a page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.data.given import GivenPictures
from weft.errors import WeftError, check_writable, did_you_mean
from weft.explain.exhibits import Exhibit, exhibits
from weft.explain.explain import Progress, explain, similarity_between
from weft.explain.explanation import Explanation
from weft.explain.page import write_explanation
from weft.explain.pictures import MOST, find_masks
from weft.explain.similarity import Similarity
from weft.explain.subject import Subject
from weft.files import filling


@dataclass(frozen=True)
class Explained:
    """The explanations of a model, or of two and how alike they are."""

    explanations: list[Explanation]
    cross: Similarity | None  # of the layers of both

    def exhibits(self) -> list[Exhibit]:
        return exhibits(self.explanations, self.cross)

    def write(self, folder: str | os.PathLike[str], progress: Progress | None = None) -> Path:
        """Figures, numbers and the page explain.html, whose path is returned, into a new or empty folder."""
        folder = Path(folder)
        check_writable(folder)
        with filling(folder):
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
        subjects = [with_class(subject, of) for subject in subjects]
    if len({subject.name for subject in subjects}) < len(subjects):
        subjects = [replace(subject, name=f"{subject.name} ({i})") for i, subject in enumerate(subjects, start=1)]
    found = GivenPictures(pictures)
    mask_files = find_masks(masks, found.names[:MOST]) if masks else None
    if masks and not mask_files:
        raise WeftError(f"{masks} has no mask for any of the pictures; a mask must have the same name as its picture.")
    explanations = []
    for i, subject in enumerate(subjects):

        def tell(done: int, of: int, part: str, before: int = i) -> None:
            if progress:
                progress(before * of + done, len(subjects) * of, part)

        chosen = layers if i == 0 else ()
        explanations.append(explain(subject, found, layers=chosen, masks=mask_files, progress=tell))
    return Explained(explanations, similarity_between(explanations, found) if len(subjects) == 2 else None)


def with_class(subject: Subject, name: str) -> Subject:
    """The subject, asked for the Grad-CAM of this class."""
    if not subject.scores_classes:
        raise WeftError("Grad-CAM of a class is for classifiers and segmenters; detectors have none.")
    if name not in subject.classes:
        near = did_you_mean(name, subject.classes) or f" It has {', '.join(subject.classes[:3])} and others."
        raise WeftError(f"{subject.name} has no class {name!r}.{near}")
    return replace(subject, asked=subject.classes.index(name))
