"""Files that are either whole or not there: written under a temporary name, forced to disk, renamed."""

import errno
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` in the same folder, then rename to `path`, file and folder forced to disk.

    Whatever happens on the way (a kill, a full disk), `path` is what it was before or what it should become.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as temporary_folder:
            temporary = Path(temporary_folder) / path.name
            write(temporary)
            temporary.chmod(0o666 & ~_umask())  # some writers keep others from reading
            _sync(temporary)
            os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _sync(path.parent)
    except OSError as error:  # with a name that somebody knows, not the temporary one
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """A safetensors file. A full disk is an OSError as for any other file."""
    import safetensors.torch

    try:
        write_atomic(path, lambda temporary: safetensors.torch.save_file(dict(tensors), temporary, metadata))
    except safetensors.SafetensorError as error:
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


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
