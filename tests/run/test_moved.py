"""Data at another place than where they were trained on, and data whose classes are called otherwise."""

import json
import shutil
import signal
from pathlib import Path

import pytest

import weft
from tests.helpers.small_runs import EVERYTHING_RANDOM, differences, make_pictures, make_squares, refused, tiny_run
from weft.data.sources.open import open_source
from weft.engine.loop import Trainer
from weft.run.evaluate import evaluate


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    return tiny_run(data, tmp_path_factory.mktemp("runs") / "run", epochs=1).folder


@pytest.fixture
def moved(data, run, tmp_path) -> tuple[Path, Path]:
    """The data at a new place, and a run whose own place for them is empty."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    settings = (copy / "config.yaml").read_text()
    assert str(data) in settings
    (copy / "config.yaml").write_text(settings.replace(str(data), str(tmp_path / "gone")))
    return Path(shutil.copytree(data, tmp_path / "new place")), copy


def test_a_moved_copy_is_evaluated_by_the_runs_own_split(command, run, moved):
    place, copy = moved
    refused(command("eval", copy), "gone", f"If it was moved, say where to: weft eval {copy} DATA")
    code, out, err = command("eval", copy, place, "--json")
    assert code == 0, err
    found, known = json.loads(out), json.loads((run / "evaluation.json").read_text())
    assert "own split" in found["pictures"]
    assert {key: found[key] for key in known} == known
    (place / "class 0" / "1.png").unlink()  # no copy any more
    code, out, _ = command("eval", copy, place, "--json")
    assert json.loads(out)["n"] == 35
    assert "own split" not in out


def test_a_run_goes_on_where_its_data_are_now(command, monkeypatch, data, tmp_path):
    tiny_run(data, tmp_path / "whole", **EVERYTHING_RANDOM)
    shutil.copytree(data, tmp_path / "old")
    with monkeypatch.context() as patch:
        original, calls = Trainer.update, iter(range(100))

        def interrupted(self):
            if next(calls) == 4:
                signal.raise_signal(signal.SIGTERM)
            return original(self)

        patch.setattr(Trainer, "update", interrupted)
        assert tiny_run(tmp_path / "old", tmp_path / "run", **EVERYTHING_RANDOM).stopped
    (tmp_path / "old").rename(tmp_path / "new")
    refused(command("train", "--resume", tmp_path / "run"), "--data.source PLACE")
    shutil.copytree(tmp_path / "new", tmp_path / "other")
    (tmp_path / "other" / "class 1" / "3.png").write_bytes(b"something else")
    answer = command("train", "--resume", tmp_path / "run", "--data.source", tmp_path / "other")
    refused(answer, "the pictures of", "other", "--allow-changes")
    monkeypatch.chdir(tmp_path)
    code, _, err = command("train", "--resume", "run", "--data.source", "new")
    assert code == 0, err
    assert differences(tmp_path / "whole", tmp_path / "run") == []
    assert f"source: {tmp_path / 'new'}" in (tmp_path / "run" / "config.yaml").read_text()
    assert command("eval", "run")[0] == 0


def test_what_lies_in_the_data_moves_with_them(command, tmp_path):
    """Masks in a folder with a name that had to be given, and a class file."""
    root = make_squares(tmp_path / "old")
    (root / "masks").rename(root / "answers")
    (root / "kinds.txt").write_text("nothing\nred\ngreen\n")
    settings = dict(data__masks=root / "answers", data__classes=root / "kinds.txt", task="segment", recipe="segment")
    run = tiny_run(root, tmp_path / "run", epochs=1, img_size=48, head="fpn", **settings).folder
    known = json.loads((run / "evaluation.json").read_text())
    root.rename(tmp_path / "new")
    code, out, err = command("eval", run, tmp_path / "new", "--json")
    assert code == 0, err
    assert json.loads(out)["miou"] == known["miou"]


@pytest.fixture
def renamed(data, tmp_path) -> Path:
    """A class that is spelt otherwise, and one that no model knows."""
    place = Path(shutil.copytree(data, tmp_path / "renamed"))
    (place / "class 0").rename(place / "Class 0")
    (place / "class 2").rename(place / "gryphon")
    return place


def test_classes_that_match_are_measured_and_the_others_named(command, run, data, renamed):
    code, out, err = command("eval", run, renamed, "--split", "all")
    assert code == 0, err
    assert "24 pictures of classes that the model does not have, left out" in out
    assert "'Class 0' (if it is 'class 0': --classes 'Class 0=class 0') and 'gryphon'." in out
    assert "The model also knows 'class 0', 'class 2'" in out
    code, out, _ = command("eval", run, renamed, "--split", "all", "--json", "--classes", "Class 0=class 0")
    found = json.loads(out)
    assert found["n"] == 24
    assert found["notes"][0] == "'Class 0' counts as 'class 0'."
    mapped = ["--classes", "Class 0=class 0", "gryphon=class 2"]
    _, out, _ = command("eval", run, renamed, "--split", "all", "--json", *mapped)
    _, expected, _ = command("eval", run, data, "--split", "all", "--json")
    assert json.loads(out)["top1"] == json.loads(expected)["top1"]
    assert json.loads(out)["n"] == 36


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (["Pug"], ["no pair such as Pug=pug"]),
        (["Clas 0=class 0"], ["has no class 'Clas 0'", "Did you mean 'Class 0'"]),
        (["Class 0=Class 0"], ["The model has no class 'Class 0'", "Did you mean 'class 0'"]),
    ],
)
def test_wrong_pairs_get_one_line(command, run, renamed, classes, words):
    refused(command("eval", run, renamed, "--classes", *classes), *words)


def test_nothing_in_common_gets_one_line(command, run, tmp_path):
    place = make_pictures(tmp_path / "data")
    for number, folder in enumerate(sorted(place.iterdir())):
        folder.rename(place / f"{number} unknown")
    refused(command("eval", run, place), "has classes that training does not have")


def test_python_still_wants_known_classes(run, renamed):
    """Who passes a source and positions gets what was asked for, or an error."""
    source = open_source(str(renamed))
    with pytest.raises(weft.WeftError, match="classes that training does not have"):
        evaluate(weft.load(run), source, source.labels.argsort())
