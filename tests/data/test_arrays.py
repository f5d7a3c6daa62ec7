"""A user's own files: what is read, and one clear error for everything that does not hold together."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.data import load_arrays
from gigamlp.errors import DataError, FileFormatError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (12, 4, 4), dtype=np.uint8)
Y = RNG.integers(0, 10, 12, dtype=np.uint8)
X_TEST = RNG.integers(0, 256, (5, 4, 4), dtype=np.uint8)
Y_TEST = RNG.integers(0, 10, 5, dtype=np.uint8)
MNIST_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray, compress: bool = False) -> bytes:
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    return gzip.compress(data) if compress else data


def folder_of(folder: Path, names: tuple[str, ...] = MNIST_NAMES, compress: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in zip(names, (X, Y, X_TEST, Y_TEST), strict=False):
        (folder / (name + ".gz" * compress)).write_bytes(idx(array, compress))
    return folder


# ---- what is read -------------------------------------------------------------------------------------------------


def test_npy_is_memory_mapped_and_flattened(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    data = load_arrays(tmp_path / "x.npy", tmp_path / "y.npy")
    assert data.name == "x"
    assert data.x.shape == (12, 16)
    np.testing.assert_array_equal(data.x, X.reshape(12, 16))
    assert isinstance(data.x, np.memmap)
    assert not data.x.flags.writeable
    assert data.y is not None
    assert data.y.dtype == np.int64
    assert data.y.tolist() == Y.tolist()
    assert data.x_test is None
    assert data.y_test is None
    with pytest.raises(FrozenInstanceError):
        data.name = "other"  # type: ignore[misc]


def test_npy_without_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.reshape(12, 16).astype(np.float32))
    assert load_arrays(str(tmp_path / "x.npy")).y is None


@pytest.mark.parametrize("key", ["x", "X", "x_train", "X_train", "data"])
@pytest.mark.parametrize("label_key", ["y", "Y", "y_train", "Y_train", "target"])
def test_npz_keys(tmp_path: Path, key: str, label_key: str) -> None:
    np.savez_compressed(tmp_path / "set.npz", **{key: X, label_key: Y}, other=np.zeros(3))
    data = load_arrays(tmp_path / "set.npz")
    np.testing.assert_array_equal(data.x, X.reshape(12, 16))
    assert data.y is not None
    assert data.y.tolist() == Y.tolist()


def test_npz_with_test_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x_train=X, y_train=Y, x_test=X_TEST, y_test=Y_TEST)
    data = load_arrays(tmp_path / "set.npz")
    assert data.x_test is not None
    assert data.y_test is not None
    np.testing.assert_array_equal(data.x_test, X_TEST.reshape(5, 16))
    assert data.y_test.tolist() == Y_TEST.tolist()


def test_npz_with_labels_from_another_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=X)
    np.save(tmp_path / "y.npy", Y)
    data = load_arrays(tmp_path / "set.npz", tmp_path / "y.npy")
    assert data.y is not None
    assert data.y.tolist() == Y.tolist()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", ["a.idx", "a.idx.gz", "a-images-idx3-ubyte", "a.bin"])
def test_idx(tmp_path: Path, name: str, compress: bool) -> None:
    (tmp_path / name).write_bytes(idx(X, compress))
    (tmp_path / "labels").write_bytes(idx(Y, compress))
    data = load_arrays(tmp_path / name, tmp_path / "labels")
    np.testing.assert_array_equal(data.x, X.reshape(12, 16))
    assert data.y is not None
    assert data.y.tolist() == Y.tolist()
    assert data.y.dtype == np.int64


@pytest.mark.parametrize("compress", [False, True])
def test_folder(tmp_path: Path, compress: bool) -> None:
    data = load_arrays(folder_of(tmp_path / "fashion", compress=compress))
    assert data.name == "fashion"
    np.testing.assert_array_equal(data.x, X.reshape(12, 16))
    assert data.x_test is not None
    np.testing.assert_array_equal(data.x_test, X_TEST.reshape(5, 16))
    assert data.y is not None
    assert data.y_test is not None
    assert (data.y.tolist(), data.y_test.tolist()) == (Y.tolist(), Y_TEST.tolist())


def test_folder_with_dots_in_names_and_no_test_part(tmp_path: Path) -> None:
    data = load_arrays(folder_of(tmp_path / "d", ("train-images.idx3-ubyte", "train-labels.idx1-ubyte")))
    assert data.x.shape == (12, 16)
    assert data.x_test is None


def test_folder_with_both_packed_and_plain_reads_the_plain_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "raw")
    (folder / (MNIST_NAMES[0] + ".gz")).write_bytes(b"\x1f\x8bdamaged")
    assert load_arrays(folder).x.shape == (12, 16)


def test_emnist_folder(tmp_path: Path) -> None:
    for split in ("letters", "digits"):
        parts = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
        folder_of(tmp_path / "gzip", tuple(f"emnist-{split}-{part}-ubyte" for part in parts), compress=True)
    with pytest.raises(DataError, match=r"several data sets.*gzip/emnist-digits, .*gzip/emnist-letters"):
        load_arrays(tmp_path / "gzip")
    data = load_arrays(tmp_path / "gzip" / "emnist-letters")
    assert data.name == "emnist-letters"
    assert data.x_test is not None
    assert data.x_test.shape == (5, 16)


def test_mnist_of_the_package_as_a_folder() -> None:
    import gigamlp.data

    x_train, y_train, x_test, y_test = gigamlp.data.load_mnist()
    data = load_arrays(Path(gigamlp.data.__file__).parent / "mnist_idx")
    for found, expected in ((data.x, x_train), (data.y, y_train), (data.x_test, x_test), (data.y_test, y_test)):
        assert found is not None
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["b", "a", "ä"], ["b", "a", "ä"]),
        ([True, False, True], [1, 0, 1]),
        (np.array([1.0, -2.0, 7.0], np.float32), [1, -2, 7]),
        (np.array([[1], [2], [3]]), [1, 2, 3]),
        (np.array([1, 2, 3], ">i2"), [1, 2, 3]),
        (np.array([1, 2, 2**63 - 1], np.uint64), [1, 2, 2**63 - 1]),
    ],
)
def test_labels_that_are_usable(tmp_path: Path, labels: object, expected: list[object]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=labels)
    y = load_arrays(tmp_path / "a.npz").y
    assert y is not None
    assert y.tolist() == expected
    assert y.dtype == np.int64 or y.dtype.kind == "U"


def test_big_endian_rows_become_native(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1.5, 2.5]], ">f4"))
    x = load_arrays(tmp_path / "x.npy").x
    assert x.dtype == np.float32
    assert x.dtype.isnative
    assert x.tolist() == [[1.5, 2.5]]


def test_fortran_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(X))
    np.testing.assert_array_equal(load_arrays(tmp_path / "x.npy").x, X.reshape(12, 16))


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"x": X, "y": Y[:-1]}, r"expected 12 labels, one for each row, found 11"),
        ({"x": X, "y": Y, "x_test": X_TEST[:, :3], "y_test": Y_TEST}, r"test rows have 12 features, expected 16"),
        ({"x": X, "y": Y, "x_test": X_TEST, "y_test": Y_TEST[1:]}, r"expected 5 labels, .* found 4"),
        ({"x": X, "y": Y, "x_test": X_TEST.astype(np.float32)}, r"test rows are float32, expected uint8"),
        ({"x": X, "y": Y, "x_test": X_TEST, "y_test": np.array(list("abcde"))}, r"test labels are <U1, expected int64"),
        ({"x": X, "y": Y, "y_test": Y_TEST}, r"has y_test, but no x_test"),
        ({"x": X[:0], "y": Y[:0]}, r"at least one row"),
        ({"x": X[:, :0]}, r"at least one row and one feature"),
        ({"x": X.reshape(-1)}, r"must have shape \[n, features\]"),
        ({"x": np.array(1.0)}, r"must have shape \[n, features\]"),
        ({"x": X.astype("U3")}, r"rows must be numbers, found dtype <U3"),
        ({"x": X.astype(complex)}, r"rows must be numbers, found dtype complex128"),
        ({"x": np.array([[1.0, 2.0], [3.0, np.nan]])}, r"row 1 holds NaN"),
        ({"x": np.array([[1.0, np.inf]], np.float16)}, r"row 0 holds NaN or infinite"),
        ({"x": X, "y": Y + 0.5}, r"label 0 is .*5, expected a whole number"),
        ({"x": X[:2], "y": np.array([1.0, np.nan])}, r"label 1 is nan, expected a whole number"),
        ({"x": X[:2], "y": np.array([1.0, 1e300])}, r"label 1 is 1e\+300"),
        ({"x": X[:1], "y": np.array([2.0**63])}, r"label 0 is 9.2.*e\+18"),
        ({"x": X[:1], "y": np.array([2**63], np.uint64)}, r"label 0 is 9223372036854775808, which does not fit"),
        ({"x": X, "y": np.eye(12)}, r"labels must have shape \[n\], found \[12, 12\]; for one-hot"),
        ({"x": X[:1], "y": np.array([b"a"])}, r"whole numbers or strings, found dtype \|S1"),
        ({"x": X, "X": X}, r"expected one of the keys x, X, .*it has x, X"),
        ({"y": Y}, r"expected rows under one of x, X, .*it has y"),
        ({"arr_0": X}, r"expected rows under one of x, X, .*it has the keys arr_0"),
    ],
)
def test_data_that_does_not_hold_together(tmp_path: Path, parts: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "set.npz", **parts)
    with pytest.raises(DataError, match=r"set\.npz: .*" + message):
        load_arrays(tmp_path / "set.npz")


def test_nan_past_the_first_piece_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gigamlp.data import arrays

    monkeypatch.setattr(arrays, "_BYTES_PER_CHECK", 64)
    x = np.zeros((100, 3), np.float32)
    x[77, 2] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match="row 77 holds NaN"):
        load_arrays(tmp_path / "x.npy")


def test_labels_error_names_the_label_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "wrong.npy", Y[1:])
    with pytest.raises(DataError, match=r"wrong\.npy: expected 12 labels"):
        load_arrays(tmp_path / "x.npy", tmp_path / "wrong.npy")
    np.savez(tmp_path / "set.npz", x=X, y=Y)
    with pytest.raises(DataError, match="has labels already"):
        load_arrays(tmp_path / "set.npz", tmp_path / "wrong.npy")
    with pytest.raises(DataError, match=r"set\.npz: labels must be an \.npy or IDX file"):
        load_arrays(tmp_path / "x.npy", tmp_path / "set.npz")
    with pytest.raises(DataError, match="leave out"):
        load_arrays(folder_of(tmp_path / "folder"), tmp_path / "wrong.npy")


def test_object_arrays_are_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, "a"]], dtype=object))
    np.savez(tmp_path / "x.npz", x=np.array([[1, "a"]], dtype=object))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError, match=rf"{name}: .*Python objects"):
            load_arrays(tmp_path / name)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "x.npy").write_bytes(pickle.dumps([1, 2, 3]))
    with pytest.raises(FileFormatError, match=r"x\.npy: at byte 0: expected a NumPy file, found 80 04"):
        load_arrays(tmp_path / "x.npy")


@pytest.mark.parametrize("name", ["a.csv", "a.CSV", "a.csv.gz", "a.tsv", "a.parquet", "a.json"])
def test_tables_are_refused_with_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"1,2\n")
    with pytest.raises(FileFormatError, match=r"tables are not read here.*numpy\.savez"):
        load_arrays(tmp_path / name)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG....")
    with pytest.raises(FileFormatError, match=r"a\.png: at byte 0: expected an \.npy, \.npz or IDX file, found 89 50"):
        load_arrays(tmp_path / "a.png")
    for name in ("a.npy", "a.npz", "train-images-idx3-ubyte.gz"):
        (tmp_path / name).write_bytes(b"<html>404</html>")
        with pytest.raises(FileFormatError, match=f"{name}: .*HTML"):
            load_arrays(tmp_path / name)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(FileFormatError, match=f"{name}: .*no bytes at all"):
            load_arrays(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no data file at"):
        load_arrays(tmp_path / "absent.npy")


def test_folder_faults(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no IDX files in this folder; expected train-images-idx3-ubyte"):
        load_arrays(tmp_path)
    folder = folder_of(tmp_path / "a", MNIST_NAMES[:1])
    with pytest.raises(DataError, match="training labels are missing; found train-images-idx3-ubyte"):
        load_arrays(folder)
    folder = folder_of(tmp_path / "b", MNIST_NAMES[:3])
    with pytest.raises(DataError, match="test labels are missing"):
        load_arrays(folder)
    folder = folder_of(tmp_path / "c")
    (folder / "train-images.idx3-ubyte").write_bytes(idx(X))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte and train-images\.idx3-ubyte are both there"):
        load_arrays(folder)
    folder = folder_of(tmp_path / "d")
    (folder / MNIST_NAMES[1]).write_bytes(idx(Y[1:]))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: expected 12 labels, .*found 11"):
        load_arrays(folder)
    (folder / MNIST_NAMES[1]).write_bytes(idx(Y)[:-3])
    with pytest.raises(FileFormatError, match=r"train-labels-idx1-ubyte: at byte 8"):
        load_arrays(folder)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=X, y=Y)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arrays")


@given(
    whole=st.sampled_from([npy(X), npz(), idx(X)]),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=3),
    name=st.sampled_from(["a.npy", "a.npz", "a.idx", "a"]),
)
def test_damage_raises_nothing_else(
    folder: Path, whole: bytes, cut: float, flips: list[tuple[float, int]], name: str
) -> None:
    data = bytearray(whole[: int(cut * len(whole)) + 1])
    for position, value in flips:
        data[int(position * len(data))] ^= value
    path = folder / name
    path.write_bytes(data)
    with contextlib.suppress(FileFormatError, DataError):
        load_arrays(path)


@given(header=st.text(st.characters(max_codepoint=127), max_size=80))
def test_any_npy_header_raises_nothing_else(folder: Path, header: str) -> None:
    path = folder / "h.npy"
    text = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises((FileFormatError, DataError)):
        load_arrays(path)


@pytest.mark.parametrize("shape", ["(9223372036854775807, 2)", "(1000000000000, 784)", "(-1, 2)", "(2.5, 2)", "3"])
def test_absurd_npy_shapes(tmp_path: Path, shape: str) -> None:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)
    (tmp_path / "x.npy").write_bytes(data)
    buffer = io.BytesIO()
    import zipfile

    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", data)
    (tmp_path / "x.npz").write_bytes(buffer.getvalue())
    for name in ("x.npy", "x.npz"):
        with pytest.raises((FileFormatError, DataError), match=name):
            load_arrays(tmp_path / name)
