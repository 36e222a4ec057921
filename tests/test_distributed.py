"""Several processes do what one does: on the CPU, with gloo, two or three of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist

import weft
from tests.small_runs import EVERYTHING_RANDOM, TINY, differences, make_pictures, processes, state_of, tiny_run
from weft.cli import main
from weft.data.loader import _Reader
from weft.data.read import BadPicture
from weft.engine import loop, session, state
from weft.engine.device import count_parameters, joined, shard, sharded_units
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.state import Progress, locked, read_header, whole
from weft.errors import WeftError
from weft.training import name_settings

LAYER_NORM_ONLY = dict(model__args={**TINY["model__args"], "projection": "linear"}, model__drop_path=0.0)
PORTIONS = dict(EVERYTHING_RANDOM, run__ema=0)


# Processes --------------------------------------------------------------------------------------------------------


class Processes:
    """Exit codes of all processes, and what they said together."""

    def __init__(self, codes: list[int | None], text: str):
        self.codes, self.text = codes, text


def start(command: list[str], count: int, folder: Path, prepare: Callable[[int], None] | None = None) -> Processes:
    """Runs `weft ...` in `count` processes that know of each other as torchrun's do, each prepared by its rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    context = processes()
    args = [(rank, count, port, command, folder / f"output-{rank}", prepare) for rank in range(count)]
    running = [context.Process(target=_work, args=arguments) for arguments in args]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=60)
    hanging = [process for process in running if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    text = "".join((folder / f"output-{rank}").read_text() for rank in range(count))
    assert not hanging, f"{len(hanging)} processes wait for ever; they said: {text}"
    return Processes([process.exitcode for process in running], text)


def _work(rank: int, count: int, port: int, command: list[str], output: Path, prepare: Any) -> None:
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({key: str(value) for key, value in place.items()})
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    Trainer.validate = _checked(Trainer.validate)
    if prepare:
        prepare(rank)
    sys.argv = command
    main()


def _checked(validate: Any) -> Any:
    """Before each validation: all processes must hold the same bits."""

    def checked(self: Trainer) -> None:
        sums = [whole(tensor).double().sum().item() for tensor in self.model.state_dict().values()]
        assert self.world.gather(sums) == [sums] * self.world.size
        validate(self)

    return checked


def options(**settings: Any) -> list[str]:
    """Settings as the command line has them."""
    own = {key: settings.pop(key) for key in ("recipe", "quiet") if key in settings}
    named = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in name_settings(settings).items()
    }
    return [
        f"--recipe={own['recipe']}",
        *(["--quiet"] if own["quiet"] else []),
        *(f"--{k}={v}" for k, v in named.items()),
    ]


def train(pictures: Path, run: Path, count: int, prepare: Any = None, **settings: Any) -> Processes:
    command = ["weft", "train", str(pictures), f"--out={run}", *options(**{**TINY, **settings})]
    return start(command, count, run.parent / "output", prepare)


def resume(run: Path, count: int, *more: str) -> Processes:
    return start(["weft", "train", f"--resume={run}", *more], count, run.parent / "output")


def assert_close(one: Path, other: Path) -> None:
    """The same pictures in other portions: the same weights but for rounding."""
    a, b = state_of(one), state_of(other)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=2e-3, atol=2e-5, msg=key)


def epochs_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def alone(pictures, tmp_path_factory) -> Path:
    """A run of one process without anything that depends on how a batch is spread."""
    return tiny_run(pictures, tmp_path_factory.mktemp("alone") / "run", **LAYER_NORM_ONLY).folder


@pytest.fixture(scope="module")
def pair(pictures, tmp_path_factory) -> Path:
    """An uninterrupted run of two processes, with everything random there is."""
    run = tmp_path_factory.mktemp("pair") / "run"
    assert train(pictures, run, 2, **EVERYTHING_RANDOM).codes == [0, 0]
    return run


# The same as one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])  # 3 divides neither the batch of 8 nor the 7 validation pictures
def test_same_weights_as_one_process(pictures, alone, tmp_path, count):
    assert train(pictures, tmp_path / "run", count, **LAYER_NORM_ONLY).codes == [0] * count
    assert_close(alone, tmp_path / "run")
    for one, several in zip(epochs_of(alone), epochs_of(tmp_path / "run"), strict=True):
        assert several["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
        assert several["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3)


def test_no_picture_counts_twice_in_validation(pictures, tmp_path):
    """Weights that stay as they are: then the metrics must be the same to the last digit."""
    settings = dict(LAYER_NORM_ONLY, epochs=1, lr=1e-30)
    tiny_run(pictures, tmp_path / "1", **settings)
    [expected] = epochs_of(tmp_path / "1")
    for count in (2, 3):
        train(pictures, tmp_path / str(count), count, **settings)
        [row] = epochs_of(tmp_path / str(count))
        assert {key: row[key] for key in row if key.startswith("val")} == {
            key: expected[key] for key in expected if key.startswith("val")
        }


def test_kept_model_is_the_one_that_was_validated(pair):
    """Also with BatchNorm, whose statistics each process gathers from its own pictures."""
    best = [row for row in epochs_of(pair) if row["best"]][-1]
    found = json.loads((pair / "evaluation.json").read_text())
    assert (best["val_loss"], best["val_top1"]) == (found["loss"], found["top1"])
