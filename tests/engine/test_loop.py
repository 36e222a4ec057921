"""What the loop does when something goes wrong: NaN, no memory, signals, a full disk, other settings."""

import errno
import os
import random
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import yaml

import weft
from tests.helpers.small_runs import (
    EVERYTHING_RANDOM,
    TINY,
    differences,
    make_pictures,
    processes,
    save_for_ever,
    state_of,
    tiny_run,
)
from weft import WeftError
from weft.config import Config, RunConfig, known_keys
from weft.engine import state
from weft.engine.device import World
from weft.engine.lock import locked
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.state import RunProgress, read_header
from weft.fast.replay import Replayed, replay
from weft.run import session
from weft.tasks.classify.task import Classify
from weft.tasks.detect.task import Detect
from weft.tasks.segment.task import Segment

LAYER_NORM_ONLY = dict(model__args={**TINY["model__args"], "projection": "linear"}, model__drop_path=0.0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


def events(run):
    return [row["text"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "event"]


# How the model is called --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "device", "task", "machines", "replayed"),
    [
        ({}, "cuda", Classify, 1, True),
        ({}, "cuda", Segment, 1, True),
        ({}, "cuda", Detect, 1, False),  # takes targets along with pictures
        ({}, "cuda", Classify, 2, False),  # its gradients would all come at the end, too late for their messages
        ({}, "cpu", Classify, 1, False),
        ({"replay": False}, "cuda", Classify, 1, False),
        ({"fsdp": True}, "cuda", Classify, 1, False),
        ({"deterministic": True}, "cuda", Classify, 1, False),
        ({"sync_bn": True}, "cuda", Classify, 1, False),
    ],
)
def test_training_is_replayed_where_it_can_be(monkeypatch, settings, device, task, machines, replayed):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = replace(Config(), run=replace(RunConfig(), **settings))
    model = torch.nn.Linear(2, 2)
    trainer = SimpleNamespace(
        config=config,
        model=model,
        device=torch.device(device),
        world=World(torch.device(device), 0, 8 * machines),
        in_lockstep=config.run.sync_bn,
        task=task,
        recorded=None,
    )
    trainer.replays = Trainer.can_replay(trainer)  # pyright: ignore[reportArgumentType]
    forward = Trainer.make_forward(trainer)  # pyright: ignore[reportArgumentType]
    assert isinstance(forward, Replayed) == replayed
    assert (forward.model if replayed else forward) is model


# NaN ------------------------------------------------------------------------------------------------------------


def give_nan(monkeypatch, bad_steps):
    original = Trainer.gradients

    def gradients(self, step, batch):
        totals = original(self, step, batch)
        if step in bad_steps:
            for parameter in self.parameters:
                parameter.grad.fill_(torch.nan)
            totals[0] = torch.nan
        return totals

    monkeypatch.setattr(Trainer, "gradients", gradients)


@pytest.mark.parametrize("step", [0, 4])
def test_batch_without_finite_gradient_is_undone_and_left_out(monkeypatch, pictures, tmp_path, step):
    settings = dict(EVERYTHING_RANDOM, epochs=3)
    with monkeypatch.context() as patch:  # what should come out: a run that never saw that batch
        patch.setattr(session, "RunProgress", lambda **values: RunProgress(**values, skipped=[step]))
        tiny_run(pictures, tmp_path / "without", **settings)
    give_nan(monkeypatch, [step])
    run = tiny_run(pictures, tmp_path / "run", **settings).folder
    assert differences(tmp_path / "without", run) == []
    [text] = events(run)
    assert f"step {step}" in text
    assert "learning rate" in text
    assert "class" in text  # the files, which lie in folders of that name
    [dumped] = (run / "trouble").iterdir()
    assert safetensors.torch.load_file(dumped)["pictures"].shape == (8, 3, 16, 16)
    assert all(tensor.isfinite().all() for tensor in state_of(run).values())


def test_run_stops_when_nan_comes_again_and_again(monkeypatch, pictures, tmp_path):
    give_nan(monkeypatch, range(2, 100))
    with pytest.raises(WeftError, match=r"optim\.lr"):
        tiny_run(pictures, tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in state_of(tmp_path / "run").values())


def test_weights_that_are_not_finite_are_never_the_best(monkeypatch, pictures, tmp_path):
    original = Trainer.evaluate

    def evaluate(self, model):
        if self.progress.validated == 1:
            next(iter(self.model.parameters())).data[0] = torch.nan
        return {**original(self, model), "top1": float(self.progress.validated)}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    with pytest.raises(WeftError, match="no longer finite"):
        tiny_run(pictures, tmp_path / "run", run__ema=0)
    kept = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())


# Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 2, 7])
def test_out_of_memory_halves_what_is_computed_at_once_and_nothing_else(monkeypatch, pictures, tmp_path, call):
    settings = dict(LAYER_NORM_ONLY, run__ema=0.9, augment__mixup=0.5)
    tiny_run(pictures, tmp_path / "whole", **settings)
    original, calls, seen = Trainer.gradients, iter(range(1000)), []

    def gradients(self, step, batch):
        forward, self.forward = self.forward, lambda x: _refuse(x, next(calls) >= call) or forward(x)
        try:
            totals = original(self, step, batch)
            seen.append((step, batch.index.tolist()))
        finally:
            self.forward = forward
        return totals

    def _refuse(x, now):
        if now and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    monkeypatch.setattr(Trainer, "gradients", gradients)
    run = tiny_run(pictures, tmp_path / "run", **settings).folder
    progress = read_header(run)["progress"]
    assert progress.micro_batch == 2
    assert progress.step == read_header(tmp_path / "whole")["progress"].step
    assert [step for step, _ in seen] == list(range(progress.step))  # each step once, in order
    a, b = state_of(tmp_path / "whole"), state_of(run)
    for key in a:  # the same batches in other portions: the same weights but for rounding
        torch.testing.assert_close(a[key], b[key], rtol=2e-3, atol=2e-5, msg=key)
    assert any("out of memory" in text for text in events(run))


@pytest.mark.parametrize("where", ["loss", "infer"])
def test_out_of_memory_beside_recordings_ends_these_and_changes_nothing(monkeypatch, pictures, tmp_path, where):
    """Recordings hold memory that other passes need: without them there is enough, for as many pictures as before."""
    tiny_run(pictures, tmp_path / "whole")
    monkeypatch.setattr(Trainer, "make_forward", lambda self: replay(self.model))
    monkeypatch.setattr(Replayed, "holds_memory", property(lambda self: True))
    original, failures = getattr(Classify, where), []

    def short_of_memory(self, *args):
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return original(self, *args)

    monkeypatch.setattr(Classify, where, short_of_memory)
    run = tiny_run(pictures, tmp_path / "run").folder
    whole = read_header(tmp_path / "whole")["progress"]
    assert read_header(run)["progress"].micro_batch == whole.micro_batch
    assert [text for text in events(run) if "memory" in text] == [
        "memory is short: the model's launches are no longer replayed"
    ]
    assert not differences(tmp_path / "whole", run)


def test_out_of_memory_with_one_picture_is_said(monkeypatch, pictures, tmp_path):
    def gradients(self, step, batch):
        raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    monkeypatch.setattr(Trainer, "gradients", gradients)
    with pytest.raises(WeftError, match="single picture"):
        tiny_run(pictures, tmp_path / "run")


# Signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["update", "evaluate"])
def test_signal_saves_and_says_how_to_go_on(monkeypatch, capsys, pictures, tmp_path, number, moment):
    tiny_run(pictures, tmp_path / "whole", **EVERYTHING_RANDOM)
    with monkeypatch.context() as patch:
        original, calls = getattr(Trainer, moment), iter(range(100))

        def interrupted(self, *args):
            if next(calls) == 1:
                signal.raise_signal(number)
            return original(self, *args)

        patch.setattr(Trainer, moment, interrupted)
        run = tiny_run(pictures, tmp_path / "run", **EVERYTHING_RANDOM, quiet=False)
    assert run.stopped
    assert f"weft train --resume {tmp_path / 'run'}" in capsys.readouterr().out.replace("\n", "")
    assert not weft.train(resume=run.folder, quiet=True).stopped
    assert differences(tmp_path / "whole", run.folder) == []


def test_second_signal_ends_at_once(monkeypatch, pictures, tmp_path):
    original = Trainer.update

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Trainer, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(pictures, tmp_path / "run")
    assert read_header(tmp_path / "run")["progress"].step == 0


# Files ----------------------------------------------------------------------------------------------------------


def test_full_disk_loses_nothing(monkeypatch, pictures, tmp_path):
    tiny_run(pictures, tmp_path / "whole", run__save_minutes=0)
    original, calls = state.safetensors.torch.save_file, iter(range(100))

    def save_file(tensors, path, *metadata):
        if next(calls) == 4:
            with open(path, "wb") as file:
                file.write(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(tensors, path, *metadata)

    with monkeypatch.context() as patch:
        patch.setattr(state.safetensors.torch, "save_file", save_file)
        with pytest.raises(WeftError, match=r"disk is full.*--resume"):
            tiny_run(pictures, tmp_path / "run", run__save_minutes=0)
    assert not list((tmp_path / "run").rglob(".saving*"))
    weft.train(resume=tmp_path / "run", quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_state_is_whole_whenever_the_writer_is_killed(tmp_path):
    context = processes()
    (tmp_path / "state").mkdir()
    draw, found = random.Random(0), set()
    for _ in range(25):
        has_saved = context.Event()
        process = context.Process(target=save_for_ever, args=(tmp_path, has_saved))
        process.start()
        assert has_saved.wait(60)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        step = read_header(tmp_path)["progress"].step
        assert (state_of(tmp_path)["numbers"] == step).all()
        found.add(step)
    assert len(found) > 1, "every writer was killed while it wrote the same state"


def _hold(folder, ready, done):
    with locked(folder):
        ready.set()
        done.wait(30)


def test_two_runs_never_share_a_folder(tmp_path, pictures):
    context = processes()
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(30)
    with pytest.raises(WeftError, match=f"process {process.pid}"), locked(tmp_path):
        pass
    process.kill()
    process.join()
    with locked(tmp_path):  # the dead hold no lock
        pass


def test_folder_of_another_run_is_refused(pictures, tmp_path):
    tiny_run(pictures, tmp_path / "run", epochs=1)
    with pytest.raises(WeftError, match="--resume"):
        tiny_run(pictures, tmp_path / "run", epochs=1)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "missing"])
def test_damaged_state_is_refused_in_one_line(pictures, tmp_path, damage):
    path = tiny_run(pictures, tmp_path / "run", epochs=1).folder / "state" / "last.safetensors"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = {"empty": b"", "truncated": content[: len(content) // 2], "flipped": b"\xff" * 16 + content[16:]}
        path.write_bytes(changed[damage])
    with pytest.raises(WeftError, match=r"last\.safetensors") as error:
        weft.train(resume=tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value)


# Settings -------------------------------------------------------------------------------------------------------


def test_config_holds_every_setting_and_repeats_the_run(pictures, tmp_path):
    first = tiny_run(pictures, tmp_path / "first", **EVERYTHING_RANDOM).folder
    written = yaml.safe_load((first / "config.yaml").read_text())
    assert {f"{section}.{key}" for section, keys in written.items() for key in keys} == set(known_keys())
    again = weft.train(config=first / "config.yaml", out=tmp_path / "again", quiet=True).folder
    assert differences(first, again) == []


def test_changed_settings_are_refused_and_named_or_accepted_on_request(pictures, tmp_path):
    run = tiny_run(pictures, tmp_path / "run", epochs=1).folder
    with pytest.raises(WeftError, match=r"run\.epochs.*--allow-changes"):
        weft.train(resume=run, epochs=3, quiet=True)
    weft.train(resume=run, epochs=3, allow_changes=True, quiet=True)
    assert read_header(run)["progress"].validated == 3
    assert [row["epoch"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"] == [1, 2, 3]


def test_changed_pictures_are_refused(tmp_path):
    pictures = make_pictures(tmp_path / "pictures")
    run = tiny_run(pictures, tmp_path / "run", epochs=1).folder
    (pictures / "class 0" / "0.png").write_bytes((pictures / "class 1" / "0.png").read_bytes() + b"\0")
    with pytest.raises(WeftError, match="changed"):
        weft.train(resume=run, quiet=True)
    weft.train(resume=run, allow_changes=True, quiet=True)
    (pictures / "class 2" / "new.png").write_bytes((pictures / "class 1" / "0.png").read_bytes())
    with pytest.raises(WeftError):
        weft.train(resume=run, quiet=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(epoch=3), "run.epochs"),
        (dict(optim__learning_rate=3), "optim"),
        (dict(epochs=0), "at least 1"),
        (dict(optim__lr="fast"), "not a number"),
        (dict(model="cvt_nanno"), "cvt_nano"),
        (dict(recipe="quik"), "quick"),
        (dict(data__folds=3, data__fold=3), "fold"),
        (dict(run__fsdp=True, run__ema=0.9), "run.ema"),
        (dict(augment__scale=[1.0, 0.1]), "augment.scale"),
        (dict(device="cuda:7"), "GPUs"),
        (dict(model__args={"depht": 3}), "depht"),
        (dict(init="nowhere"), "nowhere"),
        (dict(run__fsdp=True), "torchrun"),
    ],
    ids=str,
)
def test_unusable_settings_are_said_before_any_work(pictures, tmp_path, settings, words):
    with pytest.raises(WeftError, match=words) as error:
        tiny_run(pictures, tmp_path / "run", **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "state" / "last.safetensors").exists()


def test_time_budget_sets_the_number_of_epochs(monkeypatch, pictures, tmp_path):
    start = time.monotonic()
    run = tiny_run(pictures, tmp_path / "run", minutes=0.1, epochs=500, run__report=False).folder
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]
    assert 1 <= len(rows) < 500
    assert time.monotonic() - start < 60
    assert len(rows) == 1 or rows[-1]["lr"] < rows[0]["lr"]  # the schedule ended with the run; one on a busy machine
    reference = tiny_run(pictures, tmp_path / "plain", epochs=1).folder  # the trial steps left no trace
    assert read_rows(run / "metrics.jsonl")[0]["loss"] == read_rows(reference / "metrics.jsonl")[0]["loss"]


def test_patience_stops_early(monkeypatch, pictures, tmp_path):
    monkeypatch.setattr(Trainer, "evaluate", lambda self, model: {"loss": 1.0, "top1": 0.5})
    run = tiny_run(pictures, tmp_path / "run", epochs=9, patience=2).folder
    assert read_header(run)["progress"].validated == 3
    assert any("no better validation" in text for text in events(run))
