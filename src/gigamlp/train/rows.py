"""Rows and labels for training: read in chunks, checked, scaled. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import DataError, InvalidInput

__all__ = [
    "Array",
    "ChunkSource",
    "RowStats",
    "Scaling",
    "Source",
    "check_pair",
    "open_source",
    "scan",
]

Array = NDArray[Any]
ChunkSource: TypeAlias = Callable[[], Iterable[tuple[Any, Any]]] | Iterable[tuple[Any, Any]]

_BYTE_STEP = float(np.float32(1 / 255))


@dataclass(frozen=True)
class Scaling:
    """How raw rows become network inputs: ``(x - centre) * scale``.

    Parameters
    ----------
    scale : float or ndarray [features]
        One number for uint8 rows (1/255), one per feature for other rows.
    centre : ndarray [features]
        The mean of the training rows, in raw units.
    """

    scale: float | Array
    centre: Array

    @property
    def offset(self) -> Array:
        """What is added to ``x * scale``, float64 [features]."""
        return -self.centre * np.asarray(self.scale, np.float64)


@dataclass(frozen=True)
class RowStats:
    """What one pass over the training rows found. float64 except where said.

    Parameters
    ----------
    rows, features : int
    mean, variance, minimum, maximum : ndarray [features]
    bytes_only : bool
        True if every chunk was uint8.
    classes : ndarray [classes]
        The distinct labels, sorted: int64 or str.
    """

    rows: int
    features: int
    mean: Array
    variance: Array
    minimum: Array
    maximum: Array
    bytes_only: bool
    classes: Array

    def scaling(self) -> Scaling:
        """Return how rows of this kind are scaled.

        uint8 rows are divided by 255. Other rows are divided, feature by feature, by the standard deviation or by an
        eighth of the range, whichever is larger: a feature that is nearly always constant then stays within 8 units
        instead of being blown up. A constant feature gets scale 0: it carries nothing.
        """
        if self.bytes_only:
            return Scaling(_BYTE_STEP, self.mean)
        spread = np.maximum(np.sqrt(self.variance), (self.maximum - self.minimum) / 8)
        usable = (spread == 0) | ((spread > 1e-30) & (spread < 1e30))  # 1 / spread is then an ordinary float32
        if not usable.all():
            bad = int(np.flatnonzero(~usable)[0])
            raise DataError(f"feature {bad} varies by {spread[bad]:.3g}; scale it to a size near 1 first")
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
        return Scaling(scale.astype(np.float32).astype(np.float64), self.mean)


@dataclass(frozen=True)
class Source:
    """Training rows that can be read again and again, a chunk at a time.

    Parameters
    ----------
    read : callable
        Returns a fresh iterator over ``(x [n, features], y [n])``.
    rows : int or None
        How many rows there are, if that is known beforehand.
    """

    read: Callable[[], Iterator[tuple[Array, Array]]]
    rows: int | None

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Array, Array]]:
        """Yield checked, non-empty chunks of at most `chunk_rows` rows."""
        features = None
        begin = 0
        for x, y in self.read():
            x, y = check_pair(x, y)
            features = x.shape[1] if features is None else features
            if x.shape[1] != features:
                raise DataError(f"a chunk has {x.shape[1]} features, the chunks before it have {features}")
            for start in range(0, len(x), chunk_rows):
                part = x[start : start + chunk_rows]
                check_finite(part, begin + start)
                yield part, y[start : start + chunk_rows]
            begin += len(x)


def check_pair(x: Any, y: Any) -> tuple[Array, Array]:
    """Return rows [n, features] and labels [n] as arrays, without a copy where possible.

    Raises
    ------
    InvalidInput
        If the rows are not a matrix of numbers.
    DataError
        If the labels are not as many as the rows, or are neither integers nor strings.
    """
    rows, labels = np.asarray(x), np.asarray(y)
    if rows.dtype.kind not in "buif":
        raise InvalidInput(f"training rows must be numbers, got dtype {rows.dtype}")
    if rows.ndim != 2:
        raise InvalidInput(
            f"training rows must have shape [n, features], got {list(rows.shape)}; x.reshape(len(x), -1)?"
        )
    if rows.shape[1] == 0:
        raise InvalidInput("training rows have no features")
    if labels.ndim != 1:
        raise DataError(f"labels must have shape [n], got {list(labels.shape)}; one-hot labels: y.argmax(axis=1)")
    if len(labels) != len(rows):
        raise DataError(f"there are {len(rows)} rows but {len(labels)} labels; each row needs one label")
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels):
        labels = labels.astype(np.str_)
    if labels.dtype.kind not in "biuU":
        raise DataError(
            f"labels must be integers or strings, got dtype {labels.dtype}; for whole numbers y.astype(int)"
        )
    return rows, labels if labels.dtype.kind == "U" else labels.astype(np.int64, copy=False)


def check_finite(x: Array, first_row: int = 0) -> None:
    """Refuse NaN and infinite values, naming the first bad row."""
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        bad = first_row + int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise InvalidInput(f"training row {bad} holds NaN or infinite values; clean or drop such rows first")


def open_source(x: Any, y: Any = None) -> Source:
    """Return a `Source` over arrays, or over chunks.

    Parameters
    ----------
    x : array_like [n, features], or a source of chunks
        Arrays may be memory-mapped: they are read a chunk at a time. A source of chunks (then `y` is None) is a
        function that returns a fresh iterable of ``(x, y)`` pairs, or an iterable that can be walked more than once.
    y : array_like [n], optional

    Raises
    ------
    InvalidInput
        If `x` is an iterator that can be walked once only: training takes two passes.
    """
    if y is not None:
        rows, labels = check_pair(x, y)
        if len(rows) == 0:
            raise DataError("there are no training rows")

        def read() -> Iterator[tuple[Array, Array]]:
            yield rows, labels

        return Source(read, len(rows))
    if callable(x):
        return Source(lambda: iter(x()), None)
    if isinstance(x, np.ndarray) or not isinstance(x, Iterable):
        raise InvalidInput("labels are missing: pass y, or for chunks a function that returns (x, y) pairs")
    if isinstance(x, Iterator):
        raise InvalidInput(
            "training reads the rows twice and an iterator can be read once; pass a function that returns a fresh one"
        )
    return Source(lambda: iter(x), None)


def scan(source: Source, chunk_rows: int = 8192) -> RowStats:
    """Read all rows once and return what scaling and the output layer need, in constant memory.

    Means are exact for uint8 rows, so a seed gives the same network on every machine.

    Raises
    ------
    DataError
        If there are no rows, fewer than two classes, or labels mix integers and strings.
    """
    rows, bytes_only = 0, True
    shift = total = squares = minimum = maximum = np.zeros(0)
    classes: Array | None = None
    for x, y in source.chunks(min(chunk_rows, 65536)):
        bytes_only &= x.dtype == np.uint8
        if rows == 0:
            # sums are taken about the first row: features far from 0 would otherwise lose their variance to rounding
            shift = np.zeros(x.shape[1]) if x.dtype == np.uint8 else x[0].astype(np.float64)
            total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
            minimum, maximum = np.full(x.shape[1], np.inf), np.full(x.shape[1], -np.inf)
        if x.dtype == np.uint8 and not shift.any():
            total += x.sum(axis=0, dtype=np.uint32)
            wide = x.astype(np.uint32)  # exact: 65,536 x 255^2 < 2^32
            squares += np.einsum("ij,ij->j", wide, wide)
        else:
            moved = x.astype(np.float64) - shift
            total += moved.sum(axis=0)
            squares += np.einsum("ij,ij->j", moved, moved)
        minimum, maximum = np.minimum(minimum, x.min(axis=0)), np.maximum(maximum, x.max(axis=0))
        rows += len(x)
        found = np.unique(y)
        if classes is not None and (classes.dtype.kind == "U") != (found.dtype.kind == "U"):
            raise DataError("labels are integers in some chunks and strings in others; use one kind")
        classes = found if classes is None else np.union1d(classes, found)
    if classes is None:
        raise DataError("there are no training rows")
    if len(classes) < 2:
        raise DataError(f"all labels are {classes[0].item()!r}; a classifier needs at least two classes")
    variance = np.maximum(squares / rows - (total / rows) ** 2, 0)
    return RowStats(rows, len(total), shift + total / rows, variance, minimum, maximum, bytes_only, classes)
