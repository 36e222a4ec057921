"""A class that validates and never trains: said, and without a part in the score, from training to `weft eval`."""

import json
import shutil

import pytest

import weft
from tests.helpers.small_runs import TINY, make_pictures
from weft.config import read_yaml
from weft.engine.log import METRICS, read_rows
from weft.run.evaluate import evaluate, find_pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three classes in train/, one more in val/."""
    root = tmp_path_factory.mktemp("data")
    make_pictures(root / "val", classes=4, each=5, seed=1)
    make_pictures(root / "train", classes=3)
    return weft.train(str(root), out=tmp_path_factory.mktemp("runs") / "run", **TINY)


def test_a_class_that_only_validates_is_not_measured(run):
    assert run.metrics["n"] == 15  # of twenty
    assert run.metrics["unlearned"] == ["class 3"]
    best = [row for row in read_rows(run.folder / METRICS) if row["kind"] == "epoch" and row["best"]][-1]
    assert run.metrics["top1"] == best["val_top1"]
    report = json.loads((run.folder / "data_report.json").read_text())
    (problem,) = [problem for problem in report["problems"] if problem["kind"] == "untrained-class"]
    assert "is not measured: 'class 3'" in problem["text"]
    assert "there were no training pictures of it: class 3" in (run.folder / "report.html").read_text()


def test_evaluation_agrees_and_a_run_from_before_is_measured_as_it_was(run, tmp_path):
    source, indices, _ = find_pictures(run.folder)
    evaluation = evaluate(weft.load(run.folder), source, indices)
    assert evaluation.metrics() == run.metrics
    assert "Not measured: 'class 3', for training had no example of it." in list(evaluation.lines(run.metrics))
    before = shutil.copytree(run.folder, tmp_path / "run")
    report = json.loads((before / "data_report.json").read_text())
    del report["unlearned"]
    (before / "data_report.json").write_text(json.dumps(report))
    numbers = evaluate(weft.load(before), source, indices).metrics()
    assert numbers["n"] == 20
    assert numbers["top1"] == pytest.approx(0.75 * run.metrics["top1"])


def test_pictures_that_are_not_measured_are_not_called_unreadable(run, tmp_path, command):
    """`weft eval` counts those that cannot be read, and no others."""
    code, said, _ = command("eval", run.folder)
    assert (code, "cannot be read" in said) == (0, False)
    data = tmp_path / "data"
    shutil.copytree(read_yaml(run.folder / "config.yaml")["data.source"], data)
    (data / "val/class 1/2.png").write_bytes(b"no picture any more")
    code, said, _ = command("eval", run.folder, data)
    assert "; 1 cannot be read" in said
