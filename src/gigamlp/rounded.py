"""An MLP whose operands are rounded to float16, bfloat16 or tf32 and whose sums are float32: for float tensor cores.

Nothing in it is quantised: the first layer's weights keep the digits that the format has. ``docs/kernels.md`` says what
each format does with which rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.activations import apply_activation
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.integer import RANGES
from gigamlp.layers import Layer, frozen
from gigamlp.mlp import MLP
from gigamlp.quantize import first_bias, fit_half, half_layers

__all__ = ["COMPUTES", "Rounded", "round_bfloat16", "round_float16", "round_tf32", "rounded_form"]

# rows' dtype: what their first layer can be multiplied in. Bytes are exact in float16, and rows in their own format are
# not rounded at all; "x2" has each weight as a sum of two numbers of the format, which leaves 2**-17 of it or less.
COMPUTES = {
    "uint8": ("float16", "float16x2"),
    "int8": ("float16", "float16x2"),
    "float16": ("float16", "float16x2"),
    "bfloat16": ("bfloat16x2", "bfloat16"),
    "float32": ("tf32",),
}
_ROWS_PER_CHUNK = 2048
_HALF_MAX = 65504.0
_LIMIT = {"uint8": (0.0, 255.0), "int8": (-128.0, 127.0), "float16": (-_HALF_MAX, _HALF_MAX)}
_STEP = 2.0**-22  # what one instruction's sum can lose of the sizes of its numbers: tensor cores cut digits off
_RISING = ("identity", "relu", "tanh", "logistic")
_EXACT = ("identity", "relu")
_STEEPEST = 1.13  # of gelu and silu

Array = NDArray[Any]


def round_float16(values: ArrayLike) -> Array:
    """Round to float16 (nearest, ties to even), as float64; beyond 65,504 infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(values).astype(np.float16).astype(np.float64))


def round_bfloat16(values: ArrayLike) -> Array:
    """Round to float32, then to bfloat16 (nearest, ties to even), as float64."""
    bits = np.asarray(values).astype(np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32).astype(np.float64))


def round_tf32(values: ArrayLike) -> Array:
    """Round to float32, then to the 10 digits of tf32 (nearest, ties away from 0, as the hardware does), as float64."""
    bits = np.asarray(values).astype(np.float32).view(np.uint32)
    return np.asarray(((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64))


_ROUND: dict[str, Callable[[ArrayLike], Array]] = {
    "float16": round_float16,
    "bfloat16": round_bfloat16,
    "tf32": round_tf32,
}


@dataclass(frozen=True, eq=False)
class Rounded:
    """An MLP in the form that float tensor cores compute with, for rows of one dtype, and its reference.

    Attributes
    ----------
    mlp : MLP
        Where it comes from: head, classes and columns are read there.
    input_dtype : {"uint8", "int8", "float16", "bfloat16", "float32"}
    compute : str
        What the first layer is multiplied in, one of ``COMPUTES[input_dtype]``.
    terms : tuple of ndarray of float32, shape [out, in]
        One array or two, whose sum the first layer's weights are, times `input_scale` and a power of two for each
        output. Each holds numbers of the format only.
    scale, bias : ndarray of float32, shape [out]
        First layer: ``activation(float32(sum * scale) + bias)``; scales are powers of two.
    activation : str
        Of the first layer.
    layers : tuple of Layer
        The later layers, each with a bias. Their operands are rounded to `later`, their sums are float32.
    later : {"tf32", "float16"}
    """

    mlp: MLP = field(repr=False)
    input_dtype: str
    compute: str
    terms: tuple[Array, ...] = field(repr=False)
    scale: Array = field(repr=False)
    bias: Array = field(repr=False)
    activation: str
    layers: tuple[Layer, ...] = field(repr=False)
    later: str

    @property
    def format(self) -> str:
        """The format of the first layer's operands: float16, bfloat16 or tf32."""
        return self.compute.removesuffix("x2")

    def reference_logits(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return the logits float64 [n, outputs]: operands rounded as the engine does, sums in float64."""
        return self.reference(x)[0]

    def reference(self, x: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the logits and how far float32 sums, in any order, can be from them; float64 [n, outputs] each.

        The bound follows each layer: what the sums of one can lose is carried through its activation and through the
        rounding to the next one's format, which may go the other way where a number lies near the middle of two.

        Parameters
        ----------
        x : array_like, shape [n, features]
            Rows of the input dtype; bfloat16 rows as float32.

        Raises
        ------
        InvalidInput
            If the rows have another dtype or width, or hold numbers that the input dtype does not have.
        """
        rows = self._rows(x)
        logits = np.empty((len(rows), self.mlp.outputs))
        bound = np.empty_like(logits)
        for begin in range(0, len(rows), _ROWS_PER_CHUNK):
            part = slice(begin, begin + _ROWS_PER_CHUNK)
            logits[part], bound[part] = self._forward(self.mlp.read_columns(rows[part]).astype(np.float64))
        return logits, bound

    def _rows(self, x: ArrayLike) -> Array:
        rows = self.mlp.check_rows(x)
        if self.input_dtype in RANGES:
            if rows.dtype != self.input_dtype:
                raise InvalidInput(f"rows are {rows.dtype}, this form takes {self.input_dtype}")
            return rows
        if rows.dtype.kind != "f":
            raise InvalidInput(f"rows are {rows.dtype}, this form takes {self.input_dtype}")
        if self.input_dtype == "float32":
            if rows.dtype.itemsize > 4:
                raise InvalidInput("rows are float64, this form takes float32: x.astype(np.float32)")
            return round_tf32(rows)
        if not np.array_equal(_ROUND[self.input_dtype](rows), rows, equal_nan=True):
            raise InvalidInput(f"rows hold numbers that {self.input_dtype} does not have; round them first")
        return rows

    def _forward(self, h: Array) -> tuple[Array, Array]:
        weight = np.sum([term.astype(np.float64) for term in self.terms], axis=0)
        scale, bias = self.scale.astype(np.float64), self.bias.astype(np.float64)
        sums, sizes = (h @ weight.T) * scale, (np.abs(h) @ np.abs(weight).T) * scale
        # an instruction sums at least 4 products; split sums add some more
        z, error = sums + bias, _STEP * ((weight.shape[1] / 4 + 20) * sizes + np.abs(bias))
        activation = self.activation
        for layer in self.layers:
            assert layer.bias is not None
            low, value, high = _through(activation, z, error)
            r = _ROUND[self.later]
            h = r(value)
            moved = np.maximum(r(high) - h, h - r(low))
            weight, bias = r(layer.weight), layer.bias.astype(np.float64)
            z = h @ weight.T + bias
            sizes = (np.abs(h) + moved) @ np.abs(weight).T + np.abs(bias)
            error = moved @ np.abs(weight).T + _STEP * (weight.shape[1] / 4 + 2) * sizes
            activation = layer.activation
        low, value, high = _through(activation, z, error)
        return value, np.maximum(high - value, value - low)


def _through(activation: str, z: Array, error: Array) -> tuple[Array, Array, Array]:
    """Return (low, value, high) of the activation of numbers z - error .. z + error."""
    value = apply_activation(activation, z)
    if activation in _RISING:
        low, high = apply_activation(activation, z - error), apply_activation(activation, z + error)
    else:
        low, high = value - _STEEPEST * error, value + _STEEPEST * error
    own = 0.0 if activation in _EXACT else 2.0**-20 * np.abs(value) + 4e-7  # CUDA's tanhf, expf and erff
    return low - own, value, high + own


def rounded_form(mlp: MLP, input_dtype: str, compute: str | None = None, later: str = "tf32") -> Rounded:
    """Return `mlp` as float tensor cores compute it, for rows of `input_dtype`.

    Parameters
    ----------
    mlp : MLP
        Its scheme, if it has one, is not looked at.
    input_dtype : {"uint8", "int8", "float16", "bfloat16", "float32"}
    compute : str, optional
        One of ``COMPUTES[input_dtype]``; the first of them if not given.
    later : {"tf32", "float16"}
        What the later layers' operands are rounded to. float16 (for GPUs without tf32) is refused where a row could
        take a hidden value beyond its range.

    Raises
    ------
    InvalidInput
        If rows of that dtype cannot be multiplied so.
    Unsupported
        If numbers leave the range of float32 or, for the later layers, of float16.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> form = rounded_form(gm.MLP([gm.Layer([[0.1, 2.0]])], input_scale=0.5), "float16")
    >>> form.terms[0], form.scale
    (array([[  819., 16384.]], dtype=float32), array([6.1035156e-05], dtype=float32))
    >>> form.reference_logits(np.array([[2, 1]], np.float16)).round(5)
    array([[1.09998]])
    """
    known = COMPUTES.get(input_dtype, ())
    compute = compute or (known[0] if known else "")
    if compute not in known:
        raise InvalidInput(
            f"{input_dtype} rows can be multiplied in {' or '.join(known) or 'nothing'}, not {compute!r}"
        )
    first = mlp.layers[0]
    weight = first.weight.astype(np.float64) * np.asarray(mlp.input_scale, np.float64)
    terms, exponent = _terms(weight, compute)
    scale, bias = np.ldexp(1.0, -exponent), first_bias(mlp).astype(np.float64)
    if later == "float16":
        if input_dtype not in _LIMIT:
            raise Unsupported(f"{input_dtype} rows can take hidden values beyond float16's range")
        ends, shift = fit_half(
            _ends(weight, bias, *_LIMIT[input_dtype]), first.activation, 0, last=len(mlp.layers) == 1
        )
        scale, bias = np.ldexp(scale, -shift), np.ldexp(bias, -shift)
        layers = half_layers(mlp, ends, shift)[0]
    else:
        layers = tuple(
            Layer(each.weight, np.zeros(len(each.weight)) if each.bias is None else each.bias, each.activation)
            for each in mlp.layers[1:]
        )
    if scale.min() < np.finfo(np.float32).tiny:
        raise Unsupported(
            f"layer 0 has an output whose weights reach no more than {np.abs(weight).max(axis=1).min():.1e}"
        )
    return Rounded(
        mlp,
        input_dtype,
        compute,
        terms=tuple(frozen(term, np.float32, "weights") for term in terms),
        scale=frozen(scale, np.float32, "scale"),
        bias=frozen(bias, np.float32, "bias"),
        activation=first.activation,
        layers=layers,
        later=later,
    )


def _terms(weight: Array, compute: str) -> tuple[list[Array], NDArray[np.int64]]:
    """Return the terms of ``weight * 2**exponent`` and the exponents [out]."""
    kind, two = compute.removesuffix("x2"), compute.endswith("x2")
    peak = np.abs(weight).max(axis=1)
    _, power = np.frexp(np.where(peak > 0, peak, 1.0))  # peak < 2**power
    # float16: to 2**14 .. 2**15, so that weights down to 2**-28 of the largest one are normal numbers; float32 sums of
    # 65,504 times those are far from its end. The others are as wide as float32, whose range rows may need as well:
    # only what would leave it is moved.
    moved = 15 - power if kind == "float16" else np.where(np.abs(power) > 64, -power, 0)
    exponent = np.where(peak > 0, moved, 0).astype(np.int64)
    left = np.ldexp(weight, exponent[:, None])
    terms = []
    for _ in range(2 if two else 1):
        terms.append(_ROUND[kind](left))
        left = left - terms[-1]
    return terms, exponent


def _ends(weight: Array, bias: Array, least: float, most: float) -> tuple[Array, Array]:
    up, down = np.maximum(weight, 0).sum(axis=1), np.minimum(weight, 0).sum(axis=1)
    slack = 2.0**-9 * (np.abs(weight).sum(axis=1) * max(-least, most) + np.abs(bias))
    return up * least + down * most + bias - slack, up * most + down * least + bias + slack
