"""Fits a run to its machine: compiled kernels, pictures at once in its memory, epochs in the time there is."""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.engine.device import is_out_of_memory
from weft.engine.loop import GPU_DELAY, Trainer
from weft.engine.recovery import halve_micro_batch
from weft.engine.state import load_tensors, snapshot
from weft.engine.step_report import StepFailed
from weft.engine.validation import evaluate
from weft.fast.swap import plain
from weft.kernels.tuning.ahead import compile_ahead

CPU_MICRO_BATCH = 128
USABLE = 0.9  # of memory; the rest is for fragments, and for what else runs there
PLANNED = 0.96  # of minutes; the rest is for steps that take longer than those of the trial
TRIAL_SECONDS = 15.0  # of training steps to find out how long one takes, and of validation, ...
TRIAL_PART = 0.03  # ... of the time there is at most, ...
TRIAL_WARM_UPS = 10  # steps within which a recording is made, if ever
TRIAL_STEPS = 4  # ... but at least so many
CLOSING_SECONDS = 1.5  # for the report, and for opening the kept model
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


def fit_into_time(trainer: Trainer) -> None:
    """Sets the run's length to what its minutes allow, from the speed of a few steps that are undone afterwards.

    Minutes are those of the whole run: what came before counts, this trial too, and so do the evaluation and the report
    at its end. The schedule is stretched or shrunk with the length, and ends with it.
    """
    planned, steps_per_epoch = trainer.progress.total_steps, trainer.run.plan.steps_per_epoch
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    step = trainer.world.broadcast(_time_steps(trainer))
    validation, closing = _time_validation(trainer, step)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)
    trainer.discard_reports()
    left = PLANNED * 60 * trainer.config.run.minutes - trainer.run.elapsed() - validation - closing
    epochs = left / (steps_per_epoch * step + validation / trainer.config.run.val_epochs)
    steps = trainer.world.broadcast(max(1, int(epochs * steps_per_epoch)))
    trainer.progress.total_steps, trainer.progress.stretch = steps, steps / planned
    epochs = steps / steps_per_epoch
    fitting = f"{epochs:.3g} epoch" + "s" * (epochs > 1) if epochs >= 1 else f"{steps} of {steps_per_epoch} steps"
    minutes = trainer.config.run.minutes
    told = f"{minutes:g} minute{'s' * (minutes != 1)}: time for {fitting}"
    if epochs < 1:
        needed = trainer.run.elapsed() + validation + closing
        told += (
            f"; start, validation and report alone take {needed:.0f} s: give more --minutes, or a smaller --img-size"
        )
    trainer.run.screen.say(told)


def _time_steps(trainer: Trainer) -> float:
    """Seconds of a step, with the wait for the readers: the mean of the later half, as the first ones are slow.

    Steps follow each other as they do in training, where the GPU does not wait for a report to be read. Those before a
    step is recorded, which are launched one by one, do not count.
    """
    trainer.model.train(not trainer.config.model.frozen_mode)
    limit = min(TRIAL_SECONDS, TRIAL_PART * 60 * trainer.config.run.minutes)
    delay = GPU_DELAY if trainer.device.type == "cuda" else 0
    ends, all_ends = [time.monotonic()], []
    with contextlib.closing(trainer.batches()) as batches:
        for step, batch in batches:
            trainer.train_step(step, batch)
            with contextlib.suppress(StepFailed):  # the run itself will meet that step again, and answer it
                trainer.read_reports(delay)
            ends.append(time.monotonic())
            all_ends.append(ends[-1])
            if trainer.warms_up() and step < TRIAL_WARM_UPS:
                ends = ends[-1:]
                continue
            if trainer.world.broadcast(ends[-1] - ends[0] > limit and len(ends) > TRIAL_STEPS + delay):
                break
    with contextlib.suppress(StepFailed):
        trainer.read_reports()
    if len(ends) < 2:  # a run of fewer steps than a recording needs
        ends = [all_ends[0], time.monotonic()] if len(all_ends) < 2 else all_ends
    half = (len(ends) - 1) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half)


def _time_validation(trainer: Trainer, step: float) -> tuple[float, float]:
    """Seconds of a validation, and of what follows the last one; from as many pictures as a short time allows."""
    run, world, batch = trainer.run, trainer.world, trainer.task.eval_batch
    val, reported = (len(part) for part in (run.split.val, run.split.reported))
    if not (val or reported):
        return 0.0, 0.0
    guess = step * batch * world.size / trainer.config.run.batch  # seconds of a batch; without gradients it takes less
    batches = max(2, int(min(TRIAL_SECONDS, TRIAL_PART * 60 * trainer.config.run.minutes) / guess))
    sample = (run.split.reported if reported else run.split.val)[: batches * batch * world.size]

    def estimate(look: Callable[[Any], object]) -> Callable[[int, int], float]:
        """Seconds for so many pictures and processes, from how `look` fares with some."""
        ends = [time.monotonic()]

        def infer(model: nn.Module, pictures: Any) -> Any:
            answers = trainer.infer(model, pictures)
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            ends.append(time.monotonic())
            return answers

        look(infer)
        ends.append(time.monotonic())
        first, each = ends[1] - ends[0], (ends[-1] - ends[1]) / max(1, len(ends) - 2)
        return lambda pictures, processes: first + each * (-(-pictures // (batch * processes)) - 1) if pictures else 0.0

    read = estimate(lambda infer: evaluate(run, infer, sample))
    kept, validate = run.kept_validation, read
    if kept is not None and len(kept.pictures) and not run.config.run.fsdp:  # whose processes meet in every batch
        model = run.best_model.eval()
        validate = estimate(
            lambda infer: [infer(model, some.pictures) for some in itertools.islice(kept.batches(batch), batches)]
        )
    closing = read(reported, 1) + CLOSING_SECONDS * bool(reported)  # the main process does this alone, from disk
    return validate(val, world.size), closing if trainer.config.run.report else 0.0
