"""The ridge solve against closed forms and scikit-learn, and what happens when the matrix is singular."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.train.gram import GramStats, default_alpha, empty_stats, solve_ridge


def problem(rows=400, hidden=30, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    h = np.maximum(rng.standard_normal((rows, hidden)) + 0.3, 0)
    y = np.eye(classes)[rng.integers(0, classes, rows)]
    return torch.from_numpy(h), torch.from_numpy(y)


def stats_of(h, y, cut=None):
    stats = empty_stats(h.shape[1], y.shape[1])
    for begin in range(0, len(h), cut or len(h)):
        stats = stats.add(h[begin : begin + (cut or len(h))], y[begin : begin + (cut or len(h))])
    return stats


def closed_form(h, y, alpha):
    """The block system written out: a column of ones whose weight is not penalised."""
    ones = torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1).double()
    penalty = alpha * torch.eye(ones.shape[1], dtype=torch.float64)
    penalty[-1, -1] = 0
    solved = torch.linalg.solve(ones.t() @ ones + penalty, ones.t() @ y.double())
    return solved[:-1].t(), solved[-1]


# 1,025 features are one more than a block of the Gram matrix; being more than the rows they need a penalty
@pytest.mark.parametrize(
    ("hidden", "alpha"), [(1, 0.0), (1, 100.0), (30, 0.0), (30, 0.1), (30, 100.0), (1025, 0.1), (1025, 100.0)]
)
def test_solution_equals_the_float64_closed_form(hidden, alpha):
    h, y = problem(hidden=hidden)
    found = solve_ridge(stats_of(h, y), alpha)
    weight, bias = closed_form(h, y, alpha)
    torch.testing.assert_close(found.weight, weight, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.bias, bias, rtol=1e-8, atol=1e-10)
    assert (found.solver, found.jitter) == ("cholesky", 0.0)


@pytest.mark.parametrize("alpha", [0.01, 10.0])
def test_solution_equals_scikit_learn(alpha):
    sklearn = pytest.importorskip("sklearn.linear_model")
    h, y = problem()
    model = sklearn.Ridge(alpha=alpha).fit(h.numpy(), y.numpy())
    found = solve_ridge(stats_of(h, y), alpha)
    np.testing.assert_allclose(found.weight.numpy(), model.coef_, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(found.bias.numpy(), model.intercept_, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("cut", [1, 7, 399, 400])
def test_chunks_do_not_change_the_sums(cut):
    h, y = problem()
    whole, cut_up = stats_of(h, y), stats_of(h, y, cut)
    assert whole.rows == cut_up.rows == 400
    torch.testing.assert_close(whole.gram.tril(), cut_up.gram.tril(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.cross, cut_up.cross, rtol=1e-12, atol=1e-12)


def test_float32_chunks_are_added_in_float64():
    # 2^24 + 1 is no float32: a float32 sum over these chunks would stay at 2^24
    stats = empty_stats(1, 1)
    one = torch.ones(1, 1)
    stats = stats.add(torch.full((1, 1), 4096.0), one)
    for _ in range(3):
        stats = stats.add(one, one)
    assert stats.gram.item() == 2**24 + 3


def test_narrower_statistics_are_a_slice():
    h, y = problem()
    narrow = solve_ridge(stats_of(h, y).narrow(11), 0.5)
    alone = solve_ridge(stats_of(h[:, :11], y), 0.5)
    torch.testing.assert_close(narrow.weight, alone.weight, rtol=1e-9, atol=1e-12)
    with pytest.raises(InvalidInput, match="30 features"):
        stats_of(h, y).narrow(31)


def test_dead_and_duplicate_features_take_a_jitter_and_fit_as_well_as_without():
    h, y = problem()
    singular = torch.cat([h, h[:, :3], torch.zeros(len(h), 2, dtype=h.dtype)], 1)
    found = solve_ridge(stats_of(singular, y), 0.0)
    assert found.solver == "cholesky"
    assert found.jitter > 0
    assert not found.weight[:, -2:].abs().max() > 1e-9
    weight, bias = closed_form(h, y, 0.0)
    torch.testing.assert_close(singular @ found.weight.t() + found.bias, h @ weight.t() + bias, rtol=0, atol=1e-5)


def test_an_indefinite_matrix_goes_to_the_eigenvalues():
    # sums that no rows have: rounding can make a Gram matrix like this one
    gram = torch.tensor([[2.0, 3.0], [3.0, 2.0]], dtype=torch.float64)
    stats = GramStats(gram, torch.ones(2, 1).double(), torch.zeros(2).double(), torch.ones(1).double(), 4)
    found = solve_ridge(stats, 0.0)
    assert (found.solver, found.jitter) == ("eigh", 0.0)
    torch.testing.assert_close(found.weight, torch.full((1, 2), 0.2, dtype=torch.float64))  # eigenvalue 5 alone


def test_features_that_are_all_dead_leave_the_class_frequencies():
    y = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 0, 1, 2])]
    found = solve_ridge(stats_of(torch.zeros(4, 5, dtype=torch.float64), y), 0.0)
    assert not found.weight.any()
    torch.testing.assert_close(found.bias, torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))


def test_sums_that_are_not_finite_are_refused():
    h, y = problem()
    h[3, 3] = float("inf")
    with pytest.raises(TrainingError, match="not finite"):
        solve_ridge(stats_of(h, y), 1.0)
    with pytest.raises(InvalidInput, match="no rows"):
        solve_ridge(empty_stats(3, 2), 1.0)


def test_the_default_penalty_follows_the_size_and_number_of_features():
    h, y = problem()
    assert default_alpha(stats_of(2 * h, y)) == pytest.approx(4 * default_alpha(stats_of(h, y)))
    assert default_alpha(stats_of(torch.cat([h, h]), torch.cat([y, y]))) == pytest.approx(
        2 * default_alpha(stats_of(h, y))
    )
    assert default_alpha(stats_of(torch.zeros_like(h), y)) == 0
