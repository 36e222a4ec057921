"""The command `weft`. The only module that knows all the others, and it imports them only when a command runs."""

import json
import signal
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from weft import __version__
from weft.errors import WeftError, check_writable, did_you_mean

if TYPE_CHECKING:
    from weft.analysis.catalog import ModelInfo

app = App(name="weft", help="Convolutions woven into vision transformers.", version=__version__)


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
    from weft.analysis.catalog import catalog

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

    from weft.models.convert import convert as convert_weights
    from weft.models.folder import save_model

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
    from weft.engine.recipes import recipe_file, recipe_names

    if name:
        print(recipe_file(name).read_text(encoding="utf-8"), end="")
    else:
        _print_columns([[name, line] for name, line in recipe_names()])


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
    _print_columns(rows)


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
    _print_columns([header, *rows], right=range(1, 5))
    places = sorted({info.files for info in infos if info.files})
    if places:
        print(f"\nAuthors' files, for `weft convert`: {', '.join(places)}")


def _print_columns(rows: list[list[str]], right: Collection[int] = ()) -> None:
    """Aligned text; the columns in `right` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def main() -> None:
    """Entry point: bad input gets one line and exit code 2."""
    try:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `weft models | head` ends quietly
        app(exit_on_error=False, print_error=False)
    except (WeftError, CycloptsError, OSError) as error:
        print(f"weft: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
