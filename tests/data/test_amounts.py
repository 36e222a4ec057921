"""Amounts in the targets of training, from which a run derives class weights and anchors."""

import numpy as np
import pytest

from tests.helpers.made_data import tree
from weft.data.check.amounts import SAMPLE, measure_targets, sample
from weft.data.check.check import check
from weft.data.demo import nuclei, open_nuclei
from weft.data.sources.open import open_source


@pytest.fixture
def labelled(tmp_path):
    return open_source(str(tree(tmp_path, "a/1.png", "b/1.png")))


def test_labels_leave_the_report_as_it_is(labelled):
    report = check(labelled, None, quick=True)
    assert measure_targets(labelled, np.arange(2), report) is report


def test_masks_and_objects_are_measured_where_asked(labelled):
    report = check(labelled, None, quick=True)
    positions, numbers = np.arange(5, 9), nuclei("train")[1][5:9]
    masks = measure_targets(open_nuclei("segment"), positions, report)
    assert masks.pixels == [(numbers == 0).sum(), (numbers > 0).sum()]
    assert masks.object_sizes == {}
    objects = measure_targets(open_nuclei("detect"), positions, report)
    sides = np.concatenate([np.sqrt(np.bincount(one.ravel())[1:]) for one in numbers])
    assert objects.object_sizes["median"] == pytest.approx(np.median(sides))
    assert (objects.object_sizes["min"], objects.object_sizes["max"]) == pytest.approx((sides.min(), sides.max()))
    assert objects.pixels == report.pixels == []


def test_of_many_pictures_an_even_sample_counts():
    chosen = sample(np.arange(10_000))
    assert len(chosen) == SAMPLE
    assert (chosen[0], chosen[-1]) == (0, 9_999)
    assert set(np.diff(chosen)) <= {20, 21}
