"""The clock of a run that has minutes: looked at a few times on the way, where its length is set anew.

A trial of a few steps says little about thousands: caches fill, other jobs come and go. So the rest of a run is planned
again from what its steps took, at the same marks in every process; the schedule is stretched or shrunk with it.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from weft.engine.threads import choose_again
from weft.engine.training_run import TrainingRun

PLANNED = 0.975  # of minutes; the rest is for steps that take longer than those before
MARKS = (0.1, 0.25, 0.5, 0.75, 0.9)  # parts of a run
SOON = 0.05  # of the steps that are left: the next mark behind a change of threads
WORTH_IT = 0.03  # of the steps that are left: a smaller change is none
COLLAPSE = 3.0  # times as long as steps have taken: something has happened to the machine


class Clock:
    """Counts what training steps and validations take, and plans what is left of the minutes."""

    def __init__(self, run: TrainingRun):
        self.run = run
        self._fastest = run.step_seconds
        self._told = False
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._step, self._began, self._aside = self.run.progress.step, time.monotonic(), 0.0
        marks = (math.ceil(mark * self.run.progress.total_steps) for mark in MARKS)
        self._mark = next((mark for mark in marks if mark > self._step), 0)  # 0: none is left

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Around a validation, whose time is not that of steps."""
        began = time.monotonic()
        yield
        self.run.progress.validation_seconds = time.monotonic() - began
        self._aside += self.run.progress.validation_seconds

    def is_at_mark(self) -> bool:
        progress = self.run.progress
        return bool(self.run.config.run.minutes) and 0 < self._mark <= progress.step < progress.total_steps

    def plan_again(self) -> bool:
        """Sets the run's length to what its minutes still allow; False where that is what was planned."""
        progress, world = self.run.progress, self.run.world
        seconds = (time.monotonic() - self._began - self._aside) / (progress.step - self._step)
        self._fastest, total = min(self._fastest, seconds), progress.total_steps
        if choose_again(self.run, slower=seconds / self._fastest):  # what steps take now is not known yet
            self._begin_stretch()
            self._mark = progress.step + math.ceil(SOON * (total - progress.step))
            return False
        wanted = world.broadcast(progress.step + self.steps_left(seconds))
        if abs(wanted - total) > WORTH_IT * (total - progress.step):
            progress.stretch *= wanted / total
            progress.total_steps = wanted
        self._begin_stretch()
        if not self._told and world.broadcast(seconds > COLLAPSE * self._fastest):
            self._tell(seconds / self._fastest)
        return progress.total_steps != total

    def _tell(self, times: float) -> None:
        self._told = True
        self.run.event(f"steps take {times:.0f} times as long as before: another job seems to use this machine")

    def steps_left(self, seconds: float) -> int:
        """Steps of so many seconds each for which there is time, with validations and the end."""
        progress, config = self.run.progress, self.run.config.run
        validation, per_epoch = progress.validation_seconds, self.run.plan.steps_per_epoch * config.val_epochs
        last = validation * (1 + (self.run.best_model is not self.run.model))  # of the average, and of the weights
        left = PLANNED * 60 * config.minutes - self.run.elapsed() - progress.closing_seconds - last
        return max(0, int(left / (seconds + validation / per_epoch)))
