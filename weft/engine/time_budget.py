"""Fits a new run into its minutes, which are those from Enter to the report: a trial of steps and of validation.

On the way `weft.engine.clock` plans again.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.engine.loop import GPU_DELAY, Trainer
from weft.engine.state import load_tensors, snapshot
from weft.engine.step_report import StepFailed
from weft.engine.validation import evaluate

TRIAL_SECONDS = 15.0  # of training steps to find out how long one takes, and of validation, ...
TRIAL_PART = 0.03  # ... of the time there is at most, ...
TRIAL_WARM_UPS = 10  # steps within which a recording is made, if ever
TRIAL_STEPS = 4  # ... but at least so many
CLOSING_SECONDS = 1.5  # for the report, and for opening the kept model


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
    trainer.progress.validation_seconds, trainer.progress.closing_seconds = validation, closing
    steps = trainer.world.broadcast(max(1, trainer.clock.steps_left(step)))
    trainer.progress.total_steps, trainer.progress.stretch = steps, steps / planned
    epochs = steps / steps_per_epoch
    fitting = f"{epochs:.3g} epoch" + "s" * (epochs > 1) if epochs >= 1 else f"{steps} of {steps_per_epoch} steps"
    minutes = trainer.config.run.minutes
    told = f"{minutes:g} minute{'s' * (minutes != 1)}: time for {fitting}"
    if epochs < 1:
        needed = trainer.run.elapsed() + validation + closing
        told += (
            f"; start, validation and report alone take {needed:.0f} s: too little to learn anything. Give it"
            f" --minutes {math.ceil(needed / 15)} or more, or a smaller --img-size"
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

    read = estimate(lambda infer: evaluate(run, infer, run.best_model, sample))
    kept, validate = run.kept_validation, read
    if kept is not None and len(kept.pictures) and not run.config.run.fsdp:  # whose processes meet in every batch
        model = run.best_model.eval()
        validate = estimate(
            lambda infer: [infer(model, some.pictures) for some in itertools.islice(kept.batches(batch), batches)]
        )
    closing = read(reported, 1) + CLOSING_SECONDS * bool(reported)  # the main process does this alone, from disk
    return validate(val, world.size), closing if trainer.config.run.report else 0.0
