"""Kernels compiled before they are needed: all that a pass launches, none of them launched, nothing else changed."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import weft
from tests.e2e.test_resume import Killed, interrupt
from tests.helpers.small_runs import differences, make_pictures, tiny_run
from weft.engine import fit_machine
from weft.kernels.tuning import ahead
from weft.run.resume import read_settings

launch = pytest.importorskip("weft.kernels.triton.launch", reason="needs Triton")


class Kernel:
    """A kernel as Triton makes one, without a GPU."""

    def __init__(self):
        self.warmed, self.launched = [], []
        self.run = lambda *args: self.launched.append(args[-1])
        self.function = self.packed_metadata = None

    def warmup(self, *args, grid, **options):
        self.warmed.append((args, grid, options))

    def __getitem__(self, grid):
        return lambda *args, **options: (self.launched.append(args[-1]), self)[1]


@pytest.fixture
def with_gpu(monkeypatch):
    """A GPU, as far as launching asks for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (ahead, launch):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    monkeypatch.setattr(ahead, "has_triton", lambda: True)
    monkeypatch.setattr(launch, "_device", lambda: 0)
    monkeypatch.setattr(launch, "_stream", lambda device: 0)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache")))


def test_kernels_of_a_dry_run_are_compiled_and_not_launched(with_gpu):
    kernel = Kernel()
    ahead.compile_ahead(lambda: launch.launch(kernel, (3,), 5, num_warps=2))
    assert kernel.warmed == [((5,), (3,), {"num_warps": 2})]
    assert not kernel.launched
    for _ in range(2):  # asked from Triton, then remembered
        launch.launch(kernel, (3,), 5, num_warps=2)
    assert kernel.launched == [5, 5]
    ahead.compile_ahead(lambda: launch.launch(kernel, (3,), 5, num_warps=2))
    assert (len(kernel.warmed), len(kernel.launched)) == (1, 2)


def test_what_a_pass_launches_backward_is_compiled_in_the_same_way(with_gpu):
    from triton.runtime import _async_compile

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            seen.append((_async_compile.active_mode.get() is not None, launch.dry_run_keys.get() is not None))
            # A GPU's gradients have a thread of their own otherwise, which knows of neither.
            assert not torch._C._is_multithreading_enabled()
            return 2 * grad

    seen = []
    ahead.compile_ahead(lambda: Doubled.apply(torch.ones(2, requires_grad=True)).sum().backward())
    assert len(seen) == 1
    assert all(seen[0])
    assert torch._C._is_multithreading_enabled()


class Compiled:
    """A kernel that asks Triton's mode to compile it, as Triton's own do, and leaves a file in Triton's cache."""

    src = metadata = None

    def __init__(self, folder, fails=()):
        self.folder, self.fails, self.kernels = folder, fails, {}
        os.environ["TRITON_CACHE_DIR"] = str(folder)  # put back by the fixture

    def warmup(self, number, grid):
        from triton.runtime import _async_compile

        def compile():
            from triton.runtime.cache import get_cache_manager

            cache, name = get_cache_manager(f"{number:08x}"), f"{number}.json"
            found = (cache.get_group(name) or {}).get(name)  # as triton.compiler.compile asks
            with (self.folder / f"{number}").open("a") as file:
                file.write(f"{'found' if found else 'compiled'} by {os.getpid()}\n")
            if number in self.fails:
                os._exit(1) if os.getpid() != PARENT else 1 / 0
            if not found:
                cache.put_group(name, {name: cache.put("{}", name, binary=False)})
            return self

        mode, finalize = _async_compile.active_mode.get(), lambda kernel: self.kernels.update({number: kernel})
        mode.submit(number, compile, finalize, *[lambda future: None][: mode.submit.__code__.co_argcount - 4])


PARENT = os.getpid()


def children() -> set[int]:
    """Processes whose parent is this one, ended ones that nobody has waited for among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            found |= {int(stat.parent.name)} if int(parent) == os.getpid() else set()
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_all_is_compiled_once_by_others_then_found(workers, with_gpu, tmp_path):
    kernel, before = Compiled(tmp_path), children()
    ahead.compile_ahead(lambda: [launch.launch(kernel, (1,), i % 20) for i in range(40)], workers)
    assert kernel.kernels.keys() == set(range(20))
    for number in range(20):
        *others, last = (tmp_path / f"{number}").read_text().splitlines()
        assert last == f"{'found' if workers > 1 else 'compiled'} by {PARENT}"
        assert len(others) == (workers > 1)
        assert not any(str(PARENT) in line or "found" in line for line in others)
    assert children() == before  # nobody is left behind


def test_what_the_cache_has_is_found_without_processes(with_gpu, tmp_path, monkeypatch):
    """As a run begins for the second time; and of a cache that lost some, these alone are compiled."""
    ahead.compile_ahead(lambda: [launch.launch(Compiled(tmp_path), (1,), i) for i in range(6)], 2)
    told, real = [], ahead.compile_in_processes
    monkeypatch.setattr(
        ahead, "compile_in_processes", lambda tasks, *a, **b: told.append(len(tasks)) or real(tasks, *a, **b)
    )
    for lost in ([], [2, 5]):
        for number in lost:
            (group,) = tmp_path.glob(f"*/__grp__{number}.json")
            group.unlink()
        again = Compiled(tmp_path)
        ahead.compile_ahead(lambda again=again: [launch.launch(again, (1,), i) for i in range(6)], 2)
        assert again.kernels.keys() == set(range(6))
    assert told == [2]


def test_another_thread_compiles_while_the_cache_is_asked(with_gpu, tmp_path):
    from triton import knobs

    kernel, found = Compiled(tmp_path), []

    def ask_in_thread():
        def compile():
            from triton.runtime.cache import get_cache_manager

            found.append(get_cache_manager("00").get_group("none.json"))

        other = threading.Thread(target=compile)
        other.start()
        other.join()
        return kernel

    before = knobs.cache.manager_class
    assert ahead.find_missing([(Future(), ask_in_thread)]) == []
    assert found == [{}]
    assert knobs.cache.manager_class is before


def test_what_takes_longest_is_compiled_first(with_gpu, tmp_path, monkeypatch):
    slow, quick, order = Compiled(tmp_path), Compiled(tmp_path), []
    monkeypatch.setattr(slow, "__module__", "weft.kernels.triton.qkv", raising=False)
    real = ahead.compile_in_processes

    def compile_in_processes(tasks, workers, **limit):
        order.extend(tasks)
        return real(tasks, workers, **limit)

    monkeypatch.setattr(ahead, "compile_in_processes", compile_in_processes)

    def dry_run():
        for number, kernel in enumerate([quick, slow, quick, slow, quick]):
            launch.launch(kernel, (1,), number)

    ahead.compile_ahead(dry_run, 2)
    assert [task.__closure__[0].cell_contents for task in order] == [3, 1, 4, 2, 0]
    assert {**quick.kernels, **slow.kernels}.keys() == set(range(5))


def test_what_cannot_be_compiled_is_left_to_the_launch(with_gpu, tmp_path):
    """Neither an error nor a crash of the compiler keeps the others from being compiled."""
    kernel = Compiled(tmp_path, fails=(3, 7))
    ahead.compile_ahead(lambda: [launch.launch(kernel, (1,), i) for i in range(20)], 4)
    assert kernel.kernels.keys() == set(range(20)) - {3, 7}


def test_without_fork_there_are_threads(with_gpu, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "fork")
    kernel = Compiled(tmp_path)
    ahead.compile_ahead(lambda: [launch.launch(kernel, (1,), i) for i in range(5)], 3)
    assert kernel.kernels.keys() == set(range(5))


def test_who_hangs_is_ended():
    begun, before = time.monotonic(), children()
    ahead.compile_in_processes([lambda: time.sleep(60)] * 3, 2, timeout=0.3)
    assert time.monotonic() - begun < 30
    assert children() == before  # nobody is left behind


@pytest.mark.parametrize(("seconds", "timeout"), [(0, 30), (60, 0.3)])
def test_processes_may_be_nobodys_business(seconds, timeout, tmp_path):
    """Where SIGCHLD is ignored, which a process inherits, nothing is left of a child that has ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        tasks = [lambda number=number: (time.sleep(seconds), (tmp_path / f"{number}").touch()) for number in range(5)]
        assert not ahead.compile_in_processes(tasks, 2, timeout=timeout)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len([*tmp_path.iterdir()]) == (0 if seconds else 5)


@pytest.mark.parametrize(("seconds", "limit", "given_up"), [(0.1, 1.0, True), (0.0, 20.0, False), (60, 0.2, True)])
def test_what_does_not_pay_back_is_given_up(seconds, limit, given_up):
    """Forty tasks of two processes: as soon as the first few say how long all will take, or at the limit."""
    begun, before = time.monotonic(), children()
    assert ahead.compile_in_processes([lambda: time.sleep(seconds)] * 40, 2, limit=limit) == given_up
    assert not given_up or time.monotonic() - begun < 1.9  # all would take two seconds
    assert children() == before  # nobody is left behind


def test_a_failed_dry_run_ends_it(with_gpu):
    with pytest.raises(ZeroDivisionError):
        ahead.compile_ahead(lambda: launch.launch(Compiled(None), (1,), 1) or 1 / 0)
    kernel = Kernel()
    launch.launch(kernel, (1,), 1)
    assert kernel.launched == [1]


def test_another_thread_launches_what_it_needs(with_gpu):
    """Somebody predicts while a run begins."""
    kernel = Kernel()
    other = threading.Thread(target=launch.launch, args=(kernel, (1,), 7))
    ahead.compile_ahead(lambda: (other.start(), other.join()))
    assert (kernel.warmed, kernel.launched) == ([], [7])


@pytest.mark.parametrize("missing", ["GPU", "kernels", "Triton"])
def test_nothing_is_compiled_for_nothing(missing, with_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "GPU")
    monkeypatch.setattr(ahead, "kernels_are_on", lambda: missing != "kernels")
    monkeypatch.setattr(ahead, "has_triton", lambda: missing != "Triton")
    passes = []
    ahead.compile_ahead(lambda: passes.append(1))
    assert not passes


@pytest.fixture
def spoiled(monkeypatch):
    """Dry runs that compute nonsense or raise `spoiled.error`, and what they were given: pictures, and the mode."""
    found = SimpleNamespace(trainer=None, passes=[], error=None)

    def spoil(dry_run, workers, limit):
        trainer, forward = found.trainer, found.trainer.forward

        def nonsense(x):
            found.passes.append((len(x), trainer.model.training))
            if found.error is not None:
                raise found.error
            return forward(x) * float("nan")

        trainer.forward = nonsense
        dry_run()
        trainer.forward = forward

    monkeypatch.setattr(fit_machine, "_can_rehearse", lambda trainer: setattr(found, "trainer", trainer) or True)
    monkeypatch.setattr(fit_machine, "compile_ahead", spoil)
    return found


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("out of memory"), ValueError("too few pictures")])
@pytest.mark.parametrize("settings", [{}, dict(model__frozen_mode=True, run__micro_batch=3)])
def test_a_dry_run_changes_nothing_of_the_run(monkeypatch, tmp_path, spoiled, error, settings):
    """Neither does it as a run begins nor as it goes on: not weights, statistics, averages, nor random numbers."""
    settings = dict(run__ema=0.9, epochs=2, **settings)
    pictures = make_pictures(tmp_path / "pictures")
    with monkeypatch.context() as plain:
        plain.setattr(fit_machine, "_can_rehearse", lambda trainer: False)
        tiny_run(pictures, tmp_path / "plain", **settings)
    spoiled.error = error
    with monkeypatch.context() as patch:
        interrupt(patch, "step", 2)
        with pytest.raises(Killed):
            tiny_run(pictures, tmp_path / "rehearsed", **settings)
    weft.train(resume=tmp_path / "rehearsed", quiet=True)
    mode = not settings.get("model__frozen_mode", False)
    assert spoiled.passes == [(settings.get("run__micro_batch", 8), mode)] * 2
    assert not differences(tmp_path / "plain", tmp_path / "rehearsed")


def test_a_run_without_time_to_compile_is_plain_and_stays_so(monkeypatch, tmp_path):
    monkeypatch.setattr(fit_machine, "_can_rehearse", lambda trainer: True)
    limits = []
    monkeypatch.setattr(fit_machine, "compile_ahead", lambda dry_run, workers, limit: limits.append(limit) or True)
    run = tiny_run(make_pictures(tmp_path / "pictures"), tmp_path / "run", minutes=0.01).folder
    assert limits == [pytest.approx(0.2 * 0.6)]
    assert read_settings(run).run.fast is False
