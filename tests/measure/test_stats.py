"""Order statistics against NumPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.errors import MeasurementError
from gigamlp.measure.stats import Stat, percentile, summarise

SAMPLES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


@given(SAMPLES, st.floats(0, 100))
def test_percentile_is_numpys_linear_one(samples, q):
    assert percentile(samples, q) == pytest.approx(float(np.percentile(samples, q)), rel=1e-9, abs=1e-3)


@given(SAMPLES)
def test_summary_is_numpys(samples):
    found = summarise(samples)
    q1, q2, q3 = np.percentile(samples, [25, 50, 75])
    assert found.median == pytest.approx(q2, rel=1e-9, abs=1e-3)
    assert found.iqr == pytest.approx(q3 - q1, rel=1e-6, abs=1e-3)
    assert (found.minimum, found.maximum, found.count) == (min(samples), max(samples), len(samples))


def test_one_sample():
    assert summarise([3.0]) == Stat(3.0, 0.0, 3.0, 3.0, 1)


def test_samples_are_not_reordered():
    samples = [3.0, 1.0, 2.0]
    summarise(samples)
    assert samples == [3.0, 1.0, 2.0]


def test_noise_is_relative():
    assert summarise([9.0, 10.0, 11.0]).noise == pytest.approx(0.1)
    assert Stat(0.0, 0.0, 0.0, 0.0, 1).noise == 0
    assert Stat(0.0, 1.0, -1.0, 1.0, 4).noise == math.inf


@pytest.mark.parametrize(
    ("samples", "q"), [([], 50), ([1.0], -1), ([1.0], 100.5), ([1.0, math.nan], 50), ([math.inf], 1)]
)
def test_what_cannot_be_summarised_is_refused(samples, q):
    with pytest.raises(MeasurementError):
        percentile(samples, q)
