"""What travels through the pipeline: a `Block` of rows, and what was wrong with the rows that are not in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput

__all__ = ["NONE_KEPT", "START", "Block", "Position", "Reject", "Shape", "Source", "reject_all"]

Array = NDArray[Any]
NONE_KEPT: Array = np.empty(0, np.int64)


@dataclass(frozen=True)
class Position:
    """A place between two rows of the inputs.

    Attributes
    ----------
    file : int
        Index of the input.
    row : int
        Rows of that input before this place.
    byte : int
        For text: bytes of that input before this place. Else 0.
    """

    file: int = 0
    row: int = 0
    byte: int = 0


START = Position()


@dataclass(frozen=True)
class Reject:
    """Rows that have no answer, and why.

    Attributes
    ----------
    row : int
        The first of them, counted from 0 within its input.
    rows : int or None
        How many; None if the input cannot say.
    reason : str
    values : list, str or None
        What the row holds, for the quarantine; None if that cannot be had.
    """

    row: int
    rows: int | None
    reason: str
    values: list[Any] | str | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Successive rows of one input.

    Attributes
    ----------
    start, end : Position
        Which rows it stands for, those left out included.
    x : ndarray, shape [n, features]
        The rows that can be read, in their order.
    kept : ndarray of int64, shape [n], or None
        Where the rows of `x` are, counted from ``start.row``; None if none was left out.
    ids : pyarrow.RecordBatch or None
        The id columns of the rows of `x`.
    rejects : tuple of Reject
        The rows left out.
    name : str
        The input, for messages.
    release : callable or None
        To be called once `x` is not needed any more.
    """

    start: Position
    end: Position
    x: Array
    kept: Array | None = None
    ids: Any = None
    rejects: tuple[Reject, ...] = ()
    name: str = ""
    release: Callable[[], None] | None = field(default=None, repr=False)

    def row_numbers(self) -> Array:
        """Return the numbers [n] of the rows of `x` within the input."""
        kept = np.arange(len(self.x), dtype=np.int64) if self.kept is None else self.kept
        return kept + self.start.row

    def without(self, bad: NDArray[np.bool_], rejects: tuple[Reject, ...]) -> Block:
        """Return this block without the rows of `x` that are `bad` [n], of which `rejects` speaks."""
        good = ~bad
        kept = np.arange(len(self.x), dtype=np.int64) if self.kept is None else self.kept
        ids = self.ids
        if ids is not None:
            import pyarrow as pa

            ids = ids.filter(pa.array(good))
        merged = tuple(sorted((*self.rejects, *rejects), key=lambda each: each.row))
        return Block(self.start, self.end, self.x[good], kept[good], ids, merged, self.name, self.release)


@dataclass(frozen=True)
class Shape:
    """What is read from every input.

    Attributes
    ----------
    features : int
    rows : int
        Of a block, the last of an input aside.
    columns : tuple of str
        Names or patterns (``pixel*``) of the columns that are features; empty: found by type.
    ids : tuple of str
        Columns that go with the answers.
    dtype : str or None
        Of raw rows (stdin, binary columns) and of CSV.
    """

    features: int
    rows: int
    columns: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InvalidInput(f"a block must have at least one row, got {self.rows}")


class Source(Protocol):
    """An input that is open.

    Attributes
    ----------
    name : str
    rows : int or None
        None if only reading tells.
    id_schema : pyarrow.Schema or None
        Of the id columns that the input itself has.
    """

    name: str
    rows: int | None
    id_schema: Any

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield the rows from `start` on. The cut depends on `start` and the input only, never on time."""
        ...

    def close(self) -> None:
        """Close the input."""
        ...


def reject_all(name: str, start: Position, rows: int | None, reason: str, features: int) -> Block:
    """Return an empty block that says why `rows` rows from `start` on have no answer."""
    end = Position(start.file, start.row + (rows or 0), start.byte)
    x = np.empty((0, features), np.uint8)
    return Block(start, end, x, NONE_KEPT, None, (Reject(start.row, rows, reason),), name)
