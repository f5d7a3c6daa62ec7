"""Which part of each row a network reads: what can be asked for, and what it costs the memory system. NumPy only.

A feature counts as one byte, which it is in uint8 rows. `gigamlp.train.selection` chooses by held-out rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gigamlp.errors import InvalidInput

__all__ = [
    "Columns",
    "Crop",
    "Reads",
    "Request",
    "Given",
    "Runs",
    "Segments",
    "Window",
    "bytes_moved",
    "merged",
    "requests",
]

Runs: TypeAlias = tuple[tuple[int, int], ...]
Shape: TypeAlias = tuple[int, int]


def _whole(value: Any, what: str, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or number < least:
        raise InvalidInput(f"{what} must be a whole number >= {least}, got {value!r}")
    return number


@dataclass(frozen=True)
class Window:
    """One contiguous run, the first feature of which is a multiple of `align`: what a GPU's memory likes best.

    Where it begins is chosen on held-out rows.

    Parameters
    ----------
    size : int
        Features (bytes of a uint8 row).
    align : int
        A run that begins at a multiple of 32 bytes is read faster on an H200 than one that does not.
    """

    size: int
    align: int = 32

    def __post_init__(self) -> None:
        _whole(self.size, "a window's size")
        _whole(self.align, "a window's align")

    @property
    def label(self) -> str:
        """What names it in tables."""
        return f"w{self.size}"

    def candidates(self, features: int, shape: Shape | None) -> list[Runs]:
        """Return the runs to choose from."""
        _fits(self.size, features, "a window")
        return [((begin, begin + self.size),) for begin in range(0, features - self.size + 1, self.align)]


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image, in the middle if not said otherwise.

    Parameters
    ----------
    height, width : int
    top, left : int, optional
    """

    height: int
    width: int
    top: int | None = None
    left: int | None = None

    def __post_init__(self) -> None:
        _whole(self.height, "a crop's height")
        _whole(self.width, "a crop's width")
        for what in ("top", "left"):
            if getattr(self, what) is not None:
                _whole(getattr(self, what), f"a crop's {what}", 0)

    @property
    def label(self) -> str:
        """What names it in tables."""
        return f"c{self.height}" if self.height == self.width else f"c{self.height}x{self.width}"

    def candidates(self, features: int, shape: Shape | None) -> list[Runs]:
        """Return the one choice there is."""
        if shape is None:
            raise InvalidInput("a crop is cut from images; pass rows [n, height, width], or image_shape")
        height, width = shape
        top = (height - self.height) // 2 if self.top is None else self.top
        left = (width - self.width) // 2 if self.left is None else self.left
        if top < 0 or left < 0 or top + self.height > height or left + self.width > width:
            raise InvalidInput(f"{self} does not fit into images of {height} x {width}")
        return [merged((row * width + left, row * width + left + self.width) for row in range(top, top + self.height))]


@dataclass(frozen=True)
class Segments:
    """Some of the segments into which rows are cut, chosen by leaving out one after the other.

    Parameters
    ----------
    count : int
        Segments to keep.
    size : int
        Features of a segment; the last one of a row may be shorter.
    """

    count: int
    size: int = 16

    def __post_init__(self) -> None:
        _whole(self.count, "the number of segments")
        _whole(self.size, "a segment's size")

    @property
    def label(self) -> str:
        """What names it in tables."""
        return f"s{self.count}" if self.size == 16 else f"s{self.count}x{self.size}"

    def all(self, features: int) -> Runs:
        """Return every segment of a row."""
        found = tuple((begin, min(begin + self.size, features)) for begin in range(0, features, self.size))
        if self.count > len(found):
            raise InvalidInput(
                f"rows of {features} features have {len(found)} segments of {self.size}, not {self.count}"
            )
        return found


@dataclass(frozen=True)
class Given:
    """Runs that are given, not chosen."""

    runs: Runs

    @property
    def label(self) -> str:
        """What names it in tables."""
        return f"r{sum(stop - start for start, stop in self.runs)}"

    def candidates(self, features: int, shape: Shape | None) -> list[Runs]:
        """Return the one choice there is."""
        end = 0
        for start, stop in self.runs:
            if not end <= start < stop <= features:
                raise InvalidInput(
                    f"columns must be sorted, disjoint runs within 0..{features}; ({start}, {stop}) is not"
                )
            end = stop
        return [self.runs]


Request: TypeAlias = Window | Crop | Segments | Given | None
Columns: TypeAlias = Any  # a request, runs, several of them, or a mapping from hidden widths to such; see `requests`
Reads: TypeAlias = dict[tuple[int, ...], tuple[Request, ...]]


def _fits(size: int, features: int, what: str) -> None:
    if size > features:
        raise InvalidInput(f"{what} of {size} features does not fit into rows of {features}")


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return disjoint runs sorted, those that touch joined.

    Examples
    --------
    >>> merged([(32, 48), (0, 16), (16, 32), (64, 80)])
    ((0, 48), (64, 80))
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def requests(columns: Columns, widths: Sequence[tuple[int, ...]]) -> Reads:
    """Return what each network reads, from the argument `columns` of `gigamlp.train.distill`.

    Examples
    --------
    >>> requests([None, Window(384)], [(40,)])
    {(40,): (None, Window(size=384, align=32))}
    >>> requests({64: Segments(12)}, [(40,), (64,)])
    {(40,): (None,), (64,): (Segments(count=12, size=16),)}
    """
    if not isinstance(columns, Mapping):
        return dict.fromkeys(widths, _several(columns))
    given = {(key,) if isinstance(key, int) else tuple(key): value for key, value in columns.items()}
    unknown = [key for key in given if key not in widths]
    if unknown:
        raise InvalidInput(f"columns are given for the hidden widths {unknown[0]}, which are not among {tuple(widths)}")
    return {each: _several(given.get(each)) for each in widths}


def _several(columns: Columns) -> tuple[Request, ...]:
    if columns is None or isinstance(columns, Window | Crop | Segments | Given):
        return (columns,)
    if not isinstance(columns, Sequence) or not columns:
        raise InvalidInput(f"columns must be runs (start, stop), a Window, a Crop, Segments or None, got {columns!r}")
    if all(isinstance(each, Sequence) and len(each) == 2 and not isinstance(each[0], Sequence) for each in columns):
        return (
            Given(tuple((_whole(start, "a run's start", 0), _whole(stop, "a run's stop")) for start, stop in columns)),
        )
    found = tuple(request for each in columns for request in _several(each))
    labels = [None if request is None else request.label for request in found]
    if len(set(labels)) != len(labels):
        raise InvalidInput(f"columns ask for the same twice: {labels}")
    return found


def bytes_moved(columns: Runs | None, row_bytes: int, *, line: int = 64, itemsize: int = 1) -> float:
    """Return the bytes per row that the memory system moves for rows that lie one behind the other.

    Memory moves whole lines: a run costs every line that it touches. A line that two neighbouring rows share is
    counted once.

    Parameters
    ----------
    columns : sequence of (start, stop), or None
        In features; None reads all.
    row_bytes : int
        From the beginning of a row to the next one's.
    line : int
        Bytes that are moved at once: 32 is a GPU's sector, 64 an access of HBM and a CPU's cache line, 128 a GPU's
        cache line.
    itemsize : int
        Bytes of a feature.

    Returns
    -------
    float
        The mean over all places that a row's beginning has within a line.

    Examples
    --------
    >>> bytes_moved(((112, 672),), 784), bytes_moved(((192, 576),), 784, line=32), bytes_moved(None, 784)
    (608.0, 400.0, 784.0)
    """
    row_bytes, line, itemsize = _whole(row_bytes, "row_bytes"), _whole(line, "line"), _whole(itemsize, "itemsize")
    if columns is None:
        return float(row_bytes)
    rows = math.lcm(row_bytes, line) // row_bytes
    touched: set[int] = set()
    for row in range(rows):
        for start, stop in columns:
            if not 0 <= start < stop or stop * itemsize > row_bytes:
                raise InvalidInput(f"the run ({start}, {stop}) does not lie within a row of {row_bytes} bytes")
            first, last = row * row_bytes + start * itemsize, row * row_bytes + stop * itemsize - 1
            touched.update(range(first // line, last // line + 1))
    return len(touched) * line / rows
