"""Random MLPs and rows for the fused kernel, and whether its answers are those of its form's reference."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import gigamlp as gm
from gigamlp.kernels.cuda.shape import network_of
from gigamlp.quantize import integer_form
from gigamlp.rounded import Rounded, round_bfloat16, rounded_form

__all__ = ["as_bytes", "check", "form", "make", "rounded", "rows_for", "run"]


def make(widths, *, features=None, columns=None, activation="relu", head="softmax", seed=0, last="identity"):
    """A random MLP whose activations are neither all 0 nor saturated: `widths` = features read, hidden …, logits."""
    rng = np.random.default_rng(seed)
    layers = []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        weight = rng.normal(size=(outputs, inputs)) / np.sqrt(inputs)
        if index == 0:
            weight /= 70  # bytes have a standard deviation of 74
        name = last if index == len(widths) - 2 else activation
        layers.append(gm.Layer(weight, 0.3 * rng.normal(size=outputs), name))
    return gm.MLP(layers, head=head, columns=columns, features=features or 0, input_offset=-3.5 if seed % 2 else 0.0)


def rows_for(mlp, count, dtype="uint8", seed=0):
    """Random rows; for a float dtype numbers that it has (bfloat16 in float32), NaN in features that are not read."""
    rng = np.random.default_rng(seed)
    if dtype in ("uint8", "int8"):
        return rng.integers(0, 256, (count, mlp.features), np.uint8).view(dtype)
    x = 74 * rng.standard_normal((count, mlp.features))
    unread = np.ones(mlp.features, bool)
    for start, stop in mlp.columns or ((0, mlp.features),):
        unread[start:stop] = False
    x[:, unread] = np.nan
    if dtype == "bfloat16":
        return round_bfloat16(x).astype(np.float32)
    return x.astype(dtype)


def as_bytes(x, dtype):
    """What rows of `dtype` are in memory."""
    if dtype == "bfloat16":
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(x).view(np.uint8)


def rounded(mlp, rows, compute=None, output="class", dtype=None, later="tf32"):
    found = rounded_form(mlp, rows, compute, later)
    return found, network_of(found, output, dtype)


def form(mlp, output="class", dtype=None, rows="uint8"):
    integer = integer_form(mlp, rows)
    return integer, network_of(integer, output, dtype)


def tolerance(integer):
    """What float32 sums in another order, and the float16 roundings that they may turn over, can change."""
    if not integer.layers:
        return 0.0 if integer.activation in ("relu", "identity") else 1e-6
    exact = len(integer.layers) == 1 and integer.activation in ("relu", "identity")
    return 2e-5 if exact else 4e-3


def check(integer, network, x, got):
    """Assert that `got` is the kernel's answer for rows `x`."""
    mlp = integer.mlp
    if isinstance(integer, Rounded):
        want, near = integer.reference(x)
        near = near.max(axis=1, keepdims=True)
        assert len(x) < 30 or np.median(near) < 4e-3 * max(1.0, np.abs(want).max())  # or nothing would be compared
    else:
        want = integer.reference_logits(x)
        near = np.full((len(x), 1), tolerance(integer) * max(1.0, float(np.abs(want).max(initial=0))))
    if network.output == "logits":
        assert got.dtype == network.dtype
        rounding = np.abs(want) * 2.0**-11 + 2.0**-24 if network.dtype == "float16" else np.abs(want) * 2.0**-24
        assert (np.abs(got.astype(np.float64) - want) <= near + rounding).all(), np.abs(got - want).max()
        return
    if network.output == "proba":
        assert (np.abs(got - mlp.probabilities(want)) <= near + 1e-6).all()
        return
    near = near[:, 0]
    ids, margin = got if network.output == "margin" else (got, None)
    assert ids.dtype == network.dtype
    right = mlp.class_ids(want)
    if mlp.head == "sigmoid":
        gap = np.abs(want[:, 0])
    else:
        top = np.sort(want, axis=1)
        gap = top[:, -1] - top[:, -2] if mlp.outputs > 1 else np.full(len(x), np.inf)
    clear = gap > 2 * near
    assert (ids[clear] == right[clear]).all()
    assert len(x) < 30 or clear.mean() > 0.5
    assert (ids < max(2, mlp.outputs)).all()
    if margin is not None:
        assert (np.abs(margin - gap) <= 2 * near + 1e-6 + 1e-6 * gap).all()


def run(kernel, integer, network, config, xs, **options):
    """Run a `HostKernel` on the batches `xs` and check each."""
    rows = [as_bytes(x, integer.input_dtype) for x in xs]
    for x, got in zip(xs, kernel(kernel.made.pack(integer), rows, **options), strict=True):
        check(integer, network, x, opened(network, got) if kernel.made.packets else got)


def opened(network, got, serial=0xFEDCBA98):
    """Return the values in packets, all of which must have the serial number."""
    parts = got if isinstance(got, tuple) else (got,)
    assert all((part[..., 1] == serial).all() for part in parts)
    values = []
    for part, (_, dtype) in zip(parts, network.outputs, strict=True):
        bits = np.ascontiguousarray(part[..., 0])
        values.append(bits.astype(dtype) if dtype in ("uint8", "int32") else bits.view(np.float32).astype(dtype))
    return values[0] if len(values) == 1 else tuple(values)
