"""The pace of a machine: which number of threads is chosen, whatever the cores."""

import pytest
import torch

from weft.catalog import pace


@pytest.mark.parametrize(
    ("usual", "speeds", "chosen"),
    [
        (2, {1: 10, 2: 19}, 2),
        (2, {1: 10, 2: 1}, 1),  # another job has a core
        (2, {1: 10, 2: 9}, 2),  # not clearly faster
        (3, {1: 10, 3: 2}, 1),
        (5, {1: 4, 2: 10, 5: 2}, 2),
        (12, {1: 1, 3: 10, 6: 8, 12: 2}, 3),
        (1, {1: 5}, 1),
    ],
)
def test_threads_that_are_fastest_are_chosen(monkeypatch, usual, speeds, chosen):
    monkeypatch.setattr(pace, "cpu_steps", lambda threads: speeds[threads])
    assert pace.choose_threads(usual) == chosen


def test_a_trial_leaves_threads_and_chance_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert pace.cpu_steps(1, seconds=0.01) > 1
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
