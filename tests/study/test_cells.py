"""Cells are trained once, whatever happens to workers, files and parents; a budget is shared among them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.helpers.play_workers import play, times_trained  # noqa: F401  a fixture
from tests.helpers.small_runs import CVT, command, make_pictures, refused
from weft import WeftError
from weft.engine.lock import STATE
from weft.study.ablate.budget import Pace, choose_length, choose_pilots, find_paces
from weft.study.ablate.costs import Cost
from weft.study.ablate.run import may_start_until
from weft.study.ablate.tables import TableRow
from weft.study.cells.cell import (
    LEFT_OUT,
    RESULT,
    Cell,
    Result,
    cell_folder,
    read_curve,
    read_result,
    train_cell,
    whole_epochs,
)
from weft.study.cells.workers import WorkerPool, run_cells, worker_devices

CELL = Cell("data", "cvt_nano", 0, {"pos_embed": "first"}, {"run.epochs": 1, "data.fraction": 0.5})

# How long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "answer"),
    [  # 2 rows x 2 seeds: 40 s beside the steps, and 10 + 20 s for each seed's epoch of 1,000 pictures
        (40 + 60 * 7.5, (7, 1.0, True)),
        (40 + 60 * 2.4, (3, 0.8, True)),
        (40 + 60 * 0.5, (1, 0.5, True)),
        (30, (1, 0.1, False)),  # ten steps of 10 pictures are the least
    ],
)
def test_budget_is_shared_among_all_cells(seconds, answer):
    rows = [TableRow("fast", None, None), TableRow("slow", None, None)]
    paces = {"fast": Pace(speed=100, beside=10), "slow": Pace(speed=50, beside=10)}
    assert choose_length(rows, paces, pictures=1000, batch=10, seeds=2, seconds=seconds) == answer


@pytest.mark.parametrize(("seconds", "answer"), [(1000, (9, 1.0, True)), (240, (3, 0.8, True)), (60, (3, 0.2, True))])
def test_epochs_of_every_row_are_whole(seconds, answer):
    """A row that takes 1.67 times as many epochs of 60 % of the pictures, beside one that is trained once."""
    rows = [TableRow("all", None, None), TableRow("part", None, None, epochs=1.6667, fraction=0.6)]
    paces = {row.name: Pace(speed=20, beside=0) for row in rows}
    assert choose_length(rows, paces, pictures=1000, batch=10, seeds=1, seconds=seconds) == answer


@pytest.mark.parametrize(
    ("epochs", "part", "answer"),
    [
        (5, 0.2, (5, 0.2)),
        (1 / 0.6, 0.6, (2, 0.5)),
        (10 / 0.6, 0.6, (17, 10 / 17)),
        (1.4, 1.0, (2, 0.7)),
        (0.3, 1, (1, 0.3)),
    ],
)
def test_whole_epochs_are_the_same_work(epochs, part, answer):
    assert whole_epochs(epochs, part) == (answer[0], pytest.approx(answer[1]))


def test_a_training_of_one_step_has_a_pace():
    """No time lies between two steps, so its speed is not known."""
    result = Result(CELL, curve=[{"epoch": 1, "step": 1, "seconds": 2.0}], seconds=5.0)
    paces = find_paces([TableRow("one", None, None), TableRow("other", None, None)], {"one": result}, {}, batch=8)
    assert paces["one"] == paces["other"] == Pace(speed=4.0, beside=3.0)


@pytest.mark.parametrize(("workers", "names"), [(1, ["base"]), (2, ["base", "slow"]), (9, ["base", "slow", "fast"])])
def test_pilots_are_the_base_and_the_slowest(workers, names):
    rows = [TableRow(name, None, None) for name in ("fast", "base", "slow")]
    costs = {"fast": Cost(1, 1, 90), "base": Cost(1, 1, 50), "slow": Cost(1, 1, 10)}
    assert [row.name for row in choose_pilots(rows, "base", costs, workers)] == names


@pytest.mark.parametrize(
    ("seed", "left", "answer"),
    [(0, -5, True), (1, 9, False), (1, 11, True), (2, 9, False)],
)
def test_later_seeds_are_left_out_where_time_ends(seed, left, answer):
    """The same row took 10 s with the first seed; the first seed of all rows is trained in any case."""
    done = [Result(CELL, {"top1": 0.5}, seconds=10.0), Result(replace(CELL, model="m"), {"top1": 0.5}, seconds=99.0)]
    assert may_start_until(time.monotonic() + left)(replace(CELL, seed=seed), done) == answer


def test_longer_rows_take_more_of_it():
    rows = [TableRow("once", None, None), TableRow("thrice", None, None, epochs=3)]
    paces = {row.name: Pace(speed=100, beside=0) for row in rows}
    assert choose_length(rows, paces, pictures=1000, batch=10, seeds=1, seconds=400)[0] == 10


# Cells --------------------------------------------------------------------------------------------------------------


def test_key_is_that_of_the_content():
    same = replace(CELL, settings={"data.fraction": 0.5, "run.epochs": 1})
    assert same.key == CELL.key
    others = [replace(CELL, seed=1), replace(CELL, switches={}), replace(CELL, recipe="quick"), replace(CELL, data="d")]
    assert len({cell.key for cell in [CELL, *others]}) == 5


def write_result(study: Path, cell: Cell, text: str | None = None) -> Path:
    file = cell_folder(study, cell) / RESULT
    file.parent.mkdir(parents=True, exist_ok=True)
    result = Result(cell, metrics={"top1": 0.5}, curve=[{"epoch": 1}], speed=10.0, seconds=1.0)
    file.write_text(json.dumps(asdict(result)) if text is None else text)
    return file


def test_result_is_read_back(tmp_path):
    write_result(tmp_path, CELL)
    result = read_result(tmp_path, CELL)
    assert (result.cell, result.score, result.error) == (CELL, 0.5, "")
    assert read_result(tmp_path, replace(CELL, seed=1)) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", '{"cell": {}}', '{"cell": {"data": "data", "model": "cvt_nano"}, "metrics": {}}'],
)
def test_damaged_result_does_not_count(tmp_path, text):
    write_result(tmp_path, CELL, text)
    assert read_result(tmp_path, CELL) is None


def test_result_of_another_cell_does_not_count(tmp_path):
    other = replace(CELL, seed=1)
    write_result(tmp_path, CELL, write_result(tmp_path, other).read_text())
    assert read_result(tmp_path, CELL) is None


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


# Workers ------------------------------------------------------------------------------------------------------------


def seeds(*numbers: int) -> list[Cell]:
    return [replace(CELL, seed=number) for number in numbers]


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_cell_is_trained_once(play, jobs):  # noqa: F811
    cells, seen = seeds(0, 1, 2, 3), []
    results = run_cells(play, cells[:3], jobs=jobs, device="cpu", watch=seen.append)
    assert [result.score for result in results] == [0.0, 0.1, 0.2]
    assert set(seen[-1].values()) == {"done"}
    results = run_cells(play, [*cells, cells[0]], jobs=jobs, device="cpu")
    assert [result.score for result in results] == [0.0, 0.1, 0.2, 0.3, 0.0]
    assert [times_trained(play, cell) for cell in cells] == [1, 1, 1, 1]


def test_cells_that_do_not_begin_are_left_out(play):  # noqa: F811
    cells, seen = seeds(0, 1, 2), []
    results = run_cells(
        play, cells, jobs=1, device="cpu", watch=seen.append, may_start=lambda cell, done: len(done) != 1
    )
    assert [result.score for result in results] == [0.0, None, 0.2]
    assert results[1].error == seen[-1][cells[1].key] == LEFT_OUT
    assert not cell_folder(play, cells[1]).exists()


def test_no_process_is_left_behind(play):  # noqa: F811
    pool = WorkerPool(play, seeds(0, 7, 1), ["cpu", "cpu"], None)
    pool.run()
    assert all(worker.returncode is not None and worker.stdout.closed for worker in pool.workers)


@pytest.mark.parametrize(
    ("seed", "said"),
    [(6, "its process ended in the middle of an answer"), (7, "its process ended with exit code 3"), (8, "bad luck")],
)
def test_others_go_on_where_one_fails(play, seed, said):  # noqa: F811
    cells, seen = seeds(0, seed, 1), []
    results = run_cells(play, cells, jobs=1, device="cpu", watch=seen.append)
    assert [result.score for result in results] == [0.0, None, 0.1]
    assert results[1].error.startswith(said)
    assert seen[-1][cells[1].key].startswith(f"failed: {said}")
    assert read_result(play, cells[1]) is None  # so the next sitting tries again


def test_damaged_result_is_made_again(play):  # noqa: F811
    cells = seeds(0, 1)
    run_cells(play, cells, jobs=1, device="cpu")
    (cell_folder(play, cells[1]) / RESULT).write_text("{")
    assert [result.score for result in run_cells(play, cells, jobs=1, device="cpu")] == [0.0, 0.1]
    assert [times_trained(play, cell) for cell in cells] == [1, 2]


LOCK = """
import fcntl, os, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.write(f"process {os.getpid()} on this machine")
    file.flush()
    print("locked", flush=True)
    time.sleep(60)
"""


def test_second_process_is_refused(play, pictures):  # noqa: F811
    """Before it plans anything; a dead one holds nothing."""
    table = play.parent / "mine.yaml"
    table.write_text(json.dumps({"title": "Mine", "model": "cvt_nano", "rows": [{"name": "a", "switches": CVT}]}))
    (play / "state").mkdir(parents=True)
    ablate = ["ablate", table, pictures, "--epochs", 1, "--seeds", 1, "--out", play, "--device", "cpu"]
    other = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(play / "state" / "lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "locked\n"
        refused(command(*ablate), f"is in use by process {other.pid}")
        assert not (play / "plan.json").exists()
    finally:
        other.kill()
        other.wait()
    assert command(*ablate)[0] == 0


def test_worker_devices(monkeypatch):
    assert worker_devices("cpu", 3) == ["cpu"] * 3
    assert 1 <= len(worker_devices("cpu", 0)) <= 4
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert worker_devices("auto", 0) == ["cuda:0", "cuda:1"]
    assert worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker_devices("cuda:1", 2) == ["cuda:1", "cuda:1"]


# A real one ---------------------------------------------------------------------------------------------------------


def tiny(pictures: Path, **settings) -> Cell:
    common = {"run.epochs": 2, "run.minutes": 0, "run.batch": 8, "augment.img_size": 16, "data.workers": 0}
    return Cell(str(pictures), "cvt_nano", 1, CVT, {**common, **settings}, "quick")


def test_cell_is_a_run(pictures, tmp_path):
    cell = tiny(pictures)
    folder = cell_folder(tmp_path, cell)
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps(asdict(cell)))
    (folder / "run").mkdir()
    (folder / "run" / "left over").touch()  # by a kill before there was a state
    result = train_cell(folder, "cpu")
    assert [row["epoch"] for row in result.curve] == [1, 2]
    assert result.metrics["top1"] == result.curve[-1]["val_top1"]
    assert result.speed > 0
    assert (folder / "run" / "model.safetensors").exists()
    assert not (folder / "run" / "report.html").exists()
    assert asdict(read_result(tmp_path, cell)) == asdict(result)
    assert read_curve(tmp_path, cell) == [row["val_top1"] for row in result.curve]


def test_what_is_wrong_with_a_resumed_training_is_said(pictures, tmp_path, monkeypatch):
    """A damaged state is as good as none; any other trouble would come again, and is no reason to begin anew."""
    begun = []

    def train(data="", *, resume=None, **settings):
        begun.append(resume)
        if resume:
            raise WeftError("the loss is not finite")
        raise WeftError("trained anew")

    monkeypatch.setattr("weft.run.train.train", train)
    cell = tiny(pictures)
    folder = cell_folder(tmp_path, cell)
    (folder / "run" / "state").mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps(asdict(cell)))
    (folder / "run" / STATE).write_bytes(b"damaged")
    with pytest.raises(WeftError, match="trained anew"):
        train_cell(folder, "cpu")
    (folder / "run" / "state").mkdir(parents=True)
    monkeypatch.setattr("weft.engine.state.read_header", lambda run: {})
    with pytest.raises(WeftError, match="not finite"):
        train_cell(folder, "cpu")
    assert begun == [None, folder / "run"]


@pytest.mark.slow
def test_kill_loses_at_most_the_running_cell(pictures, tmp_path):
    """kill -9 when the first cell is done: the worker ends, too, and the next sitting trains the rest."""
    table, study = tmp_path / "mine.yaml", tmp_path / "study"
    rows = [{"name": where, "switches": {**CVT, "pos_embed": where}} for where in ("none", "every")]
    table.write_text(json.dumps({"title": "Mine", "model": "cvt_nano", "rows": rows}))
    command = [sys.executable, "-m", "weft", "ablate", table, pictures, "--epochs", 3, "--seeds", 2, "--jobs", 1]
    command += ["--img-size", 16, "--out", study, "--device", "cpu", "--run.batch", 8]
    first = subprocess.Popen([*map(str, command)])
    while not (done := list(study.glob("cells/*/result.json"))):
        assert first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    worker = int((study / "cells" / done[0].parent.name / "state" / "lock").read_text().split()[1])
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}/stat").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.05)
    done = list(study.glob("cells/*/result.json"))
    assert 1 <= len(done) < 4
    before = {file: file.stat().st_mtime_ns for file in done}
    second = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "within noise" in second.stdout or "larger than noise" in second.stdout
    assert len(list(study.glob("cells/*/result.json"))) == 4
    assert {file: file.stat().st_mtime_ns for file in done} == before
    assert (study / "table.html").exists()
