"""Pictures that a run decodes once and keeps, as `data.keep` says."""

import os
import time
from typing import Any, NamedTuple

import numpy as np

from weft.data.augment.kept import kept_size
from weft.data.early import EarlyPixels
from weft.data.keep import KeptPictures, KeptValidation, in_memory, keep_pictures, keep_validation
from weft.data.preprocessing import Preprocessing
from weft.data.sources.source import Source, fingerprint
from weft.engine.device import is_out_of_memory
from weft.engine.training_run import TrainingRun
from weft.errors import WeftError
from weft.words import many


def keep(run: TrainingRun, early: EarlyPixels | None = None) -> None:
    """Decodes the pictures of a run, in parallel, and keeps them where its settings say; `early` has some already."""
    how = run.config.data.keep
    if how not in ("device", "memory"):
        return
    began = time.monotonic()
    try:
        taken = _on_device(run, early) if how == "device" else _in_memory(run, early)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        raise WeftError(
            f"The pictures do not fit where data.keep={how} puts them; choose --data.keep memory or no. A run that has"
            " begun goes on with --allow-changes, and draws its augmentation in another way from there."
        ) from None
    device = "GPU" if run.world.device.type == "cuda" else "CPU"
    where = "in memory, decoded" if how == "memory" else f"on the {device}, as training needs them"
    where += ", and in memory" if how == "device" and run.source.kind.dense else ""
    seconds = time.monotonic() - began
    pictures = many(len(run.split.train) + len(run.split.val), "picture")
    run.screen.say(f"{pictures} kept {where} (data.keep {how}): {taken / 1e6:,.0f} MB, in {seconds:.1f} s")


def _on_device(run: TrainingRun, early: EarlyPixels | None) -> int:
    """Bytes that training and validation pictures take there."""
    assert run.task.kept is not None
    key = _what_is_kept(run)
    if key not in _last:
        _last.clear()
        _last[key] = _decode_pairs(run) if run.source.kind.dense else _decode(run, early)
    run.source, run.kept, run.kept_validation = _last[key]
    if not _remembers:
        _last.clear()
    run.task.kept.keep(run.kept, np.asarray(run.source.labels))
    return len(run.kept.pixels) + (run.kept_validation.pictures.numel() if run.kept_validation else 0)


def _decode(run: TrainingRun, early: EarlyPixels | None) -> "OnDevice":
    source, world, preprocessing = run.source, run.world, run.preprocessing
    assert run.task.kept is not None
    one = 3 * preprocessing.size[0] * preprocessing.size[1]
    how: dict[str, Any] = dict(workers=_processes(run), progress=run.screen.progress("decoding"))
    train, mine = np.sort(run.split.train), run.split.val[world.rank :: world.size]
    ready = of_use(early, preprocessing)
    size = list(ready.shape[:2]) if ready else []
    as_it_is = ready if size and kept_size(run.config.augment.crop, size, preprocessing.size) == size else None
    as_seen = ready if size and preprocessing.leaves(size) else None
    if early is not None and as_it_is is as_seen is None:
        early.close()  # its processes would only take time from those that decode what is wanted
    kept = keep_pictures(source, train, run.task.kept.decode, world.device, one=one, early=as_it_is, **how)
    validation = keep_validation(source, mine, preprocessing, world.device, early=as_seen, **how)
    run.screen.close()
    return OnDevice(source, kept, validation)


def _decode_pairs(run: TrainingRun) -> "OnDevice":
    """Training pictures go to the device; readers draw by masks and objects, and validate, from the host's memory."""
    assert run.task.kept is not None
    _in_memory(run)
    train, decode = np.sort(run.split.train), run.task.kept.decode
    kept = keep_pictures(run.source, train, decode, run.world.device, one=2**20, workers=_processes(run))
    return OnDevice(run.source, kept, None)


def of_use(early: EarlyPixels | None, preprocessing: Preprocessing) -> EarlyPixels | None:
    """The same, where pictures of this preprocessing have as many channels and bits."""
    alike = early is not None and (early.shape[2], 8) == (preprocessing.channels, preprocessing.depth)
    return early if alike else None


# A study trains on the same pictures again and again ----------------------------------------------------------------


class OnDevice(NamedTuple):
    source: Source  # of which some may lie in memory
    kept: KeptPictures
    validation: KeptValidation | None  # else from the source


_last: dict[tuple[object, ...], OnDevice] = {}  # one entry at most
_remembers = False


def remember_kept() -> None:
    """From now on this process keeps the pictures of its last run for the next one."""
    global _remembers
    _remembers = True


def _what_is_kept(run: TrainingRun) -> tuple[object, ...]:
    augment, split = run.config.augment, run.split
    parts = (np.sort(split.train).tobytes(), split.val.tobytes(), run.world.rank, run.world.size)
    read = run.config.data.ignore, run.config.data.classes, run.config.data.masks  # what values of masks mean
    how = augment.crop, augment.interpolation, run.preprocessing, run.world.device, repr(read)
    return fingerprint(run.source), *how, *parts


def _in_memory(run: TrainingRun, early: EarlyPixels | None = None) -> int:
    """Bytes that all pictures of the run take; readers find out which of them cannot be read."""
    chosen, preprocessing = np.concatenate([run.split.train, run.split.val]), run.preprocessing
    how: dict[str, Any] = dict(one=2**20, workers=_processes(run), progress=run.screen.progress("decoding"))
    early = of_use(early, preprocessing)
    run.source = in_memory(run.source, chosen, preprocessing.channels, preprocessing.max_pixels, early=early, **how)
    run.screen.close()
    return sum(pixels.nbytes for pixels in run.source.reader.kept.values())  # pyright: ignore


def _processes(run: TrainingRun) -> int:
    """Processes that decode: one for each core that this process has, none where nobody may read beside it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, cores // local) if run.config.data.workers else 0
