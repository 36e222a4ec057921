"""Fits a run to its machine: compiled kernels, and pictures at once in its memory."""

import contextlib
import math
import os
import threading
import time
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
SILENT_SECONDS = 3.0  # of compiling that need no explanation
TRIED_PICTURES, TRIED_TIMES = 16, 3
CLEARLY_FASTER = 1.15  # times as fast: for less, nothing is rounded


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
    if trainer.device.type != "cuda" or trainer.in_lockstep:
        return
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    while not all(trainer.world.all_gather(_fits(trainer, mine))):
        halve_micro_batch(trainer.run)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)


def choose_precision(trainer: Trainer) -> None:
    """Has a CPU compute in bfloat16 where this model clearly trains faster so, and nobody said otherwise.

    Some gain half or more, some lose. Only for runs with minutes, whose length is a matter of timing anyway: others
    come to the same numbers each time.
    """
    run = trainer.config.run
    if trainer.device.type != "cpu" or trainer.world.size > 1 or run.precision != "auto" or run.deterministic:
        return
    if not torch.cpu._is_avx512_bf16_supported():
        return
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    times = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    for _ in range(TRIED_TIMES):  # in turn, so that a slow moment of the machine hits both
        times = {dtype: min(best, _pass_seconds(trainer, dtype)) for dtype, best in times.items()}
    trainer.optimizer.zero_grad(set_to_none=True)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)
    gain = times[torch.float32] / times[torch.bfloat16]
    trainer.run.compute_in(torch.bfloat16 if gain > CLEARLY_FASTER else torch.float32)
    if gain > CLEARLY_FASTER:
        trainer.run.screen.say(f"run.precision bf16: {gain:.1f} times as fast as fp32, on this CPU and for this model")


def _pass_seconds(trainer: Trainer, dtype: torch.dtype) -> float:
    """Seconds of a training pass of some pictures; infinite where they cannot be computed so."""
    trainer.run.compute_in(dtype)
    trainer.model.train(not trainer.config.model.frozen_mode)
    batch = trainer.task.dummy_batch(min(TRIED_PICTURES, trainer.progress.micro_batch))
    begin = time.perf_counter()
    try:
        loss, _ = trainer.gradients(0, batch).tolist()
    except RuntimeError:  # an operation that does not know the type
        return math.inf
    return time.perf_counter() - begin if math.isfinite(loss) else math.inf


def _fits(trainer: Trainer, pictures: int) -> bool:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(trainer.device)
    free, _ = torch.cuda.mem_get_info(trainer.device)
    limit = USABLE * (free + torch.cuda.memory_reserved(trainer.device))
    if trainer.world.size > 1:
        limit -= 4 * sum(p.numel() for p in trainer.parameters)  # buckets of gradients, which stay
    try:
        _pass(trainer, pictures)
        trainer.update()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return torch.cuda.max_memory_reserved(trainer.device) <= limit
