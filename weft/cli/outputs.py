"""Files that commands write where somebody said: never over an input, among the data, or over what others wrote."""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import WeftError
from weft.words import clean

# How files begin that Weft writes; whatever else lies there is somebody's.
PAGE = rb'<!doctype html>.*<meta name="generator" content="Weft check">'
TABLE = rb"name,[^\n]*\berror\r?\n"
PREDICTIONS = rb'\[\s*(\]\s*$|\{\s*"(name|image_id)": [^\n]*\n\s*"(labels|shares|file_name)": )'
MEASUREMENTS = rb'\{\s*"date": "[\d-]*",\s*"machine": \{'
BEGINNING = 1 << 16  # bytes of a file that are looked at to recognise it


@dataclass(frozen=True)
class OutputFile:
    """A file that an option names."""

    option: str
    name: str  # as it was given; "-" is standard output, "" nothing
    ours: bytes  # a regular expression: how such a file of Weft's begins

    @property
    def path(self) -> Path | None:
        """Where it will lie: what a link leads to, not the link."""
        return Path(self.name).resolve() if self.name not in ("", "-") else None

    def write(self, text: str) -> None:
        from weft.files import write_text

        if self.path is not None:
            write_text(self.path, text)
        elif self.name == "-":
            print(_for_terminal(text) if sys.stdout.isatty() else text, end="")  # programs get it as it is


def check_outputs(*outputs: OutputFile, force: bool = False, data: Sequence[str] = (), run: Path | None = None) -> None:
    """Raises for an option whose file cannot be written or must not be, before the work and not after it.

    Args:
        outputs: what the command would write.
        force: replace what Weft did not write.
        data: what it reads: no file of it is replaced, and nothing is written into a folder of it, forced or not.
        run: the folder of the model, likewise, but that new files may be added to it.
    """
    for one, other in itertools.combinations([output for output in outputs if output.path is not None], 2):
        if one.path == other.path:
            raise WeftError(f"--{one.option} and --{other.option} name the same file; give each its own.")
    for output in outputs:
        if (path := output.path) is None:
            continue
        shown = f"--{output.option} {output.name}"
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise WeftError(f"{shown} cannot be written; name a file in a folder that exists and is yours.")
        if path.exists() and not path.is_file():
            raise WeftError(f"{shown} is no file, but a device or a pipe; - writes to standard output.")
        check_outside(path, data, shown)
        if path.exists() and not _begins(path, output.ours):
            if run is not None and path.is_relative_to(run.resolve()):
                raise WeftError(f"{shown} is part of the run; choose another name.")
            if not force:
                raise WeftError(f"{shown} exists, and Weft did not write it; choose another name, or add --force.")


def check_outside(place: Path, data: Sequence[str], shown: str = "") -> None:
    """Raises where a file or folder to be made is one of the data, or lies inside a folder of them."""
    for source in (path for given in data for path in _paths(given)):
        if place.resolve() == source or (source.is_dir() and place.resolve().is_relative_to(source)):
            raise WeftError(
                f"{shown or f'--out {place}'} lies inside the data, which Weft never changes; choose a place outside."
            )


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Makes a folder before the work that fills it, so that one which cannot be made is said at once."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # where it is still empty


def refuse_inputs(outputs: Iterable[OutputFile], files: Iterable[object]) -> None:
    """Raises where a file to be replaced turns out to be one of the pictures, however they were found."""
    for output in outputs:
        if output.path is None or not output.path.exists():
            continue
        found = output.path.stat()
        for file in files:
            if isinstance(file, Path) and file.exists() and os.path.samestat(file.stat(), found):
                raise WeftError(f"--{output.option} {output.name} is one of the pictures; choose another name.")


def _paths(given: str) -> list[Path]:
    """Places that a path, a pattern or NAME:ROOT leads to, as far as they are there."""
    import glob

    place = Path(given).expanduser()
    if not given or place.exists():
        return [place.resolve()] if given else []
    root = Path(given.partition(":")[2]).expanduser()
    if ":" in given and root.exists():
        return [root.resolve()]
    return [Path(found).resolve() for found in glob.glob(given, recursive=True)]


def _begins(path: Path, ours: bytes) -> bool:
    """Whether a file is empty, or begins as those that Weft writes."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    return not beginning or re.match(ours, beginning, re.DOTALL) is not None


def _for_terminal(text: str) -> str:
    return "".join(clean(line) + "\n" for line in text.splitlines())
