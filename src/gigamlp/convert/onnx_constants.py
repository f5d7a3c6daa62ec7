"""What an ONNX graph does with constants: beside the rows, among themselves, and as the sizes of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from gigamlp.convert.chain import Affine, numbers
from gigamlp.convert.onnx_file import constant, decoded
from gigamlp.convert.onnx_values import Dimensions, Rows
from gigamlp.errors import ConversionError

__all__ = ["affine", "constant_node", "dimensions", "of_constants", "per_output"]

_ONE, _ZERO = np.ones(()), np.zeros(())


def affine(sign: str, given: list[Any], where: str) -> Affine:
    """Return the step that combines the rows with a constant."""
    first = isinstance(given[0], Rows)
    value = per_output(given[1] if first else given[0], where)
    if sign == "+":
        return Affine(_ONE, value, where)
    if sign == "-":
        return Affine(_ONE, -value, where) if first else Affine(-_ONE, value, where)
    if sign == "*":
        return Affine(value, _ZERO, where)
    if sign != "/" or not first or (value == 0).any():
        raise ConversionError(f"{where}: only a division of the rows by constants other than 0 is supported")
    return Affine(1 / value, _ZERO, where)


def per_output(value: Any, where: str) -> Any:
    """Return a constant that is one number, or one for each column, as float64 [] or [n]."""
    if not isinstance(value, np.ndarray):
        raise ConversionError(f"{where}: only constants may be combined with the rows")
    found = numbers(value, where)
    if found.ndim == 2 and found.shape[0] == 1:
        found = found[0]
    if found.ndim > 1:
        raise ConversionError(f"{where}: a constant of shape {list(found.shape)} is not one number for each column")
    return found


def constant_node(attributes: dict[str, Any], where: str) -> Any:
    """Return what a node Constant holds."""
    if "value" in attributes:
        return constant(attributes["value"], where)
    for name in ("value_float", "value_floats", "value_int", "value_ints"):
        if name in attributes:
            return np.asarray(attributes[name])
    for name in ("value_string", "value_strings"):
        if name in attributes:
            return decoded(attributes[name])
    raise ConversionError(f"{where}: this kind of constant is not supported")


def of_constants(kind: str, given: list[Any], attributes: dict[str, Any], where: str) -> Any:
    """Return what a node makes of constants only."""
    if given and all(isinstance(each, np.ndarray) for each in given):
        value = given[0]
        if kind in ("Identity", "Cast"):
            return value
        if kind == "Transpose":
            return np.transpose(value, attributes.get("perm"))
        if kind == "Reshape" and 0 not in given[1]:
            try:
                return value.reshape([int(size) for size in given[1]])
            except ValueError as error:
                raise ConversionError(f"{where}: {error}") from error
    raise ConversionError(f"{where}: this operator does not work on the rows, and is not supported on constants")


def dimensions(kind: str, given: list[Any], attributes: dict[str, Any], where: str) -> Dimensions:
    """Follow the sizes of the rows, as exporters write ``x.view(x.size(0), -1)``."""
    sizes = given[0].sizes if isinstance(given[0], Dimensions) else ()
    if kind in ("Identity", "Cast", "Unsqueeze", "Squeeze") and sizes:
        return Dimensions(sizes)
    if kind == "Gather" and sizes and np.size(given[1]) == 1:
        return Dimensions((sizes[int(np.ravel(given[1])[0])],))
    if kind == "Concat":
        joined: list[int | None] = []
        for each in given:
            joined += each.sizes if isinstance(each, Dimensions) else [int(size) for size in np.ravel(each)]
        return Dimensions(tuple(joined))
    raise ConversionError(f"{where}: this operator is not supported on the sizes of the rows")
