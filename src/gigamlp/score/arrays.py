"""Inputs that are one array: ``.npy`` and IDX files, mapped into memory, and raw rows of stdin."""

from __future__ import annotations

import mmap
import os
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.data.idx import DTYPES, GZIP_MAGIC, read_idx
from gigamlp.errors import FileFormatError
from gigamlp.score.blocks import Block, Position, Reject, Shape, Source, reject_all

__all__ = ["ArraySource", "RawSource", "open_idx", "open_npy", "open_remote"]

Array = NDArray[Any]

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap does not name before 3.13


class ArraySource:
    """Rows of an array that is in memory or mapped into it.

    Parameters
    ----------
    name : str
    x : ndarray, shape [n, ...]
    shape : Shape
    mapping : mmap.mmap, optional
        Of the file, if `x` is a view of it. Pages are asked for a block ahead and given back block by block, so that
        the memory of the process does not grow with the file.
    offset : int
        Where in the mapping `x` begins.
    declared : int, optional
        Rows that the header promises, if there are fewer.
    """

    id_schema: Any = None

    def __init__(  # noqa: PLR0917
        self,
        name: str,
        x: Array,
        shape: Shape,
        mapping: mmap.mmap | None = None,
        offset: int = 0,
        declared: int | None = None,
    ) -> None:
        self.name, self._shape = name, shape
        self.rows: int | None = len(x) if declared is None else declared
        self._x = x.reshape(len(x), -1) if x.ndim > 2 and x.flags.c_contiguous else x
        self._mapping, self._offset = mapping, offset

    @property
    def cuts(self) -> Sequence[int]:
        """The rows at which `blocks` may begin to give the same blocks as from the beginning."""
        return range(0, 0 if _unfit(self._x, self._shape) else len(self._x), self._shape.rows)

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield views of the array."""
        x, shape = self._x, self._shape
        assert self.rows is not None
        reason = _unfit(x, shape)
        if reason is not None:
            if start.row < self.rows:
                yield reject_all(self.name, start, self.rows - start.row, reason, shape.features)
            return
        row_bytes = x.strides[0] if self._mapping is not None else 0
        for begin in range(start.row, len(x), shape.rows):
            end = min(begin + shape.rows, len(x))
            piece = (self._offset + begin * row_bytes, (end - begin) * row_bytes)
            self._advise(_POPULATE_READ, *piece, outwards=True)
            rows = x[begin:end]
            if rows.dtype.kind == "b":
                rows = rows.view(np.uint8)

            def release(piece: tuple[int, int] = piece) -> None:
                self._advise(getattr(mmap, "MADV_DONTNEED", None), *piece, outwards=False)

            at = Position(start.file, begin), Position(start.file, end)
            yield Block(*at, rows, name=self.name, release=release if self._mapping is not None else None)
        if self.rows > len(x) and start.row < self.rows:
            reason = f"the header promises {self.rows:,} rows, the file ends after {len(x):,}: truncated"
            begin = max(start.row, len(x))
            yield reject_all(self.name, Position(start.file, begin), self.rows - begin, reason, shape.features)

    def _advise(self, advice: int | None, begin: int, length: int, *, outwards: bool) -> None:
        """Tell the kernel about the pages of [begin, begin + length); advice only."""
        if self._mapping is None or advice is None or not hasattr(self._mapping, "madvise"):
            return
        page = mmap.PAGESIZE
        first = begin // page if outwards else -(-begin // page)
        last = -(-(begin + length) // page) if outwards else (begin + length) // page
        if last <= first:
            return
        try:
            self._mapping.madvise(advice, first * page, min((last - first) * page, len(self._mapping) - first * page))
        except OSError:
            return  # advice only

    def close(self) -> None:
        """Forget the array; the mapping goes with its last view."""
        self._x = np.empty((0, 0), np.uint8)
        self._mapping = None


def _unfit(x: Array, shape: Shape) -> str | None:
    """Return why an array cannot be rows, or None."""
    if x.dtype.kind not in "buif":
        return f"rows must be numbers, the file holds {x.dtype}"
    width = int(np.prod(x.shape[1:])) if x.ndim > 1 else 1
    if x.ndim < 2 or width != shape.features:
        return f"rows have {width} features, the model takes {shape.features}"
    return None


def _npy_header(file: Any, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        dims, fortran, dtype = read(file)
    except (ValueError, KeyError, EOFError, SyntaxError, tokenize.TokenError, TypeError) as error:
        raise FileFormatError(f"{name}: damaged .npy header: {error}") from error
    if dtype.hasobject:
        raise FileFormatError(f"{name}: holds Python objects, not numbers")
    return dims, fortran, dtype


def _idx_header(file: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in DTYPES or not 1 <= head[3] <= 32:
        raise FileFormatError(f"{name}: at byte 0: expected the IDX magic 00 00 TYPE RANK, found {head.hex(' ')}")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise FileFormatError(f"{name}: at byte 4: {head[3]} dimensions of 4 bytes expected: truncated")
    return tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4)), DTYPES[head[2]]


def open_npy(path: Path, shape: Shape) -> ArraySource:
    """Map an ``.npy`` file.

    Raises
    ------
    FileFormatError
        If its header cannot be read. A file that is too short is no error here: the rows that it lacks are rejected.
    """
    with path.open("rb") as file:
        dims, fortran, dtype = _npy_header(file, str(path))
        return _mapped(path, file, file.tell(), dims, dtype, shape, fortran=fortran)


def open_idx(path: Path, shape: Shape) -> ArraySource:
    """Map an IDX file; a gzip-compressed one is decompressed into memory."""
    with path.open("rb") as file:
        if file.read(2) == GZIP_MAGIC:
            return ArraySource(str(path), read_idx(path), shape)
        file.seek(0)
        dims, dtype = _idx_header(file, str(path))
        return _mapped(path, file, file.tell(), dims, dtype, shape)


def open_remote(name: str, file: Any, shape: Shape) -> Source:
    """Read an ``.npy`` or IDX file of another file system, block by block.

    Raises
    ------
    FileFormatError
        If its header cannot be read, or it is stored column by column.
    """
    from gigamlp.score.remote import RemoteArray

    if file.read(1) == b"\x93":
        file.seek(0)
        dims, fortran, dtype = _npy_header(file, name)
        if fortran and len(dims) > 1:
            raise FileFormatError(f"{name}: stored column by column, so that rows cannot be read one after the other")
    else:
        file.seek(0)
        dims, dtype = _idx_header(file, name)
    if not dims:
        raise FileFormatError(f"{name}: holds one number, not rows")
    return RemoteArray(name, file, file.tell(), dims, dtype, shape)


def _mapped(  # noqa: PLR0917
    path: Path,
    file: IO[bytes],
    offset: int,
    dims: tuple[int, ...],
    dtype: np.dtype[Any],
    shape: Shape,
    *,
    fortran: bool = False,
) -> ArraySource:
    if not dims:
        raise FileFormatError(f"{path}: holds one number, not rows")
    width = int(np.prod(dims[1:], dtype=object)) * dtype.itemsize
    size = os.fstat(file.fileno()).st_size - offset
    there = dims[0] if not width else min(dims[0], size // width)
    if fortran and there < dims[0]:
        raise FileFormatError(f"{path}: truncated, and stored column by column, so that no row is whole")
    if not there or not width:
        return ArraySource(str(path), np.empty((0, *dims[1:]), dtype), shape, declared=dims[0])
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    flat = np.frombuffer(mapping, dtype, there * (width // dtype.itemsize), offset)
    if fortran:
        x = flat.reshape(dims, order="F")
        return ArraySource(str(path), x if x.ndim < 3 else np.ascontiguousarray(x), shape)
    return ArraySource(str(path), flat.reshape(there, *dims[1:]), shape, mapping, offset, dims[0])


class RawSource:
    """Raw rows of a stream that cannot be wound back: stdin.

    Parameters
    ----------
    name : str
    stream : binary file
    shape : Shape
        ``dtype`` is what a number is; default uint8.
    """

    id_schema: Any = None
    rows: int | None = None

    def __init__(self, name: str, stream: IO[bytes], shape: Shape) -> None:
        self.name, self._stream, self._shape = name, stream, shape
        self._dtype = np.dtype(shape.dtype or "uint8")

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield owned rows. Those before `start` are read and thrown away."""
        shape, width = self._shape, self._shape.features * self._dtype.itemsize
        skip = start.row * width
        while skip:
            found = len(self._stream.read(min(skip, 1 << 20)))
            if not found:
                raise FileFormatError(f"{self.name}: ends before row {start.row:,}, where the last run stopped")
            skip -= found
        row = start.row
        while True:
            data = bytearray(shape.rows * width)
            done = self._fill(memoryview(data))
            whole, rest = divmod(done, width)
            if not done:
                return
            x = np.frombuffer(data, self._dtype, whole * shape.features).reshape(whole, shape.features)
            reason = f"the stream ends {width - rest} bytes before the end of a row of {width} bytes"
            rejects = (Reject(row + whole, 1, reason, data[whole * width : done].hex()),) if rest else ()
            end = Position(start.file, row + whole + bool(rest))
            kept = np.arange(whole, dtype=np.int64) if rest else None
            yield Block(Position(start.file, row), end, x, kept, rejects=rejects, name=self.name)
            row = end.row
            if done < len(data):
                return

    def _fill(self, target: memoryview) -> int:
        done = 0
        while done < len(target):
            part = self._stream.read(len(target) - done)
            if not part:
                break
            target[done : done + len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        """Leave the stream to its owner."""
