"""Processes that are forked from this one."""

import errno
import os
import time

import pytest

from weft.processes import end, fork, still_alive

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def test_each_lives_a_life_of_its_own(tmp_path):
    processes = fork(3, lambda number: (tmp_path / f"{number}").write_text(f"{os.getpid()}"))
    while still_alive(processes):
        time.sleep(0.01)
    assert {int((tmp_path / f"{number}").read_text()) for number in range(3)} == processes


def test_a_life_that_fails_is_over(capfd):
    processes = fork(1, lambda number: 1 // number)
    while still_alive(processes):
        time.sleep(0.01)
    assert capfd.readouterr() == ("", "")


def test_who_is_ended_is_gone():
    processes = fork(2, lambda number: time.sleep(600 * number))
    time.sleep(0.2)
    end(processes)
    assert not still_alive(processes)
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_there_are_as_many_as_the_system_lets(monkeypatch):
    """None at all, if need be: whoever wants them does without."""
    real, started = os.fork, []

    def fork_once() -> int:
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(process := real())
        return process

    monkeypatch.setattr(os, "fork", fork_once)
    processes = fork(5, lambda number: None)
    assert processes == {*started}
    end(processes)
