"""What is said behind a result: how good a simple answer would be, and whether more time would help."""

from types import SimpleNamespace

import numpy as np
import pytest

from weft.catalog.measured import SMALL, measured
from weft.config import Config, override
from weft.report.outlook import outlook
from weft.report.run import History
from weft.tasks.classify.evaluate import ClassifyEvaluation
from weft.tasks.segment.evaluate import SegmentEvaluation


def finished(right: float, epochs: float, shares=(0.5, 0.3, 0.2), seen: float = 1e12, init: str = "", scores=(), **row):
    """A run on 1,000 pictures that got so many of each class right."""
    labels = np.repeat(np.arange(3), [round(1000 * share) for share in shares])
    said = np.where(np.arange(1000) % 100 < 100 * right, labels, (labels + 1) % 3)
    evaluation = ClassifyEvaluation([""] * 1000, ["a", "b", "c"], False, np.eye(3, dtype=np.float32)[said], labels)
    rows = [{"epoch": i, "val_top1": score, **row} for i, score in enumerate(scores)]
    step = {"kind": "step", "step": int(seen // 32), "epoch": epochs}
    return SimpleNamespace(
        metrics=evaluation.metrics(),
        history=History([step], rows, []),
        config=override(Config(), {"run.batch": 32, "model.init": init}),
        preprocessing=SimpleNamespace(size=(32, 32)),
        split=SimpleNamespace(val=labels),
    )


def test_the_commonest_class_and_guessing_stand_beside_the_result():
    told = " ".join(outlook(finished(0.9, 50)))
    assert "Always answering a would be right on 50%, guessing on 38%." in told  # 0.25 + 0.09 + 0.04
    assert "hardly" not in told


@pytest.mark.parametrize(
    ("right", "epochs", "words"),
    [
        (0.5, 50, "hardly better"),
        (0.9, 2, "hardly trained: 2 epochs."),
        (0.9, 1, "hardly trained: 1 epoch."),
        (0.9, 0.015, "hardly trained: 40 steps."),
    ],
)
def test_too_little_training_is_told(right, epochs, words):
    assert any(words in line for line in outlook(finished(right, epochs, seen=40 * 32)))


def dense(**metrics) -> SimpleNamespace:
    """A run of many epochs on masks or boxes."""
    return SimpleNamespace(**{**vars(finished(0.9, 50)), "metrics": metrics})


def masks(*said: int) -> dict:
    """Metrics of 100 pixels of a class and 20 of another, which were given these answers, one for each class."""
    confusion = np.zeros((2, 2), np.int64)
    confusion[[0, 1], said] = 100, 20
    truth, answers, hits = confusion.sum(1), confusion.sum(0), confusion.diagonal()
    return SegmentEvaluation(["a"], ["floor", "thing"], confusion, truth[None], answers[None], hits[None], 1).metrics()


@pytest.mark.parametrize(
    ("metrics", "nothing"),
    [
        (dict(box_ap=0.0), True),
        (dict(box_ap=0.002, mask_ap=None), True),
        (dict(box_ap=0.2, mask_ap=0.0), False),
        (dict(box_ap=None), False),  # where there is no object
        (masks(0, 0), True),
        (masks(0, 1), False),
    ],
    ids=str,
)
def test_masks_and_boxes_that_say_nothing_are_told(metrics, nothing):
    assert any("finds hardly anything" in line for line in outlook(dense(**metrics))) == nothing


def test_a_curve_of_fewer_pictures_is_told():
    words = "On the way 16 of 1000 pictures validated"
    assert any(words in line for line in outlook(finished(0.7, 50, scores=(0.5, 0.6), validated=16)))
    assert not any(words in line for line in outlook(finished(0.7, 50, scores=(0.5, 0.6))))


@pytest.mark.parametrize(
    ("scores", "rising"),
    [((0.1, 0.4, 0.7), True), ((0.1, 0.68, 0.7), False), ((0.5, 0.6, 0.7, 0.62), False), ((0.7,), False)],
)
def test_a_curve_that_still_rises_is_told(scores, rising):
    assert any("still rises" in line for line in outlook(finished(0.7, 50, scores=scores))) == rising


def test_more_time_is_promised_only_where_it_was_measured():
    row = next(row for row in measured() if row.kind == SMALL and row.curve[-1][0] > 5 * row.curve[0][0])
    told = outlook(finished(0.7, 50, seen=1.1 * row.curve[0][0]))
    (line,) = (line for line in told if "4 times the time" in line)
    promised = float(line.split("about ")[1].split("%")[0]) / 100
    assert 0.7 < promised < 1
    assert not any("4 times" in line for line in outlook(finished(0.7, 50)))
    assert not any("4 times" in line for line in outlook(finished(0.7, 50, seen=1.1 * row.curve[0][0], init="x")))
