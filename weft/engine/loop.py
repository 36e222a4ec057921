"""The training loop, to be read from top to bottom.

A run is a list of steps, each a function of the state before it, the seed and its own number. So a run that was killed
goes on from its last saved state and arrives at the same weights, and a step that went wrong can be undone by going
back to that state and leaving its batch out. On a GPU nothing waits for a step's result: what a step reports (loss, a
lack of memory, a wish to stop) is read a few steps later, at the same step in every process.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.loader import Batch, eval_batches, train_batches
from weft.engine.compiling import compile_model
from weft.engine.device import World, reduce_step, running_statistics
from weft.engine.log import Screen
from weft.engine.optim import learning_rate, stretched
from weft.engine.parts import Parts, is_finite, is_out_of_memory, named_tensors, step_seed, too_many_bad
from weft.engine.state import Progress, gather_tensors, restore, whole, write_state
from weft.errors import WeftError
from weft.fast.replay import Replayed, replay
from weft.files import write_tensors
from weft.tasks.task import cut

GPU_DELAY = 3  # steps between a step and the look at its report, so that the GPU never waits for the host
MAX_SKIPPED = 3  # batches without a finite gradient; then something is wrong with the settings, not with a batch
RECENT = 50  # steps whose mean is shown
LOG_ROWS = 500  # of steps in metrics.jsonl, about


class Report(NamedTuple):
    """What one step tells; all but the last entry are sums over the processes."""

    loss: float
    correct: float
    pictures: float
    unread: float  # files that could not be decoded
    no_memory: float  # processes that ran out of memory
    stop: float  # processes asked to stop
    save: float  # 1 when the main process wants the state to be saved
    grad_norm: float


@dataclass
class Pending:
    """A step whose report has not been read yet."""

    step: int
    batch: Batch
    lr: float
    report: Tensor  # on the host, complete once `ready`
    ready: torch.cuda.Event | None


class Stopped(Exception):
    """Asked to stop on the way; the state is saved."""


class WentWrong(Exception):
    """A step without a finite gradient, or without enough memory: its effect must be undone."""

    def __init__(self, pending: Pending, report: Report):
        super().__init__(f"step {pending.step}")
        self.pending, self.report = pending, report


class Trainer:
    def __init__(
        self,
        run: Path,
        config: Config,
        world: World,
        parts: Parts,
        dtype: torch.dtype,
        progress: Progress,
        screen: Screen,
    ):
        self.run, self.config, self.world, self.parts = run, config, world, parts
        self.model, self.optimizer, self.ema, self.task = parts.model, parts.optimizer, parts.ema, parts.task
        self.device, self.dtype = world.device, dtype
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.statistics = running_statistics(self.model)
        # Processes that meet within forward and backward passes: each must make equally many of these.
        self.in_lockstep = world.size > 1 and (config.run.fsdp or config.run.sync_bn)
        self.forward: Callable[..., Any] = self.make_forward()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.progress, self.screen = progress, screen
        self.log: Callable[[dict[str, Any]], None] = lambda row: None
        self.rewind: Callable[[], None] = lambda: None  # the log, to `progress`
        self.pending: deque[Pending] = deque()
        self.recent: deque[tuple[float, Report]] = deque(maxlen=RECENT)
        self.stop_wanted = False  # set by a signal
        self.stopping = self.saving = False  # agreed by all processes
        self.saved_at = self.clock_at = time.monotonic()

    def make_forward(self) -> Callable[..., Any]:
        """The model as a step calls it: compiled, replayed, both or as it is."""
        run = self.config.run
        model: Any = compile_model(self.model) if run.compile else self.model
        alone = not (run.fsdp or self.in_lockstep or run.deterministic)
        may_replay = run.replay and alone and self.device.type == "cuda" and self.task.can_replay
        return replay(model) if may_replay else model

    # The run ----------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """All epochs that are left. Raises `Stopped` when asked to stop on the way."""
        while self.progress.validated < self.epochs:
            with contextlib.closing(self.batches()) as batches:
                try:
                    while self.progress.validated < self.epochs:
                        self.train_until(self.end_of_epoch(), batches)
                        self.validate()
                except WentWrong as trouble:
                    self.roll_back(trouble)

    @property
    def epochs(self) -> int:
        return math.ceil(self.progress.total_steps / self.parts.plan.steps_per_epoch)

    def end_of_epoch(self) -> int:
        """The step at which the first epoch that is not validated yet ends."""
        return min((self.progress.validated + 1) * self.parts.plan.steps_per_epoch, self.progress.total_steps)

    def batches(self) -> Generator[tuple[int, Batch]]:
        """All steps that are left, with their pictures; readers go on while the model is validated."""
        left = range(self.progress.step, self.progress.total_steps)
        steps = [step for step in left if step not in self.progress.skipped]
        batches = train_batches(
            self.parts.source,
            self.task.augmentation,
            self.parts.plan,
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
                raise Stopped
        self.progress.step = end  # the last steps may be among those left out
        self.read_reports()

    # One step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: int, batch: Batch) -> None:
        lr = self.set_learning_rate(step)
        try:
            totals, no_memory = self.gradients(step, batch), False
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.in_lockstep:  # the others wait in the middle of their step
                raise WeftError("Out of memory; give a smaller --run.micro_batch.") from None
            totals, no_memory = torch.zeros(2, device=self.device), True
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise WeftError(
                "BatchNorm cannot train on one picture at a time whose maps end as one position; choose a larger"
                " --batch and --run.micro_batch, or a larger --img-size."
            ) from None
        if no_memory and self.stop_replaying():  # behind `except`, whose traceback holds on to the pass that failed
            return self.train_step(step, batch)
        if no_memory and self.world.size == 1:
            self.halve_micro_batch()  # and do the step again; several processes agree on that through the report
            return self.train_step(step, batch)
        wants_save = self.world.is_main and time.monotonic() - self.saved_at > 60 * self.config.run.save_minutes
        facts = [len(batch.pictures), len(batch.bad), no_memory, self.stop_wanted, wants_save]
        told = torch.tensor(facts, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        report = torch.cat([totals, told.to(self.device, non_blocking=True)])
        parameters = [] if self.config.run.fsdp else self.parameters  # sharded gradients are reduced on their way
        reduce_step(self.world, parameters, self.statistics, report)
        report = torch.cat([report, self.update().reshape(1)])
        self.remember(step, batch, lr, report)

    def set_learning_rate(self, step: int) -> float:
        steps = self.parts.plan.steps_per_epoch
        optim = stretched(self.config.optim, self.progress.stretch)
        epochs = self.progress.total_steps / steps - optim.cooldown_epochs
        lr = learning_rate(optim, self.config.run.batch, step / steps, epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        return lr

    def gradients(self, step: int, batch: Batch) -> Tensor:
        """Adds up the gradients of this process's pictures; returns (2,) loss and number of hits.

        The loss is a sum divided by the whole batch's size, so parts and processes add up to the batch's mean.
        """
        self.optimizer.zero_grad(set_to_none=True)
        seed = self.seed(step)
        torch.manual_seed(seed)  # drop path and dropout of this step
        totals = torch.zeros(2, device=self.device)
        parts = self.count_parts(batch)
        is_blank = bool(batch.bad) and len(batch.pictures) < max(2, parts)  # BatchNorm cannot train on one
        if is_blank and self.world.size == 1:
            return totals
        if is_blank:  # takes part all the same, with pictures that weigh nothing
            batch = self.task.dummy_batch(parts * 2)
        pictures, targets = self.task.prepare(batch, seed)
        for x, y in zip(cut(pictures, parts), cut(targets, parts), strict=True):
            loss, hits = self.task.loss(self.forward, x, y, self.config.run.batch)
            scale = self.world.size if self.config.run.fsdp else 1  # FSDP takes the mean over processes, not the sum
            self.scaler.scale(loss * (0 if is_blank else scale)).backward()
            if is_blank:
                continue
            totals += torch.stack([loss.detach(), hits])
        return totals

    def count_parts(self, batch: Batch) -> int:
        """How many portions a batch is computed in; in lockstep the same number in each process."""
        if not self.in_lockstep:
            return math.ceil(max(1, len(batch.pictures)) / self.progress.micro_batch)
        fewest, most = self.config.run.batch // self.world.size, math.ceil(self.config.run.batch / self.world.size)
        return min(fewest, math.ceil(most / self.progress.micro_batch))

    def seed(self, step: int) -> int:
        """Of all that this process draws for whole batches, and of drop path and dropout."""
        return step_seed(self.config.run.seed, step, self.world.rank)

    def update(self) -> Tensor:
        """Moves the weights along the gradients; returns the norm of these."""
        self.scaler.unscale_(self.optimizer)
        clip = self.config.optim.clip or math.inf
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.model)
        return norm

    def halve_micro_batch(self) -> None:
        smaller = self.progress.micro_batch // 2
        if smaller < 1:
            self.world.fail(WeftError("Out of memory with a single picture; choose a smaller --img-size or --model."))
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.progress.micro_batch = smaller
        self.event(f"out of memory: {smaller} pictures at a time now; batch and learning rate stay as they are")

    def stop_replaying(self) -> bool:
        """Frees the memory of recordings, and makes no more; False where there are none."""
        if not (isinstance(self.forward, Replayed) and self.forward.holds_memory):
            return False
        self.optimizer.zero_grad(set_to_none=True)
        self.forward.forget()
        self.forward = self.forward.model
        torch.cuda.empty_cache()
        self.event("memory is short: the model's launches are no longer replayed")
        return True

    # Reports ----------------------------------------------------------------------------------------------------

    def remember(self, step: int, batch: Batch, lr: float, report: Tensor) -> None:
        ready = None
        if self.device.type == "cuda":
            host = torch.empty(report.shape, pin_memory=True)
            host.copy_(report, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            report = host
        self.pending.append(Pending(step, batch, lr, report, ready))

    def read_reports(self, keep: int = 0) -> None:
        """Reads all reports but the last `keep`. Every process reads the same ones at the same step."""
        while len(self.pending) > keep:
            pending = self.pending.popleft()
            if pending.ready is not None:
                pending.ready.synchronize()
            report = Report(*pending.report.tolist())
            is_finite = math.isfinite(report.loss) and (self.scaler.is_enabled() or math.isfinite(report.grad_norm))
            if report.no_memory or not is_finite:
                raise WentWrong(pending, report)
            self.stopping |= report.stop > 0
            self.saving |= report.save > 0
            if report.unread:
                self.name_unread(pending.batch.bad)
            self.progress.epoch_loss += report.loss
            self.progress.epoch_steps += 1
            self.tell(pending, report)

    def name_unread(self, bad: list[tuple[int, str]]) -> None:
        """Names files that turn out to be unreadable; stops when they are too many, in all processes together."""
        names, known = self.parts.source.names, self.progress.bad
        for found in self.world.gather({names[index]: why for index, why in bad}):
            for name in (name for name in found if name not in known):
                known[name] = found[name]
                self.event(f"{name!r} cannot be read and is left out: {found[name]}")
        count, limit = len(self.parts.split.train) + len(self.parts.split.val), self.config.data.bad_files
        if len(known) > limit * count:
            self.world.fail(too_many_bad(known, count, limit))

    def tell(self, pending: Pending, report: Report) -> None:
        now = time.monotonic()
        self.recent.append((now, report))
        steps = self.parts.plan.steps_per_epoch
        seconds = now - self.recent[0][0]
        pictures = sum(r.pictures for _, r in self.recent) - self.recent[0][1].pictures
        speed = pictures / seconds if seconds else 0.0
        left = (self.progress.total_steps - pending.step) * self.config.run.batch / speed if speed else 0.0
        seen = sum(r.pictures for _, r in self.recent)
        news = {
            "loss": sum(r.loss for _, r in self.recent) / len(self.recent),
            "pictures_per_second": speed,
        }
        if self.task.counts_hits:
            news["accuracy"] = sum(r.correct for _, r in self.recent) / seen if seen else 0.0
        epoch = pending.step // steps
        self.screen.step(epoch + 1, pending.step % steps + 1, steps, news, left)
        if pending.step % max(1, self.progress.total_steps // LOG_ROWS) == 0:
            row = {"kind": "step", "step": pending.step + 1, "epoch": (pending.step + 1) / steps, "lr": pending.lr}
            self.log({**row, "loss": report.loss, "grad_norm": report.grad_norm, "pictures_per_second": speed})

    def event(self, text: str) -> None:
        self.log({"kind": "event", "step": self.progress.step, "text": text})
        self.screen.say(text)

    # When a step went wrong -------------------------------------------------------------------------------------

    def roll_back(self, trouble: WentWrong) -> None:
        """Back to the last saved state; the batch that gave no finite gradient is left out from now on."""
        self.forget()
        if trouble.report.no_memory:
            micro_batch, skipped = self.progress.micro_batch, self.progress.skipped
            self.restore()
            self.progress.micro_batch, self.progress.skipped = micro_batch, skipped
            return self.halve_micro_batch()
        step, batch = trouble.pending.step, trouble.pending.batch
        names = [self.parts.source.names[i] for i in batch.index.tolist()]
        self.dump(step, batch)
        skipped = [*self.progress.skipped, step]
        text = f"step {step}: the loss is {trouble.report.loss:.3g}, its gradient {trouble.report.grad_norm:.3g}"
        text += (
            f" (learning rate {trouble.pending.lr:.2g}; files {', '.join(names[:3])}, ... in {self.trouble_file(step)})"
        )
        if len(skipped) > MAX_SKIPPED:
            self.world.fail(WeftError(f"{text}. That was batch {len(skipped)} of this kind; try a smaller --optim.lr."))
        self.restore()
        self.progress.skipped = skipped
        self.event(f"{text}: back to step {self.progress.step}, without that batch")

    def trouble_file(self, step: int) -> Path:
        return self.run / "trouble" / f"step-{step}-process-{self.world.rank}.safetensors"

    def dump(self, step: int, batch: Batch) -> None:
        """The batch as it was before it was normalised and mixed, for a closer look."""
        path = self.trouble_file(step)
        path.parent.mkdir(exist_ok=True)
        pictures = self.task.augmented(batch, self.seed(step))
        tensors = named_tensors({"pictures": pictures, "labels": batch.labels, "index": batch.index})
        names = {str(i): self.parts.source.names[i] for i in batch.index.tolist()}
        write_tensors(path, tensors, names)

    # Validation -------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Ends an epoch: validation, a row of metrics, and the model where it is the best so far."""
        self.save()
        epoch = self.progress.validated + 1
        last = self.progress.step >= self.progress.total_steps or self.out_of_time()
        due = last or epoch % self.config.run.val_epochs == 0
        result = self.evaluate() if due else {}
        best = due and self.is_better(result) and is_finite(self.best_model)
        if best:
            self.progress.best, self.progress.best_loss = result.get(self.task.score), result.get("loss")
            self.progress.best_epoch = epoch
            self.write_best()
        loss = self.progress.epoch_loss / max(1, self.progress.epoch_steps)
        row = {"kind": "epoch", "step": self.progress.step, "epoch": epoch, "train_loss": loss}
        row |= {f"val_{key}": value for key, value in result.items()}
        row |= {"lr": self.set_learning_rate(self.progress.step - 1), "seconds": self.seconds(), "best": best}
        self.log(row)
        self.screen.epoch(row)
        self.progress.validated = epoch
        self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0
        if due:
            self.stop_early(epoch)
        self.recent.clear()  # the speed is that of training
        self.save()

    def is_better(self, result: dict[str, float]) -> bool:
        """Than the kept model; of equal ones that with the smaller loss and, where there is none, the later one."""
        best, score = self.progress.best, result.get(self.task.score)
        if best is None or score is None or score != best:
            return best is None or score is None or score > best
        loss, best_loss = result.get("loss"), self.progress.best_loss
        return loss is None or best_loss is None or loss < best_loss

    @property
    def best_model(self) -> nn.Module:
        return self.ema.module if self.ema is not None and self.config.run.ema_eval else self.model

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics on the validation pictures, each seen by exactly one process; nothing where there are none."""
        if not len(self.parts.split.val):
            return {}
        model = self.best_model.eval()
        meter = self.task.meter()
        batches = eval_batches(
            self.parts.source,
            self.parts.preprocessing,
            self.parts.split.val,
            batch=self.task.eval_batch,
            workers=self.config.data.workers,
            pin=self.device.type == "cuda",
            rank=self.world.rank,
            world=self.world.size,
        )
        bad: list[tuple[int, str]] = []
        rounds = math.ceil(math.ceil(len(self.parts.split.val) / self.world.size) / self.task.eval_batch)
        with contextlib.closing(batches):
            for batch in batches:
                rounds -= 1
                bad += batch.bad
                if self.stop_wanted and self.world.size == 1:
                    raise Stopped  # the state was saved before validation began
                if len(batch.pictures):
                    meter.update(self.infer(model, batch.pictures), batch)
        if self.config.run.fsdp and rounds:  # another process has one batch more, in which all meet
            self.task.infer(model, self.task.dummy_batch(1).pictures)
        meter.reduce()
        self.name_unread(bad)
        return meter.result()

    def infer(self, model: nn.Module, pictures: Any) -> Any:
        try:
            return self.task.infer(model, pictures)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self.stop_replaying():
            return self.infer(model, pictures)
        raise WeftError(
            "Out of memory in validation; give a smaller --img-size or, to segment, --test.mode slide or a"
            f" --test.short_side. The state before it is saved in {self.run}."
        ) from None

    def stop_early(self, epoch: int) -> None:
        """Ends the run where it has had its time, or does not get better; only a validated epoch can be the last."""
        patience, why = self.config.run.patience, ""
        if patience and epoch - self.progress.best_epoch >= patience:
            why = f"no better validation for {patience} epochs"
        if self.out_of_time():
            why = f"the {self.config.run.minutes:g} minutes are over"
        if why and self.progress.step < self.progress.total_steps:
            self.progress.total_steps = self.progress.step
            self.event(f"stopped after epoch {epoch}: {why}")

    def out_of_time(self) -> bool:
        minutes = self.config.run.minutes
        return bool(minutes) and self.world.share(self.seconds() > 60 * minutes)

    # Files ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """The state of this moment, on disk before anything else happens."""
        self.read_reports()
        if not is_finite(self.model):
            text = f"After step {self.progress.step} the weights are no longer finite; try a smaller --optim.lr."
            self.world.fail(WeftError(f"{text} The state before that is intact: weft train --resume {self.run}"))
        self.progress.seconds = self.seconds()
        self.clock_at = self.saved_at = time.monotonic()
        self.progress.scaler = self.scaler.state_dict()
        tensors = gather_tensors(self.model, self.ema, self.optimizer, keep=self.world.is_main)
        self.world.on_main(lambda: write_state(self.run, tensors, self.progress, self.parts.facts))
        self.saving = False

    def restore(self) -> None:
        self.world.wait()  # until the main process has written what is read now
        self.progress = restore(self.run, self.model, self.ema, self.optimizer)
        self.rewind()
        if self.progress.scaler:
            self.scaler.load_state_dict(self.progress.scaler)

    def write_best(self) -> None:
        weights = {key: whole(value).cpu() for key, value in self.best_model.state_dict().items()}
        preprocessing = self.parts.preprocessing.to_dict()
        self.world.on_main(lambda: self.parts.write_model(self.run, self.best_model, weights, preprocessing))

    def forget(self) -> None:
        """Nothing that was reported so far counts: it was a trial, or has been undone."""
        self.pending.clear()
        self.recent.clear()
        self.progress.bad.clear()
        self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0

    def first_batch(self) -> Batch:
        """The first step's pictures and targets as training sees them, before they are normalised and mixed."""
        batches = train_batches(self.parts.source, self.task.augmentation, self.parts.plan, [0], workers=0, pin=False)
        batch = next(iter(batches))
        return replace(batch, pictures=self.task.augmented(batch, self.seed(0)))

    def seconds(self) -> float:
        """Of work in this run, in all sittings."""
        return self.progress.seconds + time.monotonic() - self.clock_at
