"""The input's scale and offset, and unread features, as a part of the first layer: for whatever computes in floats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import ModelError
from gigamlp.mlp import MLP

__all__ = ["fold_input", "folded_layers", "whole_first_layer"]

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


def folded_layers(mlp: MLP) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None, str]]:
    """Return (weight [in, out], bias [out] or None, activation) per layer in float32, for raw rows.

    Examples
    --------
    >>> import gigamlp as gm
    >>> folded_layers(gm.MLP([gm.Layer([[1.0, 2.0]])], input_scale=0.5, head="regression"))
    [(array([[0.5],
           [1. ]], dtype=float32), None, 'identity')]
    """
    weight, bias = fold_input(mlp)
    first = None if bias is None else bias.astype(np.float32)
    later = [(np.ascontiguousarray(layer.weight.T), layer.bias, layer.activation) for layer in mlp.layers[1:]]
    return [(np.ascontiguousarray(weight.T, np.float32), first, mlp.layers[0].activation), *later]


def whole_first_layer(mlp: MLP) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Return weight [out, features] and bias [out] or None of a first layer for raw rows, rounded from float64 once.

    Raises
    ------
    ModelError
        If a folded number leaves float32.

    Examples
    --------
    >>> import gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, 2.0]])], input_scale=0.5, head="regression", columns=[(0, 1), (2, 3)])
    >>> whole_first_layer(mlp)
    (array([[0.5, 0. , 1. ]], dtype=float32), None)
    """
    read, bias = fold_input(mlp)
    weight = np.zeros((len(read), mlp.features), np.float32)
    with np.errstate(over="ignore"):
        begin = 0
        for start, stop in mlp.columns or ((0, mlp.features),):
            weight[:, start:stop] = read[:, begin : begin + stop - start]
            begin += stop - start
        single = None if bias is None else bias.astype(np.float32)
    if not np.isfinite(weight).all() or (single is not None and not np.isfinite(single).all()):
        raise ModelError("the input's scale and offset make weights of layer 0 that are beyond float32")
    return weight, single
