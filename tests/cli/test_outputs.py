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
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("data:\n  source: elsewhere\n")
    shutil.copy(tmp_path / "model" / "report.html", tmp_path / "run" / "report.html")
    (tmp_path / "thesis.txt").write_text("three years")
    shutil.copy(tmp_path / PICTURE, tmp_path / "photo")
    (tmp_path / "damaged.JPG").write_text("no longer a picture")
    (tmp_path / "mine.csv").write_text("name,rmse,error\na,0.25,0.5\n")
    (tmp_path / "mine.json").write_text('[{"image_id": 1, "file_name": "a.png", "my": "notes"}]')
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
    "a picture beside one that was named": ([*PREDICT, PICTURE, "--csv", "data/class 0/1.png"], "lies inside the data"),
    "a new file beside a picture that was named": ([*PREDICT, PICTURE, "--csv", "data/class 0/new.csv"], "the data"),
    "a new folder beside a picture": (["explain", "model", PICTURE, "--out", "data/class 0/new"], "the data"),
    "a new file in the data": ([*PREDICT, "data", "--csv", "data/answers.csv"], "lies inside the data"),
    "a new folder in the data": (["explain", "model", "data", "--out", "data/new"], "lies inside the data"),
    "a study in the data": (["ablate", "cvt-position", "data", "--out", "data/study"], "lies inside the data"),
    "the table": (["check", "data/labels.csv", "--out", "data/labels.csv"], "lies inside the data"),
    "a picture of the table": (["check", "data/labels.csv", "--out", PICTURE], "is a picture"),
    "a picture without an ending": ([*PREDICT, "data", "--csv", "photo"], "is a picture"),
    "a picture that is damaged": (["bench", "cvt_nano", "--json", "damaged.JPG"], "is a picture"),
    "the validation table": (["check", "data", "--data.val", "more/labels.csv", "--out", "more/labels.csv"], "data"),
    "somebody's file": ([*PREDICT, "data", "--csv", "thesis.txt"], "Weft did not write it; choose another name"),
    "somebody's table": ([*PREDICT, "data", "--csv", "mine.csv"], "Weft did not write it"),
    "somebody's answers": ([*PREDICT, "data", "--json", "mine.json"], "Weft did not write it"),
    "what a link leads to": ([*PREDICT, "data", "--csv", "link"], "Weft did not write it"),
    "somebody's page": (["check", "data", "--out", "thesis.txt"], "Weft did not write it"),
    "somebody's numbers": (["bench", "cvt_nano", "--json", "thesis.txt"], "Weft did not write it"),
    "the report of a run": (["check", "data", "--out", "run/report.html"], "part of the run"),
    "the state of a run": (["bench", "cvt_nano", "--json", "run/state/../config.yaml"], "part of the run"),
    "part of the model": ([*PREDICT, "data", "--json", "model/config.json"], "part of the run"),
    "a pipe": ([*PREDICT, "data", "--csv", "pipe"], "no file"),
    "a device": ([*PREDICT, "data", "--csv", "/dev/null"], "no file"),
    "one file for two": ([*PREDICT, "data", "--csv", "new", "--json", "./new"], "the same file"),
}
MAY_BE_FORCED = {
    "somebody's file",
    "somebody's table",
    "somebody's answers",
    "what a link leads to",
    "somebody's page",
    "somebody's numbers",
}
HAS_NO_FORCE = {"a new folder beside a picture", "a new folder in the data", "a study in the data"}
CASES = [(case, False) for case in REFUSED]
CASES += [(case, True) for case in REFUSED if case not in MAY_BE_FORCED | HAS_NO_FORCE]


@pytest.mark.parametrize(("case", "forced"), CASES)
def test_nothing_of_others_is_overwritten(command, place, case, forced):
    args, words = REFUSED[case]
    before = content(place)
    answer = command(*args, *["--force"] * forced)
    refused(answer, words)
    assert content(place) == before


def test_what_a_table_names_is_not_replaced_even_if_it_does_not_look_like_a_picture(command, place):
    (place / "raw").write_text("not a picture any more")
    (place / "table.csv").write_text(
        LABELS.replace("path,label\n", "path,label\nraw,0\n").replace("class", "data/class")
    )
    before = content(place)
    refused(command("check", "table.csv", "--out", "raw", "--force"), "is one of the pictures")
    assert content(place) == before


@pytest.mark.parametrize("folder", ["data/class 0", "alone"])
def test_answers_may_lie_beside_a_picture_in_the_working_directory_or_one_that_is_alone(
    command, place, monkeypatch, folder
):
    (place / "alone").mkdir()
    shutil.copy(place / PICTURE, place / "alone" / "0.png")
    there = "." if folder != "alone" else "../../alone"
    monkeypatch.chdir(place / "data" / "class 0")
    code, _, err = command("predict", place / "model", f"{there}/0.png", "--csv", f"{there}/a.csv", "--device", "cpu")
    assert code == 0, err
    assert (place / folder / "a.csv").is_file()


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


def answers():
    """Each task's answers as text: as they usually are, with odd names, none, of pictures that cannot be read."""
    found = GivenPictures([np.zeros((8, 8, 3), np.uint8)] * 2)
    odd, error = 'a "b",\r\nc\\ \u2028 \udc80', "no such file or folder"
    square, box = np.zeros((8, 8), np.uint8), np.array([[0, 0, 4, 4]], np.float32)
    square[0] = 1
    object_ = [np.zeros(1, np.int64), np.ones(1, np.float32)]
    for names in (["x", odd], [odd, "x"]):
        for top in (1, 2, 5000):
            labels = [f"{odd} {i}" for i in range(top)]
            yield LabelWriter(top), [Prediction(name, labels, [1e-9] * top) for name in names]
        yield LabelWriter(5), [Prediction(name, ["a", "b"], [0.9, 0.1]) for name in names]
        yield LabelWriter(2), [Prediction(name, [], [], error) for name in names]
        masks = [MaskPrediction(names[0], square), MaskPrediction(names[1], None, error)]
        for some in (masks, masks[::-1], [masks[1]] * 2, [MaskPrediction(names[0], square * 0)] * 2):
            found.names = [mask.name for mask in some]
            yield MaskWriter(["a", odd, "rmse"], None, found, None, 2, [0, 1, 2], False), some  # type: ignore[arg-type]
        boxes = [ObjectPrediction(name, box, *object_, size=(8, 8)) for name in names]
        shapes = [{"size": [8, 8], "counts": "0" * outputs.BEGINNING}]
        masked = [ObjectPrediction(name, box, *object_, shapes, size=(8, 8)) for name in names]
        for some in (boxes, masked, [ObjectPrediction(name, size=(8, 8)) for name in names]):
            yield ObjectWriter(["a"], None, found, None, score=0.5, most=100), some  # type: ignore[arg-type]


OTHERS = [  # of others, though they resemble ours
    *("name,age\nx,7\n", "name,error\r\na,\r\n", "name,rmse,error\r\n", "name,rmse,error\r\na,0.25,0.5\r\n"),
    *("name,rmse,error\r\na,0.25,\r\n", "name,rmse,error\r\na,,0.5\r\n", "name,mae,rmse,error\r\na,0.25,0.5,\r\n"),
    *(
        "name,label_2,probability_1,error\r\n",
        "name,label_1,error\r\n",
        "name,class,score,error\r\n",
        "name,",
        'name,"error',
    ),
    *(
        '[{"name": "x", "age": 7}]',
        "[]",
        "[ ]\n",
        "[]\n[]\n",
        "{}",
        '[{"image_id": 1, "file_name": "x", "my": "notes"}]',
    ),
    *(
        '[\n {\n  "image_id": 1,\n  "file_name": "x",\n  "my": 1\n }\n]\n',
        '[{"name": "x", "labels": ["a"], "notes": ""}]',
    ),
    *('[\n  {\n    "name": "x",\n    "labels": [\n      "a"\n    ],\n    "notes": []\n  }\n]\n',),
    *("<!doctype html><title>mine</title>", LABELS),
]


def test_all_that_is_written_is_recognised_and_nothing_else(tmp_path):
    texts = []
    for writer, predictions in answers():
        for index, prediction in enumerate(predictions):
            writer.add(index, prediction)
        texts.append(writer.close())
    written = {(outputs.TABLE, text.csv) for text in texts} | {(outputs.PREDICTIONS, text.json) for text in texts}
    written.add((outputs.MEASUREMENTS, json.dumps({**facts(), "rows": []}, indent=2)))
    source = open_source(str(make_pictures(tmp_path / "data", each=1)))
    write_page(check(source, None), source, tmp_path / "page.html")
    written.add((outputs.PAGE, (tmp_path / "page.html").read_text()))
    others = [render("explain.html.j2", explanations=[], sections=[])]  # another page, which `check` does not replace
    for ours, text in written:
        (tmp_path / "file").write_text(text, errors="backslashreplace")
        assert outputs._begins(tmp_path / "file", ours), text[:200]
    for text in [*others, *OTHERS, *(path.read_text() for path in ROOT.glob("*.md"))]:
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
