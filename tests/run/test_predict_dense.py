"""Models that segment and detect, opened and used: what they predict is what is evaluated, at any size of picture."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import weft
from tests.conftest import randomise
from weft.config import Config, override, to_yaml
from weft.data.boxes.objects import Objects
from weft.data.check.check import check
from weft.data.given import GivenPictures
from weft.data.masks.values import read_raw
from weft.data.preprocessing import Preprocessing
from weft.data.sources.open import open_source
from weft.data.sources.source import Files, Names, Source
from weft.data.split import Split, save_split
from weft.data.targets import MASKS
from weft.errors import WeftError
from weft.heads.folder import DenseSpec, build_dense, write_dense
from weft.run.evaluate import evaluate, find_pictures
from weft.run.predictor import facts_of_data
from weft.tasks.segment import predict as segment_predict
from weft.tasks.segment.predict import MaskPrediction, class_map
from weft.tasks.segment.task import Segment
from weft.tasks.task import TaskFacts

CLASSES = ["background", "disc", "bar"]
SIZES = [(64, 64), (48, 80), (64, 64), (33, 71)]


def preprocessing(size):
    return Preprocessing(size, 3, 8, (0.5,) * 3, (0.25,) * 3, "bilinear", 1.0, "fit", 10**6)


def make_folder(folder, task, head, size):
    """A model with random weights."""
    settings = {"data.task": task, "augment.img_size": 64, "model.head": head}
    config = override(Config(), settings | {"test.score": 0.0, "test.detections": 10})
    small = {"box_width": 16, "proposals": 20} if task == "detect" else {}
    spec = DenseSpec(task, "cvt_nano", {}, 3, head, {"channels": 16, **small}, CLASSES)
    torch.manual_seed(0)
    model = randomise(build_dense(spec, config))
    folder.mkdir()
    write_dense(folder, spec, model.state_dict(), preprocessing=preprocessing(size).to_dict(), config=config)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i, (height, width) in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(root / f"{i}.png")
    (root / "torn.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("s") / "run", "segment", "fpn", (0, 0))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("d") / "run", "detect", "mask-rcnn", (64, 128))


class Targets:
    def __init__(self, made):
        self.made = made

    def __call__(self, index):
        return self.made[index]


def source_of(root, task, classes=CLASSES):
    """The pictures with made-up masks or objects."""
    rng = np.random.default_rng(1)
    names = Names([f"{i}.png" for i in range(len(SIZES))])
    if task == "segment":
        made = [rng.choice([0, 1, 2, 255], size).astype(np.uint8) for size in SIZES]
        labels = np.zeros(len(SIZES), np.int64)
    else:
        box = np.array([[4, 6, 30, 28]], np.float32)
        made = [Objects(box, np.array([1]), np.array([False]), np.array([572.0]), [], size) for size in SIZES]
        labels = np.ones((len(SIZES), len(classes)), bool)
    splits = np.array(["val"] * len(SIZES))
    return Source(
        *(str(root), "made up", list(classes), names, labels, Files(root, names), splits),
        multilabel=task == "detect",
        task=task,
        targets=Targets(made),
    )


# Segmentation -----------------------------------------------------------------------------------------------------


def test_masks_are_those_that_are_evaluated(segmenter, pictures):
    predictor, source = weft.load(segmenter), source_of(pictures, "segment")
    found = predictor.predict([pictures / f"{i}.png" for i in range(4)])
    assert [p.mask.shape for p in found] == SIZES
    evaluation = evaluate(predictor, source, np.arange(4))
    for i, prediction in enumerate(found):
        truth = source.target(i)
        hits = [((truth == c) & (prediction.mask == c)).sum() for c in range(3)]
        np.testing.assert_array_equal(evaluation.hits[i], hits)
    single = [predictor.predict(pictures / f"{i}.png")[0].mask for i in range(4)]
    for a, b in zip(found, single, strict=True):
        np.testing.assert_array_equal(a.mask, b)


@pytest.mark.parametrize(
    ("values", "stored"),
    [((1, 2), [1, 2]), ((0, 255), [0, 255]), ((3, 0, 7), [0, 3, 7]), (("#ff8000", "#000000"), [0, 0xFF8000])],
)
def test_masks_are_written_as_those_of_training_were(segmenter, pictures, tmp_path, values, stored):
    """What is written can lie among the masks of training: their reader finds the very classes of the answer."""
    colours = isinstance(values[0], str)
    table = np.array([list(bytes.fromhex(v[1:])) if colours else v for v in values], np.uint8)
    for i, size in enumerate(SIZES):
        for folder in ("images", "masks"):
            (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(pictures / f"{i}.png", tmp_path / "data" / "images")
        mask = table[np.random.default_rng(i).integers(0, len(values), size)]
        Image.fromarray(mask).save(tmp_path / "data" / "masks" / f"{i}.png")
    source = open_source(str(tmp_path / "data"))
    report = check(source, None, quick=True)
    assert (report.mask_values, report.mask_colours) == (stored, colours)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data_report.json").write_text(json.dumps(report.to_dict()))
    facts = TaskFacts(source.classes, preprocessing((0, 0)), torch.device("cpu"), **facts_of_data(tmp_path / "run"))
    task = Segment(override(Config(), {"augment.img_size": 64}), facts)
    found = GivenPictures(tmp_path / "data" / "images")
    writer = task.results(found, tmp_path / "out", top=5, score=0.5)
    said = [np.random.default_rng(9).integers(0, len(stored), size).astype(np.uint8) for size in SIZES]
    for i, mask in enumerate(said):
        writer.add(i, MaskPrediction(found.names[i], mask))
    writer.close()
    written = {entry["value"] for entry in json.loads((tmp_path / "out" / "predictions.json").read_text())["classes"]}
    assert written == {f"#{v:06x}" if colours else v for v in stored}
    for i, mask in enumerate(said):
        np.testing.assert_array_equal(source.targets.coding(read_raw(tmp_path / "out" / f"{i}.png")), mask)


def test_classes_of_other_data_are_matched_by_name(segmenter, pictures):
    predictor, source = weft.load(segmenter), source_of(pictures, "segment")
    turned = source_of(pictures, "segment", ["bar", "background", "disc"])
    table = np.array([1, 2, 0, *range(3, 256)], np.uint8)  # where each class stands there
    turned.targets.made = [table[mask] for mask in source.targets.made]
    ours, theirs = (evaluate(predictor, s, np.arange(4)) for s in (source, turned))
    assert ours.metrics() == theirs.metrics()
    turned.classes = ["bars", "background", "disc"]
    with pytest.raises(WeftError, match=r"'bars'.*Did you mean 'bar'"):
        evaluate(predictor, turned, np.arange(4))
    with pytest.raises(WeftError, match="is data to detect objects; the model was trained to segment"):
        evaluate(predictor, source_of(pictures, "detect"), np.arange(4))


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_class_map_is_the_argmax_after_resizing(monkeypatch, at_once):
    monkeypatch.setattr(segment_predict, "CHUNK", at_once * 21 * 13)
    scores = torch.randn(7, 9, 5)
    scores[3] = scores[1]  # of equal ones the first
    resized = torch.nn.functional.interpolate(scores[None], (21, 13), mode="bilinear")[0]
    torch.testing.assert_close(class_map(scores, (21, 13)), resized.argmax(0).to(torch.uint8), rtol=0, atol=0)
    torch.testing.assert_close(class_map(scores, (9, 5)), scores.argmax(0).to(torch.uint8), rtol=0, atol=0)


def test_many_pictures_are_worth_compiling_kernels(segmenter, pictures, monkeypatch):
    seen = []
    monkeypatch.setattr("weft.run.predictor.WORTH_COMPILING", 1)
    monkeypatch.setattr("weft.run.predictor.fast_on", lambda model, device: seen.append(model))
    predictor = weft.load(segmenter, device="cpu")
    predictor.predict(pictures)
    source = source_of(pictures, "segment")
    evaluate(predictor, source, np.arange(len(source)))
    assert seen == [predictor.model] * 2


def test_turned_pictures_have_upright_masks(segmenter, tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    turned, upright = weft.load(segmenter).predict([tmp_path / "turned.png", tmp_path / "upright.png"])
    assert turned.mask.shape == (56, 40)
    np.testing.assert_array_equal(turned.mask, upright.mask)


def test_settings_of_use_can_be_changed(segmenter, pictures):
    masks = [
        weft.load(segmenter, settings=settings).predict(pictures / "1.png")[0].mask
        for settings in ({}, {"test.scales": "[0.5, 1.5]"}, {"test.flip": True}, {"test.short_side": 96})
    ]
    assert {mask.shape for mask in masks} == {SIZES[1]}
    assert len({mask.tobytes() for mask in masks}) == 4
    with pytest.raises(WeftError, match=r"test\.scale'.*Did you mean 'test\.scales'"):
        weft.load(segmenter, settings={"test.scale": 1})


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"test.short_side": 512}, (320, 853)),  # 1.6667 times as long, at most
        ({"test.short_side": 512, "test.long_side": 2048}, (512, 1365)),  # Swin's (2048, 512) on ADE20K
        ({"test.short_side": 512, "test.long_side": 1024}, (384, 1024)),
    ],
)
def test_the_long_side_has_its_own_limit(segmenter, settings, size):
    """A picture of 600 x 1600, as mmsegmentation resizes it: by the smaller of both ratios."""
    assert weft.load(segmenter, settings=settings).preprocessing.fitted(600, 1600) == size


@pytest.mark.parametrize("settings", [{"test.long_side": 800}, {"test.short_side": 512, "test.long_side": 300}])
def test_a_long_side_needs_a_short_one(segmenter, settings):
    with pytest.raises(WeftError, match=r"test\.long_side=\d+ needs a test\.short_side"):
        weft.load(segmenter, settings=settings)


def test_pictures_too_large_for_the_device_stop_nobody(segmenter, pictures):
    predictor = weft.load(segmenter)
    infer = predictor.task.infer

    def small_memory(model, given):
        if len(given) > 1 or given[0].shape[-1] > 71:
            raise torch.OutOfMemoryError("no memory")
        return infer(model, given)

    predictor.task.infer = small_memory
    found = predictor.predict(sorted(pictures.glob("?.png")))
    assert [p.mask is None for p in found] == [False, True, False, False]
    assert "too large for the memory" in found[1].error


def test_predict_writes_masks_and_overlays(segmenter, pictures, tmp_path, command):
    out = tmp_path / "out"
    code, text, err = command("predict", segmenter, pictures, "--out", out)
    assert (code, err) == (1, "")  # one is unreadable
    assert text.splitlines()[-1] == f"Wrote {out}: 5 pictures, 1 unreadable."
    assert f"{pictures}/torn.png  cannot be read: not a picture" in text
    files = [f"{i}.{ending}" for i in range(4) for ending in ("overlay.jpg", "png")]
    assert sorted(p.name for p in out.iterdir()) == sorted([*files, "predictions.json"])
    content = json.loads((out / "predictions.json").read_text())
    assert [row["name"] for row in content["classes"]] == CLASSES
    predictor = weft.load(segmenter)
    for i, row in enumerate(content["pictures"][:4]):
        mask = predictor.predict(pictures / f"{i}.png")[0].mask
        with Image.open(out / row["mask"]) as image:
            np.testing.assert_array_equal(np.asarray(image), mask)
        with Image.open(out / f"{i}.overlay.jpg") as image:
            assert image.size == SIZES[i][::-1]
        assert sum(row["shares"].values()) == pytest.approx(1)
    code, _, err = command("predict", segmenter, pictures, "--out", out)
    assert (code, "not an empty folder" in err) == (2, True)


def test_predict_without_a_folder_says_what_there_is(segmenter, pictures, command):
    _, text, _ = command("predict", segmenter, pictures / "0.png", pictures / "torn.png")
    assert text.splitlines()[-1] == "Masks and overlays are written with --out FOLDER."
    _, text, _ = command("predict", segmenter, pictures, "--json", "-")
    rows = json.loads(text)
    assert [bool(row["error"]) for row in rows] == [False] * 4 + [True]
    assert all(sum(row["shares"].values()) == pytest.approx(1) for row in rows[:4])
    _, text, _ = command("predict", segmenter, pictures, "--csv", "-")
    assert [row["name"] for row in csv.DictReader(io.StringIO(text))] == [row["name"] for row in rows]
    assert command("predict", segmenter, pictures / "torn.png")[0] == 1


# Detection --------------------------------------------------------------------------------------------------------


def test_objects_lie_in_the_picture(detector, pictures):
    predictor = weft.load(detector)
    found = predictor.predict([pictures / f"{i}.png" for i in range(4)], score=0.0)
    for prediction, (height, width) in zip(found, SIZES, strict=True):
        assert len(prediction.boxes)
        assert prediction.masks.shape == (len(prediction.boxes), height, width)
        assert (prediction.boxes >= 0).all()
        assert (prediction.boxes <= [width, height] * 2).all()
        assert (np.diff(prediction.scores) <= 0).all()
        assert set(prediction.labels) <= {0, 1, 2}
        for (left, top, right, bottom), mask in zip(prediction.boxes, prediction.masks, strict=True):
            rows, columns = np.nonzero(mask)
            assert (rows >= top - 2).all()
            assert (rows <= bottom + 2).all()
            assert (columns >= left - 2).all()
            assert (columns <= right + 2).all()
    sure = predictor.predict(pictures / "0.png", score=float(found[0].scores[2]))[0]
    np.testing.assert_allclose(sure.boxes, found[0].boxes[: len(sure.boxes)], atol=1e-3)


def test_objects_are_those_that_are_evaluated(detector, pictures):
    predictor = weft.load(detector)
    evaluation = evaluate(predictor, source_of(pictures, "detect"), np.arange(4))
    found = predictor.predict([pictures / f"{i}.png" for i in range(4)], score=0.0)
    for a, b in zip(evaluation.found, found, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-6)
        np.testing.assert_array_equal(a.labels, b.labels)
    few = weft.load(detector, settings={"test.detections": 2}).predict(pictures / "0.png", score=0.0)[0]
    np.testing.assert_allclose(few.scores, found[0].scores[:2], atol=1e-6)


def test_predict_writes_objects(detector, pictures, tmp_path, command):
    out = tmp_path / "out"
    code, text, _ = command("predict", detector, pictures, "--out", out, "--score", 0.0, "--csv", tmp_path / "o.csv")
    assert (code, text) == (1, f"Wrote {tmp_path / 'o.csv'} and {out}: 5 pictures, 1 unreadable.\n")
    assert sorted(p.name for p in out.iterdir()) == [*(f"{i}.overlay.jpg" for i in range(4)), "predictions.json"]
    rows = json.loads((out / "predictions.json").read_text())
    table = list(csv.DictReader(io.StringIO((tmp_path / "o.csv").read_text())))
    assert [row["file_name"] for row in rows] == [row["name"] for row in table if not row["error"]]
    assert {row["category_name"] for row in rows} <= set(CLASSES)
    assert {row["image_id"] for row in rows} == {1, 2, 3, 4}
    command("predict", detector, pictures, "--score", 1.0, "--csv", tmp_path / "o.csv")
    empty = list(csv.DictReader(io.StringIO((tmp_path / "o.csv").read_text())))
    assert [(Path(row["name"]).name, row["class"], bool(row["error"])) for row in empty] == [
        *((f"{i}.png", "", False) for i in range(4)),
        ("torn.png", "", True),
    ]
    assert not any(row["score"] for row in empty)
    _, text, _ = command("predict", detector, pictures / "0.png", "--score", 1.0)
    assert text.splitlines()[0] == f"{pictures / '0.png'}  nothing"
    assert command("predict", detector, pictures, "--score", 2)[::2] == (
        2,
        "weft: --score 2 is no probability; choose a number from 0 to 1.\n",
    )


def test_one_score_holds_for_all_that_is_written(detector, pictures, tmp_path, command):
    """Also for predictions.json; a line says how many objects reach it, and where they are as many as may be."""
    found = weft.load(detector).predict(sorted(pictures.glob("?.png")), score=0.0)
    middle = float(np.median(np.concatenate([p.scores for p in found])))
    expected = [round(float(score), 5) for p in found for score in p.scores if score >= middle]
    out, table = tmp_path / "out", tmp_path / "o.csv"
    _, _, err = command("predict", detector, pictures, "--out", out, "--csv", table, "--score", middle)
    written = [row["score"] for row in json.loads((out / "predictions.json").read_text())]
    assert written == pytest.approx(expected, abs=1e-5)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [float(row["score"]) for row in rows if row["class"]] == written
    assert err == f"{len(written)} objects with a score of at least {middle:g} (--score).\n"
    few = min(len(p.scores) for p in found)
    _, _, err = command("predict", detector, pictures, "--score", 0, "--test.detections", few)
    assert f"4 of 4 pictures have {few}, as many as may be (test.detections): the model is hardly trained" in err


# Evaluation -------------------------------------------------------------------------------------------------------


def as_run(folder, task, root, monkeypatch):
    """Makes the folder a run on made-up data."""
    source = source_of(root, task)
    source.targets.sizes = lambda positions: b""
    monkeypatch.setattr("weft.run.evaluate.open_configured", lambda *_: source)
    save_split(Split(np.arange(0), np.arange(4), np.arange(0)), source, folder / "split.json")


def test_eval_of_a_segmenter(segmenter, pictures, command, monkeypatch):
    as_run(segmenter, "segment", pictures, monkeypatch)
    _, text, err = command("eval", segmenter, "--json")
    metrics = json.loads(text)
    assert err == ""
    assert 0 <= metrics["miou"] <= 1
    _, text, _ = command("eval", segmenter)
    assert f"mIoU {metrics['miou']:.4f}" in text
    others = [
        json.loads(command("eval", segmenter, "--json", *options)[1])["miou"]
        for options in (["--scales", "0.5,1.5"], ["--flip"], ["--mode", "slide", "--test.window", "32"])
    ]
    assert len({metrics["miou"], *others}) == 4
    code, _, err = command("eval", segmenter, "--mode", "slid")
    assert (code, "test.mode='slid' does not exist" in err) == (2, True)
    code, _, err = command("eval", segmenter, "--optim.lr", "1")
    assert (code, "--optim.lr belongs to training" in err) == (2, True)


def test_eval_of_a_detector(detector, pictures, command, monkeypatch):
    as_run(detector, "detect", pictures, monkeypatch)
    metrics = json.loads(command("eval", detector, "--json")[1])
    assert {"box_ap", "mask_ap", "box_ap50"} <= metrics.keys()
    text = command("eval", detector)[1]
    assert "AP50" in text
    assert "disc" in text


def test_find_pictures_asks_for_data_where_there_is_none(tmp_path, segmenter):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((segmenter / name).read_bytes())
    assert weft.load(folder).task.name == "segment"
    with pytest.raises(WeftError, match="has no data of its own"):
        find_pictures(folder)


def test_classifiers_have_no_masks(tmp_path, pictures, command):
    weft.save_model(weft.create_model("cvt_nano", num_classes=2), tmp_path / "model")
    code, _, err = command("predict", tmp_path / "model", pictures, "--out", tmp_path / "out")
    assert (code, "leave --out" in err) == (2, True)
    assert not (tmp_path / "out").exists()
    code, _, err = command("eval", tmp_path / "model", pictures, "--mode", "slide")
    assert (code, "holds a classifier, to which test.mode does not apply" in err) == (2, True)


def test_pictures_may_be_arrays_of_any_size():
    found = GivenPictures([np.zeros((5, 7, 3), np.uint8)], "segment")
    assert (found.names, found.target(0), found.kind) == (["picture 0"], None, MASKS)
