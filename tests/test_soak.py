"""Long tests, for `make soak`: memory that must stay flat."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import numpy as np
import pytest

import gigamlp as gm
from tests.fakes import make_mlp

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_ridge_on_ten_million_rows_takes_no_more_memory_than_on_a_hundred_thousand() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (50_000, 784), dtype=np.uint8)
    labels = rng.integers(0, 10, 50_000)

    seen = []

    def chunks(count: int):
        for index in range(count):
            seen.append(resident_mb())
            yield np.roll(base, index, axis=1), labels

    gm.train.ridge(lambda: chunks(2), None, hidden=64)
    before = max(seen)
    fit = gm.train.fit_ridge(lambda: chunks(200), None, hidden=64)
    assert fit.rows == 10_000_000
    assert max(seen) < before + 100  # all of the hidden layer would be 2.6 GB, the rows 7.8 GB


def test_a_session_serves_for_long_without_growing() -> None:
    mlp = make_mlp((784, 40, 10))
    x = np.random.default_rng(0).integers(0, 256, (10_007, 784), dtype=np.uint8)
    expected = mlp.predict(x)
    with gm.Session(mlp, device="cpu") as session:
        for _ in range(100):
            session.predict(x)
        before = resident_mb()
        for index in range(5000):
            rows = 1 + index * 7919 % len(x)
            found = session.predict(x[:rows])
            assert (found == expected[:rows]).mean() > 0.999
    assert resident_mb() < before + 50
