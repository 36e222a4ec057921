"""Which of many points are worth a look, where one wants much of one thing (accuracy) and little of another (cost)."""

from collections.abc import Sequence
from itertools import combinations

ScoreAndCost = tuple[float, float]  # the more the better; the less the better


def dominates(a: ScoreAndCost, b: ScoreAndCost) -> bool:
    """Whether `a` is nowhere worse than `b`, and somewhere better."""
    return a[0] >= b[0] and a[1] <= b[1] and a != b


def front(pairs: Sequence[ScoreAndCost]) -> list[int]:
    """Positions of the pairs that no other one dominates, the cheapest first; of equal pairs all."""
    best, found = float("-inf"), []
    for i in sorted(range(len(pairs)), key=lambda i: (pairs[i][1], -pairs[i][0])):
        if pairs[i][0] > best or (found and pairs[i] == pairs[found[-1]]):
            best = pairs[i][0]
            found.append(i)
    return found


def choose_best(pairs: Sequence[ScoreAndCost], count: int) -> list[int]:
    """`count` positions: the front, then the front of the rest, and so on; from one that is too long, spread evenly."""
    left, chosen = list(range(len(pairs))), []
    while left and len(chosen) < count:
        best = [left[i] for i in front([pairs[i] for i in left])]
        room = count - len(chosen)
        if len(best) > room:  # the cheapest, the best, and some in between; of one alone the best
            best = [best[round(k * (len(best) - 1) / (room - 1))] for k in range(room)] if room > 1 else best[-1:]
        chosen += best
        left = [i for i in left if i not in best]
    return chosen


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b: 1 where both order alike, -1 where one is the other reversed, about 0 by chance.

    None where one of them is all ties, and no order.
    """
    signs = [(_sign(x2 - x1), _sign(y2 - y1)) for (x1, y1), (x2, y2) in combinations(zip(a, b, strict=True), 2)]
    in_a, in_b = sum(abs(x) for x, _ in signs), sum(abs(y) for _, y in signs)
    return sum(x * y for x, y in signs) / (in_a * in_b) ** 0.5 if in_a and in_b else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
