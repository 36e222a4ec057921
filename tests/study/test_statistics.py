"""What seeds say, next to scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.study.statistics import difference_by_seed, mean_sd, paired_difference, student_quantile

stats = pytest.importorskip("scipy.stats")

score = st.integers(0, 10_000).map(lambda right: right / 10_000)
scores = st.lists(st.tuples(score, score), min_size=2, max_size=12)


@given(scores, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_interval_is_that_of_scipy(pairs, confidence):
    values, base = np.array(pairs).T
    found = paired_difference(values.tolist(), base.tolist(), confidence)
    if np.ptp(values - base) < 1e-9:
        return  # scipy warns of a division by zero
    wanted = stats.ttest_rel(values, base).confidence_interval(confidence)
    np.testing.assert_allclose([found.low, found.high], [wanted.low, wanted.high], rtol=1e-6, atol=1e-9)
    if min(abs(wanted.low), abs(wanted.high)) > 1e-9:
        assert found.larger_than_noise == (wanted.low > 0 or wanted.high < 0)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 29])
@pytest.mark.parametrize("probability", [0.6, 0.975, 0.995])
def test_quantile_is_that_of_scipy(freedom, probability):
    assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9)


def test_one_seed_has_no_interval():
    assert mean_sd([0.5]) == (0.5, None)
    assert mean_sd([]) == (None, None)
    assert paired_difference([], []) is None
    found = paired_difference([0.75], [0.5])
    assert (found.mean, found.low, found.larger_than_noise) == (0.25, None, None)


@pytest.mark.parametrize(("seeds", "larger"), [(2, None), (4, None), (5, True)])
def test_a_few_equal_differences_are_no_certainty(seeds, larger):
    """Scores are counts of pictures: that two or three differences are equal says little."""
    found = paired_difference([0.80] * seeds, [0.79] * seeds)
    assert found.mean == pytest.approx(0.01)
    assert found.larger_than_noise is larger


def test_differences_are_of_the_seeds_that_both_have():
    assert difference_by_seed({1: 0.5, 2: 0.9}, {0: 0.1, 1: 0.5}).mean == 0
    assert difference_by_seed({1: 0.5}, {0: 0.1}) is None
