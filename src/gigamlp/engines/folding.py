"""The input's scale and offset as a part of the first layer, for engines that compute in floats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gigamlp.mlp import MLP

__all__ = ["fold_input"]

Float64 = NDArray[np.float64]


def fold_input(mlp: MLP) -> tuple[Float64, Float64 | None]:
    """Return weight [out, in] and bias [out] (or None) of a first layer for raw rows, in float64.

    Examples
    --------
    >>> import gigamlp as gm
    >>> fold_input(gm.MLP([gm.Layer([[1.0, 2.0]])], input_scale=0.5, input_offset=3.0, head="regression"))
    (array([[0.5, 1. ]]), array([9.]))
    """
    first = mlp.layers[0]
    weight = first.weight.astype(np.float64)
    bias = None if first.bias is None else first.bias.astype(np.float64)
    offset = np.asarray(mlp.input_offset, np.float64)
    if np.any(offset):
        shift = (weight * offset).sum(axis=1)
        bias = shift if bias is None else bias + shift
    return weight * np.asarray(mlp.input_scale, np.float64), bias
