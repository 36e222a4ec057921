"""The quick look in other processes: it finds what threads find, whatever happens to a process."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from tests.data.test_check import make_clean, plant
from weft.data.check import headers
from weft.data.check.headers import QuickLook
from weft.data.check.scan import Scan
from weft.data.read import MAX_PIXELS
from weft.data.sources.open import open_source
from weft.data.sources.source import Source

HERE = os.getpid()
forks = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    """Every kind of bad file and of odd picture, among good ones."""
    root = make_clean(tmp_path_factory.mktemp("messy"))
    plant(root)
    return open_source(str(root))


@pytest.fixture
def in_processes(monkeypatch):
    monkeypatch.setattr(headers, "FEW", 0)
    monkeypatch.setattr(headers, "PART", 7)


def look(source: Source, seconds: float = 60.0) -> Scan:
    return QuickLook(source, MAX_PIXELS, seconds).result()


def assert_same(one: Scan, other: Scan) -> None:
    assert one.records.tolist() == other.records.tolist()
    assert one.read.tolist() == other.read.tolist()
    assert (one.bad, one.profiles) == (other.bad, other.profiles)


@pytest.fixture(scope="module")
def by_threads(source) -> Scan:
    found = look(source)
    assert len(found.bad) == 5
    assert len(found.profiles) == 1
    assert len(found.read) == len(source) - 5
    return found


def ends(process) -> bool:
    """Whether a process ends; of that the pool's own thread may hear first, and tell a moment later."""
    until = time.monotonic() + 30
    while process.is_alive() and time.monotonic() < until:
        process.join(0.1)
        time.sleep(0.01)
    return not process.is_alive()


@forks
def test_processes_find_what_threads_find(source, by_threads, in_processes, monkeypatch):
    monkeypatch.setattr(headers, "in_threads", lambda look, order, *_: [] if not len(order) else pytest.fail("threads"))
    told = []
    found = QuickLook(source, MAX_PIXELS, 60.0).result(lambda done, of: told.append((done, of)))
    assert_same(found, by_threads)
    assert told[-1] == (len(source), len(source))


@forks
@pytest.mark.parametrize("number", [0, 40])
def test_threads_go_on_where_a_process_dies(source, by_threads, in_processes, monkeypatch, number):
    plain = QuickLook.look

    def deadly(self, index):
        if index == number and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, index)

    monkeypatch.setattr(QuickLook, "look", deadly)
    assert_same(look(source), by_threads)


@forks
def test_a_process_that_hangs_ends_with_its_time(source, by_threads, in_processes, monkeypatch):
    monkeypatch.setattr(headers, "GRACE", 0.0)
    plain = QuickLook.look
    monkeypatch.setattr(QuickLook, "look", lambda self, i: time.sleep(600) if os.getpid() != HERE else plain(self, i))
    assert_same(look(source, seconds=0.1), by_threads)  # threads read a first portion however late it is


@forks
@pytest.mark.timeout(60)
def test_a_process_that_hangs_before_it_begins_holds_nobody_up(source, by_threads, in_processes, monkeypatch):
    """As one does that was forked while a thread held a lock: it never comes to the alarm that would end it."""
    monkeypatch.setattr(headers, "GRACE", 0.5)
    monkeypatch.setattr(headers, "_begin", lambda *_: time.sleep(600))
    before = set(multiprocessing.active_children())
    assert_same(look(source, seconds=0.1), by_threads)
    for process in set(multiprocessing.active_children()) - before:
        assert ends(process)


@pytest.mark.parametrize("error", [OSError, AssertionError])
def test_where_no_process_can_be_made_threads_look(source, by_threads, in_processes, monkeypatch, error):
    class Refused(headers.ProcessPoolExecutor):
        def submit(self, *_):
            raise error

    monkeypatch.setattr(headers, "ProcessPoolExecutor", Refused)
    assert_same(look(source), by_threads)


def test_large_files_are_read_whole_only_where_others_equal_them_in_size(source, by_threads, monkeypatch):
    """The hashes that count, those of copies, are the same as where every file is read whole."""
    monkeypatch.setattr(headers, "SMALL", 0)
    hashes = look(source).records["hash"]
    assert 6 <= np.count_nonzero(hashes) < len(by_threads.read) / 2
    for values in (hashes, by_threads.records["hash"]):
        kinds, counts = np.unique(values[values > 0], return_counts=True)
        assert len(kinds[counts > 1]) == 3
    assert (hashes[hashes > 0] == by_threads.records["hash"][hashes > 0]).all()


@forks
def test_nobody_is_left_behind(source, in_processes):
    given_up = QuickLook(source, MAX_PIXELS, 60.0)
    processes = list(given_up._pool._processes.values())
    assert processes
    given_up.close()
    for process in processes:
        assert ends(process)
