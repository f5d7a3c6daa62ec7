"""Which columns of a table are the features, and how a batch of it becomes an array of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.score.blocks import Reject, Shape
from gigamlp.score.outs import own_ids

__all__ = ["Layout", "find_layout", "rows_of"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """Where the features are.

    Attributes
    ----------
    kind : {"list", "binary", "named"}
    names : tuple of str
        One column for ``list`` and ``binary``.
    """

    kind: str
    names: tuple[str, ...]


def find_layout(name: str, schema: pa.Schema, shape: Shape) -> Layout:
    """Return where the features are in a table of `schema`.

    Raises
    ------
    InvalidInput
        If named columns are not there or not numbers, or it is not clear which columns are meant.
    """
    ids = own_ids(shape.ids)
    missing = [each for each in ids if each not in schema.names]
    if missing:
        raise InvalidInput(f"{name}: has no id column {missing[0]!r}; columns: {_some(schema.names)}")
    if shape.columns:
        return _named(name, schema, shape)
    free = [field for field in schema if field.name not in ids]
    whole = [field for field in free if _kind(field.type) in ("list", "binary")]
    numbers = [field.name for field in free if _kind(field.type) == "named"]
    if len(whole) == 1:
        return Layout(str(_kind(whole[0].type)), (whole[0].name,))
    if not whole and len(numbers) == shape.features:
        return Layout("named", tuple(numbers))
    raise InvalidInput(
        f"{name}: {len(whole)} columns of lists or bytes and {len(numbers)} of numbers, and the model takes "
        f"{shape.features} features; name them with --columns (columns: {_some(schema.names)})"
    )


def _named(name: str, schema: pa.Schema, shape: Shape) -> Layout:
    found: list[str] = []
    for pattern in shape.columns:
        hits = [pattern] if pattern in schema.names else [n for n in schema.names if fnmatchcase(n, pattern)]
        if not hits:
            raise InvalidInput(f"{name}: has no column {pattern!r}; columns: {_some(schema.names)}")
        found += hits
    twice = [n for n in found if found.count(n) > 1 or schema.names.count(n) > 1]
    if twice:
        raise InvalidInput(f"{name}: column {twice[0]!r} is meant or there twice")
    kinds = {n: _kind(schema.field(n).type) for n in found}
    if len(found) == 1 and kinds[found[0]] in ("list", "binary"):
        return Layout(str(kinds[found[0]]), (found[0],))
    wrong = [n for n in found if kinds[n] != "named"]
    if wrong:
        raise InvalidInput(f"{name}: column {wrong[0]!r} is {schema.field(wrong[0]).type}, not a number")
    if len(found) != shape.features:
        raise InvalidInput(f"{name}: {len(found)} columns are named, the model takes {shape.features} features")
    return Layout("named", tuple(found))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _kind(kind: pa.DataType) -> str | None:
    types = pa.types
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return "list" if _kind(kind.value_type) == "named" else None
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    return "named" if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) else None


def rows_of(
    batch: pa.RecordBatch, layout: Layout, shape: Shape
) -> tuple[Array, NDArray[np.bool_] | None, list[Reject]]:
    """Turn a batch into rows.

    Returns
    -------
    x : ndarray, shape [m, features]
    good : ndarray of bool, shape [n], or None
        Which rows of the batch they are; None if all.
    rejects : list of Reject
        Why the others are not among them; rows are counted from the batch's first.
    """
    if layout.kind == "named":
        return _from_named([batch.column(batch.schema.get_field_index(n)) for n in layout.names], layout.names)
    column = batch.column(batch.schema.get_field_index(layout.names[0]))
    name = layout.names[0]
    return (_from_lists if layout.kind == "list" else _from_bytes)(column, name, shape)


def _from_named(
    columns: list[pa.Array], names: tuple[str, ...]
) -> tuple[Array, NDArray[np.bool_] | None, list[Reject]]:
    rejects: list[Reject] = []
    good: NDArray[np.bool_] | None = None
    holes = [(name, c) for name, c in zip(names, columns, strict=True) if c.null_count]
    if holes:
        empty: dict[int, str] = {}
        for name, column in holes:
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
                empty.setdefault(row, name)
        good = np.ones(len(columns[0]), bool)
        good[list(empty)] = False
        table = zip(*(c.take(pa.array(sorted(empty))).to_pylist() for c in columns), strict=True)
        rejects = [
            Reject(row, 1, f"holds null in column {empty[row]!r}", list(values))
            for row, values in zip(sorted(empty), table, strict=True)
        ]
        columns = [c.filter(pa.array(good)) for c in columns]
    parts = [_numbers(c) for c in columns]
    x = np.empty((len(parts), len(parts[0])), np.result_type(*{p.dtype for p in parts}))
    for index, part in enumerate(parts):
        x[index] = part
    return np.ascontiguousarray(x.T), good, rejects


def _numbers(column: pa.Array) -> Array:
    values: Array = column.to_numpy(zero_copy_only=False)
    return values.view(np.uint8) if values.dtype.kind == "b" else values


def _from_lists(column: pa.Array, name: str, shape: Shape) -> tuple[Array, NDArray[np.bool_] | None, list[Reject]]:
    n, width = len(column), shape.features
    fixed = pa.types.is_fixed_size_list(column.type)
    if fixed and column.type.list_size != width:
        return _none(
            column, n, f"has {column.type.list_size} features in column {name!r}, the model takes {width}", shape
        )
    lengths = np.full(n, width) if fixed else column.value_lengths().fill_null(width).to_numpy(zero_copy_only=False)
    null = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else np.zeros(n, bool)
    bad = null | (lengths != width)
    kept = column.filter(pa.array(~bad)) if bad.any() else column
    flat = kept.flatten()
    if flat.null_count:
        holes = flat.is_null().to_numpy(zero_copy_only=False).reshape(-1, width).any(axis=1)
        bad[np.flatnonzero(~bad)[holes]] = True
        flat = kept.filter(pa.array(~holes)).flatten()
    x = _numbers(flat).reshape(-1, width)
    if not bad.any():
        return x, None, []
    rejects = []
    for row in np.flatnonzero(bad).tolist():
        reason = f"holds null in column {name!r}"
        if not null[row] and lengths[row] != width:
            reason = f"has {lengths[row]} features in column {name!r}, the model takes {width}"
        rejects.append(Reject(row, 1, reason, column[row].as_py()))
    return x, ~bad, rejects


def _from_bytes(column: pa.Array, name: str, shape: Shape) -> tuple[Array, NDArray[np.bool_] | None, list[Reject]]:
    n, dtype = len(column), np.dtype(shape.dtype or "uint8")
    width = shape.features * dtype.itemsize
    if pa.types.is_fixed_size_binary(column.type):
        have = column.type.byte_width
        if have != width:
            return _none(column, n, f"has {have} bytes in column {name!r}, a row has {width}", shape)
        lengths = np.full(n, width)
    else:
        lengths = pc.binary_length(column).fill_null(width).to_numpy(zero_copy_only=False)
    null = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else np.zeros(n, bool)
    bad = null | (lengths != width)
    kept = column.filter(pa.array(~bad)) if bad.any() else column
    begin = 0
    if pa.types.is_fixed_size_binary(kept.type):
        begin = kept.offset * width
        data = kept.buffers()[1]
    else:
        wide = np.int64 if pa.types.is_large_binary(kept.type) else np.int32
        _, offsets, data = kept.buffers()
        if len(kept):
            begin = int(np.frombuffer(offsets, wide, 1, kept.offset * np.dtype(wide).itemsize)[0])
    count = len(kept) * shape.features
    flat = np.frombuffer(data, dtype, count, begin) if count else np.empty(0, dtype)
    x = flat.reshape(-1, shape.features)
    if not bad.any():
        return x, None, []
    rejects = []
    for row in np.flatnonzero(bad).tolist():
        reason = f"has {lengths[row]} bytes in column {name!r}, a row has {width}"
        value = column[row].as_py()
        rejects.append(Reject(row, 1, f"holds null in column {name!r}" if null[row] else reason, value and value.hex()))
    return x, ~bad, rejects


def _none(column: pa.Array, n: int, reason: str, shape: Shape) -> tuple[Array, NDArray[np.bool_], list[Reject]]:
    """Reject a whole batch: its type alone says that no row fits."""
    return np.empty((0, shape.features), np.uint8), np.zeros(n, bool), [Reject(0, n, reason)] if n else []
