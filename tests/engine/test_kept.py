"""Pictures that a run keeps: where its settings say, said in one line, and once for all cells of a study."""

import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.small_runs import differences, make_pictures, tiny_run
from weft.config import AugmentConfig, Config, DataConfig
from weft.data import keep as keeping
from weft.engine import kept
from weft.engine.log import read_rows
from weft.errors import WeftError
from weft.run import choose
from weft.run import data as run_data
from weft.run.resume import read_settings
from weft.run.start import least_kept


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


def test_pictures_in_memory_change_nothing_but_who_decodes(pictures, tmp_path):
    """PNGs are decoded to the same pixels, and readers draw what they always draw."""
    settings = dict(augment__policy="rand-m9-mstd0.5-inc1", epochs=2)
    one = tiny_run(pictures, tmp_path / "no", data__keep="no", **settings).folder
    other = tiny_run(pictures, tmp_path / "memory", data__keep="memory", **settings).folder
    assert not differences(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="shares memory by forking")
@pytest.mark.parametrize("keep", ["device", "memory"])
def test_pictures_that_were_decoded_early_change_nothing(pictures, tmp_path, monkeypatch, keep):
    settings = dict(data__keep=keep, data__workers=1, epochs=2)
    plain = tiny_run(pictures, tmp_path / "plain", **settings).folder
    monkeypatch.setattr("weft.data.early.FEW", 0)
    late, real = [], keeping.decode_all

    def decode_late(decode, chosen, **how):
        late.extend(chosen)
        return real(decode, chosen, **how)

    monkeypatch.setattr(keeping, "decode_all", decode_late)
    early = tiny_run(pictures, tmp_path / "early", **settings).folder
    assert not late
    assert not differences(plain, early)


@pytest.mark.skipif(sys.platform != "linux", reason="shares memory by forking")
def test_nobody_waits_for_what_is_kept_in_another_size(pictures, tmp_path, monkeypatch):
    """Nor do processes that decode it take time from those that decode what is kept."""
    monkeypatch.setattr("weft.data.early.FEW", 0)
    monkeypatch.setattr("weft.data.early.EarlyPixels._decode", lambda self, index: time.sleep(600))
    monkeypatch.setattr("weft.data.early.EarlyPixels.finish", lambda self: pytest.fail("waited"))
    left, real = [], keeping.decode_all

    def decode_late(*args, **how):
        assert not early.processes
        left.append(how)
        return real(*args, **how)

    def watch(*args):
        nonlocal early
        early = begin(*args)
        return early

    early, begin = None, run_data.decode_early
    monkeypatch.setattr(run_data, "decode_early", watch)
    monkeypatch.setattr(keeping, "decode_all", decode_late)
    settings = dict(data__keep="device", data__workers=1, epochs=1, img_size=20, augment__crop="resize")
    tiny_run(pictures, tmp_path / "run", **settings)
    assert left


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "device"),
        ({"augment__policy": "rand-m9-mstd0.5-inc1"}, "memory"),
        ({"augment__interpolation": "lanczos"}, "memory"),
    ],
)
def test_what_fits_is_kept_and_written_down(pictures, tmp_path, settings, chosen, capfd):
    run = tiny_run(pictures, tmp_path / "run", epochs=2, quiet=False, run__report=False, **settings).folder
    assert read_settings(run).data.keep == chosen
    where = {"device": "on the CPU, as training needs them", "memory": "in memory, decoded"}[chosen]
    assert f"36 pictures kept {where} (data.keep {chosen}): 0 MB, in" in capfd.readouterr().out


def test_what_does_not_fit_is_read(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.run.choose.room_on", lambda device: 0)
    run = tiny_run(pictures, tmp_path / "run", epochs=1).folder
    assert read_settings(run).data.keep == "no"


def test_processes_keep_what_all_of_them_can():
    assert least_kept(["device", "memory", "device"]) == "memory"
    assert least_kept(["memory", "no"]) == "no"
    assert least_kept(["device"] * 3) == "device"


def test_pictures_are_decoded_once_for_all_cells_of_a_study(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_remembers", True)
    decoded = []
    original = kept._decode
    monkeypatch.setattr(kept, "_decode", lambda *run: decoded.append(1) or original(*run))
    for seed, settings in enumerate([{}, {}, {"augment__flip": 0.0}, {"img_size": 20}]):
        tiny_run(pictures, tmp_path / f"run {seed}", epochs=1, seed=seed, data__keep="device", **settings)
    # The split of another seed holds out other pictures.
    assert len(decoded) == 4
    tiny_run(pictures, tmp_path / "again", epochs=1, seed=3, img_size=20, augment__flip=0.1, data__keep="device")
    assert len(decoded) == 4
    kept._last.clear()


def test_nothing_is_remembered_outside_of_studies(pictures, tmp_path):
    tiny_run(pictures, tmp_path / "run", epochs=1, data__keep="device")
    assert not kept._last


def test_unreadable_pictures_are_named_and_stood_in_for(tmp_path):
    """Damage inside a file, which no look at its header and its end finds."""
    folder = make_pictures(tmp_path / "pictures", each=40)
    damaged = folder / "class 1" / "7.png"
    content = bytearray(damaged.read_bytes())
    content[60:90] = bytes(30)
    damaged.write_bytes(content)
    run = tiny_run(folder, tmp_path / "run", epochs=1, data__keep="device", data__val_fraction=0.1).folder
    events = [row["text"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "event"]
    assert len(events) == 1
    assert events[0].startswith("'class 1/7.png' cannot be read and is left out:")


def test_pictures_that_do_not_fit_are_said_so(pictures, tmp_path, monkeypatch):
    def short_of_memory(*run):
        raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    monkeypatch.setattr(kept, "_decode", short_of_memory)
    with pytest.raises(WeftError, match="do not fit where"):
        tiny_run(pictures, tmp_path / "run", data__keep="device")


@pytest.mark.parametrize(
    ("task", "changes", "room", "chosen"),
    [
        ("segment", {}, 10**9, "device"),
        ("segment", {}, 10**6, "memory"),
        ("segment", {"interpolation": "lanczos"}, 10**9, "memory"),
        ("detect", {"crop": "random"}, 10**9, "device"),
        ("detect", {"crop": "resize"}, 10**9, "memory"),  # pictures of many sizes
    ],
)
def test_masks_and_boxes_are_kept_on_a_gpu_that_has_room(monkeypatch, task, changes, room, chosen):
    """They take memory of the host as well, for the readers, so that without that there is neither."""
    sizes = dict(width=dict(median=40, q95=50), height=dict(median=30, q95=40), pictures=1000, depth=8)
    config = Config(data=DataConfig(task=task, channels=3), augment=AugmentConfig(**changes))
    monkeypatch.setattr("weft.run.choose.runs_on", lambda device: True)
    monkeypatch.setattr("weft.run.choose.room_on", lambda device: room if device.type == "cuda" else 10**9)
    keep = partial(choose._keep, config, SimpleNamespace(**sizes))
    assert keep(torch.device("cuda")) == chosen
    assert keep(torch.device("cpu")) == "memory"
    monkeypatch.setattr("weft.run.choose.room_on", lambda device: room if device.type == "cuda" else 0)
    assert keep(torch.device("cuda")) == "no"
