"""The IDX reader: round trips, and one clear error for everything that is not IDX."""

from __future__ import annotations

import contextlib
import gzip
import math
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gigamlp.data import read_idx
from gigamlp.errors import FileFormatError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    """Write IDX independently of the reader: with struct, element order by NumPy's tobytes of a big-endian copy."""
    code = CODES[array.dtype.str[1:]]
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.astype(
        array.dtype.newbyteorder(">")
    ).tobytes("C")


arrays = st.sampled_from(list(CODES)).flatmap(
    lambda code: hnp.arrays(np.dtype(code), hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5))
)


def put(folder: Path, data: bytes, name: str = "file.idx") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(array=arrays, compress=st.booleans())
def test_round_trip(folder: Path, array: np.ndarray, compress: bool) -> None:
    data = idx_bytes(array)
    path = put(folder, gzip.compress(data) if compress else data)
    found = read_idx(path)
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()  # NaN payloads included
    assert found.flags.writeable
    assert found.flags.c_contiguous


def test_known_bytes(tmp_path: Path) -> None:
    data = bytes([0, 0, 0x0B, 2, 0, 0, 0, 1, 0, 0, 0, 3]) + bytes([0x01, 0x02, 0xFF, 0xFE, 0x00, 0x07])
    np.testing.assert_array_equal(read_idx(put(tmp_path, data)), np.array([[258, -2, 7]], np.int16))


def test_compression_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8)
    assert read_idx(put(tmp_path, idx_bytes(array), "plain.gz")).tolist() == array.tolist()
    assert read_idx(put(tmp_path, gzip.compress(idx_bytes(array)), "packed-ubyte")).tolist() == array.tolist()


def test_gzip_of_several_members(tmp_path: Path) -> None:
    array = np.arange(100, dtype=np.int32)
    data = idx_bytes(array)
    path = put(tmp_path, gzip.compress(data[:50]) + gzip.compress(data[50:]))
    assert read_idx(path).tolist() == array.tolist()


@given(array=arrays, compress=st.booleans(), data=st.data())
def test_truncated_anywhere(folder: Path, array: np.ndarray, compress: bool, data: st.DataObject) -> None:
    whole = idx_bytes(array)
    cut = data.draw(st.integers(0, len(whole) - 1))
    path = put(folder, gzip.compress(whole[:cut]) if compress else whole[:cut], "cut.idx")
    with pytest.raises(FileFormatError, match=r"cut\.idx: at byte \d+ of the"):
        read_idx(path)


@given(array=arrays, data=st.data())
def test_gzip_truncated_anywhere(folder: Path, array: np.ndarray, data: st.DataObject) -> None:
    whole = gzip.compress(idx_bytes(array))
    path = put(folder, whole[: data.draw(st.integers(0, len(whole) - 1))], "cut.gz")
    with pytest.raises(FileFormatError, match=r"cut\.gz: at byte \d+ of the"):
        read_idx(path)


@given(array=arrays, extra=st.binary(min_size=1, max_size=20), compress=st.booleans())
def test_trailing_bytes(folder: Path, array: np.ndarray, extra: bytes, compress: bool) -> None:
    whole = idx_bytes(array) + extra
    path = put(folder, gzip.compress(whole) if compress else whole)
    with pytest.raises(FileFormatError, match=f"at byte {len(whole) - len(extra)} .*found more bytes"):
        read_idx(path)


@given(data=st.binary(max_size=200), prefix=st.sampled_from([b"", b"\0\0", b"\0\0\x08\x01", b"\x1f\x8b\x08\0"]))
def test_garbage_raises_nothing_else(folder: Path, data: bytes, prefix: bytes) -> None:
    for packed in (prefix + data, gzip.compress(prefix + data)):
        with contextlib.suppress(FileFormatError):
            read_idx(put(folder, packed))


@given(array=arrays, position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_gzip_data_raises_nothing_else(
    folder: Path, array: np.ndarray, position: float, bit: int
) -> None:
    whole = bytearray(gzip.compress(idx_bytes(array)))
    whole[int(position * len(whole))] ^= 1 << bit
    try:
        found = read_idx(put(folder, bytes(whole)))
    except FileFormatError:
        return
    # flags, time stamp and the like of the gzip header do not change the content
    assert found.tobytes() == array.tobytes()


def test_html_instead_of_data(tmp_path: Path) -> None:
    page = b"\n<!DOCTYPE html><html><body>403 Forbidden</body></html>"
    for data in (page, gzip.compress(page), b"\xef\xbb\xbf" + page):
        with pytest.raises(FileFormatError, match=r"train\.gz: at byte 0 .*HTML"):
            read_idx(put(tmp_path, data, "train.gz"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no bytes at all"),
        (b"\x00\x00\x08", "expected the IDX magic 00 00 TYPE RANK, found 00 00 08"),
        (b"\x00\x01\x08\x01", "expected the IDX magic 00 00 TYPE RANK, found 00 01 08 01"),
        (b"\x00\x00\x0a\x01", "at byte 2 .*dtype code .*found 0a"),
        (b"\x00\x00\x08\xff", "at byte 3 .*rank of at most 32, found 255"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x05", "at byte 4 .*2 dimensions of 4 bytes, found 4 bytes"),
        (
            b"\x00\x00\x0c\x01\x00\x00\x00\x03\x00\x00\x00\x00",
            "at byte 8 .*12 bytes of data .3 elements of 4 bytes., found 4",
        ),
        (b"\x00\x00\x08\x01\x00\x00\x00\x01\x00\x07", "at byte 9 .*found more bytes"),
        (gzip.compress(gzip.compress(b"\x00\x00\x08\x00\x07")), "compressed twice"),
    ],
)
def test_messages(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_idx(put(tmp_path, data))


def test_every_wrong_dtype_code(tmp_path: Path) -> None:
    for code in set(range(256)) - set(CODES.values()):
        with pytest.raises(FileFormatError, match="at byte 2"):
            read_idx(put(tmp_path, bytes([0, 0, code, 0]) + bytes(8)))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [(2**32 - 1,), (2**32 - 1,) * 2, (2**32 - 1,) * 32, (0, *(2**32 - 1,) * 8)])
def test_absurd_dimensions_take_no_memory(tmp_path: Path, shape: tuple[int, ...], compress: bool) -> None:
    data = struct.pack(f">BBBB{len(shape)}I", 0, 0, 0x0E, len(shape), *shape) + bytes(100)
    path = put(tmp_path, gzip.compress(data) if compress else data)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="elements of 8 bytes"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_decompression_bomb_is_not_unpacked(tmp_path: Path) -> None:
    # 64 MB of zeros in 64 kB, behind a header that declares 10 bytes
    bomb = gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 10) + bytes(64 << 20))
    path = put(tmp_path, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match=r"at byte 18 .*found more bytes"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_gzip_data_that_is_legitimately_small_is_read(tmp_path: Path) -> None:
    # the ratio check must not refuse the best that deflate can do
    zeros = np.zeros(8 << 20, np.uint8)
    data = gzip.compress(idx_bytes(zeros), 9)
    assert math.prod(zeros.shape) / len(data) > 1000
    assert read_idx(put(tmp_path, data)).shape == zeros.shape


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        read_idx(tmp_path)
