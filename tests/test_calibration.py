"""Calibrated thresholds: the bound as stated holds as often as stated, and another kind of rows is noticed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from scipy import stats

import gigamlp as gm
from gigamlp import MLP, Layer
from gigamlp.calibration import losses_allowed, scheme_logits, thresholds_for
from gigamlp.cascade import Calibration, merge
from gigamlp.data import hold_out
from gigamlp.errors import DataError, InvalidInput
from gigamlp.unsure import UnsureCount, drift


@pytest.mark.parametrize(
    ("rows", "share", "doubt"), [(100, 0.05, 0.1), (5000, 0.002, 0.05), (50, 0.5, 0.01), (7, 0.9, 0.3)]
)
def test_the_losses_allowed_are_those_within_the_clopper_pearson_bound(rows: int, share: float, doubt: float) -> None:
    k = losses_allowed(rows, share, doubt)
    bound = lambda losses: 1.0 if losses == rows else stats.beta.ppf(1 - doubt, losses + 1, rows - losses)  # noqa: E731
    assert k < 0 or bound(k) <= share
    assert bound(k + 1) > share


def answers(rng: np.random.Generator, rows: int, stages: int) -> tuple[list[Any], list[Any], Any]:
    """Draw answers of stages that are wrong more often where their margin is small; the last one is nearly right."""
    targets = rng.integers(0, 3, rows)
    ids, margins = [], []
    for index in range(stages):
        margin = rng.exponential(size=rows).astype(np.float32)
        wrong = rng.random(rows) < (0.02 if index == stages - 1 else 0.4 / (1 + index) * np.exp(-2 * margin))
        ids.append(np.where(wrong, (targets + 1) % 3, targets))
        margins.append(margin)
    return ids, margins[:-1], targets


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
def test_the_bound_holds_as_often_as_it_says(stages: int, labelled: bool) -> None:
    """True shares of lost rows are those of 100,000 other rows of the same kind."""
    every, of_all, true = answers(np.random.default_rng(99), 100_000, stages)
    rng = np.random.default_rng(stages)
    broken, trials, max_loss = 0, 300, 0.02
    for _ in range(trials):
        ids, margins, targets = answers(rng, 800, stages)
        t = thresholds_for(ids, margins, targets if labelled else None, max_loss=max_loss, confidence=0.8)
        assert all(0 < each < 5 for each in t)
        merged, _ = merge(t, every, of_all)
        lost = (merged != every[-1]) & (every[-1] == true) if labelled else merged != every[-1]
        broken += bool(lost.mean() > max_loss)
    assert broken <= stats.binom.ppf(0.999, trials, 0.2)
    if stages == 2 and not labelled:
        assert broken >= stats.binom.ppf(0.001, trials, 0.05)  # nor is it idle


@functools.cache
def held_out() -> tuple[Any, Any]:
    x, y, _, _ = gm.data.load_mnist()
    return hold_out(x, y)[2:]


@functools.cache
def mnist_answers(names: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    logits = [scheme_logits(gm.load(name), held_out()[0]) for name in names]
    return [np.argmax(z, axis=1) for z in logits], [gm.load(names[0]).margins(z) for z in logits[:-1]]


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("names", [("mnist-16", "mnist-128"), ("mnist-16", "mnist-64", "mnist-128")])
def test_over_fifty_splits_of_mnist_the_bound_holds(names: tuple[str, ...], labelled: bool) -> None:
    """Fifty draws of 2,500 of the rows that nothing was trained on; the other rows are what comes later.

    The share lost among the others is itself a draw: the two shares differ at random by a hypergeometric draw, so the
    question is asked of all 5,000 rows, from which a draw without replacement is no more variable than one with it.
    """
    ids, margins = mnist_answers(names)
    y = held_out()[1]
    rng = np.random.default_rng(0)
    broken, shares, max_loss = 0, [], 0.005
    for _ in range(50):
        some = rng.permutation(len(y))[:2500]
        mine = ([i[some] for i in ids], [m[some] for m in margins])
        t = thresholds_for(*mine, y[some] if labelled else None, max_loss=max_loss, confidence=0.9)
        merged, deciding = merge(t, ids, margins)
        lost = (merged != ids[-1]) & (ids[-1] == y) if labelled else merged != ids[-1]
        broken += bool(lost.mean() > max_loss)
        assert (ids[-1] == y).sum() - (merged == y).sum() <= lost.sum()
        shares.append((deciding > 0).mean())
    assert broken <= stats.binom.ppf(0.999, 50, 0.1)
    assert np.mean(shares) < 0.5  # it does stop early


def test_calibrating_uses_the_arithmetic_that_runs() -> None:
    x, y = (part[:2000] for part in held_out())
    stages = [gm.load("mnist-16"), gm.load("mnist-64")]
    cascade = gm.calibrate(stages, x, y, max_loss=0.01, confidence=0.9)
    assert isinstance(cascade.calibration, Calibration)
    assert cascade.name == "mnist-16+mnist-64"
    with gm.Session(cascade, device="cpu", engine="cpu_fused") as session:
        session.predict(x)
        assert session.unsure is not None
        assert session.unsure.total == UnsureCount(2000, cascade.calibration.unsure)
        assert session.unsure.drift() == 1.0


def test_labels_and_rows_that_cannot_do_are_refused() -> None:
    stages = [MLP((Layer(np.eye(2) * scale),), classes=["a", "b"]) for scale in (1, 2)]
    x = np.random.default_rng(0).normal(size=(500, 2))
    with pytest.raises(InvalidInput, match="that takes 2995 rows"):
        gm.calibrate(stages, x, max_loss=0.001)
    with pytest.raises(InvalidInput, match="that takes 2995 rows"):
        gm.calibrate(stages, x[:0], max_loss=0.001)
    assert gm.calibrate(stages, np.tile(x, (6, 1))[:2995]).thresholds == (0.0,)
    with pytest.raises(DataError, match="need labels of shape"):
        gm.calibrate(stages, x, ["a"], max_loss=0.1)
    with pytest.raises(DataError, match="not one of the 2 classes"):
        gm.calibrate(stages, x, ["c"] * 500, max_loss=0.1)
    for own in ({"max_loss": 0.0}, {"max_loss": 1.5}, {"confidence": 1.0}, {"confidence": float("nan")}):
        with pytest.raises(InvalidInput, match="is a fraction between 0 and 1"):
            gm.calibrate(stages, x, **own)


def test_stages_that_never_agree_send_everything_on() -> None:
    stages = [MLP((Layer(np.eye(2) * scale),)) for scale in (1, -1)]
    x = np.random.default_rng(0).normal(size=(500, 2))
    cascade = gm.calibrate(stages, x, max_loss=0.05)
    assert cascade.calibration is not None
    lost = 500 - cascade.calibration.unsure[0]
    assert lost == losses_allowed(500, 0.05, 0.05)


def test_endless_margins_are_refused() -> None:
    ids = [np.zeros(100, int), np.ones(100, int)]
    with pytest.raises(InvalidInput, match="infinitely sure"):
        thresholds_for(ids, [np.full(100, np.inf, np.float32)], None, max_loss=0.1, confidence=0.9)
    assert thresholds_for(ids, [np.full(100, np.nan, np.float32)], None, max_loss=0.1, confidence=0.9) == (0.0,)


def test_other_rows_are_noticed_and_rows_of_the_same_kind_are_not() -> None:
    x, y = held_out()
    known, later = slice(0, 3000), slice(3000, 5000)
    cascade = gm.calibrate([gm.load("mnist-16"), gm.load("mnist-64")], x[known], y[known], max_loss=0.005)
    images = x[later].reshape(-1, 28, 28)
    shifted = np.roll(images, 2, axis=2).reshape(-1, 784)
    noisy = np.clip(x[later] + np.random.default_rng(0).normal(0, 25, x[later].shape), 0, 255).astype(np.uint8)
    random = np.random.default_rng(1).integers(0, 256, x[later].shape).astype(np.uint8)
    with gm.Session(cascade, device="cpu") as session:
        assert session.unsure is not None
        session.predict(x[later])
        assert session.unsure.drift() > 0.001
        for other in (shifted, noisy, random):
            session.predict(other)
            assert session.unsure.last is not None
            assert session.unsure.last.rows == 2000
            assert session.unsure.drift(last=True) < 1e-6
        assert session.unsure.total.rows == 8000


def test_the_drift_test_is_false_as_seldom_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        then, now = rng.binomial(5000, [0.1, 0.04]), rng.binomial(3000, [0.1, 0.04])
        known = Calibration(5000, tuple(then), 0.01, 0.95, True)
        found.append(drift(known, UnsureCount(3000, tuple(int(n) for n in now))))
    assert np.mean(np.array(found) < 0.05) < stats.binom.ppf(0.999, 2000, 0.05) / 2000
    with pytest.raises(InvalidInput, match="cannot be compared"):
        drift(known, UnsureCount(0, (0, 0)))
    assert drift(Calibration(10, (0,), 0.1, 0.9, True), UnsureCount(5, (0,))) == 1.0
