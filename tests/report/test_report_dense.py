"""The reports of segmenters and detectors: figures are the evaluation's, pictures show truth and answer."""

import base64
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.report.test_report import HOSTILE, Page, data_report, tile
from weft.config import Config, override
from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import encode
from weft.data.preprocessing import Preprocessing
from weft.data.split import Split
from weft.engine.log import read_rows
from weft.report.album import SIDE, fitted, nearest, resized
from weft.report.overlay import IGNORE, paint_mask, palette
from weft.report.run import RunReport, write_report
from weft.tasks.detect.coco import Detections
from weft.tasks.detect.evaluate import DetectEvaluation
from weft.tasks.detect.report import detect_values, detect_verdict
from weft.tasks.segment.evaluate import SegmentEvaluation
from weft.tasks.segment.metrics import SegmentMeter
from weft.tasks.segment.report import WRONG, mistakes, segment_values, segment_verdict

SIZE = (40, 60)
PAGES = {
    "segment": lambda run: ("report_segment.html.j2", segment_values(run)),
    "detect": lambda run: ("report_detect.html.j2", detect_values(run)),
}
N = 8


def history(keys: list[str], epochs: int = 3) -> str:
    rows = []
    for epoch in range(1, epochs + 1):
        common = {"lr": 0.001, "pictures_per_second": 99.0}
        step = {"kind": "step", "step": epoch, "epoch": epoch - 0.5, "loss": 1 / epoch, "grad_norm": 1.0}
        done = {"kind": "epoch", "step": epoch, "epoch": epoch, "train_loss": 1 / epoch, "val_loss": 1.0}
        scores = {f"val_{key}": 0.1 * epoch for key in keys}
        rows += [step | common, done | common | scores | {"seconds": 61.0, "best": epoch == epochs}]
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_report(folder: Path, task: str, classes: list[str], evaluation: Any, targets: list[Any], **more: Any) -> Page:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (N, *SIZE, 3)).astype(np.uint8)
    source = SimpleNamespace(
        classes=classes,
        names=evaluation.names,
        labels=np.ones((N, len(classes)), bool) if task == "detect" else np.zeros(N, np.int64),
        multilabel=task == "detect",
        layout="made up",
        notes=[],
        task=task,
        open=more.pop("open", lambda i: pixels[i]),
        target=lambda i: targets[i],
    )
    folder.mkdir(exist_ok=True)
    keys = ["miou", "pixel_accuracy"] if task == "segment" else ["box_ap", "mask_ap"]
    (folder / "metrics.jsonl").write_text(history(keys))
    report = data_report(classes)
    report.pixels = [100 * (i + 1) for i in range(len(classes))] if task == "segment" else []
    facts = RunReport(
        folder,
        read_rows(folder / "metrics.jsonl"),
        config=override(Config(), {"data.source": "pictures/tiny", "run.epochs": 3}),
        evaluation=evaluation,
        source=source,
        split=Split(train=np.arange(N // 2), val=np.arange(N), test=np.arange(0)),
        preprocessing=Preprocessing((0, 0), 3, 8, (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, "fit", 10**6),
        data_report=report,
        command="weft train pictures/tiny",
        **more,
    )
    path = write_report(facts, PAGES[task])
    return Page(path.read_text(encoding="utf-8"))


def images(page: Page, title: str) -> list[np.ndarray]:
    """The pictures of the galleries under one title."""
    found = [attrs["src"] for tag, attrs in page.tags if tag == "img" and attrs.get("alt", "").startswith(f"{title}:")]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(src.split(",")[1])))) for src in found]


# Segmentation -----------------------------------------------------------------------------------------------------


def segment_page(
    folder: Path, classes: list[str], names: list[str] | None = None, **more: Any
) -> tuple[Page, Any, Any]:
    rng = np.random.default_rng(0)
    k = len(classes)
    truth = [rng.choice([*range(k), IGNORE], SIZE).astype(np.uint8) for _ in range(N)]
    said = [np.where(rng.random(SIZE) < 0.3, rng.integers(0, k, SIZE), t % k).astype(np.uint8) for t in truth]
    meter = SegmentMeter(k, keep=True)
    for t, s in zip(truth, said, strict=True):
        meter.add(
            torch.nn.functional.one_hot(torch.from_numpy(s).long(), k).permute(2, 0, 1).float(), torch.from_numpy(t)
        )
    names = names or [f"{i}.png" for i in range(N)]
    evaluation = SegmentEvaluation.of(names, classes, meter)
    pixels = np.random.default_rng(0).integers(0, 256, (N, *SIZE, 3)).astype(np.uint8)  # as `make_report` has them

    def answer(files: list[Any]) -> list[Any]:
        return [SimpleNamespace(mask=next(said[i] for i in range(N) if np.array_equal(files[0], pixels[i])))]

    batch = SimpleNamespace(
        pictures=torch.zeros(2, 3, *SIZE, dtype=torch.uint8), labels=torch.full((2, *SIZE), 1, dtype=torch.uint8)
    )
    predictor = SimpleNamespace(model=torch.nn.Linear(9, 9), predict=answer)
    page = make_report(folder, "segment", classes, evaluation, truth, augmented=batch, predictor=predictor, **more)
    return page, evaluation, (truth, said, pixels)


def test_figures_of_a_segmenter(tmp_path: Path) -> None:
    classes = ["sky", "road", "pole", "sign"]
    page, evaluation, (truth, said, _) = segment_page(tmp_path / "run", classes)
    t, s = (np.concatenate([x.ravel() for x in masks]) for masks in (truth, said))
    valid = t != IGNORE
    iou = [((t == c) & (s == c)).sum() / ((t == c) | ((s == c) & valid)).sum() for c in range(4)]
    accuracy = (t == s)[valid].mean()
    assert tile(page, "mean IoU of the classes") == f"{np.mean(iou):.3f}"
    assert tile(page, "of all pixels right") == f"{100 * accuracy:.1f} %"
    per_class = [row for row in page.rows["classes"] if len(row) == 4][1:5]
    table = {row[0]: row[2] for row in per_class}
    assert [table[name] for name in classes] == [f"{100 * value:.1f} %" for value in iou]
    assert [row[0] for row in per_class] == [classes[i] for i in np.argsort(iou, kind="stable")]
    assert f"Of 100 pixels of a new picture about {100 * accuracy:.0f} get their class." in page.text
    assert f"The weakest class is {classes[int(np.argmin(iou))]} ({min(iou):.2f})." in page.text
    matrix = [row for row in page.rows["classes"] if len(row) == 5][1:5]
    shares = [100 * ((t == c) & (s == c)).sum() / (t == c).sum() for c in range(4)]
    assert [row[1 + i] for i, row in enumerate(matrix)] == [f"{share:.0f}" for share in shares]
    shown = re.findall(r"mIoU ([\d.]+)", page.text)
    assert f"{evaluation.scores.min():.2f}" == shown[0]
    assert "\n".join(evaluation.lines(evaluation.metrics())).startswith(f"mIoU {np.mean(iou):.4f}")
    counts = {row[0]: row[1] for row in page.rows["data"] if len(row) == 4}
    assert counts["pole"] == "30.00 %"  # 300 of 1,000


def test_truth_and_answer_are_painted_side_by_side(tmp_path: Path) -> None:
    classes = ["background", "road", "pole"]
    page, evaluation, (truth, said, pixels) = segment_page(tmp_path / "run", classes)
    row = evaluation.worst(1)[0]
    table = palette(classes)
    for title, mask in (("truth", truth[row]), ("answer", said[row])):
        expected = paint_mask(resized(pixels[row]), nearest(mask), table, skip=[0])
        assert expected.shape[1] == SIDE
        assert np.abs(images(page, title)[0].astype(float) - expected).mean() < 20  # which WebP changes a little
    assert len(images(page, "mistakes")) == 6 + 6


def test_mistakes_are_red_and_unknown_pixels_are_none() -> None:
    truth = np.array([[0, 1, IGNORE]], np.uint8)
    shown = mistakes(np.full((1, 3, 1), 100, np.uint8), truth, np.array([[0, 0, 0]], np.uint8))
    np.testing.assert_array_equal(shown, [[[155] * 3, WRONG, [78] * 3]])


def test_verdicts_on_segments() -> None:
    rows = [{"name": "a", "iou": 0.9, "pixels": 5}, {"name": "b", "iou": 0.0, "pixels": 5}]
    metrics = {"miou": 0.45, "pixel_accuracy": 0.931, "per_class": rows}
    assert segment_verdict(metrics) == [
        "Of 100 pixels of a new picture about 93 get their class.",
        "The mean IoU of the classes is 0.45: 1 would be perfect.",
        "The weakest class is b (0.00).",
    ]
    assert segment_verdict(metrics | {"per_class": [*rows, dict(rows[1], name="c")]})[-1] == (
        "2 of 3 classes are not found at all, such as b."
    )
    assert "not measured" in segment_verdict({"per_class": [{"name": "a", "iou": None, "pixels": 0}]})[0]


# Detection --------------------------------------------------------------------------------------------------------


def detect_page(
    folder: Path, classes: list[str], shapes: bool = True, names: Any = None, **more: Any
) -> tuple[Page, Any]:
    """In each picture three objects, of which the last is missed, and a false alarm."""
    boxes = np.array([[2, 2, 20, 20], [25, 5, 45, 30], [48, 8, 58, 38], [5, 25, 15, 39]], np.float32)
    masks = np.zeros((4, *SIZE), bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = True
    coded = [encode(mask) for mask in masks] if shapes else []
    labels = np.arange(4) % len(classes)
    areas = masks.sum((1, 2)).astype(np.float32)
    truth = Objects(boxes[:3], labels[:3], np.zeros(3, bool), areas[:3], coded[:3], SIZE)
    which = [0, 1, 3]
    found = Detections(
        boxes[which], labels[which], np.array([0.9, 0.8, 0.7], np.float32), [coded[i] for i in which if shapes]
    )
    names = names or [f"{i}.png" for i in range(N)]
    evaluation = DetectEvaluation(names, classes, [found] * N, [truth] * N, [SIZE] * N, shapes)
    target = {"boxes": torch.from_numpy(boxes), "labels": torch.from_numpy(labels)}
    target |= {"masks": torch.from_numpy(masks.astype(np.uint8))} if shapes else {}
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    empty |= {"masks": torch.zeros(0, 30, 50, dtype=torch.uint8)} if shapes else {}
    pictures = [torch.zeros(3, *SIZE, dtype=torch.uint8), torch.zeros(3, 30, 50, dtype=torch.uint8)]
    batch = SimpleNamespace(pictures=pictures, labels=[target, empty])
    predictor = SimpleNamespace(model=torch.nn.Linear(9, 9))
    return make_report(
        folder, "detect", classes, evaluation, [truth] * N, augmented=batch, predictor=predictor, **more
    ), evaluation


@pytest.mark.parametrize("shapes", [True, False])
def test_figures_of_a_detector(tmp_path: Path, shapes: bool) -> None:
    page, evaluation = detect_page(tmp_path / "run", ["cat", "dog"], shapes)
    metrics = evaluation.metrics()
    kind = "mask" if shapes else "box"
    assert tile(page, f"AP of {'masks' if shapes else 'boxes'}") == f"{metrics[f'{kind}_ap']:.3f}"
    assert "Of 100 objects in new pictures about 67 would be found, and of 100 answers about 67 are right." in page.text
    assert f"{2 * N} of {3 * N} objects" in page.text
    assert "F1 0.67: 2 of 3 found, 1 wrong" in page.text
    sizes = next(row for row in page.rows["classes"] if row[0] == "boxes")
    keys = ("", "50", "75", "_small", "_medium", "_large")
    values = [metrics[f"box_ap{key}"] for key in keys]
    assert sizes[1:] == ["\u2013" if value is None else f"{value:.3f}" for value in values]
    rows = {row[0]: row[1:] for row in page.rows["classes"]}
    for row in metrics["per_class"]:
        assert rows[row["name"]][0] == str(row["n"])
    assert ("masks" in [row[0] for row in page.rows["classes"]]) == shapes
    assert "Precision and recall at an overlap of 0.5" in page.texts
    assert len(images(page, "truth")) == len(images(page, "answer")) == 6 + 6
    assert "nan" not in "\n".join(evaluation.lines(metrics))


def test_verdicts_on_objects() -> None:
    metrics = {"box_ap": 0.5, "mask_ap": 0.4, "per_class": [{"name": "a", "n": 3, "box_ap": 0.5, "mask_ap": 0.4}]}
    assert detect_verdict(metrics, 0, 0, 3) == [
        "Of 100 objects in new pictures about 0 would be found.",
        "The average precision is 0.50 for boxes and 0.40 for masks: 1 would be perfect.",
    ]
    assert "not measured" in detect_verdict({"per_class": [{"name": "a", "n": 0}]}, 0, 0, 0)[0]


# Both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [segment_page, detect_page])
def test_names_are_text_and_nothing_is_loaded(tmp_path: Path, made: Any) -> None:
    names = [f"{HOSTILE[i % 5]}{i}" for i in range(N)]
    page = made(tmp_path / "run", HOSTILE, names=names)[0]
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    for tag, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        assert tag != "img" or attrs["src"].startswith("data:image/")
    assert not re.search(r"https?:|url\(|@import|\u202e", page.html)
    links = [attrs["href"] for tag, attrs in page.tags if "href" in attrs]
    anchors = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {link[1:] for link in links} <= anchors


@pytest.mark.parametrize("made", [segment_page, detect_page])
def test_files_that_have_gone_leave_gaps(tmp_path: Path, made: Any) -> None:
    page = made(tmp_path / "run", ["a", "b"], open=lambda i: tmp_path / "gone.png")[0]
    assert sum(attrs.get("class") == "missing" for _, attrs in page.tags) == 6 + 6


def test_pictures_are_shown_at_one_size_whatever_theirs() -> None:
    assert fitted((10, 20)) == (SIDE // 2, SIDE)
    assert fitted((4000, 3)) == (SIDE, 1)
    mask = np.arange(6, dtype=np.uint8).reshape(2, 3)
    shown = nearest(mask)
    assert set(np.unique(shown)) == set(range(6))
    assert (shown[0, 0], shown[-1, -1]) == (0, 5)
