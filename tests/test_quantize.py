"""Scheme w8: codes and scales, the integer form, its exact reference, and agreement with float32."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import gigamlp as gm
from gigamlp.activations import ACTIVATIONS, apply_activation
from gigamlp.errors import DataError, InvalidInput, ModelError, Unsupported
from gigamlp.quantize import HALF_LIMIT, Agreement, agreement, integer_form, quantise
from tests.models import mlps
from tests.reference_int8 import WIDTHS, reference_mlp, test_accuracy

SPANS = {"uint8": (0, 255), "int8": (-128, 127)}
EXACT = ("relu", "identity")


def make_mlp(rng, widths=(20, 6, 3), activations=None, **more):
    activations = activations or ["relu"] * (len(widths) - 2) + ["identity"]
    layers = [
        gm.Layer(rng.normal(size=(out, width)), rng.normal(size=out), activation)
        for (width, out), activation in zip(pairwise(widths), activations, strict=True)
    ]
    return gm.MLP(layers, **more)


def make_rows(rng, mlp, dtype="uint8", count=7):
    low, high = SPANS[dtype]
    rows = rng.integers(low, high + 1, (count, mlp.features)).astype(dtype)
    rows[:2] = [[low], [high]][: len(rows)]
    return rows


def one(weight, bias=None, activation="identity", **more):
    """An MLP of one layer."""
    return gm.MLP([gm.Layer(weight, bias, activation)], **more)


def effective(mlp):
    """The first layer's weights as they multiply raw features, float64."""
    return mlp.layers[0].weight.astype(np.float64) * np.asarray(mlp.input_scale, np.float64)


# ---- codes and scales -----------------------------------------------------------------------------------------------


@given(mlps())
def test_codes_are_the_nearest_multiples_of_the_scale(mlp):
    mlp = quantise(mlp.with_(scheme=None))
    codes, scale = mlp.scheme.arrays["codes.0"].astype(np.int64), mlp.scheme.arrays["scale.0"].astype(np.float64)
    weight = effective(mlp)
    # half a step, and at code 127 the rounding of the scale to float32
    assert (np.abs(weight - codes * scale[:, None]) <= scale[:, None] * (0.5 + 127 * 2.0**-24)).all()
    np.testing.assert_array_equal(np.abs(codes).max(axis=1), np.where(np.abs(weight).max(axis=1) > 0, 127, 0))


def test_the_rule_on_numbers_worked_by_hand():
    mlp = quantise(one([[254.0, 1.0, 3.0, -5.0, 2.2], [0, 0, 0, 0, 0], [-1, 0.5, 0, 0, 0]]))
    # the scale of the first output is 2: 0.5 and 1.5 go to the even neighbours 0 and 2, -2.5 to -2
    assert mlp.scheme.arrays["codes.0"].tolist() == [[127, 0, 2, -2, 1], [0] * 5, [-127, 64, 0, 0, 0]]
    assert mlp.scheme.arrays["scale.0"].tolist() == [2.0, 1.0, np.float32(1 / 127)]
    assert mlp.layers[0].weight[0, 1] == 1.0  # the float weights stay


def test_the_input_scale_counts():
    mlp = quantise(one([[1.0, 1.0]], input_scale=[2.0, -1.0]))
    assert mlp.scheme.arrays["codes.0"].tolist() == [[127, -64]]
    assert mlp.scheme.arrays["scale.0"] == np.float32(2 / 127)


def test_a_scheme_on_the_mlp_is_used_as_it_is():
    codes, scale = np.array([[3, -128, 0]]), np.array([0.7])
    mlp = one([[1.0, 2.0, 3.0]], scheme=gm.Scheme("w8", {"codes.0": codes, "scale.0": scale}))
    assert quantise(mlp) == mlp
    form = integer_form(mlp)
    np.testing.assert_array_equal(form.codes, codes)
    np.testing.assert_array_equal(form.scale, scale.astype(np.float32))


def test_what_a_scheme_lacks_is_derived():
    weight = np.array([[50.0, -10.0], [4.0, 8.0]])
    only_scale = one(weight, scheme=gm.Scheme("w8", {"scale.0": [1.0, 0.01]}))
    assert integer_form(only_scale).codes.tolist() == [[50, -10], [127, 127]]  # what leaves the range is clipped
    only_codes = one(weight, scheme=gm.Scheme("w8", {"codes.0": [[100, -20], [1, 2]]}))
    assert integer_form(only_codes).scale.tolist() == [0.5, 4.0]  # the largest code stands for the largest weight
    assert quantise(one(weight, scheme=gm.Scheme("w8"))) == quantise(one(weight))


def test_tiny_weights_keep_a_normal_scale():
    tiny = float(np.finfo(np.float32).tiny)
    form = integer_form(one([[tiny * 10, -tiny]]))
    assert (form.codes.tolist(), form.scale.tolist()) == ([[10, -1]], [tiny])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: quantise(one([[1.0]]), "w4"), InvalidInput, "unknown quantisation scheme 'w4'; known: w8, w8a8, w7"),
        (lambda: quantise(one([[1.0]]), calibration=np.zeros((0, 1))), gm.errors.DataError, "at least one row"),
        (lambda: quantise(one([[1.0]], scheme=gm.Scheme("w8a8"))), InvalidInput, r"with_\(scheme=None\)"),
        (lambda: integer_form(one([[1.0]], scheme=gm.Scheme("w8a8"))), Unsupported, "has the scheme 'w8a8'"),
        (lambda: integer_form(one([[1.0]]), "float32"), Unsupported, "must be uint8 or int8, not float32"),
        (
            lambda: quantise(one([[1.0]], scheme=gm.Scheme("w8", {"hidden_scale.0": [1.0]}))),
            Unsupported,
            "no use for hidden_scale.0",
        ),
        (
            lambda: quantise(one([[1.0], [0.0]], scheme=gm.Scheme("w8", {"codes.0": [[1], [1]]}))),
            ModelError,
            "output 1 of layer 0 has weights that are all 0",
        ),
        (
            lambda: quantise(one([[1.0], [2.0]], scheme=gm.Scheme("w8", {"codes.0": [[0], [1]]}))),
            ModelError,
            "output 0 of layer 0 has codes that are all 0",
        ),
        (lambda: quantise(one([[1e38]], input_scale=1e5)), Unsupported, "reach 1e.43: too large a scale"),
        (lambda: integer_form(one([[1e38]], input_offset=1e5)), Unsupported, "a bias of 1e.43 in layer 0"),
        (lambda: integer_form(one([[2e36]], [-3e38])), Unsupported, r"layer 0 can reach 8\..*e.38, beyond float32"),
        (lambda: integer_form(one([[1e37]])), Unsupported, r"layer 0 can reach 2\..*e.39, beyond float32"),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_sums_that_can_overflow_are_refused():
    fits = one(np.ones((1, 66_311)))
    acc = integer_form(fits).reference_accumulators(np.full((1, 66_311), 255, np.uint8))
    assert acc.tolist() == [[66_311 * 127 * 255]]
    with pytest.raises(Unsupported, match=r"66,312 features .* at most 66,311 fit"):
        quantise(one(np.ones((1, 66_312))))
    lowest = gm.Scheme("w8", {"codes.0": np.full((1, 66_311), -128), "scale.0": [1.0]})
    with pytest.raises(Unsupported, match=r"codes up to 128 .* at most 65,793 fit"):
        integer_form(fits.with_(scheme=lowest))


def test_the_file_keeps_codes_and_scales(tmp_path):
    mlp = quantise(make_mlp(np.random.default_rng(0)))
    for dtype in ("float32", "float16"):  # float16 rounds the weights, not what is derived from them
        mlp.save(tmp_path / "m.safetensors", dtype)
        loaded = gm.load(tmp_path / "m.safetensors")
        for key in ("codes.0", "scale.0"):
            np.testing.assert_array_equal(loaded.scheme.arrays[key], mlp.scheme.arrays[key], strict=True)


# ---- the first layer ------------------------------------------------------------------------------------------------


def first_layer_forms(mlp, dtype):
    try:
        return integer_form(mlp.with_(scheme=None), dtype)
    except Unsupported:
        assume(False)


@settings(max_examples=150)
@given(mlps(), st.sampled_from(["uint8", "int8"]), st.integers(0, 2**32))
def test_accumulators_are_exact(mlp, dtype, seed):
    form = first_layer_forms(mlp, dtype)
    x = make_rows(np.random.default_rng(seed), mlp, dtype)
    columns = [c for start, stop in mlp.columns or ((0, mlp.features),) for c in range(start, stop)]
    expected = [
        [sum(int(row[c]) * int(q) for c, q in zip(columns, codes, strict=True)) for codes in form.codes] for row in x
    ]
    acc = form.reference_accumulators(x)
    assert acc.dtype == np.int32
    np.testing.assert_array_equal(acc, np.array(expected, np.int64))


def test_a_kernel_may_read_int8_rows_as_bytes():
    rng = np.random.default_rng(1)
    mlp = make_mlp(rng, (50, 9, 2))
    form = integer_form(mlp, "int8")
    x = make_rows(rng, mlp, "int8", 40)
    u = (x.view(np.uint8) ^ 0x80).astype(np.int32)
    assert form.code_sums.dtype == np.int32
    np.testing.assert_array_equal(
        u @ form.codes.T.astype(np.int32) - 128 * form.code_sums, form.reference_accumulators(x)
    )


def test_many_rows_are_many_single_rows():
    rng = np.random.default_rng(2)
    mlp = make_mlp(rng, (5, 4, 3))
    form = integer_form(mlp)
    x = make_rows(rng, mlp, count=4096 + 3)  # more than one chunk
    for method in (form.reference_accumulators, form.reference_hidden, form.reference_logits):
        at = [0, 4095, 4096, 4098]
        np.testing.assert_array_equal(method(x)[at], np.concatenate([method(x[i : i + 1]) for i in at]))
        assert method(x[:0]).shape == (0, method(x).shape[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_hidden_values_take_two_roundings(activation):
    rng = np.random.default_rng(3)
    mlp = make_mlp(rng, (784, 16, 3), [activation, "identity"], input_scale=1 / 255, input_offset=rng.normal(size=784))
    form = integer_form(mlp)
    x = make_rows(rng, mlp, count=200)
    acc = form.reference_accumulators(x).astype(np.float32)
    product = np.array([[np.float32(a * s) for a, s in zip(row, form.scale, strict=True)] for row in acc])
    two = product + form.bias
    hidden = form.reference_hidden(x)
    assert hidden.dtype == np.float32
    np.testing.assert_array_equal(hidden, apply_activation(activation, two))
    # with one rounding (a fused multiply-add) other bits come out: the product is exact in float64
    fused = (acc.astype(np.float64) * form.scale.astype(np.float64) + form.bias).astype(np.float32)
    assert (fused != two).any()


def test_large_sums_are_rounded_to_float32_first():
    codes = np.full((1, 600), 127)
    codes[0, 0] = 126
    mlp = one(codes, scheme=gm.Scheme("w8", {"codes.0": codes, "scale.0": [1.0]}))
    x = np.full((1, 600), 255, np.uint8)
    x[0, 0] = 253
    acc = integer_form(mlp).reference_accumulators(x)
    assert acc[0, 0] == 599 * 127 * 255 + 126 * 253  # 19,430,493: odd, above 2**24
    assert integer_form(mlp).reference_logits(x)[0, 0] == np.float32(acc[0, 0]) != acc[0, 0]


@given(mlps())
def test_the_bias_holds_the_offset(mlp):
    form = first_layer_forms(mlp, "uint8")
    assume(form.exponents[0] == 0)
    first = mlp.layers[0]
    offset = np.broadcast_to(np.float32(mlp.input_offset), first.weight.shape[1:]).astype(np.float64)
    expected = (first.weight * offset).sum(axis=1) + (0 if first.bias is None else first.bias)
    # float64 sums in another order may round to a neighbouring float32
    np.testing.assert_allclose(form.bias, expected, rtol=2**-23, atol=1e-15)


def test_a_tiny_code_error_is_all_that_separates_it_from_float64():
    rng = np.random.default_rng(4)
    for dtype in SPANS:
        mlp = make_mlp(rng, (300, 30, 5), input_scale=rng.uniform(0.001, 0.01, 300), input_offset=rng.normal(size=300))
        x = make_rows(rng, mlp, dtype, 100)
        form = integer_form(mlp, dtype)
        exact = effective(mlp) @ x.T.astype(np.float64)
        step = np.abs(x.astype(np.float64)).sum(axis=1) * form.scale[:, None] / 2  # half a code for each input
        acc = form.reference_accumulators(x).T * form.scale[:, None].astype(np.float64)
        assert (np.abs(acc - exact) <= step + 1e-6 * np.abs(exact).max()).all()


# ---- later layers ---------------------------------------------------------------------------------------------------


def half_forward(form, x):
    """The definition once more, value by value in Python numbers."""
    out = []
    for row in form.reference_hidden(x):
        h = row
        for layer in form.layers:
            operands = [float(np.float16(v)) for v in h]
            z = [
                sum(a * float(np.float16(w)) for a, w in zip(operands, weights, strict=True)) + float(b)
                for weights, b in zip(layer.weight, layer.bias, strict=True)
            ]
            h = apply_activation(layer.activation, np.array(z, np.float32))
        out.append(h)
    return np.array(out)


@settings(max_examples=60)
@given(mlps(max_width=9), st.sampled_from(["uint8", "int8"]), st.integers(0, 2**32))
def test_logits_are_those_of_the_definition(mlp, dtype, seed):
    form = first_layer_forms(mlp, dtype)
    x = make_rows(np.random.default_rng(seed), mlp, dtype, 3)
    logits = form.reference_logits(x)
    assert logits.dtype == np.float32
    assert logits.shape == (3, mlp.outputs)
    # sums in another order: a last place of float32, or of float16 in a layer between
    scale = max(1.0, float(np.abs(logits).max()))
    np.testing.assert_allclose(logits, half_forward(form, x), rtol=2e-3, atol=2e-3 * scale)
    if len(mlp.layers) <= 2:
        np.testing.assert_allclose(logits, half_forward(form, x), rtol=1e-5, atol=1e-6 * scale)


def test_operands_are_rounded_to_float16():
    mlp = gm.MLP([gm.Layer([[127.0]], [0.0], "relu"), gm.Layer([[1 + 2.0**-12]])])
    scheme = gm.Scheme("w8", {"codes.0": [[127]], "scale.0": [1.0]})
    form = integer_form(mlp.with_(scheme=scheme))
    # 127 * 33 = 4191 is odd and above 2048 * 2, where float16 has steps of 4; the weight rounds to 1
    assert form.reference_hidden(np.array([[33]], np.uint8)).tolist() == [[4191.0]]
    assert form.reference_logits(np.array([[33]], np.uint8)).tolist() == [[4192.0]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_deep_networks_come_close_to_float64(activation):
    rng = np.random.default_rng(5)
    widths = (64, 32, 24, 16, 10)
    layers = [
        gm.Layer(rng.normal(size=(out, width)) / np.sqrt(width), rng.normal(size=out), activation)
        for width, out in pairwise(widths)
    ]
    mlp = gm.MLP(layers, input_scale=1 / 64, input_offset=-2.0)
    x = make_rows(rng, mlp, count=300)
    reference = mlp.reference_logits(x)
    error = np.linalg.norm(integer_form(mlp).reference_logits(x) - reference) / np.linalg.norm(reference)
    assert 1e-5 < error < 2e-2  # 8-bit weights: each is off by up to 1/254 of the largest


# ---- staying in float16's range -------------------------------------------------------------------------------------


def unfolded(mlp, form):
    """The same codes in float64 without float16's range or roundings."""
    exact = mlp.with_(scheme=None, input_scale=1.0, input_offset=0.0)
    scale = np.ldexp(form.scale.astype(np.float64), form.exponents[0])
    first = gm.Layer(form.codes * scale[:, None], mlp.layers[0].bias, form.activation)
    return exact.with_(layers=(first, *exact.layers[1:]))


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("dtype", SPANS)
def test_large_hidden_values_are_scaled_by_a_power_of_two(activation, dtype):
    rng = np.random.default_rng(6)
    mlp = make_mlp(rng, (784, 32, 24, 10), [activation, activation, "identity"])  # raw bytes: hidden in the thousands
    first, second, last = mlp.layers
    first = gm.Layer(first.weight * 40, first.bias * 1e5, activation)
    second = gm.Layer(second.weight, second.bias * 1e5, activation)
    mlp = mlp.with_(layers=(first, second, last))
    x = make_rows(rng, mlp, dtype, 300)
    form = integer_form(mlp, dtype)
    assert form.exponents[0] >= 5
    assert form.exponents[-1] == 0
    assert max(form.bounds[:-1]) <= HALF_LIMIT
    assert form.bounds[0] > HALF_LIMIT / 2  # no more than it takes
    plain = unfolded(mlp, form)
    hidden = np.ldexp(form.reference_hidden(x), form.exponents[0])
    np.testing.assert_array_equal(
        hidden,  # exact: the same bits but for the exponent
        apply_activation(
            activation,
            form.reference_accumulators(x).astype(np.float32) * np.ldexp(form.scale, form.exponents[0]) + first.bias,
        ),
    )
    assert np.abs(hidden).max() > 65504  # float16 would have been infinite
    reference = plain.reference_logits(x)
    error = np.linalg.norm(form.reference_logits(x) - reference) / np.linalg.norm(reference)
    assert error < 1e-3


def test_small_hidden_values_are_left_alone():
    form = integer_form(make_mlp(np.random.default_rng(7), (20, 6, 5, 3), input_scale=1 / 255))
    assert form.exponents == (0, 0, 0)


def test_the_last_layer_is_not_scaled():
    form = integer_form(one([[1e6]]))
    assert form.exponents == (0,)
    assert form.reference_logits(np.array([[200]], np.uint8))[0, 0] == pytest.approx(2e8)
    assert form.layers == ()


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in (*EXACT, "tanh", "logistic")])
def test_what_cannot_be_scaled_is_refused_with_the_numbers(activation):
    mlp = gm.MLP([gm.Layer([[300.0]], None, activation), gm.Layer([[1.0]])])
    with pytest.raises(Unsupported, match=rf"layer 0 can reach 76,\d\d\d, more than the 60,000 .* {activation} cannot"):
        integer_form(mlp)
    assert integer_form(mlp, "int8").exponents == (0, 0)  # 127 * 300 = 38,100, or 128 * 300 below 0, fits


def test_bounds_hold_after_rounding_to_float32():
    form = integer_form(gm.MLP([gm.Layer([[1.0]], [-237.8], "logistic")]))  # logistic(17.2) is 1 in float32
    assert form.reference_hidden(np.array([[255]], np.uint8))[0, 0] <= form.bounds[0]


@pytest.mark.parametrize("activation", ["tanh", "logistic"])
def test_what_is_bounded_needs_no_scaling(activation):
    mlp = gm.MLP([gm.Layer([[1e9]], None, activation), gm.Layer([[1.0]])])
    assert integer_form(mlp).exponents == (0, 0)


def test_weights_beyond_float16_are_refused():
    mlp = gm.MLP([gm.Layer([[1.0]], None, "relu"), gm.Layer([[70_000.0]])])
    with pytest.raises(Unsupported, match=r"layer 1 has a weight of 70,000 .* float16 ends at 65,504"):
        integer_form(mlp)
    mlp = gm.MLP([gm.Layer([[1e5]], None, "relu"), gm.Layer([[500.0]])])  # fits, but not times 2**9
    with pytest.raises(Unsupported, match="layer 1 has a weight of 256,000"):
        integer_form(mlp)
    mlp = gm.MLP([gm.Layer([[1.0]], None, "relu"), gm.Layer([[1e-6]])])
    with pytest.raises(Unsupported, match=r"layer 1's largest weight is 1\.00e-06, below float16's normal range"):
        integer_form(mlp)
    mlp = gm.MLP([gm.Layer([[1e5]], None, "relu"), gm.Layer([[1e-6]])])  # the power of two lifts it
    assert integer_form(mlp).layers[0].weight[0, 0] == np.float32(1e-6) * 2**9
    gm.MLP([gm.Layer([[1.0]], None, "relu"), gm.Layer([[0.0]])])


@settings(max_examples=150)
@given(mlps(), st.sampled_from(["uint8", "int8"]), st.integers(0, 2**32), st.integers(0, 12))
@example(one([[1.0, -1.0]]), "int8", 0, 0)
def test_no_row_leaves_the_bounds(mlp, dtype, seed, power):
    larger = [gm.Layer(layer.weight * 2.0**power, layer.bias, layer.activation) for layer in mlp.layers]
    form = first_layer_forms(mlp.with_(layers=larger), dtype)
    low, high = SPANS[dtype]
    # for each output of the first layer the rows that make it largest and smallest, and any rows
    extreme = np.where(form.codes > 0, high, low)
    full = np.zeros((2 * len(extreme), mlp.features), dtype)
    begin = 0
    for start, stop in mlp.columns or ((0, mlp.features),):
        part = extreme[:, begin : begin + stop - start]
        full[: len(part), start:stop], full[len(part) :, start:stop] = part, high + low - part
        begin += stop - start
    x = np.concatenate([full, make_rows(np.random.default_rng(seed), mlp, dtype)])
    assert np.abs(form.reference_hidden(x)).max() <= form.bounds[0]
    assert np.abs(form.reference_logits(x)).max() <= form.bounds[-1]
    assert max(form.bounds[:-1], default=0.0) <= HALF_LIMIT


def test_bounds_are_tight_where_they_can_be():
    mlp = gm.MLP([gm.Layer([[2.0, -1.0]], [3.0], "relu"), gm.Layer([[-2.0]], [1.0])])
    form = integer_form(mlp)
    assert form.bounds[0] == pytest.approx(2 * 255 + 3, rel=0.01)
    assert form.bounds[1] == pytest.approx(2 * 513 - 1, rel=0.02)
    assert integer_form(mlp, "int8").bounds[0] == pytest.approx(2 * 127 + 128 + 3, rel=0.01)
    negative = gm.MLP([gm.Layer([[-2.0]], [-3.0], "silu"), gm.Layer([[1.0]])])
    assert integer_form(negative).bounds[0] <= 0.3


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reference_accumulators", "reference_hidden", "reference_logits"])
def test_rows_of_another_kind_are_refused(method):
    form = integer_form(one([[1.0, 2.0]]))
    run = getattr(form, method)
    with pytest.raises(InvalidInput, match=r"rows are int64, .* takes uint8; .*0\.\.255, x\.astype\(np\.uint8\)"):
        run([[1, 2]])
    with pytest.raises(InvalidInput, match="rows are int8"):
        run(np.ones((1, 2), np.int8))
    with pytest.raises(InvalidInput, match="rows have 3 features"):
        run(np.ones((1, 3), np.uint8))


def test_the_form_cannot_be_changed():
    form = integer_form(make_mlp(np.random.default_rng(8)))
    for array in (form.codes, form.scale, form.bias, form.code_sums, *(layer.weight for layer in form.layers)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(AttributeError):
        form.codes = None
    assert "784" not in repr(form)


# ---- agreement ------------------------------------------------------------------------------------------------------


def coarse(labels=None, **more):
    """Two classes whose codes say something else than the weights: class 1 from the second feature on."""
    scheme = gm.Scheme("w8", {"codes.0": [[1, 0], [0, 2]], "scale.0": [1.0, 1.0]})
    return one([[1.0, 0.0], [0.0, 1.0]], classes=labels, scheme=scheme, **more)


X = np.array([[5, 1], [3, 2], [3, 4], [2, 1], [7, 7]], np.uint8)  # float32 says 0 0 1 0 0, the codes 0 1 1 0 1


def test_agreement_counts_rows():
    found = agreement(coarse(), X)
    assert found == Agreement(5, 2)  # 2 against 2 * 1 is a tie: the lower index, as in float32
    assert found.share == pytest.approx(0.4)
    found = agreement(coarse(["a", "b"]), X, ["a", "b", "b", "b", "a"])
    assert found == Agreement(5, 2, accuracy_float32=0.6, accuracy_integer=0.6)
    assert agreement(coarse(["a", "b"]), X, np.array(["a", "b", "b", "a", "b"], object)).accuracy_integer == 1.0


def test_agreement_of_every_head():
    assert agreement(coarse(head="multilabel").with_(classes=None), X, (X > 2).astype(int)).differing == 0
    weights = gm.Scheme("w8", {"codes.0": [[1, -2]], "scale.0": [1.0]})
    sigmoid = one([[1.0, -1.0]], head="sigmoid", scheme=weights, classes=["no", "yes"])
    assert agreement(sigmoid, X, ["yes", "no", "no", "no", "no"]) == Agreement(5, 2, 0.6, 1.0)


def test_a_multilabel_row_differs_if_one_label_does():
    scheme = gm.Scheme("w8", {"codes.0": [[1, 0], [0, -1]], "scale.0": [1.0, 1.0]})
    mlp = one([[1.0, 0.0], [0.0, 1.0]], [-2.5, 0.0], head="multilabel", scheme=scheme)
    truth = np.array([[1, 1], [1, 1], [1, 0], [0, 0], [1, 0]])
    assert agreement(mlp, X, truth) == Agreement(5, 5, 0.4, 0.6)


def test_int8_rows_agree_too():
    rng = np.random.default_rng(9)
    mlp = make_mlp(rng, (30, 8, 3))
    assert agreement(mlp, make_rows(rng, mlp, "int8", 500)).share < 0.05


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: agreement(coarse(), X.astype(np.float32)), InvalidInput, "must be uint8 or int8, got float32"),
        (lambda: agreement(coarse(), X[:0]), DataError, "at least one row"),
        (lambda: agreement(coarse(), X, [0, 1]), DataError, r"labels have shape \[2\], expected \[5\]"),
        (lambda: agreement(coarse(), X, [0, 1, 2, 0, 0]), DataError, r"label 2 is not one of \[0, 1\]"),
        (lambda: agreement(coarse(), X, list("01010")), DataError, r"label '0' is not one of \[0, 1\]"),
        (lambda: agreement(coarse(["0", "1"]), X, [0, 1, 0, 0, 0]), DataError, r"label 0 is not one of \['0', '1'\]"),
        (lambda: agreement(coarse(head="regression"), X), InvalidInput, "'regression' predicts no classes"),
    ],
)
def test_what_agreement_refuses(make, error, words):
    with pytest.raises(error, match=words):
        make()


# ---- trained networks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", WIDTHS)
def test_reference_networks_have_their_accuracy(hidden):
    _, _, x, y = gm.data.load_mnist()
    mlp = reference_mlp(hidden)
    found = gm.agreement(mlp, x, y)
    assert found.accuracy_integer == pytest.approx(test_accuracy(hidden), abs=1e-6)
    assert found.accuracy_float32 == pytest.approx(test_accuracy(hidden), abs=1.01e-4)
    assert found.differing <= 1  # the weights are codes * scale, so only float16 in the second layer differs
    derived = gm.quantise(mlp.with_(scheme=None)).scheme.arrays
    np.testing.assert_array_equal(derived["codes.0"], mlp.scheme.arrays["codes.0"])
    np.testing.assert_allclose(derived["scale.0"], mlp.scheme.arrays["scale.0"], rtol=2**-22)


# ---- scales that rows choose --------------------------------------------------------------------------------------


def standardised(seed: int = 0, features: int = 30) -> tuple[gm.MLP, np.ndarray]:
    """Return what a StandardScaler makes of images: most features are common, some hardly ever set, and scaled up."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (8000, features)).astype(np.uint8)
    rare = np.arange(0, features, 3)
    x[:, rare] *= rng.random((len(x), len(rare))) < 1 / 8000
    deviation = x.std(axis=0)
    deviation[deviation == 0] = 1.0
    weight = rng.normal(size=(16, features))
    weight[:, rare] *= 0.3
    layers = [gm.Layer(weight, rng.normal(size=16), "relu"), gm.Layer(rng.normal(size=(4, 16)))]
    return gm.MLP(layers, input_scale=1 / deviation, input_offset=-x.mean(axis=0) / deviation, name="standardised"), x


@pytest.mark.parametrize("scheme", ["w8", "w8a8", "w7"])
def test_rows_choose_scales_that_keep_the_common_features(scheme):
    mlp, x = standardised()
    peak = np.abs(mlp.layers[0].weight * np.asarray(mlp.input_scale)).max(axis=1)
    plain = mlp.with_(scheme=gm.Scheme(scheme, {"scale.0": peak / (63 if scheme == "w7" else 127)}))
    before, after = (
        agreement(quantise(each, scheme, calibration=x[:4000]), x[4000:]).differing for each in (plain, mlp)
    )
    assert before > 100  # of 4,000
    assert after < before * 0.75


def test_chosen_scales_are_never_worse_over_their_rows():
    for seed in range(10):
        mlp, x = standardised(seed, features=1 + 3 * seed)
        exact = x.astype(float) @ (mlp.layers[0].weight * np.asarray(mlp.input_scale)).T.astype(float)
        errors = []
        for each in (quantise(mlp), quantise(mlp, calibration=x)):
            codes, scale = (each.scheme.arrays[key].astype(float) for key in ("codes.0", "scale.0"))
            errors.append(((x @ codes.T * scale - exact) ** 2).mean(axis=0))
        assert (errors[1] <= errors[0] * (1 + 1e-5) + 1e-12).all()


def test_features_beyond_the_gram_matrix(monkeypatch):
    mlp, x = standardised()
    dense = agreement(quantise(mlp, calibration=x[:4000]), x[4000:]).differing
    monkeypatch.setattr("gigamlp.clipping._MOST_FEATURES", 3)
    assert agreement(quantise(mlp, calibration=x[:4000]), x[4000:]).differing < 2 * dense


def test_the_tuner_finds_the_integer_form_of_a_standardised_model():
    mlp, x = standardised()
    options = {"engines": ["cpu_fused"], "max_disagreement": 0.02, "cache": False}
    plan = gm.optimize(mlp, "cpu", 256, validation=(x[4000:], None), calibration=x[:4000], **options)
    tried = [c for c in plan.candidates if c.variant.get("scheme") == "w8"]
    assert tried
    assert all(c.rejected is None for c in tried)
    scale = np.asarray(plan.hidden_ranges["scale.0"], np.float32)
    form = integer_form(mlp.with_(scheme=gm.Scheme("w8", {"scale.0": scale})))
    only = gm.Plan(plan.machine, plan.versions, plan.mlp_digest, plan.mlp_name, tuple(tried), plan.settings)
    with gm.Session(mlp, only) as session:
        np.testing.assert_array_equal(session.class_ids(x), mlp.class_ids(form.reference_logits(x)))


def test_calibration_rows_alone_let_no_inexact_scheme_through():
    mlp, x = standardised()
    plan = gm.optimize(mlp, "cpu", 256, calibration=x, engines=["cpu_fused"], cache=False)
    integer = [c for c in plan.candidates if c.variant.get("scheme") != "float32"]
    assert len(integer) > 1
    assert all(c.rejected and "logits differ from float64" in c.rejected for c in integer)
