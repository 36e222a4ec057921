"""The start of a new run: what was asked for, what nobody said, and the folder."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.config import Config, override, read_yaml
from weft.documents import read_json
from weft.engine.device import World, process_group
from weft.engine.lock import STATE, forget_start
from weft.engine.log import Screen
from weft.engine.optim import scale_schedule
from weft.engine.start import RunStart
from weft.engine.threads import fewer_threads
from weft.errors import WeftError
from weft.models.registry import check_name
from weft.models.weights.former import former_args
from weft.run.auto import auto_settings
from weft.run.choose import check_settings, check_task_settings, choose_preprocessing, fill
from weft.run.data import EarlyLook, RunData, absolute_paths, open_data
from weft.run.initial import SCRATCH, check_init, model_for
from weft.run.place import check_out, check_source, is_restarted, new_folder
from weft.run.recipes import AUTO, decide_length, find_recipe
from weft.run.result import Run
from weft.run.resume import resume_run
from weft.run.session import RunSession, locked_by_main
from weft.threads import torch_threads


def asked_length(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that override a recipe's: who asks for epochs or steps does not want its minutes."""
    decided = decide_length(settings)
    return {"run.minutes": 0.0, **decided} if {"run.epochs", "run.steps"} & {*settings} else decided


def begun(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which the word for no weights to start from stands for what it says."""
    return {**settings, "model.init": ""} if settings.get("model.init") == SCRATCH else settings


def start_run(
    given: dict[str, Any], *, recipe: str, config: str, out: str, quiet: bool, start: RunStart, early: EarlyLook | None
) -> Run:
    restarted = bool(out) and is_restarted(Path(out))
    if restarted and (Path(out) / STATE).exists():
        return resume_run(Path(out), {}, allow_changes=False, quiet=quiet, start=start)
    with process_group() as world:
        with world.propagate_errors():
            file, given = (begun(asked_length(asked)) for asked in (read_yaml(config) if config else {}, given))
            given = {**given, **absolute_paths(override(Config(), {**file, **given}))}
            given = {**model_of_init(override(Config(), {**file, **given})), **given}
            named = "" if recipe == AUTO else recipe
            settings = {**begun(find_recipe(named) if named else {}), **file, **given}
            first = stretch(override(Config(), settings), set(file) | set(given), named)
            check_source(first)
            check_init(first.model.init)
            check_settings(first)
            check_out(out, first, restarted, world.is_main, world.size)
            if first.model.name != "auto":
                check_name(first.model.name)
        with start.phase("device"):
            world = world.with_device(first.run.device)
        say = Screen(quiet or not world.is_main).say
        with start.phase("check"):
            data = open_data(first, world, say, early)
        with data.undisturbed():
            threads, elapsed = try_threads(first, world, say), start.seconds()
            if recipe == AUTO or not (recipe or config):
                asked = {*file, *given}
                with torch_threads(threads or torch.get_num_threads()):
                    rule, why = world.on_main(lambda: auto_settings(first, asked, data, world.device, elapsed))
                settings = {**rule, **file, **given}
                for line in why:
                    say(line)
        full = stretch(override(Config(), settings), set(file) | set(given), named)
        full, choices = fill(full, settings, data.report, len(data.split.train), world.device)
        full = replace(full, data=replace(full.data, keep=least_kept(world.all_gather(full.data.keep))))
        with world.propagate_errors():
            check_chosen(full, data)
        if full.run.minutes and "run.epochs" in given:
            choices.append("run.minutes decides how many epochs there are; run.epochs is not used")
        for line in choices:
            say(line)
        existed = bool(out) and Path(out).exists()
        folder = world.on_main(lambda: new_folder(out, full))
        with locked_by_main(world, folder):
            # Again: nobody else can come in now.
            world.on_main(lambda: check_out(out, full, restarted, processes=world.size))
            with forgotten_if_it_fails(folder, world, keep=existed):
                preprocessing = world.on_main(
                    lambda: choose_preprocessing(full, data.report, data.source, data.split.train)
                )
                session = RunSession(folder, full, world, data, preprocessing, quiet, start)
                session.threads = threads
                session.prepare_new()
            return session.train()


def check_chosen(config: Config, data: RunData) -> None:
    """Raises for settings that cannot work, now that all are known."""
    check_settings(config)
    check_task_settings(config)
    check_name(config.model.name)
    if config.run.patience and not len(data.split.val):
        raise WeftError(
            f"run.patience={config.run.patience} has no validation pictures to judge by; hold some out with"
            " --data.val_fraction 0.05."
        )


@contextlib.contextmanager
def forgotten_if_it_fails(folder: Path, world: World, keep: bool) -> Iterator[None]:
    """Leaves nothing of a run that does not come to its first state; `keep`: but the folder, which is not ours.

    Several processes leave it all, for their next attempt.
    """
    try:
        yield
    except BaseException:
        if world.size == 1:
            forget_start(folder)
            if not keep:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise


def try_threads(config: Config, world: World, say: Callable[[str], None]) -> int:
    """Fewer threads than usual, where these compute faster; or 0."""
    usual = torch.get_num_threads()
    threads = world.on_main(lambda: fewer_threads(config.run, world.device, usual))
    if threads:
        why = "more would wait for each other; another job seems to use this machine"
        say(f"{threads} of {usual} threads: {why}")
    return threads


def least_kept(choices: list[Any]) -> Any:
    """Picks what all processes can keep, of what each has the memory for: they must draw alike."""
    return min(choices, key=("no", "memory", "device").index)


def model_of_init(config: Config) -> dict[str, Any]:
    """The model and arguments that a run to start from was trained with, where no model was asked for."""
    file = Path(config.model.init) / "config.json"
    if by_word := model_for(config.model.init, config.model.name):
        return by_word
    if config.model.name != "auto" or not config.model.init or not file.is_file():
        return {}
    content = read_json(file)
    fixed = ("img_size", "num_classes", "in_chans", "drop_path_rate", "drop_rate", "proj_drop_rate", "global_pool")
    args = {key: value for key, value in content.get("model_args", {}).items() if key not in fixed}
    former = former_args(content["architecture"], args, file.with_name("model.safetensors"))
    return {"model.name": content["architecture"], "model.args": {**former, **args}}


def stretch(config: Config, given: set[str], recipe: str) -> Config:
    """A recipe for another number of epochs or steps: its warm-up and other lengths keep their share of the run."""
    if not recipe or "run.steps" not in given:
        return config
    run, planned = config.run, override(Config(), find_recipe(recipe)).run
    factor = run.epochs / planned.epochs
    if run.steps:  # how many epochs these are is not known yet: lengths of a recipe without steps stay
        factor = run.steps / (planned.steps or run.steps)
    kept = {key.removeprefix("optim."): getattr(config.optim, key[6:]) for key in given if key.startswith("optim.")}
    return replace(config, optim=replace(scale_schedule(config.optim, factor), **kept))
