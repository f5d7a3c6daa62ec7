"""What the tests of the CPU peers share: networks, rows, and a NumPy emulation of their static int8."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gigamlp.activations import apply_activation
from gigamlp.engines.base import Engine, Runner
from gigamlp.engines.static_int8 import StaticInt8
from gigamlp.mlp import MLP, Layer, Scheme
from gigamlp.spec import Spec, Variant

__all__ = ["assert_close", "calibrated", "check_answers", "emulate", "net", "rows"]


def net(
    *widths: int, activation: str = "relu", last: str = "identity", bias: bool = True, seed: int = 0, **more
) -> MLP:
    """An MLP for raw bytes, its weights of variance 2 / in."""
    rng = np.random.default_rng(seed)
    layers = []
    for index, (k, n) in enumerate(pairwise(widths)):
        weight = rng.standard_normal((n, k)) * np.sqrt(2 / k)
        own = rng.standard_normal(n) * 0.3 if bias else None
        layers.append(Layer(weight, own, last if index == len(widths) - 2 else activation))
    return MLP(layers, **{"input_scale": 1 / 255, "input_offset": -0.13, **more})


def rows(mlp: MLP, n: int, dtype: str = "uint8", seed: int = 1) -> np.ndarray:
    """Rows of every value of an integer dtype, or normal numbers of the model's scale."""
    rng = np.random.default_rng(seed)
    if dtype in ("uint8", "int8"):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, (n, mlp.features)).astype(dtype)
    return (rng.standard_normal((n, mlp.features)) * 255).astype(dtype)


def calibrated(mlp: MLP, x: np.ndarray, zeros: bool = False) -> MLP:
    """The MLP with scheme ``w8a8``, its hidden steps (and zero points) from the values that the rows `x` give."""
    h = mlp.read_columns(x).astype(np.float64) * mlp.input_scale + mlp.input_offset
    arrays = {}
    for index, layer in enumerate(mlp.layers[:-1]):
        h = apply_activation(layer.activation, h @ layer.weight.T + (0 if layer.bias is None else layer.bias))
        low = np.minimum(h.min(axis=0), 0) if zeros else 0
        step = np.maximum(h.max(axis=0) - low, 1e-3) / 255
        arrays[f"hidden_scale.{index}"] = step
        if zeros:
            arrays[f"hidden_zero.{index}"] = np.rint(-low / step)
    return mlp.with_(scheme=Scheme("w8a8", arrays))


def emulate(form: StaticInt8, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a static int8 MLP in float64, and how far a runtime may be from each.

    A runtime computes the same whole sums; its float32 arithmetic may take a hidden value that lies near the middle of
    two codes to the other one. That moves a value by one step; the tolerance adds all such steps up. One whose distance
    to the middle is over 1e-3 of a step never moves. Biases are rounded to a half of the sums' unit.
    """
    h, slack = form.mlp.read_columns(x).astype(np.float64), np.zeros((1, 1))
    for layer in form.layers:
        weight = layer.codes.astype(np.float64) * layer.scale.astype(np.float64)
        z = h * layer.in_scale @ weight + layer.bias
        # the bias is rounded to whole sums; float32 has 24 bits
        slack = slack @ (np.abs(weight) * layer.in_scale) if slack.size > 1 else np.zeros_like(z)
        slack = slack + layer.scale * layer.in_scale / 2 + 1e-6 * (np.abs(h) * layer.in_scale @ np.abs(weight) + 1)
        h = apply_activation(layer.activation, z)
        slack = 1.13 * slack  # no activation is steeper
        if layer.gain is not None:
            h, slack = h * layer.gain, slack * layer.gain
        if layer.shift is not None:
            h = h + layer.shift
        if layer.out_scale is not None:
            steps = h / layer.out_scale
            moved = np.abs(steps - np.floor(steps) - 0.5) < np.maximum(slack / layer.out_scale, 1e-3)
            h = np.clip(np.rint(steps) + layer.out_zero, 0, 255) - layer.out_zero
            slack = np.where(moved, 1.0 + np.floor(slack / layer.out_scale), 0.0)
    for weight, bias, activation in form.rest:
        z = h @ weight.astype(np.float64) + (0 if bias is None else bias)
        slack = slack @ np.abs(weight) + 1e-6 * (np.abs(h) @ np.abs(weight) + 1)
        h, slack = apply_activation(activation, z), 1.13 * slack
    return h, slack


def assert_close(z: np.ndarray, want: np.ndarray) -> None:
    """Compare float32 logits with the float64 reference: a few roundings of sums of numbers of size one."""
    assert z.dtype == np.float32
    assert z.shape == want.shape
    np.testing.assert_allclose(z, want, rtol=2e-5, atol=2e-5)


def check_answers(engine: Engine, mlp: MLP, spec: Spec, variant: Variant | None = None, seeds: int = 3) -> Runner:
    """Run one runner on several inputs and compare every answer with the float64 reference; return the runner."""
    runner = engine.build(mlp, spec, variant)
    for seed in range(seeds):
        x = rows(mlp, spec.batch, spec.input_dtype, seed)
        if seed == 0:
            y = runner.run(x)
        else:
            runner.input[...] = x
            y = runner.run(runner.input)
        z = mlp.reference_logits(x)
        if spec.output == "logits":
            assert_close(y, z)
        elif spec.output == "proba":
            assert_close(y, mlp.probabilities(z))
        else:
            _check_ids(mlp, z, y, spec.output)
    return runner


def _check_ids(mlp: MLP, z: np.ndarray, y, output: str) -> None:
    ids = y[0] if output == "margin" else y
    top = np.sort(np.concatenate([z, np.zeros_like(z)], axis=1) if mlp.head == "sigmoid" else z, axis=1)
    gap = top[:, -1] - top[:, -2] if top.shape[1] > 1 else np.full(len(z), np.inf)
    decided = gap > 1e-4  # nearer than that, float32 may decide otherwise
    assert decided.mean() > 0.9 or len(z) < 20
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids[decided], mlp.class_ids(z)[decided])
    if output == "margin":
        assert_close(y[1], gap)
