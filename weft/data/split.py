"""Which pictures train, validate and test: the layout's own split, or a stratified, group-aware or k-fold one.

A split is positions in a source and is stored as a small file of names; pictures are never copied. Which side a picture
takes depends on the seed and on names, not on the order of files on disk. What belongs together is a unit and stays on
one side: a group, pictures that are copies of each other, or a picture by itself.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.config import DataConfig
from weft.data.check.duplicates import Copies
from weft.data.sources.source import Source, fingerprint
from weft.data.targets import OBJECTS
from weft.documents import read_json
from weft.errors import WeftError
from weft.files import write_text
from weft.words import many, some

FORMAT = "weft split 1"
PARTS = ("train", "val", "test", "unused")
HELD_OUT = 0.2  # of the training pictures, where nobody said how many, ...
MOST_HELD_OUT = 5_000  # ... but no more than tell 95 % from 96 %: the others are better learnt from


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


def make_split(source: Source, config: DataConfig, seed: int, copies: Copies | None = None) -> Split:
    """A known set's published split, or the layout's own; else part of the training pictures is held out.

    What is held out has no copy among the pictures that train, as far as `copies` names them.
    """
    check_can_split(source, config)
    order = _order(source.names.raws(), seed)
    own = {split: np.flatnonzero(source.splits == split) for split in ("val", "test")}
    train = np.flatnonzero((source.splits == "train") | (source.splits == ""))
    if _is_published(source, config):
        split = _published(source, order, own["test"], config, seed, copies)
    elif len(own["val"]):
        split = Split(train, own["val"], own["test"], "as the data is laid out")
    else:
        split = replace(_held_out(source, train, order, config, seed, copies), test=own["test"])
    if config.fraction < 1:
        labels = source.labels[split.train]
        taken = _part(labels, order[split.train], config.fraction)
        taken = ~_keep_a_picture_of_each_class(labels, ~taken, order[split.train], np.arange(len(labels)))
        method = f"{split.method}; {config.fraction:g} of the training pictures"
        split = replace(split, train=split.train[taken], method=method)
    return split


def holds_out(source: Source, config: DataConfig) -> bool:
    """Whether the validation pictures are Weft's choice."""
    if _is_published(source, config):
        return config.val_fraction is not None
    return not (source.splits == "val").any()


def _is_published(source: Source, config: DataConfig) -> bool:
    has_test = bool((source.splits == "test").any())
    return config.protocol == "published" and source.published and has_test and not config.folds


def _published(
    source: Source, order: np.ndarray, test: np.ndarray, config: DataConfig, seed: int, copies: Copies | None
) -> Split:
    """All that does not test trains, validation pictures too, as papers have it; what tests is looked at once.

    Nothing is left then to choose the best epoch by, so the last is kept, unless part of the training pictures is held
    out for that.
    """
    train = np.setdiff1d(np.arange(len(source)), test)
    if config.val_fraction is None:
        return Split(train, test[:0], test, "published protocol", report_on="test")
    split = _held_out(source, train, order, config, seed, copies)
    return replace(split, test=test, method=f"published protocol; {split.method}", report_on="test")


def _held_out(
    source: Source, train: np.ndarray, order: np.ndarray, config: DataConfig, seed: int, copies: Copies | None
) -> Split:
    """A split of the pictures at `train` alone."""
    if config.val_fraction is None:
        config = replace(config, val_fraction=min(HELD_OUT, MOST_HELD_OUT / max(1, len(train))))
    labels, order = source.labels[train], order[train]
    units, sides = _units_and_sides(source, train, order, config, seed, copies)
    held = sides == (config.fold if config.folds else 1)
    held = _keep_a_picture_of_each_class(labels, held, order, units)
    how = f"fold {config.fold} of {config.folds}" if config.folds else f"{_fraction(config):.3g} held out"
    grouped = ", groups kept together" if source.groups is not None else ""
    copied = ", copies kept together" if len(units) > units.max(initial=-1) + 1 and not grouped else ""
    return Split(train[~held], train[held], train[:0], f"{how}, stratified{grouped}{copied}, seed {seed}")


def _fraction(config: DataConfig) -> float:
    return HELD_OUT if config.val_fraction is None else config.val_fraction


def check_can_split(source: Source, config: DataConfig) -> None:
    """Raises where no split can be made, whatever the pictures show."""
    if len(source.classes) < 2 and source.kind is not OBJECTS and not source.multilabel:
        raise WeftError(f"{source.root} has only one class ({source.classes[0]!r}); to tell apart takes two or more.")
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


def _units_and_sides(
    source: Source, train: np.ndarray, order: np.ndarray, config: DataConfig, seed: int, copies: Copies | None
) -> tuple[np.ndarray, np.ndarray]:
    """Unit and side of each training picture: (n,) numbers; side 1, or the fold's, validates.

    Where too many resemble each other, as frames of a video do, some side would be left with too little. Then only
    equal pictures stay together, and where these join too many groups, groups alone.
    """
    shares = np.full(config.folds, 1 / config.folds) if config.folds else _shares(_fraction(config))
    labels, groups, group_order = source.labels[train], np.arange(len(train)), order
    if source.groups is not None:
        names, groups = np.unique(source.groups[train], return_inverse=True)
        if len(names) < len(shares):
            raise WeftError(f"{source.root} has {many(len(names), 'group')}, too few for {len(shares)} sides.")
        group_order = _order((name.encode("utf-8", "surrogatepass") for name in names), seed)
    units, sides = groups, np.zeros(len(train), np.int64)
    for pairs in _less_and_less(copies, len(source), train, may_part=source.groups is not None):
        units = _unite(groups, pairs)
        unit_order = np.full(units.max() + 1, np.iinfo(np.uint64).max, np.uint64)
        np.minimum.at(unit_order, units, group_order[groups])
        sides = _deal_units(source, labels, units, unit_order, config, shares)
        if _all_have_enough(labels, sides, shares):
            break
    return units, sides


def _all_have_enough(labels: np.ndarray, sides: np.ndarray, shares: np.ndarray) -> bool:
    """Whether each side has half of its share, and a picture of each class of which it should have two."""
    total = _count(labels)
    for side, share in enumerate(shares):
        here = _count(labels[sides == side], len(total))
        if (sides == side).sum() < 0.5 * share * len(labels) or ((here == 0) & (share * total >= 2)).any():
            return False
    return True


def _count(labels: np.ndarray, classes: int = 0) -> np.ndarray:
    """(classes,) pictures of each."""
    return labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=classes)


def _less_and_less(copies: Copies | None, pictures: int, train: np.ndarray, may_part: bool) -> Iterator[np.ndarray]:
    """Pairs of numbers in `train` to keep together: equal and near ones, equal ones, where copies may part none."""
    if copies is not None and len(copies.equal) + len(copies.near):
        for kept in (np.concatenate([copies.equal, copies.near]), copies.equal):
            sets = _unite(np.arange(pictures), kept)[train]  # two may be copies of one that does not train
            order = np.argsort(sets, kind="stable")
            same = np.diff(sets[order]) == 0
            yield np.stack([order[:-1][same], order[1:][same]], axis=1)
        if not may_part:
            return
    yield np.empty((0, 2), np.int64)


def _unite(groups: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """(n,) numbers of units, from 0: groups that a pair of pictures joins are one."""
    parent = np.arange(groups.max() + 1)

    def root(group: int) -> int:
        while parent[group] != group:
            parent[group] = group = parent[parent[group]]
        return group

    for one, other in groups[pairs].tolist():
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    while (parent[parent] != parent).any():
        parent = parent[parent]
    return np.unique(parent, return_inverse=True)[1][groups]


def _deal_units(
    source: Source, labels: np.ndarray, units: np.ndarray, order: np.ndarray, config: DataConfig, shares: np.ndarray
) -> np.ndarray:
    """(n,) the side of each picture; `order`: (U,) a random number for each unit."""
    if source.groups is not None or source.multilabel:
        return _deal(labels, units, order, shares)[units]
    sides = np.empty(len(labels), np.int64)
    alone = np.bincount(units)[units] == 1  # with one label, these need no search for the best side
    sides[alone] = _deal_each(labels[alone], order[units[alone]], config)
    copied, members = np.unique(units[~alone], return_inverse=True)
    sides[~alone] = _deal(labels[~alone], members, order[copied], shares)[members]
    return sides


def _deal_each(labels: np.ndarray, order: np.ndarray, config: DataConfig) -> np.ndarray:
    """(n,) the side of each picture, where each is by itself."""
    if not config.folds:
        return _part(labels, order, max(_fraction(config), 1 / max(1, len(labels)))).astype(np.int64)
    sides = np.empty(len(labels), np.int64)
    sides[np.lexsort((order, labels))] = np.arange(len(labels)) % config.folds
    return sides


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
    labels: np.ndarray, held: np.ndarray, order: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """`held`, less what a class needs that would not be left with a single picture; whole units go back."""
    held = held.copy()
    for number in _classes_without(labels, held):
        members = np.flatnonzero(labels[:, number] if labels.ndim == 2 else labels == number)
        if not held[members].all():
            continue  # an earlier class brought one back
        back = members[np.argmin(order[members])]
        held[units == units[back]] = False
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
        rest, folders = content["rest"], {str(name): list(of) for name, of in content["folders"].items()}
        part_of = np.full(len(source), PARTS.index(rest))
        named = {part: content[part] for part in PARTS if part != rest}
        names = {
            part: [f"{folder}{name}" for folder, inside in named[part].items() for name in inside] for part in named
        }
    except OSError:
        raise WeftError(f"{path} cannot be read; the run's split is stored there.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeftError(f"{path} is not a split that Weft wrote.") from None
    position = {name: i for i, name in enumerate(source.names)}
    gone = [name for part in names.values() for name in part if name not in position]
    if gone or folders != _folders(source):
        raise WeftError(f"{source.root} has changed since {path} was written: {_difference(source, folders, gone)}.")
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
