"""The commands that use a trained model: `weft eval` and `weft predict`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from weft.cli.options import Flag, Keys, OutFile, check_out, progress_of, settings_of, write_out
from weft.errors import WeftError, check_writable

if TYPE_CHECKING:
    from weft.run.predict_dense import DensePredictor

SCORE = 0.5


def evaluate(
    run: Path,
    data: str = "",
    /,
    *,
    split: str = "",
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
        Pictures with labels, masks or boxes, as for `weft train`; by default those that the run kept for validation.
    split
        val, test or all; by default the validation pictures, where there are any.
    scales
        Segmentation: average over these sizes of the picture, such as 0.5,0.75,1,1.25.
    flip
        Segmentation: average with the mirrored picture.
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
    from weft.report.text import metric_lines
    from weft.run import predictor as using

    settings: dict[str, Any] = _test_keys(keys)
    settings |= {"test.scales": f"[{scales}]"} if scales else {}
    settings |= {"test.flip": True} if flip else {}
    settings |= {"test.mode": mode} if mode else {}
    predictor = using.load(run, device, settings)
    source, indices, what = using.find_pictures(run, data, split)
    with progress_of("pictures evaluated", quiet=as_json and not sys.stderr.isatty()) as progress:
        evaluation = using.evaluate(predictor, source, indices, workers=workers, progress=progress)
    metrics = evaluation.metrics()
    if as_json:
        print(json.dumps({"data": source.root, "pictures": what, **metrics}, allow_nan=False))
    else:
        print(what + (f"; {len(indices) - metrics['n']} cannot be read" if len(indices) > metrics["n"] else ""))
        print("\n".join(metric_lines(metrics)))


def predict(
    run: Path,
    /,
    *pictures: str,
    out: Path | None = None,
    top: Annotated[int, Parameter(negative="")] = 5,
    score: Annotated[float, Parameter(negative="")] = SCORE,
    csv: Annotated[str, OutFile] = "",
    as_json: Annotated[str, Parameter(name="--json"), OutFile] = "",
    batch: Annotated[int | None, Parameter(negative="")] = None,
    device: str = "auto",
    workers: Annotated[int, Parameter(negative="")] = -1,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Say what is in pictures, and where.

    Parameters
    ----------
    run
        A run or model folder.
    pictures
        Files, folders with all below them, or patterns such as "*.jpg".
    out
        Segmentation, detection: a new folder for masks, overlays and predictions.json.
    top
        How many classes to name for each picture.
    score
        Detection: show objects that the model is at least so sure of; predictions.json has the others, too.
    csv
        Write a table to this file; - for standard output.
    as_json
        Write JSON to this file; - for standard output.
    batch
        Pictures at once.
    device
        auto, cpu, cuda or cuda:N.
    workers
        Processes that read pictures; -1: from the machine.
    keys
        Segmentation, detection: settings of how the model is used, such as --test.flip.
    """
    if not pictures:
        raise WeftError("No pictures given; name files, folders or patterns.")
    if csv == as_json == "-":
        raise WeftError("--csv and --json cannot both go to standard output; give one of them a file.")
    if not 0 <= score <= 1:
        raise WeftError(f"--score {score:g} is no probability; choose a number from 0 to 1.")
    check_out(csv=csv, json=as_json)
    if out is not None:
        check_writable(out)
        inputs = [Path(picture).resolve() for picture in pictures if Path(picture).is_dir()]
        if any(out.resolve().is_relative_to(folder) for folder in inputs):
            raise WeftError(f"--out {out} lies among the pictures; choose a place outside of them.")

    from weft.errors import check_positive
    from weft.run import predictor as using

    predictor = using.load(run, device, _test_keys(keys))
    check_positive(top=top, batch=1 if batch is None else batch)
    with progress_of("pictures looked at", quiet=False) as progress:
        if isinstance(predictor, using.DensePredictor):
            options = {"batch": batch or 0, "workers": workers, "progress": progress}
            texts, errors = _dense(predictor, list(pictures), out, score, top, **options)
        elif out is not None:
            raise WeftError(f"{run} holds a classifier, which has no pictures to write; leave --out, take --csv.")
        else:
            batch = batch or using.EVAL_BATCH
            found = predictor.predict(list(pictures), top, batch=batch, workers=workers, progress=progress)
            texts, errors = _classified(found, min(top, len(predictor.classes))), [p.error for p in found]
    if as_json:
        write_out(as_json, texts["json"])
    if csv:
        write_out(csv, texts["csv"])
    if "-" not in (csv, as_json):
        written = [name for name in (csv, as_json, str(out or "")) if name]
        if not csv and not as_json:
            print(texts["lines"])
        if written:
            unread = sum(map(bool, errors))
            print(f"Wrote {' and '.join(written)}: {len(errors)} pictures, {unread} unreadable.")
        elif texts.get("hint"):
            print(texts["hint"])
    if all(errors):
        sys.exit(2)


def _test_keys(keys: list[str]) -> dict[str, str]:
    settings = settings_of(keys)
    other = [name for name in settings if not name.startswith("test.")]
    if other:
        raise WeftError(f"--{other[0]} belongs to training; here only settings of test. apply, see `weft keys test.`")
    return settings


def _classified(found: list[Any], top: int) -> dict[str, str]:
    from weft.report.text import as_csv, prediction_lines

    return {
        "json": json.dumps([asdict(prediction) for prediction in found], indent=2) + "\n",
        "csv": as_csv(found, top),
        "lines": "\n".join(prediction_lines(found)),
    }


def _dense(
    predictor: "DensePredictor", pictures: list[str], out: Path | None, score: float, top: int, **options: Any
) -> tuple[dict[str, str], list[str]]:
    """The texts on all pictures, and what is wrong with each; masks and overlays are written on the way."""
    from weft.data.given import GivenPictures
    from weft.report import text as show
    from weft.run.results import Writer, coco_rows, shares

    found = GivenPictures(pictures, predictor.task.name)
    writer = Writer(out, predictor, found, score) if out is not None else None
    segments, rows, errors = predictor.task.name == "segment", [], []
    for index, prediction in enumerate(predictor.stream(found, 0.0 if writer else score, **options)):
        if writer:
            writer.add(index, prediction)
        errors.append(prediction.error)
        if not segments:
            rows.append(coco_rows(prediction.above(score), index + 1, predictor.classes))
        else:
            rows.append({} if prediction.mask is None else shares(prediction.mask, predictor.classes))
    if writer:
        writer.close()
    if segments:
        json_rows: Any = [
            {"name": name, "shares": row, "error": error}
            for name, row, error in zip(found.names, rows, errors, strict=True)
        ]
        csv, lines = (
            show.shares_csv(found.names, rows, errors, predictor.classes),
            show.shares_lines(found.names, rows, errors, top),
        )
        hint = "Masks and overlays are written with --out FOLDER."
    else:
        json_rows = [row for objects in rows for row in objects]
        csv, lines = (
            show.objects_csv(found.names, rows, errors),
            show.objects_lines(found.names, rows, errors),
        )
        hint = "Overlays and COCO's JSON are written with --out FOLDER, a table of all objects with --csv FILE."
    hint = "" if all(errors) else hint
    return {"json": json.dumps(json_rows, indent=1) + "\n", "csv": csv, "lines": "\n".join(lines), "hint": hint}, errors
