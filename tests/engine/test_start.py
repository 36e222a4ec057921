"""The start of a run: its phases are told, its time counts, and work goes on side by side."""

import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.small_runs import TINY, make_pictures
from weft.engine.log import read_rows
from weft.engine.start import RunStart, process_began, side_by_side
from weft.engine.state import read_header
from weft.run.train import train_since


def test_work_goes_on_side_by_side():
    meeting, threads = threading.Barrier(3), []

    def work():
        meeting.wait(30)  # nobody passes before all are here
        threads.append(threading.current_thread())

    side_by_side(work, work, work)
    assert len({*threads}) == 3
    assert threading.main_thread() in threads


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_when_all_is_over(failing):
    ended = []

    def fail():
        raise ZeroDivisionError

    def work():
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(ZeroDivisionError):
        side_by_side(*((fail, work) if failing == 0 else (work, fail)))
    assert ended == [1]


def test_a_process_knows_when_it_began():
    """Long before this module was imported, where the system tells; and never after that."""
    script = "import time; time.sleep(1); from weft.engine import start; t = start.process_began()"
    told = subprocess.run(
        [sys.executable, "-c", f"{script}; print(time.monotonic() - t, start.IMPORTED - t)"],
        capture_output=True,
        text=True,
        check=True,
    )
    alive, before_import = map(float, told.stdout.split())
    assert alive >= before_import >= (1 if sys.platform == "linux" else 0)
    assert alive < 60


def test_a_process_that_has_torch_already_began_something_else():
    import torch  # noqa: F401

    assert RunStart.of_command().seconds() < 1
    assert process_began() < time.monotonic()


def test_a_budget_counts_what_came_before(tmp_path, monkeypatch):
    """A minute, of which everything had passed when the run began: one step is all there is time for."""
    monkeypatch.setattr("weft.run.data.open_sources", None)  # the pictures are listed early, and not again
    pictures = make_pictures(tmp_path / "pictures")
    settings = {**TINY, "minutes": 1, "epochs": 500}
    train_since(RunStart(time.monotonic() - 1000), pictures, out=tmp_path / "run", **settings)
    assert read_header(tmp_path / "run")["progress"].step == 1
    (start,) = (row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "start")
    assert start["step"] == 1
    assert start["seconds"] > 1000
    phases, early = start["phases"], {"listing", "imports", "device", "check"}
    assert {*phases} == early | {"model", "kernels", "data", "memory", "trial", "saving"}
    assert all(1000 <= begin <= end <= start["seconds"] for begin, end in phases.values())
    (epoch,) = (row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "epoch")
    assert epoch["seconds"] > 1000
