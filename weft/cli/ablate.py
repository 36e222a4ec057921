"""The command that runs the papers' tables: `weft ablate`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from weft.cli.options import Flag, Keys, Quiet, check_length, complain, print_columns, say, settings_of, study_folder
from weft.cli.outputs import check_outside
from weft.errors import WeftError, check_positive, check_ratio
from weft.words import clean, shell

if TYPE_CHECKING:
    from weft.study.ablate.summary import Study
    from weft.study.ablate.tables import Table, TableRow

MINUTES = 30.0  # where nobody said how long


def ablate(
    table: str = "",
    data: str = "",
    /,
    *,
    minutes: float | None = None,
    epochs: int | None = None,
    model: str = "",
    img_size: int | None = None,
    fraction: float = 1.0,
    seeds: int | None = None,
    recipe: str = "",
    as_published: Annotated[bool, Flag] = False,
    plan: Annotated[bool, Flag] = False,
    init: str = "",
    jobs: int = 0,
    device: str = "auto",
    out: str = "",
    quiet: Quiet = False,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Run an ablation table of the papers, or your own, on your pictures: which differences are larger than noise?

    Without arguments the tables are listed; with a table and no data it is shown with the paper's figures. A study that
    was stopped or killed goes on when the command is given again: finished cells are never repeated.

    Parameters
    ----------
    table
        A name such as cvt-position, or a YAML file of the same form.
    data
        What `weft train` takes: a folder of pictures, demo:fashion, ...
    minutes
        Time for the whole table: epochs and, where there are few, pictures are chosen to fit, and seeds left out where
        cells take longer than it seemed. 30 by default.
    epochs
        Train every cell so long instead.
    model
        nano: the small stand-ins of the table; paper: the paper's size; or a model in the place of the table's. By
        default nano on a CPU and for small pictures.
    img_size
        Side of the pictures; by default chosen from the data.
    fraction
        Train on this part of the training pictures only.
    seeds
        How often each row is trained, by default 3 times, and once with --as-published. More can be asked for later.
    recipe
        A name of `weft recipes`, or a YAML file; by default quick for up to 30 epochs, else chosen from the data.
    as_published
        Train each row as the paper did: its recipe, epochs, batch and size. Says first what that costs on this machine.
    plan
        With --as-published: say what it costs, and train nothing.
    init
        A study of `weft ablate` whose rows give the rows of the same names their first weights: train on ImageNet with
        one table, then transfer with another. Without it, as the recipe says.
    jobs
        Cells at once; 0: one for each GPU, or as many as a CPU has cores for, up to four.
    device
        auto, cpu, cuda (all GPUs) or cuda:N.
    out
        The folder of the study; by default runs/ablate-TABLE.
    quiet
        Say nothing but the table.
    keys
        Any setting of `weft keys` for all cells, more simply written as --optim.lr 0.001.
    """
    from weft.study.ablate.tables import find_table

    if not table:
        print_columns(_list_tables(), right=[3])
        return
    chosen = find_table(table)
    if not data:
        _show(chosen, table)
        return
    seeds = (1 if as_published else 3) if seeds is None else seeds
    check_positive(seeds=seeds, jobs=jobs or 1, img_size=1 if img_size is None else img_size)
    check_ratio(fraction=fraction)
    check_length(epochs, minutes)
    _check_published(as_published, plan, epochs=epochs, minutes=minutes, recipe=recipe, img_size=img_size, model=model)

    from weft.run.train import name_settings
    from weft.study.ablate.plan import AblationRequest, Execution
    from weft.study.ablate.run import plan_ablation, run_ablation

    request = AblationRequest(
        data=data,
        model=model,
        minutes=0.0 if epochs or as_published else minutes or MINUTES,
        epochs=epochs or 0,
        img_size=img_size or 0,
        fraction=fraction,
        recipe=recipe,
        settings=name_settings(settings_of(keys)),
        as_published=as_published,
        init=init,
    )
    folder = study_folder(out, "ablate", chosen.name)
    check_outside(folder, [data])
    if plan:
        plan_ablation(chosen, request, Execution(folder, seeds, jobs, device, say))
        return
    with _watching(quiet) as (tell, watch):
        study = run_ablation(chosen, request, Execution(folder, seeds, jobs, device, tell), watch)
    _print_study(study, folder, quiet)


def _check_published(as_published: bool, plan: bool, **others: Any) -> None:
    """Raises for what makes no sense with --as-published, or without it."""
    given = [name.replace("_", "-") for name, value in others.items() if value and value != "paper"]
    if as_published and given:
        raise WeftError(f"--as-published takes --{given[0]} from the paper; leave one of them out.")
    if plan and not as_published:
        raise WeftError("--plan says what --as-published costs; give both.")


def _print_study(study: "Study", folder: Path, quiet: bool) -> None:
    """Prints the table; exit code 1 where cells failed."""
    from weft.study.ablate.report import left_out, short_header, short_row

    print_columns([short_header(study), *(short_row(line) for line in study.lines)], right=[1, 2, 3, 4])
    if not quiet:
        say(f"Wrote {folder / 'table.html'} and {folder / 'table.md'}.")
        if study.left_out:
            say(*left_out(study).strip().splitlines())
    failed = study.cells - study.done - study.left_out
    if failed:
        complain(
            f"weft: {failed} of {study.cells} cells failed; {folder / 'table.md'} says why."
            " The same command tries them again."
        )
        sys.exit(1)


def _list_tables() -> list[list[str]]:
    from weft.study.ablate.tables import FOLDER, read_table

    tables = [read_table(file) for file in sorted(FOLDER.glob("*.yaml"))]
    rows = [[table.name, table.source, table.title, str(len(table.rows))] for table in tables]
    return [["table", "paper", "what", "rows"], *rows]


def _show(table: "Table", given: str) -> None:
    """Prints a table with the paper's figures, and the costs of the same networks here."""
    from weft.study.ablate.costs import cost_in_paper
    from weft.study.ablate.report import COLUMN_NAMES, title
    from weft.study.statistics import DASH

    units = {"parameters": "M", "macs": "G", "throughput": "/s"}  # all else is in per cent
    columns, rows = [*table.columns, *table.sets], []
    for row in table.rows:
        printed = [f"{row.paper[name]:g} {units.get(name, '%')}" if name in row.paper else DASH for name in columns]
        cost = cost_in_paper(row, table.source)
        here = [f"{cost.parameters / 1e6:.2f} M", f"{cost.macs:.2f} G"] if cost else [DASH, DASH]
        rows.append([row.name, *printed, *here, *_network_cells(row)])
    header = [
        "row",
        *(f"paper: {COLUMN_NAMES.get(name, name)}" for name in columns),
        "here: parameters",
        "MACs",
        "model",
        "switches",
    ]
    say(title(table), "")
    print_columns([header, *rows], right=range(1, len(columns) + 3))
    for text in table.differs:
        say(f"- {text}")
    say("", f"Train it: {shell('weft', 'ablate', given, 'DATA', '--minutes', 30)}")
    if table.data:
        words = "weft", "ablate", given, f"{table.data[-1]}:ROOT", "--as-published"
        say(f"As the paper did: {shell(*words)}")


def _network_cells(row: "TableRow") -> list[str]:
    """Model and switches."""
    if row.full is None:
        return ["-", f"not here: {row.missing}"]
    switches = {**({"head": row.full.head} if row.full.head else {}), **row.full.switches}
    return [row.full.model, ", ".join(f"{name}={value}" for name, value in switches.items()) or "-"]


@contextmanager
def _watching(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[["Study", dict[str, str]], None]]]:
    """Functions to say a line and to show a study: a table that fills on a terminal, elsewhere a line for each cell."""
    if quiet:
        yield lambda text: None, lambda study, states: None
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        with Live(console=console, transient=True, refresh_per_second=2) as live:
            yield (
                lambda text: console.print(clean(text), markup=False, emoji=False),
                lambda study, states: live.update(_live_table(study, states)),
            )
    else:
        said: set[tuple[str, int]] = set()

        def tell(study: "Study", states: dict[str, str]) -> None:
            for line in study.lines:
                for seed, score in line.scores.items():
                    if (line.row.name, seed) not in said:
                        said.add((line.row.name, seed))
                        say(f"{len(said)} of {study.cells}  {line.name}, seed {seed}: {score:.2%}")

        yield say, tell


def _live_table(study: "Study", states: dict[str, str]) -> Any:
    """The results so far, narrow enough for any terminal; costs come with the whole table."""
    from rich.table import Table
    from rich.text import Text

    from weft.study.ablate.report import score, scored
    from weft.study.ablate.run import cells_of
    from weft.study.cells.cell import LEFT_OUT
    from weft.study.statistics import format_difference

    cells = cells_of(study.table, study.plan, study.seeds)
    shown = Table(box=None, pad_edge=False, caption=f"{study.done} of {study.cells} cells", caption_justify="left")
    for name in ("row", scored(study), "difference", "verdict", "now"):
        shown.add_column(name)
    for line in study.lines:
        keys = [cells[line.row.name, seed].key for seed in range(study.seeds)] if line.is_trained else []
        mine = [states.get(key, "waiting") for key in keys]
        running = [state for state in mine if state not in ("done", "waiting", LEFT_OUT)]
        now = running[0] if running else "waiting" if "waiting" in mine else ""
        texts = (line.row.name, score(line), format_difference(line.difference), line.verdict, now)
        shown.add_row(*(Text(clean(text)) for text in texts))
    return shown
