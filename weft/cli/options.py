"""Shared by the commands: options of one kind, a bar that shows how far they are, printing and writing."""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

from cyclopts import Parameter

from weft.errors import WeftError, check_model_folder, check_positive, check_ratio
from weft.words import clean

Keys = Annotated[list[str], Parameter(name="--set", negative="")]  # what `take_keys` makes of --section.key VALUE
Names = Annotated[list[str], Parameter(consume_multiple=True, negative="")]
Flag = Parameter(negative="")
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")]
Force = Annotated[bool, Flag]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="")]
OutFile = Parameter(allow_leading_hyphen=True)  # "-" is standard output


class Tell(Protocol):
    """How many are done, of how many; work of several parts says which of them it was."""

    def __call__(self, done: int, of: int, part: str = "") -> None: ...


@contextmanager
def progress_of(what: str, quiet: bool) -> Iterator[Tell | None]:
    """A bar on a terminal; elsewhere a line for every part of the work, and for every tenth of very many."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = [*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()]
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, of, part="": bar.update(
                task, completed=done, total=of, description=escape(clean(part or what))
            )
    else:
        said, before = 0, ""

        def say(done: int, of: int, part: str = "") -> None:
            nonlocal said, before
            if part not in ("", before):
                before = part
                complain(part)
            if of > 10_000 and 10 * done // of > said:
                said = 10 * done // of
                complain(f"{done} of {of} {what}")

        yield say


def check_run(run: str | os.PathLike[str]) -> None:
    """Raises where there is no run or model folder, before anything is imported to open it; the hub is asked later."""
    if not os.fspath(run).startswith("hub:"):
        check_model_folder(Path(run))


def settings_of(keys: list[str]) -> dict[str, Any]:
    """The settings in `Keys`."""
    return dict(key.split("=", 1) for key in keys)


def check_length(epochs: int | None, minutes: float | None) -> None:
    check_positive(epochs=1 if epochs is None else epochs)
    check_ratio(minutes=1 if minutes is None else minutes)
    if epochs and minutes:
        raise WeftError("--epochs and --minutes both set the length; give only one of them.")


def study_folder(out: str, kind: str, *names: str) -> Path:
    """Where a study lives: at `out`, or in runs/KIND-NAMES."""
    return Path(out or "-".join([f"runs/{kind}", *(Path(name.replace(":", "-")).stem for name in names)]))


def end_as_interrupted(interrupted: bool) -> None:
    """After a Ctrl-C, with the exit code that shells expect. torchrun would take it for a failure, and start again."""
    if interrupted and "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(130)


def say(*lines: str) -> None:
    """Lines at once, wherever the output goes; nothing in them moves the cursor, whatever names they have from others.

    All that commands print goes through here, or is JSON.
    """
    print("\n".join(map(clean, lines)), flush=True)


def complain(line: str) -> None:
    """A line on standard error."""
    print(clean(line), file=sys.stderr, flush=True)


def say_json(content: Any, indent: int | None = None) -> None:
    from weft.documents import to_json

    print(to_json(content, indent))


def print_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    from weft.report.text import columns

    say(*columns(rows, right))
