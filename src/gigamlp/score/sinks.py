"""Where answers go: a working file that only grows, which becomes the output at the end.

What is in the working file beyond its committed length is forgotten by a resumed run, so a kill between a write and its
commit does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import DataError, FileFormatError, InvalidInput
from gigamlp.score.answers import Answers, Field
from gigamlp.score.manifest import beside
from gigamlp.score.places import Place

__all__ = ["AppendFile", "NpySink", "Sink", "id_fields", "open_append", "sync_folder"]

Array = NDArray[Any]


class Sink(Protocol):
    """An output that is being written.

    Attributes
    ----------
    size : int
        Bytes of the working file so far.
    """

    @property
    def size(self) -> int:
        """Bytes of the working file so far."""
        ...

    def append(self, answers: Answers) -> None:
        """Write a block's answers behind the others."""
        ...

    def sync(self) -> None:
        """Return when all that was appended is on the disk."""
        ...

    def finish(self, rows: int) -> None:
        """Turn the working file into the output of `rows` rows. Repeating it after a kill is no error."""
        ...

    def discard(self) -> None:
        """Remove what is left of the working file, once the output is noted as complete."""
        ...

    def close(self) -> None:
        """Close the working file and leave it there."""
        ...


class AppendFile:
    """A file that only grows, opened at a committed length.

    Parameters
    ----------
    path : Path
    committed : int
        Bytes to keep; what is behind them is cut off.

    Raises
    ------
    FileFormatError
        If the file is shorter than that.
    InvalidInput
        If another process is writing it.
    """

    def __init__(self, path: Path, committed: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[bytes] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        _lock(self._file, path)
        there = self._file.seek(0, os.SEEK_END)
        if there < committed:
            self._file.close()
            raise FileFormatError(f"{path}: has {there:,} bytes, {committed:,} were committed; start without --resume")
        self._file.truncate(committed)
        self.size = self._file.seek(committed)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._file.write(data)
        self.size += len(data) if isinstance(data, bytes) else data.nbytes

    def write_at(self, offset: int, data: bytes) -> None:
        """Overwrite what is at `offset`."""
        self._file.seek(offset)
        self._file.write(data)
        self._file.seek(self.size)

    def sync(self) -> None:
        """Return when everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Do nothing: the file has its name already."""

    def discard(self) -> None:
        """Do nothing: the file is the result."""

    def close(self) -> None:
        """Close the file, which may still have unwritten bytes that the disk has no room for."""
        try:
            self._file.close()
        except OSError:
            return  # they were not committed; the error was raised when they were written first


def open_append(path: Place, committed: int) -> Any:
    """Return what grows at `path`: a file, or on an object store objects in the folder of that name."""
    if isinstance(path, Path):
        return AppendFile(path, committed)
    from gigamlp.score.remote import AppendObjects

    return AppendObjects(path, committed)


def _lock(file: IO[bytes], path: Path) -> None:
    """Refuse a file that another process is writing. The lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InvalidInput(f"{path}: another process is writing this output; wait for it, or name another") from error


def sync_folder(path: Path) -> None:
    """Return when the names in `path` are on the disk (where folders can be synced)."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class NpySink:
    """An ``.npy`` file: one array, or with several columns a structured one.

    Parameters
    ----------
    out : Path
    columns : sequence of Field
        Ids first.
    committed : int
        Bytes of the working file to keep.
    finishing : bool
        Whether all rows were committed before: the output may then have its name already.
    """

    def __init__(self, out: Place, columns: Sequence[Field], committed: int = 0, *, finishing: bool = False) -> None:
        self._out, self._columns = out, tuple(columns)
        whole = [(c.name, c.dtype, (c.width,)) if c.width is not None else (c.name, c.dtype) for c in columns]
        self._dtype = np.dtype(whole if len(whole) > 1 else columns[0].dtype)
        self._shape = () if len(whole) > 1 or columns[0].width is None else (columns[0].width,)
        self._part = beside(out, "part")
        self._file: Any = None
        self._near = isinstance(out, Path)
        if not (self._near and finishing and not self._part.exists() and out.exists()):
            self._file = open_append(self._part, committed)
            if not committed:
                self._file.write(self._header(0))

    def _header(self, rows: int) -> bytes:
        """Return the header for `rows` rows; its length does not depend on them."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {(rows, *self._shape)!r}, }}"
        text += " " * (21 - len(str(rows)))  # the room that NumPy leaves for a longer first axis
        data = text.encode("utf-8")
        small = len(data) + 11 <= 65535 and text.isascii()
        start = 10 if small else 12
        pad = -(start + len(data) + 1) % 64
        version = b"\x01\x00" if small else (b"\x02\x00" if text.isascii() else b"\x03\x00")
        length = (len(data) + pad + 1).to_bytes(2 if small else 4, "little")
        return b"\x93NUMPY" + version + length + data + b" " * pad + b"\n"

    @property
    def size(self) -> int:
        """Bytes of the working file so far."""
        return 0 if self._file is None else int(self._file.size)

    def append(self, answers: Answers) -> None:
        """Write a block's answers behind the others."""
        assert self._file is not None
        if len(self._columns) == 1:
            (column,) = answers.columns.values()
            data = np.ascontiguousarray(column, self._dtype)
        else:
            data = np.empty(len(answers.block.x), self._dtype)
            for each in self._columns:
                data[each.name] = _numbers(answers.columns[each.name], each.name)
        if data.size:
            self._file.write(data.view(np.uint8).data if data.dtype.names is None else data.tobytes())

    def sync(self) -> None:
        """Return when all that was appended is on the disk."""
        if self._file is not None:
            self._file.sync()

    def finish(self, rows: int) -> None:
        """Write the header's number of rows and give the file its name."""
        if self._file is None:  # a kill came between this and the manifest's last state
            return
        expected = len(self._header(0)) + rows * self._dtype.itemsize * int(np.prod(self._shape))
        if self._file.size != expected:
            raise FileFormatError(f"{self._part}: has {self._file.size:,} bytes, {rows:,} rows have {expected:,}")
        if not self._near:
            self._file.sync()
            skip = len(self._header(0))
            with self._out.create() as file:
                file.write(self._header(rows))
                for piece in self._file.pieces():
                    file.write(piece[skip:])
                    skip = max(0, skip - len(piece))
            return
        self._file.write_at(0, self._header(rows))
        self._file.sync()
        self._file.close()
        self._part.replace(self._out)
        sync_folder(self._out.parent)
        self._file = None

    def discard(self) -> None:
        """Remove what is left of the working file: nothing of a local one, it became the output."""
        if not self._near:
            self._file.discard()

    def close(self) -> None:
        """Close the working file and leave it there."""
        if self._file is not None:
            self._file.close()


def _numbers(column: Any, name: str) -> Array:
    if isinstance(column, np.ndarray):
        return column
    if column.null_count:
        raise DataError(f"id column {name!r} has nulls, which an .npy output cannot hold; write Parquet or Arrow")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def id_fields(schema: Any) -> list[Field]:
    """Return the id columns of an ``.npy`` output.

    Raises
    ------
    InvalidInput
        If one is not of numbers.
    """
    found = []
    for each in schema or ():
        dtype = np.dtype(each.type.to_pandas_dtype())
        if dtype.kind not in "buif":
            raise InvalidInput(
                f"id column {each.name!r} is {each.type}: an .npy output takes numbers only; write Parquet or Arrow"
            )
        found.append(Field(each.name, dtype.str))
    return found
