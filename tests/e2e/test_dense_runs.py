"""Segmentation and detection from a folder on disk to files of answers: every head, all families, every layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import weft
from tests.helpers.small_runs import COLOURS, CVT, command, dense, make_pictures, make_squares, refused, tiny_run
from weft.config import Config, override, read_yaml
from weft.data.sources.open import open_configured
from weft.data.sources.source import Source
from weft.data.split import load_split
from weft.engine.log import read_rows
from weft.engine.state import read_header
from weft.run import session
from weft.run.train import name_settings
from weft.tasks.detect.coco import Detections
from weft.tasks.detect.evaluate import DetectEvaluation

Settings = dict[str, Any]

RUNS: dict[str, tuple[str, Settings]] = {  # head to layout of the data, and what is trained
    "fpn": ("masks", dict(model="ceit_nano", model__args={}, epochs=6)),
    "vt-fpn": ("coco", dict(model="cetnet_nano", model__args={}, epochs=8, task="segment")),
    "upernet": ("masks", dict(model="vt_resnet_nano", model__args={}, lr=5e-3, epochs=8)),
    "faster-rcnn": ("voc", dict(model="vitae_nano", model__args={}, epochs=6)),
    "mask-rcnn": ("coco", dict(model="cvt_nano", model__args=CVT, epochs=6)),
}


def settings_of(head: str) -> Settings:
    common: Settings = dict(batch=4) if "rcnn" in head else dict(batch=4, img_size=32, data__balance="loss")
    return dense(head, **common, **RUNS[head][1])


@pytest.fixture
def no_report(monkeypatch):
    """Its own tests are elsewhere, and it takes longer than these runs."""
    monkeypatch.setattr(session, "write_report", lambda *args, **values: "no page")


# The whole way ----------------------------------------------------------------------------------------------------


SLOW = ("fpn", "faster-rcnn")  # the other runs go almost all of their way, and test_dense_resume.py trains FPN


@pytest.mark.parametrize("head", [pytest.param(h, marks=pytest.mark.slow) if h in SLOW else h for h in RUNS])
def test_from_pictures_to_answers(tmp_path, head):
    detects = "rcnn" in head
    data = make_squares(tmp_path / "data", RUNS[head][0], count=24, side=48 if detects else 32)
    run = tiny_run(data, tmp_path / "run", **settings_of(head))
    assert_learned(run, constant_detections(run.folder) if detects else constant_mask(run.folder))
    assert_same_numbers(run)
    assert (run.folder / "report.html").stat().st_size > 10_000
    moved = run.folder.rename(tmp_path / "moved")
    assert_alone_is_enough(moved, data)
    (assert_objects if detects else assert_masks)(moved, data, tmp_path / "answers")


@pytest.mark.parametrize(("layout", "head"), [("voc", "faster-rcnn"), ("coco", "mask-rcnn")])
def test_demo_recipe_takes_boxes_without_outlines(tmp_path, no_report, layout, head):
    """It is what the docs recommend on a CPU, whatever the boxes."""
    data = make_squares(tmp_path / "data", layout, count=4)
    run = tiny_run(data, tmp_path / "run", recipe="demo-detect", epochs=1, img_size=48, batch=2).folder
    assert read_yaml(run / "config.yaml")["model.head"] == head


def assert_learned(run: weft.Run, constant: float) -> None:
    """The loss falls, and no answer that ignores the picture is as good."""
    losses = [row["train_loss"] for row in epochs_of(run.folder)]
    assert losses[-1] < 0.85 * losses[0]
    score = run.metrics["box_ap50"] if "box_ap50" in run.metrics else run.metrics["miou"]
    assert score > constant + 0.1
    assert run.metrics.get("mask_ap50", 1) > 0.1


def held_out(run: Path) -> tuple[Source, list[int]]:
    source = open_configured(chosen(run).data)
    return source, load_split(run / "split.json", source).val.tolist()


def constant_mask(run: Path) -> float:
    """The mIoU of the best single class for all pixels."""
    source, val = held_out(run)
    counts = np.bincount(np.stack([source.target(i) for i in val]).ravel())
    return counts.max() / counts.sum() / len(counts)


def constant_detections(run: Path) -> float:
    """The AP50 of each class's mean box, in all pictures."""
    source, val = held_out(run)
    truth = [source.target(i) for i in val]
    boxes, labels = np.concatenate([t.boxes for t in truth]), np.concatenate([t.labels for t in truth])
    classes = np.arange(len(source.classes))
    mean = np.stack([boxes[labels == label].mean(axis=0) for label in classes])
    found = [Detections(mean, classes, np.ones(len(classes), np.float32))] * len(val)
    names, sizes = [source.names[i] for i in val], [t.size for t in truth]
    return DetectEvaluation(names, list(source.classes), found, truth, sizes, masks=False).metrics()["box_ap50"]


def assert_same_numbers(run: weft.Run) -> None:
    """Validation, evaluation.json and `weft eval` agree to the last digit."""
    written = json.loads((run.folder / "evaluation.json").read_text())
    best = [row for row in epochs_of(run.folder) if row["best"]][-1]
    validated = {key.removeprefix("val_"): value for key, value in best.items() if key.startswith("val_")}
    assert validated
    assert validated == {key: written[key] for key in validated}
    evaluated = evaluate(run.folder)
    assert written == {key: evaluated[key] for key in written} == json.loads(json.dumps(run.metrics))


def evaluate(*args: object) -> dict[str, Any]:
    code, out, err = command("eval", *args, "--json", "--device", "cpu", "--workers", 0)
    assert code == 0, err
    numbers = json.loads(out)
    assert numbers.pop("pictures")  # in words
    return numbers


def assert_alone_is_enough(run: Path, data: Path) -> None:
    """Weights and config.json say everything; what else is in a run's folder is not needed."""
    model = run.parent / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / name, model)
    assert evaluate(model, data, "--split", "all") == evaluate(run, data, "--split", "all")


def answers_of(run: Path, data: Path, out: Path) -> tuple[list[Path], list[Any], Any]:
    """Three pictures, what Python predicts for them, and the JSON that the command writes."""
    pictures = sorted(data.rglob("1?.png"))[:3]
    code, _, err = command("predict", run, *pictures, "--out", out, "--device", "cpu", "--score", 0)
    assert code == 0, err
    options = {"score": 0.0} if "rcnn" in (run / "config.yaml").read_text() else {}
    predictions = weft.load(run, device="cpu").predict(pictures, **options)
    for picture in pictures:
        with Image.open(out / f"{picture.stem}.overlay.jpg") as overlay, Image.open(picture) as original:
            assert overlay.size == original.size
    return pictures, predictions, json.loads((out / "predictions.json").read_text())


def assert_masks(run: Path, data: Path, out: Path) -> None:
    pictures, predictions, content = answers_of(run, data, out)
    assert [row["name"] for row in content["pictures"]] == [str(picture) for picture in pictures]
    for prediction, row in zip(predictions, content["pictures"], strict=True):
        with Image.open(out / row["mask"]) as mask:
            np.testing.assert_array_equal(np.asarray(mask), prediction.mask)
        assert row["shares"] == {
            entry["name"]: (prediction.mask == entry["id"]).mean()
            for entry in content["classes"]
            if (prediction.mask == entry["id"]).any()
        }


def assert_objects(run: Path, data: Path, out: Path) -> None:
    pictures, predictions, rows = answers_of(run, data, out)
    classes = weft.load(run, device="cpu").classes
    assert sorted(classes) == sorted(COLOURS)
    assert len(rows) == sum(len(prediction.labels) for prediction in predictions) > 0
    for picture, prediction in zip(pictures, predictions, strict=True):
        mine = [row for row in rows if row["file_name"] == str(picture)]
        corners = [[*row["bbox"][:2], *np.add(row["bbox"][:2], row["bbox"][2:])] for row in mine]
        np.testing.assert_allclose(np.reshape(corners, (-1, 4)), prediction.boxes, atol=0.011)
        np.testing.assert_allclose([row["score"] for row in mine], prediction.scores, atol=1e-5)
        assert [row["category_name"] for row in mine] == [classes[label] for label in prediction.labels]
        shapes = [row["segmentation"] for row in mine if "segmentation" in row]
        assert shapes == (prediction.shapes or [])


def test_weights_go_from_one_head_to_another(tmp_path, no_report):
    """From a classifier to a segmenter to a detector and back to a segmenter: the backbone is what it was."""
    small: Settings = dict(img_size=32, batch=4, epochs=1, lr=1e-12, optim__warmup_lr=0.0, optim__min_lr=0.0)
    small |= dict(model__args={**CVT, "projection": "linear"})  # nothing but weights, which do not move
    masks = make_squares(tmp_path / "masks", "masks", count=6, side=32)
    boxes = make_squares(tmp_path / "boxes", "coco", count=6, side=32)
    first = tiny_run(make_pictures(tmp_path / "labels"), tmp_path / "0", **small)
    chain = [(masks, "fpn"), (boxes, "mask-rcnn"), (boxes, "faster-rcnn"), (masks, "upernet")]
    for number, (data, head) in enumerate(chain, start=1):
        run = tiny_run(data, tmp_path / str(number), **dense(head, **small), init=tmp_path / str(number - 1))
    old, new = (load_file(folder / "model.safetensors") for folder in (first.folder, run.folder))
    shared = {key: value for key, value in old.items() if f"backbone.trunk.{key}" in new}
    assert len(shared) > 20
    for key, value in shared.items():
        torch.testing.assert_close(new[f"backbone.trunk.{key}"], value, msg=key)


def epochs_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]


# Layouts ------------------------------------------------------------------------------------------------------------


CHOICES = {  # layout to task, head, number of classes and what `weft check` calls it
    "masks": ("segment", "fpn", 3, "masks: images/ with masks/"),
    "coco": ("detect", "mask-rcnn", 2, "COCO boxes in instances_train2017.json, with shapes"),
    "yolo": ("detect", "faster-rcnn", 2, "YOLO boxes"),
    "voc": ("detect", "faster-rcnn", 2, "VOC boxes"),
}


@pytest.fixture
def only_choices(monkeypatch):
    """Runs end where training would begin, with everything chosen and written down."""
    monkeypatch.setattr(session.RunSession, "build", lambda self: None)
    monkeypatch.setattr(session.RunSession, "prepare_new", session.RunSession.write_settings)
    monkeypatch.setattr(session.RunSession, "train", lambda self: weft.Run(self.folder, {}))


def chosen(run: Path) -> Config:
    return override(Config(), read_yaml(run / "config.yaml"))


@pytest.mark.parametrize("layout", CHOICES)
def test_layouts_need_no_option(tmp_path, only_choices, layout):
    task, head, classes, words = CHOICES[layout]
    data = make_squares(tmp_path / "data", layout)
    code, out, err = command("check", data)
    assert (code, err) == (0, "")
    assert words in out.splitlines()[0]
    assert f"12 pictures, {classes} classes" in out
    assert "width 48 (48 to 48), height 48 (48 to 48) pixels; PNG 12" in out
    assert not any(line.startswith(("error", "warning")) for line in out.splitlines())
    code, out, err = command("train", data, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "recipe auto:" in out
    assert "of 10 pictures" in out
    config = chosen(tmp_path / "run")
    assert (config.data.task, config.model.head) == (task, head)
    assert (config.model.name, config.optim.schedule) == ("vt_resnet_nano", "cosine")


def test_instances_can_be_segmented(tmp_path, only_choices):
    data = make_squares(tmp_path / "data", "coco")
    code, out, err = command("train", data, "--task", "segment", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "recipe auto:" in out
    assert (chosen(tmp_path / "run").data.task, chosen(tmp_path / "run").model.head) == ("segment", "fpn")
    code, out, _ = command("check", data, "--data.task", "segment")
    assert code == 0
    assert "12 pictures, 3 classes" in out  # the background is one
    refused(command("check", make_squares(tmp_path / "yolo", "yolo"), "--data.task", "segment"), "no shapes")


@pytest.mark.parametrize("layout", ["masks", "coco"])
def test_validation_from_a_second_source(tmp_path, no_report, layout):
    head = CHOICES[layout][1]
    first, second = (make_squares(tmp_path / name, layout, count=4, side=32, seed=i) for i, name in enumerate("ab"))
    small: Settings = dict(model__args=CVT, img_size=32, batch=4, epochs=1, val=str(second))
    run = tiny_run(first, tmp_path / "run", **dense(head, **small))
    assert run.metrics["n"] == 4
    assert evaluate(run.folder)["n"] == 4
    source, val = held_out(run.folder)
    files = sorted(file for file in second.rglob("*.png") if file.parent.name != "masks")
    assert sorted(Path(source.open(i)) for i in val) == files  # type: ignore[arg-type]


def test_masks_elsewhere_are_found_again(tmp_path, monkeypatch, no_report):
    """Paths that were given where the run began lead there from anywhere."""
    data = make_squares(tmp_path / "data", "masks", count=4, side=32)
    (data / "masks").rename(tmp_path / "elsewhere")
    (tmp_path / "names.txt").write_text("nothing\nred\ngreen\n")
    monkeypatch.chdir(tmp_path)
    small: Settings = dict(model__args=CVT, img_size=32, batch=2, epochs=1)
    run = tiny_run(
        "data/images", Path("run"), **dense("fpn", **small), data__masks="elsewhere", data__classes="names.txt"
    )
    monkeypatch.chdir("/")
    assert evaluate(tmp_path / run.folder)["per_class"][1]["name"] == "red"
    weft.train(resume=tmp_path / run.folder, quiet=True)


# Hostile masks and boxes --------------------------------------------------------------------------------------------


def stops_before_training(monkeypatch, data: Path, out: Path, *words: str, options: tuple[str, ...] = ()) -> None:
    """`weft check` lists it among the errors, `weft train` says it in one line, before there is a model."""
    code, text, err = command("check", data, *options)
    assert (code, err) == (1, ""), text
    errors = "\n".join(text.partition("error: ")[2:])
    assert all(word in errors for word in words), text
    monkeypatch.setattr("weft.run.start.RunSession", None)
    refused(command("train", data, "--out", out, "--device", "cpu", *options), *words[:1])
    assert not out.exists()


def save(mask: np.ndarray, file: Path, **options: Any) -> None:
    Image.fromarray(mask).save(file, **options)


HOSTILE_MASKS: dict[str, tuple[Any, list[str]]] = {
    "value": (lambda mask, file: save(np.maximum(mask, 7), file), ["masks/3.png", "value 7 in 1024 pixels"]),
    "colours": (lambda mask, file: save(np.stack([mask * 90, mask, mask], -1), file), ["masks/3.png", "RGB-coded"]),
    "JPEG": (lambda mask, file: save(mask, file, format="JPEG"), ["masks/3.png", "JPEG"]),
    "size": (lambda mask, file: save(mask[:30], file), ["masks/3.png", "32 x 30", "32 x 32"]),
    "damage": (lambda mask, file: file.write_bytes(file.read_bytes()[:60]), ["masks/3.png"]),
}


@pytest.mark.parametrize("harm", HOSTILE_MASKS)
def test_hostile_masks_stop_before_training(monkeypatch, tmp_path, harm):
    make, words = HOSTILE_MASKS[harm]
    data = make_squares(tmp_path / "data", "masks", count=6, side=32)
    (tmp_path / "names.txt").write_text("nothing\nred\ngreen\n")
    file = data / "masks/3.png"
    make(np.array(Image.open(file)), file)
    names = ("--data.classes", str(tmp_path / "names.txt"))
    stops_before_training(monkeypatch, data, tmp_path / "run", *words, options=names)


def change(name: str, value: Any) -> Any:
    return lambda content: content["annotations"][3].update({name: value})


def corners(content: dict) -> None:
    for entry in content["annotations"]:
        left, top, width, height = entry["bbox"]
        entry["bbox"] = [left, top, left + width, top + height]


def one_less(content: dict) -> None:
    for entry in content["annotations"]:
        entry["category_id"] -= 1


def same_picture_twice(content: dict) -> None:
    content["images"].append({**content["images"][1], "file_name": "0.png"})


HOSTILE_BOXES: dict[str, tuple[Any, str, list[str]]] = {  # harm to what does it, severity, words
    "outside": (change("bbox", [20, 20, 25, 5]), "warning", ["reaches beyond the picture", "1.png", "object 4", "45"]),
    "no width": (change("bbox", [5, 5, 0, 9]), "warning", ["less than a pixel wide", "1.png", "object 4"]),
    "negative": (change("bbox", [25, 25, -9, -9]), "warning", ["less than a pixel wide", "1.png", "object 4"]),
    "mix-up": (corners, "error", ["corners and sides of boxes are mixed up"]),
    "NaN": (change("bbox", [5, float("nan"), 9, 9]), "warning", ["not a number", "1.png", "object 4"]),
    "offset": (one_less, "error", ["off by one"]),
    "unknown class": (change("category_id", 9), "warning", ["class that has no name", "1.png", "class 9"]),
    "polygon": (change("segmentation", [[3, 3, 9, 9]]), "warning", ["fewer than three points", "1.png", "2 points"]),
    "crowd": (change("iscrowd", 1), "note", ["marked as crowd", "1.png"]),
    "missing picture": (lambda c: c["images"][1].update(file_name="no.png"), "warning", ["cannot be found", "no.png"]),
    "unlisted picture": (change("image_id", 99), "warning", ["not listed", "image 99", "object 4"]),
    "duplicate id": (change("id", 1), "warning", ["given twice", "id 1"]),
    "picture id": (same_picture_twice, "warning", ["given twice", "0.png"]),
    "nothing": (
        lambda content: content["annotations"].clear(),
        "error",
        ["without objects: there is nothing to learn"],
    ),
}


@pytest.mark.parametrize("harm", HOSTILE_BOXES)
def test_hostile_boxes_are_named_before_training(monkeypatch, only_choices, tmp_path, harm):
    """What can be left out or clipped is told by file, object and number; what spoils all of them stops."""
    make, severity, words = HOSTILE_BOXES[harm]
    data = make_squares(tmp_path / "data", "coco", count=6, side=32)
    file = data / "annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    make(content)
    file.write_text(json.dumps(content))
    if severity == "error":
        return stops_before_training(monkeypatch, data, tmp_path / "run", *words)
    code, out, err = command("check", data)
    assert (code, err) == (0, "")
    told = out.partition(f"{severity}: ")[2]
    assert all(word in told for word in words), out
    code, out, err = command("train", data, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, err) == (0, "")
    assert words[0] in out


def test_copies_on_both_sides_stop(monkeypatch, tmp_path):
    """The same picture in training and validation, with masks and with boxes."""
    for layout in ("masks", "coco"):
        root = tmp_path / layout
        sides = [make_squares(root / side, layout, count=4, side=32, seed=i) for i, side in enumerate(("train", "val"))]
        folder = "images" if layout == "masks" else "train2017"
        shutil.copy(sides[0] / folder / "1.png", sides[1] / folder / "1.png")
        options = ("--data.val", str(sides[1]))
        stops_before_training(monkeypatch, sides[0], root / "run", "on more than one side", "1.png", options=options)


@pytest.mark.parametrize(("head", "layout"), [("upernet", "masks"), ("mask-rcnn", "coco")])
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, dict(batch=4)),
        pytest.param(2, dict(batch=64), marks=pytest.mark.slow),
        pytest.param(3, dict(batch=1), marks=pytest.mark.slow),
        (7, dict(batch=5, run__micro_batch=2)),
    ],
)
def test_very_few_pictures_train(tmp_path, no_report, head, layout, count, changes):
    """Nothing to validate on, batches larger than the set, portions of one picture for BatchNorm."""
    data = make_squares(tmp_path / "data", layout, count=count, side=32)
    run = tiny_run(data, tmp_path / "run", **dense(head, model__args=CVT, img_size=32, epochs=1, **changes))
    pictures = [p for p in data.rglob("*.png") if p.parent.name != "masks"]
    assert not any(p.error for p in weft.load(run.folder, device="cpu").predict(pictures))


@pytest.mark.parametrize(("head", "layout"), [("fpn", "masks"), ("mask-rcnn", "coco")])
def test_pictures_that_turn_out_bad_are_left_out(tmp_path, no_report, head, layout):
    """Their headers are good, so it shows when they are decoded: in training, in validation, whole batches of them."""
    data = make_squares(tmp_path / "data", layout, count=12, side=32)
    files = sorted(data.rglob("*.png")) if layout == "coco" else sorted((data / "images").iterdir())
    for file in files[::2]:
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 50] = bytes(50)
        file.write_bytes(content)
    small: Settings = dict(model__args=CVT, img_size=32, batch=2, epochs=2, data__bad_files=1.0, data__val_fraction=0.4)
    run = tiny_run(data, tmp_path / "run", **dense(head, **small)).folder
    bad = {Path(name).name for name in read_header(run)["progress"].bad}
    assert len(bad) >= 4
    assert bad <= {file.name for file in files[::2]}
    assert_same_numbers(weft.Run(run, json.loads((run / "evaluation.json").read_text())))
    assert all(np.isfinite(row["train_loss"]) for row in epochs_of(run))


def test_validation_without_an_object_is_no_number(tmp_path):
    data = make_squares(tmp_path / "data", "coco", count=6, side=32)
    (data / "val2017").mkdir()
    for number in range(2):
        save(np.full((32, 32, 3), 90 * number, np.uint8), data / f"val2017/{number}.png")
    content = json.loads((data / "annotations/instances_train2017.json").read_text())
    content |= {"images": content["images"][:2], "annotations": []}
    (data / "annotations/instances_val2017.json").write_text(json.dumps(content))
    small = options(dense("mask-rcnn", model__args=CVT, img_size=32, epochs=1))
    code, out, err = command("train", data, *small, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "mask AP undefined on 2 pictures" in out.replace("\n", " ")
    metrics = evaluate(tmp_path / "run")
    assert (metrics["n"], metrics["objects"], metrics["mask_ap"]) == (2, 0, None)
    code, out, _ = command("eval", tmp_path / "run")
    assert code == 0


def options(settings: Settings) -> list[str]:
    """Settings as the command line has them."""
    settings = dict(settings)
    recipe, _ = settings.pop("recipe"), settings.pop("quiet")
    named = name_settings(settings).items()
    return [f"--recipe={recipe}", *(f"--{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in named)]


# Wrong settings -----------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[str, list[str], list[str]]] = {  # layout, options, words
    "segmenting labels": ("labels", ["--head", "upernet"], ["model.head=upernet", "classify", "linear"]),
    "masks of labels": ("labels", ["--task", "segment"], ["segment"]),
    "segmenting boxes": ("voc", ["--head", "fpn"], ["model.head=fpn", "detect", "faster-rcnn"]),
    "detecting masks": ("masks", ["--head", "mask-rcnn"], ["model.head=mask-rcnn", "segment", "fpn"]),
    "no shapes": ("yolo", ["--head", "mask-rcnn"], ["no shapes", "faster-rcnn"]),
    "no such head": ("masks", ["--head", "uppernet"], ["model.head='uppernet'", "upernet"]),
    "no such task": ("masks", ["--task", "segmentation"], ["data.task='segmentation'", "segment"]),
    "mixup": ("masks", ["--augment.mixup", "0.2"], ["augment.mixup", "segment"]),
    "cutmix": ("coco", ["--augment.cutmix", "1"], ["augment.cutmix", "detect"]),
    "policy": ("masks", ["--augment.policy", "rand-m9"], ["augment.policy"]),
    "erasing": ("coco", ["--augment.erase", "0.2"], ["augment.erase"]),
    "teacher": ("masks", ["--teacher", "resnet18"], ["loss.teacher"]),
    "dropout": ("masks", ["--model.drop", "0.1"], ["model.drop"]),
    "sampler": ("masks", ["--balance", "sampler"], ["data.balance=sampler"]),
    "weights": ("coco", ["--balance", "loss"], ["data.balance=loss"]),
    "logits": ("coco", ["--balance", "logit-adjust"], ["data.balance=logit-adjust"]),
    "loss of pixels": ("coco", ["--loss.kind", "dice"], ["loss.kind=dice", "detect"]),
    "loss of labels": ("masks", ["--loss.kind", "bce"], ["loss.kind=bce", "segment"]),
    "scales": ("coco", ["--test.scales", "[0.5, 1]"], ["test.scales", "detect"]),
    "mirror": ("coco", ["--test.flip"], ["test.flip", "detect"]),
    "no scales": ("masks", ["--test.scales", "[]"], ["test.scales"]),
    "window": ("masks", ["--test.overlap", "1"], ["test.overlap", "below 1"]),
    "head's argument": ("masks", ["--model.head_args.chanels", "8"], ["'chanels'", "'channels'"]),
    "detector's argument": ("coco", ["--model.head_args.anchor_size", "8"], ["'anchor_size'", "'anchor_sizes'"]),
    "few anchors": ("coco", ["--model.head_args.anchor_sizes", "[8, 16]"], ["anchor_sizes", "5 sizes"]),
    "norm": ("masks", ["--model.head_args.norm", "layer"], ["norm", "group"]),
    "tokens": ("masks", ["--head", "vt-fpn", "--model.head_args.channels", "20"], ["channels=20", "multiple of 16"]),
    "width": ("masks", ["--model.head_args.channels", "0"], ["channels"]),
    "text": ("masks", ["--model.head_args.channels", "wide"], ["channels"]),
    "size": ("masks", ["--rescale", "2"], ["--rescale"]),
    "rescale": ("masks", ["--augment.rescale", "[2, 1]"], ["augment.rescale"]),
    "no classes": ("masks", ["--data.classes", "nowhere.txt"], ["nowhere.txt"]),
    "no masks": ("masks", ["--data.masks", "nowhere"], ["nowhere"]),
    "two tasks": ("masks", ["--val", "LABELS"], []),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    make_pictures(root / "labels")
    for layout in CHOICES:
        make_squares(root / layout, layout, count=6, side=32)
    return root


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_get_one_line(monkeypatch, sets, tmp_path, case):
    layout, given, words = WRONG[case]
    monkeypatch.setattr(session.RunSession, "train", None)  # is never begun
    given = [str(sets / "labels") if word == "LABELS" else word for word in given]
    refused(command("train", sets / layout, *given, "--out", tmp_path / "run", "--device", "cpu"), *words)
    assert not (tmp_path / "run/state/last.safetensors").exists()


@pytest.mark.parametrize(("layout", "other"), [("masks", "labels"), ("coco", "masks")])
def test_data_for_another_task_are_refused_in_evaluation(sets, tmp_path, no_report, layout, other):
    small: Settings = dict(model__args=CVT, img_size=32, batch=4, epochs=1)
    run = tiny_run(sets / layout, tmp_path / "run", **dense(CHOICES[layout][1], **small))
    refused(command("eval", run.folder, sets / other), str(sets / other), CHOICES[layout][0])
