"""A run that goes on: from the last saved state, with the data and settings that it was started with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config import Config, override, read_yaml
from weft.data.check.check import DataReport
from weft.data.preprocessing import Preprocessing
from weft.data.sources.source import fingerprint
from weft.data.split import load_split
from weft.documents import read_json
from weft.engine.device import process_group
from weft.engine.start import RunStart
from weft.engine.state import STATE, read_header
from weft.errors import WeftError
from weft.models.weights.former import former_args
from weft.run.data import RunData, absolute_paths, open_sources
from weft.run.recipes import decide_length
from weft.run.result import Run
from weft.run.session import RunSession, locked_by_main

MAY_CHANGE = (  # within a run, when asked for; the rest decides what the run is
    *("run.epochs", "run.steps", "run.patience", "run.save_minutes", "run.micro_batch", "run.device", "run.precision"),
    *("run.compile", "run.fast", "run.replay", "run.fsdp", "run.tensorboard", "run.deterministic", "optim."),
    *("data.workers", "data.bad_files", "data.leaks", "data.keep"),
)


def read_settings(folder: Path) -> Config:
    """The settings of a run; of one made with a model that has other defaults today, with those of then."""
    before_pictures_were_kept = {"data.keep": "no"}
    saved = override(Config(), {**before_pictures_were_kept, **read_yaml(folder / "config.yaml")})
    former = former_args(saved.model.name, saved.model.args, folder / STATE)
    return replace(saved, model=replace(saved.model, args={**former, **saved.model.args}))


def resume_run(folder: Path, given: dict[str, Any], *, allow_changes: bool, quiet: bool, start: RunStart) -> Run:
    """Goes on from the last saved state. Other data or settings are refused, or said and accepted."""
    given = decide_length(given)
    with process_group() as world:
        with world.propagate_errors():
            header = read_header(folder)
            saved = read_settings(folder)
            paths = absolute_paths(override(Config(), given))
            given = {**given, **{key: path for key, path in paths.items() if key in given}}
            config = override(saved, given)
            changed = [key for key, value in given.items() if override(saved, {key: value}) != saved]
            changes = [f"{key}: {given[key]!r}" for key in changed]
            fixed = [key for key in changed if not key.startswith(MAY_CHANGE)]
            if fixed:
                raise WeftError(f"{fixed[0]} cannot change within a run; start a new one, with --init {folder}.")
        with start.phase("listing"):
            source = open_sources(config, world)
        with world.propagate_errors():
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
            report = DataReport.from_dict(read_json(folder / "data_report.json"))
            preprocessing = Preprocessing.from_dict(header["preprocessing"])
        with start.phase("device"):
            world = world.with_device(config.run.device)
        with locked_by_main(world, folder):
            stored = replace(config, model=replace(config.model, init=""))  # the state has the weights
            session = RunSession(folder, stored, world, RunData(source, split, report), preprocessing, quiet, start)
            session.config = session.trainer.run.config = config
            session.prepare_resumed(changed, header)
            return session.train()
