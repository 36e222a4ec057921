"""The report of a classifier: names, confusions, calibration."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.report.charts import Chart, line_chart
from weft.report.overlay import visible
from weft.report.page import data_uri
from weft.report.run import History, RunReport, counts, curves, percent

if TYPE_CHECKING:
    from weft.data.preprocessing import Preprocessing
    from weft.data.sources.source import Source
    from weft.data.split import Split
    from weft.tasks.classify.evaluate import ClassifyEvaluation

MATRIX_CLASSES = 40  # a larger confusion matrix cannot be read; the confused pairs say the same
MANY_CLASSES = 20  # from so many on, top-5 says something
AUGMENTED, PREDICTIONS, MISTAKES = 24, 24, 16  # pictures shown, at most
PAIRS, PAIRS_ALONE, PAIR_PICTURES = 5, 12, 6  # confused pairs beside a matrix and without one
SIDE = 128  # pixels of a thumbnail, which is shown smaller


def classify_values(run: RunReport) -> dict[str, Any]:
    """Values of `templates/report.html.j2` beside those that all reports have."""
    metrics, evaluation = run.metrics, run.evaluation
    album = EvaluationPictures(evaluation, run.source, run.split, run.preprocessing)
    matrix = not evaluation.multilabel and len(evaluation.classes) <= MATRIX_CLASSES
    return dict(
        verdict=verdict(metrics, evaluation),
        charts=score_curves(run.history, many_classes=len(evaluation.classes) >= MANY_CLASSES),
        matrix=matrix,
        per_class=worst_first(metrics),
        pairs=album.pairs(PAIRS if matrix else PAIRS_ALONE, PAIR_PICTURES),
        mistakes=album.mistakes(MISTAKES),
        predictions=album.random(PREDICTIONS, run.config.run.seed),
        augmented=[data_uri(visible(picture), SIDE) for picture in run.augmented.pictures[:AUGMENTED]],
        calibration=None if evaluation.multilabel else reliability_chart(metrics),
        counts=counts(run.source, run.split),
    )


def verdict(metrics: dict[str, Any], evaluation: "ClassifyEvaluation") -> list[str]:
    """The result in plain sentences."""
    seen = [row for row in metrics["per_class"] if row["n"]]
    if not seen:
        return ["There were no validation pictures with a label, so how good the model is was not measured."]
    if evaluation.multilabel:
        weakest = min(seen, key=lambda row: row["ap"])
        guess = evaluation.labels.mean(0)[[row["n"] > 0 for row in metrics["per_class"]]].mean()
        return [
            f"The mean average precision is {metrics['map']:.2f}: 1 would be perfect, guessing gives {guess:.2f}.",
            f"The weakest class is {weakest['name']} ({weakest['ap']:.2f}).",
        ]
    low, high = (round(100 * bound) for bound in metrics["top1_interval"])
    first = f"Of 100 new pictures about {100 * metrics['top1']:.0f} would be named correctly ({low} to {high})."
    weakest = min(seen, key=lambda row: row["recall"])
    lost = sum(row["recall"] == 0 for row in seen)
    if lost > 1:
        return [first, f"{lost} of {len(seen)} classes are not recognised at all, such as {weakest['name']}."]
    if weakest["recall"] == 1:
        return [first, "No class has a mistake."]
    found = f"{round(weakest['recall'] * weakest['n'])} of its {weakest['n']:,} pictures are found"
    return [first, f"The weakest class is {weakest['name']}: {found}."]


def score_curves(history: History, *, many_classes: bool) -> dict[str, Chart | None]:
    several = any("val_map" in row for row in history.epochs)
    scores = {"mAP": "val_map"} if several else {"top-1": "val_top1"}
    if several or many_classes:
        scores |= {"top-5": "val_top5", "F1": "val_f1"}
    return curves(history, scores, "Validation" if several else "Validation accuracy")


def reliability_chart(metrics: dict[str, Any]) -> Chart | None:
    bins = [(bin["confidence"], bin["accuracy"]) for bin in metrics["reliability"] if bin["n"]]
    return line_chart(
        "How often a stated probability is right",
        {"as it should be": [(0.0, 0.0), (1.0, 1.0)], "this model": bins},
        x_name="stated probability",
        show=percent,
        show_x=percent,
        height=360,
    )


def worst_first(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the per-class table; classes without a picture last."""
    key = "ap" if "map" in metrics else "f1"
    return sorted(metrics["per_class"], key=lambda row: (row["n"] == 0, row[key]))


class EvaluationPictures:
    """Pictures of the evaluation, as the model saw them, with what it said."""

    def __init__(
        self, evaluation: "ClassifyEvaluation", source: "Source", split: "Split", preprocessing: "Preprocessing"
    ):
        self.evaluation, self.source, self.preprocessing = evaluation, source, preprocessing
        self.where = {source.names[i]: int(i) for i in split.reported}

    def random(self, most: int, seed: int) -> list[dict[str, Any]]:
        n = len(self.evaluation.names)
        chosen = np.random.default_rng(seed).choice(n, min(most, n), replace=False)
        return [self.figure(i) for i in chosen]

    def mistakes(self, most: int) -> list[dict[str, Any]]:
        """Those that the model was surest of, first."""
        return [self.figure(mistake.index) for mistake in self.evaluation.worst(most)]

    def pairs(self, most: int, pictures: int) -> list[dict[str, Any]]:
        """The classes most often taken for others, with examples."""
        confused = [] if self.evaluation.multilabel else self.evaluation.confused_pairs(most)
        return [
            {"truth": p.truth, "said": p.said, "n": p.n, "pictures": [self.figure(i) for i in p.index[:pictures]]}
            for p in confused
        ]

    def figure(self, i: int) -> dict[str, Any]:
        """Picture `i` of the evaluation: its name and look, the truth, what the model said and how sure it was."""
        logits, labels = self.evaluation.logits[i], self.evaluation.labels[i]
        if self.evaluation.multilabel:
            said, truth = np.flatnonzero(logits > 0).tolist(), np.flatnonzero(labels).tolist()
            probabilities = torch.from_numpy(logits).double().sigmoid()
        else:
            said, truth = [int(logits.argmax())], [int(labels)]
            probabilities = torch.from_numpy(logits).double().softmax(0)
        name = self.evaluation.names[i]
        return {
            "name": name,
            "src": self._look(name),
            "right": said == truth,
            "truth": [self.evaluation.classes[c] for c in truth],
            "said": [(self.evaluation.classes[c], float(probabilities[c])) for c in said],
        }

    def _look(self, name: str) -> str:
        """The picture as a data URI; empty where its file has gone since."""
        from weft.data.read import BadPicture

        try:
            return data_uri(visible(self.preprocessing.picture(self.source.open(self.where[name]))), SIDE)
        except (KeyError, BadPicture, OSError):
            return ""
