"""Labels and the indices of their classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import DataError

__all__ = ["encode_labels"]


def encode_labels(y: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index in `classes` (in any order) of each label of `y`.

    Raises
    ------
    DataError
        If a label is not among the classes.

    Examples
    --------
    >>> encode_labels(np.array(["fig", "pear"]), np.array(["pear", "apple", "fig"]))
    array([2, 0])
    """
    if (y.dtype.kind == "U") != (classes.dtype.kind == "U"):
        raise DataError(f"labels are {y.dtype}, but the classes are {classes.dtype}; use one kind")
    order = np.argsort(classes)
    try:
        where = np.minimum(np.searchsorted(classes[order], y), len(classes) - 1)
    except TypeError as error:
        raise DataError(f"labels are {y.dtype}, but the classes are {classes.dtype}; use one kind") from error
    ids = order[where]
    wrong = np.flatnonzero(classes[ids] != y)
    if wrong.size:
        row = int(wrong[0])
        known = classes.tolist()[:20]
        raise DataError(f"label {y[row].item()!r} of row {row} is not one of the {len(classes)} classes {known}")
    return np.asarray(ids, dtype=np.int64)
