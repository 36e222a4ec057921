"""Minutes: a run's length is planned again on its way, and of averaged and raw weights the better ones are kept."""

import re
import time
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from tests.helpers.small_runs import make_pictures, state_of, tiny_run
from weft.config import Config, override
from weft.engine import threads
from weft.engine.clock import COLLAPSE, MARKS, PLANNED, Clock
from weft.engine.device import World
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.state import RunProgress, read_header


class Hand:
    """A clock that a test turns, in place of time.monotonic."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def make_run(minutes: float, total: int, hand: Hand, said: list[str], averaged: bool = False):
    began, progress = hand.now, RunProgress(total_steps=total)
    return SimpleNamespace(
        config=override(Config(), {"run.minutes": minutes}),
        world=World(torch.device("cpu")),
        progress=progress,
        plan=SimpleNamespace(steps_per_epoch=10),
        elapsed=lambda: hand.now - began,
        event=said.append,
        model=1,
        best_model=2 if averaged else 1,
        usual_threads=2,
        step_seconds=float("inf"),
        compute_with=lambda threads: setattr(progress, "threads", threads),
    )


def walk(run, hand: Hand, seconds) -> int:
    """Takes all steps, the n-th in `seconds(n)`, with a validation of half a second after each epoch; counts plans."""
    clock, plans = Clock(run), 0
    while run.progress.step < run.progress.total_steps:
        hand.now += seconds(run.progress.step)
        run.progress.step += 1
        if run.progress.step % 10 == 0:
            with clock.validating():
                hand.now += 0.5
        if clock.is_at_mark():
            plans += clock.plan_again()
    return plans


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.6, 5.0])
def test_a_run_ends_with_its_minutes_whatever_the_trial_said(monkeypatch, factor, averaged):
    """Steps take `factor` of a second where the plan of 240 steps was made for one second each."""
    hand = Hand(monkeypatch)
    run = make_run(minutes=5, total=240, hand=hand, said=[], averaged=averaged)
    run.progress.closing_seconds = 3.0
    walk(run, hand, lambda _: factor)
    hand.now += 0.5 * averaged  # the weights themselves, after their average
    assert run.elapsed() + 3.0 == pytest.approx(PLANNED * 300, rel=0.03)
    assert run.progress.stretch == pytest.approx(run.progress.total_steps / 240)


def test_a_machine_that_collapses_is_told_and_the_time_kept(monkeypatch):
    hand, said = Hand(monkeypatch), []
    run = make_run(minutes=5, total=280, hand=hand, said=said)
    run.usual_threads = 1  # so that there are no fewer
    walk(run, hand, lambda step: 1.0 if step < 60 else 4.0)
    assert run.elapsed() < 300 * 1.05
    (line,) = said
    assert "4 times as long" in line
    assert COLLAPSE < 4


@pytest.mark.parametrize("begin", [5, 60])
@pytest.mark.parametrize("asked", [0, 2])
def test_threads_are_fewer_while_another_job_runs(monkeypatch, asked, begin):
    """The other job comes at step `begin` of some 280, goes at step 150; nobody chooses where threads were asked for.

    At step 5 there was no mark yet: what steps take without the other job is known from the trial.
    """
    hand, said, used = Hand(monkeypatch), [], []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = make_run(minutes=5, total=280, hand=hand, said=said)
    run.config, run.step_seconds = override(run.config, {"run.threads": asked}), 1.0

    def busy():
        return begin <= run.progress.step < 150

    monkeypatch.setattr(threads, "choose_threads", lambda usual: 1 if busy() else usual)
    monkeypatch.setattr(
        run, "compute_with", lambda count: used.append(count) or setattr(run.progress, "threads", count)
    )
    walk(run, hand, lambda step: 2.0 if busy() and not run.progress.threads else 1.0)
    assert used == ([] if asked else [1, 0])
    assert run.progress.threads == 0
    assert [line.split(" from")[0] for line in said] == ([] if asked else ["1 thread", "2 threads"])
    assert run.elapsed() == pytest.approx(PLANNED * 300, rel=0.04)


def test_small_changes_leave_the_plan_alone(monkeypatch):
    hand = Hand(monkeypatch)
    run = make_run(minutes=10, total=10**9, hand=hand, said=[])
    run.progress.total_steps = Clock(run).steps_left(1.0)
    assert walk(run, hand, lambda _: 1.0) <= 2


def test_a_mark_that_was_skipped_is_not_the_last(monkeypatch):
    """A batch that gave no finite gradient is left out, and the step of a mark with it."""
    hand = Hand(monkeypatch)
    run = make_run(minutes=5, total=1000, hand=hand, said=[])
    clock = Clock(run)
    run.progress.step, hand.now = 101, hand.now + 101
    assert clock.is_at_mark()
    assert clock.plan_again()
    assert run.progress.total_steps < 300


def test_without_minutes_nobody_looks(monkeypatch):
    hand = Hand(monkeypatch)
    run = make_run(minutes=0, total=100, hand=hand, said=[])
    assert walk(run, hand, lambda step: 10.0 * step) == 0
    assert run.progress.total_steps == 100
    assert len(MARKS) > 2


# Whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


def test_a_run_whose_length_changes_goes_on(pictures, tmp_path, monkeypatch, capsys):
    """At the first mark the clock makes the run shorter, at the second longer: all steps are done, each once.

    Of 8 epochs there are 4 then, and 7 in the end; each line tells of those that are planned.
    """
    lengths = iter([12, 21])

    def plan_again(self):
        self._begin_stretch()
        self.run.progress.total_steps, before = next(lengths, 21), self.run.progress.total_steps
        return self.run.progress.total_steps != before

    monkeypatch.setattr(Clock, "plan_again", plan_again)
    monkeypatch.setattr("weft.run.session.fit_into_time", lambda trainer: None)
    run = tiny_run(pictures, tmp_path / "run", epochs=8, minutes=9, quiet=False).folder
    told = re.findall(r"epoch (\d+)/(\d+)", capsys.readouterr().out)
    assert [last for _, last in told] == sorted((last for _, last in told), key="847".index)
    assert told[-1] == ("7", "7")
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == list(range(1, 22))
    assert read_header(run)["progress"].step == 21


@pytest.mark.parametrize("better", ["raw", "average"])
def test_of_average_and_raw_weights_the_better_are_kept(pictures, tmp_path, monkeypatch, better):
    def evaluate(self, model):
        return {"loss": 1.0, "top1": 0.9 if (model is self.run.model) == (better == "raw") else 0.1}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    run = tiny_run(pictures, tmp_path / "run", epochs=1, run__ema=0.5, run__report=False).folder
    kept, state = safetensors.torch.load_file(run / "model.safetensors"), state_of(run)
    part = "model" if better == "raw" else "ema"
    assert all(torch.equal(value, state[f"{part}.{key}"]) for key, value in kept.items())
    row = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"][-1]
    assert (row["val_top1"], row["best"]) == (0.9, True)  # of what is kept
