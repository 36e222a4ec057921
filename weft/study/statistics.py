"""Statistics of a few seeds: mean and spread, and whether two rows differ by more than chance."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
ENOUGH = 5  # equal differences: fewer may be equal by chance, as scores are counts of pictures
DASH = "-"  # where there is no number


@dataclass(frozen=True)
class Difference:
    """A row minus another, over seeds that both were trained with."""

    mean: float
    low: float | None = None  # the interval; none of one seed, nor of a few that do not differ in the least
    high: float | None = None

    @property
    def larger_than_noise(self) -> bool | None:
        """Whether the interval leaves out zero; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def mean_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean, and standard deviation of the sample, which one value does not have."""
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def difference_by_seed(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """The difference over the seeds that both have."""
    both = sorted(values.keys() & base.keys())
    return paired_difference([values[seed] for seed in both], [base[seed] for seed in both])


def paired_difference(
    values: Sequence[float], base: Sequence[float], confidence: float = CONFIDENCE
) -> Difference | None:
    """Student's interval of the mean of `values` - `base`, seed by seed. Pairs share split and order of pictures."""
    differences = [a - b for a, b in zip(values, base, strict=True)]
    mean, sd = mean_sd(differences)
    if mean is None:
        return None
    if sd is None or (sd < 1e-9 and len(differences) < ENOUGH):
        return Difference(mean)
    half = student_quantile((1 + confidence) / 2, len(differences) - 1) * sd / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def format_score(mean: float | None, sd: float | None) -> str:
    """In per cent: 76.20 ± 0.31."""
    if mean is None:
        return DASH
    return f"{100 * mean:.2f}" + (f" ± {100 * sd:.2f}" if sd is not None else "")


def format_difference(found: Difference | None) -> str:
    """In points, with the interval: +0.50 [-0.12, +1.12]."""
    if found is None:
        return DASH
    if found.low is None or found.high is None:
        return f"{100 * found.mean:+.2f}"
    return f"{100 * found.mean:+.2f} [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"


def student_quantile(probability: float, freedom: int) -> float:
    """The t below which Student's distribution has `probability`, at least a half; found by halving."""
    low, high = 0.0, 1.0
    while student_within(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_within(middle, freedom) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def student_within(t: float, freedom: int) -> float:
    """The probability between -t and t: for whole degrees of freedom a finite series in the angle atan(t / sqrt(n))."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    first = 2 if freedom % 2 else 1
    for step in range(first, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
