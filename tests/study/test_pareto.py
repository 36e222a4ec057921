"""The front of what is good and cheap, and the agreement of two orders."""

from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from weft.study.search.pareto import choose_best, dominates, front, kendall_tau

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda p: (float(p[0]), float(p[1]))), max_size=14)
SCORES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)


def brute_force(pairs):
    """Whoever has nobody that is as good and as cheap, and better in one of both."""
    return {
        i
        for i, (good, cheap) in enumerate(pairs)
        if not any(g >= good and c <= cheap and (g > good or c < cheap) for g, c in pairs)
    }


@given(PAIRS)
def test_front_against_brute_force(pairs):
    found = front(pairs)
    assert set(found) == brute_force(pairs)
    assert len(found) == len(set(found))
    assert [pairs[i][1] for i in found] == sorted(pairs[i][1] for i in found)


@given(PAIRS, st.integers(1, 8))
def test_choose_takes_one_front_after_the_other(pairs, count):
    chosen = choose_best(pairs, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(pairs))
    left = [i for i in range(len(pairs)) if i not in chosen]
    assert not any(dominates(pairs[i], pairs[j]) for i in left for j in chosen)


def test_a_long_front_is_taken_in_even_steps():
    pairs = [(float(i), float(i)) for i in range(9)]
    assert choose_best(pairs, 3) == [0, 4, 8]
    assert choose_best(pairs, 1) == [8]


@given(SCORES)
def test_tau_is_that_of_scipy(scores):
    a, b = zip(*scores, strict=True)
    ours, theirs = kendall_tau(a, b), kendalltau(a, b).statistic
    if ours is None:
        assert theirs != theirs  # nan
    else:
        assert abs(ours - theirs) < 1e-12
