"""Which pictures train, validate and test: the layout's own split, or a stratified, group-aware or k-fold one.

A split is positions in a source and is stored as a small file of names; pictures are never copied. Which side a picture
takes depends on the seed and on names, not on the order of files on disk.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.config import DataConfig
from weft.data.sources.source import Source, fingerprint
from weft.documents import read_json
from weft.errors import WeftError
from weft.files import write_text
from weft.words import many, some

FORMAT = "weft split 1"
PARTS = ("train", "val", "test", "unused")
HELD_OUT = 0.2  # of the training pictures, where nobody said how many


@dataclass(frozen=True)
class Split:
    train: np.ndarray  # sorted int64 positions in the source, as all three
    val: np.ndarray
    test: np.ndarray
    method: str = ""  # one line for people
    report_on: str = "val"  # the part that the numbers of a run are of

    @property
    def reported(self) -> np.ndarray:
        return self.test if self.report_on == "test" else self.val


def make_split(source: Source, config: DataConfig, seed: int) -> Split:
    """A known set's published split, or the layout's own; else part of the training pictures is held out."""
    _check(source, config)
    order = _order(source.names.raws(), seed)
    own = {split: np.flatnonzero(source.splits == split) for split in ("val", "test")}
    train = np.flatnonzero((source.splits == "train") | (source.splits == ""))
    if config.protocol == "published" and source.published and len(own["test"]) and not config.folds:
        split = _published(source, order, own["test"], config, seed)
    elif len(own["val"]):
        split = Split(train, own["val"], own["test"], "as the data is laid out")
    else:
        split = replace(_held_out(source, train, order, config, seed), test=own["test"])
    if config.fraction < 1:
        labels = source.labels[split.train]
        taken = _part(labels, order[split.train], config.fraction)
        taken = ~_keep_a_picture_of_each_class(labels, ~taken, order[split.train], None)
        method = f"{split.method}; {config.fraction:g} of the training pictures"
        split = replace(split, train=split.train[taken], method=method)
    return split


def _published(source: Source, order: np.ndarray, test: np.ndarray, config: DataConfig, seed: int) -> Split:
    """All that does not test trains, validation pictures too, as papers have it; what tests is looked at once.

    Nothing is left then to choose the best epoch by, so the last is kept, unless part of the training pictures is held
    out for that.
    """
    train = np.setdiff1d(np.arange(len(source)), test)
    if config.val_fraction is None:
        return Split(train, test[:0], test, "published protocol", report_on="test")
    split = _held_out(source, train, order, config, seed)
    return replace(split, test=test, method=f"published protocol; {split.method}", report_on="test")


def _held_out(source: Source, train: np.ndarray, order: np.ndarray, config: DataConfig, seed: int) -> Split:
    """A split of the pictures at `train` alone."""
    held = _hold_out(source, train, order[train], config, seed)
    how = f"fold {config.fold} of {config.folds}" if config.folds else f"{_fraction(config):g} held out"
    grouped = ", groups kept together" if source.groups is not None else ""
    return Split(train[~held], train[held], train[:0], f"{how}, stratified{grouped}, seed {seed}")


def _fraction(config: DataConfig) -> float:
    return HELD_OUT if config.val_fraction is None else config.val_fraction


def _check(source: Source, config: DataConfig) -> None:
    if len(source.classes) < 2 and not source.kind.dense and not source.multilabel:
        raise WeftError(f"{source.root} has only one class ({source.classes[0]!r}); a classifier needs two or more.")
    if not np.isin(source.splits, ("train", "")).any():
        raise WeftError(f"{source.root} has no training pictures ({source.layout}); it can only be evaluated.")
    if not 0 < config.fraction <= 1:
        raise WeftError(f"data.fraction={config.fraction:g} is out of range; choose a number above 0 and up to 1.")
    if not 0 < _fraction(config) < 1:
        raise WeftError(f"data.val_fraction={_fraction(config):g} is out of range; choose a number between 0 and 1.")
    if config.folds and (config.folds < 2 or not 0 <= config.fold < config.folds):
        raise WeftError(f"data.fold={config.fold} does not fit data.folds={config.folds}: folds count from 0.")
    if config.folds and (source.splits == "val").any():
        raise WeftError(f"{source.root} has its own validation pictures; leave out data.folds={config.folds}.")


def _hold_out(source: Source, train: np.ndarray, order: np.ndarray, config: DataConfig, seed: int) -> np.ndarray:
    """Which of the training pictures validate: (len(train),) bool."""
    labels = source.labels[train]
    shares = np.full(config.folds, 1 / config.folds) if config.folds else _shares(_fraction(config))
    held = config.fold if config.folds else 1
    groups = None
    if source.groups is not None:
        names, groups = np.unique(source.groups[train], return_inverse=True)
        if len(names) < max(2, config.folds):
            raise WeftError(f"{source.root} has {many(len(names), 'group')}, too few for {max(2, config.folds)} sides.")
        side = _deal(labels, groups, _order((name.encode("utf-8", "surrogatepass") for name in names), seed), shares)
        mask = side[groups] == held
    elif source.multilabel:
        mask = _deal(labels, np.arange(len(train)), order, shares) == held
    elif config.folds:
        mask = np.empty(len(train), bool)
        mask[np.lexsort((order, labels))] = np.arange(len(train)) % config.folds == config.fold
    else:
        mask = _part(labels, order, max(_fraction(config), 1 / len(train)))
    return _keep_a_picture_of_each_class(labels, mask, order, groups)


def _order(names: Iterable[bytes], seed: int) -> np.ndarray:
    """(N,) a random number for each name, from seed and name alone: added pictures leave those of the others."""
    key = str(seed).encode()
    digests = [hashlib.blake2b(name, digest_size=8, key=key).digest() for name in names]
    return np.frombuffer(b"".join(digests), np.uint64)


def _shares(fraction: float) -> np.ndarray:
    return np.array([1 - fraction, fraction])


def _part(labels: np.ndarray, order: np.ndarray, fraction: float) -> np.ndarray:
    """A stratified part: (N,) bool with `fraction` of all, and of each class, each less than a picture off."""
    if labels.ndim == 2:
        return _deal(labels, np.arange(len(labels)), order, _shares(fraction)) == 1
    counts = np.bincount(labels)
    ends = np.cumsum(counts)
    quota = np.diff(np.floor(ends * fraction + 0.5), prepend=0)  # rounded so that the sum is right, too
    by_class = np.lexsort((order, labels))
    sorted_labels = labels[by_class]
    taken = np.empty(len(labels), bool)
    taken[by_class] = np.arange(len(labels)) - (ends - counts)[sorted_labels] < quota[sorted_labels]
    return taken


def _deal(labels: np.ndarray, units: np.ndarray, order: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Gives each unit (a group, or a picture with several labels) to a side: (U,), so that sides get their shares.

    Iterative stratification: the unit that holds the largest part of some class goes first, and each goes where the
    sides come nearest to their shares of every class, by chi-square. `units`: (N,) numbers; `order`: (U,) for ties.
    """
    if labels.ndim == 2:
        pictures, classes = np.nonzero(labels)
        everything = labels.shape[1]
    else:
        pictures, classes = np.arange(len(labels)), labels
        everything = int(labels.max(initial=0)) + 1
    # all pictures together count as one more class, which balances the sizes
    owner = np.concatenate([units[pictures], units])
    classes = np.concatenate([classes, np.full(len(units), everything)])
    pairs, counts = np.unique(owner * (everything + 1) + classes, return_counts=True)
    owner, classes = np.divmod(pairs, everything + 1)
    parts = counts / np.bincount(classes, counts, everything + 1)[classes]  # of its class, what this unit holds
    starts = np.searchsorted(owner, np.arange(len(order) + 1))
    largest = np.maximum.reduceat(parts, starts[:-1])
    filled = np.zeros((len(shares), everything + 1))
    side = np.zeros(len(order), np.int64)
    for unit in np.lexsort((order, -largest)):
        own = slice(starts[unit], starts[unit + 1])
        part, columns = parts[own], classes[own]
        cost = ((2 * filled[:, columns] + part) @ part) / shares
        side[unit] = cost.argmin()
        filled[side[unit], columns] += part
    return side


def _keep_a_picture_of_each_class(
    labels: np.ndarray, held: np.ndarray, order: np.ndarray, groups: np.ndarray | None
) -> np.ndarray:
    """`held`, less what a class needs that would not be left with a single picture; whole groups go back."""
    held = held.copy()
    for number in _classes_without(labels, held):
        members = np.flatnonzero(labels[:, number] if labels.ndim == 2 else labels == number)
        if not held[members].all():
            continue  # an earlier class brought one back
        back = members[np.argmin(order[members])]
        held[back if groups is None else groups == groups[back]] = False
    return held


def _classes_without(labels: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Classes that have pictures, all of them held out."""
    if labels.ndim == 2:
        return np.flatnonzero(labels.any(axis=0) & ~labels[~held].any(axis=0))
    return np.setdiff1d(labels, labels[~held])


def save_split(split: Split, source: Source, path: Path, mark: str = "") -> None:
    """Writes names, folder by folder, of all parts but the largest, which is the rest; and a digest of each folder.

    The digests tell which folder changed where the split no longer fits. `mark` is the source's fingerprint, where that
    is known.
    """
    positions = {"train": split.train, "val": split.val, "test": split.test}
    positions["unused"] = np.setdiff1d(np.arange(len(source)), np.concatenate([*positions.values()]))
    rest = max(PARTS, key=lambda part: len(positions[part]))
    content = {
        "format": FORMAT,
        "method": split.method,
        "report_on": split.report_on,
        "fingerprint": mark or fingerprint(source),
        "pictures": len(source),
        "rest": rest,
        **{part: _by_folder(source.names[i] for i in positions[part]) for part in PARTS if part != rest},
        "folders": _folders(source),
    }
    write_text(path, json.dumps(content, indent=1))


def stored_fingerprint(path: Path) -> str:
    """That of the source which a split was made of; nothing where the file is no split."""
    try:
        return str(read_json(path)["fingerprint"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def load_split(path: Path, source: Source) -> Split:
    """The split as it was saved; WeftError where the source has lost or got pictures since, and says which."""
    try:
        content = read_json(path)
        rest, folders = content["rest"], content["folders"]
        named = {part: content[part] for part in PARTS if part != rest}
    except OSError:
        raise WeftError(f"{path} cannot be read; the run's split is stored there.") from None
    except (ValueError, KeyError, TypeError):
        raise WeftError(f"{path} is not a split that Weft wrote.") from None
    position = {name: i for i, name in enumerate(source.names)}
    names = {part: [f"{folder}{name}" for folder, inside in named[part].items() for name in inside] for part in named}
    gone = [name for part in names.values() for name in part if name not in position]
    if gone or folders != _folders(source):
        raise WeftError(f"{source.root} has changed since {path} was written: {_difference(source, folders, gone)}.")
    part_of = np.full(len(source), PARTS.index(rest))
    for part, members in names.items():
        part_of[[position[name] for name in members]] = PARTS.index(part)
    train, val, test = (np.flatnonzero(part_of == i) for i in range(3))
    return Split(train, val, test, content.get("method", ""), content.get("report_on", "val"))


def _by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, slash, file = name.rpartition("/")
        folders.setdefault(folder + slash, []).append(file)
    return folders


def _folders(source: Source) -> dict[str, list[int | str]]:
    """Folder to the number of its pictures and a digest of their names, in any order."""
    digests = {}
    for folder, files in _by_folder(source.names).items():
        names = "\0".join(sorted(files)).encode("utf-8", "surrogatepass")
        digests[folder] = [len(files), hashlib.blake2b(names, digest_size=6).hexdigest()]
    return digests


def _difference(source: Source, before: dict[str, list[int | str]], gone: list[str]) -> str:
    now, changes = _folders(source), []
    if gone:
        changes.append(f"{len(gone)} pictures are gone ({some(gone, 3)})")
    for folder in sorted({*before, *now}):
        was, has = (folders.get(folder, [0, ""]) for folders in (before, now))
        if was != has:
            other = f"{was[0]} then, {has[0]} now" if was[0] != has[0] else f"other names among {has[0]}"
            changes.append(f"{folder or 'its folder'}: {other}")
    more = f" and {len(changes) - 4} more changes" if len(changes) > 4 else ""
    return "; ".join(changes[:4]) + more
