"""A user's own rows and labels: NumPy files, IDX files, folders of IDX files."""

from __future__ import annotations

import os
import re
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.data.idx import GZIP_MAGIC, looks_like_html, read_idx
from gigamlp.errors import DataError, FileFormatError

__all__ = ["Dataset", "load_arrays"]

Array = NDArray[Any]

# the keys of an .npz file, by what they mean; others are left alone
NPZ_KEYS = {
    "x": ("x", "X", "x_train", "X_train", "data"),
    "y": ("y", "Y", "y_train", "Y_train", "target"),
    "x_test": ("x_test", "X_test"),
    "y_test": ("y_test", "Y_test"),
}
_TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".arrow", ".feather", ".json", ".jsonl", ".xlsx")
# train-images-idx3-ubyte, t10k-labels.idx1-ubyte.gz, emnist-letters-test-images-idx3-ubyte.gz
_IDX_NAME = re.compile(
    r"(?:(?P<set>.+)-)?(?P<part>train|t10k|test)-(?P<kind>images|labels)[-.]idx\d-ubyte(?P<gz>\.gz)?"
)
_NUMPY_ERRORS = (
    ValueError,  # np.load: bad header, object arrays, too few bytes
    EOFError,
    KeyError,
    OSError,
    SyntaxError,
    tokenize.TokenError,  # np.load: a header in the way of Python 2
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
    RuntimeError,  # zipfile: encrypted member
    NotImplementedError,  # zipfile: unknown compression
    zipfile.BadZipFile,
    zlib.error,
)
_BYTES_PER_CHECK = 1 << 24  # NaN is looked for in pieces, so that a memory-mapped file stays on disk


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows and labels that were checked to fit together.

    Attributes
    ----------
    x : ndarray, shape [n, features]
        bool, integer or float, finite, at least one row. Memory-mapped and read-only when it is an ``.npy`` file.
    y : ndarray of int64 or str, shape [n], or None
    x_test : ndarray, shape [m, features], or None
        Of the dtype of `x`.
    y_test : ndarray of int64 or str, shape [m], or None
    name : str
        The file or folder, without endings.
    image_shape : (height, width) or None
        Of the rows, if they came as grey images.
    """

    x: Array
    y: Array | None
    x_test: Array | None
    y_test: Array | None
    name: str
    image_shape: tuple[int, int] | None = None


def load_arrays(path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None) -> Dataset:
    """Read rows, and labels if there are any.

    What a file is, is told by its first bytes, not by its name:

    - ``.npy``: the rows, memory-mapped. Labels come from `labels`.
    - ``.npz``: rows under ``x``, ``X``, ``x_train``, ``X_train`` or ``data``; labels under ``y``, ``Y``, ``y_train``,
      ``Y_train`` or ``target``; optionally ``x_test``/``X_test`` and ``y_test``/``Y_test``. Other keys are left alone.
    - IDX, gzip-compressed or not: the rows. Labels come from `labels`.
    - a folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and, both or neither, ``t10k-images-...``
      and ``t10k-labels-...`` (or ``test-...``), each with or without ``.gz``: MNIST, Fashion-MNIST, KMNIST. In a folder
      of several sets (EMNIST), `path` is the folder and the set's prefix: ``gzip/emnist-letters``. Of a file that is
      there twice, with and without ``.gz``, the uncompressed one is read.

    Rows of rank 3 and more (images) are flattened to [n, features]. Labels are whole numbers (int64 in the result,
    floats too if all are whole) or strings, one a row.

    Parameters
    ----------
    path : path-like
    labels : path-like, optional
        An ``.npy`` or IDX file with one label per row.

    Returns
    -------
    Dataset

    Raises
    ------
    FileNotFoundError
        If `path` or `labels` is not there.
    FileFormatError
        If a file is damaged or of a kind that is not read.
    DataError
        If the content does not hold together: numbers of rows and labels, widths of training and test rows, NaN,
        no rows, or labels that are not one whole number or string per row.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "points.npz")
    >>> np.savez(path, x=np.zeros((3, 2, 2), np.uint8), y=["a", "b", "a"])
    >>> data = load_arrays(path)
    >>> data.name, data.x.shape, data.y.tolist()
    ('points', (3, 4), ['a', 'b', 'a'])
    """
    path = Path(path)
    if path.is_dir() or (not path.exists() and _set_files(path.parent, path.name)):
        if labels is not None:
            raise DataError(f"{path}: labels are read from the folder's own label files; leave out {os.fspath(labels)}")
        return _from_folder(path)
    content = _read(path)
    found = _pick(content, path) if isinstance(content, dict) else {"x": content}
    if labels is not None:
        if "y" in found:
            raise DataError(f"{path}: has labels already; leave out {os.fspath(labels)}")
        label_array = _read(Path(labels))
        if isinstance(label_array, dict):
            raise DataError(f"{os.fspath(labels)}: labels must be an .npy or IDX file; an .npz holds rows and labels")
        found["y"] = label_array
    wheres = dict.fromkeys(NPZ_KEYS, str(path)) | ({} if labels is None else {"y": os.fspath(labels)})
    return _dataset(found, wheres, _stem(path.name))


# ---- one file -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> Array | dict[str, Array]:
    if not path.exists():
        raise FileNotFoundError(f"no data file at {path}")
    suffix = path.with_suffix("").suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()
    if suffix in _TABLES:
        raise FileFormatError(
            f"{path}: {suffix} tables are not read here; read yours with a library of your choice and save it with "
            "numpy.savez('data.npz', x=rows, y=labels)"
        )
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"\x93NUMPY"):
        return _load_npy(path)
    if head.startswith(b"PK"):
        return _load_npz(path)
    if suffix in (".npy", ".npz") and not looks_like_html(head):
        raise FileFormatError(
            f"{path}: at byte 0: expected a NumPy file, found {head[:6].hex(' ') or 'no bytes at all'}"
        )
    if head.startswith((GZIP_MAGIC, b"\0\0")) or "idx" in path.name or looks_like_html(head):
        return read_idx(path)
    raise FileFormatError(
        f"{path}: at byte 0: expected an .npy, .npz or IDX file, found {head[:6].hex(' ') or 'no bytes at all'}"
    )


def _load_npy(path: Path) -> Array:
    try:
        with np.errstate(over="ignore"):  # of the size of an absurd shape; NumPy refuses it afterwards
            array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except _NUMPY_ERRORS as error:
        raise _numpy_fault(error, path) from error
    return array


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            wanted = [key for keys in NPZ_KEYS.values() for key in keys if key in archive.files]
            if not wanted:
                raise DataError(
                    f"{path}: expected rows under one of {', '.join(NPZ_KEYS['x'])}; it has the keys "
                    f"{', '.join(archive.files) or '(none)'}"
                )
            return {key: archive[key] for key in wanted}
    except DataError:
        raise
    except _NUMPY_ERRORS as error:
        raise _numpy_fault(error, path) from error


def _numpy_fault(error: BaseException, path: Path) -> FileFormatError | DataError:
    if "Object arrays" in str(error) or "Python objects" in str(error):
        return DataError(f"{path}: holds Python objects; expected plain numbers or strings (dtype 'U')")
    return FileFormatError(f"{path}: damaged NumPy file: {error or type(error).__name__}")


def _pick(content: dict[str, Array], path: Path) -> dict[str, Array]:
    found = {}
    for meaning, keys in NPZ_KEYS.items():
        present = [key for key in keys if key in content]
        if len(present) > 1:
            raise DataError(f"{path}: expected one of the keys {', '.join(keys)}; it has {', '.join(present)}")
        if present:
            found[meaning] = content[present[0]]
    if "x" not in found:
        raise DataError(f"{path}: expected rows under one of {', '.join(NPZ_KEYS['x'])}; it has {', '.join(content)}")
    if "y_test" in found and "x_test" not in found:
        raise DataError(f"{path}: has y_test, but no x_test")
    return found


# ---- a folder of IDX files ----------------------------------------------------------------------------------------


def _set_files(folder: Path, prefix: str | None = None) -> dict[str, dict[str, Path]]:
    """Return set name -> {"x": path, "y": path, "x_test": ..., "y_test": ...} of the IDX files in `folder`."""
    sets: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _IDX_NAME.fullmatch(path.name)
        if match is None or (prefix is not None and match["set"] != prefix):
            continue
        meaning = ("x" if match["kind"] == "images" else "y") + ("" if match["part"] == "train" else "_test")
        files = sets.setdefault(match["set"] or "", {})
        twin = files.get(meaning)
        if twin is not None and path.name != twin.name + ".gz":
            raise DataError(f"{folder}: {twin.name} and {path.name} are both there; keep one")
        files.setdefault(meaning, path)
    return sets


def _from_folder(path: Path) -> Dataset:
    sets = _set_files(path) if path.is_dir() else _set_files(path.parent, path.name)
    if not sets:
        raise DataError(
            f"{path}: no IDX files in this folder; expected train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each with or without .gz"
        )
    if len(sets) > 1:
        names = ", ".join(str(path / name) if name else f"(no prefix) {path}" for name in sorted(sets))
        raise DataError(f"{path}: holds several data sets; name one of them: {names}")
    ((name, files),) = sets.items()
    missing = {"x", "y"} - set(files)
    if len({"x_test", "y_test"} & set(files)) == 1:
        missing |= {"x_test", "y_test"} - set(files)
    if missing:
        words = {"x": "training images", "y": "training labels", "x_test": "test images", "y_test": "test labels"}
        raise DataError(
            f"{path}: {' and '.join(words[m] for m in sorted(missing))} are missing; "
            f"found {', '.join(sorted(p.name for p in files.values()))}"
        )
    arrays = {meaning: read_idx(file) for meaning, file in files.items()}
    return _dataset(arrays, {meaning: str(file) for meaning, file in files.items()}, name or path.resolve().name)


# ---- checks -------------------------------------------------------------------------------------------------------


def _dataset(arrays: dict[str, Array], wheres: dict[str, str], name: str) -> Dataset:
    x = _rows(arrays["x"], wheres["x"])
    y = _labels(arrays["y"], len(x), wheres["y"]) if "y" in arrays else None
    x_test = y_test = None
    if "x_test" in arrays:
        x_test = _rows(arrays["x_test"], wheres["x_test"])
        if x_test.shape[1] != x.shape[1]:
            raise DataError(f"{wheres['x_test']}: test rows have {x_test.shape[1]} features, expected {x.shape[1]}")
        if x_test.dtype != x.dtype:
            raise DataError(f"{wheres['x_test']}: test rows are {x_test.dtype}, expected {x.dtype} as in training")
    if "y_test" in arrays and x_test is not None:
        y_test = _labels(arrays["y_test"], len(x_test), wheres["y_test"])
        if y is not None and y.dtype.kind != y_test.dtype.kind:
            raise DataError(f"{wheres['y_test']}: test labels are {y_test.dtype}, expected {y.dtype} as in training")
    raw = arrays["x"].shape
    return Dataset(x, y, x_test, y_test, name, (int(raw[1]), int(raw[2])) if len(raw) == 3 else None)


def _rows(x: Array, where: str) -> Array:
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where}: rows must be numbers, found dtype {x.dtype}")
    if x.ndim < 2:
        raise DataError(f"{where}: rows must have shape [n, features] or more dimensions, found {list(x.shape)}")
    if x.size == 0:
        raise DataError(f"{where}: expected at least one row and one feature, found shape {list(x.shape)}")
    if x.ndim > 2:
        x = x.reshape(len(x), -1)
    if x.dtype.kind == "f":
        step = max(1, _BYTES_PER_CHECK // (x.shape[1] * x.dtype.itemsize))
        for begin in range(0, len(x), step):
            finite = np.isfinite(x[begin : begin + step]).all(axis=1)
            if not finite.all():
                bad = begin + int(np.argmin(finite))
                raise DataError(f"{where}: row {bad} holds NaN or infinite values; clean or drop such rows first")
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _labels(y: Array, rows: int, where: str) -> Array:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{where}: labels must have shape [n], found {list(y.shape)}; for one-hot use argmax(axis=1)")
    if len(y) != rows:
        raise DataError(f"{where}: expected {rows} labels, one for each row, found {len(y)}")
    if y.dtype.kind == "U":
        return np.array(y)
    if y.dtype.kind not in "biuf":
        raise DataError(f"{where}: labels must be whole numbers or strings, found dtype {y.dtype}")
    if y.dtype.kind == "f":
        # 2**63 itself is a float, but not an int64
        usable = np.isfinite(y) & (np.floor(y) == y) & (np.abs(y) < 2.0**63)
        if not usable.all():
            bad = int(np.argmin(usable))
            raise DataError(f"{where}: label {bad} is {y[bad]}, expected a whole number")
    if y.dtype.kind == "u" and (y > np.iinfo(np.int64).max).any():
        raise DataError(f"{where}: label {int(np.argmax(y))} is {y.max()}, which does not fit in int64")
    return y.astype(np.int64)


def _stem(name: str) -> str:
    for ending in (".gz", ".npy", ".npz", ".idx"):
        name = name.removesuffix(ending)
    return name or "data"
