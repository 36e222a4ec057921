"""Runs on masks and boxes that were interrupted, ran out of memory or met a NaN end as they should."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

import weft
from tests.e2e.test_distributed import assert_close, options, resume, start, stop_second
from tests.e2e.test_resume import Killed, interrupt, run_to_end, wait_for_step, without_times
from tests.helpers.small_runs import (
    CVT,
    DENSE_RANDOM,
    dense,
    differences,
    make_squares,
    processes,
    start_or_resume,
    state_of,
    tiny_run,
)
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.state import RunProgress, read_header
from weft.run import session
from weft.run.resume import read_settings

STEPS = 4  # 10 training pictures, batches of 4, 2 epochs
LAYOUTS = {"fpn": "masks", "mask-rcnn": "coco"}
HEADS = list(LAYOUTS)


def settings_of(head: str, **changes):
    """Everything random there is, on small pictures, with states after each step."""
    settings = dense(head, model__args=CVT, img_size=32, batch=4, epochs=2, run__save_minutes=0.0, **DENSE_RANDOM)
    return settings | changes


def same_weights(head: str, **changes):
    """Nothing that depends on how a batch is cut: no BatchNorm, no chances, no norm of a single value."""
    settings = settings_of(head, model__args={**CVT, "projection": "linear"}, model__drop_path=0.0, **changes)
    return settings | dict(model__head_args={**settings["model__head_args"], "norm": "none"})


@pytest.fixture(scope="module", autouse=True)
def _no_report():
    """Of what comes after training other tests speak; it takes longer than these runs."""
    with mock.patch.object(session.RunSession, "finish", return_value={}):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    return {head: make_squares(root / layout, layout, count=12, side=40) for head, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> dict[str, Path]:
    """Uninterrupted runs."""
    root = tmp_path_factory.mktemp("whole")
    return {head: tiny_run(data[head], root / head, **settings_of(head)).folder for head in HEADS}


# Interruptions ----------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("where", "at", "workers"),
    [
        ("step", 0, 0),
        ("step", STEPS // 2 + 1, 2),
        pytest.param("step", STEPS - 1, 0, marks=SLOW),
        ("validation", 1, 0),
        pytest.param("validation", 0, 2, marks=SLOW),
        pytest.param("model", 0, 0, marks=SLOW),
        pytest.param("saving", 9, 0, marks=SLOW),
    ],
)
def test_interrupted_run_ends_with_the_same_bits(monkeypatch, data, whole, tmp_path, head, where, at, workers):
    """Weights, average and optimiser; with readers in processes of their own, too."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, where, at)
        with pytest.raises(Killed):
            tiny_run(data[head], run, **settings_of(head, data__workers=workers))
    weft.train(resume=run, quiet=True)
    assert any(key.startswith("ema.") for key in state_of(run))
    assert any(key.startswith("optim.") for key in state_of(run))
    assert differences(whole[head], run) == []
    assert without_times(run) == without_times(whole[head])


@pytest.mark.parametrize("head", HEADS)
def test_pictures_on_the_device_change_nothing_stopped_or_not(monkeypatch, data, whole, tmp_path, head):
    """Readers draw as always, and the plain way of the device is exact: bits are those of pictures that are read."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, "step", STEPS // 2 + 1)
        with pytest.raises(Killed):
            tiny_run(data[head], run, **settings_of(head, data__keep="device", data__workers=2))
    assert read_settings(run).data.keep == "device"
    weft.train(resume=run, quiet=True)
    assert differences(whole[head], run) == []
    assert without_times(run) == without_times(whole[head])


@pytest.mark.parametrize("head", HEADS)
def test_a_picture_with_a_good_head_and_a_damaged_middle_is_left_out_on_the_device_too(tmp_path, head):
    """Those who draw read heads alone; weights are those of readers, who notice."""
    data = make_squares(tmp_path / "data", LAYOUTS[head], count=24, side=40)
    picture = next(path for path in sorted(data.rglob("3.png")) if "mask" not in path.parent.name)
    content = bytearray(picture.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(value ^ 0x5A for value in content[middle : middle + 200])
    picture.write_bytes(content)
    settings = settings_of(head, data__bad_files=0.2)
    runs = {how: tiny_run(data, tmp_path / how, data__keep=how, **settings).folder for how in ("memory", "device")}
    assert differences(runs["memory"], runs["device"]) == []
    bad = [read_header(run)["progress"].bad for run in runs.values()]
    assert bad[0].keys() == bad[1].keys() != set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(head="upernet", model__head_args=dict(channels=16, aux_channels=8)),
        dict(head="vt-fpn", model__head_args=dict(channels=16, head_channels=16, token_dim=32)),
        dict(model="vt_resnet_nano", model__args={}),
        dict(run__precision="bf16"),
        dict(run__channels_last=True, loss__kind="ohem"),
        dict(augment__repeats=2, data__balance="loss"),
    ],
    ids=lambda changes: "-".join(map(str, changes.values()))[:30],
)
def test_other_segmenters_resume_exactly_too(monkeypatch, data, tmp_path, changes):
    resumes_exactly(monkeypatch, data["fpn"], tmp_path, settings_of("fpn") | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(head="faster-rcnn"),
        dict(
            augment__crop="resize",
            augment__short_sides=[24, 32, 40],
            augment__cut_short_sides=[24, 30],
            augment__cut_sides=[16, 28],
        ),
        dict(model="vitae_nano", model__args={}),
        dict(run__precision="bf16"),
        dict(data__balance="sampler", optim__name="sgd"),
    ],
    ids=lambda changes: "-".join(map(str, changes.values()))[:30],
)
def test_other_detectors_resume_exactly_too(monkeypatch, data, tmp_path, changes):
    resumes_exactly(monkeypatch, data["mask-rcnn"], tmp_path, settings_of("mask-rcnn") | changes)


def resumes_exactly(monkeypatch, data: Path, folder: Path, settings: dict) -> None:
    tiny_run(data, folder / "whole", **settings)
    with monkeypatch.context() as patch:
        interrupt(patch, "step", 3)
        with pytest.raises(Killed):
            tiny_run(data, folder / "run", **settings)
    weft.train(resume=folder / "run", quiet=True)
    assert differences(folder / "whole", folder / "run") == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("head", HEADS)
def test_kills_change_no_bit(data, whole, tmp_path, head):
    """SIGKILL of a process with a reader, after the first and after the third step."""
    run, settings = tmp_path / "run", settings_of(head, data__workers=1)
    for step in (1, 3):
        process = processes().Process(target=start_or_resume, args=(data[head], run, settings))
        process.start()
        wait_for_step(run, step)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    run_to_end(data[head], run, settings)
    assert differences(whole[head], run) == []
    assert without_times(run) == without_times(whole[head])


# What goes wrong on the way ---------------------------------------------------------------------------------------


def events(run: Path) -> list[str]:
    return [row["text"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "event"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("step", "keep"), [pytest.param(0, "no", marks=SLOW), (2, "device")])
def test_batch_without_finite_gradient_is_undone_and_left_out(monkeypatch, data, tmp_path, head, step, keep):
    """The run is one that never saw the pictures of that step."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "RunProgress", lambda **values: RunProgress(**values, skipped=[step]))
        tiny_run(data[head], tmp_path / "without", **settings_of(head))
    original = Trainer.gradients

    def gradients(self, number, batch):
        totals = original(self, number, batch)
        if number == step:
            for parameter in self.parameters:
                parameter.grad = torch.full_like(parameter, torch.nan)
            totals[0] = torch.nan
        return totals

    monkeypatch.setattr(Trainer, "gradients", gradients)
    run = tiny_run(data[head], tmp_path / "run", **settings_of(head, data__keep=keep)).folder
    assert differences(tmp_path / "without", run) == []
    [text] = events(run)
    assert f"step {step}" in text
    assert ".png" in text
    [dumped] = (run / "trouble").iterdir()
    tensors = safetensors.torch.load_file(dumped)
    assert {tuple(t.shape) for key, t in tensors.items() if key.startswith("pictures")} <= {(4, 3, 32, 32), (3, 32, 32)}
    assert any(key.startswith("labels") and tensor.numel() for key, tensor in tensors.items())  # masks or boxes
    assert all(tensor.isfinite().all() for tensor in state_of(run).values())


@pytest.mark.parametrize("head", HEADS)
def test_out_of_memory_halves_what_is_computed_at_once(monkeypatch, data, tmp_path, head):
    """In the second step, with more than two pictures: the batches stay what they are."""
    settings = same_weights(head, run__micro_batch=0)
    original, calls, seen = Trainer.gradients, iter(range(1000)), []

    def gradients(self, step, batch):
        forward = self.forward
        self.forward = lambda x, *y: refuse(x, next(calls) >= 1) or forward(x, *y)
        try:
            totals = original(self, step, batch)
            seen.append((step, sorted(batch.index.tolist())))
        finally:
            self.forward = forward
        return totals

    def refuse(x, now):
        if now and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "gradients", gradients)
        run = tiny_run(data[head], tmp_path / "run", **settings).folder
    assert read_header(run)["progress"].micro_batch == 2
    assert [step for step, _ in seen] == list(range(STEPS))  # each step once, in order
    assert any("out of memory" in text for text in events(run))
    assert all(len(index) == 4 for _, index in seen)
    if head == "fpn":  # detectors draw samples in each portion, so others where portions differ
        tiny_run(data[head], tmp_path / "whole", **settings)
        a, b = state_of(tmp_path / "whole"), state_of(run)
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=2e-3, atol=2e-5, msg=key)


# Several processes ------------------------------------------------------------------------------------------------


def in_processes(count: int, data: Path, run: Path, settings: dict) -> None:
    command = ["weft", "train", str(data), f"--out={run}", *options(**settings)]
    found = start(command, count, run.parent / f"output of {run.name}")
    assert found.codes == [0] * count, found.text


def validated(run: Path) -> list[dict]:
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]
    return [{key: value for key, value in row.items() if key.startswith("val")} for row in rows]


@pytest.mark.parametrize(
    ("head", "count"),  # 3 divides neither batch nor pictures
    [("fpn", 3), *(pytest.param(*case, marks=SLOW) for case in [("fpn", 2), ("mask-rcnn", 3), ("mask-rcnn", 2)])],
)
def test_no_picture_counts_twice_in_validation(data, tmp_path, head, count):
    """Weights that stay as they are: then any number of processes count the same hits."""
    settings = same_weights(head, epochs=1, lr=1e-30, data__val_fraction=0.5)
    tiny_run(data[head], tmp_path / "alone", **settings)
    in_processes(count, data[head], tmp_path / "run", settings)
    [one], [several] = validated(tmp_path / "alone"), validated(tmp_path / "run")
    assert several.pop("val_loss", 0) == pytest.approx(one.pop("val_loss", 0), rel=1e-6)  # batches round differently
    assert several == one != {}


@pytest.mark.parametrize("keep", ["device", pytest.param("no", marks=SLOW)])
@pytest.mark.parametrize("head", [HEADS[0], pytest.param(HEADS[1], marks=SLOW)])
def test_two_processes_arrive_at_the_weights_of_one(data, tmp_path, head, keep):
    """But for rounding; a detector draws the anchors that it learns from, in each process its own: not the same bits,
    but the same data in the same steps, so nearly the same loss."""
    settings = same_weights(head)
    tiny_run(data[head], tmp_path / "alone", **settings)
    in_processes(2, data[head], tmp_path / "run", settings | dict(data__keep=keep))
    if head == "fpn":
        assert_close(tmp_path / "alone", tmp_path / "run")
    losses = [
        [row["train_loss"] for row in read_rows(tmp_path / name / "metrics.jsonl") if row["kind"] == "epoch"]
        for name in ("alone", "run")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if head == "fpn" else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_two_processes_resume_exactly(data, tmp_path, head):
    run = tmp_path / "run"
    in_processes(2, data[head], tmp_path / "whole", settings_of(head, epochs=4))
    command = ["weft", "train", str(data[head]), f"--out={run}", *options(**settings_of(head, epochs=4))]
    assert start(command, 2, tmp_path / "stopped", stop_second).codes == [0, 0]
    assert read_header(run)["progress"].step < 2 * STEPS
    assert resume(run, 2).codes == [0, 0]
    assert differences(tmp_path / "whole", run) == []
