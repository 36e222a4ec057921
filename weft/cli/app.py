"""The command `weft`. The only module that knows all the others, and it imports them only when a command runs."""

import json
import os
import re
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from weft.cli.ablate import ablate
from weft.cli.bench import bench
from weft.cli.explain import explain
from weft.cli.options import Flag, Keys, check_out, print_columns, progress_of, settings_of
from weft.cli.results import evaluate, predict
from weft.cli.search import search
from weft.errors import WeftError, check_writable, did_you_mean
from weft.version import __version__

if TYPE_CHECKING:
    from weft.catalog.catalog import ModelInfo

app = App(name="weft", help="Convolutions woven into vision transformers.", version=__version__)

app.command(evaluate, name="eval")
app.command(predict)
app.command(explain)
app.command(bench)
app.command(search)
app.command(ablate)


@app.command
def train(
    data: str = "",
    /,
    *,
    model: str | None = None,
    head: str | None = None,
    task: str | None = None,
    recipe: str = "",
    init: str | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    img_size: int | None = None,
    batch: str | None = None,
    lr: float | None = None,
    val: str | None = None,
    fraction: float | None = None,
    balance: str | None = None,
    freeze: str | None = None,
    teacher: str | None = None,
    patience: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: str = "",
    config: str = "",
    resume: str = "",
    allow_changes: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Train on your pictures: to classify them or, with masks or boxes, to segment or detect.

    Every setting has a default that works.

    Parameters
    ----------
    data
        A folder with one folder of pictures per class, or with images and masks, or with boxes (COCO, VOC, YOLO); a CSV
        file, tar shards, NAME:ROOT of a known set, demo:fashion or demo:nuclei.
    model
        A name of `weft models`, or any of timm's; by default chosen from the data.
    head
        fpn, vt-fpn or upernet to segment, mask-rcnn or faster-rcnn to detect.
    task
        classify, segment or detect; by default what the data are for.
    recipe
        A name of `weft recipes`, or a YAML file; by default chosen from the data.
    init
        Start from these weights: a run or model folder, a checkpoint file, or `pretrained`.
    epochs
        Passes over the training pictures.
    minutes
        A time budget instead: as many epochs as fit.
    img_size
        Side of the pictures the model sees.
    batch
        Pictures per step, or `auto`. What does not fit into memory is computed in parts.
    lr
        Peak learning rate.
    val
        Validation pictures, where DATA does not hold them.
    fraction
        Train on this part of the training pictures only.
    balance
        Against rare classes: sampler, loss or logit-adjust.
    freeze
        What stays as it is: backbone, norm, or beginnings of parameter names.
    teacher
        Learn from this model, too: a run folder or a timm model.
    patience
        Stop after so many epochs without improvement.
    seed
        Of everything random.
    device
        auto, cpu, cuda or cuda:N.
    out
        The folder to make; by default a new one under runs/.
    config
        Settings from a YAML file, such as a run's config.yaml.
    resume
        A run to go on with.
    allow_changes
        Resume although data or settings have changed.
    quiet
        Say nothing but errors.
    keys
        Any setting of `weft keys`, more simply written as --optim.lr 0.001.
    """
    from weft.run.train import train as train_model

    short = dict(task=task, head=head)
    short |= dict(
        model=model, init=init, epochs=epochs, minutes=minutes, img_size=img_size, batch=batch, lr=lr, val=val
    )
    short |= dict(fraction=fraction, balance=balance, freeze=freeze, teacher=teacher, patience=patience, seed=seed)
    settings = {**short, "device": device, **settings_of(keys)}
    train_model(
        data,
        recipe=recipe,
        config=config,
        out=out,
        resume=resume,
        allow_changes=allow_changes,
        quiet=quiet,
        **settings,
    )


@app.command
def demo(
    task: Literal["classify", "segment", "detect"] = "classify",
    /,
    *,
    out: str = "",
    quiet: Annotated[bool, Flag] = False,
) -> None:
    """Train a small model on the pictures that come with Weft: the whole way in minutes, without a GPU.

    Parameters
    ----------
    task
        Classify clothes, segment cell nuclei from their background, or detect each of them.
    out
        The folder to make; by default a new one under runs/.
    quiet
        Say nothing but errors.
    """
    from weft.run.train import train as train_model

    data, recipe = ("demo:fashion", "demo") if task == "classify" else ("demo:nuclei", f"demo-{task}")
    run = train_model(data, recipe=recipe, out=out, quiet=quiet, task=task)
    if not quiet and not run.stopped:
        said = {
            "classify": "A classifier of clothes, trained on 6,000 pictures of 28 x 28 pixels, is right on"
            f" {run.metrics.get('top1', 0):.1%} of 1,000 others.",
            "segment": "A model that tells cell nuclei from their background reaches a mean IoU of"
            f" {run.metrics.get('miou', 0):.1%} on 64 other pictures.",
            "detect": "A model that finds and outlines each cell nucleus reaches a mask AP of"
            f" {run.metrics.get('mask_ap', 0):.1%} (AP50 {run.metrics.get('mask_ap50', 0):.1%}) on 64 other pictures.",
        }
        print(
            f"\n{said[task]}\nLook at {run.folder / 'report.html'}; then try it on your own pictures:\n"
            f"  weft check my_pictures/\n  weft train my_pictures/\n  weft predict {run.folder} some.jpg"
            + ("" if task == "classify" else " --out answers/")
        )


@app.command
def models(filter: str = "", /, *, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """List the models: parameters, MACs at the default size, paper, published top-1, weights.

    Parameters
    ----------
    filter
        A pattern such as "cvt*", or part of a name. Without it, all models.
    as_json
        Print JSON instead of a table.
    """
    from weft.catalog.catalog import catalog

    infos = catalog(filter)
    if not infos:
        names = {info.name.split(".")[0] for info in catalog()}
        raise WeftError(f"No model matches {filter!r}." + did_you_mean(filter, names))
    if as_json:
        print(json.dumps([asdict(info) for info in infos], indent=2))
    else:
        _print_models(infos)


@app.command
def convert(
    file: Path, /, *, model: str, out: Path, num_classes: Annotated[int | None, Parameter(negative="")] = None
) -> None:
    """Turn a published checkpoint into a model folder that timm opens.

    Parameters
    ----------
    file
        The authors' file of a CvT, CeiT, ViTAE, PVT, CSWin or T2T-ViT, or a Hugging Face CvT folder or file.
    model
        What the weights are for, such as cvt_13.
    out
        The folder to write; it must not exist, or be empty.
    num_classes
        Refuse a file with any other number of classes.
    """
    check_writable(out)  # before any work, and before torch is imported
    if not file.exists():
        raise WeftError(f"{file} does not exist; give a checkpoint file or a Hugging Face folder.")

    from weft.models.weights.convert import convert as convert_weights
    from weft.models.weights.folder import save_model

    converted = convert_weights(file, model=model, num_classes=num_classes)
    save_model(converted, out)
    print(f'Wrote {out}. Open it with: timm.create_model("local-dir:{out}", pretrained=True)')


@app.command
def recipes(name: str = "", /) -> None:
    """List the recipes, or print one.

    Parameters
    ----------
    name
        A recipe such as cvt-imagenet, or a YAML file. Without it, all recipes with one line each.
    """
    from weft.run.recipes import recipe_file, recipe_names

    if name:
        print(recipe_file(name).read_text(encoding="utf-8"), end="")
    else:
        print_columns([[name, line] for name, line in recipe_names()])


@app.command
def keys(filter: str = "", /) -> None:
    """List the settings of a training run: type, default, what each does. Any is an option: --optim.lr 3e-4.

    Parameters
    ----------
    filter
        Part of a key or of its explanation, such as lr. Without it, all keys.
    """
    from weft.config import describe_keys, known_keys

    rows = [row for row in describe_keys() if filter.lower() in " ".join(row).lower()]
    if not rows:
        raise WeftError(f"No setting matches {filter!r}." + did_you_mean(filter, list(known_keys())))
    print_columns(rows)


@app.command
def check(
    data: str,
    /,
    *,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quick: Annotated[bool, Flag] = False,
    task: str = "auto",
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Say what a data set is and what is wrong with it, and change nothing in it. Exit code 1 where there are errors.

    Parameters
    ----------
    data
        A folder of pictures, with masks or boxes or without, a CSV, TSV or COCO JSON file, shards (*.tar), NAME:ROOT of
        a known set, demo:fashion or demo:nuclei.
    out
        Also write a page with the pictures concerned, such as check.html.
    as_json
        Print one JSON object instead of a table.
    quick
        Headers and equal files only, at most about ten seconds.
    task
        classify, segment or detect, where the data can be for more than one; by default what the layout is for.
    keys
        Settings of the data, more simply written as --data.group "patient_(.*)_".
    """
    from weft.config import Config, override
    from weft.data.check.check import check as check_data
    from weft.data.sources.open import open_configured
    from weft.data.split import make_split
    from weft.report.check_page import print_report, write_page

    given = {"data.task": task, **settings_of(keys), "data.source": data}
    config = override(Config(), given).data
    check_out(out=str(out or ""))
    source = open_configured(config)
    split = make_split(source, config, 0) if config.val else None  # with a second source there are two sides
    with progress_of("pictures", quiet=as_json) as progress:
        report = check_data(source, split, quick=quick, config=config, progress=progress)
    if out is not None:
        write_page(report, source, out)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        print_report(report, Console())
    else:
        print("\n".join(report.lines()))
    if out is not None and not as_json:
        print(f"Wrote {out}.")
    sys.exit(1 if report.has("error") else 0)


def _print_models(infos: "list[ModelInfo]") -> None:
    header = ["model", "parameters", "MACs", "pixels", "top-1", "paper", "weights"]
    rows = [
        [
            info.name,
            f"{info.parameters / 1e6:.1f} M",
            f"{info.macs / 1e9:.2f} G",
            str(info.img_size),
            "" if info.top1 is None else f"{info.top1:.1f}",
            info.paper,
            info.hub or ("authors' files" if info.files else "none"),
        ]
        for info in infos
    ]
    print_columns([header, *rows], right=range(1, 5))
    places = sorted({info.files for info in infos if info.files})
    if places:
        print(f"\nAuthors' files, for `weft convert`: {', '.join(places)}")


def take_keys(arguments: list[str]) -> list[str]:
    """`--optim.lr 0.1` and `--optim.lr=0.1` as `--set=optim.lr=0.1`; a switch without a value is true."""
    taken, waiting = [], list(arguments)
    while waiting:
        word = waiting.pop(0)
        found = re.fullmatch(r"--([a-z]+\.[\w.-]+)(=.*)?", word, re.DOTALL)
        if not found:
            taken.append(word)
            continue
        name, value = found[1].replace("-", "_"), found[2]
        if value is None:
            value = "=" + (waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true")
        taken.append(f"--set={name}{value}")
    return taken


def main() -> None:
    """Entry point: bad input gets one line and exit code 2."""
    try:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `weft models | head` ends quietly
        app(take_keys(sys.argv[1:]), exit_on_error=False, print_error=False)
    except (WeftError, CycloptsError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # all processes of torchrun's have the same error; one says it
            print(f"weft: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("weft: interrupted; what was saved before is whole.", file=sys.stderr)
        sys.exit(130)


def _one_line(error: Exception) -> str:
    """What the system says of a file, without its number; and never more than a line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return " ".join(str(error).splitlines())


if __name__ == "__main__":
    main()
