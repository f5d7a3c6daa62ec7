"""Held-out rows: disjoint, complete, deterministic."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.data import hold_out
from gigamlp.errors import InvalidInput


@given(n=st.integers(6, 3000), rows=st.integers(1, 4000), seed=st.integers(0, 2**32))
def test_disjoint_and_complete(n: int, rows: int, seed: int) -> None:
    x, y = np.arange(2 * n).reshape(n, 2), np.arange(n) * 2
    x_fit, y_fit, x_val, y_val = hold_out(x, y, rows=rows, seed=seed)
    assert len(x_val) == len(y_val) == min(rows, n // 6) >= 1
    assert len(x_fit) == n - len(x_val)
    for part_x, part_y in ((x_fit, y_fit), (x_val, y_val)):
        np.testing.assert_array_equal(part_x[:, 0], part_y)  # rows keep their labels
        assert (np.diff(part_y) > 0).all()  # and their order
    assert sorted([*y_fit.tolist(), *y_val.tolist()]) == y.tolist()


def test_deterministic_across_processes_and_seeds_differ() -> None:
    x = y = np.arange(1000)
    _, _, _, val = hold_out(x, y, rows=20, seed=3)
    code = "import numpy as np; from gigamlp.data import hold_out; a = np.arange(1000)\n"
    code += "print(hold_out(a, a, rows=20, seed=3)[3].tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(val.tolist())
    assert hold_out(x, y, rows=20, seed=4)[3].tolist() != val.tolist()


def test_the_draw_is_pcg64s() -> None:
    # by NumPy's documented generator: a change of the draw changes every choice that was recorded
    expected = np.sort(np.random.Generator(np.random.PCG64(0)).permutation(60000)[:5000])
    assert hold_out(np.zeros(60000), np.arange(60000))[3].tolist() == expected.tolist()


def test_copies_are_owned() -> None:
    x, y = np.zeros((60, 2)), np.zeros(60)
    for part in hold_out(x, y):
        part[:] = 9
    assert not x.any()
    assert not y.any()


@pytest.mark.parametrize(
    ("x", "y", "kwargs", "message"),
    [
        (np.zeros(7), np.zeros(6), {}, "x has 7 rows and y has 6"),
        (np.zeros(5), np.zeros(5), {}, "at least 6 rows, got 5"),
        (np.zeros(9), np.zeros(9), {"rows": 0}, "rows must be a whole number >= 1, got 0"),
        (np.zeros(9), np.zeros(9), {"rows": 2.5}, "rows must be a whole number >= 1, got 2.5"),
        (np.zeros(9), np.zeros(9), {"rows": True}, "rows must be"),
        (np.zeros(9), np.zeros(9), {"seed": -1}, "seed must be a whole number >= 0, got -1"),
        (np.zeros(9), np.zeros(9), {"seed": None}, "seed must be"),
    ],
)
def test_refusals(x: np.ndarray, y: np.ndarray, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        hold_out(x, y, **kwargs)  # type: ignore[arg-type]
