"""The report of a segmenter: masks painted over pictures, IoU, which classes are taken for which."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.augment.pairs import align
from weft.data.read import header
from weft.report.album import SIDE, TRAINING, WORST, Album, Panels, css, nearest, resized, weakest
from weft.report.overlay import IGNORE, background, paint_mask, palette, visible
from weft.report.page import data_uri
from weft.report.run import RunReport, curves

if TYPE_CHECKING:
    from weft.tasks.segment.evaluate import SegmentEvaluation

MATRIX_CLASSES = 40  # a larger confusion matrix cannot be read; the confused pairs say the same
PAIRS = 8
WRONG = np.array([230, 30, 60], np.uint8)


def segment_values(run: RunReport) -> dict[str, Any]:
    """Values of `templates/report_segment.html.j2` beside those that all reports have."""
    metrics, evaluation, source = run.metrics, run.evaluation, run.source
    classes, table, skip = evaluation.classes, palette(evaluation.classes), background(evaluation.classes)

    def painted(picture: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return paint_mask(picture, mask, table, skip=skip)

    def panels(row: int, picture: np.ndarray, position: int) -> Panels:
        file = source.open(position)
        truth = nearest(align(source.target(position), header(file)))
        said = nearest(run.predictor.predict([file])[0].mask)
        picture = resized(picture)
        sides = {"picture": picture, "truth": painted(picture, truth), "answer": painted(picture, said)}
        return {**sides, "mistakes": mistakes(picture, truth, said)}

    def text(row: int) -> str:
        score = evaluation.scores[row]
        return f"mIoU {score:.2f}" if np.isfinite(score) else "no labelled pixel"

    album = Album(evaluation.names, source, run.split, run.preprocessing, panels, text)
    examples = list(zip(run.augmented.pictures, run.augmented.labels, strict=True))[:TRAINING]
    pixels = [row["pixels"] for row in metrics["per_class"]]
    rows = [
        {**row, "share": row["pixels"] / max(sum(pixels), 1), "colour": colour}
        for row, colour in zip(metrics["per_class"], css(table), strict=True)
    ]
    return dict(
        verdict=segment_verdict(metrics),
        charts=curves(run.history, {"mIoU": "val_miou", "pixel accuracy": "val_pixel_accuracy"}),
        matrix=1 < len(classes) <= MATRIX_CLASSES,
        per_class=sorted(rows, key=lambda row: (row["iou"] is None, row["iou"])),
        pairs=confused(evaluation, dict(zip(classes, css(table), strict=True))),
        worst=album.strips(evaluation.worst(WORST)),
        random=album.random(run.config.run.seed),
        augmented=[
            data_uri(painted(resized(visible(picture, brighten=True)), nearest(mask.cpu().numpy())), SIDE)
            for picture, mask in examples
        ],
        colours=css(table),
        panels=4,
        counts=pixel_shares(classes, run.data_report.pixels, pixels),
    )


def segment_verdict(metrics: dict[str, Any]) -> list[str]:
    """The result in plain sentences."""
    seen = [row for row in metrics["per_class"] if row["pixels"]]
    if not seen:
        return ["There were no validation pictures with a labelled pixel, so how good the model is was not measured."]
    return [
        f"Of 100 pixels of a new picture about {100 * metrics['pixel_accuracy']:.0f} get their class.",
        f"The mean IoU of the classes is {metrics['miou']:.2f}: 1 would be perfect.",
        *weakest(seen, "iou"),
    ]


def mistakes(picture: np.ndarray, truth: np.ndarray, said: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8: the picture in pale grey, red where the answer is wrong, darker where the truth is not known."""
    grey = np.broadcast_to(picture.mean(axis=2, keepdims=True), (*truth.shape, 3))
    pale = 100 + 0.55 * grey
    pale[truth == IGNORE] *= 0.5
    pale[(truth != said) & (truth != IGNORE)] = WRONG
    return pale.round().astype(np.uint8)


def confused(evaluation: "SegmentEvaluation", colours: dict[str, str]) -> list[dict[str, Any]]:
    """The classes most often taken for others: the part of the class, and of all wrong pixels."""
    wrong = int(evaluation.confusion.sum() - evaluation.confusion.diagonal().sum())
    return [
        {**vars(pair), "share": pair.pixels / wrong, "colours": (colours[pair.truth], colours[pair.said])}
        for pair in evaluation.confused_pairs(PAIRS)
    ]


def pixel_shares(classes: Sequence[str], train: Sequence[int], val: Sequence[int]) -> dict[str, Any]:
    """As `weft.report.run.counts`, but the part of all labelled pixels that each class has."""
    pixels = {name: np.array(column) for name, column in (("train", train), ("val", val)) if len(column)}
    shares = {name: (column / max(column.sum(), 1)).tolist() for name, column in pixels.items()}
    rows = [{"name": name, **{part: share[i] for part, share in shares.items()}} for i, name in enumerate(classes)]
    most = max((sum(row[part] for part in shares) for row in rows), default=0)
    return {"parts": list(shares), "rows": rows, "most": most or 1}
