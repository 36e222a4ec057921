"""The training loop, to be read from top to bottom.

A run is a list of steps, each a function of the state before it, the seed and its own number. So a run that was killed
goes on from its last saved state and arrives at the same weights, and a step that failed can be undone by going back to
that state and leaving its batch out. On a GPU nothing waits for a step's result: what a step reports (loss, unreadable
files, a wish to stop) is read a few steps later, at the same step in every process.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from weft.config import Config
from weft.data.loader import Batch, DrawnPictures
from weft.engine.bad_files import report_bad_files
from weft.engine.checkpoint import save, write_best
from weft.engine.clock import Clock
from weft.engine.compiling import compile_model
from weft.engine.device import is_out_of_memory
from weft.engine.optim import learning_rate, scale_schedule
from weft.engine.parallel import distribute, reduce_report, reducing, running_statistics
from weft.engine.recovery import halve_micro_batch, leave_for_memory, roll_back
from weft.engine.state import RunProgress, full_tensor, is_finite
from weft.engine.step_report import PendingStep, RecentSteps, StepFailed, StepReport, TrainingStopped
from weft.engine.training_run import TrainingRun
from weft.engine.validation import evaluate
from weft.engine.whole_step import RecordedStep
from weft.errors import WeftError
from weft.fast.replay import Replayed, replay
from weft.tasks.task import cut

GPU_DELAY = 3  # steps between a step and the look at its report, so that the GPU never waits for the host
SAVED_SECONDS = 10.0  # between states, at least, where an epoch ends that is not validated
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
        self.replays = self.can_replay()
        self.recorded = RecordedStep(self.compute_step, self.step_state) if self.can_record_steps() else None
        self.forward: Any = self.make_forward()  # the model, perhaps compiled, replayed, distributed
        self.validated: Replayed | None = None
        # Learning rates on the device, where a recorded step reads them; for good, so that all steps compute alike.
        count = len(self.optimizer.param_groups)
        self.rates = None if self.recorded is None else torch.empty(count, device=self.device)
        self.clock = Clock(run)
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

    def can_replay(self) -> bool:
        """Whether launches are recorded and replayed: those of whole steps, or of the model alone.

        A replayed pass has all its gradients at the end, too late for messages to overlap with it. Within a machine
        these are short; between machines they are not.
        """
        run = self.config.run
        alone = self.world.on_one_machine and not (run.fsdp or self.in_lockstep or run.deterministic)
        return run.replay and alone and self.device.type == "cuda" and self.task.can_replay

    def can_record_steps(self) -> bool:
        """Whether whole steps can be: where nobody else takes part, and the optimiser never asks the host."""
        own_step = isinstance(self.optimizer, torch.optim.AdamW | torch.optim.SGD) and not self.run.scaler.is_enabled()
        return self.replays and own_step and self.world.size == 1 and not self.config.run.compile

    def make_forward(self) -> Callable[..., Any]:
        """The model as a step calls it: compiled, replayed, both or as it is."""
        model: Any = compile_model(self.model) if self.config.run.compile else self.model
        return replay(model) if self.replays and self.recorded is None else model

    def distribute(self) -> None:
        """Lets processes meet in backward passes. Until here, each could try alone what its machine can do."""
        if self.world.size > 1 and not self.config.run.fsdp:
            self.model.train(not self.config.model.frozen_mode)
            self.forward = distribute(self.forward, self.rehearse)

    def rehearse(self, forward: nn.Module) -> None:
        x, y = self.task.prepare(self.task.dummy_batch(2), self.run.seed(0))
        self.task.loss(forward, x, y, self.config.run.batch)[0].backward()

    # The run ----------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Trains all epochs that are left. Raises `TrainingStopped` when asked to stop on the way."""
        self.clock = Clock(self.run)
        while self.progress.validated < self.epochs:
            with contextlib.closing(self.batches()) as batches:
                try:
                    while self.progress.validated < self.epochs:
                        if not self.train_until(self.end_of_epoch(), batches):
                            self.save()  # the run has another length now, and so other batches
                            self.run.screen.total_epochs = self.epochs
                            break
                        self.validate()
                except StepFailed as failure:
                    self.discard_reports()
                    roll_back(self.run, failure)
                    self.clock = Clock(self.run)

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
        batches = self.run.train_batches(steps, self.config.data.workers)
        with contextlib.closing(batches):
            try:
                for step in steps:
                    self.task.advance(step / self.progress.total_steps)
                    yield step, next(batches)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise WeftError("A batch does not fit into memory; choose a smaller --img-size or --batch.") from None

    def train_until(self, end: int, batches: Generator[tuple[int, Batch]]) -> bool:
        """Trains up to the step `end`; False where the clock has set another length for the run on the way."""
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
            if self.clock.is_at_mark() and self.clock.plan_again():
                return False
        self.progress.step = end  # the last steps may be among those left out
        self.read_reports()
        return True

    # One step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: int, batch: Batch) -> None:
        lr = self.set_learning_rate(step)
        found = self.try_recorded(step, batch)
        if found is not None:
            report = self.make_report(found[:2], batch)
            self.pending.append(PendingStep(step, batch, lr, torch.cat([report, found[2:]])))
            return
        totals = self.try_gradients(step, batch)
        if totals is None:
            if not self.stop_replaying():
                halve_micro_batch(self.run)
            return self.train_step(step, batch)
        report = self.make_report(totals, batch)
        reduce_report(self.world, self.statistics, report)
        report = torch.cat([report, self.update().reshape(1)])
        self.pending.append(PendingStep(step, batch, lr, report))

    def make_report(self, totals: Tensor, batch: Batch) -> Tensor:
        """Loss and hits of this process, with what else it has to say of the step."""
        wants_save = self.world.is_main and time.monotonic() - self.run.saved_at > 60 * self.config.run.save_minutes
        facts = [len(batch.pictures), len(batch.bad), self.stop_requested, wants_save]
        return torch.cat([totals, self.to_device(facts)])

    def to_device(self, numbers: list[Any]) -> Tensor:
        """Float32 numbers on the device, without waiting for it."""
        told = torch.tensor(numbers, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        return told.to(self.device, non_blocking=True)

    def set_learning_rate(self, step: int) -> float:
        steps = self.run.plan.steps_per_epoch
        optim = scale_schedule(self.config.optim, self.progress.stretch)
        epochs = self.progress.total_steps / steps - optim.cooldown_epochs
        lr = learning_rate(optim, self.config.run.batch, step / steps, epochs)
        rates: Any = [lr * group["lr_scale"] for group in self.optimizer.param_groups]
        if self.rates is not None:
            self.rates.copy_(self.to_device(rates))
            rates = self.rates.unbind()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return lr

    def try_recorded(self, step: int, batch: Batch) -> Tensor | None:
        """(3,) loss, hits and norm of the gradient of a recorded step, or of one on the way to that.

        None where the batch is not as all others, nothing can be recorded, or memory does not suffice.
        """
        if self.recorded is None or batch.bad:
            return None
        seed = self.run.seed(step)
        torch.manual_seed(seed)  # drop path and dropout of this step
        try:
            drawn = isinstance(batch.pictures, DrawnPictures)
            inputs = batch.pictures.to(self.device) if drawn else self.task.prepare(batch, seed)
            with explained_batch_norm():
                found = self.recorded(inputs)
            if self.recorded.failed:  # then at least the model's launches
                self.recorded = None
                self.forward = self.make_forward()
            return found
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.stop_replaying()
        return None

    def warms_up(self) -> bool:
        """Whether the steps so far were launched one by one, and a recording is still to come."""
        return self.recorded is not None and not self.recorded.holds_memory

    def compute_step(self, *inputs: Tensor) -> Tensor:
        """(3,) loss, hits and norm: all of a step, on the device, from its inputs: prepared ones, or what was drawn."""
        self.optimizer.zero_grad(set_to_none=True)
        x, y = inputs
        if self.task.kept is not None:
            x, y = self.task.prepare(Batch(DrawnPictures(x, y), None, x, []), 0)
        totals = self.add_gradients(x, y, math.ceil(len(x) / self.progress.micro_batch))
        return torch.cat([totals, self.update().reshape(1)])

    def step_state(self) -> tuple[object, ...]:
        """The memory that a step works on, and in how many portions."""
        parameters = self.parameters
        states = (value for p in parameters for value in self.optimizer.state.get(p, {}).values())
        return self.progress.micro_batch, *(t.data_ptr() for t in (*parameters, *states) if isinstance(t, Tensor))

    def try_gradients(self, step: int, batch: Batch) -> Tensor | None:
        """`gradients`, or None where memory does not suffice; no traceback holds the failed pass then."""
        try:
            with explained_batch_norm():
                return self.gradients(step, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.world.size > 1:  # the others wait in the middle of their step
                leave_for_memory(self.run)
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
        found = self.add_gradients(pictures, targets, parts, weight=0 if is_blank else 1)
        return totals if is_blank else found

    def add_gradients(self, pictures: Any, targets: Any, parts: int, weight: int = 1) -> Tensor:
        """(2,) loss and hits of pictures that are computed in portions; their gradients are added up."""
        totals = torch.zeros(2, device=self.device)
        scale = weight * self.world.size  # processes take the mean of their gradients, not the sum
        for part, (x, y) in enumerate(zip(cut(pictures, parts), cut(targets, parts), strict=True), start=1):
            with reducing(self.forward, part == parts):
                loss, hits = self.task.loss(self.forward, x, y, self.config.run.batch)
                self.run.scaler.scale(loss * scale).backward()
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
        norm = full_tensor(nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip or math.inf))
        self.run.scaler.step(self.optimizer)
        self.run.scaler.update()
        if self.run.ema is not None:
            self.run.ema.update(self.model)
        return norm

    def stop_replaying(self) -> bool:
        """Frees the memory of recordings, and makes no more; False where there are none."""
        distributed = self.forward if isinstance(self.forward, DistributedDataParallel) else None
        model = distributed.module if distributed else self.forward
        holders = [x for x in (self.recorded, model, self.validated) if isinstance(x, RecordedStep | Replayed)]
        self.replays, self.recorded, self.validated = False, None, None
        if isinstance(model, Replayed) and distributed:
            distributed.module = model.model
        elif isinstance(model, Replayed):
            self.forward = model.model
        if not any(holder.holds_memory for holder in holders):
            return False
        self.optimizer.zero_grad(set_to_none=True)
        for holder in holders:
            holder.forget()
        torch.cuda.empty_cache()
        self.run.event("memory is short: the model's launches are no longer replayed")
        return True

    # Reports ----------------------------------------------------------------------------------------------------

    def read_reports(self, keep: int = 0) -> None:
        """Reads all reports but the last `keep`. Every process reads the same ones at the same step."""
        while len(self.pending) > keep:
            pending = self.pending.popleft()
            report = pending.read()
            if not report.is_finite(any_gradient=self.run.scaler.is_enabled()):
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
        self.run.log_start(pending.step + 1)

    def discard_reports(self) -> None:
        """Nothing that was reported so far counts: it was a trial, or has been undone."""
        self.pending.clear()
        self.recent.clear()
        self.progress.bad.clear()
        self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0

    # Validation -------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Ends an epoch: validation, a row of metrics, and the model where it is the best so far."""
        epoch = self.progress.validated + 1
        last = self.progress.step >= self.progress.total_steps or self.is_out_of_time()
        due = last or epoch % self.config.run.val_epochs == 0
        if due:
            self.save()
        else:
            self.read_reports()
        result, best = self.judge(self.run.best_model, epoch) if due else ({}, False)
        if last and self.run.best_model is not self.run.model and len(self.run.split.val):  # perhaps these are better
            raw, raw_best = self.judge(self.run.model, epoch)
            if raw_best:
                result, best = raw, True
                self.run.screen.say("the weights themselves are better than their average, and are kept")
        loss = self.progress.epoch_loss / max(1, self.progress.epoch_steps)
        row = {"kind": "epoch", "step": self.progress.step, "epoch": epoch, "train_loss": loss}
        row |= {f"val_{key}": value for key, value in result.items()}
        row |= {"lr": self.set_learning_rate(self.progress.step - 1), "seconds": self.run.elapsed(), "best": best}
        row |= {"validated": some} if (some := self.progress.validation_pictures) and result else {}
        self.run.log(row)
        self.run.screen.epoch(row, self.task.shown_metrics)
        self.progress.validated = epoch
        self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0
        if due:
            self.stop_early(epoch)
        self.recent.clear()  # the speed is that of training
        if due or self.world.broadcast(time.monotonic() - self.run.saved_at > SAVED_SECONDS):
            self.save()

    def judge(self, model: nn.Module, epoch: int) -> tuple[dict[str, float], bool]:
        """Metrics of `model`, and whether it is the best so far; then it is written down."""
        with self.clock.validating():
            result = self.evaluate(model)
        score, loss = result.get(self.task.score), result.get("loss")
        best = self.progress.is_better(score, loss) and is_finite(model)
        if best:
            self.progress.best, self.progress.best_loss, self.progress.best_epoch = score, loss, epoch
            write_best(self.run, model)
        return result, best

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on the validation pictures; nothing where there are none."""
        return evaluate(self.run, self.infer, model)

    def infer(self, model: nn.Module, pictures: Any) -> Any:
        """The task's answers; recordings of training make room where memory does not suffice."""
        if self.stop_requested and self.world.size == 1:
            raise TrainingStopped  # the state was saved before validation began
        try:
            return self.task.infer(self.replayed(model), pictures)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self.stop_replaying():
            return self.infer(model, pictures)
        raise WeftError(
            "Out of memory in validation; choose a smaller --img-size; in segmentation --test.mode slide or a"
            f" --test.short_side help, too. The state before it is saved in {self.run.folder}."
        )

    def replayed(self, model: nn.Module) -> nn.Module:
        """The model that is validated, its launches replayed where those of training are."""
        if self.validated is None and self.replays and self.task.whole_pictures:
            self.validated = replay(model)
        return self.validated if self.validated is not None and self.validated.model is model else model

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


@contextlib.contextmanager
def explained_batch_norm() -> Generator[None]:
    """Says what to do where BatchNorm has a single value to compute its statistics from."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise WeftError(
            "BatchNorm cannot train on a single picture whose feature maps shrink to one position; choose a larger"
            " --batch and --run.micro_batch, or a larger --img-size."
        ) from None
