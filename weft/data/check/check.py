"""Examines a data set before anything is trained on it: what it is, and what is wrong with it. Never writes into it."""

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weft.config import DataConfig
from weft.data.check.depth import dark_pictures
from weft.data.check.duplicates import equal_groups, near_pairs, one_of_each
from weft.data.check.findings import LISTED, SEVERITIES, CopyPair, DataReport, Problem, Severity, quantiles
from weft.data.check.headers import QuickLook
from weft.data.check.scan import Progress, Scan, read_all
from weft.data.check.targets import look_at_targets
from weft.data.sources.source import Source, alike
from weft.words import many, some

if TYPE_CHECKING:
    from weft.data.split import Split

SIDES = ("train", "val", "test", "")
QUICK_SECONDS = 10.0
TINY = 8  # pixels
HUGE = 50_000_000  # pixels
LONG = 5.0  # longer side over shorter side
UNBALANCED = 5.0  # largest class over smallest class
KINDS = {  # ending to formats
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif", "mpo"), ("JPEG", "MPO")),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), ("PPM",)),
    **dict.fromkeys(("tif", "tiff"), ("TIFF",)),
    **dict.fromkeys(("bmp", "dib"), ("BMP",)),
    **{format.lower(): (format,) for format in ("PNG", "WEBP", "GIF", "NPY")},
}
KNOWN = {format for formats in KINDS.values() for format in formats}


def check(
    source: Source,
    split: "Split | None",
    *,
    quick: bool = False,
    config: DataConfig | None = None,
    progress: Progress | None = None,
    scan: Scan | None = None,
) -> DataReport:
    """Looks at every picture of `source` (quick: at headers, for about ten seconds) and says what it is.

    `split` says on which side a picture is; without it the layout's own split counts. `progress(done, of)` is called
    now and then. `scan` is what a look at `source` has found, where somebody has looked already.
    """
    start = time.monotonic()
    config = config or DataConfig()
    if scan is None and quick:
        scan = QuickLook(source, config.max_pixels, QUICK_SECONDS).result(progress)
    elif scan is None:
        scan = read_all(source, config.max_pixels, progress)
    targets = look_at_targets(source, config, quick, progress)
    if targets.present is not None:  # from here on a picture's labels are what its mask or its objects show
        source = replace(source, labels=targets.present, multilabel=True)
    checked = CheckedSource(source, scan, _sides(source, split), config)
    problems = [*_unreadable(checked), *_leaks(checked), *_copies(checked), *_oddities(checked), *targets.problems]
    problems += dark_pictures(source, scan, config.max_pixels)
    problems += _classes(checked) if not targets.has_checked_classes else ()
    unlearned = checked.unlearned if targets.looked_at_all else []
    problems += _unlearned(unlearned)
    problems.sort(key=lambda problem: SEVERITIES.index(problem.severity))
    read = scan.records[scan.read]
    return DataReport(
        root=source.root,
        layout=source.layout,
        quick=quick,
        multilabel=source.multilabel,
        pictures=len(source),
        looked_at=len(scan.read) + len(scan.bad),
        classes=list(source.classes),
        sides=checked.pictures,
        counts=checked.counts,
        channels=_common(_colours(read)),
        depth=_common(read["depth"]),
        width=quantiles(read["width"]),
        height=quantiles(read["height"]),
        sizes=_histogram(np.minimum(read["width"], read["height"])),
        formats=dict(Counter(read["format"].tolist()).most_common()),
        modes=dict(Counter(read["mode"].tolist()).most_common()),
        notes=list(source.notes),
        problems=problems,
        bad={**targets.bad, **{source.names[i]: reason for i, reason in sorted(scan.bad.items())}},
        seconds=time.monotonic() - start,
        task=source.task,
        pixels=targets.pixels,
        object_sizes=targets.sizes,
        has_shapes=source.has_shapes,
        mask_values=targets.mask_values,
        mask_colours=targets.mask_colours,
        unlearned=unlearned,
    )


class CheckedSource:
    """A source with what was read of it and the side of each picture, which the checks below share."""

    def __init__(self, source: Source, scan: Scan, sides: np.ndarray, config: DataConfig) -> None:
        self.source, self.scan, self.sides, self.config = source, scan, sides, config
        rest = "all" if sides is source.splits else "unused"  # where the layout does not say; where a split leaves out
        members = {
            str(side) or rest: np.flatnonzero(sides == side)
            for side in sorted(np.unique(sides), key=lambda side: SIDES.index(side))
        }
        self.pictures = {side: len(positions) for side, positions in members.items()}
        self.counts = {side: _count(source, positions) for side, positions in members.items()}

    def pairs(self, severity: Severity, kind: str, text: str, pairs: Iterable[tuple[int, int, float]]) -> Problem:
        """A problem of pairs (position, position, distance); details say where each picture is and what it shows."""
        pairs = list(pairs)
        listed = [int(i) for first, second, _ in pairs[:LISTED] for i in (first, second)]
        names = {i: self.source.names[i] for i in listed}
        details = {name: self.place(i) for i, name in names.items()}
        shown = [CopyPair(names[int(a)], names[int(b)], round(float(distance), 3)) for a, b, distance in pairs[:LISTED]]
        return Problem(severity, kind, text, list(details), details, shown, len(pairs))

    def place(self, index: int) -> str:
        """`val · dog`"""
        label = self.source.labels[index]
        names = [self.source.classes[c] for c in (np.flatnonzero(label) if self.source.multilabel else [label])]
        return " · ".join(part for part in (str(self.sides[index]), ", ".join(names)) if part)

    def same_label(self, a: int, b: int) -> bool:
        return bool(np.array_equal(self.source.labels[a], self.source.labels[b]))

    @property
    def unlearned(self) -> list[str]:
        """Classes that validate or test, and have no training picture."""
        if "train" not in self.counts:
            return []
        others = np.sum([counts for side, counts in self.counts.items() if side in ("val", "test")] or [[0]], axis=0)
        return [self.source.classes[i] for i in np.flatnonzero((others > 0) & (np.array(self.counts["train"]) == 0))]

    @property
    def is_split(self) -> bool:
        return set(self.counts) != {"all"}

    def leaks_by_itself(self, a: int, b: int) -> bool:
        """Whether the data's own split parts two pictures, not Weft's."""
        return bool(self.source.splits[a] != self.source.splits[b])


def _unreadable(checked: CheckedSource) -> Iterable[Problem]:
    bad = checked.scan.bad
    if bad:
        part = len(bad) / (len(bad) + len(checked.scan.read))
        too_many = part > checked.config.bad_files
        then = (
            f"more than {checked.config.bad_files:.0%}; repair or remove them, or allow more with --data.bad_files"
            if too_many
            else "left out of training"
        )
        text = f"{many(len(bad), 'file')} cannot be read ({part:.1%}): {then}."
        severity: Severity = "error" if too_many else "warning"
        yield Problem.at(checked.source.names, sorted(bad), severity, "unreadable", text, lambda i: bad[i])


def _leaks(checked: CheckedSource) -> Iterable[Problem]:
    groups = checked.source.groups
    if groups is None or checked.config.leaks == "ignore":
        return
    placed = np.flatnonzero((groups != "") & (checked.sides != ""))
    sides = np.unique(np.stack([groups[placed], checked.sides[placed]], axis=1), axis=0)
    names, counts = np.unique(sides[:, 0], return_counts=True)
    torn = names[counts > 1].tolist()
    if torn:
        text = f"{many(len(torn), 'group')} on more than one side of the split: {some(torn)}."
        details = {name: " and ".join(sides[sides[:, 0] == name, 1].tolist()) for name in torn[:LISTED]}
        severity: Severity = "error" if checked.config.leaks == "error" else "warning"
        yield Problem(severity, "group-leak", text, torn[:LISTED], details, count=len(torn))


def _copies(checked: CheckedSource) -> Iterable[Problem]:
    """The same picture on both sides, under two labels, or twice; then pictures that are almost the same."""
    same = "same pixels" if checked.scan.of_pixels else "same bytes"
    records, read = checked.scan.records, checked.scan.read
    read = read[~records["blank"][read]]
    across, torn, twice = [], [], []
    for group in equal_groups(records["hash"][read]):
        group = read[group]
        sides: dict[str, list[int]] = {}
        for index in group.tolist():
            sides.setdefault(str(checked.sides[index]), []).append(index)
        home, *away = sorted(filter(None, sides), key=SIDES.index) or [""]
        across += [(sides[home][0], index, 0.0) for side in away for index in sides[side]]
        torn += [(int(group[0]), i, 0.0) for i in group[1:].tolist() if not checked.same_label(group[0], i)]
        for first, *others in sides.values():
            twice += [(first, i, 0.0) for i in others if checked.same_label(first, i)]
    if checked.config.leaks != "ignore":
        yield from _pictures_on_two_sides(checked, across, same)
    if torn:
        text = f"{many(len(torn), 'picture')} with two different labels ({same}): at most one label is right."
        yield checked.pairs("warning", "label-conflict", text, torn)
    if twice:
        where = "present more than once; the split that Weft makes keeps copies on one side"
        where = "more than once on one side of the split" if checked.is_split else where
        yield checked.pairs("warning", "duplicate", f"{many(len(twice), 'picture')} {where} ({same}).", twice)
    if checked.scan.thumbs is not None:
        yield from _near_copies(checked, read)


def _pictures_on_two_sides(
    checked: CheckedSource, across: list[tuple[int, int, float]], same: str
) -> Iterable[Problem]:
    """The leaks of the data's own split, which are errors unless settings say otherwise; and those of Weft's."""
    own = [pair for pair in across if checked.leaks_by_itself(*pair[:2])]
    ours = [pair for pair in across if not checked.leaks_by_itself(*pair[:2])]
    where = f"on more than one side of the split ({same})"
    if own:
        then = "keep one of each, or train all the same with --data.leaks warn"
        severity: Severity = "error" if checked.config.leaks == "error" else "warning"
        text = f"{many(len(own), 'picture')} {where}: {then if severity == 'error' else 'keep one of each'}."
        yield checked.pairs(severity, "leak", text, own)
    if ours:
        why = "keep one of each" if checked.source.groups is None else "kept together they would join too many groups"
        text = f"{many(len(ours), 'picture')} {where}: {why}."
        yield checked.pairs("warning", "leak", text, ours)


def _near_copies(checked: CheckedSource, read: np.ndarray) -> Iterable[Problem]:
    # of equal pictures on one side, one is enough
    hashes = checked.scan.records["hash"]
    side = np.unique(checked.sides[read], return_inverse=True)[1].astype(np.uint64)
    read = read[one_of_each(np.where(hashes[read] > 0, hashes[read] << np.uint64(2) | side, np.uint64(0)))]
    assert checked.scan.thumbs is not None
    pairs, distances = near_pairs(checked.scan.thumbs[read])
    pairs = read[pairs]
    new = (hashes[pairs[:, 0]] != hashes[pairs[:, 1]]) | (hashes[pairs[:, 0]] == 0)  # equal ones are reported as such
    pairs, distances = pairs[new], distances[new]
    sides = checked.sides[pairs]
    apart = (sides[:, 0] != sides[:, 1]) & (sides != "").all(axis=1)
    for kind, chosen in (("near-leak", apart), ("near-duplicate", ~apart)):
        if chosen.any():
            found = [(int(a), int(b), float(d)) for (a, b), d in zip(pairs[chosen], distances[chosen], strict=True)]
            other = sum(not checked.same_label(a, b) for a, b, _ in found)
            labels = f"; {other} of them with different labels" if other else ""
            where = " on two sides of the split" if kind == "near-leak" else " on one side" * checked.is_split
            ours = kind == "near-leak" and not any(checked.leaks_by_itself(a, b) for a, b, _ in found)
            then = "; too many to keep together: say with --data.group what belongs together" if ours else ""
            text = f"{many(len(found), 'pair')} of almost equal pictures{where}{labels}{then}."
            yield checked.pairs("warning" if kind == "near-leak" or other else "note", kind, text, found)


def _unlearned(classes: list[str]) -> Iterable[Problem]:
    if classes:
        text = "that cannot be learned, for want of training pictures, and is not measured"
        text = f"{many(len(classes), 'class')} {text if len(classes) == 1 else text.replace('is not', 'are not')}"
        yield Problem("warning", "untrained-class", f"{text}: {some(classes)}.", classes, count=len(classes))


def _classes(checked: CheckedSource) -> Iterable[Problem]:
    classes = checked.source.classes
    total = np.sum(list(checked.counts.values()), axis=0)
    learned = np.array(checked.counts.get("train", checked.counts.get("all", total)))
    validated = np.array(checked.counts["val"]) > 0 if {"train", "val"} <= checked.counts.keys() else learned >= 0
    rules: list[tuple[Severity, str, np.ndarray, str]] = [
        ("warning", "empty-class", total == 0, "without pictures"),
        ("warning", "single-picture", learned == 1, "with a single training picture"),
        ("note", "few-pictures", (learned > 1) & (learned < 10), "with fewer than 10 training pictures"),
        ("note", "unvalidated-class", (learned > 0) & ~validated, "without validation pictures"),
    ]
    for severity, kind, chosen, text in rules:
        if chosen.any():
            counts = {classes[i]: many(int(learned[i]), "picture") for i in np.flatnonzero(chosen)}
            text = f"{many(len(counts), 'class')} {text}: {some(list(counts))}."
            yield Problem(severity, kind, text, list(counts), counts, count=len(counts))
    if len(classes) == 1 and not checked.source.multilabel:
        yield Problem("warning", "one-class", f"Only one class, {classes[0]!r}: there is nothing to tell apart.")
    for family in alike(classes):
        text = f"Classes that differ only in case or spaces: {some(family)}."
        yield Problem("warning", "alike-classes", text, family, count=len(family))
    filled = np.flatnonzero(learned)
    if len(filled) and not checked.source.kind.dense:
        most, least = filled[learned[filled].argmax()], filled[learned[filled].argmin()]
        ratio = learned[most] / learned[least]
        if ratio >= UNBALANCED:
            counts = {classes[i]: many(int(learned[i]), "picture") for i in (most, least)}
            text = f"{classes[most]!r} has {ratio:.0f} times the pictures of {classes[least]!r}; try --balance sampler."
            yield Problem("warning", "imbalance", f"Unbalanced classes: {text}", list(counts), counts, count=2)


def _oddities(checked: CheckedSource) -> Iterable[Problem]:
    """Peculiarities of single pictures that may surprise; Weft has a rule for each, so most are notes."""
    records, read, profiles = checked.scan.records, checked.scan.read, checked.scan.profiles
    found = records[read]
    width, height = found["width"].astype(np.int64), found["height"].astype(np.int64)
    ratio = np.maximum(width, height) / np.minimum(width, height)
    names = checked.source.names
    wrong = [_misnamed(names[i], format) for i, format in zip(read, found["format"].tolist(), strict=True)]
    aligned = "; masks and boxes count as upright unless their size says otherwise" * checked.source.kind.dense
    rules: list[tuple[Severity, str, np.ndarray, str]] = [
        ("warning", "blank", found["blank"], "of a single colour."),
        ("warning", "tiny", np.minimum(width, height) < TINY, f"with a side of less than {TINY} pixels."),
        ("note", "huge", width * height > HUGE, "of more than 50 million pixels: slow to read."),
        (
            "note",
            "long",
            ratio > LONG,
            f"more than {LONG:.0f} times as long as wide: a square shows little of it.",
        ),
        ("note", "wrong-ending", np.array(wrong, bool), "whose ending is that of another format; the content counts."),
        ("note", "rotated", found["orientation"] > 1, f"turned by an EXIF entry; shown and trained upright{aligned}."),
        ("note", "deep", found["depth"] > 8, "of more than 8 bits; the whole range is kept."),
        ("note", "cmyk", found["mode"] == "CMYK", "in CMYK; read as RGB."),
        ("note", "alpha", _with_alpha(found), "with transparency; laid over white unless data.channels asks for it."),
        ("note", "animated", found["frames"] > 1, "with several frames; the first is used."),
        (
            "note",
            "profile",
            np.isin(read, list(profiles)),
            "with a colour profile other than sRGB, not applied.",
        ),
    ]

    def detail(index: int) -> str:
        record = records[index]
        shape = f"{record['format']} {record['mode']}, {record['width']} x {record['height']}"
        return f"{shape}, {profiles[index]}" if index in profiles else shape

    for severity, kind, chosen, text in rules:
        if chosen.any():
            positions, text = read[chosen], f"{many(int(chosen.sum()), 'picture')} {text}"
            yield Problem.at(names, positions, severity, kind, text, detail)
    kinds = Counter(_colours(found).tolist()).most_common()
    if len(kinds) > 1:
        text = ", ".join(f"{n} with {many(channels, 'channel')}" for channels, n in kinds)
        rare = read[_colours(found) != kinds[0][0]]
        text = f"Pictures differ in channels: {text}."
        yield Problem.at(names, rare, "note", "mixed-channels", text, detail)


def _with_alpha(records: np.ndarray) -> np.ndarray:
    return np.isin(records["channels"], (2, 4)) & ~np.isin(records["format"], ("NPY", "array"))


def _colours(records: np.ndarray) -> np.ndarray:
    """(N,) channels without alpha."""
    return records["channels"] - _with_alpha(records)


def _sides(source: Source, split: "Split | None") -> np.ndarray:
    """(N,) "train", "val", "test", or "" where a picture is on no side."""
    if split is None:
        return source.splits
    sides = np.full(len(source), "", dtype="U5")
    for side in ("train", "val", "test"):
        sides[getattr(split, side)] = side
    return sides


def _count(source: Source, positions: np.ndarray) -> list[int]:
    labels = source.labels[positions]
    counts = labels.sum(axis=0) if source.multilabel else np.bincount(labels, minlength=len(source.classes))
    return counts.tolist()


def _common(values: np.ndarray) -> int:
    """The largest value that at least a hundredth of the pictures has: a stray one does not decide."""
    kinds, counts = np.unique(values, return_counts=True)
    return int(kinds[counts >= 0.01 * len(values)].max()) if len(values) else 0


def _histogram(values: np.ndarray, bins: int = 24) -> list[tuple[float, float, int]]:
    """Bins of equal ratio, since sizes range from icons to scans."""
    if not len(values):
        return []
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [(low, high, len(values))]
    edges = np.geomspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high
    counts = np.histogram(values, edges)[0]
    return [(round(float(a), 1), round(float(b), 1), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def _misnamed(name: str, format: str) -> bool:
    kinds = KINDS.get(os.path.splitext(name)[1].lower().lstrip("."))
    return kinds is not None and format in KNOWN and format not in kinds
