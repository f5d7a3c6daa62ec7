"""MNIST, from the four IDX files in the package."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp._atomic import atomic_write
from gigamlp.data.idx import read_idx
from gigamlp.errors import FileFormatError

__all__ = ["load_mnist"]

# file name, shape, sha256 of the uncompressed file, in the order of load_mnist's result and of the cache file
_PARTS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    (
        "train-images-idx3-ubyte.gz",
        (60000, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        (60000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        (10000, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        (10000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
_CACHE_NAME = "mnist-uint8.bin"

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]


def load_mnist(
    cache: bool = True, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[Bytes, Labels, Bytes, Labels]:
    """Return MNIST: 60,000 training and 10,000 test rows.

    The files ship with the package. Decompressing them takes about 0.2 s, so an uncompressed copy (55 MB) is kept in
    the user's cache directory; loading it takes about 0.06 s (2 cores with SHA instructions). On every call the sha256
    of all four files is checked, of the copy too: a damaged copy is replaced. Where no copy can be written (no home, a
    read-only or full disk) there is none, and nothing else changes. Any number of processes may call this at once.

    Parameters
    ----------
    cache : bool
        Whether to read and write the uncompressed copy.
    cache_dir : path-like, optional
        Where the copy lives; by default the user cache directory of the platform, ``~/.cache/gigamlp`` on Linux.

    Returns
    -------
    x_train : ndarray of uint8, shape [60000, 784]
    y_train : ndarray of int64, shape [60000]
    x_test : ndarray of uint8, shape [10000, 784]
    y_test : ndarray of int64, shape [10000]
        All C-contiguous, owned by the caller and writable.

    Raises
    ------
    FileFormatError
        If a file of the package itself is damaged; install gigamlp again.

    Examples
    --------
    >>> x_train, y_train, x_test, y_test = load_mnist()
    >>> x_train.shape, x_test.shape, y_test[:4]
    ((60000, 784), (10000, 784), array([7, 2, 1, 0]))
    """
    path = _cache_path(cache_dir) if cache else None
    arrays = None if path is None else _read_cache(path)
    if arrays is None:
        arrays = _read_package()
        if path is not None:
            _write_cache(path, arrays)
    x_train, y_train, x_test, y_test = arrays
    return x_train.reshape(60000, 784), y_train.astype(np.int64), x_test.reshape(10000, 784), y_test.astype(np.int64)


def _cache_path(cache_dir: str | os.PathLike[str] | None) -> Path | None:
    if cache_dir is not None:
        return Path(cache_dir) / _CACHE_NAME
    from platformdirs import user_cache_dir

    folder = Path(user_cache_dir("gigamlp", appauthor=False))
    return folder / _CACHE_NAME if folder.is_absolute() else None  # a user without a home gets "~/.cache" back


def _sha256(array: Bytes) -> str:
    """Return the sha256 of the uncompressed IDX file that holds `array`."""
    header = bytes([0, 0, 0x08, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    digest = hashlib.sha256(header)
    digest.update(array.data)
    return digest.hexdigest()


def _read_package() -> list[Bytes]:
    arrays = []
    for name, shape, sha256 in _PARTS:
        path = Path(__file__).parent / "mnist_idx" / name
        array: NDArray[Any] = read_idx(path)
        if array.dtype != np.uint8 or array.shape != shape or _sha256(array) != sha256:
            raise FileFormatError(
                f"{path}: expected sha256 {sha256} of the uncompressed file, found another; install gigamlp again"
            )
        arrays.append(array)
    return arrays


def _read_cache(path: Path) -> list[Bytes] | None:
    """Return the four arrays, or None if the copy is absent, unreadable or damaged."""
    arrays: list[Bytes] = [np.empty(shape, np.uint8) for _, shape, _ in _PARTS]
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != sum(array.nbytes for array in arrays):
                return None
            for array in arrays:
                if file.readinto(array.reshape(-1).data) != array.nbytes:
                    return None
    except OSError:
        return None
    sound = all(_sha256(array) == sha256 for array, (_, _, sha256) in zip(arrays, _PARTS, strict=True))
    return arrays if sound else None


def _write_cache(path: Path, arrays: list[Bytes]) -> None:
    try:
        with atomic_write(path) as file:
            for array in arrays:
                file.write(array.data)
    except OSError:
        # the copy only saves time; without it the next call decompresses again
        return
