"""The command that looks into a model: `weft explain`."""

import os
import sys
from pathlib import Path
from typing import Literal

from weft.cli.options import Names, check_run, progress_of, say
from weft.cli.outputs import check_outside, making
from weft.cli.results import trained_on
from weft.errors import WeftError, check_writable


def explain(
    run: str,
    /,
    *pictures: str,
    against: str = "",
    init: Literal["random", "pretrained"] = "random",
    out: Path | None = None,
    layer: Names = [],  # noqa: B006  cyclopts never changes it
    masks: str = "",
    of: str = "",
    device: str = "auto",
) -> None:
    """Show what a model looks at and how: Grad-CAM, attention, tokens, receptive fields, and the numbers behind them.

    Parameters
    ----------
    run
        A run or model folder; or the name of a model of `weft models` or of timm's.
    pictures
        Files, folders with all below them, patterns such as "*.jpg", or a table (CSV) of paths; the first are drawn,
        all are measured.
    against
        Another run, or the name of a model, to show side by side.
    init
        The weights of models given by name: random, which shows what the architecture does by itself, or pretrained,
        the published ones, with their classes and their size of pictures.
    out
        The folder to make, with a page, figures (PNG, SVG) and explain.json; by default explain-RUN here.
    layer
        Layers for Grad-CAM, by their names; by default the last that the answer depends on.
    masks
        A folder with a mask for each picture, of the same name: measures attention on what is not 0.
    of
        The class whose Grad-CAM is shown; by default of each picture the likeliest.
    device
        auto, cpu, cuda or cuda:N.
    """
    if not pictures:
        raise WeftError("No pictures given; name files, folders or patterns.")
    out = out or Path(f"explain-{Path(run).resolve().name}")
    check_writable(out)
    trained = [path for subject in (run, against) if subject for path in trained_on(Path(subject))]
    check_outside(out, [*pictures, masks, *trained])

    for subject in filter(None, (run, against)):
        if Path(subject).exists():  # else the name of a model
            check_run(subject)
        elif os.sep in subject:
            raise WeftError(f"{subject} does not exist; give a run or model folder, or the name of a model.")

    from weft.explain.compare import explain_subjects
    from weft.run.subjects import open_subjects

    subjects = open_subjects(run, against, device, pretrained=init == "pretrained")
    with making(out), progress_of("steps", quiet=False) as progress:
        explained = explain_subjects(subjects, list(pictures), layers=layer, masks=masks, of=of, progress=progress)
        page = explained.write(out, progress)
    for explanation in explained.explanations:
        say(*explanation.lines())
    say(f"Wrote {page}, figures and explain.json.")
    if any(explanation.unreadable for explanation in explained.explanations):
        sys.exit(1)
