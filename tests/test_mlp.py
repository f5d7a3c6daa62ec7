"""The MLP value: its forward pass against an independent float64 one, what it refuses, that nothing in it changes."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp import MLP, Layer, Scheme
from gigamlp.activations import ACTIVATIONS
from gigamlp.errors import InvalidInput, ModelError
from tests.models import mlps, rows_for

# ---- an independent forward pass: one row, one unit at a time, Python floats -------------------------------------


def gelu(v: float) -> float:
    return v * (1 + math.erf(v / math.sqrt(2))) / 2


FUNCTIONS = {
    "identity": lambda v: v,
    "relu": lambda v: max(v, 0.0),
    "tanh": math.tanh,
    "logistic": lambda v: 1 / (1 + math.exp(-v)) if v > -700 else 0.0,
    "gelu": gelu,
    "gelu_tanh": lambda v: v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "silu": lambda v: v / (1 + math.exp(-v)) if v > -700 else 0.0,
}


def slow_logits(mlp: MLP, row: Any) -> list[float]:
    wanted = range(mlp.features) if mlp.columns is None else [i for a, b in mlp.columns for i in range(a, b)]
    scale = np.broadcast_to(mlp.input_scale, mlp.features_read).tolist()
    offset = np.broadcast_to(mlp.input_offset, mlp.features_read).tolist()
    h = [float(row[i]) * s + o for i, s, o in zip(wanted, scale, offset, strict=True)]
    for layer in mlp.layers:
        bias = [0.0] * len(layer.weight) if layer.bias is None else layer.bias.tolist()
        sums = [math.fsum(w * v for w, v in zip(ws, h, strict=True)) for ws in layer.weight.tolist()]
        h = [FUNCTIONS[layer.activation](total + b) for total, b in zip(sums, bias, strict=True)]
    return h


def magnitude(mlp: MLP, x: np.ndarray) -> float:
    """Bound the size of what cancels in the forward pass: the tolerance is relative to that."""
    wanted = mlp.read_columns(np.abs(x.astype(np.float64)))
    h = wanted * np.abs(mlp.input_scale) + np.abs(mlp.input_offset)
    for layer in mlp.layers:
        h = h @ np.abs(layer.weight.T.astype(np.float64)) + (0 if layer.bias is None else np.abs(layer.bias)) + 1
    return float(h.max(initial=1.0))


@given(mlp=mlps(), data=st.data())
def test_forward_against_an_independent_one(mlp: MLP, data: st.DataObject) -> None:
    x = data.draw(rows_for(mlp))
    expected = np.array([slow_logits(mlp, row) for row in x]).reshape(len(x), mlp.outputs)
    reference, fast = mlp.reference_logits(x), mlp.logits(x)
    assert reference.dtype == np.float64
    assert fast.dtype == np.float32
    assert reference.shape == fast.shape == expected.shape
    size = magnitude(mlp, x)
    np.testing.assert_allclose(reference, expected, rtol=0, atol=1e-13 * size)
    np.testing.assert_allclose(fast, expected, rtol=0, atol=3e-6 * size)


@given(mlp=mlps(), data=st.data())
def test_answers_follow_from_the_logits(mlp: MLP, data: st.DataObject) -> None:
    x = data.draw(rows_for(mlp))
    z = mlp.logits(x)
    answers = mlp.predict(x)
    assert len(answers) == len(x)
    if mlp.head == "regression":
        np.testing.assert_array_equal(answers.reshape(z.shape), z)
        assert answers.ndim == (1 if mlp.outputs == 1 else 2)
        with pytest.raises(InvalidInput, match="regression"):
            mlp.predict_proba(x)
        with pytest.raises(InvalidInput, match="regression"):
            mlp.class_ids(z)
        return
    p = mlp.predict_proba(x)
    assert p.dtype == np.float32
    assert np.isfinite(p).all()
    assert ((p >= 0) & (p <= 1)).all()
    if mlp.head == "multilabel":
        assert answers.tolist() == [[int(v > 0) for v in row] for row in z.tolist()]
        np.testing.assert_allclose(p, [[1 / (1 + math.exp(-min(max(v, -80), 80))) for v in r] for r in z.tolist()]
                                   if len(z) else z, atol=1e-6)  # fmt: skip
        return
    assert mlp.classes is not None
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-5)
    assert p.shape == (len(x), len(mlp.classes))
    for row, answer in zip(z.tolist(), answers.tolist(), strict=True):
        index = int(row[0] > 0) if mlp.head == "sigmoid" else row.index(max(row))  # .index: ties go to the lowest
        assert answer == mlp.classes.tolist()[index]


def test_every_activation_far_out_and_near_zero() -> None:
    x = np.array([[v] for v in (-1e4, -90.0, -5.5, -1.0, -1e-3, 0.0, 1e-3, 0.7, 3.0, 20.0, 90.0, 1e4)])
    for name in ACTIVATIONS:
        mlp = MLP([Layer([[1.0]], activation=name), Layer([[1.0]])], head="regression")
        with np.errstate(all="raise", under="ignore"):
            found64, found32 = mlp.reference_logits(x)[:, 0], mlp.logits(x)[:, 0]
        expected = [FUNCTIONS[name](float(v)) for v in x[:, 0]]
        np.testing.assert_allclose(found64, expected, rtol=1e-12, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(found32, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_ties_go_to_the_lowest_index() -> None:
    mlp = MLP([Layer(np.zeros((4, 2)), [0.0, 1.0, 1.0, 0.5])], classes=["a", "b", "c", "d"])
    assert mlp.predict([[1.0, 2.0]]).tolist() == ["b"]
    sigmoid = MLP([Layer(np.zeros((1, 2)))], head="sigmoid", classes=["no", "yes"])
    assert sigmoid.predict([[1.0, 2.0]]).tolist() == ["no"]  # a logit of 0 is a tie
    np.testing.assert_array_equal(sigmoid.predict_proba([[1.0, 2.0]]), [[0.5, 0.5]])


def test_sigmoid_head() -> None:
    mlp = MLP([Layer([[1.0, -1.0]])], head="sigmoid", classes=[-1, 1])
    assert mlp.predict([[3.0, 1.0], [1.0, 3.0]]).tolist() == [1, -1]
    np.testing.assert_allclose(mlp.predict_proba([[2.0, 0.0]])[0, 1], 1 / (1 + math.exp(-2)), rtol=1e-6)
    assert np.isfinite(mlp.predict_proba([[1e30, 0.0], [-1e30, 0.0]])).all()


def test_softmax_of_large_logits() -> None:
    mlp = MLP([Layer(np.eye(3) * 1e30)])
    np.testing.assert_array_equal(mlp.predict_proba([[1.0, 2.0, 3.0]]), [[0, 0, 1]])


@pytest.mark.parametrize("rows", [0, 1, 4095, 4096, 4097, 8191])
def test_row_counts_around_the_chunk(rows: int) -> None:
    rng = np.random.default_rng(0)
    mlp = MLP([Layer(rng.normal(size=(5, 3)), activation="relu"), Layer(rng.normal(size=(2, 5)), [0.1, 0.2])])
    x = rng.integers(0, 256, (rows, 3), dtype=np.uint8)
    w, v = (layer.weight.astype(np.float64) for layer in mlp.layers)
    expected = np.maximum(x @ w.T, 0) @ v.T + np.array([0.1, 0.2], np.float32)
    np.testing.assert_allclose(mlp.reference_logits(x), expected, rtol=1e-12, atol=1e-12)
    assert mlp.predict(x).shape == (rows,)
    assert mlp.predict_proba(x).shape == (rows, 2)


def test_column_windows() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 6))
    mlp = MLP([Layer(w)], columns=[(1, 3), (5, 9)], features=12, input_scale=np.arange(1.0, 7), input_offset=0.5)
    assert (mlp.features, mlp.features_read) == (12, 6)
    x = rng.normal(size=(7, 12))
    read = x[:, [1, 2, 5, 6, 7, 8]] * np.arange(1, 7) + 0.5
    np.testing.assert_allclose(mlp.reference_logits(x), read @ np.float32(w).T.astype(float), rtol=1e-12, atol=1e-12)
    x[:, [0, 3, 4, 9, 10, 11]] = np.nan  # what is not read may be anything
    assert np.isfinite(mlp.logits(x)).all()
    assert MLP([Layer(w)], columns=[(1, 3), (5, 9)]).features == 9


def test_counts() -> None:
    mlp = MLP([Layer(np.ones((5, 3)), np.ones(5)), Layer(np.ones((4, 5))), Layer(np.ones((2, 4)), np.ones(2))])
    assert (mlp.hidden, mlp.outputs, mlp.macs, mlp.parameters) == ((5, 4), 2, 15 + 20 + 8, 15 + 5 + 20 + 8 + 2)


# ---- rows that are refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros(3), r"rows must have shape \[n, 3\], got \[3\]; one row is x\[None, :\]"),
        (np.zeros((2, 3, 1)), r"got \[2, 3, 1\]; images are x.reshape"),
        (np.zeros((2, 4)), r"rows have 4 features, 'net' takes 3"),
        (np.zeros((0, 4)), r"rows have 4 features"),
        (np.zeros((2, 3), complex), "rows must be numbers, got dtype complex128"),
        ([["a", "b", "c"]], "rows must be numbers, got dtype <U1"),
        ([[1, 2, None]], "rows must be numbers, got dtype object"),
        ([[1, 2, 3], [1, 2]], r"rows must have shape \[n, 3\] and be numbers"),
        (3.0, r"got \[\]"),
    ],
)
def test_rows_that_are_refused(rows: Any, message: str) -> None:
    mlp = MLP([Layer(np.ones((2, 3)))], name="net")
    for method in (mlp.logits, mlp.reference_logits, mlp.predict, mlp.predict_proba):
        with pytest.raises(InvalidInput, match=message):
            method(rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 4095, 4096, 5000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_first_row_that_is_not_finite_is_named(bad: float, row: int, dtype: type) -> None:
    x = np.zeros((5001, 3), dtype)
    x[row, 1] = bad
    x[5000, 2] = bad
    with pytest.raises(InvalidInput, match=f"row {row} holds NaN or infinite values"):
        MLP([Layer(np.ones((2, 3)))]).predict(x)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i2", ">i2", "<u8", "<f2", ">f4", "<f8", "g"])
def test_every_number_dtype_and_layout_is_read(dtype: str) -> None:
    mlp = MLP([Layer([[1.0, 2.0], [3.0, 5.0]])])
    x = np.array([[1, 0], [1, 1], [0, 1]], dtype)
    for rows in (x, np.asfortranarray(x), x[::-1][::-1], x.tolist()):
        np.testing.assert_array_equal(mlp.logits(rows), [[1, 3], [3, 8], [2, 5]])


# ---- MLPs that are refused ---------------------------------------------------------------------------------------

ONE = Layer(np.ones((2, 3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layer(np.ones(3)), r"shape \[out, in\] with both > 0, got \[3\]"),
        (lambda: Layer(np.ones((2, 3, 1))), r"got \[2, 3, 1\]"),
        (lambda: Layer(np.ones((0, 3))), r"got \[0, 3\]"),
        (lambda: Layer(np.ones((3, 0))), r"got \[3, 0\]"),
        (lambda: Layer([[1.0, 2.0], [3.0]]), "layer weight cannot be read as float32"),
        (lambda: Layer([["1", "2"]]), "layer weight cannot be read as float32: it is <U1"),
        (lambda: Layer([[1 + 2j]]), "layer weight cannot be read as float32: it is complex128"),
        (lambda: Layer([[None]]), "layer weight cannot be read as float32: it is object"),
        (lambda: Layer([[np.nan]]), "layer weight holds NaN or infinite values"),
        (lambda: Layer([[1e300]]), "layer weight holds NaN or infinite values"),
        (lambda: Layer([[1.0]], [np.inf]), "layer bias holds NaN or infinite values"),
        (lambda: Layer([[1.0]], [1.0, 2.0]), r"layer bias must have shape \[1\], got \[2\]"),
        (lambda: Layer([[1.0]], 1.0), r"layer bias must have shape \[1\], got \[\]"),
        (lambda: Layer([[1.0]], activation="swish"), "unknown activation 'swish'; known: identity, relu"),
        (lambda: Layer([[1.0]], activation=["relu"]), "unknown activation"),
        (lambda: Layer([[1.0]], activation=None), "unknown activation None"),
        (lambda: MLP([]), "at least one layer"),
        (lambda: MLP([np.ones((2, 3))]), "layer 0 is a ndarray, not a Layer"),
        (lambda: MLP([ONE, ONE]), "layer 1 takes 3 inputs, but layer 0 gives 2"),
        (lambda: MLP([ONE], features=4), "features=4, but the first layer reads 3"),
        (lambda: MLP([ONE], input_scale=[1.0, 2.0]), r"input_scale must be one number or have shape \[3\], got \[2\]"),
        (lambda: MLP([ONE], input_offset=np.ones((1, 3))), r"input_offset must be one number .* got \[1, 3\]"),
        (lambda: MLP([ONE], input_scale=np.nan), "input_scale holds NaN"),
        (lambda: MLP([ONE], input_offset=[0, 1, np.inf]), "input_offset holds NaN or infinite"),
        (lambda: MLP([ONE], head="argmax"), "unknown head 'argmax'; known: softmax"),
        (lambda: MLP([ONE], head="sigmoid"), "head 'sigmoid' needs exactly one logit, the last layer has 2"),
        (lambda: MLP([ONE], head="regression", classes=[0, 1]), "head 'regression' has no classes"),
        (lambda: MLP([ONE], classes=[0]), "1 classes for 2 outputs"),
        (lambda: MLP([ONE], classes=[0, 1, 2]), "3 classes for 2 outputs"),
        (lambda: MLP([ONE], classes=[7, 7]), "classes must differ"),
        (lambda: MLP([ONE], classes=[0.0, 1.0]), "classes must be a flat sequence of integers or of strings"),
        (lambda: MLP([ONE], classes=[0, "1"]), "classes must be a flat sequence of integers or of strings"),
        (lambda: MLP([ONE], classes=[[0, 1]]), "classes must be a flat sequence"),
        (lambda: MLP([ONE], classes=[[0], [1, 2]]), "classes must be a flat sequence"),
        (lambda: MLP([ONE], classes=[None, 1]), "classes must be a flat sequence"),
        (lambda: MLP([ONE], classes=np.array([0, 2**63], np.uint64)), "integer classes must fit in int64"),
        (lambda: MLP([ONE], classes=[0, 2**70]), "classes must be a flat sequence"),
        (lambda: MLP([ONE], columns=[(0, 2)]), "columns hold 2 features, but the first layer reads 3"),
        (lambda: MLP([ONE], columns=[]), "columns hold 0 features"),
        (lambda: MLP([ONE], columns=[(2, 4), (0, 1)]), r"sorted, disjoint, non-empty runs; \(0, 1\) is not"),
        (lambda: MLP([ONE], columns=[(0, 2), (1, 2)]), r"\(1, 2\) is not"),
        (lambda: MLP([ONE], columns=[(0, 3), (4, 4)]), r"\(4, 4\) is not"),
        (lambda: MLP([ONE], columns=[(-1, 2)]), r"\(-1, 2\) is not"),
        (lambda: MLP([ONE], columns=[(0, 3.5)]), r"columns must be pairs .*all whole"),
        (lambda: MLP([ONE], columns=[(0, math.inf)]), r"columns must be pairs"),
        (lambda: MLP([ONE], columns=[(0, 1, 2)]), r"columns must be pairs"),
        (lambda: MLP([ONE], columns=3), r"columns must be pairs"),
        (lambda: MLP([ONE], columns=[(0, 3)], features=2), "columns end at 3, past the row width 2"),
        (lambda: MLP([ONE], columns=[(0, 3)], features=4.5), "all whole"),
        (lambda: MLP([ONE], columns=[(0, 3)], features=2**31), "2,147,483,648 features is wider than 2,147,483,647"),
        (lambda: MLP([ONE], name=""), "non-empty string"),
        (lambda: MLP([ONE], name=7), "non-empty string"),
        (lambda: Scheme("w4"), "unknown quantisation scheme 'w4'; known: w8, w8a8, w7"),
        (lambda: Scheme("w8", {"scales.0": [1.0]}), r"unknown scheme array 'scales\.0'"),
        (lambda: Scheme("w8", {"scale.x": [1.0]}), "unknown scheme array"),
        (lambda: Scheme("w8", {"scale.00": [1.0]}), "unknown scheme array"),
        (lambda: Scheme("w8", {"scale." + "9" * 5000: [1.0]}), "unknown scheme array"),
        (lambda: Scheme("w8", {"scale.0": [np.nan]}), "scheme array scale.0 holds NaN"),
        (lambda: Scheme("w8", {"codes.0": [[300]]}), "codes.0 holds values that are not whole numbers .* int8"),
        (lambda: Scheme("w8", {"codes.0": np.array([[0.5]])}), "codes.0 holds values that are not whole"),
        (lambda: MLP([ONE], scheme=Scheme("w8", {"scale.1": [1.0, 1.0]})), "names layer 1, but there are 1 layers"),
        (lambda: MLP([ONE], scheme=Scheme("w8", {"scale.0": [1.0]})), r"scale.0 has shape \[1\], expected \[2\]"),
        (lambda: MLP([ONE], scheme=Scheme("w8", {"codes.0": np.ones((3, 2))})), r"shape \[3, 2\], expected \[2, 3\]"),
        (lambda: MLP([ONE], scheme=Scheme("w8", {"scale.0": [1.0, 0.0]})), "scale.0 must be positive"),
        (lambda: MLP([ONE], scheme=Scheme("w8a8", {"hidden_scale.0": [-1.0]})), "hidden_scale.0 must be positive"),
    ],
)
def test_malformed_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make()


# ---- immutability, identity --------------------------------------------------------------------------------------


@given(mlp=mlps())
def test_nothing_in_it_changes(mlp: MLP) -> None:
    arrays = [a for layer in mlp.layers for a in (layer.weight, layer.bias)] + [mlp.classes]
    arrays += [a for a in (mlp.input_scale, mlp.input_offset) if isinstance(a, np.ndarray)]
    arrays += [] if mlp.scheme is None else mlp.scheme.arrays.values()
    for array in arrays:
        if array is not None:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    for value, field in ((mlp, "name"), (mlp, "layers"), (mlp.layers[0], "weight")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)
    if mlp.scheme is not None:
        with pytest.raises(TypeError):
            mlp.scheme.arrays["scale.0"] = np.ones(1)  # type: ignore[index]


def test_the_arrays_that_it_was_made_of_may_change() -> None:
    weight, bias, scale, classes = np.ones((2, 3), np.float32), np.ones(2, np.float32), np.ones(3), np.array([4, 5])
    arrays = {"scale.0": np.ones(2, np.float32)}
    mlp = MLP([Layer(weight, bias)], input_scale=scale, classes=classes, scheme=Scheme("w8", arrays))
    digest = mlp.digest()
    for array in (weight, bias, scale, classes, arrays["scale.0"]):
        array[...] = 77
    arrays["codes.0"] = np.zeros((2, 3))
    assert mlp.digest() == digest
    assert mlp.predict([[1, 1, 1]]).tolist() == [4]


@given(mlp=mlps())
def test_copies_and_pickles_are_equal_and_stay_read_only(mlp: MLP) -> None:
    for other in (copy.copy(mlp), copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert other == mlp
        assert hash(other) == hash(mlp)
        assert not other.layers[0].weight.flags.writeable
        assert other.scheme is None or not any(a.flags.writeable for a in other.scheme.arrays.values())


@given(mlp=mlps())
def test_the_digest_changes_with_whatever_changes_an_answer(mlp: MLP) -> None:
    digest = mlp.digest()
    assert mlp.with_(name="another").digest() == digest
    assert mlp.with_(name="another") != mlp
    first = mlp.layers[0]
    weight = np.array(first.weight)
    weight.flat[0] = np.nextafter(weight.flat[0], np.float32(9))
    others = {
        mlp.with_(layers=(Layer(weight, first.bias, first.activation), *mlp.layers[1:])).digest(),
        mlp.with_(input_scale=np.asarray(mlp.input_scale) + np.float32(0.5)).digest(),
        mlp.with_(input_offset=np.asarray(mlp.input_offset) + np.float32(0.5)).digest(),
        digest,
    }
    if mlp.head != "regression":
        assert mlp.classes is not None
        others.add(mlp.with_(classes=[f"new {i}" for i in range(len(mlp.classes))]).digest())
    assert len(others) == (4 if mlp.head == "regression" else 5)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "import numpy as np; from gigamlp.mlp import MLP, Layer, Scheme\n"
        "r = np.random.default_rng(5)\n"
        "m = MLP([Layer(r.normal(size=(4, 6)), r.normal(size=4), 'gelu'), Layer(r.normal(size=(3, 4)))], 0.5,\n"
        "        classes=['x', 'y', 'z'], columns=[(0, 2), (4, 8)], features=9, scheme=Scheme('w8a8', {\n"
        "        'scale.1': [1., 2., 3.], 'scale.0': [1., 2., 3., 4.], 'hidden_scale.0': [2.]}))\n"
        "print(m.digest())"
    )
    digests = set()
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_equality_with_other_things() -> None:
    mlp = MLP([ONE])
    assert mlp == MLP([ONE])
    assert mlp != MLP([ONE], name="x")
    assert mlp != "mlp"
    assert len({mlp, MLP([ONE])}) == 1
    assert repr(mlp) == "MLP('mlp', 3-2, identity, head=softmax)"
