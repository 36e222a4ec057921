"""Answers over HTTP: those of `weft predict` and `weft explain`, whichever way a picture comes."""

import base64
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from pycocotools import mask as coco_mask

import weft
from tests.helpers.serving import form, models_of, serving
from tests.helpers.small_runs import refused
from weft.data.demo import fashion_mnist
from weft.explain import grad_cam
from weft.explain.heat import heat_over
from weft.models.weights.release import released_folder
from weft.serve.models import DEMO_MODEL, LONG, names_of, open_models
from weft.serve.samples import fashion_samples
from weft.serve.settings import ServeSettings
from weft.threads import torch_threads

PICTURES = {"classes": "pictures/class 1", "masks": "squares/images", "objects": "boxes/train2017"}


@pytest.fixture(scope="module", params=PICTURES)
def task(request):
    return request.param


@pytest.fixture(scope="module")
def files(runs, task):
    return sorted((runs[task].parent / PICTURES[task]).glob("*.png"))[:6]


@pytest.fixture(scope="module")
def data(runs):
    return (runs["classes"].parent / PICTURES["classes"] / "0.png").read_bytes()


def rows_of(answer) -> list[dict]:
    assert answer.status_code == 200, answer.text
    return answer.json()["pictures"]


def test_same_numbers_as_weft_predict(served, runs, task, files, command, tmp_path):
    """To a millionth: batches are put together otherwise, which rounds otherwise."""
    out = ["--out", tmp_path / "out", "--score", "0.3"] if task != "classes" else []
    code, _, errors = command("predict", runs[task], *files, "--json", tmp_path / "a.json", "--device", "cpu", *out)
    assert code == 0, errors
    expected = json.loads((tmp_path / "a.json").read_text())
    rows = rows_of(
        served.client.post(
            "/predict",
            params={"model": task, "score": 0.3},
            files=form(*((file.name, file.read_bytes()) for file in files)),
        )
    )
    assert [row["name"] for row in rows] == [file.name for file in files]
    if task == "objects":
        found = [(file.name, one) for file, row in zip(files, rows, strict=True) for one in row["objects"]]
        assert len(found) == len(expected) > 0
        for (name, one), other in zip(found, expected, strict=True):
            assert Path(other["file_name"]).name == name
            assert (one["category_id"], one["category_name"]) == (other["category_id"], other["category_name"])
            assert one["score"] == pytest.approx(other["score"], abs=2e-5)
            assert one["bbox"] == pytest.approx(other["bbox"], abs=0.02)
            overlap = coco_mask.iou([one["segmentation"]], [other["segmentation"]], [0])
            assert overlap.item() > 0.98 or coco_mask.area(one["segmentation"]) == 0
        return
    for row, other, file in zip(rows, expected, files, strict=True):
        if task == "classes":
            assert row["labels"] == other["labels"]
            assert row["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)
        else:
            written = np.asarray(Image.open(tmp_path / "out" / f"{file.stem}.png"))
            answered = np.asarray(Image.open(io.BytesIO(base64.b64decode(row["mask"]))))
            assert row["size"] == list(written.shape)
            assert (written == answered).mean() > 0.999
            assert row["shares"] == pytest.approx(other["shares"], abs=1e-3)


def test_forms_and_raw_bodies_agree(served, task, files):
    file = files[0].read_bytes()
    raw = rows_of(served.client.post("/predict", params={"model": task, "name": "a.png"}, content=file))
    typed = rows_of(
        served.client.post(
            "/predict", params={"model": task, "name": "a.png"}, content=file, headers={"content-type": "image/png"}
        )
    )
    sent = rows_of(served.client.post("/predict", params={"model": task}, files={"anything": ("a.png", file)}))
    assert raw == typed == sent


def test_answers_do_not_depend_on_company(runs, task, files):
    """However requests are batched, each picture has its own answer."""
    alone = {}
    with serving(models_of(runs[task]), batch=1) as served:
        for file in files:
            (alone[file.name],) = rows_of(served.predict(file.read_bytes(), name=file.name))
    with serving(models_of(runs[task]), batch=4, wait=0.05) as served, ThreadPoolExecutor(12) as pool:
        asked = list(files) * 4
        answers = list(pool.map(lambda file: rows_of(served.predict(file.read_bytes(), name=file.name))[0], asked))
        sizes = next(
            family
            for family in text_string_to_metric_families(served.client.get("/metrics").text)
            if family.name == "weft_batch_pictures"
        )
    for file, row in zip(asked, answers, strict=True):
        assert row["name"] == file.name
        assert _numbers(row) == pytest.approx(_numbers(alone[file.name]), abs=1e-3)
    buckets = {one.labels["le"]: one.value for one in sizes.samples if one.name.endswith("_bucket")}
    assert buckets["4.0"] == buckets["+Inf"] < len(asked)  # never more than four, and some together


def _numbers(row: dict) -> list[float]:
    if "labels" in row:
        pairs = sorted(zip(row["labels"], row["probabilities"], strict=True))
        return [value for _, value in pairs]
    if "shares" in row:
        return [row["shares"].get(name, 0.0) for name in ("class 0", "class 1", "class 2")]
    return [len(row["objects"]), *(one["score"] for one in row["objects"])]


def test_top_and_score(served, data):
    (row,) = rows_of(served.predict(data, model="classes", top=2))
    assert len(row["labels"]) == len(row["probabilities"]) == 2
    (few,), (all_,) = (rows_of(served.predict(data, model="objects", score=score)) for score in (0.9, 0.0))
    assert len(few["objects"]) <= len(all_["objects"])
    assert all(one["score"] >= 0.9 for one in few["objects"])


def test_explanations_are_those_of_weft_explain(served, runs, files, task):
    answer = served.client.post("/explain", params={"model": task}, content=files[0].read_bytes())
    assert answer.status_code == 200
    told = answer.json()
    kinds = [sheet["kind"] for sheet in told["sheets"]]
    if task == "objects":
        assert "grad-cam" not in kinds
        assert any("Grad-CAM needs one score" in note for note in told["notes"])
        return
    assert kinds[:2] == ["grad-cam", "rollout"]
    predictor = weft.load(runs[task], "cpu")
    subject = predictor.subject()
    pixels = predictor.preprocessing.picture(files[0])
    if task == "classes":
        assert told["of"] == predictor.predict(files[0]).pop().labels[0]
    cam = grad_cam(subject.model, subject.see(pixels[None]), classes=[predictor.classes.index(told["of"])])[0]
    expected = heat_over(pixels.permute(1, 2, 0).numpy(), cam.numpy())
    panel = told["sheets"][0]["rows"][0]["panels"][1]["picture"]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(panel.partition(",")[2]))).convert("RGB"))
    assert shown.shape == expected.shape
    assert np.abs(shown.astype(float) - expected).mean() < 6  # WebP


def test_an_explanation_of_another_class(served, data):
    told = [
        served.client.post("/explain", params={"model": "classes", "of": f"class {i}"}, content=data).json()
        for i in range(3)
    ]
    assert [one["of"] for one in told] == ["class 0", "class 1", "class 2"]
    assert len({one["sheets"][0]["rows"][0]["panels"][1]["picture"] for one in told}) > 1
    unknown = served.client.post("/explain", params={"model": "classes", "of": "clas 1"}, content=data)
    assert unknown.status_code == 422
    assert "class 1" in unknown.json()["error"]
    two = served.client.post("/explain", files=form(("a.png", data), ("b.png", data)))
    assert two.status_code == 413


def test_explaining_leaves_predictions_alone(served, data):
    """Hooks and gradients of one request are gone in the next."""
    before = rows_of(served.predict(data, model="classes"))
    with ThreadPoolExecutor(8) as pool:
        explained = [pool.submit(served.client.post, "/explain", content=data) for _ in range(4)]
        answers = list(pool.map(lambda _: rows_of(served.predict(data, model="classes")), range(12)))
        assert {one.result().status_code for one in explained} == {200}
    for (row,) in answers:
        assert row["labels"] == before[0]["labels"]
        assert row["probabilities"] == pytest.approx(before[0]["probabilities"], abs=1e-6)
    model = served.service.models["classes"]
    assert model.predictor.model is not model.subject.model  # on a CPU a fused copy answers
    for one in (model.predictor.model, model.subject.model):
        assert not any(module._forward_hooks for module in one.modules())
        assert all(parameter.grad is None for parameter in one.parameters())
    assert torch.is_grad_enabled()


def test_models_say_what_they_are(served, runs):
    listed = {one["name"]: one for one in served.client.get("/models").json()["models"]}
    assert {name: one["task"] for name, one in listed.items()} == dict(
        classes="classify", masks="segment", objects="detect"
    )
    for name, one in listed.items():
        assert one["classes"] == weft.load(runs[name], "cpu").classes
        assert len(one["colours"]) == len(one["classes"])
        plain = weft.load(runs[name], "cpu").model
        assert one["parameters"] == sum(parameter.numel() for parameter in plain.parameters())


def test_metrics_count_what_happened(classifier, photo):
    with serving(classifier()) as served:
        for data in (photo, photo, b"text"):
            served.predict(data)
        served.client.get("/nothing/at/all")
        families = {one.name: one for one in text_string_to_metric_families(served.client.get("/metrics").text)}
        counts = {
            (one.labels["path"], one.labels["status"]): one.value
            for one in families["weft_requests"].samples
            if one.name == "weft_requests_total"
        }
        assert counts == {("/predict", "200"): 2, ("/predict", "415"): 1, ("other", "404"): 1}
        pictures = {
            one.labels["outcome"]: one.value for one in families["weft_pictures"].samples if "total" in one.name
        }
        assert pictures == {"answered": 2, "refused": 1}
        assert families["weft_queue_pictures"].samples[0].value == 0


def test_the_interface_is_described(served):
    schema = served.client.get("/openapi.json").json()
    assert {*schema["paths"]} == {"/predict", "/explain", "/models", "/health", "/ready", "/metrics"}
    assert {"image/*", "multipart/form-data"} == {*schema["paths"]["/predict"]["post"]["requestBody"]["content"]}
    page = served.client.get("/docs")
    assert page.status_code == 200
    for path in schema["paths"]:
        assert path in page.text


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/a", "/r/b"], ["a", "b"]),
        (["/x/best", "/y/best"], ["x/best", "y/best"]),
        (["/x/best", "/y/best", "/z/last"], ["x/best", "y/best", "last"]),
        (["demo", "/r/demo"], ["demo", "r/demo"]),
    ],
)
def test_names_tell_models_apart(paths, names):
    assert names_of([Path(path) for path in paths]) == names


@pytest.mark.parametrize(
    ("alone", "batch", "chosen"),
    [
        ([0.0032], [0.04], (1, 1)),
        ([0.0032, 0.0029], [0.04, 0.039], (1, 1)),  # a little faster is not worth a core
        ([0.0032, 0.0029], [0.04, 0.024], (1, 2)),
        ([0.04, 0.022], [0.2, 0.11], (2, 2)),
        ([0.08, 0.042, 0.023, 0.022], [0.4, 0.2, 0.11, 0.1], (4, 4)),
        ([0.02, 0.019], [0.32, 0.17, 0.1, 0.06], (1, 6)),
        ([2.0, 1.1, 1.0], [], (2, 2)),  # a batch would take long
    ],
)
def test_threads_are_taken_as_long_as_they_pay(runs, monkeypatch, alone, batch, chosen):
    """By a picture alone and by several, with the seconds that both take of 1, 2, 4 and 6 threads."""
    (model,) = models_of(runs["classes"])
    used, timed, now, infer, inside = [], [], 0.0, model.predictor.infer, model._infer
    most = max(len(alone), len(batch))

    def take_time(pictures, threads):
        nonlocal now
        timed.append(len(pictures))
        now += (alone if len(pictures) == 1 else batch)[(1, 2, 4, 6).index(threads)]
        return inside(pictures, threads)

    monkeypatch.setattr(model.predictor, "infer", lambda x: used.append(torch.get_num_threads()) or infer(x))
    with torch_threads(1):  # put back what the model sets
        with monkeypatch.context() as patched:
            patched.setattr("weft.serve.models.perf_counter", lambda: now)
            patched.setattr(model, "_infer", take_time)
            model.settle_threads(6 if most > 2 else most, ServeSettings(batch=12))
        assert {*timed} == ({1, 12} if batch else {1})
        assert now < sum(alone + batch) + LONG * len(alone + batch)
        picture = model._grey()
        for count in (1, 2, 12):
            model.answers([picture] * count)
        assert used[-3:] == [chosen[0], chosen[1], chosen[1]]


def test_threads_are_tried_with_batches_that_come(runs, monkeypatch):
    """No more pictures together than the server gives a model at once."""
    (model,) = models_of(runs["classes"])
    timed, inside = [], model._infer
    monkeypatch.setattr(model, "_infer", lambda pictures, n: timed.append(len(pictures)) or inside(pictures, n))
    for limits, most in (({"batch": 3}, 3), ({"seen_pixels": 600}, 2), ({"batch": 1}, 1)):
        timed.clear()
        with torch_threads(1):
            model.settle_threads(1, ServeSettings(**limits))
        assert {*timed} == {1, most}


def test_the_command_refuses_in_one_line(command, runs, tmp_path):
    refused(command("serve"), "No model given")
    refused(command("serve", tmp_path / "nothing"), "does not exist")
    refused(command("serve", runs["classes"], runs["classes"]), "twice")
    refused(command("serve", runs["classes"], "--port", "99999"), "--port 99999")
    refused(command("serve", runs["classes"], "--batch", "0"), "batch")
    with serving(models_of(runs["classes"])) as served:
        refused(command("serve", runs["classes"], "--port", served.port), f"127.0.0.1:{served.port}", "in use")


def test_the_demo_comes_with_the_package():
    """A small file, in half precision, that knows the clothes of the embedded test pictures; its samples are theirs."""
    (model,) = open_models(["demo"], "cpu")
    folder = released_folder(DEMO_MODEL)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3_000_000
    pictures, labels, classes = fashion_mnist("test")
    found = model.predictor.predict(list(pictures[:300]), top=1)
    right = [one.labels[0] == classes[label] for one, label in zip(found, labels[:300], strict=True)]
    assert np.mean(right) > 0.85
    assert model.predictor.classes == fashion_samples().names
    with serving([model], fashion_samples()) as served:
        for name, picture in zip(fashion_samples().names, fashion_samples().pictures, strict=True):
            (row,) = rows_of(served.predict(picture))
            assert name in row["labels"][:2]
        kinds = {sheet["kind"] for sheet in served.client.post("/explain", content=picture).json()["sheets"]}
        assert {"grad-cam", "rollout", "tokens"} <= kinds


def test_a_missing_extra_is_said(command, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("weft.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    refused(command("serve", "demo"), "python_multipart", "pip install weft[serve]")
