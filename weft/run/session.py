"""One session of a run: what comes before the loop, and what comes after it.

A new run opens and checks its data, fills in what nobody said, and writes that down; a resumed run reads what was
written down and compares. Then both build the same parts, train, evaluate the kept model and write the report.
"""

import contextlib
import itertools
import json
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.config import Config, override, read_yaml, to_yaml
from weft.data.check.amounts import measure_targets
from weft.data.check.check import DataReport, check
from weft.data.loader import check_shared_memory
from weft.data.preprocessing import Preprocessing
from weft.data.sampler import SamplingPlan
from weft.data.sources.open import open_configured
from weft.data.sources.source import Source, fingerprint
from weft.data.split import Split, load_split, make_split, save_split
from weft.engine.device import World, convert_sync_bn, joined, pick_precision, shard
from weft.engine.fit_machine import compile_kernels, find_micro_batch, fit_into_time
from weft.engine.log import METRICS, MetricsFile, Screen, read_rows, tensorboard
from weft.engine.loop import Stopped, Trainer
from weft.engine.optim import Ema, freeze, make_optimizer, stretched
from weft.engine.parts import Parts
from weft.engine.state import (
    FULL,
    STATE,
    Progress,
    is_unfinished_start,
    job_name,
    last_user,
    locked,
    not_saved,
    read_header,
)
from weft.errors import WeftError, check_writable
from weft.fast.swap import fast_on
from weft.files import write_text
from weft.models.registry import check_name
from weft.report.run import RunReport, write_report
from weft.report.text import SCORES
from weft.run.build import make_model
from weft.run.choose import check_settings, check_task_settings, choose_preprocessing, choose_recipe, fill
from weft.run.evaluate import evaluate
from weft.run.predictor import load
from weft.run.recipes import find_recipe
from weft.run.teacher import open_teacher
from weft.run.train import Run
from weft.tasks.classify.distill import Distillation
from weft.tasks.classify.loss import balance_weights
from weft.tasks.detect.choose import WITH_SHAPES
from weft.tasks.registry import make_task
from weft.tasks.task import Task, TaskFacts

MAY_CHANGE = (  # within a run, when asked for; the rest decides what the run is
    *("run.epochs", "run.patience", "run.save_minutes", "run.micro_batch", "run.device", "run.precision"),
    *("run.compile", "run.fast", "run.replay", "run.tensorboard", "run.deterministic", "optim."),
    *("data.workers", "data.bad_files", "data.leaks"),
)


@dataclass
class Data:
    source: Source
    split: Split
    report: DataReport


# A new run ------------------------------------------------------------------------------------------------------


def start_run(given: dict[str, Any], *, recipe: str, config: str, out: str, quiet: bool) -> Run:
    restarted = bool(out) and is_restarted(Path(out))
    if restarted and (Path(out) / STATE).exists():
        return resume_run(Path(out), {}, allow_changes=False, quiet=quiet)
    with joined() as world:
        with world.together():
            file = read_yaml(config) if config else {}
            given = {**given, **absolute_paths(override(Config(), {**file, **given}))}
            given = {**model_of_init(override(Config(), {**file, **given})), **given}
            settings = {**(find_recipe(recipe) if recipe else {}), **file, **given}
            first = stretch(override(Config(), settings), set(file) | set(given), recipe)
            if not first.data.source:
                raise WeftError(
                    "Say what to train on: weft train DATA. `weft train demo:fashion` needs no data of your own."
                )
            check_settings(first)
            check_out(out, first, world, restarted)
            if first.model.name != "auto":
                check_name(first.model.name)
        world = world.take_device(first.run.device)
        say = Screen(quiet or not world.is_main).say
        data = open_data(first, world, say)
        if not recipe and not config:
            recipe = choose_recipe(first, data.source.task, len(data.split.train))
            settings = {**find_recipe(recipe), **given}
            say(f"recipe {recipe}: {len(data.split.train):,} training pictures")
        full = stretch(override(Config(), settings), set(file) | set(given), recipe)
        full, choices = fill(full, settings, data.report, len(data.split.train), world.device)
        with world.together():
            check_settings(full)
            check_task_settings(full)
            check_name(full.model.name)
        if full.run.minutes and "run.epochs" in given:
            choices.append("run.minutes decides how many epochs there are; run.epochs is not used")
        for line in choices:
            say(line)
        folder = world.on_main(lambda: new_folder(out, full))
        with locked_by_main(world, folder):
            world.on_main(lambda: check_out(out, full, world, restarted))  # again: nobody else can come in now
            preprocessing = world.on_main(
                lambda: choose_preprocessing(full, data.report, data.source, data.split.train)
            )
            session = RunSession(folder, full, world, data, preprocessing, quiet)
            session.prepare_new()
            return session.train()


def absolute_paths(config: Config) -> dict[str, str]:
    """Data and initial weights by paths that still lead there when the run is resumed from another folder."""
    named = {"data.source": config.data.source, "data.val": config.data.val}
    beside = {"data.masks": config.data.masks, "data.classes": config.data.classes}  # here, or in the source
    named |= {key: path for key, path in beside.items() if Path(path).exists()}
    named |= {"model.init": config.model.init, "loss.teacher": config.loss.teacher}
    return {key: absolute(path) for key, path in named.items() if path}


def absolute(path: str) -> str:
    """A path, a pattern of shards, or the root in NAME:ROOT; a mere name stays what it is."""
    name, colon, root = path.rpartition(":") if not Path(path).exists() else ("", "", path)
    leads_somewhere = Path(root).exists() or ("/" in root and Path(root).parent.exists())
    return f"{name}{colon}{Path(root).absolute()}" if leads_somewhere else path


def model_of_init(config: Config) -> dict[str, Any]:
    """The model and arguments that a run to start from was trained with, where no model was asked for."""
    file = Path(config.model.init) / "config.json"
    if config.model.name != "auto" or not config.model.init or not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    fixed = ("img_size", "num_classes", "in_chans", "drop_path_rate", "drop_rate", "global_pool")
    args = {key: value for key, value in content.get("model_args", {}).items() if key not in fixed}
    return {"model.name": content["architecture"], "model.args": args}


def check_out(out: str, config: Config, world: World, restarted: bool) -> None:
    """Raises unless the run can have its folder: not among the pictures, and over nothing that exists."""
    folder = Path(out or "runs")
    for source in filter(None, (config.data.source, config.data.val)):
        pictures = Path(source).expanduser()
        if pictures.is_dir() and folder.resolve().is_relative_to(pictures.resolve()):
            raise WeftError(f"{folder} lies inside the data, {source}; choose a place outside of it with --out.")
    if out and (folder / STATE).exists():
        raise WeftError(f"{out} holds a run; go on with it: weft train --resume {out}; or choose another --out.")
    if out and not restarted and world.is_main and not is_unfinished_start(folder):
        check_writable(folder)
    if not out and world.size > 1:
        raise WeftError("Say where to write with --out, so that a restarted process finds the run again.")


def new_folder(out: str, config: Config) -> Path:
    """The run's folder: as asked for, or the first free runs/DATA-MODEL-N."""
    name = Path(config.data.source.replace(":", "-")).stem or "data"
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        return Path(out)
    for number in itertools.count(1):
        folder = Path("runs") / f"{name}-{config.model.name}-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("there is always one more number")


def is_restarted(folder: Path) -> bool:
    """Whether torchrun starts this command again after a failure: then a process of the same job used the folder."""
    return bool(job_name()) and last_user(folder).endswith(job_name())


def stretch(config: Config, given: set[str], recipe: str) -> Config:
    """A recipe for another number of epochs: its warm-up and other lengths keep their share of the run."""
    if not recipe or "run.epochs" not in given:
        return config
    planned = override(Config(), find_recipe(recipe)).run.epochs
    kept = {key.removeprefix("optim."): getattr(config.optim, key[6:]) for key in given if key.startswith("optim.")}
    return replace(config, optim=replace(stretched(config.optim, config.run.epochs / planned), **kept))


def open_sources(config: Config, world: World) -> Source:
    """The pictures. One process of each machine opens them first, so that shards are indexed once and not by all."""
    for turn in (True, False):
        with world.together():
            if world.is_first_here == turn:
                source = open_configured(config.data)
    return source  # pyright: ignore[reportPossiblyUnboundVariable]


def open_data(config: Config, world: World, say: Any) -> Data:
    source = open_sources(config, world)
    with world.together():
        split = make_split(source, config.data, config.run.seed)
    report: DataReport = world.on_main(lambda: check(source, split, quick=True, config=config.data))
    for line in report.lines():
        say(line)
    errors = [problem.text for problem in report.problems if problem.severity == "error"]
    with world.together():
        if errors:
            raise WeftError(
                f"{errors[0].rstrip('.')} (`weft check {config.data.source}` shows "
                + ("the rest)." if errors[1:] else "it).")
            )
    split = without(split, source, report.bad)
    report = world.on_main(lambda: measure_targets(source, split.train, report))
    return Data(source, split, report)


def without(split: Split, source: Source, bad: dict[str, str]) -> Split:
    """The split without unreadable files, of which the check has found few enough."""
    if not bad:
        return split
    left_out = np.array([name in bad for name in source.names])
    return replace(
        split, **{part: idx[~left_out[idx]] for part, idx in vars(split).items() if isinstance(idx, np.ndarray)}
    )


# A run that goes on ---------------------------------------------------------------------------------------------


def resume_run(folder: Path, given: dict[str, Any], *, allow_changes: bool, quiet: bool) -> Run:
    """Goes on from the last saved state. Other data or settings are refused, or said and accepted."""
    with joined() as world:
        with world.together():
            header = read_header(folder)
            saved = override(Config(), read_yaml(folder / "config.yaml"))
            paths = absolute_paths(override(Config(), given))
            given = {**given, **{key: path for key, path in paths.items() if key in given}}
            config = override(saved, given)
            changed = [key for key, value in given.items() if override(saved, {key: value}) != saved]
            changes = [f"{key}: {given[key]!r}" for key in changed]
            fixed = [key for key in changed if not key.startswith(MAY_CHANGE)]
            if fixed:
                raise WeftError(f"{fixed[0]} cannot change within a run; start a new one, with --init {folder}.")
        source = open_sources(config, world)
        with world.together():
            if source.classes != header["classes"]:
                raise WeftError(f"{config.data.source} has other classes than the run {folder} was started with.")
            if fingerprint(source) != header["fingerprint"]:
                changes.append(f"the pictures of {config.data.source}")
            if changes and not allow_changes:
                raise WeftError(
                    f"Since {folder} was started these have changed: {'; '.join(changes)}."
                    " Undo that, or go on with --allow-changes (the result is then not that of one run)."
                )
            split = load_split(folder / "split.json", source)
            report = DataReport.from_dict(json.loads((folder / "data_report.json").read_text(encoding="utf-8")))
            preprocessing = Preprocessing.from_dict(header["preprocessing"])
        world = world.take_device(config.run.device)
        with locked_by_main(world, folder):
            stored = replace(config, model=replace(config.model, init=""))  # the state has the weights
            session = RunSession(folder, stored, world, Data(source, split, report), preprocessing, quiet)
            session.config = session.trainer.config = config
            session.prepare_resumed(changed, header)
            return session.train()


@contextlib.contextmanager
def locked_by_main(world: World, folder: Path) -> Iterator[None]:
    """The main process holds the folder's lock, for all."""
    with contextlib.ExitStack() as stack, told_when_full(folder):
        world.on_main(lambda: stack.enter_context(locked(folder)))
        with world.together():
            if not folder.is_dir():
                raise WeftError(f"{socket.gethostname()} does not see {folder}: choose a place all machines share.")
        yield


@contextlib.contextmanager
def told_when_full(folder: Path) -> Iterator[None]:
    """Whichever file of a run it is that finds the disk full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise not_saved(folder, error) from error


# Both -----------------------------------------------------------------------------------------------------------


class RunSession:
    def __init__(
        self, folder: Path, config: Config, world: World, data: Data, preprocessing: Preprocessing, quiet: bool
    ):
        self.folder, self.config, self.world, self.data = folder, config, world, data
        self.preprocessing = preprocessing
        self.screen = Screen(quiet or not world.is_main)
        self.dtype = pick_precision(config.run, world.device)
        torch.manual_seed(config.run.seed)
        if config.run.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.command = command_line()
        self.trainer = self.build()

    def prepare_new(self) -> None:
        """Finds what fits the machine, then writes down everything the run depends on."""
        trainer = self.trainer
        compile_kernels(trainer)
        find_micro_batch(trainer)
        if self.config.run.minutes:
            fit_into_time(trainer)
        trainer.parts.facts = self.facts()
        self.world.on_main(self.write_settings)
        trainer.save()

    def write_settings(self) -> None:
        write_text(self.folder / "config.yaml", to_yaml(self.config))
        write_text(self.folder / "data_report.json", json.dumps(self.data.report.to_dict()))
        save_split(self.data.split, self.data.source, self.folder / "split.json")

    def prepare_resumed(self, changed: list[str], header: dict[str, Any]) -> None:
        """Goes back to the last saved state; settings that were changed on purpose hold from there on."""
        trainer, planned = self.trainer, self.trainer.progress.total_steps
        trainer.restore()
        if "run.epochs" in changed:
            trainer.progress.total_steps = planned
        if "run.micro_batch" in changed:
            trainer.progress.micro_batch = self.config.run.micro_batch
        if changed:
            self.world.on_main(lambda: write_text(self.folder / "config.yaml", to_yaml(self.config)))
        self.command = header["command"]
        trainer.parts.facts = self.facts()
        if header["processes"] != self.world.size:
            self.screen.say(
                f"{self.world.size} processes instead of {header['processes']}: the same pictures in each step, but"
                " other chances in mixing and drop path, so the result is not that of one run to the last bit"
            )
        self.screen.say(f"{self.folder}: on after step {trainer.progress.step:,} of {trainer.progress.total_steps:,}")
        compile_kernels(trainer)  # perhaps on another machine

    def facts(self) -> dict[str, Any]:
        return {
            "config": to_yaml(self.config),
            "classes": self.data.source.classes,
            "preprocessing": self.preprocessing.to_dict(),
            "fingerprint": fingerprint(self.data.source),
            "processes": self.world.size,
            "command": self.command,
        }

    def build(self) -> Trainer:
        config, world, source, split = self.config, self.world, self.data.source, self.data.split
        with world.together():
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
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.run.fast:
            fast_on(model, world.device, record=False)
        if world.size > 1:
            broadcast(model)
        ema = Ema(model, config.run.ema) if config.run.ema else None
        if config.run.fsdp:
            shard(model, world)
            if config.run.fast:
                fast_on(model, world.device, record=False)  # blocks have changed their class
        plan = self.make_plan()
        total = round((config.run.epochs + config.optim.cooldown_epochs) * plan.steps_per_epoch)
        parts = Parts(
            source=source,
            split=split,
            preprocessing=self.preprocessing,
            model=model,
            write_model=made.write,
            optimizer=make_optimizer(model, config.optim, config.run.batch),
            ema=ema,
            plan=plan,
            task=self.make_task(),
            facts={},
        )
        progress = Progress(total_steps=total, micro_batch=config.run.micro_batch)
        return Trainer(self.folder, config, world, parts, self.dtype, progress, self.screen)

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
            has_shapes=config.model.head == WITH_SHAPES,
            labels=source.labels[self.data.split.train],
            pixel_counts=self.data.report.pixels or None,
            distillation=self.make_distillation() if config.loss.teacher else None,
        )
        task = make_task(source.task, config, facts)
        height, width = task.training_size
        one = self.preprocessing.channels * height * width * self.preprocessing.depth // 8
        check_shared_memory(config.run.batch // self.world.size * one, config.data.workers)
        return task

    def make_distillation(self) -> Distillation:
        config, source, device = self.config.loss, self.data.source, self.world.device
        return Distillation(
            config,
            open_teacher(config.teacher, device),
            classes=source.classes,
            preprocessing=self.preprocessing,
            device=device,
            multilabel=source.multilabel,
        )

    # Training and what follows ----------------------------------------------------------------------------------

    def train(self) -> Run:
        trainer = self.trainer
        metrics = MetricsFile(self.folder, trainer.progress) if self.world.is_main else None
        board = tensorboard(self.folder) if self.config.run.tensorboard and self.world.is_main else None
        trainer.rewind = lambda: metrics.cut(trainer.progress) if metrics else None
        trainer.log = lambda row: [write(row) for write in (metrics and metrics.write, board) if write]  # type: ignore
        parameters = sum(p.numel() for p in trainer.model.parameters())
        self.screen.say(f"{self.config.model.name}, {parameters / 1e6:.1f} M parameters -> {self.folder}")
        self.screen.start(trainer.epochs)
        try:
            with stopping_at_signals(trainer):
                trainer.fit()
        except Stopped:
            self.screen.close()
            self.screen.say(
                f"Stopped after step {trainer.progress.step:,}; go on with: weft train --resume {self.folder}"
            )
            return Run(self.folder, {}, stopped=True)
        finally:
            self.screen.close()
            if metrics:
                metrics.close()
        results = self.world.on_main(self.finish) if self.config.run.report else {}
        return Run(self.folder, results)

    def finish(self) -> dict[str, Any]:
        """Evaluates the kept model as anybody would who opens the folder, and writes the report."""
        data = self.data
        if not len(data.split.val):
            self.screen.say(f"No validation pictures, so no report. The model is in {self.folder}")
            return {}
        predictor = load(self.folder, device=str(self.world.device))
        evaluation = evaluate(predictor, data.source, data.split.val, workers=self.config.data.workers)
        results = evaluation.metrics()
        write_text(self.folder / "evaluation.json", json.dumps(results))
        facts = RunReport(
            folder=self.folder,
            rows=read_rows(self.folder / METRICS),
            config=self.config,
            evaluation=evaluation,
            source=data.source,
            split=data.split,
            preprocessing=self.preprocessing,
            augmented=self.trainer.first_batch(),
            data_report=data.report,
            command=self.command,
            predictor=predictor,
        )
        page = write_report(facts, predictor.task.report)
        name, score = SCORES[self.trainer.task.score], results[self.trainer.task.score]
        said = "undefined" if score is None else f"{score:.2%}"  # where there is no object to find
        self.screen.say(f"{name} {said} on {results['n']:,} pictures; report: {page}")
        return results


def command_line() -> str:
    """How this run was started, for its report."""
    started_by = Path(sys.argv[0])
    is_command = started_by.name in ("weft", "weft.exe") or started_by.parent.name == "weft"
    return shlex.join(["weft", *sys.argv[1:]]) if is_command else 'weft.train(config="config.yaml")'


def broadcast(model: torch.nn.Module) -> None:
    """The main process's weights and buffers, everywhere."""
    for tensor in model.state_dict().values():
        torch.distributed.broadcast(tensor, src=0)


@contextlib.contextmanager
def stopping_at_signals(trainer: Trainer) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C lets the step finish and saves; the second one ends at once."""
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if trainer.stop_wanted and trainer.world.size > 1:
            return  # a terminal and torchrun both pass a Ctrl-C on; who wants to stop at once ends torchrun
        if trainer.stop_wanted:
            raise KeyboardInterrupt
        trainer.stop_wanted = True
        trainer.screen.say("Stopping after this step; once more to stop at once.")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
