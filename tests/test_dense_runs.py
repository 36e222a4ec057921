"""Segmentation and detection from a folder on disk to files of answers: every head, all families, every layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import weft
from tests.small_runs import (
    COLOURS,
    CVT,
    TINY,
    command,
    dense,
    make_pictures,
    make_squares,
    refused,
    tiny_run,
)
from weft.analysis.detections import DetectEvaluation
from weft.data.sources import Source, open_configured
from weft.data.split import load_split
from weft.engine.log import read_rows
from weft.tasks.coco import Found

Settings = dict[str, Any]

RUNS: dict[str, tuple[str, Settings]] = {  # head to layout of the data, and what is trained
    "fpn": ("masks", dict(model="ceit_nano", model__args={}, epochs=6)),
    "vt-fpn": ("coco", dict(model="cetnet_nano", model__args={}, epochs=7, task="segment")),
    "upernet": ("masks", dict(model="vt_resnet_nano", model__args={}, lr=5e-3, epochs=8)),
    "faster-rcnn": ("voc", dict(model="vitae_nano", model__args={}, epochs=6)),
    "mask-rcnn": ("coco", dict(model="cvt_nano", model__args=CVT, epochs=6)),
}


def settings_of(head: str) -> Settings:
    common: Settings = dict(batch=4) if "rcnn" in head else dict(batch=4, img_size=32, data__balance="loss")
    return dense(head, **common, **RUNS[head][1])


# The whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", RUNS)
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


def assert_learned(run: weft.Run, constant: float) -> None:
    """The loss falls, and no answer that ignores the picture is as good."""
    losses = [row["train_loss"] for row in epochs_of(run.folder)]
    assert losses[-1] < 0.8 * losses[0]
    score = run.metrics["box_ap50"] if "box_ap50" in run.metrics else run.metrics["miou"]
    assert score > constant + 0.1
    assert run.metrics.get("mask_ap50", 1) > 0.1


def held_out(run: Path) -> tuple[Source, list[int]]:
    config = weft.config.override(weft.config.Config(), weft.config.read_yaml(run / "config.yaml"))
    source = open_configured(config.data)
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
    found = [Found(mean, classes, np.ones(len(classes), np.float32))] * len(val)
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
    assert len(rows) == sum(len(prediction.labels) for prediction in predictions) > 0
    for picture, prediction in zip(pictures, predictions, strict=True):
        mine = [row for row in rows if row["file_name"] == str(picture)]
        corners = [[*row["bbox"][:2], *np.add(row["bbox"][:2], row["bbox"][2:])] for row in mine]
        np.testing.assert_allclose(np.reshape(corners, (-1, 4)), prediction.boxes, atol=0.011)
        np.testing.assert_allclose([row["score"] for row in mine], prediction.scores, atol=1e-5)
        assert [row["category_name"] for row in mine] == [list(COLOURS)[label] for label in prediction.labels]
        shapes = [row["segmentation"] for row in mine if "segmentation" in row]
        assert shapes == (prediction.shapes or [])


def epochs_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]
