"""The commands that take a trained model away: `weft export` and `weft push`."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from weft.cli.options import Flag, Keys, check_run, complain, progress_of, say, settings_of
from weft.cli.outputs import check_outside
from weft.cli.results import trained_on
from weft.errors import WeftError
from weft.export.folder import check_free


def export(
    run: Path,
    /,
    *,
    to: Literal["onnx", "torch", "safetensors"] = "onnx",
    out: Path | None = None,
    int8: Annotated[bool, Flag] = False,
    fixed: Annotated[bool, Flag] = False,
    size: str = "",
    batch: Annotated[int, Parameter(negative="")] = 1,
    data: str = "",
    pictures: Annotated[int, Parameter(negative="")] = 200,
    limit: Annotated[float | None, Parameter(negative="")] = None,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Write a model as a file that takes pictures as they are, and compare its answers with the run's.

    Parameters
    ----------
    run
        A run or model folder.
    to
        onnx; torch, a package of torch.export (.pt2); or safetensors, weights and config.json for Weft and timm.
    out
        The folder to make, with the file, model.json, agreement.json and agreement.html; by default export-RUN here.
        An earlier export of the same weights that lies there is replaced, if it was made with the same options.
    int8
        ONNX in eight bits, fitted to pictures of the run: smaller, a little less right; the last lines tell its speed.
    fixed
        For pictures of one size and so many at once, which some runtimes want; else of any size, any number.
    size
        With --fixed: height and width, such as 480x640; by default those that most pictures of the run have.
    batch
        With --fixed: how many pictures at once.
    data
        Pictures to compare with, as for `weft eval`; by default those that the run reports on.
    pictures
        How many of them, at most.
    limit
        Points of the metric (per cent) that may be lost; by default 0.5, with --int8 1. A file that loses more, or
        answers otherwise, is not kept.
    keys
        Segmentation, detection: settings of how the model is used, such as --test.score 0.3.
    """
    if not fixed and (size or batch != 1):
        raise WeftError("--size and --batch go with --fixed; without it every size and number is taken.")
    chosen = _size(size) if size else None
    options: dict[str, Any] = dict(to=to, int8=int8, fixed=fixed, size=chosen, batch=batch, settings=settings_of(keys))
    folder = out or Path(f"export-{run.resolve().name}")
    check_free(folder, run, options)
    check_outside(folder, [data, *trained_on(run)])
    check_run(run)
    if data:
        from weft.run.data import check_there

        check_there(data)

    from weft.export.export import Disagreement
    from weft.export.export import export as export_run

    with progress_of("pictures compared", quiet=False) as progress:
        try:
            made = export_run(run, folder, data=data, pictures=pictures, limit=limit, progress=progress, **options)
        except Disagreement as error:
            for line in error.agreement.lines():
                complain(line)
            raise
    say(
        *made.agreement.lines(),
        "",
        f"Wrote {made.file}, which agrees; {made.folder / 'agreement.html'} shows how well.",
    )


def push(
    run: Path,
    repository: str,
    /,
    *,
    private: Annotated[bool, Flag] = False,
    replace: Annotated[bool, Flag] = False,
) -> None:
    """Upload a trained model to the Hugging Face hub, with a card that says what it does and how well.

    Parameters
    ----------
    run
        A run or model folder.
    repository
        owner/name; it is made if need be. `hf auth login` says who you are.
    private
        Make one that only its owner sees.
    replace
        Write over a model that lies there.
    """
    from weft.export.hub import push as push_run

    address = push_run(run, repository, private=private, replace=replace)
    say(f"Wrote {address}; weft.load({'hub:' + repository!r}) opens it.")


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if not found:
        raise WeftError(f"--size {text} is no height and width such as 480x640.")
    return int(found[1]), int(found[2])
