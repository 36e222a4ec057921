"""The commands that use a trained model: `weft eval` and `weft predict`."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from weft.cli.options import (
    Flag,
    Force,
    Keys,
    Names,
    OutFile,
    check_run,
    complain,
    progress_of,
    say,
    say_json,
    settings_of,
)
from weft.cli.outputs import PREDICTIONS, TABLE, OutputFile, check_outputs, check_outside, refuse_inputs
from weft.config import Config, override, read_yaml
from weft.errors import WeftError, check_positive, check_writable

SCORE = 0.5  # as `weft.run.predictor` has it, which the help must not import


def evaluate(
    run: Path,
    data: str = "",
    /,
    *,
    split: str = "",
    classes: Names = [],  # noqa: B006  cyclopts never changes it
    scales: str = "",
    flip: Annotated[bool, Flag] = False,
    mode: str = "",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    device: str = "auto",
    workers: Annotated[int, Parameter(negative="")] = -1,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Measure a trained model: accuracy with its uncertainty, IoU or average precision, each class, confusions.

    Parameters
    ----------
    run
        A run or model folder.
    data
        Pictures with labels, masks or boxes, as for `weft train`; by default those that the run reports on.
    split
        train, val, test or all; by default the part that the run reports on. Of other data the validation pictures, of
        a known set its test part.
    classes
        Classes of the data that the model has under another name: Pug=pug "German Shepherd=shepherd". Those that it
        does not have are left out, and said.
    scales
        Segmentation: average over these sizes of the picture, such as 0.5,0.75,1,1.25.
    flip
        Classification, segmentation: average with the mirrored picture.
    mode
        Segmentation: whole pictures, or slide over them in windows.
    as_json
        Print one JSON object, and nothing else.
    device
        auto, cpu, cuda or cuda:N.
    workers
        Processes that read pictures; -1: from the machine.
    keys
        Other settings of how the model is used, such as --test.overlap 0.5.
    """
    check_run(run)
    settings: dict[str, Any] = _test_keys(keys)
    renamed = _renamed(classes)
    if data:
        from weft.run.data import check_there

        check_there(data)

    from weft.run.evaluate import evaluate as evaluate_model
    from weft.run.evaluate import find_pictures, in_models_classes
    from weft.run.predictor import load

    settings |= {"test.scales": f"[{scales}]"} if scales else {}
    settings |= {"test.flip": True} if flip else {}
    settings |= {"test.mode": mode} if mode else {}
    predictor = load(run, device, settings)
    source, indices, what = find_pictures(run, data, split)
    source, indices, notes = in_models_classes(predictor, source, indices, renamed)
    notes = [f"Used with {', '.join(f'{key} {value}' for key, value in settings.items())}."] * bool(settings) + notes
    with progress_of("pictures evaluated", quiet=as_json and not sys.stderr.isatty()) as progress:
        unreadable: list[str] = []
        about: Any = dict(workers=workers, progress=progress, unreadable=unreadable)
        evaluation = evaluate_model(predictor, source, indices, **about)
    metrics = evaluation.metrics()
    if as_json:
        say_json({"data": source.root, "pictures": what, **({"notes": notes} if notes else {}), **metrics})
    else:
        say(what + (f"; {len(unreadable)} cannot be read" if unreadable else ""))
        say(*notes, *evaluation.lines(metrics))


def trained_on(run: Path) -> list[str]:
    """The data that a run was trained on: nothing of them is ever replaced."""
    if not (run / "config.yaml").is_file():
        return []
    settings = read_yaml(run / "config.yaml")
    return [path for key in ("data.source", "data.val", "data.masks") if (path := str(settings.get(key, "")))]


def predict(
    run: Path,
    /,
    *pictures: str,
    out: Path | None = None,
    top: Annotated[int, Parameter(negative="")] = 5,
    score: Annotated[float, Parameter(negative="")] = SCORE,
    csv: Annotated[str, OutFile] = "",
    as_json: Annotated[str, Parameter(name="--json"), OutFile] = "",
    force: Force = False,
    batch: Annotated[int | None, Parameter(negative="")] = None,
    device: str = "auto",
    workers: Annotated[int, Parameter(negative="")] = -1,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Say what is in pictures, and where. Exit code 1 where some cannot be read.

    Parameters
    ----------
    run
        A run or model folder.
    pictures
        Files, folders with all below them, patterns such as "*.jpg", or a table (CSV) with a path in each line.
    out
        Segmentation, detection: a new folder for masks, overlays and predictions.json.
    top
        How many classes to name for each picture.
    score
        Detection: leave out objects that the model is less sure of.
    csv
        Write a table to this file; - for standard output.
    as_json
        Write JSON to this file; - for standard output.
    force
        Replace such a file even where Weft did not write it. Pictures and runs are never replaced.
    batch
        Pictures at once.
    device
        auto, cpu, cuda or cuda:N.
    workers
        Processes that read pictures; -1: from the machine.
    keys
        Settings of how the model is used, such as --test.flip, which is the one that a classifier has.
    """
    if not pictures:
        raise WeftError("No pictures given; name files, folders or patterns.")
    if csv == as_json == "-":
        raise WeftError("--csv and --json cannot both go to standard output; give one of them a file.")
    if not 0 <= score <= 1:
        raise WeftError(f"--score {score:g} is no probability; choose a number from 0 to 1.")
    files = OutputFile("csv", csv, TABLE), OutputFile("json", as_json, PREDICTIONS)
    check_outputs(*files, force=force, data=[*pictures, *trained_on(run)], run=run)
    if out is not None:
        check_writable(out)
        check_outside(out, [*pictures, *trained_on(run)])

    check_run(run)
    check_positive(top=top, batch=1 if batch is None else batch)
    settings = _test_keys(keys)

    from weft.data.given import GivenPictures
    from weft.run.predictor import load

    predictor = load(run, device, settings)
    if out is not None and not predictor.task.writes_pictures:
        raise WeftError(f"{run} holds a classifier, which has no pictures to write; leave --out, take --csv.")
    found = GivenPictures(list(pictures), predictor.task.name)
    refuse_inputs(files, found.files)
    writer = predictor.task.results(found, out, top=top, score=score)
    options: dict[str, Any] = {"top": top, "batch": batch or 0, "workers": workers}
    errors = []
    with progress_of("pictures looked at", quiet=False) as progress:
        for index, prediction in enumerate(predictor.stream(found, score=score, **options, progress=progress)):
            writer.add(index, prediction)
            errors.append(prediction.error)
    texts = writer.close()
    for file, text in zip(files, (texts.csv, texts.json), strict=True):
        file.write(text)
    if "-" not in (csv, as_json):
        written = [name for name in (csv, as_json, str(out or "")) if name]
        if not csv and not as_json:
            say(*texts.lines)
        if written:
            unread = sum(map(bool, errors))
            say(f"Wrote {' and '.join(written)}: {len(errors)} pictures, {unread} unreadable.")
        elif texts.hint:
            say(texts.hint)
    if texts.note:
        complain(texts.note)
    if any(errors):
        sys.exit(1)


def _renamed(classes: list[str]) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in classes]
    if wrong := [name for name, sign, new in pairs if not (name and sign and new)]:
        raise WeftError(f"--classes {wrong[0]} is no pair such as Pug=pug.")
    return {name: new for name, _, new in pairs}


def _test_keys(keys: list[str]) -> dict[str, str]:
    settings = settings_of(keys)
    other = [name for name in settings if not name.startswith("test.")]
    if other:
        raise WeftError(f"--{other[0]} belongs to training; here only settings of test. apply, see `weft keys test.`")
    override(Config(), settings)  # raises for what is no setting, or no value of one
    return settings
