"""A run that goes on: from the last saved state, with the data and settings that it was started with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config import Config, override, read_yaml
from weft.data.check.check import DataReport
from weft.data.preprocessing import Preprocessing
from weft.data.sources.source import Source, fingerprint
from weft.data.split import load_split
from weft.documents import read_json
from weft.engine.device import World, process_group
from weft.engine.lock import STATE
from weft.engine.log import METRICS, read_rows
from weft.engine.start import RunStart
from weft.engine.state import read_header
from weft.errors import WeftError
from weft.models.weights.former import former_args
from weft.run.data import RunData, absolute_paths, is_there, open_sources, relocated
from weft.run.recipes import decide_length
from weft.run.result import Run
from weft.run.session import RunSession, locked_by_main
from weft.words import shell

MAY_CHANGE = (  # within a run, when asked for; the rest decides what the run is
    *("run.epochs", "run.steps", "run.patience", "run.save_minutes", "run.micro_batch", "run.device", "run.precision"),
    *("run.compile", "run.fast", "run.replay", "run.fsdp", "run.tensorboard", "run.deterministic", "optim."),
    *("data.workers", "data.bad_files", "data.leaks", "data.keep"),
)
MAY_MOVE = ("data.source", "data.val", "data.masks", "data.classes")  # as long as the fingerprint is the same


def read_settings(folder: Path) -> Config:
    """The settings of a run; of one made with a model that has other defaults today, with those of then."""
    before_pictures_were_kept = {"data.keep": "no"}
    saved = override(Config(), {**before_pictures_were_kept, **read_yaml(folder / "config.yaml")})
    former = former_args(saved.model.name, saved.model.args, folder / STATE)
    return replace(saved, model=replace(saved.model, args={**former, **saved.model.args}))


def change_settings(folder: Path, given: dict[str, Any]) -> tuple[Config, list[str]]:
    """The settings of a run with those that were given, and the keys that differ from what they were."""
    saved = read_settings(folder)
    paths = absolute_paths(override(Config(), given))
    given = {**given, **{key: path for key, path in paths.items() if key in given}}
    changed = [key for key, value in given.items() if override(saved, {key: value}) != saved]
    fixed = [key for key in changed if not key.startswith((*MAY_CHANGE, *MAY_MOVE))]
    if fixed:
        raise WeftError(f"{fixed[0]} cannot change within a run; start a new one, with {shell('--init', folder)}.")
    if "data.source" in changed:
        saved = replace(saved, data=relocated(saved.data, given["data.source"]))
    return override(saved, given), changed


def _open_moved(folder: Path, config: Config, world: World) -> Source:
    """The pictures, wherever they are now; where that is not known, WeftError says how to tell."""
    try:
        return open_sources(config, world)
    except WeftError as error:
        if is_there(config.data.source):
            raise
        go_on = shell("weft", "train", "--resume", folder, "--data.source", "PLACE")
        raise WeftError(f"{error} If it was moved: {go_on}") from None


def resume_run(folder: Path, given: dict[str, Any], *, allow_changes: bool, quiet: bool, start: RunStart) -> Run:
    """Goes on from the last saved state. Other data or settings are refused, or said and accepted."""
    given = decide_length(given)
    with process_group() as world:
        with world.propagate_errors():
            header = read_header(folder)
            if (folder / METRICS).exists():
                read_rows(folder / METRICS)  # one that is damaged is refused before anything changes
            config, changed = change_settings(folder, given)
            changes = [f"{key}: {given[key]!r}" for key in changed if key not in MAY_MOVE]
        with start.phase("listing"):
            source = _open_moved(folder, config, world)
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
