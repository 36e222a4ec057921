"""The loss and the validation metrics of classification, against torch, timm, scikit-learn and torchmetrics."""

import json

import numpy as np
import pytest
import sklearn.metrics
import timm
import timm.data
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.conftest import randomise
from weft.config import LossConfig
from weft.data.sampler import balance_weights
from weft.errors import WeftError
from weft.models.weights.folder import write_model
from weft.tasks.classify.loss import make_loss
from weft.tasks.classify.metrics import ClassifyMeter

COUNTS = np.array([50, 30, 15, 5, 0])


def soft_targets(n: int, classes: int) -> torch.Tensor:
    return torch.rand(n, classes).softmax(dim=1)


def a_loss(kind="ce", balance="none", multilabel=False, **kwargs):
    return make_loss(LossConfig(kind=kind), multilabel=multilabel, class_counts=COUNTS, balance=balance, **kwargs)


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_is_timms(soft):
    logits, labels = torch.randn(8, 5), torch.randint(4, (8,))
    targets = soft_targets(8, 5) if soft else labels
    expected = SoftTargetCrossEntropy()(logits, targets) if soft else F.cross_entropy(logits, targets)
    torch.testing.assert_close(a_loss("auto")(logits, targets, 8), expected)


@pytest.mark.parametrize("soft", [False, True])
def test_binary_cross_entropy_is_timms(soft):
    logits, targets = torch.randn(8, 5), soft_targets(8, 5) if soft else torch.randint(4, (8,))
    torch.testing.assert_close(a_loss("bce")(logits, targets, 8), BinaryCrossEntropy(smoothing=0)(logits, targets))


def test_class_weights_are_scikit_learns():
    """`class_weight="balanced"`, which is 1 on average over the pictures."""
    y = np.repeat(np.arange(5), COUNTS)
    weights = sklearn.utils.class_weight.compute_sample_weight("balanced", y)
    logits, labels = torch.randn(len(y), 5), torch.as_tensor(y)
    expected = (F.cross_entropy(logits, labels, reduction="none").double() * torch.as_tensor(weights)).mean()
    torch.testing.assert_close(a_loss(balance="loss")(logits, labels, len(y)).double(), expected)
    np.testing.assert_allclose(balance_weights(y, multilabel=False), weights)


@pytest.mark.parametrize("kind", ["ce", "bce"])
def test_weights_of_soft_targets_agree_with_whole_ones(kind):
    logits, labels = torch.randn(8, 5), torch.randint(4, (8,))
    loss = a_loss(kind, "loss")
    torch.testing.assert_close(loss(logits, F.one_hot(labels, 5).float(), 8), loss(logits, labels, 8))


def test_logit_adjustment_adds_the_log_prior():
    logits, labels = torch.randn(8, 5, dtype=torch.float64), torch.randint(4, (8,))
    prior = np.maximum(COUNTS, 1) / COUNTS.sum()
    expected = -torch.log_softmax(logits + torch.as_tensor(np.log(prior)), dim=1)[range(8), labels].mean()
    torch.testing.assert_close(a_loss(balance="logit-adjust")(logits, labels, 8).double(), expected)


def test_multi_label_weights_positives_within_limits():
    logits, truth = torch.randn(8, 5), (torch.rand(8, 5) > 0.5).float()
    ratio = torch.tensor([1.0, 70 / 30, 85 / 15, 19.0, 20.0])  # of the class without pictures: the limit
    expected = F.binary_cross_entropy_with_logits(logits, truth, pos_weight=ratio)
    torch.testing.assert_close(a_loss(balance="loss", multilabel=True, pictures=100)(logits, truth, 8), expected)
    with pytest.raises(WeftError, match="number"):
        a_loss(balance="loss", multilabel=True)


@pytest.mark.parametrize("kwargs", [dict(kind="bce"), dict(multilabel=True)])
def test_logit_adjustment_is_for_softmax(kwargs):
    with pytest.raises(WeftError, match="logit-adjust"):
        a_loss(balance="logit-adjust", **kwargs)


@pytest.mark.parametrize(("kind", "balance"), [("ce", "none"), ("ce", "loss"), ("bce", "loss"), ("ce", "logit-adjust")])
@pytest.mark.parametrize("soft", [False, True])
def test_unequal_micro_batches_add_up(kind, balance, soft):
    logits = torch.randn(11, 5, dtype=torch.float64).requires_grad_()
    targets = soft_targets(11, 5) if soft else torch.randint(4, (11,))
    loss = a_loss(kind, balance)
    (whole,) = torch.autograd.grad(loss(logits, targets, 11), logits)
    parts = sum(loss(logits[a:b], targets[a:b], 11) for a, b in ((0, 7), (7, 8), (8, 11)))
    torch.testing.assert_close(torch.autograd.grad(parts, logits)[0], whole)
    torch.testing.assert_close(parts, loss(logits, targets, 11))


def test_half_precision_logits_are_widened():
    logits, labels = torch.randn(8, 5).bfloat16(), torch.randint(4, (8,))
    assert a_loss()(logits, labels, 8) == a_loss()(logits.float(), labels, 8)


def test_balanced_drawing_of_several_labels_goes_by_the_rarest():
    truth = np.array([[1, 0], [1, 0], [1, 1], [0, 0]], dtype=bool)
    weights = balance_weights(truth, multilabel=True)
    np.testing.assert_allclose(weights / weights[2], [1 / 3, 1 / 3, 1, 1])
    assert weights.mean() == pytest.approx(1)


# Metrics ----------------------------------------------------------------------------------------------------------

sizes = st.tuples(st.integers(1, 40), st.integers(2, 9), st.integers(0, 2**32 - 1))


def draw(n, classes, seed, multilabel=False):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, classes, generator=g) * 4).round() / 2  # with ties
    labels = torch.rand(n, classes, generator=g) > 0.6 if multilabel else torch.randint(classes, (n,), generator=g)
    return logits, labels


def measure(logits, labels, cuts=(), multilabel=False):
    meter = ClassifyMeter(logits.shape[1], multilabel)
    for part in zip(logits.tensor_split(cuts), labels.tensor_split(cuts), strict=True):
        meter.add(*part)
    return meter.result()


@settings(deadline=None, max_examples=50)
@given(sizes)
def test_single_label_metrics_are_scikit_learns(size):
    logits, labels = draw(*size)
    result = measure(logits, labels)
    classes = range(size[1])
    assert result["top1"] == sklearn.metrics.accuracy_score(labels, logits.numpy().argmax(axis=1))
    probabilities = logits.double().softmax(dim=1).numpy()
    assert result["loss"] == pytest.approx(sklearn.metrics.log_loss(labels, probabilities, labels=classes), abs=1e-7)
    assert ("top5" in result) == (size[1] >= 5)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_top5_is_torchmetrics(n, seed):
    import torchmetrics.functional.classification as tm  # which takes seconds

    g = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(n, 12, generator=g), torch.randint(12, (n,), generator=g)
    expected = tm.multiclass_accuracy(logits, labels, 12, average="micro", top_k=5)
    assert measure(logits, labels)["top5"] == pytest.approx(float(expected), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(sizes)
@pytest.mark.filterwarnings("ignore")
def test_multi_label_metrics_are_scikit_learns(size):
    logits, truth = draw(*size, multilabel=True)
    result = measure(logits, truth.float(), multilabel=True)
    some = truth.numpy().any(axis=0)
    each = sklearn.metrics.average_precision_score(truth.numpy()[:, some], logits.numpy()[:, some]) if some.any() else 0
    assert result["map"] == pytest.approx(each)
    assert result["f1"] == pytest.approx(sklearn.metrics.f1_score(truth, logits > 0, average="micro", zero_division=0))
    expected = F.binary_cross_entropy_with_logits(logits.double(), truth.double())
    assert result["loss"] == pytest.approx(float(expected), abs=1e-7)


@settings(deadline=None, max_examples=50)
@given(sizes, st.lists(st.integers(0, 40), max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_no_digit_depends_on_batches_or_order(size, cuts, multilabel, random):
    logits, labels = draw(*size, multilabel=multilabel)
    order = list(range(len(logits)))
    random.shuffle(order)
    again = measure(logits[order], labels[order], sorted(cuts), multilabel)
    assert again == measure(logits, labels, (), multilabel)


def test_undefined_logits_are_wrong_and_finite():
    logits = torch.tensor([[float("nan")] * 6, [float("inf"), *[0.0] * 5]])
    result = measure(logits, torch.tensor([0, 1]))
    assert result["top1"] == 0
    assert result["top5"] == 0.5
    assert np.isfinite(result["loss"])
    assert set(measure(logits[:0], torch.zeros(0, dtype=torch.long)).values()) == {0.0}


@pytest.mark.parametrize("multilabel", [False, True])
def test_nothing_waits_for_the_device(multilabel):
    """Tensors without values: whoever asks for one, which would make the host wait, gets an exception."""
    kinds = [("bce", "loss")] if multilabel else [("ce", "loss"), ("bce", "loss"), ("ce", "logit-adjust")]
    losses = [a_loss(kind, balance, multilabel, pictures=100) for kind, balance in kinds]
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits, labels = torch.randn(4, 5), torch.randint(5, (4, 5) if multilabel else (4,))
        meter = ClassifyMeter(5, multilabel)
        meter.add(logits, labels)
        for loss in losses:
            assert loss(logits, labels, 4).shape == ()
        with pytest.raises(DataDependentOutputException):
            meter.result()


def _measure_in_process(rank, world, file):
    torch.set_num_threads(1)  # a fork has inherited OpenMP's pool, but not its threads, and would wait for them forever
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    for multilabel in (False, True):
        logits, labels = draw(7, 6, 3, multilabel)  # which the processes cannot share equally
        meter = ClassifyMeter(6, multilabel)
        meter.add(logits[rank::world], labels[rank::world])
        meter.reduce()
        assert meter.result() == measure(logits, labels, (), multilabel)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_processes_agree_with_one(tmp_path, world):
    mp.start_processes(_measure_in_process, (world, tmp_path / "rendezvous"), nprocs=world, start_method="fork")


# The folder a run writes ------------------------------------------------------------------------------------------

PREPROCESSING = dict(
    size=(32, 48), channels=3, depth=8, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), interpolation="bilinear",
    crop_pct=1.0, crop_mode="squash", max_pixels=1000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "channels"),
    [
        ("cvt_nano", dict(drop_path_rate=0.1), 3),
        ("resnet10t", dict(drop_path_rate=0.1), 1),
        ("test_vit", dict(img_size=(32, 48)), 3),
    ],
)
def test_run_folder_opens_in_timm_with_the_same_preprocessing(name, args, channels, tmp_path):
    numbers = {k: PREPROCESSING[k][:channels] for k in ("mean", "std")}
    preprocessing = {**PREPROCESSING, **numbers, "channels": channels}
    for _ in range(2):  # the second time over what is there
        model = randomise(timm.create_model(name, num_classes=3, in_chans=channels, **args))
        write_model(model, tmp_path, classes=["a", "b", "ä"], preprocessing=preprocessing, multilabel=True, args=args)
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    pictures = torch.randn(2, channels, 32, 48)
    torch.testing.assert_close(opened(pictures), model(pictures), rtol=0, atol=0)
    data = timm.data.resolve_model_data_config(opened)
    assert tuple(data.pop("input_size")) == (channels, 32, 48)  # a list before timm 1.0.31
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()} == {k: preprocessing[k] for k in data}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["label_names"] == ["a", "b", "ä"]
    assert config["weft"]["multilabel"] is True
    assert config["weft"]["preprocessing"] == json.loads(json.dumps(preprocessing))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_run_folder_wants_a_name_for_each_class(tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    with pytest.raises(WeftError, match="2 names; the model has 3 classes"):
        write_model(model, tmp_path, classes=["a", "b"], preprocessing=PREPROCESSING, multilabel=False)
    assert not any(tmp_path.iterdir())
