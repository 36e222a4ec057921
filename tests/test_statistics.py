"""What seeds say, next to scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.study.statistics import mean_sd, paired_difference, student_quantile

stats = pytest.importorskip("scipy.stats")

scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12)


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
