"""Reports of training steps: sent to the host without waiting for the device; their means; exceptions they end in."""

import math
import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data.loader import Batch

RECENT = 50  # steps whose mean is shown


class StepReport(NamedTuple):
    """Numbers of one step; all but the last are sums over the processes."""

    loss: float
    correct: float
    pictures: float
    unread: float  # files that could not be decoded
    stop: float  # processes asked to stop
    save: float  # 1 when the main process wants the state to be saved
    grad_norm: float

    def is_finite(self, any_gradient: bool) -> bool:
        """`any_gradient`: whether the norm may be anything, since the loss scaler leaves out such steps itself."""
        return math.isfinite(self.loss) and (any_gradient or math.isfinite(self.grad_norm))


class PendingStep:
    """A step whose report is on its way to the host."""

    def __init__(self, step: int, batch: Batch, lr: float, report: Tensor):
        """`report`: the numbers of a `StepReport`, on the device."""
        self.step, self.batch, self.lr = step, batch, lr
        self._report, self._ready = report, None
        if report.is_cuda:
            self._report = torch.empty(report.shape, pin_memory=True)
            self._report.copy_(report, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> StepReport:
        """Waits until the report has arrived."""
        if self._ready is not None:
            self._ready.synchronize()
        return StepReport(*self._report.tolist())


class StepFailed(Exception):
    """A step without a finite gradient: its effect must be undone."""

    def __init__(self, pending: PendingStep, report: StepReport):
        super().__init__(f"step {pending.step}")
        self.pending, self.report = pending, report


class TrainingStopped(Exception):
    """Asked to stop on the way; the state is saved."""


class RecentSteps:
    """The last steps, and when their reports were read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, StepReport]] = deque(maxlen=RECENT)

    def add(self, report: StepReport) -> None:
        self._steps.append((time.monotonic(), report))

    def clear(self) -> None:
        self._steps.clear()

    def means(self, accuracy: bool) -> dict[str, float]:
        """Loss, pictures per second and, where it is wanted, accuracy."""
        reports = [report for _, report in self._steps]
        pictures = sum(report.pictures for report in reports)
        seconds = self._steps[-1][0] - self._steps[0][0]
        speed = (pictures - reports[0].pictures) / seconds if seconds else 0.0
        means = {"loss": sum(report.loss for report in reports) / len(reports), "pictures_per_second": speed}
        if accuracy:
            means["accuracy"] = sum(report.correct for report in reports) / pictures if pictures else 0.0
        return means
