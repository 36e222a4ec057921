"""The report of a detector: objects painted over pictures, average precision."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.boxes.shapes import draw
from weft.report.album import SIDE, TRAINING, WORST, Album, Panels, css, fitted, nearest, resized, weakest
from weft.report.charts import line_chart
from weft.report.overlay import colours, paint_objects, visible
from weft.report.page import data_uri
from weft.report.run import RunReport, counts, curves, percent
from weft.tasks.detect.coco import overlaps
from weft.tasks.detect.evaluate import SURE, DetectEvaluation, matched

if TYPE_CHECKING:
    from torch import Tensor

LEGEND = 24  # classes; of more the names beside the objects say enough
KINDS = {"box": "boxes", "mask": "masks"}
SIZES = {"": "AP", "50": "AP50", "75": "AP75", "_small": "small", "_medium": "medium", "_large": "large"}


def detect_values(run: RunReport) -> dict[str, Any]:
    """Values of `templates/report_detect.html.j2` beside those that all reports have."""
    metrics, evaluation = run.metrics, run.evaluation
    classes, kinds = evaluation.classes, evaluation.kinds
    table = css(colours(len(classes))) if len(classes) > 1 else []
    tallies = [tally(evaluation, row) for row in range(len(evaluation.names))]

    def panels(row: int, picture: np.ndarray, position: int) -> Panels:
        found, truth = evaluation.found[row], evaluation.truth[row]
        sure, true = found.only(found.scores >= SURE), ~truth.crowd
        shapes = [shape for shape, one in zip(truth.shapes, true, strict=False) if one]
        return {
            "picture": resized(picture),
            "truth": painted(picture, truth.boxes[true], truth.labels[true], None, shapes, classes),
            "answer": painted(picture, sure.boxes, sure.labels, sure.scores, sure.masks, classes),
        }

    def text(row: int) -> str:
        hits, said, true = tallies[row]
        return f"F1 {evaluation.scores[row]:.2f}: {hits} of {true} found, {said - hits} wrong"

    album = Album(evaluation.names, run.source, run.split, run.preprocessing, panels, text)
    examples = list(zip(run.augmented.pictures, run.augmented.labels, strict=True))[:TRAINING]
    rows = [{**row, "colour": table[i] if table else ""} for i, row in enumerate(metrics["per_class"])]
    deciding, lines = f"{kinds[-1]}_ap", evaluation.curves()
    hits, said, true = np.sum(tallies, axis=0).tolist()
    return dict(
        verdict=detect_verdict(metrics, hits, said, true),
        charts=curves(run.history, {f"AP of {KINDS[kind]}": f"val_{kind}_ap" for kind in reversed(kinds)}),
        kinds=kinds,
        names=KINDS,
        sizes=SIZES,
        found={"hits": hits, "said": said, "truth": true},
        precision_recall=line_chart(
            "Precision and recall at an overlap of 0.5",
            {KINDS[kind]: list(zip(lines["recall"], lines[kind], strict=True)) for kind in kinds},
            x_name="part of the objects that is found",
            show=percent,
            show_x=percent,
            zero=True,
        ),
        per_class=sorted(rows, key=lambda row: (row[deciding] is None, row[deciding])),
        worst=album.strips(evaluation.worst(WORST)),
        random=album.random(run.config.run.seed),
        augmented=[data_uri(_example(picture, target, classes), SIDE) for picture, target in examples],
        colours=table if len(table) <= LEGEND else [],
        panels=3,
        counts=counts(run.source, run.split),
    )


def detect_verdict(metrics: dict[str, Any], hits: int, said: int, true: int) -> list[str]:
    """The result in plain sentences; of `said` sure answers `hits` are right, of `true` objects as many were found."""
    seen = [row for row in metrics["per_class"] if row["n"]]
    if not seen:
        return ["There were no validation pictures with an object, so how good the model is was not measured."]
    kinds = [kind for kind in KINDS if metrics.get(f"{kind}_ap") is not None]
    right = f", and of 100 answers about {100 * hits / said:.0f} are right" if said else ""
    precisions = " and ".join(f"{metrics[f'{kind}_ap']:.2f} for {KINDS[kind]}" for kind in kinds)
    return [
        f"Of 100 objects in new pictures about {100 * hits / max(true, 1):.0f} would be found{right}.",
        f"The average precision is {precisions}: 1 would be perfect.",
        *weakest(seen, f"{kinds[-1]}_ap"),
    ]


def tally(evaluation: DetectEvaluation, row: int) -> tuple[int, int, int]:
    """Of one picture: objects found, sure answers, objects. Answers in a crowd do not count."""
    found, truth = evaluation.found[row], evaluation.truth[row]
    sure = found.only(found.scores >= SURE)
    hits, ignored = matched(sure, truth, overlaps(sure, truth, evaluation.sizes[row], evaluation.kinds[-1]))
    return hits, len(sure) - ignored, int((~truth.crowd).sum())


def painted(
    picture: np.ndarray,
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray | None,
    shapes: Sequence[Any],
    classes: Sequence[str],
) -> np.ndarray:
    """Objects with COCO shapes, or none, over a picture of their size (H, W, C), as large as it is shown."""
    height, width = picture.shape[:2]
    masks = np.stack([nearest(draw(shape, height, width)) for shape in shapes]) if shapes else None
    return paint_objects(resized(picture), boxes * _factors(picture), labels, scores, masks, classes)


def _example(picture: "Tensor", target: dict[str, "Tensor"], classes: Sequence[str]) -> np.ndarray:
    """A training picture with its objects, which have (n, h, w) masks."""
    pixels = visible(picture, brighten=True)
    boxes, labels = target["boxes"].cpu().numpy() * _factors(pixels), target["labels"].cpu().numpy()
    masks = [nearest(mask).astype(bool) for mask in target["masks"].cpu().numpy()] if "masks" in target else []
    return paint_objects(resized(pixels), boxes, labels, None, np.stack(masks) if masks else None, classes)


def _factors(picture: np.ndarray) -> np.ndarray:
    """(4,) by which boxes grow with the picture."""
    height, width = fitted(picture.shape)
    return np.array([width / picture.shape[1], height / picture.shape[0]] * 2)
