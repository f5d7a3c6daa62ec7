"""Recipes: their limits, their schedules, their defaults."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.errors import InvalidInput
from gigamlp.train import FAST, Recipe, default_recipe


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0},
        {"epochs": 1.5},
        {"batch": 0},
        {"batch": True},
        {"lr": 0},
        {"lr": float("inf")},
        {"lr": "fast"},
        {"weight_decay": -0.1},
        {"ema": 1.0},
        {"warmup": 1.0},
        {"schedule": "steps"},
        {"precision": "int8"},
    ],
)
def test_values_out_of_range_are_refused_by_name(change):
    with pytest.raises(InvalidInput, match=next(iter(change))):
        Recipe(**change)


def test_with_replaces_what_is_given():
    assert Recipe().with_(lr=0.5, epochs=None) == Recipe(lr=0.5)
    with pytest.raises(InvalidInput, match="'momentum'"):
        Recipe().with_(momentum=0.9)


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 0.9),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    ema=st.floats(0, 0.999),
)
def test_schedules_rise_to_the_peak_and_fall(steps, warmup, schedule, ema):
    rate, number, fresh = Recipe(lr=0.1, warmup=warmup, schedule=schedule, ema=ema).tables(steps)
    assert (rate > 0).all()
    assert rate.max() <= np.float32(0.1) * (1 + 1e-6)
    turn = int(rate.argmax())
    assert (np.diff(rate[: turn + 1]) >= -1e-9).all()
    assert (np.diff(rate[turn:]) <= 1e-9).all()
    assert number.tolist() == list(range(1, steps + 1))
    assert ((fresh > 0) & (fresh <= 1)).all()


@pytest.mark.parametrize("rows", [1, 2, 31, 100, 700, 5000, 55_000, 10_000_000])
@pytest.mark.parametrize("hidden", [(), (8,), (512,), (64, 64)])
def test_defaults_suit_any_number_of_rows(rows, hidden):
    recipe = default_recipe(hidden, rows)
    assert 1 <= recipe.batch <= rows
    assert recipe.epochs * (rows // recipe.batch) >= 2000
    assert recipe.batch == 256 or rows < 4096


def test_the_fast_recipe_is_a_thousand_steps_on_mnist():
    assert 500 < FAST.epochs * (60_000 // FAST.batch) < 1500
