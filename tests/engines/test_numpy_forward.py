"""The engine ``numpy`` against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from gigamlp.activations import ACTIVATIONS
from gigamlp.engines.base import Runner, Unsupported
from gigamlp.engines.numpy_forward import NumpyForward
from gigamlp.errors import InvalidInput
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant
from tests.fakes import make_mlp


def build(mlp: MLP, batch: int = 7, input_dtype: str = "uint8", output: str = "logits") -> Runner:
    return NumpyForward().build(mlp, Spec("cpu", batch, input_dtype, output))


def rows(mlp: MLP, batch: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(1).integers(0, 100, (batch, mlp.features)).astype(dtype)


# float32 rounding of a handful of products of size one; logits of the wide nets reach 30
def close(z: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(z, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("widths", [(6, 3), (6, 8, 3), (5, 9, 4, 7, 2)])
def test_logits(activation: str, widths: tuple[int, ...]) -> None:
    mlp = make_mlp(widths, activation=activation)
    x = rows(mlp, 7)
    close(build(mlp).run(x), mlp.reference_logits(x))


# 1; one block less, equal, more than 1,024 rows; two blocks and a part
@pytest.mark.parametrize("batch", [1, 1023, 1024, 1025, 2500])
def test_blocks_of_a_batch(batch: int) -> None:
    mlp = make_mlp()
    x = rows(mlp, batch)
    close(build(mlp, batch).run(x), mlp.reference_logits(x))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "float32"])
def test_input_dtypes(dtype: str) -> None:
    mlp = make_mlp(input_scale=np.linspace(0.001, 0.03, 6), input_offset=np.linspace(-1, 1, 6))
    x = rows(mlp, 7, dtype)
    close(build(mlp, input_dtype=dtype).run(x), mlp.reference_logits(x))


def test_columns() -> None:
    mlp = make_mlp((6, 8, 3), columns=((1, 4), (6, 9)), features=10, input_offset=np.arange(6))
    x = rows(mlp, 7)
    close(build(mlp).run(x), mlp.reference_logits(x))


def test_layers_without_bias() -> None:
    mlp = make_mlp()
    bare = mlp.with_(layers=[type(layer)(layer.weight, None, layer.activation) for layer in mlp.layers])
    x = rows(mlp, 7)
    close(build(bare).run(x), bare.reference_logits(x))


@pytest.mark.parametrize(("head", "outputs"), [("softmax", 4), ("sigmoid", 1), ("multilabel", 3)])
def test_probabilities(head: str, outputs: int) -> None:
    mlp = make_mlp((6, 8, outputs), head=head)
    x = rows(mlp, 7)
    close(build(mlp, output="proba").run(x), mlp.probabilities(mlp.reference_logits(x)))


@pytest.mark.parametrize(("head", "outputs"), [("softmax", 4), ("softmax", 2), ("sigmoid", 1)])
def test_classes_and_margins(head: str, outputs: int) -> None:
    mlp = make_mlp((6, 8, outputs), head=head)
    x = rows(mlp, 40)
    z = mlp.reference_logits(x)
    ids = build(mlp, 40, output="class").run(x)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, mlp.class_ids(z))
    found, margin = build(mlp, 40, output="margin").run(x)
    np.testing.assert_array_equal(found, ids)
    top = np.sort(np.concatenate([z, np.zeros_like(z)], axis=1) if head == "sigmoid" else z, axis=1)
    close(margin, top[:, -1] - top[:, -2])
    assert margin.dtype == np.float32


def test_ties_go_to_the_lowest_index() -> None:
    mlp = make_mlp((6, 4))
    flat = mlp.with_(layers=[type(mlp.layers[0])(np.zeros((4, 6)))])
    assert build(flat, output="class").run(rows(flat, 7)).tolist() == [0] * 7


def test_bind_and_close() -> None:
    mlp = make_mlp()
    x = rows(mlp, 7)
    runner = build(mlp)
    other = runner.bind(x)
    assert other.input is x
    first = other.run(other.input)
    runner.input[...] = 1
    close(runner.run(runner.input), mlp.reference_logits(np.ones((7, 6))))
    close(first, mlp.reference_logits(x))  # outputs are not shared
    runner.close()
    runner.close()
    with pytest.raises(InvalidInput, match="closed"):
        runner.run(x)
    close(other.run(x), mlp.reference_logits(x))


def test_wrong_rows() -> None:
    runner = build(make_mlp())
    for x in (np.zeros((6, 6), np.uint8), np.zeros((7, 6), np.float32), [[0] * 6] * 7):
        with pytest.raises(InvalidInput, match=r"uint8 \[7, 6\]"):
            runner.run(x)


def test_what_it_cannot_do() -> None:
    engine = NumpyForward()
    assert engine.unavailable("cpu") is None
    assert "CPU" in str(engine.unavailable("cuda:0"))
    mlp, many = make_mlp(), make_mlp(head="multilabel")
    for m, spec, word in (
        (mlp, Spec("cuda:0", 7), "CPU"),
        (mlp, Spec("cpu", 7, "bfloat16"), "bfloat16"),
        (mlp, Spec("cpu", 7, threads=1), "OPENBLAS_NUM_THREADS"),
        (many, Spec("cpu", 7), "no single class"),
        (make_mlp((6, 1)), Spec("cpu", 7, output="margin"), "no margin"),
        (make_mlp(head="regression"), Spec("cpu", 7, output="proba"), "no probabilities"),
    ):
        with pytest.raises(Unsupported, match=word):
            engine.build(m, spec)
    with pytest.raises(Unsupported, match="op=matmul"):
        engine.build(mlp, Spec("cpu", 7), Variant.of(op="fast"))
