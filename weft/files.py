"""Files that are either whole or not there: written under a temporary name, forced to disk, renamed."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` in the same folder, then rename to `path`, file and folder forced to disk.

    Whatever happens on the way (a kill, a full disk), `path` is what it was before or what it should become.
    """
    with errors_name(path):
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as temporary_folder:
            temporary = Path(temporary_folder) / path.name
            write(temporary)
            temporary.chmod(0o666 & ~_umask())  # some writers keep others from reading
            _sync(temporary)
            os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _sync(path.parent)


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Gives the system's errors a name that somebody knows, where they have a temporary one or none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """A safetensors file. A full disk is an OSError as for any other file."""
    import safetensors.torch

    try:
        write_atomic(path, lambda temporary: safetensors.torch.save_file(dict(tensors), temporary, metadata))
    except safetensors.SafetensorError as error:
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(errno.EIO, str(error), str(path)) from error


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Makes a folder, which may be there; where what fills it fails, what was made is gone, and nothing else."""
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    before = {*folder.iterdir()}
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in {*folder.iterdir()} - before:
                path.unlink()
            if not existed:
                folder.rmdir()
        raise


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a training, finished or not."""
    return (folder / "config.yaml").is_file() and ((folder / "state").is_dir() or (folder / "split.json").is_file())


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
