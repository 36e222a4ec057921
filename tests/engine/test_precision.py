"""The type that a CPU multiplies in."""

import itertools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import weft
from tests.helpers.small_runs import TINY, make_pictures
from weft.config import Config, override
from weft.engine import precision
from weft.engine.loop import Trainer
from weft.engine.precision import choose_precision
from weft.errors import WeftError

SECONDS = {torch.float32: 0.3, torch.bfloat16: 0.2}


@pytest.fixture
def timed(monkeypatch):
    """A CPU with bfloat16, on which passes take as long as a table says, the first longer; what was tried."""
    tried = []

    def seconds(trainer: Trainer, dtype: torch.dtype, pictures: int = precision.PICTURES) -> float:
        tried.append((dtype, pictures))
        return SECONDS[dtype] + 1.0 * (len(tried) == 1)

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(precision, "_pass_seconds", seconds)
    return tried


def products(monkeypatch) -> list[torch.dtype]:
    """The types in which the passes of the runs that follow multiply."""
    seen, add = [], Trainer.add_gradients

    def watch(self: Trainer, *args, **keywords):
        seen.append(self.task.dtype)
        return add(self, *args, **keywords)

    monkeypatch.setattr(Trainer, "add_gradients", watch)
    return seen


def train(root, **settings) -> weft.Run:
    pictures = root / "pictures"
    if not pictures.exists():
        make_pictures(pictures)
    return weft.train(str(pictures), out=str(root / "run"), **{**TINY, "minutes": 0.05, **settings})


@pytest.mark.parametrize(
    ("settings", "gain", "bf16"),
    [
        ({}, 1.5, True),
        ({}, 1.1, False),  # not clearly
        ({"run__precision": "fp32"}, 1.5, False),  # somebody said so
        ({"run__deterministic": True}, 1.5, False),
        ({"minutes": 0, "run__steps": 2}, 1.5, False),  # the same numbers each time
    ],
)
def test_a_cpu_computes_in_what_is_clearly_faster(settings, gain, bf16, timed, monkeypatch, tmp_path):
    monkeypatch.setitem(SECONDS, torch.bfloat16, SECONDS[torch.float32] / gain)
    seen = products(monkeypatch)
    train(tmp_path, **settings)
    assert {*seen} == {torch.bfloat16 if bf16 else torch.float32}
    assert bool(timed) == (settings == {})


def test_a_run_goes_on_in_its_type(timed, monkeypatch, tmp_path):
    """What was found out holds for the whole run, whatever would be found where it goes on."""
    fit = Trainer.fit

    def stop_at_once(self: Trainer) -> None:
        self.stop_requested = True
        fit(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", stop_at_once)
        assert train(tmp_path).stopped
    monkeypatch.setitem(SECONDS, torch.bfloat16, math.inf)
    seen = products(monkeypatch)
    weft.train(resume=str(tmp_path / "run"), quiet=True)
    assert seen
    assert {*seen} == {torch.bfloat16}


def test_the_trial_leaves_no_trace_and_tells_types_apart(monkeypatch, tmp_path):
    """Of real passes: weights, statistics and gradients are as before, and what fails is never chosen."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    found = {}
    tell = precision.choose_precision

    def watch(trainer: Trainer) -> None:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        tell(trainer)
        after = trainer.model.state_dict()
        found["same"] = all(torch.equal(value, after[name]) for name, value in before.items())
        found["gradients"] = [p.grad for p in trainer.parameters if p.grad is not None]
        loss = trainer.task.loss

        def fail(*args):
            if trainer.task.dtype == torch.bfloat16:
                raise RuntimeError("not implemented for 'BFloat16'")
            return loss(*args)

        monkeypatch.setattr(trainer.task, "loss", fail)
        found["failing"] = precision._pass_seconds(trainer, torch.bfloat16)
        tell(trainer)
        found["chosen"] = trainer.task.dtype

    monkeypatch.setattr("weft.run.session.choose_precision", watch)
    train(tmp_path)
    assert found == {"same": True, "gradients": [], "failing": math.inf, "chosen": torch.float32}


@pytest.fixture
def made_up(timed, monkeypatch):
    """Makes a trainer of a run of minutes, as far as `choose_precision` looks at it; a second passes at each look."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(precision, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(precision, "snapshot", lambda *_: {})
    monkeypatch.setattr(precision, "load_tensors", lambda *_: None)

    def make(device: str = "cpu", size: int = 1, **settings):
        config = override(Config(), {f"run.{name}": value for name, value in {"minutes": 0.05, **settings}.items()})
        run = SimpleNamespace(ema=None, compute_in=mock.Mock(), screen=mock.Mock())
        about = dict(device=torch.device(device), world=SimpleNamespace(size=size), model=None, optimizer=mock.Mock())
        return SimpleNamespace(config=config, run=run, **about)

    return make


@pytest.mark.parametrize(("minutes", "rounds"), [(0.05, 1), (5, 3)])
def test_a_slow_model_is_tried_once(minutes, rounds, timed, made_up):
    """A trial of three passes in each type could take a large part of a few minutes."""
    choose_precision(made_up(minutes=minutes))
    assert [pictures for _, pictures in timed] == [2, 2] + [16, 16] * rounds


@pytest.mark.parametrize(("gain", "chosen"), [(1.05, torch.float32), (1.5, torch.bfloat16)])
def test_what_the_first_pass_pays_for_decides_nothing(gain, chosen, made_up, monkeypatch):
    """Nor where one round is all that there is time for."""
    monkeypatch.setitem(SECONDS, torch.bfloat16, SECONDS[torch.float32] / gain)
    trainer = made_up()
    choose_precision(trainer)
    trainer.run.compute_in.assert_called_once_with(chosen)


def test_what_cannot_be_trained_is_left_to_the_first_step_to_say(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    with pytest.raises(WeftError, match="BatchNorm cannot train on a single picture"):
        train(tmp_path, batch=1)


@pytest.mark.parametrize(
    ("about", "has_bf16", "tries"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"device": "cuda"}, True, False),
        ({"size": 2}, True, False),
        ({"precision": "fp32"}, True, False),
        ({"precision": "bf16"}, True, False),
        ({"deterministic": True}, True, False),
        ({"compile": True}, True, False),  # the first pass of each type would be its compilation
    ],
)
def test_who_tries_both_types(about, has_bf16, tries, timed, made_up, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    choose_precision(made_up(**about))
    assert bool(timed) == tries
