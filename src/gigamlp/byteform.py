"""Schemes ``w8a8`` and ``w7``: bytes in every layer. The numbers that a kernel computes with, and the exact reference.

``docs/quantisation.md`` has the arithmetic, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.activations import apply_activation
from gigamlp.clipping import first_scale
from gigamlp.codes import codes_and_scale
from gigamlp.errors import DataError, InvalidInput, Unsupported
from gigamlp.integer import RANGES
from gigamlp.layers import Scheme, frozen
from gigamlp.mlp import MLP

__all__ = ["BYTE_SCHEMES", "ByteForm", "ByteLayer", "byte_form", "calibrate", "with_codes"]

# scheme -> (largest code that is derived, largest that is taken). 255 * (64 + 64) still fits into int16, the sum of two
# products that AVX2's vpmaddubsw saturates.
BYTE_SCHEMES = {"w8a8": (127, 128), "w7": (63, 64)}
_ROWS_PER_CHUNK = 4096
_FLOAT_MAX = float(np.finfo(np.float32).max)
_SIMPLE = ("identity", "relu")  # may be computed in steps of the hidden scale

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class ByteLayer:
    """One layer of a `ByteForm`.

    ``z = float32(float32(sums + correction) * scale) + bias``, two roundings, where ``sums = codes @ inputs`` in int32.
    The last layer's `z` are the logits, through its activation. A hidden layer's bytes are ``rint(z)`` within 0..255 if
    `inverse` is None (``relu`` and ``identity``: `scale` and `bias` are in steps of the hidden scale), else
    ``rint(float32(activation(z) * inverse) + zero)`` within 0..255. rint goes to nearest even.

    Attributes
    ----------
    codes : ndarray of int8, shape [out, in]
    correction : ndarray of int32, shape [out]
        Minus the sums of codes times the zero points of the inputs.
    scale, bias : ndarray of float32, shape [out]
    activation : str
    inverse, zero : ndarray of float32, shape [out], or None
    """

    codes: Array
    correction: Array
    scale: Array
    bias: Array
    activation: str
    inverse: Array | None = None
    zero: Array | None = None

    def sums(self, inputs: Array) -> NDArray[np.int32]:
        """Return the int32 sums [n, out], correction included, for whole-numbered `inputs` [n, in]."""
        # every product and partial sum is a whole number below 2**31: float64 holds it exactly, and BLAS is quick
        exact = inputs.astype(np.float64) @ self.codes.T.astype(np.float64)
        return np.asarray(exact.astype(np.int64) + self.correction, dtype=np.int32)

    def outputs(self, sums: Array, *, last: bool) -> Array:
        """Return the bytes uint8 [n, out], or for the last layer the logits float32, of int32 `sums`."""
        z = sums.astype(np.float32) * self.scale + self.bias
        if last:
            return apply_activation(self.activation, z)
        if self.inverse is not None:
            z = apply_activation(self.activation, z) * self.inverse + self.zero
        return np.clip(np.rint(z), 0, 255).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class ByteForm:
    """An MLP in scheme ``w8a8`` or ``w7``, for rows of one dtype, and its exact reference.

    Attributes
    ----------
    mlp : MLP
        Where it comes from, with its scheme: head, classes and columns are read there.
    input_dtype : {"uint8", "int8"}
    layers : tuple of ByteLayer
    """

    mlp: MLP = field(repr=False)
    input_dtype: str
    layers: tuple[ByteLayer, ...] = field(repr=False)

    def reference_hidden(self, x: ArrayLike, layer: int = 0) -> NDArray[np.uint8]:
        """Return hidden layer `layer`'s bytes uint8 [n, out] for rows `x` [n, features] of the input dtype.

        With ``relu`` and ``identity`` an engine has these very bytes; with other activations, whose last places differ
        between libraries, now and then a byte is one step off.
        """
        if not 0 <= layer < len(self.layers) - 1:
            raise InvalidInput(f"hidden layers are 0..{len(self.layers) - 2}, got {layer}")
        return self._by_chunks(x, lambda rows: self._through(rows, layer + 1))

    def reference_logits(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the logits float32 [n, outputs], which an engine gives bit for bit (see `reference_hidden`)."""
        return self._by_chunks(x, lambda rows: self._through(rows, len(self.layers)))

    def _through(self, rows: Array, count: int) -> Array:
        for index, layer in enumerate(self.layers[:count]):
            rows = layer.outputs(layer.sums(rows), last=index == len(self.layers) - 1)
        return rows

    def _by_chunks(self, x: ArrayLike, then: Callable[[Array], Array]) -> Array:
        rows = self.mlp.check_rows(x)
        if rows.dtype != self.input_dtype:
            low, high = RANGES[self.input_dtype]
            raise InvalidInput(
                f"rows are {rows.dtype}, this form takes {self.input_dtype}; if they hold whole numbers "
                f"{low}..{high}, x.astype(np.{self.input_dtype}) makes them so"
            )
        begins = range(0, max(len(rows), 1), _ROWS_PER_CHUNK)
        return np.concatenate([then(self.mlp.read_columns(rows[b : b + _ROWS_PER_CHUNK])) for b in begins])


# ---- hidden ranges --------------------------------------------------------------------------------------------------


def calibrate(mlp: MLP, rows: ArrayLike) -> dict[str, Array]:
    """Return the hidden scales and zero points that take in what `rows` reach: arrays of a `Scheme`.

    For an MLP with one input scale per feature also ``scale.0``, the first layer's by `clipping.first_scale`.

    Per hidden unit, 255 steps of its scale take in its float64 values over the rows, and 0; the zero point is the byte
    that stands for 0. Without negative values the scale is the largest / 255. A unit that is always 0 has scale 1.

    Raises
    ------
    DataError
        If there are no rows.
    InvalidInput
        If the rows do not fit the MLP or are not finite.

    Examples
    --------
    >>> import gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0], [-1.0]], None, "relu"), gm.Layer([[1.0, 1.0]])])
    >>> calibrate(mlp, [[51.0], [102.0]])["hidden_scale.0"].tolist()
    [0.4000000059604645, 1.0]
    """
    x = mlp.check_rows(rows)
    if len(x) == 0:
        raise DataError("calibration needs at least one row")
    count = len(mlp.layers) - 1
    low = [np.zeros(width) for width in mlp.hidden]
    high = [np.zeros(width) for width in mlp.hidden]
    for begin in range(0, len(x), _ROWS_PER_CHUNK):
        h = mlp.read_columns(x[begin : begin + _ROWS_PER_CHUNK]).astype(np.float64)
        if not np.isfinite(h).all():
            raise InvalidInput("calibration rows hold NaN or infinite values; clean or drop such rows first")
        h = h * np.asarray(mlp.input_scale, np.float64) + np.asarray(mlp.input_offset, np.float64)
        for index, layer in enumerate(mlp.layers[:count]):
            z = h @ layer.weight.T.astype(np.float64)
            h = apply_activation(layer.activation, z if layer.bias is None else z + layer.bias)
            low[index] = np.minimum(low[index], h.min(axis=0))
            high[index] = np.maximum(high[index], h.max(axis=0))
    arrays: dict[str, Array] = {}
    for index, (least, most) in enumerate(zip(low, high, strict=True)):
        zero, scale = _range_bytes(least, most)
        with np.errstate(over="ignore"):
            arrays[f"hidden_scale.{index}"] = np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float32)
        if not np.isfinite(arrays[f"hidden_scale.{index}"]).all():
            raise Unsupported(f"hidden layer {index} reaches {max(-least.min(), most.max()):.3g}, beyond float32")
        if zero.any():
            arrays[f"hidden_zero.{index}"] = zero.astype(np.uint8)
    if np.ndim(mlp.input_scale):  # each feature has its own: weights for raw rows may be of very different sizes
        arrays["scale.0"] = first_scale(mlp, x)
    return arrays


def _range_bytes(least: Array, most: Array) -> tuple[Array, Array]:
    """Return zero points and scales with which bytes hold ``least <= 0 .. most >= 0``, per unit.

    The zero point comes first, and the scale so that both ends lie within 0..255: an activation that saturates then
    stands on a whole number, not between two.
    """
    span = np.where(most - least == 0, 1.0, most - least)
    zero = np.rint(255 * (-least / span))
    zero = np.clip(zero, np.where(least < 0, 1, 0), np.where(most > 0, 254, 255))
    above = np.where(most > 0, most / np.maximum(255 - zero, 1), 0.0)
    below = np.where(least < 0, -least / np.maximum(zero, 1), 0.0)
    scale = np.maximum(above, below)
    return zero, np.where(scale == 0, 1.0, scale)


# ---- codes ----------------------------------------------------------------------------------------------------------


def with_codes(mlp: MLP, scheme: str, ranges: Mapping[str, Array] | None = None) -> MLP:
    """Return `mlp` with scheme `scheme` complete: codes and scales of all layers, hidden scales and zero points.

    Parameters
    ----------
    mlp : MLP
        With that scheme or none; arrays that its scheme has are kept.
    scheme : {"w8a8", "w7"}
    ranges : dict, optional
        What `calibrate` gave, for hidden scales that the MLP does not carry.

    Raises
    ------
    InvalidInput
        If a hidden scale is neither carried nor given.
    ModelError, Unsupported
        See `codes_and_scale`.
    """
    given = {} if mlp.scheme is None else dict(mlp.scheme.arrays)
    top, most = BYTE_SCHEMES[scheme]
    arrays: dict[str, Array] = {}
    factor = np.asarray(mlp.input_scale, np.float64)
    for index, layer in enumerate(mlp.layers):
        weight = layer.weight.astype(np.float64) * factor
        known = given.get(f"codes.{index}"), given.get(f"scale.{index}")
        if index == 0 and known[0] is known[1] is None and ranges is not None and "scale.0" in ranges:
            known = None, np.asarray(ranges["scale.0"] * (127 / top), np.float32)  # it is for codes up to 127
        codes, scale = codes_and_scale(weight, *known, top=top, layer=index)
        if np.abs(codes.astype(np.int16)).max() > most:
            raise Unsupported(f"scheme {scheme!r} takes codes within -{most}..{most}; layer {index} has larger ones")
        arrays[f"codes.{index}"], arrays[f"scale.{index}"] = codes, scale
        if index == len(mlp.layers) - 1:
            break
        arrays |= _hidden(index, len(weight), layer.activation, given if f"hidden_scale.{index}" in given else ranges)
        factor = arrays[f"hidden_scale.{index}"].astype(np.float64)
    useless = sorted(set(given) - set(arrays))
    if useless:
        raise Unsupported(f"scheme {scheme!r} has no use for {', '.join(useless)}")
    return mlp.with_(scheme=Scheme(scheme, arrays))


def _hidden(index: int, width: int, activation: str, source: Mapping[str, Array] | None) -> dict[str, Array]:
    """Return the scale and zero points of hidden layer `index` from `source`, one for each unit."""
    key, zero_key = f"hidden_scale.{index}", f"hidden_zero.{index}"
    if source is None or key not in source:
        raise InvalidInput(
            f"bytes in every layer need the range of hidden layer {index}: give calibration rows, as in "
            "gigamlp.quantise(mlp, 'w8a8', calibration=x_train)"
        )
    out: dict[str, Array] = {key: np.broadcast_to(source[key], (width,)).astype(np.float32)}
    if zero_key in source:
        out[zero_key] = np.broadcast_to(source[zero_key], (width,)).astype(np.uint8)
        if activation == "relu" and out[zero_key].any():
            raise Unsupported(f"hidden layer {index} is relu, whose zero points are 0; its {zero_key} are not")
    return out


# ---- the form -------------------------------------------------------------------------------------------------------


def byte_form(mlp: MLP, input_dtype: str = "uint8") -> ByteForm:
    """Return the numbers that kernels compute with, for an MLP that carries scheme ``w8a8`` or ``w7``.

    Raises
    ------
    InvalidInput
        If a hidden scale is missing.
    Unsupported
        If the MLP has another scheme or none, the rows are not bytes, or numbers leave int32 or float32.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, -1.0]], [0.5], "relu"), gm.Layer([[2.0], [-2.0]])])
    >>> form = byte_form(gm.quantise(mlp, "w8a8", calibration=[[255, 0]]))
    >>> form.reference_hidden(np.array([[200, 50]], np.uint8)).tolist()
    [[150]]
    """
    if mlp.scheme is None or mlp.scheme.name not in BYTE_SCHEMES:
        name = None if mlp.scheme is None else mlp.scheme.name
        raise Unsupported(f"the byte form needs scheme 'w8a8' or 'w7', the model has {name!r}; see gigamlp.quantise")
    scheme = mlp.scheme.name
    if input_dtype not in RANGES:
        raise Unsupported(f"scheme {scheme!r} multiplies bytes: rows must be uint8 or int8, not {input_dtype}")
    mlp = with_codes(mlp, scheme)
    assert mlp.scheme is not None
    arrays, layers = mlp.scheme.arrays, []
    zero: Array = np.zeros(mlp.features_read, np.int64)
    for index, layer in enumerate(mlp.layers):
        codes, scale = arrays[f"codes.{index}"], arrays[f"scale.{index}"].astype(np.float64)
        correction = -(codes.astype(np.int64) @ zero)
        bias = np.zeros(len(codes)) if layer.bias is None else layer.bias.astype(np.float64)
        if index == 0:
            offset = np.broadcast_to(np.asarray(mlp.input_offset, np.float64), (codes.shape[1],))
            bias = bias + layer.weight.astype(np.float64) @ offset
        inverse = shift = None
        if index < len(mlp.layers) - 1:
            step = arrays[f"hidden_scale.{index}"].astype(np.float64)
            zero = arrays.get(f"hidden_zero.{index}", np.zeros(len(codes))).astype(np.int64)
            if layer.activation in _SIMPLE:
                scale, bias = scale / step, bias / step + zero
            else:
                inverse, shift = _float32(1 / step, index, "1 / hidden scale"), zero.astype(np.float32)
        layers.append(
            ByteLayer(
                codes,
                frozen(correction, np.int32, "correction"),
                _float32(scale, index, "scale"),
                _float32(bias, index, "bias"),
                layer.activation,
                inverse,
                shift,
            )
        )
        _check_reach(layers[-1], index)
    return ByteForm(mlp, input_dtype, tuple(layers))


def _float32(values: Array, index: int, what: str) -> Array:
    if np.abs(values).max() > _FLOAT_MAX:
        raise Unsupported(f"layer {index}'s {what} reaches {np.abs(values).max():.3g}, beyond float32")
    return frozen(values, np.float32, what)


def _check_reach(layer: ByteLayer, index: int) -> None:
    """Refuse a layer whose rescaled sums can leave float32."""
    most = 255.0 * np.abs(layer.codes.astype(np.int64)).sum(axis=1)
    largest = float((most * np.abs(layer.scale.astype(np.float64)) + np.abs(layer.bias.astype(np.float64))).max())
    if largest > _FLOAT_MAX:
        raise Unsupported(f"layer {index} can reach {largest:.3g}, beyond float32")
