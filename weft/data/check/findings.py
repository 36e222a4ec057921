"""The findings of `weft check`, for people and for programs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from weft.errors import WeftError
from weft.words import clean, many

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
LISTED = 1000  # names and pairs that a problem lists; `count` has them all
QUANTILES = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}


@dataclass(frozen=True)
class CopyPair:
    """Two pictures that are the same or nearly so: distance 0 for the same pixels, 1 for no resemblance."""

    first: str
    second: str
    distance: float

    def __str__(self) -> str:
        return f"{self.first} {'~' if self.distance else '='} {self.second}"


@dataclass(frozen=True)
class Problem:
    severity: Severity
    kind: str  # stable, for programs: "leak", "unreadable", ...
    text: str  # one line for people
    names: list[str] = field(default_factory=list)  # pictures, classes or groups concerned, the first thousand
    details: dict[str, str] = field(default_factory=dict)  # name to a few words on it
    pairs: list[CopyPair] = field(default_factory=list)
    count: int = 0  # how many are concerned

    @classmethod
    def at(
        cls,
        names: Sequence[str],
        positions: Sequence[int] | np.ndarray,
        severity: Severity,
        kind: str,
        text: str,
        detail: Callable[[int], str] = lambda i: "",
    ) -> "Problem":
        """The problem of the pictures at `positions`; `detail` says a few words on each."""
        details = {names[i]: detail(i) for i in map(int, positions[:LISTED])}
        return cls(severity, kind, text, list(details), details, count=len(positions))


def quantiles(values: np.ndarray) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()} if len(values) else {}


@dataclass
class DataReport:
    root: str
    layout: str
    quick: bool
    multilabel: bool
    pictures: int  # in the source
    looked_at: int  # fewer where the quick form ran out of time
    classes: list[str]
    sides: dict[str, int]  # split to pictures
    counts: dict[str, list[int]]  # split to pictures of each class, of which a picture may show several, or none
    channels: int  # what a model's input should have for these pictures
    depth: int  # bits, as well
    width: dict[str, float]  # quantiles: min, q05, q25, median, q75, q95, max; empty where nothing could be read
    height: dict[str, float]
    sizes: list[tuple[float, float, int]]  # histogram of the shorter side: from, to, pictures
    formats: dict[str, int]
    modes: dict[str, int]
    notes: list[str]  # of the source
    problems: list[Problem] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # name to reason: left out of training
    seconds: float = 0.0
    task: str = "classify"
    pixels: list[int] = field(
        default_factory=list
    )  # segment: of each class, in masks that were read; a run's: of training
    object_sizes: dict[str, float] = field(
        default_factory=dict
    )  # detect: quantiles of the root of areas; a run's: of training
    has_shapes: bool = False  # detect: objects have shapes, not only boxes
    mask_values: list[int] = field(default_factory=list)  # segment: what stands for each class in files, where known
    mask_colours: bool = False  # these are 0xRRGGBB
    unlearned: list[str] = field(default_factory=list)  # classes that validate or test, and have no training picture

    def has(self, severity: Severity) -> int:
        """How many were found, the notes of the source among them."""
        return sum(problem.severity == severity for problem in self.problems) + (severity == "note") * len(self.notes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "DataReport":
        try:
            problems = [
                Problem(**{**problem, "pairs": [CopyPair(**pair) for pair in problem["pairs"]]})
                for problem in content["problems"]
            ]
            return cls(**{**content, "problems": problems})
        except (LookupError, TypeError):
            raise WeftError("data_report.json is not a report that Weft wrote.") from None

    def lines(self) -> list[str]:
        """The report as plain text, for pipes and logs."""
        found = [f"{self.root}: {self.layout}", f"{many(self.pictures, 'picture')}, {many(len(self.classes), 'class')}"]
        found += [
            f"  {name}: {self.sides[name]} {self._of_classes(counts)}".rstrip() for name, counts in self.counts.items()
        ]
        found += [self.summary(), *(f"note: {note}" for note in self.notes)]
        for problem in self.problems:
            found.append(f"{problem.severity}: {problem.text}")
            found += [f"    {pair}" for pair in problem.pairs[:5]]
            if not problem.pairs:
                found += [f"    {name}  {problem.details.get(name, '')}".rstrip() for name in problem.names[:5]]
        found.append(self.verdict())
        return [clean(line) for line in found]

    def _of_classes(self, counts: list[int]) -> str:
        """How many pictures a class has; where they show several, in how many it is."""
        present = [n for n in counts if n]
        if len(present) < 2:
            return ""
        equal = min(present) == max(present)
        which, span = ("each", f"{present[0]}") if equal else ("a", f"{min(present)} to {max(present)}")
        return f"({which} class in {span} of them)" if self.multilabel else f"({span} in {which} class)"

    def summary(self) -> str:
        """Channels, depth and sizes of pictures and objects in one line."""
        if not self.width:
            return "No picture could be read."
        sides = [f"{q['median']:.0f} ({q['min']:.0f} to {q['max']:.0f})" for q in (self.width, self.height)]
        formats = ", ".join(f"{name} {n}" for name, n in self.formats.items())
        kind = f"{many(self.channels, 'channel')} of {self.depth} bits"
        q = self.object_sizes
        objects = f"; objects of {q['median']:.0f} ({q['min']:.0f} to {q['max']:.0f}) pixels, by area" if q else ""
        return f"{kind}, width {sides[0]}, height {sides[1]} pixels; {formats}{objects}"

    def verdict(self) -> str:
        counts = {severity: self.has(severity) for severity in SEVERITIES}
        found = [many(n, severity) for severity, n in counts.items() if n]
        seen = "" if self.looked_at == self.pictures else f" in a sample of {self.looked_at} of them"
        how = f"quick check{seen}: headers and equal files" if self.quick else f"every picture decoded{seen}"
        return f"{', '.join(found) or 'No problems'} found ({how}; {self.seconds:.1f} s)."
