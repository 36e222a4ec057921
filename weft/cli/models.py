"""The commands about models and their weights: `weft models` and `weft convert`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli.options import JsonFlag, print_columns, say, say_json
from weft.cli.outputs import making
from weft.errors import WeftError, check_writable, did_you_mean

if TYPE_CHECKING:
    from weft.catalog.catalog import ModelInfo


def models(filter: str = "", /, *, as_json: JsonFlag = False) -> None:
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
        say_json([asdict(info) for info in infos], indent=2)
    else:
        _print_models(infos)


def convert(
    file: Path, /, *, model: str, out: Path, num_classes: Annotated[int | None, Parameter(negative="")] = None
) -> None:
    """Turn a published checkpoint, or a plain state dict, into a model folder that timm opens.

    Parameters
    ----------
    file
        The authors' file of a CvT, CeiT, ViTAE, PVT, CSWin or T2T-ViT, a Hugging Face CvT folder or file, or what
        torch.save wrote of a model's own state_dict.
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
    with making(out):
        save_model(converted, out)
    say(f'Wrote {out}. Open it with: timm.create_model("local-dir:{out}", pretrained=True)')


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
            "come with Weft" if info.released else info.hub or ("authors' files" if info.files else "none"),
        ]
        for info in infos
    ]
    print_columns([header, *rows], right=range(1, 5))
    places = sorted({info.files for info in infos if info.files})
    if places:
        say("", f"Authors' files, for `weft convert`: {', '.join(places)}")
