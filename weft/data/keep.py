"""Pictures that are decoded once and kept: on the device that trains, as bytes, or on the host, for the readers.

    device    `KeptPictures`: whole batches are cut, flipped and altered where they lie (`weft.data.augment.kept`)
    memory    `in_memory`: a source whose pictures and targets lie in memory; readers do with them what they always do

Which of them a run has is one of its settings, `data.keep`, because each draws its augmentation in its own way.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from weft.data.augment.pairs import align
from weft.data.early import EarlyPixels
from weft.data.loader import FEW, Batch, read_ahead
from weft.data.memory import room_on_host
from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture, OpenedPicture
from weft.data.sources.source import Source
from weft.errors import WeftError

CHUNK_BYTES = 4 * 2**20  # of pixels that a process decodes before it hands them over
LARGEST_CHUNK = 512  # pictures
SENT_BYTES = 2**28  # of pixels that go to the device at once
SHARE_OF_GPU = 0.3  # of the memory that is free: the rest is the model's, and others'

Progress = Callable[[int, int], object]  # how many are done, of how many


class Kept(NamedTuple):
    """A picture that was decoded, and what belongs to it where that is no label."""

    pixels: np.ndarray
    target: Any = None


class ChunkOfKept(NamedTuple):
    found: list[Kept | None]  # None: cannot be read
    bad: list[tuple[int, str]]


class _Decoder(Dataset[ChunkOfKept]):
    """Positions in, what `decode` makes of them out. Lives in the workers."""

    def __init__(self, decode: Callable[[int], Kept]) -> None:
        self.decode = decode

    def __getitem__(self, chunk: list[int]) -> ChunkOfKept:
        found, bad = [], []
        for index in chunk:
            try:
                found.append(self.decode(index))
            except (BadPicture, OSError) as why:
                found.append(None)
                bad.append((index, str(why)))
            except Exception as error:
                raise RuntimeError(f"While decoding picture {index}: {type(error).__name__}: {error}") from error
        return ChunkOfKept(found, bad)


def decode_all(
    decode: Callable[[int], Kept],
    indices: np.ndarray,
    *,
    one: int,
    workers: int,
    bad: list[tuple[int, str]],
    progress: Progress | None = None,
) -> Iterator[tuple[int, Kept]]:
    """The pictures at `indices`, of about `one` byte each, in order; `bad` gets those that cannot be read."""
    size = min(LARGEST_CHUNK, max(1, CHUNK_BYTES // max(1, one)))
    chunks = [indices[i : i + size].tolist() for i in range(0, len(indices), size)]
    workers = min(workers, len(chunks)) if len(indices) > FEW else 0
    done = 0
    for chunk, answer in zip(chunks, read_ahead(_Decoder(decode), chunks, workers=workers), strict=True):
        bad += answer.bad
        yield from ((index, kept) for index, kept in zip(chunk, answer.found, strict=True) if kept is not None)
        done += len(chunk)
        if progress:
            progress(done, len(indices))


# On the device that trains ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptPictures:
    """Pictures of a source one behind the other in memory; columns are over all N positions of the source."""

    pixels: Tensor  # (bytes,) uint8, each picture as (C, h, w)
    starts: Tensor  # (N,) int64
    sizes: Tensor  # (N, 2) int64, height and width
    shapes: np.ndarray  # (N, 2): the same on the host
    channels: int
    stand_ins: np.ndarray  # (N,): the picture itself or, for one that cannot be read, the next that can
    bad: list[tuple[int, str]]

    @cached_property
    def tallest(self) -> int:
        """The largest height."""
        return int(self.shapes[:, 0].max())


def keep_pictures(
    source: Source,
    indices: np.ndarray,
    decode: Callable[..., Tensor],
    device: torch.device,
    *,
    one: int,
    workers: int,
    progress: Progress | None = None,
    early: EarlyPixels | None = None,
) -> KeptPictures:
    """Decodes the pictures at `indices` and keeps them on the device.

    `decode` gives (C, h, w) uint8 of a picture or, where targets are dense, of a picture and its target; `early` has
    what it would give of some pictures.
    """
    shapes, starts = np.zeros((len(source), 2), np.int64), np.zeros(len(source), np.int64)
    parts, waiting = [torch.empty(0, dtype=torch.uint8, device=device)], []
    bad: list[tuple[int, str]] = []
    channels = 1
    ready, rest = split_ready(indices, early)
    if early is not None and len(ready):
        height, width, channels = early.shape
        starts[ready], shapes[ready] = np.arange(len(ready)) * math.prod(early.shape), (height, width)
        some = max(1, SENT_BYTES // math.prod(early.shape))
        for i in range(0, len(ready), some):
            parts.append(torch.from_numpy(channels_first(early, ready[i : i + some]).reshape(-1)).to(device))
    end = sent = sum(map(len, parts))
    how: dict[str, Any] = dict(one=one, workers=workers, bad=bad, progress=progress)
    for index, kept in decode_all(_DecodePicture(source, decode), rest, **how):
        channels = len(kept.pixels)
        starts[index], shapes[index] = end, kept.pixels.shape[1:]
        waiting.append(kept.pixels.reshape(-1))
        end += kept.pixels.size
        if end - sent >= SENT_BYTES:  # the host need not have room for all
            parts.append(torch.from_numpy(np.concatenate(waiting)).to(device))
            sent, waiting = end, []
    if waiting:
        parts.append(torch.from_numpy(np.concatenate(waiting)).to(device))
    pixels = torch.cat(parts)
    stand_ins = _stand_ins(len(source), indices, {index for index, _ in bad})
    columns = torch.from_numpy(starts).to(device), torch.from_numpy(shapes).to(device)
    return KeptPictures(pixels, *columns, shapes, channels, stand_ins, bad)


def split_ready(indices: np.ndarray, early: EarlyPixels | None) -> tuple[np.ndarray, np.ndarray]:
    """Those of `indices` whose pixels are there, once nobody decodes them any more, and the rest."""
    if early is None:
        return indices[:0], indices
    early.finish()
    there = early.done[indices]
    return indices[there], indices[~there]


def channels_first(early: EarlyPixels, indices: np.ndarray) -> np.ndarray:
    """(n, C, h, w) uint8, a copy."""
    return np.ascontiguousarray(early.pixels[indices].transpose(0, 3, 1, 2))


@dataclass(frozen=True)
class _DecodePicture:
    source: Source
    decode: Callable[..., Tensor]

    def __call__(self, index: int) -> Kept:
        targets = (self.source.target(index),) if self.source.kind.dense else ()
        return Kept(self.decode(self.source.open(index), *targets).numpy())


def _stand_ins(count: int, indices: np.ndarray, bad: set[int]) -> np.ndarray:
    """Every position but, for a picture that cannot be read, that of the next one in `indices` that can."""
    stand_ins = np.arange(count)
    good = np.flatnonzero([index not in bad for index in indices.tolist()])
    if not len(good):
        raise WeftError("None of the training pictures can be read.")
    following = good[np.searchsorted(good, np.arange(len(indices))) % len(good)]
    stand_ins[indices] = indices[following]
    return stand_ins


@dataclass(frozen=True)
class KeptValidation:
    """Validation pictures as the model sees them, in the order in which they are read otherwise."""

    pictures: Tensor  # (n, C, h, w) uint8
    labels: Tensor  # (n,) int64 or (n, classes) float32, on the same device
    index: Tensor  # (n,) int64
    bad: list[tuple[int, str]]

    def only(self, index: np.ndarray) -> "KeptValidation":
        """Those of the source's pictures `index` that are here."""
        chosen = torch.from_numpy(np.isin(self.index.numpy(), index))
        there = chosen.to(self.pictures.device)
        return KeptValidation(self.pictures[there], self.labels[there], self.index[chosen], self.bad)

    def batches(self, size: int) -> Generator[Batch]:
        """Gives what `eval_batches` gives; files that cannot be read are in the first batch."""
        if not len(self.pictures) and not self.bad:
            return
        parts = zip(self.pictures.split(size), self.labels.split(size), self.index.split(size), strict=True)
        for number, part in enumerate(parts):
            yield Batch(*part, [] if number else self.bad)


def keep_validation(
    source: Source,
    indices: np.ndarray,
    preprocessing: Preprocessing,
    device: torch.device,
    *,
    workers: int,
    progress: Progress | None = None,
    early: EarlyPixels | None = None,
) -> KeptValidation:
    """Decodes the pictures at `indices` as the model sees them; `early` has them, of some."""
    bad: list[tuple[int, str]] = []
    one = preprocessing.channels * preprocessing.size[0] * preprocessing.size[1]
    how: dict[str, Any] = dict(one=one, workers=workers, bad=bad, progress=progress)
    ready, rest = split_ready(indices, early)
    found = dict(decode_all(_DecodePicture(source, preprocessing.picture), rest, **how))
    index = indices[np.isin(indices, [*ready.tolist(), *found])].astype(np.int64)
    pictures = np.empty((len(index), preprocessing.channels, *preprocessing.size), np.uint8)
    is_ready = np.isin(index, ready)
    if early is not None and len(ready):
        pictures[is_ready] = channels_first(early, ready)
    for row in np.flatnonzero(~is_ready).tolist():
        pictures[row] = found[int(index[row])].pixels
    labels = torch.from_numpy(np.asarray(source.labels[index])).to(device)
    labels = labels.to(torch.float32 if source.multilabel else torch.int64)
    return KeptValidation(torch.from_numpy(pictures).to(device), labels, torch.from_numpy(index), bad)


# On the host --------------------------------------------------------------------------------------------------------


def in_memory(
    source: Source,
    indices: np.ndarray,
    channels: int,
    max_pixels: int,
    *,
    one: int,
    workers: int,
    progress: Progress | None = None,
    early: EarlyPixels | None = None,
) -> Source:
    """The same source, of which the pictures at `indices` and their masks or objects lie in memory, upright."""
    decode = _DecodePair(source, channels, max_pixels)
    ready, rest = split_ready(indices, early)
    found = dict(decode_all(decode, rest, one=one, workers=workers, bad=[], progress=progress))
    pixels = {index: kept.pixels for index, kept in found.items()}
    if early is not None:
        grey_or_colour = early.pixels[ready].squeeze(3) if channels == 1 else early.pixels[ready]
        pixels |= dict(zip(ready.tolist(), grey_or_colour, strict=True))
    reader = _InMemory(source.reader, pixels)
    targets = source.targets and _InMemory(source.targets, {index: kept.target for index, kept in found.items()})
    return replace(source, reader=reader, targets=targets)


@dataclass(frozen=True)
class _DecodePair:
    source: Source
    channels: int
    max_pixels: int

    def __call__(self, index: int) -> Kept:
        with OpenedPicture(self.source.open(index), self.max_pixels) as opened:
            pixels = np.asarray(opened.pixels(self.channels))
            target = align(self.source.target(index), opened.header) if self.source.kind.dense else None
        return Kept(pixels, target)


class _InMemory:
    """A reader of pictures or targets that has some of them already; forked workers share these."""

    def __init__(self, reader: Any, kept: dict[int, Any]) -> None:
        self.reader, self.kept = reader, kept

    def __call__(self, index: int) -> Any:
        found = self.kept.get(index)
        return self.reader(index) if found is None else found

    def __getattr__(self, name: str) -> Any:
        if name == "reader":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.reader, name)


# Memory -------------------------------------------------------------------------------------------------------------


def room_on(device: torch.device) -> int:
    """Bytes that kept pictures may take on a device."""
    if device.type == "cuda":
        return int(SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0])
    return room_on_host()
