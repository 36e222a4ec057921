"""The training loop, to be read from top to bottom.

A run is a list of steps, each a function of the state before it, the seed and its own number. So a run that was killed
goes on from its last saved state and arrives at the same weights, and a step that failed can be undone by going back to
that state and leaving its batch out. On a GPU nothing waits for a step's result: what a step reports (loss, a lack of
memory, a wish to stop) is read a few steps later, at the same step in every process.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.loader import Batch, train_batches
from weft.engine.bad_files import report_bad_files
from weft.engine.checkpoint import save, write_best
from weft.engine.compiling import compile_model
from weft.engine.device import is_out_of_memory, reduce_step, running_statistics
from weft.engine.optim import learning_rate, scale_schedule
from weft.engine.recovery import halve_micro_batch, roll_back
from weft.engine.state import RunProgress, full_tensor, is_finite
from weft.engine.step_report import PendingStep, RecentSteps, StepFailed, StepReport, TrainingStopped
from weft.engine.training_run import TrainingRun
from weft.engine.validation import evaluate
from weft.errors import WeftError
from weft.fast.replay import Replayed, replay
from weft.tasks.task import cut

GPU_DELAY = 3  # steps between a step and the look at its report, so that the GPU never waits for the host
LOG_ROWS = 500  # of steps in metrics.jsonl, about


class Trainer:
    """Trains a model step by step and validates it after each epoch; `fit` is where to begin reading."""

    def __init__(self, run: TrainingRun):
        self.run, self.world, self.device, self.task = run, run.world, run.world.device, run.task
        self.model, self.optimizer = run.model, run.optimizer
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.statistics = running_statistics(self.model)
        # Processes that meet within forward and backward passes: each must make equally many of these.
        self.in_lockstep = self.world.size > 1 and (self.config.run.fsdp or self.config.run.sync_bn)
        self.forward: Callable[..., Any] = self.make_forward()
        self.pending: deque[PendingStep] = deque()
        self.recent = RecentSteps()
        self.stop_requested = False  # by a signal
        self.stopping = self.saving = False  # agreed by all processes

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def progress(self) -> RunProgress:
        return self.run.progress

    def make_forward(self) -> Callable[..., Any]:
        """The model as a step calls it: compiled, replayed, both or as it is."""
        run = self.config.run
        model: Any = compile_model(self.model) if run.compile else self.model
        alone = not (run.fsdp or self.in_lockstep or run.deterministic)
        may_replay = run.replay and alone and self.device.type == "cuda" and self.task.can_replay
        return replay(model) if may_replay else model

    # The run ----------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Trains all epochs that are left. Raises `TrainingStopped` when asked to stop on the way."""
        while self.progress.validated < self.epochs:
            with contextlib.closing(self.batches()) as batches:
                try:
                    while self.progress.validated < self.epochs:
                        self.train_until(self.end_of_epoch(), batches)
                        self.validate()
                except StepFailed as failure:
                    self.discard_reports()
                    roll_back(self.run, failure)

    @property
    def epochs(self) -> int:
        return math.ceil(self.progress.total_steps / self.run.plan.steps_per_epoch)

    def end_of_epoch(self) -> int:
        """The step at which the first epoch that is not validated yet ends."""
        return min((self.progress.validated + 1) * self.run.plan.steps_per_epoch, self.progress.total_steps)

    def batches(self) -> Generator[tuple[int, Batch]]:
        """All steps that are left, with their pictures; readers go on while the model is validated."""
        left = range(self.progress.step, self.progress.total_steps)
        steps = [step for step in left if step not in self.progress.skipped]
        batches = train_batches(
            self.run.source,
            self.task.augmentation,
            self.run.plan,
            steps,
            workers=self.config.data.workers,
            pin=self.device.type == "cuda",
        )
        with contextlib.closing(batches):
            try:
                yield from zip(steps, batches, strict=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise WeftError("A batch does not fit into memory; choose a smaller --img-size or --batch.") from None

    def train_until(self, end: int, batches: Generator[tuple[int, Batch]]) -> None:
        self.model.train(not self.config.model.frozen_mode)
        while any(step not in self.progress.skipped for step in range(self.progress.step, end)):
            step, batch = next(batches)
            self.train_step(step, batch)
            self.progress.step = step + 1
            self.read_reports(self.device.type == "cuda" and GPU_DELAY)
            if self.saving or self.stopping:
                self.save()
            if self.stopping:
                raise TrainingStopped
        self.progress.step = end  # the last steps may be among those left out
        self.read_reports()

    # One step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: int, batch: Batch) -> None:
        lr = self.set_learning_rate(step)
        totals = self.try_gradients(step, batch)
        no_memory = totals is None
        if no_memory and self.stop_replaying():
            return self.train_step(step, batch)
        if no_memory and self.world.size == 1:
            halve_micro_batch(self.run)  # and do the step again; several processes agree on that through the report
            return self.train_step(step, batch)
        if totals is None:
            totals = torch.zeros(2, device=self.device)
        wants_save = self.world.is_main and time.monotonic() - self.run.saved_at > 60 * self.config.run.save_minutes
        facts = [len(batch.pictures), len(batch.bad), no_memory, self.stop_requested, wants_save]
        told = torch.tensor(facts, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        report = torch.cat([totals, told.to(self.device, non_blocking=True)])
        parameters = [] if self.config.run.fsdp else self.parameters  # sharded gradients are reduced on their way
        reduce_step(self.world, parameters, self.statistics, report)
        report = torch.cat([report, self.update().reshape(1)])
        self.pending.append(PendingStep(step, batch, lr, report))

    def set_learning_rate(self, step: int) -> float:
        steps = self.run.plan.steps_per_epoch
        optim = scale_schedule(self.config.optim, self.progress.stretch)
        epochs = self.progress.total_steps / steps - optim.cooldown_epochs
        lr = learning_rate(optim, self.config.run.batch, step / steps, epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        return lr

    def try_gradients(self, step: int, batch: Batch) -> Tensor | None:
        """`gradients`, or None where memory does not suffice; no traceback holds the failed pass then."""
        try:
            return self.gradients(step, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.in_lockstep:  # the others wait in the middle of their step
                raise WeftError("Out of memory; choose a smaller --run.micro_batch.") from None
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise WeftError(
                "BatchNorm cannot train on a single picture whose feature maps shrink to one position; choose a larger"
                " --batch and --run.micro_batch, or a larger --img-size."
            ) from None
        return None

    def gradients(self, step: int, batch: Batch) -> Tensor:
        """Adds up the gradients of this process's pictures; returns (2,) loss and number of hits.

        The loss is a sum divided by the whole batch's size, so parts and processes add up to the batch's mean.
        """
        self.optimizer.zero_grad(set_to_none=True)
        seed = self.run.seed(step)
        torch.manual_seed(seed)  # drop path and dropout of this step
        totals = torch.zeros(2, device=self.device)
        parts = self.count_micro_batches(batch)
        is_blank = bool(batch.bad) and len(batch.pictures) < max(2, parts)  # BatchNorm cannot train on one
        if is_blank and self.world.size == 1:
            return totals
        if is_blank:  # takes part all the same, with pictures that weigh nothing
            batch = self.task.dummy_batch(parts * 2)
        pictures, targets = self.task.prepare(batch, seed)
        for x, y in zip(cut(pictures, parts), cut(targets, parts), strict=True):
            loss, hits = self.task.loss(self.forward, x, y, self.config.run.batch)
            scale = self.world.size if self.config.run.fsdp else 1  # FSDP takes the mean over processes, not the sum
            self.run.scaler.scale(loss * (0 if is_blank else scale)).backward()
            if is_blank:
                continue
            totals += torch.stack([loss.detach(), hits])
        return totals

    def count_micro_batches(self, batch: Batch) -> int:
        """The number of portions that a batch is computed in; in lockstep the same number in each process."""
        if not self.in_lockstep:
            return math.ceil(max(1, len(batch.pictures)) / self.progress.micro_batch)
        fewest, most = self.config.run.batch // self.world.size, math.ceil(self.config.run.batch / self.world.size)
        return min(fewest, math.ceil(most / self.progress.micro_batch))

    def update(self) -> Tensor:
        """Moves the weights along the gradients; returns the norm of these."""
        self.run.scaler.unscale_(self.optimizer)
        clip = self.config.optim.clip or math.inf
        norm = full_tensor(nn.utils.clip_grad_norm_(self.parameters, clip))
        self.run.scaler.step(self.optimizer)
        self.run.scaler.update()
        if self.run.ema is not None:
            self.run.ema.update(self.model)
        return norm

    def stop_replaying(self) -> bool:
        """Frees the memory of recordings, and makes no more; False where there are none."""
        if not (isinstance(self.forward, Replayed) and self.forward.holds_memory):
            return False
        self.optimizer.zero_grad(set_to_none=True)
        self.forward.forget()
        self.forward = self.forward.model
        torch.cuda.empty_cache()
        self.run.event("memory is short: the model's launches are no longer replayed")
        return True

    # Reports ----------------------------------------------------------------------------------------------------

    def read_reports(self, keep: int = 0) -> None:
        """Reads all reports but the last `keep`. Every process reads the same ones at the same step."""
        while len(self.pending) > keep:
            pending = self.pending.popleft()
            report = pending.read()
            if report.no_memory or not report.is_finite(any_gradient=self.run.scaler.is_enabled()):
                raise StepFailed(pending, report)
            self.stopping |= report.stop > 0
            self.saving |= report.save > 0
            if report.unread:
                report_bad_files(self.run, pending.batch.bad)
            self.progress.epoch_loss += report.loss
            self.progress.epoch_steps += 1
            self.log_step(pending, report)

    def log_step(self, pending: PendingStep, report: StepReport) -> None:
        steps, total = self.run.plan.steps_per_epoch, self.progress.total_steps
        self.recent.add(report)
        means = self.recent.means(accuracy=self.task.counts_hits)
        speed = means["pictures_per_second"]
        left = (total - pending.step) * self.config.run.batch / speed if speed else 0.0
        self.run.screen.step(pending.step // steps + 1, pending.step % steps + 1, steps, means, left)
        if pending.step % max(1, total // LOG_ROWS) == 0:
            row = {"kind": "step", "step": pending.step + 1, "epoch": (pending.step + 1) / steps, "lr": pending.lr}
            self.run.log({**row, "loss": report.loss, "grad_norm": report.grad_norm, "pictures_per_second": speed})

    def discard_reports(self) -> None:
        """Nothing that was reported so far counts: it was a trial, or has been undone."""
        self.pending.clear()
        self.recent.clear()
        self.progress.bad.clear()
        self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0

    # Validation -------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Ends an epoch: validation, a row of metrics, and the model where it is the best so far."""
        self.save()
        epoch = self.progress.validated + 1
        last = self.progress.step >= self.progress.total_steps or self.is_out_of_time()
        due = last or epoch % self.config.run.val_epochs == 0
        result = self.evaluate() if due else {}
        score, val_loss = result.get(self.task.score), result.get("loss")
        best = due and self.progress.is_better(score, val_loss) and is_finite(self.run.best_model)
        if best:
            self.progress.best, self.progress.best_loss, self.progress.best_epoch = score, val_loss, epoch
            write_best(self.run)
        loss = self.progress.epoch_loss / max(1, self.progress.epoch_steps)
        row = {"kind": "epoch", "step": self.progress.step, "epoch": epoch, "train_loss": loss}
        row |= {f"val_{key}": value for key, value in result.items()}
        row |= {"lr": self.set_learning_rate(self.progress.step - 1), "seconds": self.run.elapsed(), "best": best}
        self.run.log(row)
        self.run.screen.epoch(row, self.task.shown_metrics)
        self.progress.validated = epoch
        self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0
        if due:
            self.stop_early(epoch)
        self.recent.clear()  # the speed is that of training
        self.save()

    def evaluate(self) -> dict[str, float]:
        """Metrics on the validation pictures; nothing where there are none."""
        return evaluate(self.run, self.infer)

    def infer(self, model: nn.Module, pictures: Any) -> Any:
        """The task's answers; recordings of training make room where memory does not suffice."""
        if self.stop_requested and self.world.size == 1:
            raise TrainingStopped  # the state was saved before validation began
        try:
            return self.task.infer(model, pictures)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self.stop_replaying():
            return self.infer(model, pictures)
        raise WeftError(
            "Out of memory in validation; choose a smaller --img-size; in segmentation --test.mode slide or a"
            f" --test.short_side help, too. The state before it is saved in {self.run.folder}."
        )

    def stop_early(self, epoch: int) -> None:
        """Ends the run where it has had its time, or does not get better; only a validated epoch can be the last."""
        patience, why = self.config.run.patience, ""
        if patience and epoch - self.progress.best_epoch >= patience:
            why = f"no better validation for {patience} epochs"
        if self.is_out_of_time():
            why = f"the {self.config.run.minutes:g} minutes are over"
        if why and self.progress.step < self.progress.total_steps:
            self.progress.total_steps = self.progress.step
            self.run.event(f"stopped after epoch {epoch}: {why}")

    def is_out_of_time(self) -> bool:
        minutes = self.config.run.minutes
        return bool(minutes) and self.world.broadcast(self.run.elapsed() > 60 * minutes)

    def save(self) -> None:
        """Writes the state of this moment, after everything that was reported until now."""
        self.read_reports()
        save(self.run)
        self.saving = False
