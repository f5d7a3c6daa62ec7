"""The activation functions that an MLP may use, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACTIVATIONS", "apply_activation", "erf", "logistic"]

Array = NDArray[Any]

_exact_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """Gauss error function, in the dtype of `x`.

    float64 goes through the C library (exact to the last place or so). float32 uses formula 7.1.26 of Abramowitz and
    Stegun, *Handbook of Mathematical Functions*: absolute error below 1.5e-7, about one float32 rounding.
    """
    if x.dtype == np.float64:
        return np.asarray(_exact_erf(x), dtype=np.float64)
    magnitude = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911) * magnitude)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(np.copysign(1 - poly * np.exp(-magnitude * magnitude), x), dtype=x.dtype)


def logistic(x: Array) -> Array:
    """``1 / (1 + exp(-x))`` without overflow for any finite `x`."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + erf(x * x.dtype.type(math.sqrt(0.5)))), dtype=x.dtype)


def _gelu_tanh(x: Array) -> Array:
    inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)), dtype=x.dtype)


# name -> function of a float32 or float64 array; the dtype is kept
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "logistic": logistic,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * logistic(x),
}


def apply_activation(name: str, x: Array) -> Array:
    """Apply the activation called `name` to `x` (float32 or float64) and keep the dtype."""
    return ACTIVATIONS[name](x)
