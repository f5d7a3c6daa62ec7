"""Rows that are tables with named columns: pandas, polars, pyarrow, and what speaks Arrow's C stream, as one array."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput

__all__ = ["is_table", "table_rows"]

Array = NDArray[Any]
_NAMED = 8  # how many names an error lists


def is_table(x: Any) -> bool:
    """Whether `x` is a table of pandas, polars or pyarrow, or gives Arrow's C stream. Imports none of them."""
    return (
        _is(x, "pandas", "DataFrame")
        or _is(x, "polars", "DataFrame", "LazyFrame")
        or _is(x, "pyarrow", "Table", "RecordBatch")
        or hasattr(x, "__arrow_c_stream__")
    )


def table_rows(x: Any, features: int, names: Sequence[str] | None = None) -> Array:
    """Return the rows of a table as an array [n, features] of the columns' common dtype.

    Parameters
    ----------
    x : table
        See `is_table`.
    features : int
        How many columns there must be.
    names : sequence of str, optional
        What they must be called, in the array's order; the table may have them in any order. Without it the table's
        own order counts. The numbers ``0 .. n-1`` that pandas gives columns without a name are no names.

    Raises
    ------
    InvalidInput
        If a column is missing, too many, there twice, not numeric, or holds nulls.
    """
    if _is(x, "polars", "LazyFrame"):
        raise InvalidInput("rows are a polars LazyFrame, which holds no values yet; pass x.collect()")
    pandas = _is(x, "pandas", "DataFrame")
    if not pandas and not _is(x, "polars", "DataFrame") and not _is(x, "pyarrow", "Table", "RecordBatch"):
        x = _arrow(x)
    given = list(x.columns) if hasattr(x, "iloc") or _is(x, "polars", "DataFrame") else list(x.schema.names)
    unnamed = pandas and _is(x.columns, "pandas", "RangeIndex") and given == list(range(len(given)))
    order = _order(given, features, None if unnamed else names)
    if pandas and len(set(x.dtypes)) == 1 and order == list(range(features)):
        kind = x.dtypes.iloc[0]
        if isinstance(kind, np.dtype) and kind.kind in "buif":
            return np.asarray(x)  # one block: a view
    read = _pandas if pandas else _polars if _is(x, "polars", "DataFrame") else _pyarrow
    columns = [read(x, index, f"column {given[index]!r}") for index in order]
    rows = np.empty((len(columns[0]), len(columns)), np.result_type(*{c.dtype for c in columns}), order="F")
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows


def _is(x: Any, package: str, *names: str) -> bool:
    module: Any = sys.modules.get(package)  # its tables can only come from a package that was imported
    return module is not None and isinstance(x, tuple(getattr(module, n) for n in names if hasattr(module, n)))


def _arrow(x: Any) -> Any:
    what = type(x).__name__
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidInput(f"rows in this {what} are Arrow data, which needs pyarrow: gigamlp[score]") from error
    try:
        return pyarrow.table(x)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise InvalidInput(f"rows in this {what} are not a table with columns ({error}); pass a NumPy array") from error


def _order(given: list[Any], features: int, names: Sequence[str] | None) -> list[int]:
    if names is None:
        if len(given) != features:
            raise InvalidInput(f"the table has {len(given)} columns ({_list(given)}), the model takes {features}")
        return list(range(features))
    place = {name: index for index, name in enumerate(given)}
    if len(place) < len(given):
        twice = next(name for name in given if given.count(name) > 1)
        raise InvalidInput(f"the table has two columns named {twice!r}; the model takes its columns by name")
    missing = [name for name in names if name not in place]
    extra = [name for name in given if name not in set(names)]
    if missing or extra:
        parts = [f"misses {_list(missing)}"] if missing else []
        parts += [f"has {_list(extra)}, which the model does not know"] if extra else []
        raise InvalidInput(f"the table {' and '.join(parts)}; it must have the columns {_list(names)}, in any order")
    return [place[name] for name in names]


def _list(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(repr(name) for name in names[:_NAMED]) + more


def _null(where: str, row: Any) -> InvalidInput:
    return InvalidInput(f"{where} holds a null in row {int(row)}: nulls have no answer; fill or drop such rows first")


def _not_numeric(where: str, dtype: Any) -> InvalidInput:
    return InvalidInput(f"{where} is of type {dtype}: the model takes numbers; encode it as it was for training")


def _pandas(x: Any, index: int, where: str) -> Array:
    series = x.iloc[:, index]
    sparse = type(series.dtype).__name__ == "SparseDtype"
    kind = series.dtype.subtype if sparse else getattr(series.dtype, "numpy_dtype", series.dtype)
    if not isinstance(kind, np.dtype) or kind.kind not in "buif":  # text, dates, categories, objects
        raise _not_numeric(where, series.dtype)
    if not sparse and not isinstance(series.dtype, np.dtype):  # NaN of NumPy's own floats is no null, but refused later
        absent = np.asarray(series.isna())
        if absent.any():
            raise _null(where, np.argmax(absent))
    return np.asarray(series.to_numpy(dtype=kind))


def _polars(x: Any, index: int, where: str) -> Array:
    series = x.to_series(index)
    if not (series.dtype.is_integer() or series.dtype.is_float() or str(series.dtype) == "Boolean"):
        raise _not_numeric(where, series.dtype)
    if series.null_count():
        raise _null(where, series.is_null().arg_true()[0])
    column = np.asarray(series.to_numpy())
    if column.dtype.kind not in "buif":  # 128-bit integers
        raise _not_numeric(where, series.dtype)
    return column


def _pyarrow(x: Any, index: int, where: str) -> Array:
    import pyarrow as pa

    column = x.column(index)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise _not_numeric(where, column.type)
    if column.null_count:
        raise _null(where, np.argmax(np.asarray(column.is_null().to_numpy(zero_copy_only=False))))
    return np.asarray(column.to_numpy(zero_copy_only=False))
