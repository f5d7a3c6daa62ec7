"""Inputs and outputs on other file systems: S3-compatible storage, GCS, and what else pyarrow or fsspec reads.

An object store has no appending and no renaming. An output that grows is therefore kept as objects ``OUT.part.OFFSET``,
one for each commit; the manifest, a small object that one request replaces, says how many of their bytes count. At the
end they are read once more and written as one object, which is there for readers only when it is whole.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyarrow import fs

from gigamlp.errors import FileFormatError, InvalidInput
from gigamlp.score.blocks import Block, Position, Shape, reject_all

__all__ = ["AppendObjects", "Remote", "RemoteArray", "Pieces"]

_LARGEST = 64 << 20  # bytes of an object of a working file: what is held in memory between two commits


class Remote:
    """A place on another file system, with those methods of `pathlib.Path` that scoring calls.

    Parameters
    ----------
    uri : str
        ``s3://bucket/key`` and what else `pyarrow.fs.FileSystem.from_uri` takes, options of the URI included
        (``?endpoint_override=127.0.0.1:9000&scheme=http``); else a protocol of fsspec (``memory://``, ``sftp://``).

    Raises
    ------
    InvalidInput
        If no file system takes the URI.

    Examples
    --------
    >>> Remote("memory://folder/rows.npy").with_name("other.npy")
    Remote('memory://folder/other.npy')
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        base, self._mark, self._options = uri.partition("?")
        self._base = base
        self.name = PurePosixPath(base).name
        self.suffix = PurePosixPath(base).suffix

    def __str__(self) -> str:
        return self.uri

    def __repr__(self) -> str:
        return f"Remote({self.uri!r})"

    @cached_property
    def _place(self) -> tuple[Any, str]:
        protocol = self.uri.partition("://")[0]
        try:
            escaped = quote(self._base, safe=":/%@+=,;!$&'()*[]~")  # spaces and letters beyond ASCII
            return tuple(fs.FileSystem.from_uri(escaped + self._mark + self._options))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            try:
                import fsspec

                system = fsspec.filesystem(protocol)
            except (ImportError, ValueError) as other:
                raise InvalidInput(f"{self.uri}: no file system for this URI: {error}; {other}") from error
            return fs.PyFileSystem(fs.FSSpecHandler(system)), self._base.partition("://")[2]

    def with_name(self, name: str) -> Remote:
        """Return another place in the same folder."""
        return Remote(f"{self._base.rpartition('/')[0]}/{name}{self._mark}{self._options}")

    def below(self, name: str) -> Remote:
        """Return a place in this folder."""
        return Remote(f"{self._base.rstrip('/')}/{name}{self._mark}{self._options}")

    def info(self) -> Any:
        """Return what the file system says of it."""
        system, path = self._place
        return system.get_file_info(path)

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return bool(self.info().type != fs.FileType.NotFound)

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return bool(self.info().type == fs.FileType.Directory)

    def is_file(self) -> bool:
        """Whether it is a file."""
        return bool(self.info().type == fs.FileType.File)

    def files(self) -> list[str]:
        """Return the files below this folder, as paths from it on, sorted."""
        system, path = self._place
        found = system.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        start = path.strip("/") + "/"
        return sorted(each.path.lstrip("/")[len(start) :] for each in found if each.type == fs.FileType.File)

    def beside(self, start: str) -> list[str]:
        """Return the names of the files of its folder that begin with `start`, sorted."""
        system, path = self._place
        folder = fs.FileSelector(path.rpartition("/")[0], allow_not_found=True)
        return sorted(each.base_name for each in system.get_file_info(folder) if each.base_name.startswith(start))

    def matches(self) -> list[Remote]:
        """Return the files that this pattern means, sorted; ``*`` stops at no folder."""
        parts = self._base.split("/")
        first = next(i for i, part in enumerate(parts) if any(c in part for c in "*["))
        folder = Remote("/".join(parts[:first]) + self._mark + self._options)
        pattern = "/".join(parts[first:])
        return [folder.below(name) for name in folder.files() if fnmatchcase(name, pattern)]

    def open(self) -> Any:
        """Open it for reading, at any place of it."""
        system, path = self._place
        return system.open_input_file(path)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return what it holds."""
        with self.open() as file:
            return str(file.read().decode(encoding))

    def write_bytes(self, data: bytes) -> None:
        """Replace it at once."""
        with self.create() as file:
            file.write(data)

    @contextmanager
    def create(self) -> Iterator[IO[bytes]]:
        """Yield a file that replaces this one when the block ends without an error."""
        system, path = self._place
        if not isinstance(system, fs.S3FileSystem):
            system.create_dir(path.rpartition("/")[0] or "/", recursive=True)
        file = system.open_output_stream(path, compression=None)
        try:
            yield file
        except BaseException:
            if hasattr(file, "abort"):
                file.abort()
            raise
        file.close()

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove it."""
        system, path = self._place
        try:
            system.delete_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise
        except OSError:  # Arrow then writes an empty object for the folder, which some servers refuse
            if self.is_file():
                raise


class AppendObjects:
    """A file that only grows, as successive objects, opened at a committed length. Objects behind it are removed.

    Parameters
    ----------
    path : Remote
        If its name ends in ``.part``, the objects are ``PATH.OFFSET``; else ``PATH.part.OFFSET``, of which `publish`
        makes it.
    committed : int

    Raises
    ------
    FileFormatError
        If the objects hold less than that.
    """

    def __init__(self, path: Remote, committed: int) -> None:
        self._final = None if path.name.endswith(".part") else path
        self.path, self.size = path if self._final is None else path.with_name(f"{path.name}.part"), committed
        path = self.path
        self._held: list[bytes] = []
        self._start = committed
        there = 0
        for name in self._names():
            if int(name.rpartition(".")[2]) >= committed:
                path.with_name(name).unlink()
            else:
                there += int(path.with_name(name).info().size)
        if there != committed:
            raise FileFormatError(
                f"{path}: holds {there:,} bytes, {committed:,} were committed; start without --resume"
            )

    def _names(self) -> list[str]:
        found = self.path.beside(f"{self.path.name}.")
        return [name for name in found if name.rpartition(".")[2].isdecimal()]

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._held.append(bytes(data))
        self.size += len(self._held[-1])
        if self.size - self._start >= _LARGEST:
            self.sync()

    def sync(self) -> None:
        """Return when everything is stored."""
        if self._held:
            self.path.with_name(f"{self.path.name}.{self._start:020d}").write_bytes(b"".join(self._held))
            self._held, self._start = [], self.size

    def pieces(self) -> Iterator[bytes]:
        """Yield what was stored, object by object."""
        for name in self._names():
            with self.path.with_name(name).open() as file:
                yield file.read()

    def publish(self) -> None:
        """Write everything to the path, as one object; nothing if there is nothing."""
        if self._final is None:
            return
        self._final.unlink(missing_ok=True)
        if self.size:
            with self._final.create() as file:
                for piece in self.pieces():
                    file.write(piece)

    def discard(self) -> None:
        """Remove all objects."""
        for name in self._names():
            self.path.with_name(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Forget what was not stored."""
        self._held = []


class Pieces(io.RawIOBase):
    """Objects read one after the other as one file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target` with what comes next."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class RemoteArray:
    """Rows of one array in a file that cannot be mapped: read block by block.

    Parameters
    ----------
    name : str
    file : binary file
    offset : int
        Where the rows begin.
    dims : tuple of int
        Of the array.
    dtype : numpy.dtype
    shape : Shape
    """

    id_schema: Any = None

    def __init__(  # noqa: PLR0917
        self, name: str, file: Any, offset: int, dims: tuple[int, ...], dtype: np.dtype[Any], shape: Shape
    ) -> None:
        self.name, self._file, self._offset, self._dtype, self._shape = name, file, offset, dtype, shape
        self.rows: int | None = dims[0]
        width = int(np.prod(dims[1:], dtype=object))
        self._bytes = width * dtype.itemsize
        self._there = min(dims[0], (file.size() - offset) // self._bytes) if self._bytes else 0
        self._unfit: str | None = None
        if dtype.kind not in "buif":
            self._unfit = f"rows must be numbers, the file holds {dtype}"
        elif len(dims) < 2 or width != shape.features:
            self._unfit = f"rows have {width} features, the model takes {shape.features}"

    @property
    def cuts(self) -> Sequence[int]:
        """The rows at which `blocks` may begin to give the same blocks as from the beginning."""
        return range(0, 0 if self._unfit else self._there, self._shape.rows)

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield owned rows."""
        assert self.rows is not None
        features = self._shape.features
        if self._unfit is not None:
            if start.row < self.rows:
                yield reject_all(self.name, start, self.rows - start.row, self._unfit, features)
            return
        for begin in range(start.row, self._there, self._shape.rows):
            end = min(begin + self._shape.rows, self._there)
            data = self._file.read_at((end - begin) * self._bytes, self._offset + begin * self._bytes)
            x = np.frombuffer(data, self._dtype).reshape(end - begin, features)
            rows = x.view(np.uint8) if x.dtype.kind == "b" else x
            yield Block(Position(start.file, begin), Position(start.file, end), rows, name=self.name)
        if self.rows > self._there and start.row < self.rows:
            reason = f"the header promises {self.rows:,} rows, the file ends after {self._there:,}: truncated"
            begin = max(start.row, self._there)
            yield reject_all(self.name, Position(start.file, begin), self.rows - begin, reason, features)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
