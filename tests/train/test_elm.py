"""The ridge-ELM: its network is what the statistics were taken of, on every machine, for any way of handing in rows."""

from __future__ import annotations

import hashlib
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from gigamlp.activations import ACTIVATIONS
from gigamlp.data import hold_out, load_mnist
from gigamlp.errors import DataError, InvalidInput
from gigamlp.train import fit_ridge, fit_ridge_widths, ridge
from gigamlp.train.elm import random_layer
from gigamlp.train.rows import open_source, scan


def blobs(rows=600, features=12, classes=3, seed=0, dtype=np.uint8):
    rng = np.random.default_rng(seed)
    centres = rng.uniform(40, 210, (classes, features))
    y = rng.integers(0, classes, rows)
    x = np.clip(centres[y] + rng.normal(0, 25, (rows, features)), 0, 255)
    return x.astype(dtype), y


def float64_fit(mlp, x, y, alpha):
    """Solve the second layer of `mlp` again, in float64 and with a column of ones."""
    first = mlp.layers[0]
    scaled = x.astype(np.float64) * mlp.input_scale + mlp.input_offset
    z = scaled @ first.weight.T.astype(np.float64) + first.bias
    h = np.concatenate([ACTIVATIONS[first.activation](z), np.ones((len(x), 1))], axis=1)
    penalty = alpha * np.eye(h.shape[1])
    penalty[-1, -1] = 0
    solved = np.linalg.solve(h.T @ h + penalty, h.T @ (y[:, None] == mlp.classes))
    return solved[:-1].T, solved[-1]


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_second_layer_equals_the_float64_closed_form(activation, dtype):
    x, y = blobs(dtype=dtype)
    fit = fit_ridge(x, y, 20, activation=activation, alpha=2.0, device="cpu", chunk_rows=97)
    weight, bias = float64_fit(fit.mlp, x, y, 2.0)
    np.testing.assert_allclose(fit.mlp.layers[1].weight, weight, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(fit.mlp.layers[1].bias, bias, rtol=2e-4, atol=2e-5)
    assert (fit.mlp.predict(x) == y).mean() > 0.9
    assert (fit.rows, fit.solver, fit.jitter, fit.alpha, fit.device) == (600, "cholesky", 0.0, 2.0, "cpu")


def test_second_layer_equals_scikit_learn():
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = blobs()
    mlp = ridge(x, y, 16, alpha=3.0, device="cpu")
    first = mlp.layers[0]
    h = np.maximum(x / 255 @ first.weight.T.astype(np.float64) + first.bias, 0)
    model = sklearn.Ridge(alpha=3.0).fit(h, y[:, None] == mlp.classes)
    np.testing.assert_allclose(mlp.layers[1].weight, model.coef_, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(mlp.layers[1].bias, model.intercept_, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_every_way_of_handing_in_the_rows_gives_the_same_network(dtype, tmp_path):
    x, y = blobs(dtype=dtype)
    expected = ridge(x, y, 32, device="cpu")
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pieces = [(x[i : i + 130], y[i : i + 130]) for i in range(0, len(x), 130)]
    ways = {
        "small chunks": ridge(x, y, 32, device="cpu", chunk_rows=41),
        "memory map": ridge(mapped, y, 32, device="cpu", chunk_rows=100),
        "list of chunks": ridge(pieces, hidden=32, device="cpu"),
        "function": ridge(lambda: iter(pieces), hidden=32, device="cpu", chunk_rows=64),
        "strided": ridge(np.repeat(x, 2, axis=1)[:, ::2], y.tolist(), 32, device="cpu"),
    }
    for way, mlp in ways.items():
        np.testing.assert_allclose(mlp.layers[0].weight, expected.layers[0].weight, rtol=1e-6, err_msg=way)
        np.testing.assert_allclose(mlp.logits(x), expected.logits(x), atol=2e-4, err_msg=way)
        assert mlp.features == expected.features


def test_nested_widths_equal_separate_fits():
    x, y = blobs()
    together = fit_ridge_widths(x, y, (8, 24, 40), device="cpu", alpha=1.0)
    assert list(together) == [8, 24, 40]
    for hidden, fit in together.items():
        alone = fit_ridge(x, y, hidden, device="cpu", alpha=1.0)
        assert np.array_equal(fit.mlp.layers[0].weight, alone.mlp.layers[0].weight)
        np.testing.assert_allclose(fit.mlp.layers[0].bias, alone.mlp.layers[0].bias, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(fit.mlp.layers[1].weight, alone.mlp.layers[1].weight, rtol=1e-3, atol=1e-5)
        assert fit.mlp.name == f"ridge-{hidden}"
        assert fit.mlp.hidden == (hidden,)


def test_a_seed_means_the_same_layer_on_every_machine():
    x, y = load_mnist()[:2]
    layer = random_layer(scan(open_source(x, y)), 8, seed=0)
    # float32 weights of 8 x 784, little-endian: NumPy's PCG64 stream and an exact variance fix every bit
    digest = hashlib.sha256(layer.weight.astype("<f4").tobytes()).hexdigest()
    assert digest == "f09e01a63dbdcf002080e33c029919820aa74e5fdf3f3774925db97c73a8519b"
    np.testing.assert_allclose(layer.bias[:3], [0.8611961, -0.13999434, 1.1648536], rtol=1e-6)


def test_pre_activations_have_the_asked_spread_and_lie_around_zero():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (4000, 50), dtype=np.uint8)
    y = np.arange(4000) % 2
    for dtype in (np.uint8, np.float32):
        mlp = fit_ridge(x.astype(dtype), y, 400, weight_scale=3.0, activation="identity", device="cpu").mlp
        first = mlp.layers[0]
        z = (x * np.asarray(mlp.input_scale) + mlp.input_offset) @ first.weight.T + first.bias
        assert z.std(axis=0).mean() == pytest.approx(3.0, rel=0.05)
        assert z.mean(axis=0).std() == pytest.approx(0.75, rel=0.15)


def test_labels_come_back_as_they_were_given():
    x, y = blobs()
    names = np.array(["zebra", "ant", "mole"])
    mlp = ridge(x, names[y], 32, device="cpu")
    assert mlp.classes.tolist() == ["ant", "mole", "zebra"]
    assert (mlp.predict(x) == names[y]).mean() > 0.9
    sparse = np.array([-7, 0, 900])
    assert (ridge(x, sparse[y], 32, device="cpu").predict(x) == sparse[y]).mean() > 0.9
    two = ridge(x, y == 1, 32, device="cpu")
    assert two.outputs == 2
    assert (two.predict(x) == (y == 1)).mean() > 0.9


def test_awkward_sizes():
    x, y = blobs(rows=5, classes=2, seed=3)
    y[:2] = 0, 1
    assert ridge(x, y, 64, device="cpu").hidden == (64,)  # more units than rows
    assert ridge(x, y, 1, device="cpu").hidden == (1,)
    constant = ridge(np.full((6, 3), 9.0), np.arange(6) % 2, 4, device="cpu")
    assert np.isfinite(constant.logits(np.zeros((1, 3)))).all()
    assert ridge(np.full((6, 3), 9, np.uint8), np.arange(6) % 2, 4, device="cpu").predict(x[:, :3]).shape == (5,)


def test_progress_counts_the_rows_and_the_solves():
    x, y = blobs()
    seen = []
    fit_ridge_widths(x, y, (4, 8), device="cpu", chunk_rows=250, progress=lambda *call: seen.append(call))
    assert [call for call in seen if "Gram" in call[2]] == [
        (250, 600, "Gram statistics"),
        (500, 600, "Gram statistics"),
        (600, 600, "Gram statistics"),
    ]
    assert seen[-1] == (2, 2, "solved")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 0}, "hidden"),
        ({"hidden": 2.5}, "hidden"),
        ({"hidden": True}, "hidden"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"weight_scale": 0.0}, "weight_scale"),
        ({"activation": "step"}, "known: identity"),
        ({"seed": -1}, "seed"),
        ({"chunk_rows": -5}, "chunk_rows"),
        ({"hidden": 10**7}, "GiB"),
    ],
)
def test_bad_arguments_are_refused(change, words):
    x, y = blobs(rows=20)
    with pytest.raises(InvalidInput, match=words):
        fit_ridge(x, y, **({"hidden": 4, "device": "cpu"} | change))


def test_bad_data_are_refused():
    x, y = blobs(rows=20)
    with pytest.raises(DataError, match="20 rows but 19"):
        ridge(x, y[:-1], 4, device="cpu")
    with pytest.raises(InvalidInput, match="NaN"):
        ridge(np.full((4, 2), np.nan), np.arange(4), 4, device="cpu")
    with pytest.raises(DataError, match="two classes"):
        ridge(x, np.zeros(20, int), 4, device="cpu")
    with pytest.raises(InvalidInput, match="no widths"):
        fit_ridge_widths(x, y, (), device="cpu")


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from Linux's /proc")
def test_memory_does_not_grow_with_the_rows():
    """400,000 generated rows: 102 MB of bytes and 102 MB of hidden activations if they were ever held at once."""
    chunk_rows, chunks, features = 4000, 100, 256
    base = np.random.default_rng(0).integers(0, 256, (chunk_rows, features), dtype=np.uint8)
    y = np.arange(chunk_rows) % 10
    seen = []

    def read():
        for number in range(chunks):
            seen.append(resident_bytes())
            yield base + np.uint8(number), y

    tracemalloc.start()
    fit = fit_ridge(read, hidden=64, device="cpu", chunk_rows=chunk_rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fit.rows == chunk_rows * chunks
    assert len(seen) == 2 * chunks
    assert peak < 20e6
    assert max(seen) - seen[4] < 30e6  # the first chunks load libraries


@pytest.mark.slow  # five fits on the 60,000 rows of MNIST, about a second each
def test_mnist_accuracy_over_five_seeds():
    x, y, x_test, y_test = load_mnist()
    accuracies = [(ridge(x, y, 512, seed=seed, device="cpu").predict(x_test) == y_test).mean() for seed in range(5)]
    assert np.mean(accuracies) >= 0.917


def test_mnist_gets_better_with_width():
    x, y, x_val, y_val = hold_out(*load_mnist()[:2])
    fits = fit_ridge_widths(x[:8000], y[:8000], (64, 256), device="cpu")
    narrow, wide = ((fit.mlp.predict(x_val) == y_val).mean() for fit in fits.values())
    assert 0.7 < narrow < wide - 0.05


@pytest.mark.gpu
def test_cuda_gives_the_network_that_the_cpu_gives():
    x, y = load_mnist()[:2]
    cpu, cuda = (fit_ridge(x[:20000], y[:20000], 256, device=device, alpha=1.0) for device in ("cpu", "cuda"))
    assert cuda.device == "cuda:0"
    assert np.array_equal(cpu.mlp.layers[0].weight, cuda.mlp.layers[0].weight)
    np.testing.assert_allclose(cuda.mlp.layers[1].weight, cpu.mlp.layers[1].weight, atol=2e-3)
    assert (cpu.mlp.predict(x) == cuda.mlp.predict(x)).mean() > 0.999


@pytest.mark.gpu
def test_cuda_sums_are_ieee_float32_whatever_the_flags_say():
    import torch

    x, y = blobs()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        fit = fit_ridge(x, y, 20, alpha=2.0, device="cuda")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    weight, _ = float64_fit(fit.mlp, x, y, 2.0)
    np.testing.assert_allclose(fit.mlp.layers[1].weight, weight, rtol=2e-4, atol=2e-5)
