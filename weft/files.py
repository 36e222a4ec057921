"""Files that are either whole or not there: written under a temporary name, forced to disk, renamed."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` in the same folder, then rename to `path`, file and folder forced to disk.

    Whatever happens on the way (a kill, a full disk), `path` is what it was before or what it should become.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as temporary_folder:
        temporary = Path(temporary_folder) / path.name
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # some writers keep others from reading
        _sync(temporary)
        os.replace(temporary, path)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
