"""Networks, rows and tolerances that the tests of the torch engines share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gigamlp.activations import apply_activation
from gigamlp.mlp import MLP, Layer
from gigamlp.spec import Spec, Variant

torch = pytest.importorskip("torch")

CUDA = pytest.param(
    "cuda:0",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


def net(
    *widths: int,
    activation: str = "relu",
    head: str = "softmax",
    bias: bool = True,
    last: str = "identity",
    columns: tuple[tuple[int, int], ...] | None = None,
    features: int = 0,
    scale: Any = 1 / 255,
    offset: Any = -0.13,
    seed: int = 0,
) -> MLP:
    """An MLP with weights of variance 2 / in."""
    rng = np.random.default_rng(seed)
    layers = []
    for index, (k, n) in enumerate(pairwise(widths)):
        weight = rng.standard_normal((n, k)) * np.sqrt(2 / k)
        final = index == len(widths) - 2
        layers.append(Layer(weight, rng.standard_normal(n) * 0.3 if bias else None, last if final else activation))
    return MLP(layers, scale, offset, head, columns=columns, features=features)


def rows(mlp: MLP, n: int, dtype: str, seed: int = 1) -> Any:
    """Torch rows on the CPU: every value of an integer dtype, or normal numbers."""
    rng = np.random.default_rng(seed)
    if dtype in ("uint8", "int8"):
        info = np.iinfo(dtype)
        return torch.from_numpy(rng.integers(info.min, info.max + 1, (n, mlp.features)).astype(dtype))
    x = rng.standard_normal((n, mlp.features)).astype(np.float32)
    if mlp.input_scale != 1:  # raw features whose scaled values are normal
        x = (x - np.float32(0)) / np.float32(mlp.input_scale if np.ndim(mlp.input_scale) == 0 else 1 / 255)
    return torch.from_numpy(x).to(getattr(torch, dtype))


def exact(mlp: MLP, x: Any) -> np.ndarray:
    """The float64 logits of exactly these rows."""
    return mlp.reference_logits(x.double().numpy() if x.is_floating_point() else x.numpy())


def bound(mlp: MLP, x: Any, compute: str) -> np.ndarray:
    """Four standard deviations of the rounding error of each logit, carried through the layers.

    Inputs, weights, biases, hidden values and logits are rounded to `compute`, each independently by at most u = eps
    / 2 of its size (taken as the standard deviation, which is 1.7 times that of a uniform error: four are seven). Sums
    run in float32, but float16 kernels may round partial sums: hence the factors 2. Sizes are those after the input
    scale is folded in. No activation is steeper than 1.13. Weights below the normal numbers of float16 are rounded by
    up to 2**-25.
    """
    u2, tiny = (EPS[compute] / 2) ** 2, 2.0**-25 if compute == "float16" else 0.0
    raw = x.double().numpy()
    h = np.concatenate([raw[:, a:b] for a, b in mlp.columns or ((0, mlp.features),)], axis=1)
    variance = u2 * h**2
    for index, layer in enumerate(mlp.layers):
        weight = layer.weight.astype(np.float64)
        bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.astype(np.float64)
        if index == 0:
            bias = bias + (weight * np.asarray(mlp.input_offset, np.float64)).sum(axis=1)
            weight = weight * np.asarray(mlp.input_scale, np.float64)
        z = h @ weight.T + bias
        parts = (h**2) @ (weight**2).T + bias**2
        float32 = (EPS["float32"] * (np.abs(h) @ np.abs(weight).T + np.abs(bias))) ** 2
        variance = variance @ (weight**2).T + 2 * u2 * (parts + z**2) + float32
        variance += tiny**2 * (h**2).sum(axis=1, keepdims=True)
        h = apply_activation(layer.activation, z)
        variance = 1.13**2 * variance + 2 * u2 * h**2
    return 4 * np.sqrt(variance) + 1e-30


def assert_answers(mlp: MLP, spec: Spec, variant: Variant, x: Any, y: Any) -> None:
    """Compare an output with the float64 reference, within the rounding of the compute dtype."""
    z, tolerance = exact(mlp, x), bound(mlp, x, variant.get("compute"))
    parts = y if isinstance(y, tuple) else (y,)
    assert all(part.device == torch.device(spec.device) for part in parts)
    if spec.output == "logits":
        assert y.shape == (spec.batch, mlp.outputs)
        assert y.dtype is getattr(torch, variant.get("compute"))
        assert (np.abs(y.double().cpu().numpy() - z) <= tolerance).all()
        return
    if spec.output == "proba":
        expected = mlp.probabilities(z)
        assert y.shape == expected.shape
        assert y.dtype is torch.float32
        # neither softmax nor sigmoid is steeper than 1/2 in the largest error of a logit
        slack = 0.5 * tolerance.max(axis=1, keepdims=True) + 1e-5
        assert (np.abs(y.double().cpu().numpy() - expected) <= slack).all()
        return
    ids = parts[0].cpu().numpy()
    assert ids.shape == (spec.batch,)
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < max(2 if mlp.head == "sigmoid" else mlp.outputs, 1)
    slack = tolerance[np.arange(len(z)), z.argmax(axis=1)] + tolerance.max(axis=1)
    if mlp.head == "sigmoid":
        gap = np.abs(z[:, 0])
    elif mlp.outputs == 1:
        gap = np.full(len(z), np.inf)
    else:
        top = np.sort(z, axis=1)
        gap = top[:, -1] - top[:, -2]
    decided = gap > slack
    # bfloat16 leaves most random rows open: there the logits are the test; float32 and float16 decide nearly all
    assert decided.mean() > 0.5 or variant.get("compute") == "bfloat16", "too few rows decide: the test could not fail"
    assert (ids == mlp.class_ids(z))[decided].all()
    if spec.output == "margin":
        margin = y[1].cpu().numpy()
        assert margin.shape == (spec.batch,)
        assert margin.dtype == np.float32
        if np.isinf(gap).all():
            assert np.isposinf(margin).all()
        else:
            assert (np.abs(margin - gap) <= slack).all()
