"""One session of a run, new or resumed: builds its parts, trains, evaluates the kept model and writes the report.

`weft.run.start` makes one for a new run, `weft.run.resume` for one that goes on.
"""

import contextlib
import functools
import math
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.config import Config, to_yaml
from weft.data.loader import check_shared_memory
from weft.data.preprocessing import Preprocessing
from weft.data.sampler import SamplingPlan, balance_weights
from weft.data.sources.source import fingerprint
from weft.data.split import save_split
from weft.documents import to_json
from weft.engine.bad_files import report_bad_files
from weft.engine.checkpoint import restore
from weft.engine.device import World, convert_sync_bn, pick_precision, shard_model
from weft.engine.fit_machine import compile_kernels, find_micro_batch, train_plainly
from weft.engine.kept import keep
from weft.engine.lock import locked
from weft.engine.log import METRICS, MetricsFile, Screen, read_rows, tensorboard_writer
from weft.engine.loop import Trainer
from weft.engine.optim import Ema, freeze, make_optimizer
from weft.engine.precision import choose_precision
from weft.engine.recovery import heed_lack_of_memory
from weft.engine.start import RunStart, side_by_side
from weft.engine.state import DISK_FULL, RunProgress, save_error
from weft.engine.step_report import TrainingStopped
from weft.engine.time_budget import fit_into_time
from weft.engine.training_run import TrainingRun
from weft.errors import WeftError
from weft.fast.swap import fast_on
from weft.files import write_text
from weft.report.outlook import outlook
from weft.report.run import RunReport, write_report
from weft.report.text import SCORES
from weft.run.build import make_model
from weft.run.data import RunData
from weft.run.evaluate import evaluate
from weft.run.predictor import load
from weft.run.result import Run
from weft.run.teacher import make_distillation
from weft.tasks.registry import make_task
from weft.tasks.task import Task, TaskFacts
from weft.words import many, shell

COMPILING = 0.2  # of a time budget that compiling kernels may take; the next run finds those that were


@contextlib.contextmanager
def locked_by_main(world: World, folder: Path) -> Iterator[None]:
    """The main process holds the folder's lock, for all."""
    with contextlib.ExitStack() as stack, told_when_full(folder):
        world.on_main(lambda: stack.enter_context(locked(folder)))
        with world.propagate_errors():
            if not folder.is_dir():
                raise WeftError(f"{socket.gethostname()} does not see {folder}: choose a place all machines share.")
        yield


@contextlib.contextmanager
def told_when_full(folder: Path) -> Iterator[None]:
    """Whichever file of a run it is that finds the disk full."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise save_error(folder, error) from error


class RunSession:
    """From the settings and the data of a run to its report."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        world: World,
        data: RunData,
        preprocessing: Preprocessing,
        quiet: bool,
        start: RunStart,
    ):
        self.folder, self.config, self.world, self.data = folder, config, world, data
        self.preprocessing, self.start = preprocessing, start
        self.screen = Screen(quiet or not world.is_main)
        self.dtype = pick_precision(config.run, world.device)
        self.threads = 0  # that a new run found to be faster than the usual number
        self.threads_before = torch.get_num_threads()
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        torch.manual_seed(config.run.seed)
        if config.run.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.command = command_line()
        with start.phase("model"):
            self.trainer = self.build()

    def prepare_new(self) -> None:
        """Finds what fits the machine, then writes down everything the run depends on."""
        trainer = self.trainer
        trainer.run.saved_at = self.start.began  # minutes count from there
        trainer.run.compute_with(self.threads)
        side_by_side(lambda: self.prepare_kernels(COMPILING * 60 * self.config.run.minutes), self.prepare_data)
        with self.start.phase("memory"):
            find_micro_batch(trainer)
            heed_lack_of_memory(trainer.run)
            trainer.distribute()
        if self.config.run.minutes:
            with self.start.phase("trial"):
                choose_precision(trainer)
                fit_into_time(trainer)
        with self.start.phase("saving"):
            trainer.run.facts = self.facts()
            self.world.on_main(self.write_settings)
            trainer.save()

    def prepare_kernels(self, limit: float = 0.0) -> None:
        """Compiles kernels; in a new run with a time budget, only where that takes a small part of it."""
        with self.start.phase("kernels"):
            given_up = compile_kernels(self.trainer, limit or math.inf)
        if given_up:
            train_plainly(self.trainer)
            self.config = self.trainer.config
            self.screen.say("too few minutes to compile kernels: the plain model is trained, as with --run.fast no")

    def prepare_data(self) -> None:
        """Does what the pictures need before the first step; beside the kernels."""
        with self.start.phase("data"):
            _ = self.fingerprint
            keep(self.trainer.run, self.data.pixels)
            if self.data.pixels is not None:
                self.data.pixels.close()

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.data.fingerprint or fingerprint(self.data.source)

    def write_settings(self) -> None:
        write_text(self.folder / "config.yaml", to_yaml(self.config))
        write_text(self.folder / "data_report.json", to_json(self.data.report.to_dict()))
        save_split(self.data.split, self.data.source, self.folder / "split.json", self.fingerprint)

    def prepare_resumed(self, changed: list[str], header: dict[str, Any]) -> None:
        """Goes back to the last saved state; settings that were changed on purpose hold from there on."""
        trainer, planned = self.trainer, self.trainer.progress.total_steps
        restore(trainer.run)
        if trainer.progress.bf16 and self.world.device.type == "cpu" and self.config.run.precision == "auto":
            trainer.run.compute_in(torch.bfloat16)
        if {"run.epochs", "run.steps"} & {*changed}:
            trainer.progress.total_steps = planned
        heed_lack_of_memory(trainer.run)
        if "run.micro_batch" in changed:
            trainer.progress.micro_batch = self.config.run.micro_batch
        if changed:
            self.world.on_main(lambda: write_text(self.folder / "config.yaml", to_yaml(self.config)))
        self.command = header["command"]
        if header["processes"] != self.world.size:
            self.screen.say(
                f"{self.world.size} processes instead of {header['processes']}: the same pictures in each step, but"
                " other chances in mixing and drop path, so the result is not that of one run to the last bit"
            )
        self.screen.say(f"{self.folder}: on after step {trainer.progress.step:,} of {trainer.progress.total_steps:,}")
        side_by_side(self.prepare_kernels, self.prepare_data)  # perhaps on another machine
        trainer.run.facts = self.facts()
        trainer.distribute()

    def facts(self) -> dict[str, Any]:
        return {
            "config": to_yaml(self.config),
            "classes": self.data.source.classes,
            "preprocessing": self.preprocessing.to_dict(),
            "fingerprint": self.fingerprint,
            "processes": self.world.size,
            "command": self.command,
        }

    def build(self) -> Trainer:
        config, world, source, split = self.config, self.world, self.data.source, self.data.split
        with world.propagate_errors():
            if config.run.batch < world.size:
                raise WeftError(f"run.batch={config.run.batch} is smaller than the number of processes, {world.size}.")
            made = make_model(
                config, classes=source.classes, size=self.preprocessing.size, multilabel=source.multilabel
            )
        model = made.model
        for line in made.changed:
            self.screen.say(f"{config.model.init}: {line}")
        if config.model.freeze:
            self.screen.say(f"frozen: {freeze(model, config.model.freeze):,} parameters ({config.model.freeze})")
        if config.run.sync_bn:
            model = convert_sync_bn(model, world)
        model = model.to(world.device)
        if config.run.channels_last:
            model = model.to(memory_format=torch.channels_last)
        if config.run.fast:
            fast_on(model, world.device, record=False)
        if world.size > 1:
            broadcast(model)
        ema = Ema(model, config.run.ema) if config.run.ema else None
        if config.run.fsdp:
            shard_model(model, world)
            if config.run.fast:
                fast_on(model, world.device, record=False)  # blocks have changed their class
        plan = self.make_plan()
        run = TrainingRun(
            folder=self.folder,
            config=config,
            world=world,
            dtype=self.dtype,
            source=source,
            split=split,
            preprocessing=self.preprocessing,
            plan=plan,
            task=self.make_task(),
            model=model,
            write_model=made.write,
            optimizer=make_optimizer(model, config.optim, config.run.batch),
            ema=ema,
            progress=RunProgress(total_steps=total_steps(config, plan), micro_batch=config.run.micro_batch),
            screen=self.screen,
        )
        return Trainer(run)

    def make_plan(self) -> SamplingPlan:
        """Which pictures each step sees."""
        config, world, source, split = self.config, self.world, self.data.source, self.data.split
        balanced = config.data.balance == "sampler"
        return SamplingPlan(
            split.train,
            batch=config.run.batch,
            seed=config.run.seed,
            rank=world.rank,
            world=world.size,
            repeats=config.augment.repeats,
            weights=balance_weights(source.labels[split.train], source.multilabel) if balanced else None,
            blocks=None if source.blocks is None else source.blocks[split.train],
        )

    def make_task(self) -> Task:
        config, source = self.config, self.data.source
        facts = TaskFacts(
            classes=source.classes,
            preprocessing=self.preprocessing,
            device=self.world.device,
            dtype=self.dtype,
            multilabel=source.multilabel,
            labels=source.labels[self.data.split.train],
            pixel_counts=self.data.report.pixels or None,
            unlearned=self.data.report.unlearned,
            distillation=make_distillation(config.loss, source, self.preprocessing, self.world.device),
        )
        task = make_task(source.task, config, facts)
        height, width = task.training_size
        one = self.preprocessing.channels * height * width * self.preprocessing.depth // 8
        if config.data.keep != "device":  # else nothing is read while it trains
            check_shared_memory(config.run.batch // self.world.size * one, config.data.workers)
        return task

    # Training and what follows ----------------------------------------------------------------------------------

    def train(self) -> Run:
        """Trains, evaluates and reports; afterwards this process has the threads that it had."""
        try:
            return self.train_and_report()
        finally:
            torch.set_num_threads(self.threads_before)

    def train_and_report(self) -> Run:
        trainer = self.trainer
        metrics = MetricsFile(self.folder, trainer.progress) if self.world.is_main else None
        board = tensorboard_writer(self.folder) if self.config.run.tensorboard and self.world.is_main else None
        trainer.run.rewind_log = lambda: metrics.truncate(trainer.progress) if metrics else None
        trainer.run.log = lambda row: [write(row) for write in (metrics and metrics.write, board) if write]
        parameters = sum(p.numel() for p in trainer.model.parameters())
        self.screen.say(f"{self.config.model.name}, {parameters / 1e6:.1f} M parameters -> {self.folder}")
        self.screen.start(trainer.epochs)
        trainer.run.start = self.start
        if trainer.run.kept is not None:
            report_bad_files(trainer.run, trainer.run.kept.bad)
        signals: list[int] = []
        try:
            with stopping_at_signals(trainer, signals):
                trainer.fit()
        except TrainingStopped:
            self.screen.close()
            go_on = shell("weft", "train", "--resume", self.folder)
            self.screen.say(f"Stopped after step {trainer.progress.step:,}; go on with: {go_on}")
            return Run(self.folder, {}, stopped=True, interrupted=signal.SIGINT in signals)
        finally:
            self.screen.close()
            if metrics:
                metrics.close()
        results = self.world.on_main(self.finish) if self.config.run.report else {}
        return Run(self.folder, results)

    def finish(self) -> dict[str, Any]:
        """Evaluates the kept model as anybody would who opens the folder, and writes the report."""
        data = self.data
        indices = data.split.reported
        if not len(indices):
            self.screen.say(f"No validation pictures, so no report. The model is in {self.folder}")
            return {}
        self.screen.say(f"evaluating the kept model on {many(len(indices), 'picture')}, for the report")
        predictor = load(self.folder, device=str(self.world.device))
        evaluation = evaluate(predictor, data.source, indices, workers=self.config.data.workers)
        results = evaluation.metrics()
        write_text(self.folder / "evaluation.json", to_json(results))
        facts = RunReport(
            folder=self.folder,
            rows=read_rows(self.folder / METRICS),
            config=self.config,
            evaluation=evaluation,
            source=data.source,
            split=data.split,
            preprocessing=self.preprocessing,
            augmented=self.trainer.run.first_batch(),
            data_report=data.report,
            command=self.command,
            predictor=predictor,
        )
        hints = outlook(facts)
        page = write_report(facts, predictor.task.report, hints)
        for hint in hints:
            self.screen.say(hint)
        name, score = SCORES[self.trainer.task.score], results[self.trainer.task.score]
        said = "undefined" if score is None else f"{score:.2%}"  # where there is no object to find
        kind = "test " if data.split.report_on == "test" else ""
        self.screen.say(f"{name} {said} on {results['n']:,} {kind}pictures; report: {page}")
        return results


def total_steps(config: Config, plan: SamplingPlan) -> int:
    """The length of a run that is not cut to a time."""
    steps, optim = config.run.steps, config.optim
    if not steps:
        return round((config.run.epochs + optim.cooldown_epochs) * plan.steps_per_epoch)
    epochs = steps / plan.steps_per_epoch
    if optim.warmup_epochs + optim.cooldown_epochs >= epochs:
        raise WeftError(
            f"run.steps={steps} are {epochs:.3g} epochs here, not more than optim.warmup_epochs={optim.warmup_epochs:g}"
            f" and optim.cooldown_epochs={optim.cooldown_epochs:g} together; give more steps, or these shorter."
        )
    return steps


def command_line() -> str:
    """How this run was started, for its report."""
    started_by = Path(sys.argv[0])
    is_command = started_by.name in ("weft", "weft.exe") or started_by.parent.name == "weft"
    return shell("weft", *sys.argv[1:]) if is_command else 'weft.train(config="config.yaml")'


def broadcast(model: torch.nn.Module) -> None:
    """The main process's weights and buffers, everywhere."""
    for tensor in model.state_dict().values():
        torch.distributed.broadcast(tensor, src=0)


@contextlib.contextmanager
def stopping_at_signals(trainer: Trainer, received: list[int]) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C lets the step finish and saves; the second one ends at once."""
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        if trainer.stop_requested and trainer.world.size > 1:
            return  # a terminal and torchrun both pass a Ctrl-C on; who wants to stop at once ends torchrun
        if trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = True
        trainer.run.screen.say("Stopping after this step; once more to stop at once.")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
