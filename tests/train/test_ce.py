"""Fine-tuning as a user calls it: it improves, repeats, folds exactly, and refuses what it cannot train."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gigamlp import MLP, Layer
from gigamlp.data import load_mnist
from gigamlp.errors import DataError, DeviceError, InvalidInput, TrainingError
from gigamlp.mlp import Scheme
from gigamlp.train import FAST, Recipe, finetune, fit_finetune, fit_ridge
from gigamlp.train.problem import prepare
from gigamlp.train.trainer import network_logits


def spirals(rows=900, classes=3, seed=0, dtype=np.uint8):
    """Classes that no linear function tells apart, as two features of 0..255 and two that say nothing."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    radius = rng.uniform(0.15, 1, rows)
    angle = 2 * np.pi * (y / classes + 0.35 * radius) + rng.normal(0, 0.1, rows)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle), *rng.uniform(-1, 1, (2, rows))], axis=1)
    return (127.5 + 120 * x).astype(dtype), y


def accuracy(mlp, x, y):
    return (mlp.predict(x) == y).mean()


def test_it_improves_on_the_ridge_it_starts_from():
    x, y = spirals()
    x_new, y_new = spirals(seed=1)
    start = fit_ridge(x, y, 8, device="cpu").mlp
    fit = fit_finetune(start, x, y, device="cpu", epochs=120)
    assert accuracy(start, x_new, y_new) < 0.92
    assert accuracy(fit.mlp, x_new, y_new) > 0.95
    assert fit.history[-1].loss < 0.5 * fit.history[0].loss
    assert fit.mlp.name == "finetuned-8"
    assert fit.mlp.input_scale == start.input_scale
    assert fit.seconds > 0
    assert (fit.rows, fit.validation_rows) == (825, 75)
    assert (fit.precision, fit.graph, fit.device) == ("float32", False, "cpu")


def test_a_seed_gives_one_result():
    x, y = spirals()
    one, same, other = (finetune(None, x, y, hidden=16, epochs=3, seed=seed, device="cpu") for seed in (7, 7, 8))
    assert one == same
    assert one.digest() != other.digest()


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize("hidden", [16, (12, 8)])
def test_a_random_start_learns_labels_of_any_kind(dtype, hidden):
    x, y = spirals(dtype=dtype)
    names = np.array(["zebra", "ant", "mole"])[y]
    mlp = finetune(None, x, names, hidden=hidden, epochs=150, device="cpu")
    assert mlp.classes.tolist() == ["ant", "mole", "zebra"]
    assert accuracy(mlp, x, names) > 0.95
    assert mlp.hidden == ((hidden,) if isinstance(hidden, int) else hidden)


@pytest.mark.parametrize("scale", ["scalar", "vector"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("biased", [True, False])
def test_the_exported_mlp_is_the_trained_network(scale, dtype, biased):
    """The centring is folded away exactly: the float64 reference on raw rows equals the network on centred ones."""
    x, y = spirals(dtype=dtype)
    rng = np.random.default_rng(0)
    start = MLP(
        [
            Layer(rng.standard_normal((8, 4)), rng.standard_normal(8) if biased else None, "relu"),
            Layer(rng.standard_normal((3, 8)), rng.standard_normal(3)),
        ],
        input_scale=1 / 255 if scale == "scalar" else np.array([1, 2, 3, 4]) / 255,
        input_offset=-0.25 if scale == "scalar" else np.array([0.5, 0, -1, 0.1]),
    )
    problem = prepare(start, x, y, validation=0)
    logits = network_logits(problem.layout, torch.from_numpy(problem.start), problem.data, slice(None))
    np.testing.assert_allclose(logits, start.reference_logits(x), rtol=1e-4, atol=1e-4)
    back = problem.export(problem.start)
    np.testing.assert_allclose(back.reference_logits(x), start.reference_logits(x), rtol=1e-5, atol=1e-5)
    moved = problem.start + np.random.default_rng(1).normal(0, 0.1, problem.start.shape).astype(np.float32)
    moved *= problem.start != 0  # what only fills up stays zero in training
    logits = network_logits(problem.layout, torch.from_numpy(moved), problem.data, slice(None))
    np.testing.assert_allclose(logits, problem.export(moved).reference_logits(x), rtol=1e-4, atol=1e-4)


def test_only_the_columns_that_an_mlp_reads_are_trained_on():
    x, y = spirals()
    wide = np.concatenate([np.random.default_rng(0).integers(0, 256, (900, 3), dtype=np.uint8), x], axis=1)
    rng = np.random.default_rng(1)
    layers = [
        Layer(rng.standard_normal((16, 2)), np.zeros(16), "relu"),
        Layer(rng.standard_normal((3, 16)), np.zeros(3)),
    ]
    start = MLP(layers, input_scale=1 / 255, columns=((3, 5),), features=7)
    mlp = finetune(start, wide, y, epochs=150, device="cpu")
    assert mlp.columns == ((3, 5),)
    assert mlp.features == 7
    assert accuracy(mlp, wide, y) > 0.95
    spoiled = wide.copy()
    spoiled[:, [0, 1, 2, 5, 6]] = 0
    assert np.array_equal(mlp.predict(spoiled), mlp.predict(wide))


def test_sigmoid_multilabel_and_regression_heads():
    x, y = spirals(classes=2)
    rng = np.random.default_rng(0)

    def start(outputs, head, **more):
        layers = [
            Layer(rng.standard_normal((24, 4)), np.zeros(24), "tanh"),
            Layer(rng.standard_normal((outputs, 24)) / 5),
        ]
        return MLP(layers, input_scale=1 / 127.5, input_offset=-1.0, head=head, **more)

    names = np.where(y == 1, "up", "down")
    two = finetune(start(1, "sigmoid", classes=["down", "up"]), x, names, epochs=150, device="cpu")
    assert accuracy(two, x, names) > 0.95
    both = np.stack([y, x[:, 2] > 127], axis=1)
    fit = fit_finetune(start(2, "multilabel"), x, both, epochs=150, device="cpu")
    assert (fit.mlp.predict(x) == both).mean() > 0.95
    assert fit.validation_accuracy > 0.9
    value = x[:, 0] / 255.0 - x[:, 1] / 255.0
    fit = fit_finetune(start(1, "regression"), x, value, epochs=60, device="cpu")
    assert np.abs(fit.mlp.predict(x) - value).mean() < 0.03
    assert fit.validation_accuracy is None
    assert fit.validation_loss < 0.01


@pytest.mark.parametrize(("rows", "batch"), [(2, None), (5, 64), (33, 32), (97, 10), (601, None)])
def test_awkward_numbers_of_rows(rows, batch):
    x, y = spirals(rows=rows, classes=2)
    y[:2] = 0, 1
    fit = fit_finetune(None, x, y, hidden=4, epochs=2, batch=batch, device="cpu")
    assert fit.recipe.batch <= fit.rows
    assert fit.rows + fit.validation_rows == rows
    assert np.isfinite(fit.mlp.logits(x)).all()


def test_validation_rows_choose_the_epoch():
    x, y = spirals()
    x_val, y_val = spirals(seed=5, rows=300)
    fit = fit_finetune(None, x, y, hidden=16, epochs=30, validation=(x_val, y_val), device="cpu", lr=0.05)
    assert (fit.rows, fit.validation_rows) == (900, 300)
    best = max(fit.history, key=lambda epoch: (epoch.accuracy, -epoch.loss))
    assert fit.best_epoch == best.epoch
    assert fit.validation_accuracy == pytest.approx(accuracy(fit.mlp, x_val, y_val), abs=1 / 150)
    none = fit_finetune(None, x, y, hidden=16, epochs=3, validation=0, device="cpu")
    assert (none.rows, none.validation_rows, none.best_epoch, none.validation_accuracy) == (900, 0, 3, None)
    assert fit_finetune(None, x, y, hidden=4, epochs=1, validation=100, device="cpu").validation_rows == 100


def test_inputs_are_left_alone_and_may_be_read_only_or_strided():
    x, y = spirals()
    x.setflags(write=False)
    before = x.copy()
    expected = finetune(None, x, y, hidden=8, epochs=2, device="cpu")
    assert np.array_equal(x, before)
    strided = np.repeat(x, 2, axis=0)[::2]
    assert finetune(None, strided, y, hidden=8, epochs=2, device="cpu") == expected


def test_progress_is_called_after_every_epoch():
    x, y = spirals()
    seen = []
    fit_finetune(None, x, y, hidden=8, epochs=50, device="cpu", progress=lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == list(range(1, 51))
    assert {total for _, total, _ in seen} == {50}
    assert "accuracy" in seen[-1][2]


def test_a_loss_that_is_no_longer_finite_is_an_error_with_advice():
    x, y = spirals(dtype=np.float32)
    start = MLP([Layer(np.full((3, 4), 1e38), np.zeros(3))])  # overflows at the first row
    with pytest.raises(TrainingError, match="smaller lr"):
        finetune(start, x, y, epochs=2, device="cpu")


def test_interrupting_leaves_the_process_as_it_was():
    x, y = spirals()
    threads = torch.get_num_threads()

    def stop(done, total, info):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(None, x, y, hidden=8, epochs=5, device="cpu", progress=stop)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": None}, InvalidInput, "hidden"),
        ({"hidden": 0}, InvalidInput, "hidden"),
        ({"hidden": (8, 2.5)}, InvalidInput, "hidden"),
        ({"epochs": 0}, InvalidInput, "epochs"),
        ({"lr": -1.0}, InvalidInput, "lr"),
        ({"batch": 0}, InvalidInput, "batch"),
        ({"seed": -3}, InvalidInput, "seed"),
        ({"graph": "yes"}, InvalidInput, "graph"),
        ({"graph": True}, DeviceError, "graph='auto'"),
        ({"validation": -1}, InvalidInput, "validation"),
        ({"validation": (1, 2, 3)}, InvalidInput, "pair"),
        ({"validation": (np.zeros((0, 4), np.uint8), np.zeros(0, int))}, DataError, "no validation rows"),
        ({"y": np.zeros(899, int)}, DataError, "900 rows but 899"),
        ({"y": np.zeros(900, int)}, DataError, "two classes"),
        ({"x": np.full((900, 4), np.nan)}, InvalidInput, "row 0"),
    ],
)
def test_bad_arguments_are_refused(change, error, words):
    x, y = spirals()
    arguments = {"x": x, "y": y, "hidden": 4, "epochs": 1, "device": "cpu"} | change
    with pytest.raises(error, match=words):
        fit_finetune(None, arguments.pop("x"), arguments.pop("y"), **arguments)


def test_an_mlp_that_does_not_fit_is_refused():
    x, y = spirals()
    start = fit_ridge(x, y, 8, device="cpu").mlp
    with pytest.raises(InvalidInput, match="own widths"):
        finetune(start, x, y, hidden=8, device="cpu")
    with pytest.raises(InvalidInput, match="3 features"):
        finetune(start, x[:, :3], y, device="cpu")
    with pytest.raises(DataError, match="label 3"):
        finetune(start, x, y + 1, device="cpu")
    with pytest.raises(InvalidInput, match="scheme=None"):
        finetune(start.with_(scheme=Scheme("w8")), x, y, device="cpu")
    regression = start.with_(head="regression", classes=None)
    with pytest.raises(DataError, match=r"\[900, 3\]"):
        finetune(regression, x, y, device="cpu")
    with pytest.raises(DataError, match="0 or 1"):
        finetune(start.with_(head="multilabel"), x, np.full((900, 3), 2), device="cpu")
    with pytest.raises(DataError, match="NaN"):
        finetune(regression, x, np.full((900, 3), np.nan), device="cpu")


@pytest.mark.slow  # 40 epochs over MNIST: about ten seconds on one free core
@pytest.mark.timeout(900)
def test_mnist_reader_width_reaches_its_floor():
    x, y, x_test, y_test = load_mnist()
    assert accuracy(finetune(None, x, y, hidden=40, device="cpu"), x_test, y_test) >= 0.9740


@pytest.mark.slow  # 20 epochs of 784-512-10: about twenty seconds on one free core
@pytest.mark.timeout(900)
def test_mnist_512_from_the_ridge_reaches_its_floor():
    x, y, x_test, y_test = load_mnist()
    start = fit_ridge(x, y, 512, device="cpu").mlp
    assert accuracy(finetune(start, x, y, device="cpu"), x_test, y_test) >= 0.9820


@pytest.mark.gpu
def test_mnist_floors_on_cuda():
    x, y, x_test, y_test = load_mnist()
    start = fit_ridge(x, y, 512, device="cuda").mlp
    fit = fit_finetune(start, x, y, device="cuda")
    assert fit.graph
    assert accuracy(fit.mlp, x_test, y_test) >= 0.9820
    assert accuracy(finetune(None, x, y, hidden=40, device="cuda"), x_test, y_test) >= 0.9740


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16", "fp16"])
def test_mnist_fast_recipe_on_cuda_in_every_precision(precision):
    x, y, x_test, y_test = load_mnist()
    recipe = FAST.with_(precision=precision)
    fit = fit_finetune(None, x, y, hidden=40, recipe=recipe, validation=0, device="cuda")
    assert fit.precision == precision
    assert accuracy(fit.mlp, x_test, y_test) >= 0.9691


@pytest.mark.gpu
def test_cuda_small_and_odd_networks():
    x, y = spirals()
    for hidden in (5, (7, 3), 33):
        fit = fit_finetune(None, x, y, hidden=hidden, epochs=150, device="cuda", recipe=Recipe(batch=50))
        assert accuracy(fit.mlp, x, y) > 0.9
