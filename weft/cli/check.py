"""The command that looks at data: `weft check`."""

import sys
from typing import Annotated

from weft.cli.options import Flag, Force, JsonFlag, Keys, progress_of, say, say_json, settings_of
from weft.cli.outputs import PAGE, OutputFile, check_outputs, refuse_inputs


def check(
    data: str,
    /,
    *,
    out: str = "",
    force: Force = False,
    as_json: JsonFlag = False,
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
    force
        Replace such a file even where Weft did not write it. Pictures and runs are never replaced.
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
    page = OutputFile("out", out, PAGE)
    check_outputs(page, force=force, data=[data, config.val, config.masks, config.classes])
    source = open_configured(config)
    if force and source.blocks is None:  # else these are tar files, named in `data`
        refuse_inputs([page], (source.open(i) for i in range(len(source))))
    split = make_split(source, config, 0) if config.val else None  # with a second source there are two sides
    with progress_of("pictures", quiet=as_json) as progress:
        report = check_data(source, split, quick=quick, config=config, progress=progress)
    if page.path is not None:
        write_page(report, source, page.path)
    if as_json:
        say_json(report.to_dict(), indent=2)
    elif sys.stdout.isatty():
        from rich.console import Console

        print_report(report, Console())
    else:
        say(*report.lines())
    if out and not as_json:
        say(f"Wrote {out}.")
    sys.exit(1 if report.has("error") else 0)
