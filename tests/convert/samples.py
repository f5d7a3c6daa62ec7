"""Random networks as plain numbers, and how far apart logits are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["Network", "networks", "relative"]

ACTIVATIONS = ("identity", "relu", "tanh", "logistic", "gelu", "gelu_tanh", "silu")


@dataclass(frozen=True)
class Network:
    """Weights [out, in], biases or None, and one activation for each hidden layer."""

    weights: list[Any]
    biases: list[Any]
    activations: list[str]
    rows: Any
    dtype: str

    @property
    def widths(self) -> list[int]:
        return [self.weights[0].shape[1], *(len(w) for w in self.weights)]


def networks(count: int, seed: int, activations=ACTIVATIONS, *, bias: bool = True):
    """Yield networks of depth 1-4 and widths 1-512 (log-uniform), float32 and float64, with and without biases."""
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        depth = int(rng.integers(1, 5))
        widths = [int(w) for w in np.exp2(rng.uniform(0, 9.0001, depth + 1))]
        if index < 4:  # the corners: one feature, one output, and the widest
            widths = [[1, 1], [512, 1], [1, 512], [512, 512, 512]][index]
        dtype = ("float32", "float64")[int(rng.integers(2))]
        weights = [rng.normal(size=(o, i)).astype(dtype) / np.sqrt(i).astype(dtype) for i, o in pairwise(widths)]
        with_bias = bias or [bool(rng.integers(2)) for _ in weights]
        biases = [rng.normal(size=len(w)).astype(dtype) * 0.3 for w in weights]
        if bias is False:
            biases = [b if keep else None for b, keep in zip(biases, with_bias, strict=True)]
        kinds = [str(rng.choice(activations)) for _ in weights[:-1]]
        rows = rng.normal(size=(16, widths[0])).astype(dtype)
        yield Network(weights, biases, kinds, rows, dtype)


def relative(found: Any, wanted: Any) -> float:
    """Return ``|found - wanted| / |wanted|`` over all logits."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
