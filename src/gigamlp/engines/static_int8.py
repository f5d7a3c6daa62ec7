"""An MLP in static int8, as the peers' QuantizeLinear graphs want it: int8 weights, uint8 hidden values, int32 biases.

Where the ranges of the hidden values come from is a word of the variant, ``hidden``: ``scheme`` (the scales that the
model's scheme ``w8a8`` or ``w7`` carries), ``bound`` (the largest values that any row can give, from the weights: safe,
and coarse), or ``float`` (they stay float32; only the first layer is integer, as in scheme ``w8``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.activations import apply_activation
from gigamlp.errors import Unsupported
from gigamlp.folding import folded_layers
from gigamlp.integer import RANGES
from gigamlp.layers import Scheme
from gigamlp.mlp import MLP
from gigamlp.quantize import quantise

__all__ = ["IntegerLayer", "StaticInt8", "first_layer", "hidden_choices", "static_int8"]

Array = NDArray[Any]
_Folded = tuple[Array, Array | None, str]
_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
_NEVER_ON = 1e-28  # a hidden unit that never gets past this is off
_LEAST_ACTIVATION = -0.28  # gelu, gelu_tanh and silu end at -0.170, -0.170 and -0.278


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """One int8 layer: ``activation(x * in_scale @ (codes * scale) + bias) * gain + shift``, then rounded to uint8.

    Attributes
    ----------
    codes : ndarray of int8 [in, out]
    scale : ndarray of float32 [out]
    bias : ndarray of float64 [out]
    in_scale : float
        Step of the layer's input; the raw rows have 1.
    activation : str
    gain, shift : ndarray of float32 [out] or None
    out_scale : float or None
        Step of the layer's output; None if it stays float32.
    out_zero : int
        The output's code for 0.
    """

    codes: Array
    scale: Array
    bias: Array
    in_scale: float
    activation: str
    gain: Array | None = None
    shift: Array | None = None
    out_scale: float | None = None
    out_zero: int = 0


@dataclass(frozen=True, eq=False)
class StaticInt8:
    """A quantised MLP: int8 layers, then `rest`, float32 layers as (weight [in, out], bias [out], activation)."""

    mlp: MLP
    input_dtype: str
    layers: tuple[IntegerLayer, ...]
    rest: tuple[_Folded, ...]


# ---- what there is --------------------------------------------------------------------------------------------------


def hidden_choices(mlp: MLP, input_dtype: str, *, full: bool) -> tuple[str, ...]:
    """Return the values of ``hidden`` that hold for `mlp`, the most promising first; none for rows that are no bytes.

    A model that carries a scheme is only run as that scheme says, or more exactly: the accuracy gate lets it pass
    without validation rows.
    """
    if input_dtype not in RANGES:
        return ()
    name = None if mlp.scheme is None else mlp.scheme.name
    if scheme_steps(mlp):
        return ("scheme", "float")
    return ("float", "bound") if full and name is None and mlp.hidden else ("float",)


def scheme_steps(mlp: MLP) -> list[tuple[Array, Array]]:
    """Return (step, zero point) [out] of the hidden layers' bytes that the scheme carries, up to the first without."""
    found: list[tuple[Array, Array]] = []
    arrays = {} if mlp.scheme is None or mlp.scheme.name == "w8" else mlp.scheme.arrays
    for index, layer in enumerate(mlp.layers[:-1]):
        step, zero = arrays.get(f"hidden_scale.{index}"), arrays.get(f"hidden_zero.{index}", np.zeros(1))
        if step is None:
            break
        width = (len(layer.weight),)
        found.append((np.broadcast_to(step.astype(np.float64), width), np.broadcast_to(zero.astype(np.float64), width)))
    return found


def first_layer(mlp: MLP) -> tuple[Array, Array]:
    """Return the first layer's codes int8 [out, in] and scales float32 [out], from the scheme or as ``w8`` has them.

    Raises
    ------
    Unsupported, ModelError
        See `quantise`.
    """
    scheme = mlp.scheme
    if scheme is not None and scheme.name != "w8":  # the first layer's arithmetic is the same in all
        own = {key: value for key, value in scheme.arrays.items() if key in ("codes.0", "scale.0")}
        scheme = Scheme("w8", own)
    made = quantise(mlp.with_(scheme=scheme), "w8").scheme
    assert made is not None
    return made.arrays["codes.0"], made.arrays["scale.0"]


# ---- making it ------------------------------------------------------------------------------------------------------


def static_int8(mlp: MLP, input_dtype: str, hidden: str) -> StaticInt8:
    """Return `mlp` in static int8.

    Parameters
    ----------
    mlp : MLP
    input_dtype : {"uint8", "int8"}
    hidden : {"scheme", "bound", "float"}

    Raises
    ------
    Unsupported
        If the numbers leave the range of float32.
    """
    codes, scale = first_layer(mlp)
    given = scheme_steps(mlp) if hidden == "scheme" else []
    folded = folded_layers(mlp)
    low, high = (np.full(mlp.features_read, float(end)) for end in RANGES[input_dtype])
    in_scale, gains, zeros = 1.0, np.ones(mlp.features_read), np.zeros(mlp.features_read)
    layers: list[IntegerLayer] = []
    for index, (weight, own, activation) in enumerate(folded):
        exact = weight.astype(np.float64)
        bias = np.zeros(weight.shape[1]) if own is None else own.astype(np.float64)
        low, high = _ends(exact, bias, low, high, activation)
        if index == 0:
            kept, steps = codes.T, scale.astype(np.float64)
        else:
            kept, steps = _codes(mlp, index, exact * gains[:, None], hidden == "scheme")
        last = index == len(folded) - 1
        bias = bias - zeros @ (kept * steps)
        layer = IntegerLayer(np.ascontiguousarray(kept), _float32(steps), bias, in_scale, activation)
        if last or hidden == "float" or (hidden == "scheme" and index == len(given)):
            layers.append(layer)
            break
        layer, gains = _rounded(layer, given[index] if hidden == "scheme" else None, low, high)
        in_scale, zeros = layer.out_scale or 1.0, np.zeros(len(gains)) if hidden == "bound" else given[index][1]
        layers.append(layer)
    return StaticInt8(mlp, input_dtype, tuple(layers), tuple(folded[len(layers) :]))


def _rounded(
    layer: IntegerLayer, given: tuple[Array, Array] | None, low: Array, high: Array
) -> tuple[IntegerLayer, NDArray[np.float64]]:
    """Return the layer with its output in uint8, and the factors by which the next layer's inputs are too small.

    ReLU and a positive factor change places: a step for each output goes into the weights, and costs nothing.
    """
    plain = (layer.codes, layer.scale, layer.bias, layer.in_scale, layer.activation)
    if given is None and layer.activation != "relu":
        least, most = min(float(low.min()), 0.0), max(float(high.max()), 0.0)
        width = max((most - least) / 255, _TINY)
        return IntegerLayer(*plain, out_scale=width, out_zero=round(-least / width)), np.ones(len(low))
    each = np.where(high > _NEVER_ON, high / 255, 1.0) if given is None else given[0]
    if layer.activation == "relu" and (given is None or not given[1].any()):
        codes, scale, bias, in_scale, activation = plain
        return IntegerLayer(codes, _float32(scale / each), bias / each, in_scale, activation, out_scale=1.0), each
    shift = None if given is None else given[1].astype(np.float32)
    return IntegerLayer(*plain, gain=_float32(1 / each), shift=shift, out_scale=1.0), each


def _codes(mlp: MLP, index: int, weight: Array, from_scheme: bool) -> tuple[Array, Array]:
    """Return codes int8 [in, out] and steps float64 [out] of a later layer, given by the scheme or derived."""
    arrays = mlp.scheme.arrays if from_scheme and mlp.scheme is not None else {}
    codes, steps = arrays.get(f"codes.{index}"), arrays.get(f"scale.{index}")
    if steps is None:
        peak = np.abs(weight).max(axis=0)
        top = 127.0 if codes is None else np.maximum(np.abs(codes.astype(np.float64)).max(axis=1), 1.0)
        steps = np.where(peak > 0, peak / top, 1.0)
    steps = np.maximum(steps.astype(np.float64), _TINY)
    if codes is None:
        return np.clip(np.rint(weight / steps), -127, 127).astype(np.int8), steps
    return codes.T, steps


def _float32(values: Array) -> Array:
    if not np.isfinite(values).all() or np.abs(values).max() > _HUGE:
        raise Unsupported("the scales of the int8 layers leave the range of float32; scale the model's layers")
    return np.maximum(values, _TINY).astype(np.float32)


def _ends(weight: Array, bias: Array, low: Array, high: Array, activation: str) -> tuple[Array, Array]:
    """Return the least and largest output of each unit, weight [in, out], for inputs between `low` and `high`."""
    up, down = np.maximum(weight, 0), np.minimum(weight, 0)
    least, most = low @ up + high @ down + bias, high @ up + low @ down + bias
    if activation in ("identity", "relu", "tanh", "logistic"):  # they only rise
        return apply_activation(activation, least), apply_activation(activation, most)
    return np.clip(least, _LEAST_ACTIVATION, 0.0), np.maximum(most, 0.0)
