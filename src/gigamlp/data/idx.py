"""The IDX format of MNIST and its relatives: every dtype, any rank, gzip-compressed or not.

An IDX file is two zero bytes, a dtype code, the rank, one big-endian uint32 per dimension, and the elements in C order,
big-endian (http://yann.lecun.com/exdb/mnist/). Files are read as if hostile: no memory is taken for what a header
declares before it is known that the file can hold it, and nothing past the declared end is decompressed.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import FileFormatError

__all__ = ["DTYPES", "looks_like_html", "read_idx"]

# dtype code in the third byte -> how the elements are stored
DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
GZIP_MAGIC = b"\x1f\x8b"
_MAX_RANK = 32  # the most dimensions that every NumPy >= 1.26 has
_MAX_DEFLATE_RATIO = 1032  # 258 bytes from 2 bits: deflate cannot do better (zlib's technical notes)


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Read an IDX file.

    Parameters
    ----------
    path : path-like
        The file. Whether it is gzip-compressed is told by its first bytes, not by its name.

    Returns
    -------
    ndarray
        uint8, int8, int16, int32, float32 or float64 in native byte order, of the shape in the header; owned, writable
        and C-contiguous.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        If `path` is not there or is a folder.
    FileFormatError
        If the file is truncated, has bytes too many, or is not IDX at all. The message names the file, the byte offset
        (in the decompressed data), what was expected there and what was found.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "tiny.idx")
    >>> _ = path.write_bytes(bytes([0, 0, 0x08, 1]) + (3).to_bytes(4, "big") + bytes([7, 8, 9]))
    >>> read_idx(path)
    array([7, 8, 9], dtype=uint8)
    """
    name = os.fspath(path)
    with Path(path).open("rb") as raw:
        size = os.fstat(raw.fileno()).st_size
        compressed = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            return _Reader(raw, name, capacity=size, compressed=False).array()
        with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
            return _Reader(unpacked, name, capacity=size * _MAX_DEFLATE_RATIO, compressed=True).array()


class _Stream(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...


class _Reader:
    """Reads one IDX stream and knows at which byte it is, for the messages."""

    def __init__(self, stream: _Stream, name: str, *, capacity: int, compressed: bool) -> None:
        self.stream = stream
        self.name = name
        self.capacity = capacity  # no more bytes than this can come
        self.where = "of the decompressed data" if compressed else "of the file"
        self.compressed = compressed
        self.offset = 0

    def fail(self, expected: str, found: str, offset: int | None = None) -> FileFormatError:
        """Return the error for what was found at `offset` (the current one if not given)."""
        at = self.offset if offset is None else offset
        return FileFormatError(f"{self.name}: at byte {at} {self.where}: expected {expected}, found {found}")

    def fill(self, target: memoryview) -> int:
        """Read into `target` until it is full or the stream ends; return the number of bytes read."""
        done = 0
        try:
            while done < len(target):
                count = self.stream.readinto(target[done:])
                if not count:
                    break
                done += count
        except EOFError:
            raise self.fail("the rest of the gzip data", "the end of the file: truncated", self.offset + done) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.fail("sound gzip data", f"damage ({error})", self.offset + done) from error
        self.offset += done
        return done

    def take(self, count: int) -> bytes:
        """Read up to `count` bytes."""
        buffer = bytearray(count)
        return bytes(buffer[: self.fill(memoryview(buffer))])

    def shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Read the header."""
        magic = self.take(4)
        if len(magic) < 4 or magic[:2] != b"\0\0":
            raise self.fail("the IDX magic 00 00 TYPE RANK", _describe(magic + self.take(60), self.compressed), 0)
        if magic[2] not in DTYPES:
            known = ", ".join(f"{code:02x}" for code in DTYPES)
            raise self.fail(f"an IDX dtype code ({known})", f"{magic[2]:02x}", 2)
        if magic[3] > _MAX_RANK:
            raise self.fail(f"a rank of at most {_MAX_RANK}", str(magic[3]), 3)
        sizes = self.take(4 * magic[3])
        if len(sizes) < 4 * magic[3]:
            raise self.fail(f"{magic[3]} dimensions of 4 bytes", f"{len(sizes)} bytes, then the end: truncated", 4)
        return tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4)), DTYPES[magic[2]]

    def array(self) -> NDArray[Any]:
        """Read the whole stream."""
        shape, dtype = self.shape_and_dtype()
        dimensions = " x ".join(map(str, shape)) or "1"
        declared = f"{dimensions} elements of {dtype.itemsize} byte{'s' if dtype.itemsize > 1 else ''}"
        length = math.prod(shape) * dtype.itemsize
        # zeros aside too: NumPy wants the product of the other dimensions to fit
        if math.prod(n for n in shape if n) * dtype.itemsize >= 2**62:
            raise self.fail("dimensions that fit in memory", declared, 4)
        if self.offset + length > self.capacity:
            limit = "at most " if self.compressed else ""
            raise self.fail(
                f"{length} bytes of data ({declared})", f"{limit}{self.capacity - self.offset} bytes: truncated"
            )
        data = np.empty(length, np.uint8)
        start = self.offset
        if (done := self.fill(data.data)) < length:
            raise self.fail(f"{length} bytes of data ({declared})", f"{done} bytes, then the end: truncated", start)
        if self.take(1):
            raise self.fail(f"the end ({declared})", "more bytes", start + length)
        array = data.view(dtype).reshape(shape)
        return array if array.dtype.isnative else array.byteswap(inplace=True).view(dtype.newbyteorder("="))


def looks_like_html(head: bytes) -> bool:
    """Whether `head`, the first bytes of a file, is the start of a web page or of XML."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<"


def _describe(head: bytes, compressed: bool) -> str:
    if not head:
        return "no bytes at all"
    if looks_like_html(head):
        return "an HTML or XML page (the error page of a download?); fetch the file again"
    if compressed and head.startswith(GZIP_MAGIC):
        return "gzip data again: the file was compressed twice"
    return head[:4].hex(" ")
