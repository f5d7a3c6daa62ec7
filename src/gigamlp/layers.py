"""The parts of an MLP: a dense layer and a quantisation scheme, both immutable."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.activations import ACTIVATIONS
from gigamlp.errors import ModelError

__all__ = ["SCHEMES", "Layer", "Scheme", "frozen"]

SCHEMES = ("w8", "w8a8", "w7")
_ARRAYS: dict[str, Any] = {
    "scale": np.float32,
    "hidden_scale": np.float32,
    "hidden_zero": np.uint8,
    "codes": np.int8,
}

Array = NDArray[Any]


def frozen(array: ArrayLike, dtype: Any, what: str) -> Array:
    """Return an owned, contiguous, read-only copy of `array`; refuse what is no number, not finite or too large."""
    try:
        given = np.asarray(array)
    except ValueError as error:
        raise ModelError(f"{what} cannot be read as {np.dtype(dtype).name}: {error}") from error
    if given.dtype.kind not in "buif":
        raise ModelError(f"{what} cannot be read as {np.dtype(dtype).name}: it is {given.dtype}, not numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        copy = np.array(given, dtype=dtype, order="C", copy=True)
    if copy.dtype.kind == "f" and not np.isfinite(copy).all():
        raise ModelError(f"{what} holds NaN or infinite values; an MLP needs finite numbers")
    if copy.dtype.kind in "iu" and not np.array_equal(copy, given):
        raise ModelError(f"{what} holds values that are not whole numbers in the range of {copy.dtype.name}")
    copy.flags.writeable = False
    return copy


@dataclass(frozen=True, eq=False)
class Layer:
    """One dense layer: ``activation(x @ weight.T + bias)``.

    Parameters
    ----------
    weight : array_like of float32, shape [out, in]
    bias : array_like of float32, shape [out], or None
    activation : str
        One of identity, relu, tanh, logistic, gelu (erf form), gelu_tanh, silu.

    Raises
    ------
    ModelError
        If the shapes do not fit, a value is not finite, or the activation is unknown.
    """

    weight: Array
    bias: Array | None = None
    activation: str = "identity"

    def __post_init__(self) -> None:
        weight = frozen(self.weight, np.float32, "layer weight")
        if weight.ndim != 2 or 0 in weight.shape:
            raise ModelError(f"layer weight must have shape [out, in] with both > 0, got {list(weight.shape)}")
        object.__setattr__(self, "weight", weight)
        if self.bias is not None:
            bias = frozen(self.bias, np.float32, "layer bias")
            if bias.shape != (weight.shape[0],):
                raise ModelError(f"layer bias must have shape [{weight.shape[0]}], got {list(bias.shape)}")
            object.__setattr__(self, "bias", bias)
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise ModelError(f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # through the constructor: NumPy forgets that an array is read-only when it is pickled or copied
        return Layer, (self.weight, self.bias, self.activation)


@dataclass(frozen=True, eq=False)
class Scheme:
    """How an MLP is made integer: a scheme name and the arrays (scales, codes) that belong to it.

    Parameters
    ----------
    name : {"w8", "w8a8", "w7"}
        See ``DESIGN.md``: int8 first layer; uint8 hidden and int8 second layer too; 7-bit weights.
    arrays : mapping of str to ndarray
        ``scale.I`` float32 [out] for layer I's weight, ``codes.I`` int8 [out, in] for codes that training fixed; in
        ``w8a8`` and ``w7`` ``hidden_scale.I`` float32 [out] or [1] for its activations, and ``hidden_zero.I`` uint8
        [out] or [1], the byte that stands for 0 (0 if not given). Missing codes and scales are derived.
    """

    name: str
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise ModelError(f"unknown quantisation scheme {self.name!r}; known: {', '.join(SCHEMES)}")
        kept = {}
        for key, value in sorted(self.arrays.items()):
            kind = key.partition(".")[0]
            if not re.fullmatch(r"(scale|hidden_scale|hidden_zero|codes)\.(0|[1-9][0-9]{0,8})", key):
                raise ModelError(f"unknown scheme array {key!r}; known: {', '.join(f'{k}.I' for k in _ARRAYS)}")
            kept[key] = frozen(value, _ARRAYS[kind], f"scheme array {key}")
        object.__setattr__(self, "arrays", MappingProxyType(kept))

    def __reduce__(self) -> tuple[Any, ...]:
        return Scheme, (self.name, dict(self.arrays))

    def check(self, layers: Sequence[Layer]) -> None:
        """Refuse arrays that do not fit `layers`."""
        for key, value in self.arrays.items():
            kind, _, index = key.partition(".")
            if int(index) >= len(layers):
                raise ModelError(f"scheme array {key} names layer {index}, but there are {len(layers)} layers")
            out, width = layers[int(index)].weight.shape
            expected = (out, width) if kind == "codes" else (out,)
            if value.shape != expected and not (kind.startswith("hidden") and value.shape == (1,)):
                raise ModelError(f"scheme array {key} has shape {list(value.shape)}, expected {list(expected)}")
            if kind in ("scale", "hidden_scale") and not (value > 0).all():
                raise ModelError(f"scheme array {key} must be positive")
