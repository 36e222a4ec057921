"""Distillation against a brute force in float64."""

import dataclasses

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import randomise
from weft.config import LossConfig
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError
from weft.models.weights.folder import write_model
from weft.run.teacher import open_teacher
from weft.tasks.classify.distill import Distillation

CLASSES = ["a", "b", "c"]
STUDENT = Preprocessing((32, 32), 3, 8, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), "bicubic", 1.0, "center", 10**6)
TEACHER = dataclasses.replace(STUDENT, size=(24, 40), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


@pytest.fixture
def teacher(tmp_path):
    model = randomise(timm.create_model("resnet10t", num_classes=3))
    write_model(model, tmp_path, classes=CLASSES, preprocessing=TEACHER.to_dict(), multilabel=False)
    return model, str(tmp_path)


def distillation(folder, classes=CLASSES, preprocessing=STUDENT, **settings):
    config = LossConfig(teacher=folder, **settings)
    device = torch.device("cpu")
    return Distillation(
        config, open_teacher(folder, device), classes=classes, preprocessing=preprocessing, device=device
    )


def teachers_logits(model: nn.Module, pixels: torch.Tensor) -> np.ndarray:
    """What the teacher says about 0..1 pixels, prepared as for itself, in float64."""
    x = F.interpolate(pixels.double(), TEACHER.size, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (TEACHER.mean, TEACHER.std))
    with torch.no_grad():
        return model.double()((x - mean) / std).numpy()


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_distillation_is_the_brute_force(teacher, kind, temperature):
    model, folder = teacher
    pixels, logits = torch.rand(5, 3, 32, 32), torch.randn(5, 3, requires_grad=True)
    loss = distillation(folder, distill=kind, temperature=temperature)(STUDENT.normalise(pixels), logits, 8)
    said, z = logits.detach().double().numpy(), teachers_logits(model, pixels)
    if kind == "hard":
        expected = -np.log(softmax(said))[np.arange(5), z.argmax(axis=1)].sum() / 8
    else:
        p, q = softmax(z / temperature), softmax(said / temperature)
        expected = temperature**2 * (p * (np.log(p) - np.log(q))).sum() / 8
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert logits.grad.abs().sum() > 0


def test_micro_batches_add_up_and_the_teacher_stays_as_it_is(teacher):
    distil = distillation(teacher[1])
    before = {key: value.clone() for key, value in distil.teacher.state_dict().items()}
    x, logits = torch.randn(5, 3, 32, 32), torch.randn(5, 3)
    parts = distil(x[:2], logits[:2], 5) + distil(x[2:], logits[2:], 5)
    torch.testing.assert_close(parts, distil(x, logits, 5))
    assert all(torch.equal(before[key], value) for key, value in distil.teacher.state_dict().items())
    assert not any(p.requires_grad for p in distil.teacher.parameters())


def test_teacher_computes_in_the_students_precision(teacher):
    _, folder = teacher
    distil = distillation(folder)
    seen = []
    distil.teacher.get_classifier().register_forward_hook(lambda module, x, y: seen.append(y.dtype))
    for dtype in (torch.float32, torch.bfloat16):
        distil(torch.randn(2, 3, 32, 32), torch.randn(2, 3).to(dtype), 2)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(classes=["a", "b"]), "3 classes, the data have 2"),
        (dict(classes=["a", "x", "c"]), "'b' where the data have 'x'"),
        (dict(preprocessing=dataclasses.replace(STUDENT, channels=1)), "takes 3 channels, the pictures have 1"),
        (dict(temperature=0.0), "temperature"),
    ],
)
def test_unfit_teachers_are_refused(teacher, settings, words):
    with pytest.raises(WeftError, match=words):
        distillation(teacher[1], **settings)


def test_teachers_of_several_labels_are_refused(teacher, tmp_path):
    model, folder = teacher
    write_model(model, tmp_path, classes=CLASSES, preprocessing=TEACHER.to_dict(), multilabel=True)
    with pytest.raises(WeftError, match="one label per picture"):
        distillation(folder)


def test_timm_teachers_come_with_their_own_weights(monkeypatch):
    """`pretrained=True` reads a cache or the network; here it is a model of known weights, or fails."""
    monkeypatch.setattr("weft.run.initial.check_reachable", lambda name: None)
    create, known = timm.create_model, timm.create_model("resnet10t", num_classes=3)

    def from_cache(name, pretrained=False, **kwargs):
        assert pretrained
        model = create(name, num_classes=3)
        model.load_state_dict(known.state_dict())
        model.pretrained_cfg["num_classes"] = 3
        return model

    monkeypatch.setattr("timm.create_model", from_cache)
    distil = distillation("resnet10t.c3_in1k", classes=["any", "three", "names"])
    x, logits = torch.randn(2, 3, 32, 32), torch.zeros(2, 3)
    assert torch.equal(distil.teacher.fc.weight, known.fc.weight)
    assert torch.isfinite(distil(x, logits, 2))

    def offline(*args, **kwargs):
        raise OSError("cannot reach the hub\nand many more lines")

    monkeypatch.setattr("timm.create_model", offline)
    with pytest.raises(WeftError, match=r"pretrained weights .*: cannot reach the hub$"):
        distillation("resnet10t")
    with pytest.raises(WeftError, match=r"Did you mean 'resnet18'"):
        distillation("resnet_18")
