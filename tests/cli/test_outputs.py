"""Files that commands write: a mistyped name costs nobody a picture, a table or a thesis."""

import json
import os
import shutil

import numpy as np
import pytest
import timm

import weft
from tests.helpers.places import ROOT
from tests.helpers.small_runs import make_pictures, refused
from weft.cli import outputs
from weft.data.check.check import check
from weft.data.given import GivenPictures
from weft.data.sources.open import open_source
from weft.report.check_page import write_page
from weft.report.page import render
from weft.study.speed.report import facts
from weft.tasks.classify.predict import LabelWriter, Prediction
from weft.tasks.detect.predict import ObjectPrediction, ObjectWriter
from weft.tasks.segment.predict import MaskPrediction, MaskWriter

LABELS = "path,label\n" + "".join(f"class {c}/{i}.png,{c}\n" for c in range(2) for i in range(2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return weft.save_model(timm.create_model("cvt_nano", num_classes=2), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def place(tmp_path, monkeypatch, model):
    """A folder to work in: data/, a table of it, a model/, and a file that is not Weft's."""
    make_pictures(tmp_path / "data", classes=2, each=2)
    (tmp_path / "data" / "labels.csv").write_text(LABELS)
    shutil.copytree(tmp_path / "data", tmp_path / "more")
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "report.html").write_text(render("explain.html.j2", explanations=[], sections=[]))
    (tmp_path / "thesis.txt").write_text("three years")
    (tmp_path / "link").symlink_to("thesis.txt")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PICTURE = "data/class 0/0.png"
PREDICT = ["predict", "model", "--device", "cpu"]
REFUSED = {
    "a picture": ([*PREDICT, "data/class 0", "--csv", PICTURE], "lies inside the data"),
    "a picture that was named": ([*PREDICT, PICTURE, "--json", PICTURE], "lies inside the data"),
    "a picture of a pattern": ([*PREDICT, "data/class ?/*.png", "--csv", PICTURE], "lies inside the data"),
    "a new file in the data": ([*PREDICT, "data", "--csv", "data/answers.csv"], "lies inside the data"),
    "a new folder in the data": (["explain", "model", "data", "--out", "data/new"], "lies inside the data"),
    "a study in the data": (["ablate", "cvt-position", "data", "--out", "data/study"], "lies inside the data"),
    "the table": (["check", "data/labels.csv", "--out", "data/labels.csv"], "lies inside the data"),
    "a picture of the table": (["check", "data/labels.csv", "--out", PICTURE], "Weft did not write it"),
    "the validation table": (["check", "data", "--data.val", "more/labels.csv", "--out", "more/labels.csv"], "data"),
    "somebody's file": ([*PREDICT, "data", "--csv", "thesis.txt"], "Weft did not write it; choose another name"),
    "what a link leads to": ([*PREDICT, "data", "--csv", "link"], "Weft did not write it"),
    "somebody's page": (["check", "data", "--out", "thesis.txt"], "Weft did not write it"),
    "somebody's numbers": (["bench", "cvt_nano", "--json", "thesis.txt"], "Weft did not write it"),
    "the report of a run": (["check", "data", "--out", "model/report.html"], "Weft did not write it"),
    "part of the model": ([*PREDICT, "data", "--json", "model/config.json"], "part of the run"),
    "a pipe": ([*PREDICT, "data", "--csv", "pipe"], "no file"),
    "a device": ([*PREDICT, "data", "--csv", "/dev/null"], "no file"),
    "one file for two": ([*PREDICT, "data", "--csv", "new", "--json", "./new"], "the same file"),
}
MAY_BE_FORCED = {
    "somebody's file",
    "the report of a run",
    "what a link leads to",
    "somebody's page",
    "somebody's numbers",
}
HAS_NO_FORCE = {"a new folder in the data", "a study in the data"}
CASES = [(case, False) for case in REFUSED]
CASES += [(case, True) for case in REFUSED if case not in MAY_BE_FORCED | HAS_NO_FORCE]


@pytest.mark.parametrize(("case", "forced"), CASES)
def test_nothing_of_others_is_overwritten(command, place, case, forced):
    args, words = REFUSED[case]
    before = content(place)
    answer = command(*args, *["--force"] * forced)
    refused(answer, "is one of the pictures" if forced and case == "a picture of the table" else words)
    assert content(place) == before


@pytest.mark.parametrize(
    ("args", "file"),
    [
        ([*PREDICT, "data", "--csv"], "a.csv"),
        ([*PREDICT, "data", "--json"], "a.json"),
        ([*PREDICT, "data", "--csv"], "model/a.csv"),
        ([*PREDICT, "data", "--csv"], "empty"),
        (["check", "data", "--quick", "--out"], "a.html"),
    ],
)
def test_what_weft_wrote_is_written_again(command, place, args, file):
    for _ in range(2):
        code, _, err = command(*args, file)
        assert code == 0, err
    assert (place / file).stat().st_size > 100


def test_pictures_that_a_run_was_trained_on_are_never_replaced(command, place, tmp_path):
    """Not even by force, and where other pictures are predicted."""
    trained = tmp_path / "trained"
    (trained / "a").mkdir(parents=True)
    picture = next(path for path in (place / "data").rglob("*") if path.suffix in (".png", ".jpg"))
    shutil.copy(picture, trained / "a" / "one.png")
    (place / "model" / "config.yaml").write_text(f"data:\n  source: {trained}\n")
    before = (trained / "a" / "one.png").read_bytes()
    for file in ("one.png", "new.csv"):
        answer = command(*PREDICT, "data", "--csv", trained / "a" / file, "--force")
        assert answer[0] == 2, answer
    for name in ("predict", "explain"):
        refused(command(name, "model", "data", "--out", trained / "new"), "lies inside the data")
    assert [path.name for path in (trained / "a").iterdir()] == ["one.png"]
    assert (trained / "a" / "one.png").read_bytes() == before


def test_force_replaces_what_a_link_leads_to(command, place):
    code, _, err = command(*PREDICT, "data", "--csv", "link", "--force")
    assert code == 0, err
    assert (place / "link").is_symlink()
    assert (place / "thesis.txt").read_text().startswith("name,label_1,")


def test_all_that_is_written_is_recognised_and_nothing_else(tmp_path):
    found = GivenPictures(np.zeros((8, 8, 3), np.uint8))
    labels, masks, objects = LabelWriter(2), MaskWriter(["a", "b"], None, found, None, 2, [0, 1], False), None  # type: ignore[arg-type]
    labels.add(0, Prediction("x", ["a", "b"], [0.9, 0.1]))
    masks.add(0, MaskPrediction("x", np.zeros((8, 8), np.uint8)))
    objects = ObjectWriter(["a"], None, found, None, score=0.5, most=100)  # type: ignore[arg-type]
    box = np.array([[0, 0, 4, 4]], np.float32)
    objects.add(0, ObjectPrediction("x", box, np.zeros(1, np.int64), np.ones(1, np.float32), size=(8, 8)))
    nothing = ObjectWriter(["a"], None, found, None, score=0.5, most=100)  # type: ignore[arg-type]
    nothing.add(0, ObjectPrediction("x", size=(8, 8)))
    texts = [writer.close() for writer in (labels, masks, objects, nothing)]
    written = {(outputs.TABLE, text.csv) for text in texts} | {(outputs.PREDICTIONS, text.json) for text in texts}
    written.add((outputs.MEASUREMENTS, json.dumps({**facts(), "rows": []}, indent=2)))
    source = open_source(str(make_pictures(tmp_path / "data", each=1)))
    write_page(check(source, None), source, tmp_path / "page.html")
    written.add((outputs.PAGE, (tmp_path / "page.html").read_text()))
    others = [render("explain.html.j2", explanations=[], sections=[])]  # another page, which `check` does not replace
    others += ["name,age\nx,7\n", '[{"name": "x", "age": 7}]', "<!doctype html><title>mine</title>", "{}", LABELS]
    for ours, text in written:
        (tmp_path / "file").write_text(text)
        assert outputs._begins(tmp_path / "file", ours), text[:200]
    for text in [*others, *(path.read_text() for path in ROOT.glob("*.md"))]:
        (tmp_path / "file").write_text(text)
        kinds = outputs.PAGE, outputs.TABLE, outputs.PREDICTIONS, outputs.MEASUREMENTS
        assert not any(outputs._begins(tmp_path / "file", ours) for ours in kinds), text[:200]


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_on_a_terminal_are_clean(capsys, monkeypatch, terminal):
    """Programs get every character as it is."""
    text = 'name,error\r\n"\x1b[2Jcat",\r\n'
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    outputs.OutputFile("csv", "-", outputs.TABLE).write(text)
    out = capsys.readouterr().out
    assert out == ('name,error\n"\\x1b[2Jcat",\n' if terminal else text)
