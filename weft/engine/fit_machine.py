"""Fits a run to its machine: compiled kernels, pictures at once in its memory, epochs in the time there is."""

import contextlib
import os
import statistics
import threading
import time

import torch

from weft.engine.device import is_out_of_memory
from weft.engine.loop import Trainer
from weft.engine.recovery import halve_micro_batch
from weft.engine.state import load_tensors, snapshot
from weft.engine.step_report import StepFailed
from weft.kernels.tuning.ahead import compile_ahead
from weft.words import many

CPU_MICRO_BATCH = 128
USABLE = 0.9  # of memory and minutes; the rest is for fragments, and for what else runs there
TRIAL_SECONDS = 15  # of training steps to find out how long one takes, ...
TRIAL_STEPS = 4  # ... but at least so many
SILENT_SECONDS = 3.0  # of compiling that need no explanation


def compile_kernels(trainer: Trainer) -> None:
    """Compiles the kernels of a training pass and of validation, many at a time; the first step would, one by one."""
    if not _can_rehearse(trainer):
        return
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
        compile_ahead(rehearse, max(1, (os.cpu_count() or 1) // trainer.world.size))
    finally:
        announcement.cancel()
    trainer.optimizer.zero_grad(set_to_none=True)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)


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
        limit -= 4 * sum(p.numel() for p in trainer.parameters)  # the message with the gradients
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

    The schedule is stretched or shrunk with it, and ends with the run.
    """
    planned, steps_per_epoch = trainer.progress.total_steps, trainer.run.plan.steps_per_epoch
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    step_time, validation = _time_steps(trainer), _time_validation(trainer)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)
    trainer.discard_reports()
    left = USABLE * 60 * trainer.config.run.minutes - trainer.run.elapsed() - 2 * validation
    epochs = trainer.world.broadcast(left / (steps_per_epoch * step_time + validation / trainer.config.run.val_epochs))
    epochs = float(int(epochs)) if epochs >= 1 else max(epochs, 1 / steps_per_epoch)  # less than one where none fits
    steps = max(1, round(epochs * steps_per_epoch))
    trainer.progress.total_steps, trainer.progress.stretch = steps, steps / planned
    fitting = many(int(epochs), "epoch") if epochs >= 1 else f"{steps} of {steps_per_epoch} steps"
    trainer.run.screen.say(f"{trainer.config.run.minutes:g} minutes: time for {fitting}")


def _time_steps(trainer: Trainer) -> float:
    """Seconds of a step, with the wait for the readers: the median, and without the first, which is slow."""
    trainer.model.train(not trainer.config.model.frozen_mode)
    start = last = time.monotonic()
    times = []
    with contextlib.closing(trainer.batches()) as batches:
        for step, batch in batches:
            trainer.train_step(step, batch)
            with contextlib.suppress(StepFailed):  # the run itself will meet that step again, and answer it
                trainer.read_reports()
            times.append(time.monotonic() - last)
            last += times[-1]
            is_over = last - start > min(TRIAL_SECONDS, 3 * trainer.config.run.minutes) and len(times) >= TRIAL_STEPS
            if trainer.world.broadcast(is_over):
                break
    return statistics.median(times[1:] or times)


def _time_validation(trainer: Trainer) -> float:
    begin = time.monotonic()
    trainer.evaluate()
    return time.monotonic() - begin
