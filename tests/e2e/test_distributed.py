"""Several processes do what one does: on the CPU, with gloo, two to four of them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.helpers.places import ROOT
from tests.helpers.small_runs import EVERYTHING_RANDOM, TINY, differences, make_pictures, processes, state_of, tiny_run
from tests.helpers.variants import NANO
from weft.cli.app import main
from weft.data.loader import _Reader
from weft.data.read import BadPicture
from weft.data.sources.open import open_source
from weft.engine import checkpoint
from weft.engine.device import fsdp_units, num_parameters, process_group, shard_model
from weft.engine.lock import STATE, last_lock_holder, locked
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.parallel import distribute, reducing
from weft.engine.state import MEMORY_NOTE, RunProgress, full_tensor, read_header
from weft.engine.training_run import step_seed
from weft.errors import WeftError
from weft.run import data, session
from weft.run.train import name_settings
from weft.tasks.classify.task import Classify

LAYER_NORM_ONLY = dict(model__args={**TINY["model__args"], "projection": "linear"}, model__drop_path=0.0)


SHORT = dict(TINY, epochs=2)
FINISH = session.RunSession.finish


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
    session.RunSession.finish = lambda self: {}
    Trainer.validate = _checked(Trainer.validate)
    if prepare:
        prepare(rank)
    sys.argv = command
    main()


def _checked(validate: Any) -> Any:
    """Before each validation: all processes must hold the same bits."""

    def checked(self: Trainer) -> None:
        tensors = [full_tensor(tensor) for tensor in self.model.state_dict().values() if tensor.is_floating_point()]
        sums = [tensor.double().sum().item() for tensor in tensors]
        assert self.world.all_gather(sums) == [sums] * self.world.size
        validate(self)

    return checked


def with_report(rank: int) -> None:
    session.RunSession.finish = FINISH


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
    command = ["weft", "train", str(pictures), f"--out={run}", *options(**{**SHORT, **settings})]
    return start(command, count, run.parent / "output", prepare)


def resume(run: Path, count: int, *more: str, prepare: Any = None) -> Processes:
    return start(["weft", "train", f"--resume={run}", *more], count, run.parent / "output", prepare)


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
    return tiny_run(pictures, tmp_path_factory.mktemp("alone") / "run", epochs=2, **LAYER_NORM_ONLY).folder


@pytest.fixture(scope="module")
def pair(pictures, tmp_path_factory) -> Path:
    """An uninterrupted run of two processes, with everything random there is."""
    run = tmp_path_factory.mktemp("pair") / "run"
    assert train(pictures, run, 2, with_report, **EVERYTHING_RANDOM).codes == [0, 0]
    return run


# The same as one process ------------------------------------------------------------------------------------------


# 3 divides neither the batch of 8 nor the 7 validation pictures
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
def test_same_weights_as_one_process(pictures, alone, tmp_path, count):
    assert train(pictures, tmp_path / "run", count, **LAYER_NORM_ONLY).codes == [0] * count
    assert_close(alone, tmp_path / "run")
    for one, several in zip(epochs_of(alone), epochs_of(tmp_path / "run"), strict=True):
        assert several["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
        assert several["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3)


def test_no_picture_counts_twice_in_validation(pictures, tmp_path):
    """Weights that stay as they are: then the metrics must be the same, up to rounding that depends on batches."""
    settings = dict(LAYER_NORM_ONLY, epochs=1, lr=1e-30)
    tiny_run(pictures, tmp_path / "1", **settings)
    [expected] = epochs_of(tmp_path / "1")
    train(pictures, tmp_path / "3", 3, **settings)
    [row] = epochs_of(tmp_path / "3")
    found = {key: row[key] for key in row if key.startswith("val")}
    wanted = {key: expected[key] for key in expected if key.startswith("val")}
    assert found == pytest.approx(wanted, rel=1e-7)  # one picture more or less would change the third digit


def test_kept_model_is_the_one_that_was_validated(pair):
    """Also with BatchNorm, whose statistics each process gathers from its own pictures."""
    best = [row for row in epochs_of(pair) if row["best"]][-1]
    found = json.loads((pair / "evaluation.json").read_text())
    assert (best["val_loss"], best["val_top1"]) == (found["loss"], found["top1"])


def compare_gradients(rank: int) -> None:
    """Of all families: the parts of a batch, in portions, have the gradients of the batch, to the digits of float64."""
    with process_group() as world:
        for name in NANO:
            torch.manual_seed(0)
            model = timm.create_model(name, img_size=32, num_classes=3, drop_path_rate=0.0).double().eval()
            x = torch.rand(world.size, 2, 1, 3, 32, 32, dtype=torch.float64)  # two portions in each process
            model(x.flatten(0, 2)).square().sum().backward()
            expected = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            forward = distribute(model, lambda module, x=x: module(x[0, 0]).sum().backward())
            for part in range(2):
                with reducing(forward, part == 1):
                    (forward(x[rank, part]).square().sum() * world.size).backward()
            for (key, p), grad in zip(model.named_parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, grad, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")
    sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_gradients_are_those_of_the_whole_batch(tmp_path, count):
    found = start([], count, tmp_path, compare_gradients)
    assert found.codes == [0] * count, found.text


# When something goes wrong in one of them ---------------------------------------------------------------------------


def wrap(name: str, before: Callable[..., None]) -> None:
    """Calls `before` with the number of the call, and what the trainer's method gets, each time it is called."""
    original, calls = getattr(Trainer, name), iter(range(1_000_000))

    def wrapped(*args: Any) -> Any:
        before(next(calls), *args)
        return original(*args)

    setattr(Trainer, name, wrapped)


def no_memory_in_second(rank: int) -> None:
    def refuse(call: int, trainer: Trainer, *args: Any) -> None:
        if rank == 1 and call > 3 and trainer.progress.micro_batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    wrap("gradients", refuse)


def test_lack_of_memory_in_one_process_ends_all_and_resuming_halves(pictures, alone, tmp_path):
    run = tmp_path / "run"
    found = train(pictures, run, 2, no_memory_in_second, **LAYER_NORM_ONLY)
    assert found.codes == [2, 2]
    assert found.text.count("weft: process 1: Out of memory with 4 pictures at a time") == 1
    assert found.text.count("\n") == found.text.count("weft: ") == 2, found.text  # the main one has lost a connection
    assert read_header(run)["progress"].micro_batch == 4
    found = resume(run, 2, prepare=no_memory_in_second)
    assert found.codes == [0, 0]
    assert found.text.count("2 pictures at a time now") == 1
    assert read_header(run)["progress"].micro_batch == 2
    assert not (run / MEMORY_NOTE).exists()
    assert_close(alone, run)


def nan_in_second(rank: int) -> None:
    original = Classify.prepare

    def prepare(self: Classify, batch: Any, seed: int) -> Any:
        pictures, targets = original(self, batch, seed)
        is_bad = rank == 1 and seed == step_seed(0, 4, 1)
        return (pictures * torch.nan if is_bad else pictures), targets

    Classify.prepare = prepare


def without_step_four(rank: int) -> None:
    session.RunProgress = lambda **values: RunProgress(**values, skipped=[4])


def test_nan_in_one_process_is_undone_in_all(pictures, tmp_path):
    assert train(pictures, tmp_path / "run", 2, nan_in_second, **EVERYTHING_RANDOM).codes == [0, 0]
    assert train(pictures, tmp_path / "without", 2, without_step_four, **EVERYTHING_RANDOM).codes == [0, 0]
    assert differences(tmp_path / "without", tmp_path / "run") == []
    assert len(list((tmp_path / "run" / "trouble").iterdir())) == 2


def stop_second(rank: int) -> None:
    wrap("update", lambda call, trainer: call == 3 and rank == 1 and signal.raise_signal(signal.SIGTERM))


def stop_both_twice(rank: int) -> None:
    """As Ctrl-C does: from the terminal and from torchrun, at moments that differ."""
    wrap("update", lambda call, trainer: call in (3 - rank, 4 - rank) and signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize("prepare", [pytest.param(stop_second, marks=pytest.mark.slow), stop_both_twice])
def test_signal_stops_all_at_the_same_step(pictures, pair, tmp_path, prepare):
    run = tmp_path / "run"
    found = train(pictures, run, 2, prepare, **{**EVERYTHING_RANDOM, "quiet": False})
    assert found.codes == [130 if prepare is stop_both_twice else 0] * 2  # as shells expect of a Ctrl-C
    assert found.text.count("go on with: weft train --resume") == 1
    assert 3 <= read_header(run)["progress"].step < 6
    assert resume(run, 2).codes == [0, 0]
    assert differences(pair, run) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_processes_goes_on(pictures, alone, tmp_path, count):
    run = tmp_path / "run"
    assert train(pictures, run, 2, stop_second, **LAYER_NORM_ONLY).codes == [0, 0]
    found = resume(run, count)
    assert found.codes == [0] * count
    assert found.text.count("instead of 2") == 1
    assert_close(alone, run)


def cannot_read(rank: int) -> None:
    def picture(self: Any, file: Any, seed: int) -> Any:
        raise BadPicture("made up")

    if rank == 1:
        _Reader._picture = picture


@pytest.mark.slow
def test_process_without_readable_pictures_takes_part(pictures, tmp_path):
    settings = dict(EVERYTHING_RANDOM, epochs=1, data__bad_files=1.0)
    assert train(pictures, tmp_path / "run", 2, cannot_read, **settings).codes == [0, 0]
    bad = read_header(tmp_path / "run")["progress"].bad
    assert len(bad) > 8
    assert set(bad.values()) == {"made up"}


def second_sees_no_data(rank: int) -> None:
    def open_configured(*args: Any) -> Any:
        raise WeftError("There is no such folder.")

    if rank == 1:
        data.open_configured = open_configured


def disk_fills_up(rank: int) -> None:
    def write_state(run: Path, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    wrap("validate", lambda call, trainer: setattr(checkpoint, "write_state", write_state))


def always_nan(rank: int) -> None:
    wrap("update", lambda call, trainer: [p.grad.fill_(torch.nan) for p in trainer.parameters])


@pytest.mark.parametrize(
    ("settings", "prepare", "words"),
    [
        (dict(data="nowhere"), None, "nowhere"),
        pytest.param(dict(out=""), None, "--out", marks=pytest.mark.slow),
        pytest.param(dict(data__fold=3), None, "fold", marks=pytest.mark.slow),
        pytest.param(dict(batch=1), None, "batch=1", marks=pytest.mark.slow),
        pytest.param(dict(init="nowhere"), None, "nowhere", marks=pytest.mark.slow),
        (dict(), second_sees_no_data, "no such folder"),
        pytest.param(dict(), disk_fills_up, "disk is full", marks=pytest.mark.slow),
        pytest.param(dict(), cannot_read, "cannot be read", marks=pytest.mark.slow),
        (dict(), always_nan, "nothing was learned before"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_error_ends_all_and_is_said_once(pictures, tmp_path, settings, prepare, words):
    own = {"data": str(pictures), "out": tmp_path / "run", **TINY, **settings}
    data, out = own.pop("data"), own.pop("out")
    command = ["weft", "train", data, *([f"--out={out}"] if out else []), *options(**own)]
    found = start(command, 2, tmp_path, prepare)
    assert found.codes == [2, 2]
    assert words in found.text
    assert found.text.count("\n") == found.text.count("weft: ") == 1, found.text


@pytest.mark.slow
def test_folder_in_use_is_refused_in_all(pictures, tmp_path):
    run = tmp_path / "run"
    assert train(pictures, run, 2, stop_second).codes == [0, 0]
    with locked(run):
        found = resume(run, 2)
    assert found.codes == [2, 2]
    assert found.text.count("\n") == 1
    assert f"process {os.getpid()}" in found.text


# Sharded models -----------------------------------------------------------------------------------------------------


LARGE = ["cvt_13", "cvt_w24", "cetnet_tiny", "ceit_small", "vitae_small", "cswin_tiny", "pvt_small", "t2t_vit_14"]


@pytest.mark.parametrize(("name", "most"), [*((name, 0.2) for name in LARGE), ("vt_resnet50", 1 / 3)])
def test_units_of_a_sharded_model_are_small(name, most):
    """Its two transformer blocks are a large part of a VT-ResNet, and are not taken apart."""
    model = timm.create_model(name, device="meta")
    units = [*fsdp_units(model, num_parameters(model) // 4), model]
    seen: set[torch.nn.Parameter] = set()
    for unit in units:  # inner units first, so each takes what is left of its own
        own = set(unit.parameters()) - seen
        seen |= own
        assert 0 < sum(p.numel() for p in own) <= most * num_parameters(model)
    assert seen == set(model.parameters())
    assert len(set(units)) == len(units) > 8


def short_eval_batches(rank: int) -> None:
    """Seven validation pictures: two batches in the first process, one in the second."""
    Classify.eval_batch = 3


SHARDED = dict(LAYER_NORM_ONLY, batch=7, run__micro_batch=2)  # parts of 4 and of 3 pictures


def test_sharded_run_is_the_same_run(pictures, tmp_path):
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    assert train(pictures, plain, 2, short_eval_batches, **SHARDED).codes == [0, 0]
    assert train(pictures, sharded, 2, short_eval_batches, **SHARDED, run__fsdp=True).codes == [0, 0]
    assert_close(plain, sharded)
    for a, b in zip(epochs_of(plain), epochs_of(sharded), strict=True):
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-3)
    model = timm.create_model(f"local-dir:{sharded}", pretrained=True)
    kept = load_file(sharded / "model.safetensors")
    assert all(torch.equal(kept[key], value) for key, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, False])
def test_state_does_not_know_whether_the_model_was_sharded(pictures, alone, tmp_path, fsdp):
    run = tmp_path / "run"
    assert train(pictures, run, 2, stop_second, **LAYER_NORM_ONLY, run__fsdp=fsdp).codes == [0, 0]
    assert resume(run, 2, f"--run.fsdp={not fsdp}", "--allow-changes").codes == [0, 0]
    assert_close(alone, run)


def compare_families(rank: int) -> None:
    """Gradients of sharded models of all families are the means over the processes."""
    with process_group() as world:
        for name in NANO:
            torch.manual_seed(0)
            model = timm.create_model(name, img_size=32, num_classes=3, drop_path_rate=0.0).eval()
            x = torch.rand(2, 2, 3, 32, 32)  # both processes' pictures
            model(x.flatten(0, 1)).square().mean().backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            shard_model(model, world)
            model(x[rank]).square().mean().backward()
            for (key, p), grad in zip(model.named_parameters(), expected, strict=True):
                torch.testing.assert_close(full_tensor(p.grad), grad, rtol=1e-3, atol=1e-5, msg=f"{name} {key}")
    sys.exit(0)


@pytest.mark.slow
def test_every_family_can_be_sharded(tmp_path):
    found = start([], 2, tmp_path, compare_families)
    assert found.codes == [0, 0], found.text


# torchrun -----------------------------------------------------------------------------------------------------------


def torchrun(command: list[str], count: int, output: Path, restarts: int, meanwhile: Any = lambda process: None) -> int:
    """Runs Python with these arguments in `count` processes; returns the exit code."""
    before = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*before, f"--max-restarts={restarts}", *command],
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
        try:
            meanwhile(process)
            return process.wait(timeout=180)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_torchrun_starts_again_by_itself(pictures, tmp_path, count):
    """The main process is killed after its first step; the same command goes on and arrives at the same bits."""
    assert train(pictures, tmp_path / "whole", count, **EVERYTHING_RANDOM).codes == [0] * count
    run, killed = tmp_path / "run", []

    def kill_main(process: Any) -> None:
        while process.poll() is None and not (run / STATE).exists():
            time.sleep(0.01)
        while process.poll() is None and read_header(run)["progress"].step < 1:
            time.sleep(0.01)
        killed.append(last_lock_holder(run))
        os.kill(int(killed[0].split()[1]), signal.SIGKILL)

    settings = options(**{**SHORT, **EVERYTHING_RANDOM, "run__save_minutes": 0.0})
    command = ["-m", "weft", "train", str(pictures), f"--out={run}", *settings]
    code = torchrun(command, count, tmp_path / "said", 2, kill_main)
    assert code == 0, (tmp_path / "said").read_text()
    assert last_lock_holder(run) != killed[0]
    assert differences(tmp_path / "whole", run) == []


SHORT_OF_MEMORY = """
import os
from tests.e2e.test_distributed import no_memory_in_second
from weft.cli.app import main

no_memory_in_second(int(os.environ["RANK"]))
main()
"""


@pytest.mark.slow
def test_torchrun_goes_on_with_half_as_many_pictures_at_once(pictures, alone, tmp_path):
    (tmp_path / "weft").write_text(SHORT_OF_MEMORY)
    settings = options(**{**SHORT, **LAYER_NORM_ONLY, "quiet": False})
    command = [str(tmp_path / "weft"), "train", str(pictures), f"--out={tmp_path / 'run'}", *settings]
    code, output = torchrun(command, 2, tmp_path / "output", 1), (tmp_path / "output").read_text()
    assert code == 0, output
    assert output.count("Out of memory with 4 pictures at a time") == 1
    assert output.count("2 pictures at a time now") == 1
    assert read_header(tmp_path / "run")["progress"].micro_batch == 2
    assert_close(alone, tmp_path / "run")


MEETING = """
import os, sys
import torch.distributed as dist
from weft.engine.device import _rendezvous

attempt, rank, size = (int(os.environ[key]) for key in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
store = next(dist.rendezvous("env://"))[0] if sys.argv[1] == "torch" else _rendezvous(rank, size)
store.set(f"address in attempt {attempt}", "127.0.0.1")
if attempt:
    print("of the dead: " + str(store.check(["address in attempt 0"])), flush=True)
sys.exit(attempt == 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("who", "seen"), [("weft", False), ("torch", True)])
def test_restarted_processes_do_not_see_what_the_dead_left(tmp_path, who, seen):
    """Where torch's own meeting does not show it any more, ours can go."""
    (tmp_path / "meet.py").write_text(MEETING)
    code = torchrun([str(tmp_path / "meet.py"), who], 2, tmp_path / "output", 1)
    output = (tmp_path / "output").read_text()
    assert code == 0, output
    assert output.count(f"of the dead: {seen}") == 2, output


def test_restart_touches_no_folder_of_another_run(monkeypatch, pictures, tmp_path):
    run = tiny_run(pictures, tmp_path / "run", epochs=1).folder
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(WeftError, match="holds a run"):
        tiny_run(pictures, run, epochs=1)


# Shards -------------------------------------------------------------------------------------------------------------


def test_script_of_the_documentation_packs_shards(pictures, tmp_path):
    page = ROOT / "docs" / "distributed.md"
    script = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "pack.py").write_text(script.replace("10**9", "10_000"))
    subprocess.run([sys.executable, tmp_path / "pack.py", pictures, tmp_path], check=True)
    shards, folder = open_source(str(tmp_path / "*.tar")), open_source(str(pictures))
    assert len(list(tmp_path.glob("*.tar"))) > 3
    assert shards.classes == folder.classes
    assert sorted(shards.labels) == sorted(folder.labels)
    contents = {path.read_bytes(): path.parent.name for path in pictures.rglob("*.png")}
    assert all(contents[shards.open(i)] == shards.classes[shards.labels[i]] for i in range(len(shards.names)))
