"""Minutes that are too few to validate on all pictures."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from tests.helpers.small_runs import dense as dense_settings
from tests.helpers.small_runs import make_pictures, make_squares, tiny_run
from weft.config import Config, override
from weft.data.keep import KeptValidation
from weft.engine import time_budget
from weft.engine.device import World
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.state import RunProgress, read_header
from weft.engine.time_budget import VALIDATED, BatchTimes, _count_validated
from weft.run.evaluate import evaluate, find_pictures


def trainer_of(minutes: float, pictures: int, averaged: bool, **settings):
    config = override(Config(), {"run.minutes": minutes, **settings})
    run = SimpleNamespace(
        split=SimpleNamespace(val=np.arange(pictures)),
        plan=SimpleNamespace(steps_per_epoch=10),
        elapsed=lambda: 5.0,
        model=1,
        best_model=2 if averaged else 1,
    )
    return SimpleNamespace(run=run, config=config, task=SimpleNamespace(eval_batch=8), world=World(torch.device("cpu")))


@given(
    minutes=st.floats(0.2, 60),
    step=st.floats(0.01, 20),
    each=st.floats(1e-4, 20),
    pictures=st.integers(1, 500),
    averaged=st.booleans(),
    every=st.integers(1, 5),
)
def test_validations_take_a_fifth_of_the_minutes_at_most(minutes, step, each, pictures, averaged, every):
    """Or each is on a single batch, which is the least."""
    trainer = trainer_of(minutes, pictures, averaged, **{"run.val_epochs": every})
    count = _count_validated(trainer, step, lambda n: each * n, closing=2.0)
    assert 1 <= count <= pictures
    epochs = (60 * minutes * (1 - VALIDATED) - 7) / step / 10
    times = max(1, math.ceil(epochs / every)) + averaged
    within = each * count * times <= VALIDATED * 60 * minutes * (1 + 1e-9)
    assert within or count == min(8, pictures)
    if count < pictures:  # no more would fit
        assert each * min(count + 8, pictures) * times > VALIDATED * 60 * minutes * (1 - 1e-9)


@pytest.mark.parametrize("settings", [{"run.report": False}, {"run.fsdp": True}])
def test_where_the_last_validation_is_the_result_it_is_on_all(settings):
    assert _count_validated(trainer_of(1, 100, True, **settings), 1.0, lambda n: float(n), 2.0) == 100


def test_a_batch_that_records_launches_does_not_count_for_all():
    """Ten batches: the first takes 2 s, the third 5 s, all others 0.1 s, and a metric of 1 s follows."""
    times = [2.0, 0.1, 5.0] + 7 * [0.1]
    ends = [100.0, *(100 + np.cumsum(times))]
    found = BatchTimes.between(ends, ends[-1] + 1)
    assert found.of(20) == pytest.approx(2.0 + 19 * 0.1 + 2.0)
    assert BatchTimes.between([100.0, 102.0], 103.0).of(1) == pytest.approx(3.0)
    assert found.of(0) == 0


class Slow:
    """A trainer whose batches take a while, on a clock of its own; batches of 8 pictures."""

    def __init__(self, monkeypatch, minutes: float, first: float, each: float, pictures: int):
        self.now, self.batches, self.seconds = 0.0, 0, (first, each)
        self.config = override(Config(), {"run.minutes": minutes})
        self.task, self.device = SimpleNamespace(eval_batch=8), torch.device("cpu")
        self.world = World(self.device)
        split = SimpleNamespace(val=np.arange(pictures), reported=np.arange(pictures))
        self.run = SimpleNamespace(
            split=split,
            best_model=None,
            kept_validation=None,
            config=self.config,
            task=self.task,
            progress=RunProgress(),
        )
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(time_budget, "evaluate", self.evaluate)

    def evaluate(self, run, infer, model, indices):
        for number in range(-(-len(indices) // 8)):
            self.number = number
            infer(model, None)

    def infer(self, model, pictures):
        self.now += self.seconds[self.number > 0]
        self.batches += 1


@pytest.mark.parametrize("each", [0.01, 0.3, 5.0])
def test_a_trial_of_validation_is_short_and_right(monkeypatch, each):
    """However much longer a validation batch takes than one of training: two batches, or a small part of the time."""
    trainer = Slow(monkeypatch, 2, first=each + 0.5, each=each, pictures=800)
    seconds_of, closing = time_budget._time_validation(trainer)
    assert trainer.now <= 2 * (each + 0.5) + max(2 * each, 0.03 * 120 + 0.5)
    assert trainer.batches >= 2
    assert seconds_of(800) == pytest.approx(100 * each + 0.5)
    assert closing == pytest.approx(100 * each + 0.5, abs=2)


def test_the_report_is_timed_in_the_type_it_is_computed_in(monkeypatch):
    """On a CPU that trains in bfloat16 whoever opens the model computes in float32, which takes longer."""
    trainer = Slow(monkeypatch, 2, first=0.3, each=0.3, pictures=800)
    trainer.run.progress.bf16, trainer.run.dtype, trainer.task.dtype = True, torch.bfloat16, torch.bfloat16
    infer = trainer.infer
    monkeypatch.setattr(
        trainer, "infer", lambda *args: [infer(*args) for _ in range(3 if trainer.task.dtype == torch.float32 else 1)]
    )
    seconds_of, closing = time_budget._time_validation(trainer)
    assert seconds_of(800) == pytest.approx(100 * 0.3)
    assert closing == pytest.approx(3 * 100 * 0.3, abs=2)
    assert trainer.task.dtype == torch.bfloat16


def test_kept_pictures_are_those_of_the_index():
    kept = KeptValidation(torch.arange(6).view(6, 1, 1, 1), torch.arange(6), torch.tensor([9, 4, 7, 2, 8, 5]), [])
    (batch,) = kept.only(np.array([2, 3, 9])).batches(8)
    assert (batch.labels.tolist(), batch.index.tolist(), batch.pictures.flatten().tolist()) == ([0, 3], [9, 2], [0, 3])


@pytest.mark.parametrize("kind", ["device", "no", "masks"])
def test_some_pictures_validate_and_all_are_reported(tmp_path, monkeypatch, kind):
    """Those of the sample are judged as `weft eval` judges them; a resumed run has the same."""
    seconds = time_budget._time_validation
    slow = lambda *args: (lambda n: 60.0 * n, seconds(*args)[1])  # noqa: E731  a minute for each picture
    monkeypatch.setattr(time_budget, "_time_validation", slow)
    monkeypatch.setattr("weft.tasks.classify.task.Classify.eval_batch", 4)
    monkeypatch.setattr("weft.tasks.segment.task.Segment.eval_batch", 4)
    monkeypatch.setattr("weft.engine.clock.Clock.is_at_mark", lambda self: False)
    seen = []
    original = Trainer.evaluate
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self, model: seen.append(self.run.validated) or original(self, model)
    )
    if kind == "masks":
        data, settings = make_squares(tmp_path / "data", count=40), dense_settings("fpn")
    else:
        data, settings = make_pictures(tmp_path / "data"), {"data__keep": kind}
    run = tiny_run(data, tmp_path / "run", **{**settings, "minutes": 0.2, "epochs": 50}).folder
    (some,) = {tuple(indices) for indices in seen}
    assert len(some) == 4
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]
    assert rows
    assert all(row["validated"] == 4 for row in rows)
    assert read_header(run)["progress"].validation_pictures == 4
    source, indices, _ = find_pictures(run)
    assert set(some) < set(indices)
    score = {"masks": "miou"}.get(kind, "top1")
    best = max(row[f"val_{score}"] for row in rows)
    predictor = weft.load(run, device="cpu")
    assert evaluate(predictor, source, np.array(some)).metrics()[score] == pytest.approx(best)
    page = (run / "report.html").read_text()
    assert f"On the way 4 of {len(indices)} pictures validated" in page
