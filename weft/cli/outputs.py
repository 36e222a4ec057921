"""Files that commands write where somebody said: never over an input, among the data, or over what others wrote."""

import csv
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import WeftError
from weft.files import is_run
from weft.words import clean

BEGINNING = 1 << 20  # bytes of a file that are looked at to recognise it

# Parts of the JSON that Weft writes
_TEXT = rb'"(?:[^"\\\n]|\\.)*"'
_LABELS = rb'  \{\n    "name": %b,\n    "labels": \[(?:\s+%b,?)*\s*\],\n    "probabilities": \['
_SHARES = rb' \{\n  "name": %b,\n  "shares": \{(?:\s+%b: [\de.-]+,?)*\s*\},\n  "error": '
_OBJECT = rb' \{\n  "image_id": \d+,\n  "file_name": %b,\n  "category_id": \d+,\n  "category_name": %b,\n  "score": '
_ANSWERS = b"|".join(form % (_TEXT, _TEXT) for form in (_LABELS, _SHARES, _OBJECT))

_OBJECTS_HEADER = ["class", "score", "left", "top", "width", "height"]
_SHARE = re.compile(r"[01]|0\.\d+|\d(\.\d+)?e-\d+")


def is_table(beginning: bytes) -> bool:
    """Whether labels, shares or objects begin so, as `weft predict` writes them into a table."""
    whole = beginning if len(beginning) < BEGINNING else beginning[: beginning.rfind(b"\n")]  # no row by halves
    try:
        text = io.StringIO(whole.decode("utf-8", "surrogateescape"), newline="")
        header, *rows = csv.reader(text, strict=True)
    except (csv.Error, ValueError):
        return False
    if not beginning.startswith(b"name,") or b",error\r\n" not in beginning or header[-1] != "error":
        return False
    top = max(1, len(header) // 2 - 1)
    pairs = [f"{column}_{i + 1}" for i in range(top) for column in ("label", "probability")]
    return header[1:-1] in (pairs, _OBJECTS_HEADER) or (bool(rows) and all(_are_shares(row, header) for row in rows))


def _are_shares(row: list[str], header: list[str]) -> bool:
    """Whether a row has a part of the area for each class of the header, or says why it has none."""
    if len(row) != len(header):
        return False
    if row[-1]:
        return not any(row[1:-1]) and re.search("[A-Za-z]{2}", row[-1]) is not None
    return all(map(_SHARE.fullmatch, row[1:-1])) and abs(sum(map(float, row[1:-1])) - 1) < 1e-3


# How files begin that Weft writes; whatever else lies there is somebody's.
PAGE = re.compile(rb'<!doctype html>.*<meta name="generator" content="Weft check">', re.DOTALL).match
TABLE = is_table
PREDICTIONS = re.compile(rb"\[(?:\]\n\Z|\n(?:%b))" % _ANSWERS).match
MEASUREMENTS = re.compile(rb'\{\s*"date": "[\d-]*",\s*"machine": \{').match


@dataclass(frozen=True)
class OutputFile:
    """A file that an option names."""

    option: str
    name: str  # as it was given; "-" is standard output, "" nothing
    ours: Callable[[bytes], object]  # tells by its beginning whether such a file is Weft's

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
        force: replace what Weft did not write, but for pictures and what lies in a run.
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
            if _is_in_run(path, run):
                raise WeftError(f"{shown} is part of the run; choose another name.")
            if _is_picture(path):
                raise WeftError(f"{shown} is a picture, which Weft never replaces; choose another name.")
            if not force:
                raise WeftError(f"{shown} exists, and Weft did not write it; choose another name, or add --force.")


def check_outside(place: Path, data: Sequence[str], shown: str = "") -> None:
    """Raises where a file or folder to be made is one of the data, or lies inside a folder of them."""
    made = place.resolve()
    for source in (path for given in data for path in _paths(given)):
        if made == source or (source.is_dir() and made.is_relative_to(source)) or _is_among_pictures(made, source):
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


def _is_among_pictures(made: Path, source: Path) -> bool:
    """Whether a picture that was named lies in the same folder, with others; but not where somebody works."""
    if made.parent != source.parent or made.parent == Path.cwd():
        return False
    from weft.data.sources.source import PICTURE_ENDINGS, ending

    with os.scandir(made.parent) as entries:
        others = (ending(entry.name) in PICTURE_ENDINGS for entry in entries if entry.name != source.name)
        return ending(source.name) in PICTURE_ENDINGS and any(others)


def _is_in_run(path: Path, run: Path | None) -> bool:
    """Whether a file lies in the folder of this model, or of any run."""
    return (run is not None and path.is_relative_to(run.resolve())) or any(map(is_run, path.parents))


def _is_picture(path: Path) -> bool:
    """Whether a file is a picture, by its content or by its name."""
    from weft.data.read import BadPicture, UnknownFormat, header
    from weft.data.sources.source import PICTURE_ENDINGS, ending

    try:
        header(path)
    except UnknownFormat:
        return ending(path.name) in PICTURE_ENDINGS
    except BadPicture:  # a damaged one
        return True
    return True


def _begins(path: Path, ours: Callable[[bytes], object]) -> bool:
    """Whether a file is empty, or begins as those that Weft writes."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    return not beginning or bool(ours(beginning))


def _for_terminal(text: str) -> str:
    return "".join(clean(line) + "\n" for line in text.splitlines())
