"""The command that measures: `weft bench`, how fast models are, and how fast they learn."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from weft.cli.options import (
    Flag,
    Force,
    Keys,
    Names,
    OutFile,
    complain,
    print_columns,
    progress_of,
    say,
    settings_of,
    study_folder,
)
from weft.cli.outputs import MEASUREMENTS, OutputFile, check_outputs, check_outside
from weft.documents import to_json
from weft.errors import WeftError, check_positive, check_ratio
from weft.words import clean

if TYPE_CHECKING:
    import torch

    from weft.study.speed.measure import SpeedRow, SpeedSettings


def bench(
    *models: str,
    train: Annotated[bool, Flag] = False,
    compile: Annotated[bool, Flag] = False,
    replay: Annotated[bool, Flag] = False,
    against: Names = [],  # noqa: B006  cyclopts never changes it
    batch: Annotated[int | None, Parameter(negative="")] = None,
    img_size: int | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    device: str = "auto",
    seconds: float | None = None,
    fuse: bool = True,
    fast: bool = True,
    as_json: Annotated[str, Parameter(name="--json"), OutFile] = "",
    force: Force = False,
    compare: str = "",
    epochs: str = "",
    fractions: str = "",
    seeds: int = 1,
    recipe: str = "",
    jobs: int = 0,
    out: str = "",
    keys: Keys = [],  # noqa: B006
) -> None:
    """Measure how fast models are, next to others in the same run: pictures per second, memory, ratio.

    With --compare DATA, measure how fast they learn instead: accuracy against epochs and against pictures, at equal
    budgets. The same command goes on where it was stopped.

    Inference runs Weft's models through `weft.fuse`, every model in the type given; training, forward, backward and
    AdamW under autocast, through `weft.fast`. --no-fast measures them as their files say. Every round times every
    model in turn.

    Parameters
    ----------
    models
        Names of `weft models` or of timm's, or hf:cvt-13 and hf:cvt-21 of transformers. Arguments of a model follow a
        colon: cetnet_tiny:ce_unit=dense,ce_layers=3.
    train
        Measure a training step instead of inference.
    compile
        Run all models through torch.compile.
    replay
        Record all launches once, as a CUDA graph, and replay them: what the GPU does where Python is too slow for it.
    against
        Peers: one for each model, or one for all.
    batch
        Pictures at once; by default 256 on a GPU, 128 to train, 8 on a CPU.
    img_size
        Side of the pictures; by default the first model's own.
    dtype
        By default bf16 on a GPU, fp32 on a CPU.
    device
        auto, cpu, cuda or cuda:N.
    seconds
        To measure each model; 3 by default.
    fuse
        Fold BatchNorm away in inference of Weft's models, as one would to use them; --no-fuse: `weft.fast` alone.
    fast
        Measure Weft's models as `weft.fuse` and `weft.fast` make them; --no-fast: as they are, in plain PyTorch.
        WEFT_KERNELS=off in the environment keeps what these two do, but for Weft's kernels.
    as_json
        Write the numbers to this file, with machine, versions and settings; - for standard output.
    force
        Replace that file even where Weft did not write it. Pictures and runs are never replaced.
    compare
        Train the models on these pictures, and compare what they reach.
    epochs
        With --compare: budgets, such as 10,20,30, which is the default.
    fractions
        With --compare: parts of the training pictures, by default 0.2,0.6,1, each trained for so many epochs that it
        sees as many pictures as with the first budget.
    seeds
        With --compare: trainings of each kind, for mean, spread and intervals of the differences.
    recipe
        With --compare: a name of `weft recipes`, or a YAML file; by default chosen from the data.
    jobs
        With --compare: trainings at once; 0: one for each GPU, or as many as a CPU has cores for.
    out
        With --compare: the folder; by default runs/compare-DATA-MODELS.
    keys
        With --compare: settings of the trainings, such as --optim.lr 0.001.
    """
    file = OutputFile("json", as_json, MEASUREMENTS)
    check_outputs(file, force=force)
    form = dict(train=train, compile=compile, replay=replay, fuse=fuse, fast=fast)
    if compare:
        _refuse_speed_options(**form, against=against, json=as_json, dtype=dtype, seconds=seconds)
        settings = {**settings_of(keys), "img_size": img_size, "batch": batch, "device": device}
        _compare(list(models), compare, settings, epochs, fractions, seeds, recipe, jobs, device, out)
        return
    if epochs or fractions or recipe or out or keys or jobs or seeds != 1:
        raise WeftError(
            "--epochs, --fractions, --seeds, --recipe, --jobs and --out are for trainings; add --compare DATA."
        )
    if not models:
        raise WeftError("No model given; `weft models` lists them.")
    check_positive(batch=1 if batch is None else batch, img_size=1 if img_size is None else img_size)
    seconds = 3.0 if seconds is None else seconds
    check_ratio(seconds=seconds)
    settings = _speed_settings(models[0], device, batch, img_size, dtype, **form)
    _measure(models, against, settings, seconds, file)


# Speed --------------------------------------------------------------------------------------------------------------


def _refuse_speed_options(*, fuse: bool, fast: bool, seconds: float | None, **others: Any) -> None:
    """Raises for an option that has nothing to do with trainings."""
    given = [name for name, value in others.items() if value]
    given += ["seconds"] if seconds is not None else []
    given += [name for name, value in {"no-fuse": fuse, "no-fast": fast}.items() if not value]
    if given:
        raise WeftError(f"--{given[0]} is for measurements of speed; leave it out with --compare.")


def _speed_settings(
    first: str, device: str, batch: int | None, img_size: int | None, dtype: str | None, *, train: bool, **form: bool
) -> "SpeedSettings":
    """The settings of a measurement, with what was left open from the device and the first model."""
    from weft.study.speed.measure import SpeedSettings
    from weft.study.speed.models import own_size

    place = _pick_device(device)
    gpu = place.type == "cuda"
    if dtype == "fp16" and not gpu:
        raise WeftError("--dtype fp16 needs a GPU; choose bf16 or fp32.")
    if form["replay"] and not gpu:
        raise WeftError("--replay records CUDA graphs, which need a GPU; leave it out on a CPU.")
    return SpeedSettings(
        train=train,
        batch=batch or ((128 if train else 256) if gpu else 8),
        img_size=img_size or own_size(first),
        dtype=dtype or ("bf16" if gpu else "fp32"),
        device=str(place),
        **form,
    )


def _measure(
    models: Sequence[str], against: Sequence[str], settings: "SpeedSettings", seconds: float, file: OutputFile
) -> None:
    """Measures, prints and writes; exit code 1 where a model failed."""
    from weft.study.speed import report
    from weft.study.speed.measure import measure

    with progress_of("timings", quiet=False) as progress:
        rows = measure(models, against, settings, seconds, progress)
    result = report.as_json(rows, settings, seconds)
    file.write(to_json(result, indent=2) + "\n")
    if file.name != "-":
        say(report.title(result))
        _print_rows(rows, report.as_table(rows))
        if file.name:
            say(f"Wrote {file.name}.")
    if any(row.error for row in rows):
        sys.exit(1)


def _pick_device(name: str) -> "torch.device":
    from weft.engine.device import pick_device

    try:
        place = pick_device(name)
    except WeftError as error:
        raise WeftError(str(error).replace("run.device=", "--device ")) from None
    if place.type not in ("cpu", "cuda"):
        raise WeftError(f"--device {name!r} cannot be measured; choose auto, cpu, cuda or cuda:N.")
    return place


def _print_rows(rows: "list[SpeedRow]", table: list[list[str]]) -> None:
    """Prints the table; on a terminal in colours, failures in red."""
    header, *lines = table
    right = [i for i, name in enumerate(header) if name not in ("model", "to")]
    if not sys.stdout.isatty():
        print_columns([header, *lines], right=right)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    for i, name in enumerate(header):
        shown.add_column(name, justify="right" if i in right else "left")
    for row, texts in zip(rows, lines, strict=True):
        style = "red" if row.error else "bold" if row.ratio is not None else ""
        shown.add_row(*(Text(clean(text), style=style) for text in texts))
    Console().print(shown)


# Learning -----------------------------------------------------------------------------------------------------------


def _compare(
    models: list[str],
    data: str,
    given: dict[str, Any],
    epochs: str,
    fractions: str,
    seeds: int,
    recipe: str,
    jobs: int,
    device: str,
    out: str,
) -> None:
    """Trains the models at equal budgets and compares them; exit code 1 where a training failed."""
    if any(":" in model for model in models):
        raise WeftError("Arguments of a model are for measurements of speed; --compare takes names alone.")
    if len(models) < 2 or len(set(models)) < len(models):
        raise WeftError("Name two or more models to compare: weft bench ceit_nano t2t_vit_7 --compare DATA")
    check_positive(seeds=seeds, jobs=jobs or 1)
    budgets = _numbers("epochs", epochs or "10,20,30", whole=True)
    parts = _numbers("fractions", fractions or "0.2,0.6,1", most=1.0)

    from weft.run.train import name_settings
    from weft.study.cells.setup import prepare_study
    from weft.study.cells.workers import say_progress
    from weft.study.efficiency.compare import compare
    from weft.study.efficiency.comparison import Design
    from weft.study.efficiency.page import table

    common = prepare_study(data, models, name_settings(given), recipe, say)
    folder = study_folder(out, "compare", data, *models)
    check_outside(folder, [data])
    design = Design(common, tuple(int(budget) for budget in budgets), tuple(parts), seeds)
    say(f"{len(design.names())} trainings -> {folder}")
    found = compare(folder, design, jobs=jobs, device=device, watch=say_progress(say, design.names()))
    header, *rows = table(found)
    print_columns([header, *rows], right=range(1, len(header)))
    for error in found.errors:
        complain(f"not trained: {error}")
    say(f"Wrote {folder / 'compare.html'}, with compare.json, compare.png and compare.svg beside it.")
    if found.errors:
        sys.exit(1)


def _numbers(option: str, text: str, *, most: float = float("inf"), whole: bool = False) -> list[float]:
    """10,20,30 as rising numbers."""
    try:
        values = sorted({float(word) for word in text.split(",")})
    except ValueError:
        values = [-1.0]
    if not all(0 < value <= most and not (whole and value % 1) for value in values):
        raise WeftError(f"--{option} {text} is not a list such as {'10,20,30' if whole else '0.2,0.6,1'}.")
    return values
