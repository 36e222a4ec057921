"""A run that was interrupted anywhere ends with the same bits as one that was not."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

import weft
from tests.helpers.small_runs import EVERYTHING_RANDOM, differences, make_pictures, processes, start_or_resume, tiny_run
from weft import WeftError, files
from weft.engine import loop
from weft.engine.lock import STATE
from weft.engine.log import read_rows
from weft.engine.state import read_header
from weft.run.resume import read_settings

STEPS = 12  # 29 training pictures, batches of 8, 4 epochs


class Killed(BaseException):
    """Stands for a kill: nothing catches it, nothing is cleaned up."""


def interrupt(monkeypatch, where: str, at: int) -> None:
    """The `at`-th call of a method of the trainer, or of the writer of states, never happens."""
    place, name = {
        "step": (loop.Trainer, "update"),
        "validation": (loop.Trainer, "evaluate"),
        "model": (loop, "write_best"),
        "saving": (files.os, "replace"),
    }[where]
    original, calls = getattr(place, name), iter(range(1_000_000))

    def killed(*args, **kwargs):
        if next(calls) == at:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, killed)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory) -> Path:
    """An uninterrupted run with everything random that there is."""
    return tiny_run(pictures, tmp_path_factory.mktemp("whole") / "run", epochs=4, **EVERYTHING_RANDOM).folder


@pytest.mark.parametrize("at", [1, 4])
def test_interrupted_run_on_kept_pictures_ends_with_the_same_bits(monkeypatch, pictures, tmp_path, at):
    """Their augmentation is drawn for whole batches, in another way than that of pictures that are read."""
    settings = dict(EVERYTHING_RANDOM, epochs=3, data__keep="device", run__save_minutes=0.0)
    whole = tiny_run(pictures, tmp_path / "whole", **settings).folder
    with monkeypatch.context() as patch:
        interrupt(patch, "step", at)
        with pytest.raises(Killed):
            tiny_run(pictures, tmp_path / "run", **settings)
    weft.train(resume=tmp_path / "run", quiet=True)
    assert differences(whole, tmp_path / "run") == []
    assert without_times(tmp_path / "run") == without_times(whole)


def test_run_from_before_pictures_were_kept_reads_them(monkeypatch, pictures, tmp_path):
    """Its settings do not say; what it draws is what it always drew."""
    settings = dict(EVERYTHING_RANDOM, epochs=2, run__save_minutes=0.0, data__keep="no")
    whole = tiny_run(pictures, tmp_path / "whole", **settings).folder
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, "step", 2)
        with pytest.raises(Killed):
            tiny_run(pictures, run, **settings)
    config = run / "config.yaml"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "keep:" not in line))
    assert read_settings(run).data.keep == "no"
    weft.train(resume=run, quiet=True)
    assert differences(whole, run) == []


@pytest.mark.parametrize(
    ("where", "at"),
    [("step", 0), ("step", 1), ("step", 4), ("step", STEPS - 1), ("validation", 1), ("model", 0), ("saving", 9)],
)
@pytest.mark.parametrize(
    "save_minutes", [0.0, pytest.param(60.0, marks=pytest.mark.slow)], ids=["saved-each-step", "saved-each-epoch"]
)
def test_interrupted_run_ends_with_the_same_bits(monkeypatch, pictures, whole, tmp_path, where, at, save_minutes):
    run = tmp_path / "run"
    settings = dict(EVERYTHING_RANDOM, epochs=4, run__save_minutes=save_minutes)
    with monkeypatch.context() as patch:
        interrupt(patch, where, at)
        with pytest.raises(Killed):
            tiny_run(pictures, run, **settings)
    weft.train(resume=run, quiet=True)
    assert differences(whole, run) == []
    assert without_times(run) == without_times(whole)


def without_times(run: Path) -> list[dict]:
    """The rows of metrics; after a resume none is missing and none is there twice. Each session tells its own start."""
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "pictures_per_second")}
        for row in read_rows(run / "metrics.jsonl")
        if row["kind"] != "start"
    ]


@pytest.mark.parametrize(
    "settings",
    [
        dict(data__workers=2),
        dict(augment__on_device="yes"),
        dict(run__precision="bf16"),
        dict(optim__name="sgd", optim__lr=0.1),
        dict(optim__name="rmsprop", optim__schedule="exponential", optim__gamma=0.9),
        dict(model="vitae_nano", model__args={}, img_size=32),
        dict(data__balance="sampler", run__channels_last=True),
        dict(model="resnet10t", model__args={}, img_size=32),
    ],
    ids=lambda settings: "-".join(map(str, settings.values()))[:30],
)
def test_other_settings_resume_exactly_too(monkeypatch, pictures, tmp_path, settings):
    settings = dict(EVERYTHING_RANDOM, epochs=2, **settings)
    if settings.get("model") == "resnet10t":
        settings["model__drop_path"] = None
    tiny_run(pictures, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        interrupt(patch, "step", 4)
        with pytest.raises(Killed):
            tiny_run(pictures, tmp_path / "run", **settings)
    weft.train(resume=tmp_path / "run", quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_number_of_workers_changes_nothing(pictures, whole, tmp_path):
    run = tiny_run(pictures, tmp_path / "run", epochs=4, **dict(EVERYTHING_RANDOM, data__workers=2)).folder
    assert differences(whole, run) == []


def test_same_seed_same_metrics_another_seed_others(pictures, whole, tmp_path):
    settings = dict(EVERYTHING_RANDOM, epochs=4)
    again = tiny_run(pictures, tmp_path / "again", **settings).folder
    other = tiny_run(pictures, tmp_path / "other", seed=1, **settings).folder
    assert without_times(again) == without_times(whole) != without_times(other)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_kills_change_no_bit(pictures, tmp_path, kills):
    """SIGKILL at random moments of a run with a reader process: at the start, in steps, in validation, in saving."""
    settings = dict(EVERYTHING_RANDOM, epochs=3 * kills, run__save_minutes=0.0, data__workers=1)
    run, draw, reached = tmp_path / "run", random.Random(0), [0]
    run_to_end(pictures, tmp_path / "whole", settings)
    for kill in range(kills):
        process = processes().Process(target=start_or_resume, args=(pictures, run, settings))
        process.start()
        if kill % 5:  # every fifth is killed on its way to the first step
            wait_for_step(run, reached[-1] + draw.randint(1, 2))
        process.join(timeout=draw.uniform(0, 0.3))
        assert process.is_alive(), f"ended with {process.exitcode} before kill {kill + 1}: the run is too short"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        reached.append(step_of(run))
    assert reached == sorted(reached)
    assert len(set(reached)) > kills // 2
    run_to_end(pictures, run, settings)
    assert differences(tmp_path / "whole", run) == []
    assert without_times(run) == without_times(tmp_path / "whole")


def step_of(run: Path) -> int:
    return read_header(run)["progress"].step if (run / STATE).exists() else 0


def wait_for_step(run: Path, step: int) -> None:
    """A file that is replaced while it is being read may look damaged, so a look may fail."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(WeftError):
            if step_of(run) >= step:
                return
        time.sleep(0.02)


def run_to_end(pictures: Path, run: Path, settings: dict) -> None:
    process = processes().Process(target=start_or_resume, args=(pictures, run, settings))
    process.start()
    process.join(timeout=240)
    assert process.exitcode == 0
