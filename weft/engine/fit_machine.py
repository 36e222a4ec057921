"""Fits a run to its machine: compiled kernels, and pictures at once in its memory."""

import contextlib
import math
import os
import threading
from dataclasses import replace

import torch

from weft.engine.device import is_out_of_memory
from weft.engine.loop import Trainer
from weft.engine.recovery import halve_micro_batch
from weft.engine.state import load_tensors, snapshot
from weft.fast.swap import plain
from weft.kernels.tuning.ahead import compile_ahead

CPU_MICRO_BATCH = 128
USABLE = 0.9  # of memory; the rest is for fragments, and for what else runs there
EASILY = 0.4  # of usable memory; where a rehearsal took less, training is not tried
SILENT_SECONDS = 3.0  # of compiling that need no explanation


def compile_kernels(trainer: Trainer, limit: float = math.inf) -> bool:
    """Compiles the kernels of a training pass and of validation, many at a time; the first step would, one by one.

    True where that would take more than `limit` seconds, and was given up.
    """
    if not _can_rehearse(trainer):
        return False
    mine = -(-trainer.config.run.batch // trainer.world.size)
    trainer.progress.micro_batch = trainer.progress.micro_batch or mine  # until it is known how many fit
    pictures = min(mine, trainer.progress.micro_batch)  # one pass: more of them would be recorded, to be replayed

    def rehearse() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # too little memory, too few pictures: the step answers
            _pass(trainer, pictures)
            trainer.run.rehearsed = pictures, torch.cuda.max_memory_reserved(trainer.device)

    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    text = "compiling kernels for this GPU; they are kept for next time"
    announcement = threading.Timer(SILENT_SECONDS, trainer.run.screen.say, [text])
    announcement.start()
    try:
        given_up = compile_ahead(rehearse, max(1, (os.cpu_count() or 1) // trainer.world.size), limit)
    finally:
        announcement.cancel()
    trainer.optimizer.zero_grad(set_to_none=True)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)
    return any(trainer.world.all_gather(given_up))


def train_plainly(trainer: Trainer) -> None:
    """Gives up fused forms, for the rest of the run: one that resumes it computes likewise."""
    trainer.run.rehearsed = 0, 0  # which was of these forms
    trainer.run.config = replace(trainer.config, run=replace(trainer.config.run, fast=False))
    for model in (trainer.model, trainer.run.ema and trainer.run.ema.module):
        if model is not None:
            plain(model)


def _can_rehearse(trainer: Trainer) -> bool:
    """Not where processes meet, nor where the pass goes on from what kernels found, boxes, which is no number here.

    Nor through torch.compile, which has its own kernels and its own way to compile many at a time.
    """
    run = trainer.config.run
    alone = not (run.fsdp or trainer.in_lockstep)
    return trainer.device.type == "cuda" and alone and not run.compile and trainer.task.can_replay


def _pass(trainer: Trainer, pictures: int) -> None:
    """A training step's gradients and a batch of validation, on dummy pictures."""
    trainer.model.train(not trainer.config.model.frozen_mode)
    if trainer.task.kept is not None:
        trainer.task.kept.rehearse(pictures, trainer.device)
    trainer.gradients(0, trainer.task.dummy_batch(pictures))
    with torch.no_grad():
        trainer.task.infer(trainer.model.eval(), trainer.task.dummy_batch(trainer.task.eval_batch).pictures)


def find_micro_batch(trainer: Trainer) -> None:
    """Sets how many pictures are computed at once where nobody said.

    On a GPU a whole training step and a validation step are tried with dummy pictures, with half as many as long as
    memory does not suffice, in any process. Processes that meet within a step cannot try: one would wait for another.
    """
    mine = -(-trainer.config.run.batch // trainer.world.size)
    if trainer.config.run.micro_batch:
        return
    trainer.progress.micro_batch = mine
    if trainer.device.type != "cuda":
        trainer.progress.micro_batch = min(mine, CPU_MICRO_BATCH)
    if trainer.device.type != "cuda" or trainer.in_lockstep or all(trainer.world.all_gather(_fits_easily(trainer))):
        return
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    while not all(trainer.world.all_gather(_fits(trainer, mine))):
        halve_micro_batch(trainer.run)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)


def _fits_easily(trainer: Trainer) -> bool:
    """Whether the pass that named the kernels had all its pictures and took a small part of the memory.

    It has launched no kernel of ours, yet had the memory for all that they write. Kept pictures, at most 0.3 of what is
    free, may have come after it.
    """
    pictures, taken = trainer.run.rehearsed
    return pictures == trainer.progress.micro_batch and taken + _update_bytes(trainer) <= EASILY * _limit(trainer)


def _update_bytes(trainer: Trainer) -> int:
    """Memory of the update that no pass before it has: two averages of each parameter, and what is made on the way."""
    return 4 * sum(p.numel() * p.element_size() for p in trainer.parameters)


def _limit(trainer: Trainer) -> float:
    """Bytes that training may take here."""
    free, _ = torch.cuda.mem_get_info(trainer.device)
    limit = USABLE * (free + torch.cuda.memory_reserved(trainer.device))
    if trainer.world.size > 1:
        limit -= 4 * sum(p.numel() for p in trainer.parameters)  # buckets of gradients, which stay
    return limit


def _fits(trainer: Trainer, pictures: int) -> bool:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(trainer.device)
    limit = _limit(trainer)
    try:
        _pass(trainer, pictures)
        trainer.update()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return torch.cuda.max_memory_reserved(trainer.device) <= limit
