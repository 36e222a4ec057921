"""Fits a new run into its minutes, which are those from Enter to the report: a trial of steps and of validation.

On the way `weft.engine.clock` plans again.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.engine.loop import GPU_DELAY, Trainer
from weft.engine.state import load_tensors, snapshot
from weft.engine.step_report import StepFailed
from weft.engine.validation import evaluate

TRIAL_SECONDS = 15.0  # of training steps to find out how long one takes, ...
TRIAL_PART = 0.03  # ... of the time there is at most, ...
TRIAL_WARM_UPS = 10  # steps within which a recording is made, if ever
TRIAL_STEPS = 4  # ... but at least so many
LOOK_SECONDS, LOOK_PART = 5.0, 0.01  # likewise of each look at validation, of which there are up to three, ...
TRIAL_BATCHES = 2  # ... but at least so many batches
VALIDATED = 0.1  # of the minutes, for all validations together: where that does not suffice, fewer pictures validate
CLOSING_SECONDS = 1.5  # for the report, and for opening the kept model


def fit_into_time(trainer: Trainer) -> None:
    """Sets the run's length to what its minutes allow, from the speed of a few steps that are undone afterwards.

    Minutes are those of the whole run: what came before counts, this trial too, and so do the evaluation and the report
    at its end. The schedule is stretched or shrunk with the length, and ends with it.
    """
    planned, steps_per_epoch = trainer.progress.total_steps, trainer.run.plan.steps_per_epoch
    before = snapshot(trainer.model, trainer.run.ema, trainer.optimizer)
    step = trainer.run.step_seconds = trainer.world.broadcast(_time_steps(trainer))
    seconds_of, closing = _time_validation(trainer)
    load_tensors(before, trainer.model, trainer.run.ema, trainer.optimizer)
    trainer.discard_reports()
    pictures = trainer.world.broadcast(_count_validated(trainer, step, seconds_of, closing))
    validation = seconds_of(pictures)
    trainer.progress.validation_seconds, trainer.progress.closing_seconds = validation, closing
    if pictures < (all_pictures := len(trainer.run.split.val)):
        trainer.progress.validation_pictures = pictures
        trainer.run.screen.say(
            f"{pictures} of {all_pictures} pictures validate on the way: all would take"
            f" {seconds_of(all_pictures):.0f} s each time. The report is on all of them"
        )
    steps = trainer.world.broadcast(max(1, trainer.clock.steps_left(step)))
    trainer.progress.total_steps, trainer.progress.stretch = steps, steps / planned
    epochs = steps / steps_per_epoch
    fitting = f"{epochs:.3g} epoch" + "s" * (epochs > 1) if epochs >= 1 else f"{steps} of {steps_per_epoch} steps"
    minutes = trainer.config.run.minutes
    told = f"{minutes:g} minute{'s' * (minutes != 1)}: time for {fitting}"
    if epochs < 1:
        needed = trainer.run.elapsed() + validation + closing
        told += (
            f"; start, validation and report alone take {needed:.0f} s: too little to learn much. Give it"
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


def _count_validated(trainer: Trainer, step: float, seconds_of: Callable[[int], float], closing: float) -> int:
    """How many pictures validate on the way: all, or as many as a part of the minutes suffices for.

    Where no report follows, the last validation is the result, and in a sharded model all processes meet in it.
    """
    run, config = trainer.run, trainer.config.run
    wanted, unit = len(run.split.val), trainer.task.eval_batch * trainer.world.size
    if not config.report or config.fsdp:
        return wanted
    training = (1 - VALIDATED) * 60 * config.minutes - run.elapsed() - closing
    epochs = max(0.0, training / step) / run.plan.steps_per_epoch
    times = max(1, math.ceil(epochs / config.val_epochs)) + (run.best_model is not run.model)
    most = VALIDATED * 60 * config.minutes / times
    fitting = [pictures for pictures in range(unit, wanted, unit) if seconds_of(pictures) <= most]
    return wanted if seconds_of(wanted) <= most else max(fitting, default=min(unit, wanted))


class BatchTimes(NamedTuple):
    """Seconds of the first batch of a look at pictures, and of each that follows."""

    first: float
    each: float

    @classmethod
    def between(cls, ends: Sequence[float], end: float) -> "BatchTimes":
        """Those of a look that began at the first of `ends`, where the others are the ends of its batches.

        The first batch costs more. One of the next ones may, too, in which launches are recorded, so their median
        counts. What follows them until `end`, such as a metric over all, grows with their number.
        """
        times = [later - earlier for earlier, later in itertools.pairwise(ends)]
        after = (end - ends[-1]) / len(times)
        return cls(times[0] + after, statistics.median(times[1:] or times) + after)

    def of(self, batches: int) -> float:
        return self.first + self.each * (batches - 1) if batches else 0.0


def _time_validation(trainer: Trainer) -> tuple[Callable[[int], float], float]:
    """Seconds of a validation on so many pictures, and of what follows the last one; from as many as a short time
    allows."""
    run, world, batch = trainer.run, trainer.world, trainer.task.eval_batch
    reported = run.split.reported
    sample = reported if len(reported) else run.split.val
    if not len(sample):
        return lambda pictures: 0.0, 0.0

    def look(batches: int) -> BatchTimes:
        some = sample[: batches * batch * world.size]
        return _timed(trainer, lambda infer: evaluate(run, infer, run.best_model, some))

    read, limit = look(TRIAL_BATCHES), min(LOOK_SECONDS, LOOK_PART * 60 * trainer.config.run.minutes)
    batches = world.broadcast(max(TRIAL_BATCHES, int(limit / max(read.each, 1e-3))))
    if batches > TRIAL_BATCHES:
        read = look(batches)
    opened = read
    if run.progress.bf16:  # who opens the kept model, as the report does, computes in float32
        run.task.dtype = torch.float32
        opened = look(batches)
        run.task.dtype = run.dtype
    kept, validate = run.kept_validation, read
    if kept is not None and len(kept.pictures) and not run.config.run.fsdp:  # whose processes meet in every batch
        model, some = run.best_model.eval(), itertools.islice(kept.batches(batch), batches)
        validate = _timed(trainer, lambda infer: [infer(model, part.pictures) for part in some])
    # the main process does this alone, from disk
    closing = opened.of(-(-len(reported) // batch)) + CLOSING_SECONDS * bool(len(reported))
    return (
        lambda pictures: validate.of(-(-pictures // (batch * world.size))),
        closing if trainer.config.run.report else 0.0,
    )


def _timed(trainer: Trainer, look: Callable[[Any], object]) -> BatchTimes:
    """How `look` fares, which calls what it is given with the model and each batch of pictures."""
    ends = [time.monotonic()]

    def infer(model: nn.Module, pictures: Any) -> Any:
        answers = trainer.infer(model, pictures)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        ends.append(time.monotonic())
        return answers

    look(infer)
    return BatchTimes.between(ends, time.monotonic())
