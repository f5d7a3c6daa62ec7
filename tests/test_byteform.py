"""Schemes w8a8 and w7: ranges, codes, the byte form and its reference, worked once more in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gigamlp as gm
from gigamlp.activations import apply_activation
from gigamlp.byteform import byte_form, calibrate, with_codes
from gigamlp.errors import DataError, InvalidInput, Unsupported
from tests.models import mlps


def bare(mlp: gm.MLP) -> gm.MLP:
    return mlp.with_(scheme=None)


def drawn(mlp: gm.MLP, seed: int, count: int = 9, dtype: str = "uint8") -> np.ndarray:
    low, high = (0, 256) if dtype == "uint8" else (-128, 128)
    return np.random.default_rng(seed).integers(low, high, (count, mlp.features)).astype(dtype)


def quantised(mlp: gm.MLP, scheme: str, x: np.ndarray) -> gm.MLP:
    try:
        return gm.quantise(bare(mlp), scheme, calibration=x)
    except Unsupported:
        assume(False)
        raise


# ---- ranges ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(mlps(), st.integers(0, 2**32))
def test_ranges_take_in_all_calibration_rows(mlp: gm.MLP, seed: int) -> None:
    x = drawn(mlp, seed)
    arrays = calibrate(mlp, x)
    h = mlp.read_columns(x).astype(np.float64) * mlp.input_scale + mlp.input_offset
    for index, layer in enumerate(mlp.layers[:-1]):
        z = h @ layer.weight.T.astype(np.float64)
        h = apply_activation(layer.activation, z if layer.bias is None else z + layer.bias)
        steps = h / arrays[f"hidden_scale.{index}"].astype(np.float64) + arrays.get(f"hidden_zero.{index}", 0)
        assert steps.min() >= -1e-3
        assert steps.max() <= 255 + 1e-3
        # and do not waste half of the bytes: from the least to the largest, with 0, are more than 120 steps
        span = np.maximum(h.max(axis=0), 0) - np.minimum(h.min(axis=0), 0)
        used = span / arrays[f"hidden_scale.{index}"].astype(np.float64)
        assert (used[span > 1e-30] > 120).all()


def test_ranges_worked_by_hand() -> None:
    mlp = gm.MLP([gm.Layer([[1.0], [-1.0], [0.0]], None, "identity"), gm.Layer([[1.0, 1.0, 1.0]])])
    arrays = calibrate(mlp, [[510.0], [0.0], [-254.0]])
    # -254..510: zero point round(255 * 254 / 764) = 85, and 510 / 170 = 3 > 254 / 85
    assert arrays["hidden_scale.0"].tolist() == [3.0, 3.0, 1.0]
    assert arrays["hidden_zero.0"].tolist() == [85, 170, 0]
    relu = mlp.with_(layers=[gm.Layer(mlp.layers[0].weight, None, "relu"), mlp.layers[1]])
    assert calibrate(relu, [[510.0], [-255.0]])["hidden_scale.0"].tolist() == [2.0, 1.0, 1.0]
    assert "hidden_zero.0" not in calibrate(relu, [[510.0]])


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (np.zeros((0, 1)), DataError, "at least one row"),
        ([[np.nan]], InvalidInput, "NaN or infinite"),
        ([[1.0, 2.0]], InvalidInput, "2 features"),
    ],
)
def test_calibration_rows_that_cannot_be_used(rows: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        calibrate(gm.MLP([gm.Layer([[1.0]], None, "relu"), gm.Layer([[1.0]])]), rows)


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def f32(value: float) -> np.float32:
    return np.float32(value)


def by_hand(mlp: gm.MLP, row: np.ndarray) -> list[np.float32]:
    """The definition in docs/quantisation.md, value by value: Python integers and single float32 operations."""
    arrays = mlp.scheme.arrays
    inputs = [int(v) for v in mlp.read_columns(row[None])[0]]
    zeros = [0] * len(inputs)
    for index, layer in enumerate(mlp.layers):
        codes, scale = arrays[f"codes.{index}"], arrays[f"scale.{index}"].astype(np.float64)
        bias = np.zeros(len(codes)) if layer.bias is None else layer.bias.astype(np.float64)
        if index == 0:
            offset = np.broadcast_to(np.asarray(mlp.input_offset, np.float64), (len(inputs),))
            bias = bias + layer.weight.astype(np.float64) @ offset
        sums = [sum(int(q) * (u - z) for q, u, z in zip(line, inputs, zeros, strict=True)) for line in codes]
        if index == len(mlp.layers) - 1:
            z = np.array([f32(f32(a) * f32(s)) + f32(b) for a, s, b in zip(sums, scale, bias, strict=True)])
            return list(apply_activation(layer.activation, z.astype(np.float32)))
        step = np.broadcast_to(arrays[f"hidden_scale.{index}"].astype(np.float64), scale.shape)
        zeros = [int(v) for v in np.broadcast_to(arrays.get(f"hidden_zero.{index}", np.uint8(0)), scale.shape)]
        if layer.activation in ("relu", "identity"):
            scale, bias = scale / step, bias / step + zeros
        z = np.array([f32(f32(a) * f32(s)) + f32(b) for a, s, b in zip(sums, scale, bias, strict=True)], np.float32)
        if layer.activation not in ("relu", "identity"):
            y = apply_activation(layer.activation, z)
            z = np.array([f32(f32(v) * f32(1 / t)) + f32(q) for v, t, q in zip(y, step, zeros, strict=True)])
        inputs = [int(min(max(round(float(v)), 0), 255)) for v in z]  # Python's round goes to even too
    raise AssertionError


@settings(max_examples=120, deadline=None)
@given(mlps(max_width=7), st.sampled_from(["w8a8", "w7"]), st.sampled_from(["uint8", "int8"]), st.integers(0, 2**32))
def test_logits_are_those_of_the_definition(mlp: gm.MLP, scheme: str, dtype: str, seed: int) -> None:
    x = drawn(mlp, seed, 4, dtype)
    small = quantised(mlp, scheme, x)
    try:
        form = byte_form(small, dtype)
    except Unsupported:
        assume(False)
    want = np.array([by_hand(small, row) for row in x], np.float32)
    np.testing.assert_array_equal(form.reference_logits(x), want)


@settings(max_examples=60, deadline=None)
@given(mlps(), st.sampled_from(["w8a8", "w7"]), st.integers(0, 2**32))
def test_codes_are_within_their_bits_and_survive_a_file(mlp: gm.MLP, scheme: str, seed: int) -> None:
    from gigamlp.modelfile import pack, unpack

    small = quantised(mlp, scheme, drawn(mlp, seed))
    top = {"w8a8": 127, "w7": 63}[scheme]
    for index in range(len(mlp.layers)):
        assert np.abs(small.scheme.arrays[f"codes.{index}"].astype(int)).max() <= top
    assert gm.quantise(small, scheme) == small
    assert unpack(pack(small)) == small


def test_zero_points_keep_what_is_negative() -> None:
    layers = [gm.Layer([[1.0], [-1.0]], None, "identity"), gm.Layer([[1.0, 0.0], [0.0, 1.0]])]
    mlp = gm.quantise(gm.MLP(layers), "w8a8", calibration=[[0], [255]])
    z = byte_form(mlp).reference_logits(np.array([[0], [100], [255]], np.uint8))
    np.testing.assert_allclose(z, [[0, 0], [100, -100], [255, -255]], atol=1.1)


def test_it_stays_close_to_float32_on_digits() -> None:
    x, y, x_test, y_test = gm.data.load_mnist()
    mlp = gm.train.ridge(x[:5000], y[:5000], hidden=64, seed=0)
    for scheme, most in (("w8a8", 0.02), ("w7", 0.03)):
        small = gm.quantise(mlp, scheme, calibration=x[:2000])
        found = gm.agreement(small, x_test[:3000], y_test[:3000])
        assert found.share < most
        assert abs(found.accuracy_integer - found.accuracy_float32) < 0.01


def test_hidden_bytes_and_chunks() -> None:
    rng = np.random.default_rng(0)
    mlp = gm.MLP([gm.Layer(rng.normal(size=(5, 3)), None, "relu"), gm.Layer(rng.normal(size=(2, 5)))])
    x = rng.integers(0, 256, (4096 + 3, 3)).astype(np.uint8)
    form = byte_form(gm.quantise(mlp, "w8a8", calibration=x))
    hidden = form.reference_hidden(x)
    assert (hidden.shape, hidden.dtype, hidden.max()) == ((4099, 5), np.uint8, 255)
    assert form.reference_logits(x[:0]).shape == (0, 2)
    np.testing.assert_array_equal(form.reference_logits(x)[[0, 4098]], form.reference_logits(x[[0, 4098]]))
    with pytest.raises(InvalidInput, match=r"hidden layers are 0\.\.0, got 1"):
        form.reference_hidden(x, 1)
    with pytest.raises(InvalidInput, match="rows are int8"):
        form.reference_logits(x.astype(np.int8))


# ---- what is refused ------------------------------------------------------------------------------------------------


def two(activation: str = "relu", **more: object) -> gm.MLP:
    return gm.MLP([gm.Layer([[1.0], [2.0]], None, activation), gm.Layer([[1.0, 1.0]])], **more)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: gm.quantise(two(), "w8a8"), InvalidInput, "needs? the range of hidden layer 0: give calibration rows"),
        (lambda: byte_form(two()), Unsupported, "needs scheme 'w8a8' or 'w7', the model has None"),
        (lambda: byte_form(two(scheme=gm.Scheme("w8"))), Unsupported, "the model has 'w8'"),
        (
            lambda: with_codes(two(scheme=gm.Scheme("w7", {"codes.0": [[65], [1]]})), "w7", {}),
            Unsupported,
            r"takes codes within -64\.\.64; layer 0",
        ),
        (
            lambda: gm.quantise(two(scheme=gm.Scheme("w8a8", {"hidden_scale.0": [1.0], "hidden_zero.0": [3]})), "w8a8"),
            Unsupported,
            "is relu, whose zero points are 0",
        ),
        (
            lambda: gm.quantise(
                two(scheme=gm.Scheme("w8a8", {"hidden_scale.0": [1.0], "hidden_scale.1": [1.0]})), "w8a8"
            ),
            Unsupported,
            "no use for hidden_scale.1",
        ),
        (
            lambda: byte_form(gm.quantise(two(), "w8a8", calibration=[[1]]), "float32"),
            Unsupported,
            "must be uint8 or int8, not float32",
        ),
        (
            lambda: byte_form(
                gm.quantise(two(scheme=gm.Scheme("w8a8", {"hidden_scale.0": [1e-38], "scale.0": [1e10, 1.0]})), "w8a8")
            ),
            Unsupported,
            "layer 0's scale reaches 1e.48, beyond float32",
        ),
        (lambda: gm.Scheme("w8a8", {"hidden_zero.0": [256]}), gm.errors.ModelError, "hidden_zero.0"),
    ],
)
def test_what_is_refused(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]
