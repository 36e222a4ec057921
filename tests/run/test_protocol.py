"""Runs on a known set in its published protocol, from training to `weft eval`; and runs whose length is in steps."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import weft
from tests.data.test_named import cifar10, dtd
from tests.helpers.small_runs import CVT, TINY
from weft.config import Config, override
from weft.engine.lock import STATE
from weft.engine.log import METRICS, read_rows
from weft.errors import WeftError
from weft.run.evaluate import find_pictures
from weft.run.recipes import decide_length, find_recipe
from weft.run.start import stretch
from weft.study.ablate.plan import AblationRequest
from weft.study.ablate.plan import make_plan as ablation_plan
from weft.study.ablate.tables import find_table
from weft.study.cells.cell import Cell, train_cell
from weft.study.search.plan import make_plan


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A CIFAR-10 of 15 pictures to train on and 3 to test."""
    root = tmp_path_factory.mktemp("cifar")
    cifar10(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).exists())
        yield f"cifar10:{root}"


@pytest.fixture(scope="module")
def published(data, tmp_path_factory):
    return weft.train(data, out=tmp_path_factory.mktemp("published") / "run", **TINY)


def test_published_run_reports_on_the_test_part(published):
    folder = published.folder
    assert published.metrics["n"] == json.loads((folder / "evaluation.json").read_text())["n"] == 3
    assert not [key for row in read_rows(folder / METRICS) for key in row if key.startswith("val_")]
    page = (folder / "report.html").read_text()
    assert "<b>3</b><span>test pictures</span>" in page
    assert "the last epoch was kept" in page
    assert find_pictures(folder)[2].startswith("3 test pictures of cifar10:")


def test_published_run_keeps_the_last_weights(published):
    kept = load_file(published.folder / "model.safetensors")
    state = load_file(published.folder / STATE)
    last = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    assert kept.keys() <= last.keys()
    assert all(kept[key].equal(last[key]) for key in kept)


def test_training_accuracy(published, command):
    """VT's table 2 has it."""
    _, out, _ = command("eval", published.folder, "--split", "train", "--json")
    assert json.loads(out)["n"] == 15
    _, out, _ = command("eval", published.folder, "--split", "train")
    assert out.startswith("15 training pictures of cifar10:")


def test_a_part_held_out_chooses(data, tmp_path, capsys):
    settings = {**TINY, "quiet": False}
    run = weft.train(data, out=tmp_path / "run", data__val_fraction=0.2, **settings)
    said = capsys.readouterr()
    assert "12 pictures to train on, 3 held out to choose the best epoch; 3 test pictures at the end" in str(said)
    assert "3 test pictures; report" in str(said)
    assert [len(find_pictures(run.folder, split=part)[1]) for part in ("train", "val", "test")] == [12, 3, 3]
    assert find_pictures(run.folder)[2].startswith("3 test")
    assert "val_top1" in read_rows(run.folder / METRICS)[-1]


@pytest.mark.parametrize(("protocol", "part"), [("published", "test"), ("split", "validation")])
def test_a_known_set_elsewhere_is_evaluated_by_its_protocol(tmp_path, protocol, part):
    """Validation pictures of a known set have trained in its published protocol, so they are not what is measured."""
    dtd(tmp_path)  # which lies where the run has not seen it
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"source": "dtd:moved", "protocol": protocol}}))
    assert find_pictures(tmp_path, f"dtd:{tmp_path}")[2] == f"2 {part} pictures of dtd:{tmp_path}"


def test_patience_needs_pictures_to_judge_by(data, tmp_path):
    with pytest.raises(WeftError, match=r"run\.patience=2 has no validation pictures"):
        weft.train(data, out=tmp_path / "run", patience=2, **TINY)


def test_a_run_from_before_goes_on_and_is_evaluated_as_it_was(data, tmp_path):
    """Its split holds out a fifth and names no part to report on; its settings know of no protocol."""
    folder = weft.train(data, out=tmp_path / "run", data__protocol="split", **TINY).folder
    split = json.loads((folder / "split.json").read_text())
    assert split.pop("report_on") == "val"
    (folder / "split.json").write_text(json.dumps(split))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"].pop("protocol") == "split"
    assert config["run"].pop("steps") == 0
    config["data"]["val_fraction"] = 0.2
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert find_pictures(folder)[2].startswith("3 validation pictures")
    run = weft.train(resume=folder, epochs=4, allow_changes=True, quiet=True)
    assert run.metrics["n"] == 3
    assert [row["epoch"] for row in read_rows(folder / METRICS) if row["kind"] == "epoch"] == [1, 2, 3, 4]
    assert find_pictures(folder)[2].startswith("3 validation pictures")


@pytest.mark.parametrize(("protocol", "curve"), [({}, True), ({"data.protocol": "published"}, False)])
def test_studies_hold_out_unless_they_are_told(data, tmp_path, protocol, curve):
    settings = {"augment.img_size": 16, "run.batch": 4, "run.epochs": 1, "data.workers": 0, **protocol}
    cell = Cell(data, "cvt_nano", switches=CVT, settings=settings, recipe="small-data")
    (tmp_path / "cell.json").write_text(json.dumps(asdict(cell)))
    result = train_cell(tmp_path, "cpu")
    assert result.score is not None
    assert ("val_top1" in result.curve[-1]) == curve
    assert curve or result.metrics["n"] == 3  # all that test


def test_a_report_does_not_change_what_is_compared(data, tmp_path):
    """The last validation, not that of the best epoch, which a report is of."""
    settings = {"augment.img_size": 16, "run.batch": 4, "run.epochs": 1, "data.workers": 0, "run.report": True}
    cell = Cell(data, "cvt_nano", switches=CVT, settings=settings, recipe="small-data")
    (tmp_path / "cell.json").write_text(json.dumps(asdict(cell)))
    result = train_cell(tmp_path, "cpu")
    assert result.metrics == {key[4:]: value for key, value in result.curve[-1].items() if key.startswith("val_")}


def test_a_table_as_published_trains_on_all_and_reports_on_the_test_part(data, tmp_path):
    content = {"title": "Mine", "model": "cvt_nano", "recipe": "finetune", "data": ["cifar10"], "steps": {"cifar10": 5}}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump({**content, "rows": [{"name": "one", "switches": CVT}]}))
    table, cpu = find_table(str(tmp_path / "table.yaml")), torch.device("cpu")
    short, whole = (
        ablation_plan(table, AblationRequest(data=data, as_published=published), cpu, 1, quick=False)
        for published in (False, True)
    )
    assert (short.pictures, whole.pictures) == (12, 15)
    settings = whole.cell(table.rows[0], 0).settings
    assert (settings["data.protocol"], settings["run.steps"]) == ("published", 5)
    assert not {"data.protocol", "run.steps"} & short.cell(table.rows[0], 0, 1, 1.0).settings.keys()


def test_a_search_does_not_look_at_test_pictures(data):
    with pytest.raises(WeftError, match="chooses by its scores"):
        make_plan(data, "", {"data.protocol": "published"}, recipe="", space="", say=print)


# Steps --------------------------------------------------------------------------------------------------------------


def test_length_in_steps(data, tmp_path):
    settings = {key: value for key, value in TINY.items() if key != "epochs"}
    folder = weft.train(data, out=tmp_path / "run", run__steps=5, **{**settings, "batch": 5}).folder
    rows = [row for row in read_rows(folder / METRICS) if row["kind"] == "epoch"]
    assert [row["step"] for row in rows] == [3, 5]  # 15 pictures are 3 steps of an epoch
    weft.train(resume=folder, epochs=3, allow_changes=True, quiet=True)
    assert read_rows(folder / METRICS)[-1]["step"] == 9


@pytest.mark.parametrize(
    ("given", "steps", "factor"),
    [({"run.steps": 45_000}, 45_000, 1 / 2), ({"run.epochs": 6}, 0, 1 / 4), ({}, 90_000, 1)],
)
def test_lengths_of_a_recipe_follow_its_steps(given, steps, factor):
    recipe = find_recipe("vt-fpn-coco-stuff")
    given = decide_length(given)
    config = stretch(override(Config(), {**recipe, **given}), {*given}, "vt-fpn-coco-stuff")
    assert config.run.steps == steps
    assert config.optim.milestones == pytest.approx([16.234 * factor, 21.645 * factor])
    assert config.optim.warmup_epochs == pytest.approx(0.27056 * factor)
