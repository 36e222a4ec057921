"""Evaluation of a classifier: right and wrong answers, and whether its probabilities can be believed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.loader import Batch
from weft.data.sources.renamed import relabelled
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.report.text import columns, confusion_line, unlearned_line
from weft.tasks.classify.metrics import ClassifyMeter, average_precisions, micro_f1
from weft.tasks.metrics import are_measured, mean_over

BINS = 15  # of equal width, for the calibration error
MATRIX_CLASSES = 200  # with more classes only the most confused pairs are kept
PAIRS = 50
CHUNK = 2**22  # numbers converted to float64 at once
TEMPERATURES = 0.01, 100.0  # the range in which one is looked for


@dataclass(frozen=True)
class Mistake:
    index: int  # in the evaluation
    name: str
    truth: str
    said: str
    confidence: float  # the probability of what was said


@dataclass(frozen=True)
class Confusion:
    """Pictures of one class that were taken for another."""

    truth: str
    said: str
    n: int
    index: list[int]  # in the evaluation


@dataclass(frozen=True)
class ClassifyEvaluation:
    """A model's answers to pictures whose labels are known."""

    names: list[str]
    classes: list[str]
    multilabel: bool
    logits: np.ndarray  # (N, classes) float32
    labels: np.ndarray  # (N,) int64; or (N, classes) bool where multi-label
    unlearned: Sequence[str] = ()  # classes that are not measured; where one label is right, without pictures here

    def metrics(self) -> dict[str, Any]:
        """All numbers, ready for JSON; loss, top-1 and top-5, or mAP, are those of `ClassifyMeter`, to the last digit.

        A class without pictures has zeros, an `n` of 0, and no part in means over classes.

        `ece_after_temperature` is measured with each half of the pictures divided by what was fitted on the other
        half; `temperature` is fitted on all, and 1 where that did not help.
        """
        meter = ClassifyMeter(len(self.classes), self.multilabel, measured=self._measured)
        for start in range(0, len(self.logits), 1024):  # not all at once: float64 takes twice the memory
            part = slice(start, start + 1024)
            meter.add(torch.from_numpy(self.logits[part]), torch.from_numpy(self.labels[part]))
        not_measured = {"unlearned": list(self.unlearned)} if self.unlearned else {}
        numbers = self._multi_label(meter) if self.multilabel else self._single_label(meter)
        return {"n": len(self.names), **not_measured, **numbers}

    def without(self, unlearned: Sequence[str]) -> "ClassifyEvaluation":
        """The evaluation without these classes: of one label the pictures that have it go, of several the label."""
        kept = np.ones(len(self.names), bool)
        if not self.multilabel:
            kept = are_measured(self.classes, unlearned)[self.labels]
        names = [name for name, keep in zip(self.names, kept, strict=True) if keep]
        answers = {"names": names, "logits": self.logits[kept], "labels": self.labels[kept]}
        return replace(self, **answers, unlearned=tuple(unlearned))

    def lines(self, metrics: dict[str, Any]) -> Iterator[str]:
        if self.multilabel:
            f1 = f"F1 {metrics['f1_micro']:.4f} over all labels, {metrics['f1_macro']:.4f} as mean of the classes"
            yield f"mAP {metrics['map']:.4f}   {f1}   loss {metrics['loss']:.4f}"
        else:
            low, high = metrics["top1_interval"]
            top5 = f"   top-5 {metrics['top5']:.2%}" if "top5" in metrics else ""
            interval = f"(95 % interval {low:.2%} to {high:.2%})"
            yield f"top-1 {metrics['top1']:.2%} {interval}{top5}   loss {metrics['loss']:.4f}"
            yield f"calibration error {metrics['ece']:.4f}; {_describe_temperature(metrics)}"
        yield from unlearned_line(self.unlearned)
        yield ""
        keys = [key for key in ("ap", "precision", "recall", "f1") if key in metrics["per_class"][0]]
        rows = [[row["name"], f"{row['n']:,}", *(f"{row[key]:.3f}" for key in keys)] for row in metrics["per_class"]]
        yield from columns([["class", "pictures", *keys], *rows], right=range(1, 2 + len(keys)))
        yield from confusion_line(metrics.get("confused_pairs", []), lambda pair: str(pair["n"]))

    def worst(self, k: int) -> list[Mistake]:
        """The `k` mistakes that the model was surest of; of several labels the surest wrong decision counts."""
        if self.multilabel:
            wrong = (self.logits > 0) != self.labels
            sureness = np.where(wrong, np.abs(self.logits), -np.inf).max(axis=1, initial=-np.inf)
            confidence = 1 / (1 + np.exp(-sureness.astype(np.float64)))
            said, truth = self.logits > 0, self.labels
            order = np.argsort(-sureness, kind="stable")[: wrong.any(axis=1).sum()]
        else:
            said, truth, confidence = self._said, self.labels, self._confidence()
            wrong = np.flatnonzero(said != truth)
            order = wrong[np.argsort(-confidence[wrong], kind="stable")]
        return [
            Mistake(int(i), self.names[i], self._spell(truth[i]), self._spell(said[i]), float(confidence[i]))
            for i in order[:k]
        ]

    def confused_pairs(self, k: int) -> list[Confusion]:
        """The `k` pairs of classes that are most often taken for each other, in this direction; single-label only."""
        wrong = np.flatnonzero(self._said != self.labels)
        keys, of, counts = np.unique(
            self.labels[wrong] * len(self.classes) + self._said[wrong], return_inverse=True, return_counts=True
        )
        pairs = []
        for which in np.argsort(-counts, kind="stable")[:k]:
            truth, said = divmod(int(keys[which]), len(self.classes))
            index = wrong[of == which].tolist()
            pairs.append(Confusion(self.classes[truth], self.classes[said], int(counts[which]), index))
        return pairs

    # Single-label -----------------------------------------------------------------------------------------------

    def _single_label(self, meter: ClassifyMeter) -> dict[str, Any]:
        result = meter.result()
        n, right = len(self.labels), round(result["top1"] * len(self.labels))
        counts = [np.bincount(x, minlength=len(self.classes)) for x in (self.labels, self._said, self._hits)]
        per_class = self._per_class(*counts)
        bins = self._reliability(1.0)
        return {
            **result,
            "top1_interval": wilson(right, n),
            "balanced_accuracy": mean_over(np.array([row["recall"] for row in per_class]), counts[0] > 0),
            "f1_macro": self._f1_macro(per_class, counts),
            "per_class": per_class,
            "commonest": self._commonest(counts[0]),
            "confusion": self._confusion(),
            "confused_pairs": [{"truth": p.truth, "said": p.said, "n": p.n} for p in self.confused_pairs(PAIRS)],
            "ece": calibration_error(bins),
            **self._temperature(calibration_error(bins)),
            "reliability": bins,
        }

    def _commonest(self, counts: np.ndarray) -> dict[str, Any]:
        """The answer that is right as often as its class occurs; and how often guesses by the classes' shares are."""
        shares, most = counts / max(1, counts.sum()), int(counts.argmax())
        guessed = float((shares**2).sum())
        return {"name": self.classes[most], "share": float(shares[most]), "guessed_by_share": guessed}

    def _temperature(self, error: float) -> dict[str, Any]:
        """Fitted on one half of the pictures and judged on the other, both ways round; 1 where that helps nothing."""
        fitted = np.ones((len(self.labels), 1))
        for half, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
            fitted[other] = fit_temperature(self.logits[half], self.labels[half])
        after = calibration_error(self._reliability(fitted))
        helps = after < error and self._loss(fitted) < self._loss(1.0)
        return {
            "temperature": fit_temperature(self.logits, self.labels) if helps else 1.0,
            "temperature_fitted_on": "these pictures; its error is that of fits on one half, judged on the other",
            "ece_after_temperature": after if helps else error,
        }

    @property
    def _measured(self) -> np.ndarray:
        return are_measured(self.classes, self.unlearned)

    @property
    def _said(self) -> np.ndarray:
        return self.logits.argmax(axis=1)

    @property
    def _hits(self) -> np.ndarray:
        """Labels of the pictures that were named correctly."""
        return self.labels[self._said == self.labels]

    def _confusion(self) -> list[list[int]] | None:
        """Rows are true classes, columns what was said; None where that would be too large to look at."""
        c = len(self.classes)
        if c > MATRIX_CLASSES:
            return None
        return np.bincount(self.labels * c + self._said, minlength=c * c).reshape(c, c).tolist()

    def _confidence(self, temperature: float | np.ndarray = 1.0) -> np.ndarray:
        """(N,) the probability of the class that was said; `temperature`: one for all, or (N, 1)."""
        parts = [z.softmax(dim=1).amax(dim=1) for z in self._divided(temperature)]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts]).numpy()

    def _loss(self, temperature: float | np.ndarray) -> float:
        """Cross-entropy, summed over the pictures."""
        parts, start = [0.0], 0
        for z in self._divided(temperature):
            labels = torch.from_numpy(self.labels[start : start + len(z)])
            parts.append(float(torch.nn.functional.cross_entropy(z, labels, reduction="sum")))
            start += len(z)
        return sum(parts)

    def _divided(self, temperature: float | np.ndarray) -> Iterator[Tensor]:
        """Logits over temperatures, a part at a time."""
        temperatures, start = torch.from_numpy(np.broadcast_to(temperature, (len(self.labels), 1)).copy()), 0
        for z in _chunks(self.logits):
            yield z / temperatures[start : start + len(z)]
            start += len(z)

    def _reliability(self, temperature: float | np.ndarray) -> list[dict[str, Any]]:
        """For each bin of confidence: its limits, how many pictures, their mean confidence and accuracy."""
        edges = np.linspace(0, 1, BINS + 1)
        confidence, right = self._confidence(temperature), self._said == self.labels
        where = np.searchsorted(edges[1:-1], confidence, side="right")
        n = np.bincount(where, minlength=BINS)
        confidence, accuracy = (
            np.bincount(where, values, minlength=BINS) / np.maximum(n, 1) for values in (confidence, right)
        )
        columns = edges[:-1], edges[1:], n, confidence, accuracy
        return _rows(("low", "high", "n", "confidence", "accuracy"), [column.tolist() for column in columns])

    # Multi-label ------------------------------------------------------------------------------------------------

    def _multi_label(self, meter: ClassifyMeter) -> dict[str, Any]:
        result, said = meter.result(), self.logits > 0  # a probability above one half
        counts = [x.sum(axis=0) for x in (self.labels, said, self.labels & said)]
        per_class = self._per_class(*counts)
        for row, precision in zip(per_class, average_precisions(self.logits, self.labels), strict=True):
            row["ap"] = float(precision)
        return {
            "loss": result["loss"],
            "map": result["map"],
            "f1_micro": micro_f1(said[:, self._measured], self.labels[:, self._measured]),
            "f1_macro": self._f1_macro(per_class, counts),
            "per_class": per_class,
        }

    # Both -------------------------------------------------------------------------------------------------------

    def _per_class(self, true: np.ndarray, said: np.ndarray, hit: np.ndarray) -> list[dict[str, Any]]:
        precision, recall = hit / np.maximum(said, 1), hit / np.maximum(true, 1)
        f1 = 2 * hit / np.maximum(true + said, 1)
        columns = [column.tolist() for column in (true, precision, recall, f1)]
        return _rows(("name", "n", "precision", "recall", "f1"), [self.classes, *columns])

    def _f1_macro(self, per_class: list[dict[str, Any]], counts: list[np.ndarray]) -> float:
        """Mean over the classes that occur or were said."""
        return mean_over(np.array([row["f1"] for row in per_class]), (counts[0] + counts[1] > 0) & self._measured)

    def _spell(self, label: Any) -> str:
        if np.ndim(label):
            return ", ".join(self.classes[c] for c in np.flatnonzero(label)) or "none"
        return self.classes[label]


def _describe_temperature(metrics: dict[str, Any]) -> str:
    if metrics["temperature"] == 1:
        return "dividing the logits by a temperature does not make it smaller"
    after, by = metrics["ece_after_temperature"], metrics["temperature"]
    return f"{after:.4f} with logits divided by {by:.3f}, a temperature fitted on one half and judged on the other"


def nearest_valid(logits: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """(N,) the label that counts where (N, classes) `valid` allows several: the one that the model finds likeliest.

    So a picture is a hit at rank k if any valid label is among the first k, which is the accuracy of ImageNet-ReaL.
    """
    return np.where(valid, logits, -np.inf).argmax(axis=1)


def wilson(right: int, n: int) -> list[float]:
    """Wilson's 95 % interval of `right` of `n`: it stays between 0 and 1, and holds for small `n` too."""
    if not n:
        return [0.0, 1.0]
    z = 1.959963984540054
    p, shrink = right / n, 1 + z * z / n
    middle = (p + z * z / (2 * n)) / shrink
    half = z / shrink * np.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    return [float(max(0.0, middle - half)), float(min(1.0, middle + half))]


def calibration_error(bins: list[dict[str, Any]]) -> float:
    """ECE: how far confidence and accuracy are apart, on average over the pictures."""
    n = sum(row["n"] for row in bins)
    return float(sum(row["n"] * abs(row["confidence"] - row["accuracy"]) for row in bins) / max(n, 1))


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The number by which to divide the logits so that the mean cross-entropy is smallest.

    In 1 / temperature the cross-entropy is convex: Newton's steps find the minimum, kept between bounds that close in.
    """
    low, high = (1 / t for t in reversed(TEMPERATURES))
    factor = 1.0
    for _ in range(60):
        slope, curvature = _slopes(logits, labels, factor)
        if slope == 0:
            break
        low, high = (low, factor) if slope > 0 else (factor, high)
        step = factor - slope / curvature if curvature > 0 else high
        step = step if low < step < high else float(np.sqrt(low * high))
        if abs(step - factor) <= 1e-6 * factor:
            break
        factor = step
    return 1 / factor


def _slopes(logits: np.ndarray, labels: np.ndarray, factor: float) -> tuple[float, float]:
    """First and second derivative of the summed cross-entropy of `factor * logits` by `factor`."""
    slope, curvature, start = 0.0, 0.0, 0
    for z in _chunks(logits):
        own = z.gather(1, torch.from_numpy(labels[start : start + len(z), None]))
        p = (z * factor).softmax(dim=1)
        mean = (p * z).sum(dim=1, keepdim=True)
        slope += float((mean - own).sum())
        curvature += float((p * (z - mean).square()).sum())
        start += len(z)
    return slope, curvature


def _rows(keys: Sequence[str], columns: Sequence[list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def _chunks(logits: np.ndarray) -> Iterator[Tensor]:
    """Rows in float64, a part at a time; what is not finite becomes a number."""
    rows = max(1, CHUNK // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield torch.from_numpy(logits[start : start + rows]).double().nan_to_num(nan=0.0, posinf=1e30, neginf=-1e30)


class ClassifyCollector:
    """Logits and labels of the pictures at `indices`, in the model's classes; unreadable pictures are left out."""

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        classes: list[str],
        multilabel: bool,
        unlearned: Sequence[str] = (),
    ):
        self.source, self.indices, self.classes, self.multilabel = source, indices, classes, multilabel
        self.unlearned = unlearned
        self.truth, self.valid = self._truth()
        self.row = {index: i for i, index in enumerate(np.asarray(indices).tolist())}
        self.logits, self.rows = [np.zeros((0, len(classes)), np.float32)], []

    def update(self, answers: Tensor, batch: Batch) -> None:
        self.logits.append(answers.float().cpu().numpy())
        self.rows += [self.row[index] for index in batch.index.tolist()]

    def evaluation(self) -> ClassifyEvaluation:
        if not self.rows:
            raise WeftError(f"{self.source.root}: none of the {len(self.indices)} pictures to evaluate can be read.")
        logits, labels = np.concatenate(self.logits), self.truth[self.rows]
        if self.valid is not None:
            labels = nearest_valid(logits, self.valid[self.rows])
        names = [self.source.names[self.indices[i]] for i in self.rows]
        whole = ClassifyEvaluation(names, self.classes, self.multilabel, logits, labels)
        present = np.flatnonzero(labels.any(axis=0)) if self.multilabel else np.unique(labels)
        unlearned = [name for name in (self.classes[i] for i in present) if name in self.unlearned]
        return whole.without(unlearned) if unlearned else whole

    def _truth(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Labels, and all labels that count as right where the source has several, in the model's classes."""
        source, classes = self.source, self.classes
        numbered = classes == [str(i) for i in range(len(classes))]
        if numbered and len(source.classes) == len(classes):
            classes = source.classes  # a published model without names: the order of the classes is all there is
        if source.multilabel and not self.multilabel:
            raise WeftError(f"{source.root} has several labels per picture; the model was trained on one.")
        labels = relabelled(source, classes, self.indices)
        if self.multilabel and not source.multilabel:
            labels = np.eye(len(classes), dtype=bool)[labels]
        if source.valid is None:
            return labels, None
        return labels, relabelled(replace(source, labels=source.valid, multilabel=True), classes, self.indices)
