"""The number of threads of a run: tried out on a machine that does nothing else of ours, and kept over a stop."""

import sys

import pytest
import torch

from tests.helpers.small_runs import make_pictures, tiny_run
from weft.config import RunConfig, read_yaml
from weft.data import early
from weft.engine import threads
from weft.engine.loop import Trainer
from weft.engine.start import RunStart
from weft.engine.state import read_header
from weft.run import start
from weft.run.choose import fill
from weft.run.resume import resume_run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(autouse=True)
def back_to_usual():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="decodes early by forking")
def test_nobody_decodes_while_the_machine_is_measured(pictures, tmp_path, monkeypatch):
    """Processes that decode ahead once passed for another job: a run of 60,000 small files computed with one thread."""
    begun, resting = [], []
    decode_early = early.decode_early
    monkeypatch.setattr(early, "FEW", 0)
    monkeypatch.setattr("weft.run.data.decode_early", lambda *args: begun.append(decode_early(*args)) or begun[-1])
    monkeypatch.setattr(start, "fewer_threads", lambda *_: resting.append(bool(begun[0].resting[0])) or 0)
    auto = start.auto_settings
    monkeypatch.setattr(start, "auto_settings", lambda *args: resting.append(bool(begun[0].resting[0])) or auto(*args))
    monkeypatch.setattr(start, "fill", lambda *args: resting.append(bool(begun[0].resting[0])) or fill(*args))
    tiny_run(pictures, tmp_path / "run", recipe="auto", epochs=1, data__workers=1, run__report=False)
    assert resting == [True, True, False]


@pytest.fixture
def trained_with(monkeypatch):
    """The threads with which each step is computed, of three; a trial finds two to be faster."""
    steps = []
    compute = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda *args: steps.append(torch.get_num_threads()) or compute(*args))
    monkeypatch.setattr(threads, "choose_threads", lambda usual: usual - 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(3)
    return steps


def test_fewer_threads_are_kept_over_a_stop_and_given_back(pictures, tmp_path, monkeypatch, trained_with):
    run = tiny_run(pictures, tmp_path / "run", epochs=1, run__report=False)
    assert {*trained_with} == {2}
    assert torch.get_num_threads() == 3  # as whoever called had it
    assert read_header(run.folder)["progress"].threads == 2
    assert read_yaml(run.folder / "config.yaml")["run.threads"] == 0  # nobody asked for them
    trained_with.clear()
    resume_run(run.folder, {"run.epochs": 2}, allow_changes=True, quiet=True, start=RunStart())
    assert {*trained_with} == {2}
    trained_with.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    resume_run(run.folder, {"run.epochs": 3}, allow_changes=True, quiet=True, start=RunStart())
    assert {*trained_with} == {3}


def test_threads_go_back_with_the_state(pictures, tmp_path, monkeypatch, trained_with):
    """A batch without a finite gradient: the step before it was computed with one thread, the saved state is of two."""
    bad = []
    compute = Trainer.add_gradients

    def add_gradients(self, *args, **more):
        found = compute(self, *args, **more)
        if self.progress.step == 2 and not bad:
            bad.append(self.progress.step)
            self.run.compute_with(1)
            return found * float("nan")
        return found

    monkeypatch.setattr(Trainer, "add_gradients", add_gradients)
    run = tiny_run(pictures, tmp_path / "run", epochs=2, run__report=False)
    assert bad
    assert trained_with[-1] == read_header(run.folder)["progress"].threads == 2


@pytest.mark.parametrize(("asked", "variable", "usual"), [(2, None, 2), (0, "2", 2), (0, None, 1)])
def test_nobody_tries_where_there_is_no_choice(monkeypatch, asked, variable, usual):
    monkeypatch.setattr(threads, "choose_threads", lambda usual: pytest.fail("tried"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads.fewer_threads(RunConfig(threads=asked), torch.device("cpu"), usual) == 0
    assert threads.fewer_threads(RunConfig(), torch.device("cuda"), 2) == 0
