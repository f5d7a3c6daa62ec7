"""MLPs in float16, bfloat16 and tf32: rounding bit by bit, weights, and a bound that holds for float32 sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gigamlp as gm
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.rounded import COMPUTES, round_bfloat16, round_float16, round_tf32, rounded_form
from tests.kernels.cuda import cases

DIGITS = {"float16": 11, "bfloat16": 8, "tf32": 11}
finite = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.parametrize(("rounded", "digits"), [(round_bfloat16, 8), (round_tf32, 11)])
@given(value=finite)
def test_rounding_is_to_the_nearest_number_of_the_format(rounded, digits, value):
    got = float(rounded(np.float32(value)))
    if abs(value) < 1e-36:
        return
    _, exponent = np.frexp(np.float64(value))
    step = np.ldexp(1.0, int(exponent) - digits)
    assert abs(got - value) <= step / 2
    assert got / step == int(got / step)
    assert rounded(np.float32(-value)) == -got


def test_ties():
    ulp = 2.0**-7
    assert [float(round_bfloat16(np.float32(1 + (k + 0.5) * ulp))) for k in (0, 1)] == [1.0, 1 + 2 * ulp]  # to even
    ulp = 2.0**-10
    assert [float(round_tf32(np.float32(1 + (k + 0.5) * ulp))) for k in (0, 1)] == [1 + ulp, 1 + 2 * ulp]  # away from 0
    assert round_float16(65519.0) == 65504
    assert np.isinf(round_float16(65520.0))


PAIRS = [(rows, compute) for rows, computes in COMPUTES.items() for compute in computes]


@pytest.mark.parametrize(("rows", "compute"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, 1 / 255, 1e-30, 1e20])
def test_weights_keep_their_digits_whatever_their_size(rows, compute, scale):
    mlp = cases.make([50, 12, 4], seed=3).with_(input_scale=scale)
    form = rounded_form(mlp, rows, compute)
    exact = mlp.layers[0].weight.astype(np.float64) * np.float64(np.float32(scale))
    held = np.sum([term.astype(np.float64) for term in form.terms], axis=0) * form.scale.astype(np.float64)[:, None]
    digits = DIGITS[form.format] * len(form.terms)
    small = np.abs(exact) < np.abs(exact).max(axis=1, keepdims=True) * 2.0**-10  # float16's range may end there
    assert (np.abs(held - exact) <= np.abs(exact) * 2.0 ** -min(digits, 23))[~small].all()
    assert (np.frexp(form.scale)[0] == 0.5).all()  # powers of two
    for term in form.terms:
        assert np.isfinite(term).all()
        np.testing.assert_array_equal(
            {"float16": round_float16, "bfloat16": round_bfloat16, "tf32": round_tf32}[form.format](term), term
        )


@pytest.mark.parametrize(("rows", "compute"), PAIRS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_logits_are_near_float64s(rows, compute, activation):
    mlp = cases.make([200, 30, 16, 5], activation=activation, seed=1)
    x = cases.rows_for(mlp, 400, rows)
    exact = mlp.reference_logits(x)
    got = rounded_form(mlp, rows, compute).reference_logits(x)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    # later layers are rounded to 11 digits whatever the first one is in
    assert error < (6e-3 if compute == "bfloat16" else 1e-3)
    assert compute != "bfloat16" or error > 1e-3  # or the bound says nothing


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=5),
    st.sampled_from(PAIRS),
    st.sampled_from(["relu", "gelu", "tanh", "silu", "identity"]),
    st.integers(0, 99),
)
def test_the_bound_holds_for_float32_sums_in_another_order(widths, pair, activation, seed):
    rows, compute = pair
    mlp = cases.make(widths, activation=activation, seed=seed)
    form = rounded_form(mlp, rows, compute)
    x = cases.rows_for(mlp, 30, rows, seed)
    want, bound = form.reference(x)
    order = np.random.default_rng(seed).permutation(widths[0])
    h = (round_tf32(x) if rows == "float32" else x).astype(np.float32)
    s = np.zeros((len(x), widths[1]), np.float32)
    for k in order:  # one by one: the worst way to sum
        for term in form.terms:
            s += np.outer(h[:, k], term[:, k])
    h = gm.activations.apply_activation(form.activation, s * form.scale + form.bias)
    for layer in form.layers:
        h = round_tf32(h).astype(np.float32) @ round_tf32(layer.weight).astype(np.float32).T + layer.bias
        h = gm.activations.apply_activation(layer.activation, h)
    assert (np.abs(h - want) <= bound + 1e-7).all()


def test_the_float16_later_layers_are_kept_in_range():
    mlp = gm.MLP([gm.Layer(np.full((2, 8), 3.0), None, "relu"), gm.Layer([[1.0, -0.5]])])
    form = rounded_form(mlp, "float16", later="float16")
    x = np.full((1, 8), 65504, np.float16)
    np.testing.assert_allclose(form.reference_logits(x), [[8 * 65504 * 1.5]], rtol=1e-3)
    with pytest.raises(Unsupported, match="float16"):
        rounded_form(mlp, "float32", later="float16")
    with pytest.raises(Unsupported, match="gelu cannot be scaled"):
        rounded_form(
            mlp.with_(layers=[gm.Layer(np.full((2, 8), 3.0), None, "gelu"), mlp.layers[1]]), "float16", later="float16"
        )


def test_rows_that_do_not_fit_are_refused():
    mlp = cases.make([4, 3])
    good = np.ones((2, 4))
    with pytest.raises(InvalidInput, match="float16 does not have"):
        rounded_form(mlp, "float16").reference(good.astype(np.float32) * 1.0001)
    with pytest.raises(InvalidInput, match="bfloat16 does not have"):
        rounded_form(mlp, "bfloat16").reference(good.astype(np.float32) * 1.01)
    with pytest.raises(InvalidInput, match="float64"):
        rounded_form(mlp, "float32").reference(good)
    with pytest.raises(InvalidInput, match="takes uint8"):
        rounded_form(mlp, "uint8").reference(good.astype(np.float32))
    with pytest.raises(InvalidInput, match="takes float16"):
        rounded_form(mlp, "float16").reference(good.astype(np.uint8))
    with pytest.raises(InvalidInput, match="multiplied in tf32, not 'float16'"):
        rounded_form(mlp, "float32", "float16")


def test_weights_of_no_size():
    mlp = gm.MLP([gm.Layer([[0.0, 0.0], [1e-45, 0.0]])])
    with pytest.raises(Unsupported, match="reach no more than"):
        rounded_form(mlp, "float16")
    form = rounded_form(gm.MLP([gm.Layer([[0.0, 0.0], [1.0, 0.0]], [3.0, 4.0])]), "float16")
    assert form.reference_logits(np.ones((1, 2), np.float16)).tolist() == [[3.0, 5.0]]
