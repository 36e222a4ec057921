"""What is exported answers as the run does, in onnxruntime and by itself; what does not is not kept."""

import http.server
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import venv
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import batched_nms

import weft
from tests.conftest import randomise
from tests.helpers.made_pictures import picture, preprocessing
from tests.helpers.places import ROOT
from tests.helpers.small_runs import command, dense, make_pictures, make_squares, refused, tiny_run
from tests.helpers.variants import SMALL
from weft.config import Config, override
from weft.data.read import decode
from weft.errors import WeftError
from weft.export import export as home
from weft.export.agreement import Agreement, AgreementRow, Limits, as_input, measure
from weft.export.classify import ClassifyForm
from weft.export.detect import DetectForm
from weft.export.folder import as_written, put, weights_hash
from weft.export.form import Gap
from weft.export.graph import TorchFile, write_onnx, write_torch
from weft.export.segment import SegmentForm
from weft.export.suppress import NOTHING, suppress, suppress_by_name
from weft.export.translations import TRANSLATIONS
from weft.export.weights import WeightsFile
from weft.run.evaluate import find_pictures
from weft.run.predictor import Predictor
from weft.tasks.registry import make_task
from weft.tasks.task import TaskFacts

QUICK = ("ceit_nano", "cvt_nano")  # one of a single resolution, one hierarchy; the rest of the families are slow
PAPERS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SMALL if name.endswith("_nano")
]
SHAPES = [(1, 40, 64), (2, 64, 40), (5, 33, 33)]  # batch, height, width


def predictor_of(name: str, multilabel: bool = False, flip: bool = False) -> Predictor:
    model = randomise(timm.create_model(name, num_classes=4, img_size=48, **SMALL[name]))
    facts = TaskFacts([*"abcd"], preprocessing(size=(48, 48)), torch.device("cpu"), multilabel=multilabel)
    return Predictor(model, make_task("classify", override(Config(), {"test.flip": flip}), facts))


def own(predictor: Predictor, pictures: np.ndarray) -> np.ndarray:
    logits = predictor.infer(torch.stack([predictor.preprocessing.picture(one) for one in pictures]))
    return (logits.sigmoid() if predictor.multilabel else logits.softmax(1)).numpy()


def batch_of(count: int, height: int, width: int) -> np.ndarray:
    return np.stack([np.array(picture(height, width, seed)) for seed in range(count)])


@pytest.mark.parametrize("name", PAPERS)
def test_families_in_onnxruntime(tmp_path, name):
    """Of every batch and every size, what the model says after Weft's own preprocessing; ViTAE looks both ways."""
    predictor = predictor_of(name, flip=name == "vitae_nano")
    write_onnx(ClassifyForm(predictor).eval(), tmp_path / "a.onnx", None, {"weft": "0"})
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    for shape in SHAPES:
        given = batch_of(*shape)
        (found,) = session.run(["probabilities"], {"pictures": given})
        np.testing.assert_allclose(found, own(predictor, given), atol=2e-3)
    onnx.checker.check_model(onnx.load(tmp_path / "a.onnx"), full_check=True)


def test_torch_package(tmp_path):
    predictor = predictor_of("vt_resnet_nano", multilabel=True)
    write_torch(ClassifyForm(predictor).eval(), tmp_path / "a.pt2", None, {"weft": "0"})
    file = TorchFile(tmp_path / "a.pt2", ["probabilities"])
    for shape in SHAPES:
        given = batch_of(*shape)
        np.testing.assert_allclose(file(given)["probabilities"], own(predictor, given), atol=2e-3)


# Suppression ------------------------------------------------------------------------------------------------------


def boxes_of(groups: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    corner, side = torch.rand(groups, count, 2) * 60, 5 + torch.rand(groups, count, 2) * 30
    scores = torch.rand(groups, count).masked_fill(torch.rand(groups, count) < 0.3, NOTHING)
    return torch.cat([corner, corner + side], 2), scores


def kept_by_torchvision(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    group = torch.arange(len(boxes))[:, None].expand(scores.shape).flatten()
    there = (scores > NOTHING).flatten().nonzero()[:, 0]
    chosen = batched_nms(boxes.flatten(0, 1)[there], scores.flatten()[there], group[there], threshold)
    return torch.zeros(scores.numel(), dtype=torch.bool).index_fill(0, there[chosen], True).view(scores.shape)


@pytest.mark.parametrize("groups", [1, 7, 600])
@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_suppression(groups, threshold):
    boxes, scores = boxes_of(groups, 40)
    assert torch.equal(suppress(boxes, scores, threshold), kept_by_torchvision(boxes, scores, threshold))


def test_suppression_in_onnxruntime(tmp_path):
    """In one graph for every number of groups, also where none of them has a box."""

    class Suppress(nn.Module):
        def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return suppress_by_name(boxes, scores, 0.5)

    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Suppress(), boxes_of(3, 9), dynamic_shapes=(free, free))
    made = torch.onnx.export(program, (), dynamo=True, verbose=False, custom_translation_table=TRANSLATIONS)
    assert made is not None
    made.save(tmp_path / "s.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "s.onnx")
    names = [value.name for value in session.get_inputs()]
    for boxes, scores in (boxes_of(1, 30), boxes_of(11, 50), (boxes_of(2, 5)[0], torch.full((2, 5), NOTHING))):
        (found,) = session.run(None, dict(zip(names, (boxes.numpy(), scores.numpy()), strict=True)))
        assert np.array_equal(found, kept_by_torchvision(boxes, scores, 0.5).numpy())


@pytest.mark.parametrize("axes", [4, 5])
@pytest.mark.parametrize("masked", ["no", "by numbers", "by truth"])
def test_attention_in_onnxruntime(tmp_path, axes, masked):
    """Of windows, too, which have an axis more and, where a map was padded to whole ones, a mask."""
    shape, generator = (2, 3, 4, 5, 8)[5 - axes :], torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, *shape, generator=generator).unbind()
    masks = {"no": None, "by numbers": torch.randn(5, 5, generator=generator), "by truth": torch.eye(5) < 1}
    mask, given = masks[masked], [q, k, v] + ([] if masked == "no" else [masks[masked]])

    class Attend(nn.Module):
        def forward(self, q, k, v, mask=None):
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    program = torch.export.export(Attend(), tuple(given))
    made = torch.onnx.export(program, (), dynamo=True, verbose=False, custom_translation_table=TRANSLATIONS)
    assert made is not None
    made.save(tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    names = [value.name for value in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, [one.numpy() for one in given], strict=True)))
    np.testing.assert_allclose(found, Attend()(q, k, v, mask).numpy(), atol=1e-6)


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    labels, masks = make_pictures(root / "labels", side=40), make_squares(root / "masks", "masks")
    boxes = make_squares(root / "coco", "coco")
    tiny_run(labels, root / "classify", model="vt_resnet_nano", model__args=SMALL["vt_resnet_nano"], img_size=32)
    tiny_run(masks, root / "segment", **dense("fpn"))
    tiny_run(boxes, root / "detect", **dense("mask-rcnn", epochs=20, batch=4))
    return {name: root / name for name in ("classify", "segment", "detect")}


def exported(run: Path, out: Path, *options: object) -> dict:
    code, said, errors = command("export", run, "--out", out, *options)
    assert code == 0, errors
    assert "which agrees" in said
    assert {"model.json", "agreement.json", "agreement.html"} < {path.name for path in out.iterdir()}
    report = json.loads((out / "agreement.json").read_text())
    assert report["agrees"]
    assert len({row["what"] for row in report["rows"]}) == len(report["rows"])
    return report


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory) -> dict[str, Path]:
    """Each run as ONNX."""
    root = tmp_path_factory.mktemp("files")
    for name, run in runs.items():
        report = exported(run, root / name)
        assert len(report["rows"]) == 7
        assert report["before"] == pytest.approx(report["after"], abs=0.005)
        assert report["rows"][0]["difference"]["answers"] > 0
    return {name: root / name for name in runs}


def test_metadata(files):
    for name, folder in files.items():
        stored = onnxruntime.InferenceSession(folder / "model.onnx").get_modelmeta().custom_metadata_map
        facts = json.loads(stored["weft"])
        assert facts == json.loads((folder / "model.json").read_text())
        assert facts["task"] == name
        assert len(facts["classes"]) == len(facts["colours"])
        assert len(facts["provenance"]["weights_sha256"]) == 64
        assert facts["provenance"]["opset"] == 20
        assert facts["provenance"]["options"]["to"] == "onnx"


def seen(folder: Path, image: Image.Image) -> dict[str, np.ndarray]:
    facts = json.loads((folder / "model.json").read_text())
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return dict(zip(facts["outputs"], session.run(None, {"pictures": np.array(image)[None]}), strict=True))


def test_objects_of_resized_pictures(runs, files):
    """Boxes and masks in pixels of a picture that the network sees smaller, next to what `predict` draws."""
    image = picture(190, 130, seed=3)
    image.paste((230, 40, 40), (20, 36, 76, 96))
    (objects,) = weft.load(runs["detect"]).predict([image], score=0.0)
    found = {name: torch.from_numpy(value[0]) for name, value in seen(files["detect"], image).items()}
    masks = paste_masks_in_image(found["masks"][:1, None], found["boxes"][:1], (190, 130))[0, 0] >= 0.5
    assert weft.load(runs["detect"]).preprocessing.fitted(190, 130) != (190, 130)
    assert objects.masks is not None
    np.testing.assert_allclose(found["scores"][0], objects.scores[0], atol=0.02)
    np.testing.assert_allclose(found["boxes"][0], objects.boxes[0], atol=0.5)
    drawn = torch.from_numpy(objects.masks[0])
    assert drawn.any()
    assert (masks & drawn).sum() / (masks | drawn).sum() > 0.9


@pytest.mark.parametrize("size", [(48, 48), (65, 48), (48, 77)])
def test_answers_are_predictions(runs, files, size):
    """In pixels of the picture, whatever its size: as `predict` gives them.

    The detector sees these as they are: where they are resized, a pixel that is rounded otherwise may let another of
    two equally good boxes win.
    """
    image = picture(*size, seed=3)
    image.paste((230, 40, 40), (5, 9, 28, 31))
    (label,) = weft.load(runs["classify"]).predict([image], top=3)
    found = seen(files["classify"], image)["probabilities"][0]
    np.testing.assert_allclose(np.sort(found)[::-1], label.probabilities, atol=2e-3)

    (mask,) = weft.load(runs["segment"]).predict([image])
    assert (seen(files["segment"], image)["labels"][0] == mask.mask).mean() > 0.999

    (objects,) = weft.load(runs["detect"]).predict([image], score=0.05)
    found = seen(files["detect"], image)
    count = min(2, len(objects.scores))
    assert count > 0
    np.testing.assert_allclose(found["scores"][0, :count], objects.scores[:count], atol=1e-3)
    np.testing.assert_allclose(found["boxes"][0, :count], objects.boxes[:count], atol=0.02)
    assert found["labels"][0, :count].tolist() == objects.labels[:count].tolist()
    assert (found["scores"][0][found["labels"][0] == -1] == 0).all()


def test_without_torch(runs, files, tmp_path):
    """The example, where torch, timm and Weft cannot be imported."""
    image = picture(50, 70, seed=3)
    image.save(tmp_path / "a.png")
    blocked = "import sys, runpy\nfor name in ('torch', 'torchvision', 'timm', 'weft'): sys.modules[name] = None\n"
    code = blocked + "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    for name, folder in files.items():
        words = [ROOT / "examples/without_torch.py", folder, tmp_path / "a.png"]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if name == "classify":
            (own,) = weft.load(runs[name]).predict([image], top=1)
            name, label, probability = re.match(r"(\S+)  (.+?) ([\d.]+)  ", done.stdout).groups()  # type: ignore
            assert (name, label) == ("a.png", own.labels[0])
            assert float(probability) == pytest.approx(own.probabilities[0], abs=2e-3)
        if name == "segment":
            (own,) = weft.load(runs[name]).predict([image])
            classes = weft.load(runs[name]).classes
            share = float(re.search(rf"  {classes[0]} ([\d.]+)", done.stdout).group(1))  # type: ignore
            assert share == pytest.approx((own.mask == 0).mean(), abs=2e-3)


@pytest.mark.parametrize(("mode", "channels", "depth"), [("RGBA", 3, 8), ("I;16", 3, 8), ("LA", 1, 8), ("I;16", 1, 16)])
def test_example_reads_as_weft_does(tmp_path, mode, channels, depth):
    """Transparency and 16 bits: the example gives the file the pixels that Weft gives the run."""
    rng, rules = np.random.default_rng(0), preprocessing(channels=channels, depth=depth)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, (9, 7), dtype=np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (9, 7, 4), dtype=np.uint8)).convert(mode)
    image.save(tmp_path / "a.png")
    kind = "uint8" if depth == 8 else "float32, from 0 to 1"
    facts = {"file": "none", "classes": ["a"], "outputs": ["probabilities"]}
    facts |= {"input": {"type": kind, "shape": [1, 9, 7, channels]}}
    (tmp_path / "model.json").write_text(json.dumps(facts))
    given = {}

    class Session:
        def __init__(self, path: Path):
            pass

        def run(self, names: None, inputs: dict) -> list[np.ndarray]:
            given.update(inputs)
            return [np.ones((1, 1))]

    words = ["without_torch.py", str(tmp_path), str(tmp_path / "a.png")]
    with mock.patch("onnxruntime.InferenceSession", Session), mock.patch("sys.argv", words):
        runpy.run_path(str(ROOT / "examples/without_torch.py"))
    expected = as_input(decode(tmp_path / "a.png", channels=channels), rules.depth)
    assert given["pictures"].dtype == expected.dtype
    np.testing.assert_allclose(given["pictures"][0], expected, atol=1e-6)


def test_other_formats(runs, tmp_path):
    report = exported(runs["classify"], tmp_path / "weights", "--to", "safetensors")
    assert report["rows"][0]["difference"]["changed"] == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'weights'}", pretrained=True)
    assert model.num_classes == 3
    exported(runs["segment"], tmp_path / "package", "--to", "torch")
    answer = torch.export.load(tmp_path / "package/model.pt2").module()(torch.zeros(3, 50, 41, 3, dtype=torch.uint8))
    assert answer[0].shape == (3, 50, 41)


def test_fixed(runs, tmp_path):
    report = exported(runs["classify"], tmp_path / "f", "--fixed", "--size", "30x44", "--batch", "2")
    assert report["scored"] == 0
    assert "top-1 of 0 pictures" in (tmp_path / "f/agreement.html").read_text()
    session = onnxruntime.InferenceSession(tmp_path / "f/model.onnx")
    assert session.get_inputs()[0].shape == [2, 30, 44, 3]


def test_eight_bits(runs, tmp_path):
    """Weights take a quarter, and the products of the preprocessing stay as they are."""
    report = exported(runs["classify"], tmp_path / "i", "--int8", "--limit", "40")
    assert report["bytes"]["file"] < report["bytes"]["torch"]
    nodes = onnx.load(tmp_path / "i/model.onnx").graph.node
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in nodes}
    quantised = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    products = {node.output[0] for node in nodes if node.op_type in ("MatMul", "Gemm") and node.input[1] in quantised}
    assert products  # whose results stay as they are: what follows wants floats
    assert not products & {node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    session = onnxruntime.InferenceSession(tmp_path / "i/model.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["weft"])["task"] == "classify"


@pytest.mark.slow
def test_eight_bits_without_a_metric_are_refused(runs, tmp_path):
    """Of a size that no picture has nothing is measured, and nothing else limits eight bits."""
    arguments = ("--int8", "--fixed", "--size", "30x44", "--out", tmp_path / "gone")
    code, _, errors = command("export", runs["classify"], *arguments)
    assert code == 2
    assert "leave out --size" in errors
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("order", [1, -1])
def test_answers_that_are_no_numbers_are_not_lost_among_others(order):
    gaps = [Gap(0.01, 0, 1), Gap(float("nan"), 0, 1), Gap(0.02, 0, 1)][::order]
    total = sum(gaps, Gap())
    assert math.isnan(total.largest)
    row = AgreementRow("each as it is", 3, total)
    assert Agreement("model.onnx", [row], "pictures", "top1", 1.0, 1.0, 3, {}, {}).faults()


def test_disagreement_is_not_kept(runs, tmp_path, monkeypatch):
    """A file whose batch is frozen to its first picture: the report says where, and nothing lies there."""
    kind = home.KINDS["safetensors"]

    def frozen(path, form):
        file = kind.open(path, form)
        return lambda pictures: {k: v[:1].repeat(len(pictures), 0) for k, v in file(pictures).items()}

    monkeypatch.setitem(home.KINDS, "safetensors", replace(kind, open=frozen))
    code, _, errors = command("export", runs["segment"], "--to", "safetensors", "--out", tmp_path / "gone")
    assert code == 2
    last = errors.splitlines()[-1]
    assert "is not kept" in last
    assert "2 at once" in last
    assert "each as it is" not in last
    assert not any(tmp_path.iterdir())


def test_a_file_that_mixes_up_batches_is_told_without_limits(runs):
    """In eight bits nothing else is limited: whatever batch a picture is in, its answer is the same."""
    form = SegmentForm(weft.load(runs["segment"], "cpu")).eval()
    path, (source, indices, _) = runs["segment"] / "model.safetensors", find_pictures(runs["segment"])
    file, loose = WeightsFile(path, form), Limits(largest=1.0, part=1.0, points=100.0)
    assert not measure(form, path, file, source, indices, limits=loose).faults()

    def frozen(pictures: np.ndarray) -> dict[str, np.ndarray]:
        return {name: value[:1].repeat(len(pictures), 0) for name, value in file(pictures).items()}

    assert "each picture alone" in measure(form, path, frozen, source, indices, limits=loose).faults()[0]


def test_pictures_that_cannot_be_read(runs, tmp_path):
    """No answers to compare: one line that says so."""
    data = make_pictures(tmp_path / "broken", each=2)
    for path in data.rglob("*.png"):
        path.write_bytes(path.read_bytes()[:60])
    form = ClassifyForm(weft.load(runs["classify"], "cpu")).eval()
    source, indices, _ = find_pictures(runs["classify"], str(data))
    path = runs["classify"] / "model.safetensors"
    with pytest.raises(WeftError, match="none of 6 pictures can be read"):
        measure(form, path, WeightsFile(path, form), source, indices)


def test_masks_of_objects_count():
    """Two answers with the same boxes and other masks differ."""
    boxes = np.array([[[2.0, 2.0, 20.0, 20.0]]], np.float32)
    one: Any = {"boxes": boxes, "labels": np.zeros((1, 1), int), "scores": np.full((1, 1), 0.9, np.float32)}
    masks = np.ones((1, 1, 28, 28), np.float32)
    form: Any = SimpleNamespace(outputs=("boxes", "labels", "scores", "masks"))
    same = DetectForm.difference(form, one | {"masks": masks}, one | {"masks": masks})
    other = DetectForm.difference(form, one | {"masks": masks}, one | {"masks": 0 * masks})
    assert same.largest == 0
    assert other.largest == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "torch", "--int8"], ["int8 is for ONNX"]),
        (["--size", "40x40"], ["--fixed"]),
        (["--fixed", "--size", "40"], ["no height and width"]),
        (["--to", "safetensors", "--fixed"], ["no size to fix"]),
        (["--pictures", "0"], ["pictures=0"]),
        (["--data", "nowhere"], ["nowhere"]),
        (["--test.mode", "slide"], ["classifier"]),
    ],
)
def test_mistakes(runs, tmp_path, options, words):
    refused(command("export", runs["classify"], "--out", tmp_path / "out", *options), *words)
    assert not any(tmp_path.iterdir())


def test_places(runs, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    refused(command("export", runs["classify"], "--out", tmp_path / "full"), "not an empty folder")
    refused(command("export", runs["classify"], "--out", runs["classify"].parent / "labels/x"), "inside the data")
    refused(command("export", tmp_path / "none"), "does not exist")
    refused(command("export", runs["segment"], "--out", tmp_path / "o", "--test.flip"), "looks once")


def test_an_earlier_export_of_the_run_is_replaced(runs, tmp_path):
    """By the command that made it, said once more; with anything of the user's beside it, or of another run, never."""
    out, again = tmp_path / "out", ("export", runs["classify"], "--to", "safetensors", "--pictures", "3", "--out")
    exported(runs["classify"], out, "--to", "safetensors")
    (out / "model.safetensors").write_bytes(b"old")
    assert command(*again, out)[0] == 0
    assert (out / "model.safetensors").stat().st_size > 1000
    assert json.loads((out / "agreement.json").read_text())["rows"][0]["pictures"] == 3
    assert [*tmp_path.iterdir()] == [out]
    refused(command("export", runs["segment"], "--to", "safetensors", "--out", out), "not an empty folder")
    other = shutil.copytree(runs["segment"], tmp_path / "other" / runs["classify"].name)  # of the same name
    refused(command("export", other, "--to", "safetensors", "--out", out), "not an empty folder")
    (out / "notes.txt").write_text("mine")
    refused(command(*again, out), "'notes.txt', which would be lost")


@pytest.mark.parametrize("options", [("--int8",), ("--to", "torch"), ("--fixed",), ("--test.flip",)])
def test_an_export_with_other_options_is_not_replaced(runs, tmp_path, options):
    """Whoever asks for another kind of file has not said that the first one may go."""
    folder = tmp_path / "out"
    exported(runs["classify"], folder, "--to", "safetensors", "--pictures", "3")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    named = {"--test.flip": "settings"}.get(options[0], options[0].removeprefix("--"))
    refused(command("export", runs["classify"], "--out", folder, *options), named, "choose --out")
    with pytest.raises(WeftError, match="differs in"):
        weft.export(runs["classify"], folder, to="safetensors", settings={"test.flip": True})
    weft.export(runs["classify"], folder, to="safetensors", pictures=3)
    assert {path.name for path in folder.iterdir()} == before.keys()


@pytest.mark.parametrize("earlier", [False, True])
def test_what_appears_while_exporting_stays(runs, tmp_path, monkeypatch, earlier):
    """An export takes minutes, in which somebody may put something at its place."""
    folder, write_page = tmp_path / "out", home.write_page
    again = ("export", runs["classify"], "--to", "safetensors", "--pictures", "3", "--out", folder)
    if earlier:
        assert command(*again)[0] == 0

    def write_meanwhile(*arguments: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "thesis.txt").write_text("years of work")
        write_page(*arguments)

    monkeypatch.setattr(home, "write_page", write_meanwhile)
    code, _, errors = command(*again)
    assert code == 2
    assert str(folder) in errors.splitlines()[-1]
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert [*tmp_path.iterdir()] == [folder]


def test_an_earlier_export_is_back_where_the_next_one_fails(runs, tmp_path):
    folder, options = tmp_path / "out", dict(to="safetensors", settings=None)
    facts = {"provenance": {"weights_sha256": weights_hash(runs["classify"]), "options": as_written(options)}}
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(facts))
    with pytest.raises(OSError, match="gone"):
        put(tmp_path / "gone", folder, runs["classify"], options)
    assert json.loads((folder / "model.json").read_text()) == facts


def test_missing_library(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused(command("export", runs["classify"], "--out", tmp_path / "out"), "pip install weft[export]")


# Elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fresh_environment(files, tmp_path):
    """An environment that has onnxruntime, numpy and Pillow alone."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "onnxruntime", "numpy", "pillow"], check=True)
    picture(50, 70, seed=3).save(tmp_path / "a.png")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for folder in files.values():
        words = [python, ROOT / "examples/without_torch.py", folder, tmp_path / "a.png"]
        done = subprocess.run(words, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
    gone = subprocess.run([python, "-c", "import torch"], capture_output=True, env=variables)
    assert gone.returncode != 0


@pytest.mark.slow
def test_in_a_browser(files, tmp_path):
    """The example page in Chromium, with onnxruntime's build for browsers: the probabilities that Python gets."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or pytest.skip("needs Chromium")
    subprocess.run(["npm", "install", "--silent", "--ignore-scripts", "onnxruntime-web"], cwd=tmp_path, check=True)
    shutil.copy(ROOT / "examples/in_a_browser.html", tmp_path)
    image = picture(50, 70, seed=3)
    image.save(tmp_path / "a.png")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        said = {}
        for name, folder in files.items():
            shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/in_a_browser.html")
            page.wait_for_function("document.querySelector('pre').textContent === 'ready'", timeout=120_000)
            page.set_input_files("input", tmp_path / "a.png")
            page.wait_for_function("document.querySelector('pre').textContent !== 'ready'", timeout=120_000)
            said[name] = page.inner_text("pre")
            page.close()
        browser.close()
    server.shutdown()
    expected = seen(files["classify"], image)["probabilities"][0]
    found = [float(line.split()[-1]) for line in said["classify"].splitlines()]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    expected = seen(files["segment"], image)["labels"].ravel()[:100]
    labels = next(line for line in said["segment"].splitlines() if line.startswith("labels"))
    assert [int(value) for value in labels.split()[1].split(",")] == expected.tolist()
    expected = seen(files["detect"], image)["scores"].ravel()[:100]
    scores = next(line for line in said["detect"].splitlines() if line.startswith("scores"))
    np.testing.assert_allclose([float(value) for value in scores.split()[1].split(",")], expected, atol=1e-3)
