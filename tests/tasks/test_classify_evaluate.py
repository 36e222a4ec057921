"""Every number of an evaluation, against scikit-learn, scipy, torchmetrics and a brute force."""

import json
import warnings

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.tasks.classify.evaluate import TEMPERATURES, ClassifyEvaluation, fit_temperature, nearest_valid, wilson
from weft.tasks.classify.metrics import ClassifyMeter

cases = st.tuples(st.integers(1, 60), st.integers(2, 9), st.integers(0, 2**32 - 1))


def evaluation(n, classes, seed, multilabel=False, empty=0):
    """`empty`: classes at the end that no picture has."""
    g = np.random.default_rng(seed)
    logits = g.normal(size=(n, classes)).astype(np.float32) * 3
    if multilabel:
        labels = (g.random((n, classes)) > 0.6) & (np.arange(classes) < classes - empty)
    else:
        labels = g.integers(max(1, classes - empty), size=n)
    return ClassifyEvaluation(
        [f"{i}.png" for i in range(n)], [f"c{i}" for i in range(classes)], multilabel, logits, labels
    )


def probabilities(e: ClassifyEvaluation) -> np.ndarray:
    return torch.from_numpy(e.logits).double().softmax(dim=1).numpy()


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(0, 2))
def test_single_label_metrics(case, empty):
    e = evaluation(*case, empty=empty)
    m = e.metrics()
    said, classes = e.logits.argmax(axis=1), range(len(e.classes))
    json.dumps(m, allow_nan=False)
    assert m["n"] == len(e.labels)
    assert m["confusion"] == sk.confusion_matrix(e.labels, said, labels=classes).tolist()
    expected = sk.precision_recall_fscore_support(e.labels, said, labels=classes, zero_division=0)
    for key, column in zip(("precision", "recall", "f1", "n"), expected, strict=True):
        np.testing.assert_allclose([row[key] for row in m["per_class"]], column)
    assert m["f1_macro"] == pytest.approx(sk.f1_score(e.labels, said, average="macro", zero_division=0))
    with warnings.catch_warnings(action="ignore"):  # what is said but does not occur
        assert m["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(e.labels, said))


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(0, 2))
def test_multi_label_metrics(case, empty):
    e = evaluation(*case, multilabel=True, empty=empty)
    m = e.metrics()
    said, some = e.logits > 0, e.labels.any(axis=0)
    json.dumps(m, allow_nan=False)
    expected = sk.precision_recall_fscore_support(e.labels, said, zero_division=0)
    for key, column in zip(("precision", "recall", "f1", "n"), expected, strict=True):
        np.testing.assert_allclose([row[key] for row in m["per_class"]], column)
    with warnings.catch_warnings(action="ignore"):  # classes without pictures
        each = sk.average_precision_score(e.labels, e.logits, average=None) if some.any() else np.zeros(len(some))
    np.testing.assert_allclose([row["ap"] for row in m["per_class"]], np.nan_to_num(each))
    assert m["map"] == pytest.approx(each[some].mean() if some.any() else 0)
    assert m["f1_micro"] == pytest.approx(sk.f1_score(e.labels, said, average="micro", zero_division=0))
    occurs = some | said.any(axis=0)
    macro = expected[2][occurs].mean() if occurs.any() else 0
    assert m["f1_macro"] == pytest.approx(macro)


@settings(deadline=None, max_examples=40)
@given(cases, st.booleans())
def test_meter_gives_the_same_digits(case, multilabel):
    e = evaluation(*case, multilabel=multilabel)
    meter = ClassifyMeter(len(e.classes), multilabel)
    for logits, labels in zip(torch.from_numpy(e.logits).split(7), torch.from_numpy(e.labels).split(7), strict=True):
        meter.add(logits, labels)
    m = e.metrics() | ({"f1": e.metrics()["f1_micro"]} if multilabel else {})
    assert meter.result() == {key: m[key] for key in meter.result()}


def test_torchmetrics_agree():
    import torchmetrics.functional.classification as tm

    e = evaluation(500, 7, 0)
    logits, labels, m = torch.from_numpy(e.logits), torch.from_numpy(e.labels), e.metrics()
    assert m["ece"] == pytest.approx(float(tm.multiclass_calibration_error(logits, labels, 7, n_bins=15)), abs=1e-5)
    assert m["top5"] == pytest.approx(float(tm.multiclass_accuracy(logits, labels, 7, average="micro", top_k=5)))
    assert m["f1_macro"] == pytest.approx(float(tm.multiclass_f1_score(logits, labels, 7)))
    scaled = logits.clone()
    for half in (0, 1):  # by the temperature that the other half wants
        scaled[half::2] /= cooled(e, slice(1 - half, None, 2))
    after = float(tm.multiclass_calibration_error(scaled, labels, 7, n_bins=15))
    assert m["ece_after_temperature"] == pytest.approx(after, abs=1e-3)
    assert m["temperature"] == pytest.approx(cooled(e, slice(None)), rel=1e-3)
    e = evaluation(500, 7, 0, multilabel=True)
    logits, labels, m = torch.from_numpy(e.logits), torch.from_numpy(e.labels).long(), e.metrics()
    assert m["map"] == pytest.approx(float(tm.multilabel_average_precision(logits, labels, 7)), abs=1e-5)
    assert m["f1_micro"] == pytest.approx(float(tm.multilabel_f1_score(logits, labels, 7, average="micro")))


def cooled(e: ClassifyEvaluation, rows: slice) -> float:
    """The best temperature for some rows, by scipy."""

    def loss(log_t):
        z = torch.from_numpy(e.logits[rows]).double() / np.exp(log_t)
        return float(torch.nn.functional.cross_entropy(z, torch.from_numpy(e.labels[rows])))

    options = {"xatol": 1e-9}
    return float(
        np.exp(scipy.optimize.minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded", options=options).x)
    )


def test_a_temperature_that_does_not_help_is_1():
    """Few pictures, and a model whose probabilities are right: what is fitted on them is noise, and is not shown."""
    ones = 0
    for seed in range(12):
        e, g = evaluation(40, 5, seed), np.random.default_rng(seed)
        right = np.array([g.choice(5, p=p) for p in probabilities(e)])
        m = ClassifyEvaluation(e.names, e.classes, False, e.logits, right).metrics()
        ones += m["temperature"] == 1
        if m["temperature"] == 1:
            assert m["ece_after_temperature"] == m["ece"]
            assert "does not make it smaller" in list(e.lines(m))[1]
        else:
            assert m["ece_after_temperature"] < m["ece"]
    assert ones >= 4
    sure = ClassifyEvaluation(e.names, e.classes, False, 5 * e.logits, right).metrics()
    assert 2 < sure["temperature"] < 10


# Classes that nobody could learn


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_class_without_training_pictures_is_not_measured(multilabel):
    e = evaluation(300, 6, 3, multilabel)
    unlearned, learned = ["c1", "c4"], [0, 2, 3, 5]
    m = e.without(unlearned).metrics()
    assert m["unlearned"] == unlearned
    measured = np.array([name not in unlearned for name in e.classes])
    meter = ClassifyMeter(6, multilabel, measured=measured)
    for logits, labels in zip(torch.from_numpy(e.logits).split(7), torch.from_numpy(e.labels).split(7), strict=True):
        meter.add(logits, labels)
    ours = m | ({"f1": m["f1_micro"]} if multilabel else {})
    assert meter.result() == {key: ours[key] for key in meter.result()}
    assert "Not measured: 'c1', 'c4'" in "\n".join(e.without(unlearned).lines(m))
    if multilabel:
        assert m["n"] == 300
        assert m["map"] == pytest.approx(sk.average_precision_score(e.labels[:, learned], e.logits[:, learned]))
        assert m["f1_micro"] == pytest.approx(
            sk.f1_score(e.labels[:, learned], e.logits[:, learned] > 0, average="micro")
        )
    else:
        rows = np.isin(e.labels, learned)
        assert m["n"] == rows.sum()
        assert m["top1"] == pytest.approx(sk.accuracy_score(e.labels[rows], e.logits[rows].argmax(axis=1)))


@settings(deadline=None, max_examples=25)
@given(cases)
def test_temperature_is_where_the_cross_entropy_is_smallest(case):
    e = evaluation(*case)

    def loss(log_t):
        z = torch.from_numpy(e.logits).double() / np.exp(log_t)
        return float(torch.nn.functional.cross_entropy(z, torch.from_numpy(e.labels)))

    bounds = np.log(TEMPERATURES)
    found = scipy.optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    assert loss(np.log(fit_temperature(e.logits, e.labels))) <= found.fun + 1e-7


def test_temperature_of_odd_logits_is_a_number():
    labels = np.array([0, 1])
    assert fit_temperature(np.zeros((2, 3), np.float32), labels) == 1
    assert fit_temperature(np.zeros((0, 3), np.float32), labels[:0]) == 1
    sure = np.eye(3, dtype=np.float32)[:2] * 9
    assert TEMPERATURES[0] <= fit_temperature(sure, labels) < 0.3
    assert 90 < fit_temperature(sure, labels[::-1].copy()) <= TEMPERATURES[1]
    broken = np.array([[np.nan, 0, 1], [np.inf, -np.inf, 0]], np.float32)
    assert TEMPERATURES[0] <= fit_temperature(broken, labels) <= TEMPERATURES[1]
    m = ClassifyEvaluation(["a", "b"], list("xyz"), False, broken, labels).metrics()
    json.dumps(m, allow_nan=False)


def test_reliability_bins_hold_every_picture_once():
    e = evaluation(200, 4, 1)
    bins = e.metrics()["reliability"]
    confidence = probabilities(e).max(axis=1)
    for row in bins:
        inside = (confidence >= row["low"]) & (confidence < row["high"])
        assert row["n"] == inside.sum()
        if row["n"]:
            assert row["confidence"] == pytest.approx(confidence[inside].mean())
            assert row["accuracy"] == pytest.approx((e.logits.argmax(axis=1) == e.labels)[inside].mean())
    assert sum(row["n"] for row in bins) == 200


@given(st.integers(0, 50), st.integers(1, 50))
def test_interval_is_wilsons(right, n):
    right = min(right, n)
    expected = scipy.stats.binomtest(right, n).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson(right, n), [expected.low, expected.high], atol=1e-12)


def test_any_valid_label_is_a_hit():
    """ImageNet-ReaL: right where the first class is among the valid ones."""
    e = evaluation(100, 8, 2)
    valid = np.random.default_rng(0).random((100, 8)) > 0.7
    valid[np.arange(100), e.labels] = True
    labels = nearest_valid(e.logits, valid)
    m = ClassifyEvaluation(e.names, e.classes, False, e.logits, labels).metrics()
    order = np.argsort(-e.logits, axis=1)
    assert m["top1"] == valid[np.arange(100), order[:, 0]].mean()
    assert m["top5"] == np.take_along_axis(valid, order[:, :5], axis=1).any(axis=1).mean()


def test_worst_mistakes_come_surest_first():
    e = evaluation(50, 4, 3)
    said, p = e.logits.argmax(axis=1), probabilities(e).max(axis=1)
    expected = sorted(np.flatnonzero(said != e.labels), key=lambda i: -p[i])
    assert [m.index for m in e.worst(1000)] == expected
    first = e.worst(1)[0]
    assert (first.name, first.truth, first.said) == (
        f"{first.index}.png",
        f"c{e.labels[first.index]}",
        f"c{said[first.index]}",
    )
    assert first.confidence == pytest.approx(p[first.index])


def test_worst_mistakes_of_several_labels():
    logits = np.array([[5, -1], [0.5, -9], [2, 2]], np.float32)
    labels = np.array([[0, 0], [1, 1], [1, 1]], bool)
    worst = ClassifyEvaluation(["a", "b", "c"], ["x", "y"], True, logits, labels).worst(9)
    assert [(m.name, m.truth, m.said) for m in worst] == [("b", "x, y", "x"), ("a", "none", "x")]
    assert worst[1].confidence == pytest.approx(1 / (1 + np.exp(-5)))


def test_confused_pairs():
    labels = np.array([0, 0, 0, 1, 2, 2])
    logits = np.eye(3, dtype=np.float32)[[1, 1, 0, 1, 0, 1]]
    e = ClassifyEvaluation(list("abcdef"), ["x", "y", "z"], False, logits, labels)
    pairs = e.confused_pairs(2)
    assert [(p.truth, p.said, p.n, p.index) for p in pairs] == [("x", "y", 2, [0, 1]), ("z", "x", 1, [4])]
    assert e.metrics()["confused_pairs"][0] == {"truth": "x", "said": "y", "n": 2}


def test_thousands_of_classes_need_no_matrix():
    e = evaluation(60, 22_000, 4)
    m = e.metrics()
    assert m["confusion"] is None
    assert len(m["confused_pairs"]) == 50
    assert len(json.dumps(m, allow_nan=False)) > 0
