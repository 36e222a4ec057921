"""The task of detection and its average precision, against pycocotools, torchmetrics and a plain count."""

import contextlib
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchmetrics.detection import MeanAveragePrecision

import weft
from weft.analysis.detections import DetectEvaluation
from weft.config import Config, override
from weft.data.loader import Batch
from weft.data.objects import Objects
from weft.data.transforms import Preprocessing
from weft.heads.rcnn import make_detector
from weft.tasks.coco import Found, Precision, decode, encode, restore
from weft.tasks.detect import Detect

CLASSES = ["disc", "square", "never"]
NUMBERS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # the first six of COCOeval.stats; [8] is AR 100
FIT = Preprocessing((64, 107), 3, 8, (0.5,) * 3, (0.25,) * 3, "bicubic", 1.0, "fit", 10**7)
SETTINGS = {"augment.img_size": 64, "augment.crop": "resize", "test.score": 0.05}


def no_objects() -> Objects:
    return Objects(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.float32))


def a_task(**values) -> Detect:
    config = override(Config(), SETTINGS | values)
    common = dict(preprocessing=FIT, device=torch.device("cpu"), dtype=torch.float32)
    return Detect(config, classes=CLASSES, has_shapes=True, **common)


# Average precision ------------------------------------------------------------------------------------------------


def a_set(seed: int, pictures: int, dense: bool) -> DetectEvaluation:
    """Objects of all sizes, some crowds, empty pictures; answers near them, far from them, double, of wrong classes."""
    rng = np.random.default_rng(seed)
    found, truth, sizes = [], [], []
    for _ in range(pictures):
        height, width = (int(n) for n in rng.integers(60, 260, 2))
        n = int(rng.integers(0, 12 if dense else 4))
        boxes = random_boxes(rng, n, height, width)
        shapes = [polygon(box) if rng.random() < 0.7 else uncompressed(polygon(box), height, width) for box in boxes]
        area = [coco_masks.area(run_lengths(shape, height, width)) for shape in shapes]
        truth.append(
            Objects(
                boxes=boxes.astype(np.float32),
                labels=rng.integers(0, 2, n),
                crowd=rng.random(n) < 0.2,
                area=np.array(area, np.float32),
                shapes=shapes,
                size=(height, width),
            )
        )
        near = np.concatenate([boxes, boxes[: n // 2]]) + rng.normal(0, 3, (n + n // 2, 4))
        far = random_boxes(rng, int(rng.integers(0, 4)), height, width)
        guesses = ordered(np.concatenate([near, far]), height, width).astype(np.float32)
        labels = np.concatenate([truth[-1].labels, truth[-1].labels[: n // 2], np.zeros(len(far), np.int64)])
        labels = np.where(rng.random(len(labels)) < 0.9, labels, 2 - labels)
        masks = [encode(coco_masks.decode(run_lengths(polygon(box), height, width)).astype(bool)) for box in guesses]
        scores = rng.integers(1, 20, len(guesses)).astype(np.float32) / 20  # many are equal
        found.append(Found(guesses, labels, scores, masks))
        sizes.append((height, width))
    return DetectEvaluation([str(i) for i in range(pictures)], CLASSES, found, truth, sizes, masks=True)


def random_boxes(rng, n: int, height: int, width: int) -> np.ndarray:
    corners = rng.random((n, 2)) * [width, height] * 0.8
    return ordered(np.concatenate([corners, corners + 2 + rng.random((n, 2)) ** 3 * 200], axis=1), height, width)


def ordered(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    boxes = boxes.clip(0, [width, height, width, height])
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:] - 1), boxes[:, 2:]], axis=1).clip(0)


def polygon(box) -> list[list[float]]:
    left, top, right, bottom = (float(x) for x in box)
    return [[left, top, right, top, right, bottom, (left + right) / 2, bottom, left, (top + bottom) / 2]]


def run_lengths(shape, height: int, width: int):
    parts = coco_masks.frPyObjects(shape, height, width)
    return coco_masks.merge(parts) if isinstance(parts, list) else parts


def uncompressed(shape, height: int, width: int):
    flat = coco_masks.decode(run_lengths(shape, height, width)).T.ravel()
    ends = np.flatnonzero(np.diff(np.concatenate([[0], flat, [2]])))
    return {"size": [height, width], "counts": np.diff(ends, prepend=0).tolist()}


def by_pycocotools(evaluation: DetectEvaluation, kind: str, most: int = 100) -> COCOeval:
    """COCO's own program, given the same as it would be in files."""
    objects, answers = [], []
    for i, (found, truth) in enumerate(zip(evaluation.found, evaluation.truth, strict=True)):
        for j, (left, top, right, bottom) in enumerate(truth.boxes.astype(float).tolist()):
            row = dict(id=len(objects) + 1, image_id=i, category_id=int(truth.labels[j]), area=float(truth.area[j]))
            row |= dict(bbox=[left, top, right - left, bottom - top], iscrowd=int(truth.crowd[j]))
            objects.append(row | dict(segmentation=truth.shapes[j]))
        for j, (left, top, right, bottom) in enumerate(found.boxes.astype(float).tolist()):
            row = dict(image_id=i, category_id=int(found.labels[j]), score=float(found.scores[j]))
            shape = dict(segmentation=found.masks[j]) if kind == "mask" else {}
            box = dict(bbox=[left, top, right - left, bottom - top]) if kind == "box" else {}
            answers.append(row | shape | box)
    images = [dict(id=i, height=h, width=w) for i, (h, w) in enumerate(evaluation.sizes)]
    truth = COCO()
    truth.dataset = dict(images=images, annotations=objects, categories=[dict(id=k) for k in range(len(CLASSES))])
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        run = COCOeval(truth, truth.loadRes(answers) if answers else empty(truth), "bbox" if kind == "box" else "segm")
        run.params.maxDets[-1] = most
        run.evaluate()
        run.accumulate()
        if most == 100:
            run.summarize()
    return run


def empty(truth: COCO) -> COCO:
    nothing = COCO()
    nothing.dataset = {**truth.dataset, "annotations": []}
    nothing.createIndex()
    return nothing


def defined(value: float) -> float | None:
    return None if value == -1 else pytest.approx(value, abs=1e-12)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(1, 12), st.booleans())
def test_precision_is_pycocotools(seed, pictures, dense):
    evaluation = a_set(seed, pictures, dense)
    metrics = evaluation.metrics()
    for kind in ("box", "mask"):
        stats = by_pycocotools(evaluation, kind).stats
        assert {n: metrics[f"{kind}_{n}"] for n in NUMBERS} == {
            n: defined(v) for n, v in zip(NUMBERS, stats, strict=False)
        }
        assert metrics[f"{kind}_ar100"] == defined(stats[8])


def test_precision_is_torchmetrics():
    evaluation = a_set(3, 8, dense=True)
    judge = MeanAveragePrecision(iou_type=("bbox", "segm"), backend="faster_coco_eval", class_metrics=True)
    for found, truth, size in zip(evaluation.found, evaluation.truth, evaluation.sizes, strict=True):
        masks = [decode(mask) for mask in found.masks]
        true = [coco_masks.decode(run_lengths(shape, *size)).astype(bool) for shape in truth.shapes]
        blank = np.zeros((0, *size), bool)
        tensors = dict(labels=torch.from_numpy(truth.labels), iscrowd=torch.from_numpy(truth.crowd.astype(int)))
        judge.update(
            [
                dict(
                    boxes=torch.from_numpy(found.boxes),
                    labels=torch.from_numpy(found.labels),
                    scores=torch.from_numpy(found.scores),
                    masks=torch.from_numpy(np.stack(masks) if masks else blank),
                )
            ],
            [
                tensors
                | dict(
                    boxes=torch.from_numpy(truth.boxes),
                    area=torch.from_numpy(truth.area),
                    masks=torch.from_numpy(np.stack(true) if true else blank),
                )
            ],
        )
    theirs, ours = judge.compute(), evaluation.metrics()
    for kind, name in (("box", "bbox"), ("mask", "segm")):
        assert ours[f"{kind}_ap"] == pytest.approx(float(theirs[f"{name}_map"]), abs=1e-5)
        assert ours[f"{kind}_ap50"] == pytest.approx(float(theirs[f"{name}_map_50"]), abs=1e-5)
        each = {int(k): float(v) for k, v in zip(theirs["classes"], theirs[f"{name}_map_per_class"], strict=True)}
        for k in (0, 1):
            assert ours["per_class"][k][f"{kind}_ap"] == pytest.approx(each[k], abs=1e-5)


def test_more_answers_count_where_more_are_allowed():
    """150 objects, all found: of 100 answers two thirds of them can be right."""
    boxes = np.array([[x, y, x + 4, y + 4] for x in range(0, 75, 5) for y in range(0, 50, 5)], np.float32)
    zeros = np.zeros(len(boxes), np.int64)
    truth = Objects(boxes, zeros, zeros.astype(bool), zeros + np.float32(16))
    found = Found(boxes, zeros, np.linspace(1, 0.1, len(boxes)).astype(np.float32))
    few, many = (Precision([found], [truth], [(60, 90)], 1, "box", most) for most in (100, 200))
    assert few.ap() == pytest.approx(67 / 101)
    assert many.ap() == pytest.approx(1.0)
    assert few.ar() == many.ar() == pytest.approx(2 / 3)


def test_nothing_to_find_is_no_number():
    nothing = Found(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))
    evaluation = DetectEvaluation(["a"], CLASSES, [nothing], [no_objects()], [(50, 60)], masks=True)
    metrics = evaluation.metrics()
    assert metrics["box_ap"] is metrics["mask_ap"] is metrics["per_class"][0]["box_ap"] is None
    assert metrics["n"] == 1
    assert metrics["objects"] == 0
    assert evaluation.scores.tolist() == [1.0]
    assert evaluation.worst(5) == []
    assert len(evaluation.curves()["box"]) == 101


def test_boxes_alone_are_measured_without_masks():
    evaluation = a_set(1, 4, dense=True)
    boxes = DetectEvaluation(CLASSES, CLASSES, evaluation.found, evaluation.truth, evaluation.sizes, masks=False)
    assert boxes.metrics()["box_ap"] == evaluation.metrics()["box_ap"]
    assert "mask_ap" not in boxes.metrics()


def test_score_of_a_picture_counts_hits():
    """One right, one of the wrong class, one in a crowd, one unsure; one object missed."""
    boxes = np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 90, 50]], np.float32)
    truth = Objects(boxes, np.array([0, 0, 0]), np.array([False, False, True]), np.full(3, 100, np.float32))
    guesses = np.array([[0, 0, 10, 9], [20, 0, 30, 10], [50, 10, 60, 20], [20, 0, 30, 10]], np.float32)
    found = Found(guesses, np.array([0, 1, 0, 0]), np.array([0.9, 0.8, 0.7, 0.4], np.float32))
    evaluation = DetectEvaluation(["a"], CLASSES, [found], [truth], [(60, 100)], masks=False)
    assert evaluation.scores.tolist() == [2 * 1 / (2 * 1 + 1 + 1)]
    assert evaluation.worst(3) == [0]


# The task ---------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Answers every picture with one box over its left half, the mask being the box's upper half."""

    def forward(self, pictures):
        answers = []
        for picture in pictures:
            height, width = picture.shape[1:]
            mask = torch.zeros(1, 1, 28, 28)
            mask[:, :, :14] = 1
            box = torch.tensor([[0.0, 0.0, width / 2, height]])
            answers.append(dict(boxes=box, labels=torch.tensor([1]), scores=torch.tensor([0.9]), masks=mask))
        return answers


@given(st.integers(8, 300), st.integers(8, 300))
@settings(max_examples=20)
def test_answers_come_back_at_the_pictures_own_size(height, width):
    task = a_task()
    shown = task.preprocessing.fitted(height, width)
    (answer,) = task.infer(Toy(), [torch.zeros(3, *shown, dtype=torch.uint8)])
    found = restore(answer, shown, (height, width))
    np.testing.assert_allclose(found.boxes, [[0, 0, width / 2, height]], rtol=1e-5)
    assert found.labels.tolist() == [0]
    mask = decode(found.masks[0])
    expected = np.zeros((height, width), bool)
    expected[: height // 2, : width // 2] = True
    assert mask.shape == (height, width)
    assert (mask != expected).sum() <= 2 * (height + width)  # the edges, which interpolation moves


def rectangles(count: int = 2, size: tuple[int, int] = (64, 96)) -> Batch:
    """Grey pictures, each with a light and a dark rectangle, as training and as evaluation have them."""
    rng = np.random.default_rng(0)
    pictures, targets, truth = [], [], []
    for _ in range(count):
        picture = torch.full((3, *size), 127, dtype=torch.uint8)
        masks = torch.zeros(2, *size, dtype=torch.uint8)
        boxes = []
        for k, value in enumerate((255, 0)):
            left, top = int(rng.integers(4, 16)) + 48 * k, int(rng.integers(4, 24))
            right, bottom = left + int(rng.integers(20, 30)), top + int(rng.integers(20, 36))
            picture[:, top:bottom, left:right], masks[k, top:bottom, left:right] = value, 1
            boxes.append([left, top, right, bottom])
        corners = torch.tensor(boxes, dtype=torch.float32)
        pictures.append(picture)
        targets.append({"boxes": corners, "labels": torch.tensor([0, 1]), "masks": masks})
        shapes = [[[l, t, r, t, r, b, l, b]] for l, t, r, b in boxes]  # noqa: E741
        area = masks.sum((1, 2)).numpy().astype(np.float32)
        truth.append(Objects(corners.numpy(), np.array([0, 1]), np.zeros(2, bool), area, shapes, size))
    batch = Batch(pictures, targets, torch.arange(count), [], [size] * count)
    batch.truth = truth
    return batch


def evaluated(task: Detect, model: nn.Module, batch: Batch) -> dict[str, float]:
    meter = task.meter()
    for i in range(0, len(batch.pictures), 2):
        part = slice(i, i + 2)
        shown = Batch(batch.pictures[part], batch.truth[part], batch.index[part], [], batch.sizes[part])
        meter.update(task.infer(model, shown.pictures), shown)
    meter.reduce()
    return meter.result()


def test_learns_two_pictures():
    torch.manual_seed(1)
    task, batch = a_task(), rectangles()
    args = dict(channels=32, box_width=64, proposals=50, roi_samples=32, anchor_sizes=[16, 32, 64, 128, 256])
    model = make_detector(weft.create_model("cetnet_nano", num_classes=0), "mask-rcnn", len(CLASSES), **args).train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    x, y = task.prepare(batch, 0)
    for _ in range(60):
        loss, _ = task.loss(model, x, y, len(x))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    result = evaluated(task, model.eval(), batch)
    assert result["box_ap50"] > 0.9
    assert result["mask_ap50"] > 0.9
