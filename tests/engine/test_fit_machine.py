"""What is tried before the first step on a GPU, and when that is left out; the GPU's numbers are made up."""

from types import SimpleNamespace

import pytest
import torch

from weft.engine import fit_machine

GB = 10**9


def make_trainer(rehearsed: tuple[int, int], micro_batch: int = 0, processes: int = 1) -> SimpleNamespace:
    """A trainer of a model with a million parameters, 64 pictures for each process."""
    config = SimpleNamespace(run=SimpleNamespace(batch=64 * processes, micro_batch=micro_batch))
    progress = SimpleNamespace(micro_batch=64)
    world = SimpleNamespace(size=processes, all_gather=lambda mine: [mine] * processes)
    run = SimpleNamespace(rehearsed=rehearsed, progress=progress, ema=None)
    parameters = [torch.nn.Parameter(torch.zeros(10**6))]
    about = dict(optimizer=None, model=None, in_lockstep=False, device=torch.device("cuda"), world=world)
    return SimpleNamespace(run=run, config=config, progress=progress, parameters=parameters, **about)


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """Pictures of every trial, on a GPU with 20 GB of which 10 are used by torch and 5 free."""
    tried: list[int] = []

    def fits(trainer, pictures):
        tried.append(trainer.progress.micro_batch)
        return True

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GB, 20 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GB)
    monkeypatch.setattr(fit_machine, "_fits", fits)
    monkeypatch.setattr(fit_machine, "snapshot", lambda *_: {})
    monkeypatch.setattr(fit_machine, "load_tensors", lambda *_: None)
    return tried


@pytest.mark.parametrize(
    ("rehearsed", "trials"),
    [
        ((64, GB), 0),
        ((64, 5 * GB), 0),  # of 15 GB nine tenths, and of these four: 5.4
        ((64, 6 * GB), 1),
        ((32, GB), 1),  # with fewer pictures
        ((0, 0), 1),  # nothing was rehearsed, or memory did not suffice
    ],
)
def test_training_that_took_little_memory_is_not_tried_again(tried, rehearsed, trials):
    trainer = make_trainer(rehearsed)
    fit_machine.find_micro_batch(trainer)
    assert tried == [64] * trials
    assert trainer.progress.micro_batch == 64


def test_averages_of_large_models_count(tried):
    trainer = make_trainer((64, 5 * GB))
    trainer.parameters.append(SimpleNamespace(numel=lambda: 10**8, element_size=lambda: 4))  # 0.4 GB: two averages more
    fit_machine.find_micro_batch(trainer)
    assert tried == [64]


def test_all_processes_try_where_one_has_to(tried):
    trainer = make_trainer((64, GB), processes=2)
    fit_machine.find_micro_batch(trainer)
    assert not tried
    answers = iter([[True, False], [True, True]])  # whether it fits easily, then whether it fits
    trainer.world.all_gather = lambda mine: next(answers)
    fit_machine.find_micro_batch(trainer)
    assert tried == [64]


@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_says_what_it_took(monkeypatch, fails):
    def rehearse(trainer, pictures):
        if fails:
            raise torch.OutOfMemoryError("made up")

    trainer = make_trainer((0, 0))
    trainer.run.screen = SimpleNamespace(say=print)
    trainer.optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None)
    monkeypatch.setattr(fit_machine, "_can_rehearse", lambda trainer: True)
    monkeypatch.setattr(fit_machine, "_pass", rehearse)
    monkeypatch.setattr(fit_machine, "compile_ahead", lambda dry_run, workers, limit: dry_run())
    monkeypatch.setattr(fit_machine, "snapshot", lambda *_: {})
    monkeypatch.setattr(fit_machine, "load_tensors", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * GB)
    fit_machine.compile_kernels(trainer)  # pyright: ignore[reportArgumentType]
    assert trainer.run.rehearsed == ((0, 0) if fails else (64, 3 * GB))
