"""Fine-tuning for narrow codes: what is stored, that it helps, and that int8 engines run it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gigamlp as gm
from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.quantize import integer_form
from gigamlp.train.qat import WIDTHS, finetune_quantised, fit_quantised, rounded
from tests.fakes import make_mlp

CODES = {"int8": 127, "int4": 7, "ternary": 1, "binary": 1}


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x * 15).astype(np.uint8)[order], y[order]
    mlp = gm.train.finetune(None, x[:1200], y[:1200], hidden=24, device="cpu", epochs=40)
    return mlp, x[:1200], y[:1200], x[1200:], y[1200:]


@pytest.mark.parametrize("width", list(WIDTHS))
def test_codes_and_scales_are_stored_and_are_what_was_trained(digits, width):
    mlp, x, y, x_test, y_test = digits
    found = fit_quantised(mlp, x, y, width, epochs=8, device="cpu", validation=200)
    scheme = found.mlp.scheme
    codes, scale = scheme.arrays["codes.0"], scheme.arrays["scale.0"]
    assert scheme.name == "w8"
    assert np.abs(codes).max() <= CODES[width]
    assert width == "int4" or np.abs(codes).max() == CODES[width]  # int4 clips at three root mean squares
    assert (width != "binary") or (codes != 0).all()
    weight = codes * scale[:, None].astype(np.float64) / found.mlp.input_scale
    np.testing.assert_allclose(found.mlp.layers[0].weight, weight, rtol=1e-6)
    # the float form, the integer form and the reported accuracy are one network
    form = integer_form(found.mlp)
    assert (form.codes == codes).all()
    np.testing.assert_allclose(form.reference_logits(x_test), found.mlp.reference_logits(x_test), rtol=0.02, atol=0.05)
    own = gm.data.split.hold_out(x, y, 200, 0)
    right = float(np.mean(found.mlp.answers(form.reference_logits(own[2])) == own[3]))
    assert found.accuracy_after == pytest.approx(right, abs=0.011)
    assert (found.accuracy_after, -found.loss_after) >= (found.accuracy_before, -found.loss_before)
    assert float(np.mean(found.mlp.predict(x_test) == y_test)) > 0.9
    assert found.mlp.name == f"{mlp.name}-{width}"


@pytest.mark.parametrize("width", ["ternary", "binary"])
def test_fine_tuning_gains_what_rounding_lost(digits, width):
    mlp, x, y, *_ = digits
    found = fit_quantised(mlp, x, y, width, epochs=8, device="cpu", validation=200)
    assert found.loss_after < 0.8 * found.loss_before
    assert found.accuracy_after > found.accuracy_before
    assert found.epoch > 0


def test_an_int8_engine_runs_the_codes(digits):
    mlp, x, y, x_test, _ = digits
    made = finetune_quantised(mlp, x, y, "ternary", epochs=1, device="cpu")
    assert gm.quantise(made) == made
    assert gm.agreement(made, x_test).share < 0.01


def test_rounding_by_hand():
    weight = torch.tensor([[3.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    codes, scale = rounded(weight, "int8")
    assert codes[0].tolist() == [127, -42, 21, 0]
    rms = float(np.sqrt((9 + 1 + 0.25) / 4))
    codes, scale = rounded(weight, "int4")
    assert scale[0].item() == pytest.approx(3 * rms / 7)
    assert codes[0].tolist() == [round(w / (3 * rms / 7)) for w in (3.0, -1.0, 0.5, 0.0)]
    codes, scale = rounded(weight, "ternary")
    assert codes[0].tolist() == [1, -1, 0, 0]
    assert scale[0].item() == 2.0
    codes, scale = rounded(weight, "binary")
    assert codes[0].tolist() == [1, -1, 1, 1]
    assert scale[0].item() == 1.125
    for width in WIDTHS:
        codes, scale = rounded(weight, width)
        assert not codes[1].any()
        assert scale[1].item() == 1.0
    assert rounded(torch.tensor([[1.0] + [0.0] * 99]), "int4")[0].max() == 7  # clipped


@pytest.mark.parametrize("head", ["softmax", "sigmoid", "multilabel", "regression"])
def test_every_head_with_columns_and_no_bias(head):
    outputs = 1 if head in ("sigmoid", "regression") else 3
    mlp = make_mlp((5, 4, outputs), head=head, columns=((1, 3), (6, 9)), features=10)
    first = mlp.layers[0]
    layers = (gm.Layer(first.weight, None, "gelu"), *mlp.layers[1:])
    mlp = mlp.with_(layers=layers, input_scale=np.linspace(0, 1, 5), input_offset=0.25)
    x = np.random.default_rng(0).integers(0, 256, (64, 10), dtype=np.uint8)
    y = {"softmax": np.arange(64) % 3, "sigmoid": np.arange(64) % 2}.get(head)
    if y is None:
        y = np.random.default_rng(1).integers(0, 2, (64, outputs)).astype(float)
    found = fit_quantised(mlp, x, y, "int4", epochs=2, device="cpu", validation=16)
    assert found.mlp.columns == mlp.columns
    assert found.mlp.layers[0].bias is None
    assert (found.accuracy_after is None) == (head == "regression")
    assert not found.mlp.layers[0].weight[:, 0].any()  # its input's scale is 0
    assert np.isfinite(found.mlp.logits(x)).all()


def test_one_feature_one_unit():
    x = np.arange(64, dtype=np.uint8)[:, None]
    mlp = make_mlp((1, 1, 2))
    assert fit_quantised(mlp, x, x[:, 0] // 32, "binary", epochs=1, device="cpu", validation=0).mlp.features == 1


def test_a_seed_gives_one_result(digits):
    mlp, x, y, *_ = digits
    one, same, other = (
        finetune_quantised(mlp, x, y, "int4", epochs=1, device="cpu", seed=s, validation=0) for s in (0, 0, 1)
    )
    assert one == same
    assert one != other


def test_what_cannot_be_used_is_refused(digits):
    mlp, x, y, *_ = digits
    with pytest.raises(InvalidInput, match="unknown width 'int3'"):
        finetune_quantised(mlp, x, y, "int3")
    with pytest.raises(InvalidInput, match="unknown width"):
        rounded(torch.zeros(1, 1), "int3")
    with pytest.raises(InvalidInput, match="must be uint8, got float64"):
        finetune_quantised(mlp, x / 2, y)
    with pytest.raises(TrainingError, match="smaller lr"):
        finetune_quantised(mlp, x, y, epochs=2, lr=1e30, device="cpu")


def test_a_model_with_a_scheme_is_taken(digits):
    mlp, x, y, *_ = digits
    assert finetune_quantised(gm.quantise(mlp), x, y, "int4", epochs=1, device="cpu").scheme.name == "w8"
