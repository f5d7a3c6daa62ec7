"""Quantisation in NumPy, with the exact references that engines equal.

``quantise`` gives an MLP its codes and scales, ``integer_form`` the numbers that a kernel computes with in scheme
``w8`` (an int8 first layer and float later layers; ``byteform`` has those of ``w8a8`` and ``w7``), and ``agreement``
says how many predictions change. ``docs/quantisation.md`` has the arithmetic, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.activations import apply_activation
from gigamlp.byteform import BYTE_SCHEMES, ByteForm, byte_form, calibrate, with_codes
from gigamlp.cascade import Model, one_mlp
from gigamlp.clipping import first_scale
from gigamlp.codes import codes_and_scale
from gigamlp.errors import DataError, InvalidInput, Unsupported
from gigamlp.integer import RANGES, Integer
from gigamlp.layers import SCHEMES, Layer, Scheme, frozen
from gigamlp.mlp import MLP

__all__ = [
    "HALF_LIMIT",
    "Agreement",
    "ByteForm",
    "Integer",
    "agreement",
    "byte_form",
    "calibrate",
    "first_bias",
    "fit_half",
    "form_of",
    "half_layers",
    "in_scheme",
    "integer_form",
    "quantise",
]

HALF_LIMIT = 60_000.0  # worst-case |hidden| that may be rounded to float16, whose largest number is 65,504

Array = NDArray[Any]
_Ends = tuple[Array, Array]  # least and largest value of each output, float64
_HALF_MAX = float(np.finfo(np.float16).max)
_HALF_NORMAL = float(np.finfo(np.float16).tiny)
_FLOAT_MAX = float(np.finfo(np.float32).max)
# bounds are widened by this share of the sum of |products|: it covers two operands rounded to float16 (2**-11 each) and
# the roundings of 128 sums in float32
_SLACK = 2.0**-9


# ---- codes and scales -----------------------------------------------------------------------------------------------


def quantise(mlp: MLP, scheme: str = "w8", *, calibration: ArrayLike | None = None) -> MLP:
    """Return `mlp` with a scheme that holds codes and scales.

    What `mlp` carries already is kept as it is; what is missing is derived. Per output, the scale is the largest
    absolute weight (times the scale of its inputs) / 127 (``w7``: / 63), and codes are weights / scale, rounded to
    nearest even. ``w8`` has them for the first layer, ``w8a8`` and ``w7`` for every layer, and for each hidden unit the
    scale and zero point of its bytes, from the range that it takes over the calibration rows.

    Parameters
    ----------
    mlp : MLP
    scheme : {"w8", "w8a8", "w7"}
    calibration : array_like, shape [n, features], optional
        Raw rows, a few thousand of those that the MLP was trained with; ``w8a8`` and ``w7`` need them. With them ``w8``
        without a scheme of its own, and the others where each feature has an input scale of its own, take the first
        layer's scales from `clipping.first_scale`: weights of features that are hardly ever set may be cut off.

    Returns
    -------
    MLP
        With a `Scheme` that holds ``codes.I`` int8 [out, in], ``scale.I`` float32 [out], and for ``w8a8`` and ``w7``
        ``hidden_scale.I`` float32 [out] and ``hidden_zero.I`` uint8 [out]. The weights stay as they are.

    Raises
    ------
    InvalidInput
        If the scheme is unknown, `mlp` carries another one, or hidden ranges are missing.
    ModelError
        If the codes and weights contradict each other.
    Unsupported
        For arrays that the scheme has no use for, and sums that do not fit into int32.

    Examples
    --------
    >>> import gigamlp as gm
    >>> mlp = quantise(gm.MLP([gm.Layer([[0.5, -1.27], [0.0, 0.0]])]))
    >>> mlp.scheme.arrays["codes.0"].tolist(), mlp.scheme.arrays["scale.0"].round(4).tolist()
    ([[50, -127], [0, 0]], [0.009999999776482582, 1.0])
    """
    one_mlp(mlp, "quantise")
    if scheme not in SCHEMES:
        raise InvalidInput(f"unknown quantisation scheme {scheme!r}; known: {', '.join(SCHEMES)}")
    if mlp.scheme is not None and mlp.scheme.name != scheme:
        raise InvalidInput(
            f"{mlp.name!r} carries the scheme {mlp.scheme.name!r}; quantise mlp.with_(scheme=None) to replace it"
        )
    if scheme in BYTE_SCHEMES:
        return with_codes(mlp, scheme, None if calibration is None else calibrate(mlp, calibration))
    if calibration is not None and mlp.scheme is None:
        mlp = mlp.with_(scheme=Scheme(scheme, {"scale.0": first_scale(mlp, calibration)}))
    codes, scale = _codes(mlp)
    return mlp.with_(scheme=Scheme(scheme, {"codes.0": codes, "scale.0": scale}))


def _codes(mlp: MLP) -> tuple[Array, Array]:
    """Return the first layer's codes int8 [out, in] and scales float32 [out], given or derived."""
    given = {} if mlp.scheme is None else mlp.scheme.arrays
    useless = sorted(set(given) - {"codes.0", "scale.0"})
    if useless:
        raise Unsupported(f"scheme 'w8' has float layers after the first: it has no use for {', '.join(useless)}")
    weight = mlp.layers[0].weight.astype(np.float64) * np.asarray(mlp.input_scale, np.float64)
    return codes_and_scale(weight, given.get("codes.0"), given.get("scale.0"))


# ---- the integer form -----------------------------------------------------------------------------------------------


def integer_form(mlp: MLP, input_dtype: str = "uint8") -> Integer:
    """Return `mlp` in scheme ``w8`` for rows of `input_dtype`; codes and scales come from its scheme or are derived.

    Raises
    ------
    Unsupported
        If the rows are not bytes, the scheme is another one, or numbers leave the range of int32, float32 or float16.
    ModelError
        If the codes and weights contradict each other.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, -1.0]], [0.5], "relu"), gm.Layer([[2.0]])])
    >>> integer_form(mlp).reference_accumulators(np.array([[200, 50]], np.uint8))
    array([[19050]], dtype=int32)
    """
    if input_dtype not in RANGES:
        raise Unsupported(f"scheme 'w8' multiplies bytes: rows must be uint8 or int8, not {input_dtype}")
    if mlp.scheme is not None and mlp.scheme.name != "w8":
        raise Unsupported(f"the model has the scheme {mlp.scheme.name!r}, and this is the arithmetic of 'w8'")
    codes, scale = _codes(mlp)
    bias = first_bias(mlp)
    activation = mlp.layers[0].activation
    ends = _first_ends(codes, scale.astype(np.float64), bias.astype(np.float64), RANGES[input_dtype])
    ends, exponent = fit_half(ends, activation, 0, last=len(mlp.layers) == 1)
    scale, bias = np.ldexp(scale, -exponent), np.ldexp(bias, -exponent)
    layers, exponents, bounds = half_layers(mlp, ends, exponent)
    return Integer(
        mlp,
        input_dtype,
        codes=frozen(codes, np.int8, "codes"),
        scale=frozen(scale, np.float32, "scale"),
        bias=frozen(bias, np.float32, "bias"),
        code_sums=frozen(codes.sum(axis=1, dtype=np.int64), np.int32, "code sums"),
        activation=activation,
        layers=layers,
        exponents=exponents,
        bounds=bounds,
    )


def half_layers(
    mlp: MLP, ends: tuple[Array, Array], exponent: int
) -> tuple[tuple[Layer, ...], tuple[int, ...], tuple[float, ...]]:
    """Return the layers after the first for float16 operands: layers, exponents and bounds as `Integer` has them.

    Parameters
    ----------
    mlp : MLP
    ends : (low, high)
        Least and largest value of each output of the first layer, float64 [out], divided by ``2**exponent``.
    exponent : int
        Of the first layer.

    Raises
    ------
    Unsupported
        If numbers leave float16's or float32's range.
    """
    layers, exponents, bounds = [], [exponent], [_bound(ends)]
    for index, layer in enumerate(mlp.layers[1:], start=1):
        weight = np.ldexp(layer.weight.astype(np.float64), exponent)
        own = np.zeros(len(weight)) if layer.bias is None else layer.bias.astype(np.float64)
        last = index == len(mlp.layers) - 1
        ends, exponent = fit_half(_next_ends(weight, own, ends), layer.activation, index, last=last)
        weight = np.ldexp(weight, -exponent)
        _check_half(weight, index)
        layers.append(Layer(weight, np.ldexp(own, -exponent), layer.activation))
        exponents.append(exponent)
        bounds.append(_bound(ends))
    return tuple(layers), tuple(exponents), tuple(bounds)


def first_bias(mlp: MLP) -> NDArray[np.float32]:
    """Return the first layer's bias with the input offset folded in, float32 [out].

    Raises
    ------
    Unsupported
        If it leaves float32's range.
    """
    first = mlp.layers[0]
    weight = first.weight.astype(np.float64)
    offset = np.broadcast_to(np.asarray(mlp.input_offset, np.float64), (weight.shape[1],))
    bias = weight @ offset + (0.0 if first.bias is None else first.bias.astype(np.float64))
    largest = float(np.abs(bias).max())
    if largest > _FLOAT_MAX:
        raise Unsupported(f"the input offset makes a bias of {largest:.3g} in layer 0, beyond float32")
    return bias.astype(np.float32)


def form_of(mlp: MLP, input_dtype: str = "uint8") -> Integer | ByteForm:
    """Return the form of the scheme that `mlp` carries, of ``w8`` if it carries none."""
    if mlp.scheme is not None and mlp.scheme.name in BYTE_SCHEMES:
        return byte_form(mlp, input_dtype)
    return integer_form(mlp, input_dtype)


def in_scheme(mlp: Model, scheme: object, ranges: Mapping[str, ArrayLike] | None) -> Model:
    """Return the model that an engine builds for a variant's option ``scheme``.

    That is `mlp` itself, but with the codes of ``w8a8`` or ``w7`` where it has no scheme of its own and `ranges` (what
    `calibrate` gave, also as plain lists) holds its hidden scales; for ``w8`` where `ranges` holds ``scale.0``.
    A cascade's stages stay as they are.
    """
    if not isinstance(mlp, MLP) or mlp.scheme is not None or ranges is None:
        return mlp
    if scheme == "w8" and "scale.0" in ranges:
        return mlp.with_(scheme=Scheme("w8", {"scale.0": np.asarray(ranges["scale.0"], np.float32)}))
    if scheme not in BYTE_SCHEMES:
        return mlp
    return with_codes(mlp, str(scheme), {key: np.asarray(value) for key, value in ranges.items()})


# ---- ranges ---------------------------------------------------------------------------------------------------------


def _first_ends(codes: Array, scale: Array, bias: Array, span: tuple[int, int]) -> _Ends:
    above = np.maximum(codes, 0).sum(axis=1, dtype=np.int64)
    below = np.minimum(codes, 0).sum(axis=1, dtype=np.int64)
    least, most = span
    low, high = above * least + below * most, above * most + below * least
    magnitude = np.maximum(-low, high) * scale + np.abs(bias)
    if magnitude.max() > _FLOAT_MAX:  # even if the bias brought it back: the product comes first
        raise Unsupported(f"layer 0 can reach {magnitude.max():.3g}, beyond float32")
    return _widened(low * scale + bias, high * scale + bias, magnitude)


def _next_ends(weight: Array, bias: Array, ends: _Ends) -> _Ends:
    low, high = ends
    up, down = np.maximum(weight, 0), np.minimum(weight, 0)
    # below float16's normal range roundings are no share of the number
    products = (np.abs(weight) + _HALF_NORMAL) @ (np.maximum(np.abs(low), np.abs(high)) + _HALF_NORMAL)
    return _widened(up @ low + down @ high + bias, up @ high + down @ low + bias, products + np.abs(bias))


def _widened(low: Array, high: Array, magnitude: Array) -> _Ends:
    return low - _SLACK * magnitude, high + _SLACK * magnitude


def fit_half(ends: _Ends, activation: str, index: int, *, last: bool) -> tuple[_Ends, int]:
    """Return the ends after the activation, divided by the least power of two that float16 needs, and its exponent."""
    largest = _largest(ends)
    if largest > _FLOAT_MAX:
        raise Unsupported(f"layer {index} can reach {largest:.3g}, beyond float32")
    low, high = _after(activation, *ends)
    largest = _largest((low, high))
    if last or largest <= HALF_LIMIT:
        return (low, high), 0
    if activation not in ("identity", "relu"):
        raise Unsupported(
            f"layer {index} can reach {largest:,.0f}, more than the {HALF_LIMIT:,.0f} that is safe in float16, and "
            f"{activation} cannot be scaled by a power of two"
        )
    exponent = math.ceil(math.log2(largest / HALF_LIMIT))
    return (np.ldexp(low, -exponent), np.ldexp(high, -exponent)), exponent


def _after(activation: str, low: Array, high: Array) -> _Ends:
    if activation in ("identity", "relu", "tanh", "logistic"):  # they only rise
        return apply_activation(activation, low), apply_activation(activation, high)
    # gelu, gelu_tanh, silu lie between min(x, 0) and max(x, 0), and never below -0.279
    return np.clip(low, -0.28, 0.0), np.maximum(high, 0.0)


def _largest(ends: _Ends) -> float:
    return float(max(np.abs(end).max() for end in ends))


def _bound(ends: _Ends) -> float:
    """Return the largest value and one float32 step: activations are rounded, a logistic of 0.99999996 may become 1."""
    largest = _largest(ends)
    wider = float(np.nextafter(np.float32(largest), np.float32(np.inf)))
    return min(wider, HALF_LIMIT) if largest <= HALF_LIMIT else wider


def _check_half(weight: Array, index: int) -> None:
    largest = float(np.abs(weight).max())
    if largest > _HALF_MAX:
        raise Unsupported(
            f"layer {index} has a weight of {largest:,.0f} for its (scaled) inputs; float16 ends at {_HALF_MAX:,.0f}"
        )
    if 0 < largest < _HALF_NORMAL:
        raise Unsupported(
            f"layer {index}'s largest weight is {largest:.2e}, below float16's normal range ({_HALF_NORMAL:.2e}): most "
            "of its digits would be lost; scale the layers so that weights are nearer to 1"
        )


# ---- agreement ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How the integer predictions of an MLP compare with its float32 predictions.

    Attributes
    ----------
    rows : int
    differing : int
        Rows with another prediction.
    accuracy_float32, accuracy_integer : float or None
        Shares of right predictions; None without labels. For ``multilabel`` a row is right if all its labels are.
    """

    rows: int
    differing: int
    accuracy_float32: float | None = None
    accuracy_integer: float | None = None

    @property
    def share(self) -> float:
        """Share of the rows with another prediction."""
        return self.differing / self.rows


def agreement(mlp: MLP, x: ArrayLike, y: ArrayLike | None = None) -> Agreement:
    """Count the rows of `x` for which `mlp` predicts something else in its scheme (else ``w8``) than in float32.

    Parameters
    ----------
    mlp : MLP
        With a scheme or without: codes and scales are derived then, as `quantise` does.
    x : array_like of uint8 or int8, shape [n, features]
    y : array_like, shape [n] (``multilabel``: 0/1 [n, labels]), optional
        True labels, for the accuracies.

    Raises
    ------
    InvalidInput
        If the rows are not bytes, or the head is ``regression``, which predicts no classes.
    DataError
        If there are no rows, or the labels do not fit.
    Unsupported, ModelError
        See `integer_form`.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, 0.0], [0.0, 1.0]])])
    >>> agreement(mlp, np.array([[3, 1], [1, 3]], np.uint8), [0, 1])
    Agreement(rows=2, differing=0, accuracy_float32=1.0, accuracy_integer=1.0)
    """
    one_mlp(mlp, "agreement")
    if mlp.head == "regression":
        raise InvalidInput("head 'regression' predicts no classes; compare integer_form(...).reference_logits instead")
    rows = mlp.check_rows(x)
    if rows.dtype.name not in RANGES:
        raise InvalidInput(f"integer schemes multiply bytes: rows must be uint8 or int8, got {rows.dtype}")
    if len(rows) == 0:
        raise DataError("agreement needs at least one row")
    truth = None if y is None else _labels(mlp, y, len(rows))
    float32 = mlp.predict(rows)
    integer = mlp.answers(form_of(mlp, rows.dtype.name).reference_logits(rows))
    right = [None if truth is None else float(np.mean(_same(each, truth))) for each in (float32, integer)]
    return Agreement(len(rows), int(np.sum(~_same(float32, integer))), *right)


def _same(a: Array, b: Array) -> NDArray[np.bool_]:
    return np.asarray((a == b).reshape(len(a), -1).all(axis=1))


def _labels(mlp: MLP, y: ArrayLike, rows: int) -> Array:
    labels = np.asarray(y)
    shape = (rows, mlp.outputs) if mlp.head == "multilabel" else (rows,)
    if labels.shape != shape:
        raise DataError(f"labels have shape {list(labels.shape)}, expected {list(shape)}")
    known: Array = np.array([0, 1]) if mlp.head == "multilabel" else np.asarray(mlp.classes)
    wrong = set(np.unique(labels).tolist() if labels.dtype.kind in "buifU" else labels.ravel().tolist())
    wrong -= set(known.tolist())
    if wrong:
        raise DataError(f"label {min(wrong, key=str)!r} is not one of {known.tolist()[:20]}")
    return labels
