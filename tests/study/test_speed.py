"""Measuring: what is computed from timings and how it is shown, never how fast anything is."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.small_runs import refused
from weft.errors import WeftError
from weft.study.speed import measure as measuring
from weft.study.speed.measure import (
    LEAST_ROUNDS,
    SpeedRow,
    SpeedSettings,
    make_model,
    make_rows,
    pair_with_peers,
    time_in_turns,
)
from weft.study.speed.models import own_size
from weft.study.speed.report import as_json, as_table, title

QUICK = ["--img-size", "32", "--batch", "1", "--seconds", "0.001", "--device", "cpu"]


def timed(name: str, batch: int = 8, error: str = "") -> Any:
    return SimpleNamespace(name=name, error=error, gib=None, settings=SpeedSettings(batch=batch))


def test_rows_from_timings():
    """The ratio is that of each round: here the peer is twice as slow in all of them, while the machine slows down."""
    times = {"ours": [0.1, 0.2, 0.8], "peer": [0.2, 0.4, 1.6], "gone": []}
    models = [timed("ours"), timed("peer"), timed("gone", error="does not run")]
    ours, peer, gone = make_rows(models, times, {"ours": "peer"})
    assert (ours.pictures_per_second, ours.low, ours.high, ours.milliseconds) == (40, 10, 80, 200)
    assert ours.ratio == 2
    assert ours.peer == "peer"
    assert peer.ratio is None
    assert peer.pictures_per_second == 20
    assert gone == SpeedRow("gone", error="does not run")


def test_rows_without_a_peer_that_failed():
    (row, _) = make_rows([timed("ours"), timed("peer", error="no")], {"ours": [1.0]}, {"ours": "peer"})
    assert row.ratio is None
    assert row.pictures_per_second == 8


def test_pairs():
    assert pair_with_peers(["a", "b"], ["x", "y"]) == {"a": "x", "b": "y"}
    assert pair_with_peers(["a", "b"], ["x"]) == {"a": "x", "b": "x"}
    assert pair_with_peers(["a", "b"], []) == {}
    with pytest.raises(WeftError, match="3 peers for 2 models"):
        pair_with_peers(["a", "b"], ["x", "y", "z"])


def test_models_take_turns():
    order = []

    def runner(name: str) -> Any:
        def time(calls: int) -> float:
            order.append((name, calls))
            return 0.01

        return SimpleNamespace(name=name, error="", time=time)

    times = time_in_turns([runner("a"), runner("b")], seconds=0.3, rounds=3)
    assert times == {"a": [0.01] * 3, "b": [0.01] * 3}
    assert order == [("a", 1), ("b", 1)] + [("a", 10), ("b", 10)] * 3


def test_slow_models_get_fewer_rounds():
    slow = SimpleNamespace(name="slow", error="", time=lambda calls: 2.0)
    assert time_in_turns([slow], seconds=3.0, rounds=9) == {"slow": [2.0] * LEAST_ROUNDS}


def test_columns_without_numbers_are_left_out():
    alone = SpeedRow("a", pictures_per_second=8, low=7, high=9, milliseconds=1)
    assert as_table([alone])[0] == ["model", "pictures/s", "range", "ms/batch"]
    assert as_table([alone, SpeedRow("b", error="does not run")])[2][-1] == "does not run"


def test_pictures_have_the_first_models_size():
    assert [own_size(name) for name in ("cvt_nano", "cvt_13", "test_resnet")] == [64, 224, 160]


def test_command(command, tmp_path):
    code, out, err = command("bench", "cvt_nano", "--against", "test_resnet", *QUICK, "--json", tmp_path / "b.json")
    assert code == 0, err
    title, header, ours, peer, wrote = out.splitlines()
    assert title.startswith("inference, Weft's models fused, eager, no kernels on a CPU, batch 1, 32 pixels, fp32; ")
    assert header.split()[:2] == ["model", "pictures/s"]
    assert ours.startswith("cvt_nano ")
    assert ours.endswith("x  test_resnet")
    assert peer.startswith("test_resnet ")
    assert wrote == f"Wrote {tmp_path / 'b.json'}."
    found = json.loads((tmp_path / "b.json").read_text())
    assert {"date", "machine", "versions", "settings", "rows"} == found.keys()
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert found["settings"] == dict(
        train=False,
        compile=False,
        replay=False,
        batch=1,
        channels=3,
        img_size=32,
        dtype="fp32",
        device="cpu",
        fuse=True,
        fast=True,
        kernels=True,
        seconds=0.001,
    )
    row = found["rows"][0]
    assert row["low"] <= row["pictures_per_second"] <= row["high"]
    assert row["pictures_per_second"] == pytest.approx(1000 / row["milliseconds"])
    assert row["ratio"] > 0
    assert row["gib"] is None


def test_command_trains_and_prints_json(command):
    code, out, err = command("bench", "cvt_nano", "--train", "--no-fuse", *QUICK, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert found["settings"]["train"]
    assert not found["settings"]["fuse"]
    assert [row["model"] for row in found["rows"]] == ["cvt_nano"]


def test_arguments_of_models_follow_a_colon(command):
    """Under their whole names, so that units of the convolutional embedding can be compared, as in CETNet's 5.2."""
    other = "cetnet_nano:ce_unit=dense,ce_layers=3"
    code, out, err = command("bench", "cetnet_nano", "--against", other, "--train", *QUICK, "--json", "-")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["model"] for row in rows] == ["cetnet_nano", other]
    assert rows[0]["peer"] == other
    usual, dense = (make_model(row["model"], SpeedSettings(img_size=32, fast=False)) for row in rows)
    layers = [len(list(model.stages[1].embed.modules())) for model in (usual, dense)]
    assert layers[0] != layers[1]
    assert make_model(other, SpeedSettings(img_size=32, train=True)).__class__.__name__ != type(usual).__name__


@pytest.mark.parametrize(
    ("options", "form", "says"),
    [
        ({}, "FusedClassTokenCvT", "inference, Weft's models fused, "),
        ({"fuse": False}, "FusedCvT", "inference, Weft's models fast, "),
        ({"train": True}, "FusedCvT", "training step, Weft's models fast, "),
        ({"fast": False}, "CvT", "inference, Weft's models plain, "),
        ({"fast": False, "train": True}, "CvT", "training step, Weft's models plain, "),
    ],
)
def test_models_are_fast_unless_plain_ones_are_wanted(options, form, says):
    settings = SpeedSettings(img_size=32, **options)
    model = make_model("cvt_nano", settings)
    folded = not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    assert type(model).__name__ == form
    assert folded == (not options)
    assert title(as_json([], settings, 1.0)).startswith(says)
    assert type(make_model("test_resnet", settings)).__name__ == "ResNet"


def test_one_model_that_does_not_fit(command, monkeypatch):
    """Its row says why, and the others are measured."""

    def short_of_memory(name: str, settings: SpeedSettings) -> Any:
        if name == "ceit_nano":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_model(name, settings)

    monkeypatch.setattr(measuring, "make_model", short_of_memory)
    code, out, _ = command("bench", "ceit_nano", "cvt_nano", *QUICK)
    assert code == 1
    assert "does not fit into memory at batch 1; try a smaller --batch" in out.splitlines()[2]
    assert out.splitlines()[3].startswith("cvt_nano ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cvt_nan"], ["'cvt_nan'", "Did you mean 'cvt_nano'?"]),
        (["cvt_nano", "--against", "restnet18"], ["'restnet18'", "'resnet18'"]),
        (["cetnet_nano:ce_unit=dens"], ["ce_unit='dens'", "'dense'"]),
        (["cetnet_nano:ce_units=dense"], ["ce_units", "Did you mean 'ce_unit'?"]),
        (["cvt_nano", "cvt_nano:depths=[1,1,1]", "--compare", "demo:fashion"], ["measurements of speed", "--compare"]),
        (["cetnet_nano:dense"], ["'dense'", "ce_unit=dense"]),
        (["cetnet_nan:ce_unit=dense"], ["'cetnet_nan'", "Did you mean 'cetnet_nano'?"]),
        (["hf:cvt-14"], ["hf:cvt-14", "hf:cvt-13, hf:cvt-21"]),
        (["cvt_nano", "--against", "resnet18", "resnet34"], ["2 peers for 1 models"]),
        ([], ["weft models"]),
        (["cvt_nano", "--device", "mps"], ["--device 'mps'", "cuda:N"]),
        (["cvt_nano", "--device", "nowhere"], ["--device 'nowhere'"]),
        (["cvt_nano", "--dtype", "fp16", "--device", "cpu"], ["fp16", "GPU"]),
        (["cvt_nano", "--replay", "--device", "cpu"], ["--replay", "GPU"]),
        (["cvt_nano", "--seconds", "0"], ["seconds"]),
        (["cvt_nano", "--seconds", "nan"], ["seconds"]),
        (["cvt_nano", "--seconds", "inf"], ["seconds"]),
        (["cvt_nano", "--batch", "0"], ["batch"]),
        (["cvt_nano", "--json", "no/such/folder/f.json"], ["--json"]),
    ],
)
def test_mistakes(command, args, words):
    refused(command("bench", *args), *words)


def test_missing_transformers(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(command("bench", "hf:cvt-13"), "pip install transformers")
