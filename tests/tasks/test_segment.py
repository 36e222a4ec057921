"""Losses, inference and metrics of segmentation, against torch, segmentation_models_pytorch and torchmetrics."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from weft.config import Config, LossConfig, override
from weft.data.loader import Batch
from weft.data.masks.values import IGNORE
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture
from weft.data.sources.renamed import in_classes
from weft.data.sources.source import Names, Source
from weft.errors import WeftError
from weft.run.evaluate import evaluate
from weft.run.predictor import Predictor
from weft.tasks.segment import task as segment
from weft.tasks.segment.evaluate import SegmentEvaluation
from weft.tasks.segment.losses import class_weights, make_pixel_loss
from weft.tasks.segment.metrics import SegmentMeter
from weft.tasks.segment.task import Segment, window_starts
from weft.tasks.task import TaskFacts

K = 4
COUNTS = [700, 200, 90, 10]
SETTINGS = {  # every kind of loss
    "ce": {},
    "smooth": dict(smoothing=0.1),
    "ohem": dict(kind="ohem", ohem=0.3),
    "focal": dict(kind="focal", focal_gamma=1.5),
    "flat focal": dict(kind="focal", focal_gamma=0.5),
    "dice": dict(kind="dice"),
    "ce+dice": dict(kind="ce+dice"),
}
every_kind = pytest.mark.parametrize("kind", SETTINGS)
seeds = st.integers(0, 2**32 - 1)


def draw(seed=0, pictures=3, size=(6, 5), classes=K, ignored=0.3, dtype=torch.float64):
    """Logits, and masks of which a part is ignored."""
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(pictures, classes, *size, generator=g, dtype=dtype)
    masks = torch.randint(classes, (pictures, *size), generator=g)
    masks[torch.rand(masks.shape, generator=g) < ignored] = IGNORE
    return logits.requires_grad_(), masks.to(torch.uint8)


def a_loss(balance="none", classes=K, **config):
    return make_pixel_loss(LossConfig(**config), classes=classes, pixel_counts=COUNTS[:classes], balance=balance)


def assert_same(ours, theirs, logits):
    """Values, and slopes by the logits."""
    torch.testing.assert_close(ours, theirs)
    slopes = [torch.autograd.grad(value, logits)[0] for value in (ours, theirs)]
    torch.testing.assert_close(*slopes)


# Losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "ce"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(kind, smoothing):
    logits, masks = draw()
    summed = F.cross_entropy(
        logits, masks.long(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )  # over all pixels
    assert_same(a_loss(kind=kind, smoothing=smoothing)(logits, masks, 7), summed / (6 * 5) / 7, logits)


def test_class_weights_are_torchs_with_enets_numbers():
    logits, masks = draw()
    frequency = np.array(COUNTS) / 1000
    weights = 1 / np.log(1.02 + frequency)
    weights = torch.tensor(weights / (weights * frequency).sum())
    summed = F.cross_entropy(logits, masks.long(), weights, ignore_index=IGNORE, reduction="sum")
    assert_same(a_loss("loss")(logits, masks, 3), summed / 30 / 3, logits)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=254))
def test_weights_are_bounded_and_keep_the_scale(counts):
    weights = class_weights(counts, len(counts)).numpy()
    assert weights.max() <= 36 * weights.min()
    assert not sum(counts) or np.average(weights, weights=counts) == pytest.approx(1)


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("balance", ["none", "loss"])
def test_ohem_is_the_mean_of_each_pictures_hardest_pixels(part, balance):
    logits, masks = draw()
    weights = class_weights(COUNTS, K) if balance == "loss" else torch.ones(K)
    parts = []
    for one, mask in zip(logits, masks.long(), strict=True):
        truth = mask[mask != IGNORE]
        losses = F.cross_entropy(one[:, mask != IGNORE].T, truth, reduction="none")
        hardest = losses.argsort(descending=True)[: math.ceil(part * len(losses))]
        parts.append((losses * weights[truth])[hardest].sum() / math.ceil(part * 30))
    assert_same(a_loss(balance, kind="ohem", ohem=part)(logits, masks, 3), sum(parts) / 3, logits)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_loss_is_the_papers(gamma):
    logits, masks = draw()
    valid = masks != IGNORE
    right = logits.softmax(dim=1).gather(1, (masks * valid).long()[:, None])[:, 0][valid]
    expected = -((1 - right) ** gamma * right.log()).sum() / 30 / 3
    assert_same(a_loss(kind="focal", focal_gamma=gamma)(logits, masks, 3), expected, logits)


def test_dice_is_that_of_segmentation_models_pytorch_over_the_classes_that_occur():
    from segmentation_models_pytorch.losses import DiceLoss

    logits, masks = draw()
    masks[1][masks[1] == 2] = 0  # so the second picture lacks a class
    theirs = []
    for one, mask in zip(logits, masks, strict=True):
        classes = mask[mask != IGNORE].unique().tolist()
        theirs.append(DiceLoss("multiclass", classes=classes, ignore_index=IGNORE)(one[None], mask[None].long()))
    assert_same(a_loss(kind="dice")(logits, masks, 3), sum(theirs) / 3, logits)


def test_sum_of_cross_entropy_and_dice():
    logits, masks = draw()
    both = a_loss("loss")(logits, masks, 3) + a_loss(kind="dice")(logits, masks, 3)
    assert_same(a_loss("loss", kind="ce+dice")(logits, masks, 3), both, logits)


@every_kind
@settings(max_examples=10)
@given(seeds, st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["none", "loss"]))
def test_micro_batches_add_up(kind, seed, cuts, balance):
    logits, masks = draw(seed, pictures=5)
    loss = a_loss(balance, **SETTINGS[kind])
    cut = zip(logits.tensor_split(sorted(cuts)), masks.tensor_split(sorted(cuts)), strict=True)
    parts = sum(loss(some, of, 5) for some, of in cut if len(some))
    assert_same(loss(logits, masks, 5), parts, logits)


@every_kind
def test_ignored_pixels_change_nothing(kind):
    logits, masks = draw()
    loss = a_loss(**SETTINGS[kind])
    elsewhere = torch.where((masks == IGNORE)[:, None], torch.randn_like(logits), logits)
    torch.testing.assert_close(loss(elsewhere, masks, 3), loss(logits, masks, 3))
    slope = torch.autograd.grad(loss(logits, masks, 3), logits)[0]
    assert not slope.masked_select((masks == IGNORE)[:, None]).any()
    nothing = loss(logits, torch.full_like(masks, IGNORE), 3)
    assert nothing == 0
    assert not torch.autograd.grad(nothing, logits)[0].any()


@every_kind
@pytest.mark.parametrize("sureness", [1e4, -1e4])
def test_slopes_are_finite_where_the_model_is_sure(kind, sureness):
    _, masks = draw(dtype=torch.float32)
    logits = F.one_hot(masks.clamp(max=K - 1).long(), K).permute(0, 3, 1, 2).float().mul(sureness).requires_grad_()
    loss = a_loss("loss", **SETTINGS[kind])(logits, masks, 3)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


@every_kind
def test_small_logits_are_enlarged_to_the_mask(kind):
    _, masks = draw(size=(9, 13))
    small = torch.randn(3, K, 3, 4, dtype=torch.float64)
    loss = a_loss(**SETTINGS[kind])
    large = F.interpolate(small, (9, 13), mode="bilinear", align_corners=False)
    torch.testing.assert_close(loss(small, masks, 3), loss(large, masks, 3))


@pytest.mark.parametrize(
    ("config", "balance", "words"),
    [
        (dict(kind="bce"), "none", "loss.kind=bce is not for masks"),
        (dict(kind="dice", smoothing=0.1), "none", "loss.smoothing"),
        (dict(), "sampler", "data.balance=sampler"),
        (dict(), "logit-adjust", "data.balance=logit-adjust"),
    ],
)
def test_settings_that_make_no_sense_here(config, balance, words):
    with pytest.raises(WeftError, match=words):
        a_loss(balance, **config)
    with pytest.raises(WeftError, match="nobody counted"):
        make_pixel_loss(LossConfig(), classes=K, pixel_counts=None, balance="loss")


# The task ---------------------------------------------------------------------------------------------------------

PREPROCESSING = Preprocessing(
    size=(0, 0), channels=3, depth=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), interpolation="bilinear",
    crop_pct=1.0, crop_mode="fit", max_pixels=10**6,
)  # fmt: skip
TINY = [(1, 1), (1, 9), (7, 3), (16, 16), (17, 33), (40, 23)]  # windows are 16


def a_task(**values):
    config = override(Config(), {"augment.img_size": 16, **{k.replace("__", "."): v for k, v in values.items()}})
    facts = TaskFacts([f"c{i}" for i in range(K)], PREPROCESSING, torch.device("cpu"), pixel_counts=COUNTS)
    return Segment(config, facts)


class Pointwise(nn.Module):
    """Looks at each pixel alone, and remembers the sizes of what it was given."""

    def __init__(self, aux=False):
        super().__init__()
        self.conv, self.aux, self.shapes = nn.Conv2d(3, K, 1), aux, []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return {"out": self.conv(x), **({"aux": self.conv(x)[:, :, ::2, ::2]} if self.aux else {})}


def pictures_of(*sizes):
    return [torch.randint(256, (3, *size), dtype=torch.uint8) for size in sizes]


def answers_of(model, pictures):
    return [model(PREPROCESSING.normalise(p[None]))["out"].softmax(dim=1)[0] for p in pictures]


def a_batch(pictures, masks):
    return Batch(pictures, masks, torch.arange(len(masks)), [])


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["whole", "slide"])
@pytest.mark.parametrize("overlap", [0.0, 0.333, 0.9])
@torch.no_grad()
def test_windows_agree_with_the_whole_picture(mode, overlap):
    """For a model that looks at pixels alone; so padding is cut off again, and nothing is counted twice."""
    model, pictures = Pointwise(), pictures_of(*TINY, *TINY)
    answers = a_task(test__mode=mode, test__overlap=overlap).infer(model, pictures)
    assert [a.shape for a in answers] == [(K, *size) for size in TINY * 2]
    assert {shape[2:] for shape in model.shapes} == ({(16, 16)} if mode == "slide" else set(TINY))
    assert_close(answers, answers_of(model, pictures))


@given(st.integers(1, 200), st.integers(1, 50), st.floats(0, 0.99))
def test_windows_cover_a_side_exactly(whole, window, overlap):
    starts = window_starts(whole, window, overlap)
    assert starts[0] == 0
    assert starts[-1] == max(0, whole - window)
    assert starts == sorted(set(starts))
    shared = min(window - 1, math.floor(overlap * window + 1e-9))
    assert all(b - a <= window - shared for a, b in pairwise(starts))


def test_windows_are_averaged_as_probabilities():
    """A model that sees where its window ends: the mean over windows, pixel by pixel."""

    def model(x):
        ramp = torch.arange(x.shape[3]).float().expand(x.shape[0], K, *x.shape[2:]) * torch.arange(K).view(1, K, 1, 1)
        return {"out": ramp / 8 + x[:, :1]}

    answer = a_task(test__mode="slide", test__overlap=0.5).infer(model, torch.zeros(1, 3, 16, 28))[0]
    one = model(torch.zeros(1, 3, 16, 16))["out"][0].softmax(dim=0)
    total, seen = torch.zeros(K, 16, 28), torch.zeros(28)
    for start in (0, 8, 12):
        total[:, :, start : start + 16] += one
        seen[start : start + 16] += 1
    torch.testing.assert_close(answer, total / seen)


@torch.no_grad()
def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(segment, "PIXELS_AT_ONCE", 3 * 16 * 16)
    model, pictures = Pointwise(), torch.stack(pictures_of(*[(40, 40)] * 4))
    a_task(test__mode="slide").infer(model, pictures)
    assert {shape[0] for shape in model.shapes[:-1]} == {3}
    model.shapes.clear()
    assert_close(a_task().infer(model, pictures), answers_of(model, pictures))
    assert model.shapes[0] == (1, 3, 40, 40)  # a picture cannot be cut; but no two at once


@pytest.mark.parametrize("mode", ["whole", "slide"])
@torch.no_grad()
def test_scales_and_mirror_are_averaged(mode):
    """A model that averages neighbours is the same mirrored; flat pictures look the same at any scale."""
    model = Pointwise()
    flat = [p[:, :1, :1].expand_as(p) for p in pictures_of(*TINY)]
    task = a_task(test__mode=mode, test__scales=[0.5, 1.0, 1.7], test__flip=True)
    assert_close(task.infer(model, flat), answers_of(model, flat))
    pictures = pictures_of(*TINY)
    assert_close(a_task(test__mode=mode, test__flip=True).infer(model, pictures), answers_of(model, pictures))


@torch.no_grad()
def test_mean_over_scales_and_mirror_by_hand():
    model = Pointwise()
    model.conv = nn.Conv2d(3, K, 3, padding=1)  # which is not the same mirrored
    picture = torch.rand(1, 3, 12, 20)
    x, answers = PREPROCESSING.normalise(picture.clone()), []
    for size in ((6, 10), (12, 20)):
        scaled = F.interpolate(x, size, mode="bilinear", antialias=True) if size[0] == 6 else x
        for flip in (lambda t: t, lambda t: t.flip(3)):
            said = flip(model(flip(scaled))["out"].softmax(dim=1))
            answers.append(F.interpolate(said, (12, 20), mode="bilinear"))
    ours = a_task(test__scales=[0.5, 1.0], test__flip=True).infer(model, picture)
    assert_close(ours, (sum(answers) / 4).unbind())


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_training_step(aux, channels_last):
    task, model = a_task(run__channels_last=channels_last, data__balance="loss"), Pointwise(aux)
    batch = a_batch(torch.stack(pictures_of((8, 8), (8, 8))), torch.randint(K, (2, 8, 8), dtype=torch.uint8))
    x, y = task.prepare(batch, seed=0)
    loss, hits = task.loss(model, x, y, 2)
    logits = model(PREPROCESSING.normalise(batch.pictures))["out"]
    weights = class_weights(COUNTS, K).float()
    expected = a_loss("loss")(logits, batch.labels, 2)
    if aux:
        expected = expected + 0.4 * a_loss("loss")(logits[:, :, ::2, ::2], batch.labels, 2)
    torch.testing.assert_close(loss, expected)
    assert weights[0] < 1 < weights[3]
    assert hits == pytest.approx(sum(float((a == b).float().mean()) for a, b in zip(logits.argmax(1), y, strict=True)))
    loss.backward()
    assert model.conv.weight.grad.any()


def test_a_dummy_batch_can_be_trained_on():
    task = a_task()
    batch = task.dummy_batch(3)
    assert batch.pictures.shape == (3, 3, 16, 16)
    assert batch.labels.unique().tolist() == list(range(K))
    loss, hits = task.loss(Pointwise(), *task.prepare(batch, 0), 3)
    assert loss > 0
    assert 0 <= hits <= 3


def test_settings_of_inference_are_checked():
    with pytest.raises(WeftError, match=r"test\.window"):
        a_task(test__mode="slide", augment__img_size=0)
    for scales in ([], [1.0, 0.0]):
        with pytest.raises(WeftError, match=r"test\.scales"):
            a_task(test__scales=scales)


# Metrics ----------------------------------------------------------------------------------------------------------

measured = st.tuples(seeds, st.integers(1, 5), st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 7))


def meter_of(answers, masks, cuts=(), keep=False):
    meter = SegmentMeter(answers[0].shape[0], keep=keep)
    for part in np.split(np.arange(len(masks)), sorted(cuts)):
        meter.update([answers[i] for i in part], a_batch([], [masks[i] for i in part]))
    return meter


def probabilities(size, ignored=0.3):
    seed, pictures, sides, classes = size
    logits, masks = draw(seed, pictures, sides, classes, ignored)
    return list(logits.detach().softmax(dim=1).float()), list(masks)


@settings(max_examples=40)
@given(measured, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_metrics_are_torchmetrics(size, ignored):
    """Also where classes occur in neither truth nor answers, which is common here: these take no part in the mean."""
    import torchmetrics.functional.classification as tm  # which takes seconds

    answers, masks = probabilities(size, ignored)
    result, classes = meter_of(answers, masks).result(), size[3]
    said, truth = torch.stack(answers).argmax(dim=1), torch.stack(masks).long()
    valid = truth != IGNORE
    if classes > 1 and valid.any():
        jaccard = tm.multiclass_jaccard_index(said, truth, classes, average="macro", ignore_index=IGNORE)
        assert result["miou"] == pytest.approx(float(jaccard), abs=1e-6)
        right = tm.multiclass_accuracy(said, truth, classes, average="micro", ignore_index=IGNORE)
        assert result["pixel_accuracy"] == pytest.approx(float(right), abs=1e-6)
        recalls = [float((said == c)[truth == c].float().mean()) for c in range(classes) if (truth == c).any()]
        assert result["mean_accuracy"] == pytest.approx(np.mean(recalls), abs=1e-6)
    log = torch.stack(answers).double().log()
    expected = F.nll_loss(log, truth, ignore_index=IGNORE, reduction="sum") / max(int(valid.sum()), 1)
    assert result["loss"] == pytest.approx(float(expected), abs=1e-4)


def test_pixels_of_a_class_that_nobody_could_learn_count_as_unlabelled():
    """And where the model says it, that is a miss of the class that is there, not one more class."""
    import torchmetrics.functional.classification as tm

    answers, masks = probabilities((5, 4, (9, 9), 5), 0.1)
    meter = SegmentMeter(5, keep=True, measured=np.array([True, True, False, True, True]))
    meter.update(answers, a_batch([], masks))
    said, truth = torch.stack(answers).argmax(dim=1), torch.stack(masks).long()
    truth[truth == 2] = IGNORE
    each = tm.multiclass_jaccard_index(said, truth, 5, average="none", ignore_index=IGNORE)
    result = meter.result()
    assert result["miou"] == pytest.approx(float(each[[0, 1, 3, 4]].mean()), abs=1e-6)
    right = tm.multiclass_accuracy(said, truth, 5, average="micro", ignore_index=IGNORE)
    assert result["pixel_accuracy"] == pytest.approx(float(right), abs=1e-6)
    evaluation = SegmentEvaluation.of(list("abcd"), list("vwxyz"), meter, ["x"])
    numbers = evaluation.metrics()
    assert {key: numbers[key] for key in result} == result
    assert numbers["per_class"][2]["iou"] is None
    assert "Not measured: 'x', for training had no example of it." in list(evaluation.lines(numbers))


@settings(max_examples=25)
@given(measured, st.lists(st.integers(0, 5), max_size=3), st.randoms(use_true_random=False))
def test_no_digit_depends_on_batches_or_order(size, cuts, random):
    answers, masks = probabilities(size)
    order = list(range(len(masks)))
    random.shuffle(order)
    again = meter_of([answers[i] for i in order], [masks[i] for i in order], cuts)
    assert again.result() == meter_of(answers, masks).result()


def test_answers_are_enlarged_before_the_class_is_chosen():
    answer = torch.rand(K, 5, 7)
    mask = torch.randint(K, (11, 13), dtype=torch.uint8)
    large = F.interpolate(answer[None], (11, 13), mode="bilinear")[0].argmax(dim=0)
    expected = torch.bincount(mask.long().flatten() * K + large.flatten(), minlength=K * K).view(K, K)
    assert torch.equal(meter_of([answer], [mask]).confusion, expected)


def test_undefined_and_missing_answers_give_numbers():
    broken = meter_of([torch.full((K, 3, 3), float("nan"))], [torch.ones(3, 3, dtype=torch.uint8)]).result()
    assert all(map(math.isfinite, broken.values()))
    assert broken["pixel_accuracy"] == 0
    assert set(SegmentMeter(K).result().values()) == {0.0}


def test_nothing_waits_for_the_device():
    """Tensors without values: whoever asks for one, which would make the host wait, gets an exception."""
    tasks = [a_task(**{f"loss__{k}": v for k, v in SETTINGS[kind].items()}, data__balance="loss") for kind in SETTINGS]
    assert all(task.pixel_loss for task in tasks)  # made before the first step, of known numbers
    looks = a_task(test__mode="slide", test__scales=[0.5, 1.0], test__flip=True)
    PREPROCESSING.normalise(torch.zeros(1, 3, 1, 1))  # keeps its statistics, which must not be those without values
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Pointwise(aux=True)
        for task in tasks:
            loss, hits = task.loss(model, *task.prepare(task.dummy_batch(2), 0), 2)
            assert loss.shape == hits.shape == ()
        meter = SegmentMeter(K, keep=True)
        pictures = [torch.zeros(3, 20, 30, dtype=torch.uint8)] * 2
        masks = [torch.zeros(20, 30, dtype=torch.uint8), torch.zeros(25, 31, dtype=torch.uint8)]
        meter.update(looks.infer(model, pictures), a_batch(pictures, masks))
        with pytest.raises(DataDependentOutputException):
            int(meter.units)


def _measure_in_process(rank, world, file):
    torch.set_num_threads(1)  # a fork has inherited OpenMP's pool, but not its threads, and would wait for them forever
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    answers, masks = probabilities((3, 5, (6, 7), 5))
    meter = meter_of(answers[rank::world], masks[rank::world])
    meter.reduce()
    assert meter.result() == meter_of(answers, masks).result()
    dist.destroy_process_group()


def test_processes_agree_with_one(tmp_path):
    mp.start_processes(_measure_in_process, (2, tmp_path / "rendezvous"), nprocs=2, start_method="fork")


# Evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_has_the_meters_digits_and_each_pictures():
    answers, masks = probabilities((1, 6, (8, 9), 5))
    masks[4].fill_(IGNORE)
    classes, names = [f"c{i}" for i in range(6)], [f"p{i}" for i in range(6)]
    answers = [torch.cat([a, torch.zeros(1, 8, 9)]) for a in answers]  # a class that never occurs
    meter = meter_of(answers, masks, keep=True)
    evaluation = SegmentEvaluation.of(names, classes, meter)
    metrics = evaluation.metrics()
    assert {key: metrics[key] for key in meter.result()} == meter.result()
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["n"] == 6
    assert metrics["per_class"][5] == {"name": "c5", "iou": None, "accuracy": None, "pixels": 0}
    defined = [row["iou"] for row in metrics["per_class"] if row["iou"] is not None]
    assert metrics["miou"] == pytest.approx(np.mean(defined))
    for i, (answer, mask) in enumerate(zip(answers, masks, strict=True)):
        said, valid = answer.argmax(dim=0), mask != IGNORE
        each = [
            float(((said == c) & (mask == c)).sum() / (((said == c) & valid) | (mask == c)).sum())
            for c in mask[valid].unique().tolist()
        ]
        assert evaluation.scores[i] == (pytest.approx(np.mean(each)) if each else pytest.approx(np.nan, nan_ok=True))
    worst = evaluation.worst(10)
    assert worst[-1] == 4
    assert evaluation.scores[worst[:-1]].tolist() == sorted(evaluation.scores[worst[:-1]])


def test_confused_pairs():
    confusion = np.array([[5, 3, 0], [9, 1, 0], [1, 0, 7]])
    none = np.zeros((0, 3), np.int64)
    evaluation = SegmentEvaluation([], ["a", "b", "c"], confusion, none, none, none, 0)
    pairs = [(p.truth, p.said, p.pixels, p.part) for p in evaluation.confused_pairs(10)]
    assert pairs == [("b", "a", 9, 0.9), ("a", "b", 3, 0.375), ("c", "a", 1, 0.125)]


def a_source(pictures, masks, classes):
    """Of arrays; the last picture cannot be read."""

    def read(index):
        if index == len(pictures):
            raise BadPicture("broken")
        return pictures[index].permute(1, 2, 0).numpy()

    names = Names([f"p{i}" for i in range(len(pictures) + 1)])
    labels, splits = np.zeros(len(names), np.int64), np.full(len(names), "")
    targets = [*(mask.numpy() for mask in masks), np.zeros((1, 1), np.uint8)].__getitem__
    return Source("there", "arrays", classes, names, labels, read, splits, task="segment", targets=targets)


def test_collecting_is_validating():
    """The same digits as the meter of training, whatever number the source has for a class."""
    task, model, indices = a_task(), Pointwise().eval(), np.array([2, 1, 3, 0])
    pictures, masks = pictures_of((10, 12), (7, 5), (10, 12)), [draw(i, 1, (10, 12))[1][0] for i in range(3)]
    masks[1] = masks[1][:7, :5].contiguous()
    told = []
    source = a_source(pictures, masks, task.classes)
    evaluation = evaluate(Predictor(model, task), source, indices, progress=lambda *n: told.append(n))
    meter = task.meter()
    meter.update(task.infer(model, pictures), a_batch(pictures, masks))
    assert {key: evaluation.metrics()[key] for key in meter.result()} == meter.result()
    assert evaluation.names == ["p2", "p1", "p0"]
    assert told[-1] == (4, 4)
    turned = [torch.where(mask == IGNORE, IGNORE, K - 1 - mask).to(torch.uint8) for mask in masks]
    renamed = in_classes(a_source(pictures, turned, task.classes[::-1]), task.classes)
    again = evaluate(Predictor(model, task), renamed, indices)
    assert again.metrics() == evaluation.metrics()


def test_what_cannot_be_evaluated():
    task = a_task()
    with pytest.raises(WeftError, match="'c9'"):
        in_classes(a_source([], [], ["c0", "c9"]), task.classes)
    with pytest.raises(WeftError, match="none of the 1 pictures"):
        evaluate(Predictor(Pointwise(), task), a_source([], [], task.classes), np.array([0]))
