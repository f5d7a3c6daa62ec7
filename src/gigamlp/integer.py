"""The integer form of an MLP in scheme ``w8``: the numbers that a kernel computes with, and their exact reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.activations import apply_activation
from gigamlp.errors import InvalidInput
from gigamlp.layers import Layer
from gigamlp.mlp import MLP

__all__ = ["RANGES", "Integer"]

RANGES = {"uint8": (0, 255), "int8": (-128, 127)}  # the rows that scheme ``w8`` takes
_ROWS_PER_CHUNK = 4096  # bounds the memory of a reference pass: 4,096 rows x 784 x 8 bytes = 26 MB

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Integer:
    """An MLP in the form that integer engines compute with, for rows of one dtype, and its exact reference.

    Attributes
    ----------
    mlp : MLP
        Where it comes from: head, classes and columns are read there.
    input_dtype : {"uint8", "int8"}
    codes : ndarray of int8, shape [out, in]
        First layer; ``in`` counts the features that are read.
    scale, bias : ndarray of float32, shape [out]
        First layer, input scale and offset folded in: ``activation(float32(float32(acc) * scale) + bias)``.
    code_sums : ndarray of int32, shape [out]
        Sums of the codes of each output. A kernel that reads int8 rows as bytes ``u = x ^ 0x80`` (that is x + 128)
        finds ``acc = sum(codes * u) - 128 * code_sums``.
    activation : str
        Of the first layer.
    layers : tuple of Layer
        The later layers, each with a bias. Their operands are rounded to float16, their sums are not.
    exponents : tuple of int
        For each layer ``e >= 0``: its outputs are 2**-e times those of the MLP, which `scale`, `bias` and the next
        layer's weights already include.
    bounds : tuple of float
        For each layer the largest absolute output that any row of this dtype can give, a little rounded up.
    """

    mlp: MLP = field(repr=False)
    input_dtype: str
    codes: Array = field(repr=False)
    scale: Array = field(repr=False)
    bias: Array = field(repr=False)
    code_sums: Array = field(repr=False)
    activation: str
    layers: tuple[Layer, ...] = field(repr=False)
    exponents: tuple[int, ...]
    bounds: tuple[float, ...]

    def reference_accumulators(self, x: ArrayLike) -> NDArray[np.int32]:
        """Return the first layer's sums int32 [n, out] for rows `x` [n, features] of the input dtype.

        Raises
        ------
        InvalidInput
            If the rows have another dtype or width.
        """
        return self._by_chunks(x, lambda acc: acc, np.int32, len(self.codes))

    def reference_hidden(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the first layer's outputs float32 [n, out], before they are rounded to float16.

        With ``relu`` and ``identity`` an engine has these very bits; other activations may differ in the last places.
        """
        return self._by_chunks(x, self._hidden, np.float32, len(self.codes))

    def reference_logits(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the logits float32 [n, outputs]: float16 operands, float64 products and sums, rounded once a layer."""
        return self._by_chunks(x, self._logits, np.float32, self.mlp.outputs)

    def _by_chunks(self, x: ArrayLike, then: Callable[[Array], Array], dtype: Any, width: int) -> Array:
        rows = self.mlp.check_rows(x)
        if rows.dtype != self.input_dtype:
            low, high = RANGES[self.input_dtype]
            raise InvalidInput(
                f"rows are {rows.dtype}, this integer form takes {self.input_dtype}; if they hold whole numbers "
                f"{low}..{high}, x.astype(np.{self.input_dtype}) makes them so"
            )
        out = np.empty((len(rows), width), dtype)
        codes = self.codes.T.astype(np.float64)
        for begin in range(0, len(rows), _ROWS_PER_CHUNK):
            block = self.mlp.read_columns(rows[begin : begin + _ROWS_PER_CHUNK]).astype(np.float64)
            # every product and partial sum is a whole number below 2**31: float64 holds it exactly, and BLAS is quick
            out[begin : begin + len(block)] = then((block @ codes).astype(np.int32))
        return out

    def _hidden(self, acc: Array) -> Array:
        # two roundings, no fused multiply-add: (acc * scale), then (+ bias)
        return apply_activation(self.activation, acc.astype(np.float32) * self.scale + self.bias)

    def _logits(self, acc: Array) -> Array:
        h = self._hidden(acc)
        for layer in self.layers:
            assert layer.bias is not None
            z = _half(h) @ _half(layer.weight).T + layer.bias
            h = apply_activation(layer.activation, z.astype(np.float32))
        return h


def _half(values: Array) -> Array:
    """Round to float16 (nearest even, as CUDA does) and widen to float64."""
    return values.astype(np.float16).astype(np.float64)
