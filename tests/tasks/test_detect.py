"""The task of detection and its average precision, against pycocotools, torchmetrics and a plain count."""

import contextlib
import io
import json
import sys

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
from torchvision.models.detection.roi_heads import paste_masks_in_image

import weft
from weft.config import Config, override
from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import draw, encode
from weft.data.loader import Batch
from weft.data.preprocessing import Preprocessing
from weft.data.targets import KINDS
from weft.errors import WeftError
from weft.heads.rcnn import make_detector
from weft.run.evaluate import evaluate
from weft.run.predictor import Predictor
from weft.tasks.detect.choose import check_settings
from weft.tasks.detect.coco import Detections, Precision, pasted, restore, run_lengths
from weft.tasks.detect.evaluate import DetectEvaluation
from weft.tasks.detect.metrics import DetectMeter
from weft.tasks.detect.task import Detect
from weft.tasks.task import TaskFacts, cut

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of pycocotools

CLASSES = ["disc", "square", "never"]
NUMBERS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # the first six of COCOeval.stats; [8] is AR 100
FIT = Preprocessing((64, 107), 3, 8, (0.5,) * 3, (0.25,) * 3, "bicubic", 1.0, "fit", 10**7)
SETTINGS = {"augment.img_size": 64, "augment.crop": "resize", "test.score": 0.05}


def no_objects() -> Objects:
    return Objects(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.float32))


def a_task(has_shapes=True, **values) -> Detect:
    head = "mask-rcnn" if has_shapes else "faster-rcnn"
    config = override(Config(), {"model.head": head} | SETTINGS | values)
    return Detect(config, TaskFacts(CLASSES, FIT, torch.device("cpu")))


# Average precision ------------------------------------------------------------------------------------------------


def a_set(seed: int, pictures: int, dense: bool) -> DetectEvaluation:
    """Objects of all sizes, some crowds, empty pictures; answers near them, far from them, double, of wrong classes."""
    rng = np.random.default_rng(seed)
    found, truth, sizes = [], [], []
    for _ in range(pictures):
        height, width = (int(n) for n in rng.integers(60, 260, 2))
        n = int(rng.integers(0, 12 if dense else 4))
        boxes = random_boxes(rng, n, height, width)
        shapes = [written(polygon(box), height, width, rng.integers(3)) for box in boxes]
        area = [coco_masks.area(coco_runs(shape, height, width)) for shape in shapes]
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
        masks = [encode(coco_masks.decode(coco_runs(polygon(box), height, width)).astype(bool)) for box in guesses]
        scores = rng.integers(1, 20, len(guesses)).astype(np.float32) / 20  # many are equal
        found.append(Detections(guesses, labels, scores, masks))
        sizes.append((height, width))
    return DetectEvaluation([str(i) for i in range(pictures)], CLASSES, found, truth, sizes, masks=True)


def test_objects_of_a_class_that_nobody_could_learn_are_not_missed():
    """The mean over classes is that over the others, which pycocotools' numbers of each class have."""
    whole = a_set(3, 12, dense=True)
    meter = DetectMeter(3, False, 100, measured=np.array([True, False, True]))
    for i, (found, truth, size) in enumerate(zip(whole.found, whole.truth, whole.sizes, strict=True)):
        truth = truth.only(meter.measured[truth.labels])
        meter.rows[i] = found, truth, size
    result = meter.result()
    assert result["box_ap"] == pytest.approx(whole.precisions["box"].ap(label=0))
    assert result["box_ap"] != pytest.approx(whole.precisions["box"].ap())


def random_boxes(rng, n: int, height: int, width: int) -> np.ndarray:
    corners = rng.random((n, 2)) * [width, height] * 0.8
    return ordered(np.concatenate([corners, corners + 2 + rng.random((n, 2)) ** 3 * 200], axis=1), height, width)


def ordered(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    boxes = boxes.clip(0, [width, height, width, height])
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:] - 1), boxes[:, 2:]], axis=1).clip(0)


def polygon(box) -> list[list[float]]:
    left, top, right, bottom = (float(x) for x in box)
    return [[left, top, right, top, right, bottom, (left + right) / 2, bottom, left, (top + bottom) / 2]]


def coco_runs(shape, height: int, width: int):
    if isinstance(shape, dict) and isinstance(shape["counts"], str):
        return shape
    parts = coco_masks.frPyObjects(shape, height, width)
    return coco_masks.merge(parts) if isinstance(parts, list) else parts


def written(shape, height: int, width: int, way: int):
    """As a polygon, as run lengths, or as packed ones: COCO files have all three."""
    mask = coco_masks.decode(coco_runs(shape, height, width))
    ends = np.flatnonzero(np.diff(np.concatenate([[0], mask.T.ravel(), [2]])))
    runs = {"size": [height, width], "counts": np.diff(ends, prepend=0).tolist()}
    return (shape, runs, encode(mask))[way]


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
    exact = dict(iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(), rec_thresholds=np.linspace(0, 1, 101).tolist())
    judge = MeanAveragePrecision(
        iou_type=("bbox", "segm"), backend="faster_coco_eval", class_metrics=True, **exact
    )  # without these thresholds are rounded to float32, and 0.2 is more than a recall of 1 / 5
    for found, truth, size in zip(evaluation.found, evaluation.truth, evaluation.sizes, strict=True):
        masks = [draw(mask, *size) for mask in found.masks]
        true = [coco_masks.decode(coco_runs(shape, *size)).astype(bool) for shape in truth.shapes]
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
    found = Detections(boxes, zeros, np.linspace(1, 0.1, len(boxes)).astype(np.float32))
    few, many = (Precision([found], [truth], [(60, 90)], 1, "box", most) for most in (100, 200))
    assert few.ap() == pytest.approx(67 / 101)
    assert many.ap() == pytest.approx(1.0)
    assert few.ar() == many.ar() == pytest.approx(2 / 3)


def test_nothing_to_find_is_no_number():
    nothing = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))
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
    found = Detections(guesses, np.array([0, 1, 0, 0]), np.array([0.9, 0.8, 0.7, 0.4], np.float32))
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
    mask = draw(found.masks[0], height, width)
    expected = np.zeros((height, width), bool)
    expected[: height // 2, : width // 2] = True
    assert mask.shape == (height, width)
    assert (mask != expected).sum() <= 2 * (height + width)  # the edges, which interpolation moves


@given(st.integers(5, 80), st.integers(5, 80), st.integers(0, 10**6))
@settings(max_examples=30)
def test_masks_are_pasted_as_by_torchvision(height, width, seed):
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.random((6, 2, 2)), axis=1) * [width, height]
    corners[0] = [[0, 0], [width, height]]
    boxes = torch.from_numpy(corners.reshape(6, 4).astype(np.float32))
    masks = torch.from_numpy(rng.random((6, 1, 28, 28), dtype=np.float32))
    expected = paste_masks_in_image(masks, boxes, (height, width))[:, 0].numpy() > 0.5
    assert pasted(masks, boxes, (height, width)) == [encode(mask) for mask in expected]


def test_full_and_empty_masks_have_run_lengths():
    for value in (False, True):
        mask = np.full((4, 5), value)
        assert run_lengths(mask, (0, 0), (4, 5)) == encode(mask)


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


def test_meter_and_evaluation_agree():
    evaluation = a_set(5, 6, dense=True)
    meter = a_task().meter()
    rows = list(zip(evaluation.found, evaluation.truth, evaluation.sizes, strict=True))
    meter.rows = dict(reversed(list(enumerate(rows))))  # however they came in
    metrics = evaluation.metrics()
    assert meter.result() == {name: metrics[name] for name in ("box_ap", "box_ap50", "mask_ap", "mask_ap50")}


def test_processes_share_what_they_found(monkeypatch):
    evaluation = a_set(5, 6, dense=True)
    rows = list(enumerate(zip(evaluation.found, evaluation.truth, evaluation.sizes, strict=True)))
    alone, *meters = (a_task().meter() for _ in range(3))
    alone.rows = dict(rows)
    for rank, meter in enumerate(meters):
        meter.rows = dict(rows[rank::2])
    gathered = [dict(meter.rows) for meter in meters]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda parts, mine: parts.__setitem__(slice(2), gathered)
    )
    for meter in meters:
        meter.reduce()
        assert meter.result() == alone.result()


def test_an_answer_does_not_depend_on_its_neighbours():
    task = a_task(**{"test.score": 0.0})
    model = small_detector(test=override(Config(), {"test.score": 0.0}).test).eval()
    pictures = [torch.randint(256, (3, *size), dtype=torch.uint8) for size in ((64, 96), (96, 64), (64, 96), (40, 50))]
    together = task.infer(model, pictures)
    for picture, answer in zip(pictures, together, strict=True):
        torch.testing.assert_close(task.infer(model, [picture])[0], answer, rtol=1e-4, atol=1e-4)


def test_a_part_of_a_batch_weighs_as_much_as_it_has_pictures():
    """So means over pictures add up; torchvision's, over samples, do about."""
    task, batch = a_task(), rectangles(3)
    x, y = task.prepare(batch, 0)

    def forward(pictures, targets):
        return {"a": torch.stack([p.mean() for p in pictures]).mean(), "b": torch.tensor(2.0)}

    whole, hits = task.loss(forward, x, y, 3)
    parts = [task.loss(forward, *part, 3)[0] for part in zip(cut(x, 2), cut(y, 2), strict=True)]
    torch.testing.assert_close(sum(parts), whole)
    assert hits == 0
    assert [target["labels"].tolist() for target in y] == [[1, 2]] * 3
    assert batch.labels[0]["labels"].tolist() == [0, 1]  # those of the loader stay as they are


@pytest.mark.parametrize(
    ("has_shapes", "values", "size"),
    [
        (True, {}, (64, 107)),
        (False, {"augment.short_sides": [32, 48], "augment.long_side": 80}, (48, 80)),
        (True, {"augment.crop": "random"}, (64, 64)),
    ],
)
def test_dummy_batches_are_of_the_largest_size_and_train(has_shapes, values, size):
    task = a_task(has_shapes, **values)
    batch = task.dummy_batch(2)
    assert batch.pictures[0].shape == (3, *size)
    assert ("masks" in batch.labels[0]) == has_shapes
    model = small_detector("mask-rcnn" if has_shapes else "faster-rcnn").train()
    loss, _ = task.loss(model, *task.prepare(batch, 0), 2)
    loss.backward()
    assert torch.isfinite(loss)
    assert task.score == ("mask_ap" if has_shapes else "box_ap")


class Rectangles:
    """A source of three pictures, one of which cannot be read."""

    task, kind, multilabel, classes, names = "detect", KINDS["detect"], True, CLASSES, ["a", "broken", "c"]
    labels = np.zeros((3, len(CLASSES)), bool)

    def __init__(self):
        self.batch = rectangles(3)

    def open(self, index):
        return np.zeros((0, 3, 3), np.uint8) if index == 1 else self.batch.pictures[index].permute(1, 2, 0).numpy()

    def target(self, index):
        return self.batch.truth[index]


def test_collects_what_is_found_in_a_source():
    told = []
    task = a_task()
    evaluation = evaluate(Predictor(Toy(), task), Rectangles(), np.arange(3), progress=lambda *done: told.append(done))
    assert evaluation.names == ["a", "c"]
    assert evaluation.sizes == [(64, 96)] * 2
    assert told[-1] == (3, 3)
    assert evaluation.metrics()["objects"] == 4
    assert [len(found) for found in evaluation.found] == [1, 1]
    json.dumps(evaluation.metrics())


def test_the_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(WeftError, match="pip install"):
        Precision([], [], [], 1, "box")


def small_detector(head="mask-rcnn", **settings):
    args = dict(channels=32, box_width=64, proposals=50, roi_samples=32, anchor_sizes=[16, 32, 64, 128, 256])
    return make_detector(weft.create_model("cetnet_nano", num_classes=0), head, len(CLASSES), **args, **settings)


@pytest.mark.slow
def test_learns_two_pictures():
    torch.manual_seed(1)
    task, batch = a_task(), rectangles()
    model = small_detector().train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    x, y = task.prepare(batch, 0)
    for _ in range(50):
        loss, _ = task.loss(model, x, y, len(x))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    result = evaluated(task, model.eval(), batch)
    assert result["box_ap50"] > 0.9
    assert result["mask_ap50"] > 0.9


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"augment.cut_sides": [600, 384]}, r"cut_sides=\[600, 384\] must be the smallest and the largest side"),
        ({"augment.cut_sides": [384]}, "cut_sides"),
        ({"augment.cut_short_sides": [400, 0]}, "cut_short_sides.*positive"),
        ({"augment.cut_short_sides": [400], "augment.crop": "random"}, "choose augment.crop=resize"),
    ],
)
def test_cuts_that_cannot_be(values, words):
    config = {"data.task": "detect", "model.head": "mask-rcnn", **values}
    with pytest.raises(WeftError, match=words):
        check_settings(override(Config(), config))
