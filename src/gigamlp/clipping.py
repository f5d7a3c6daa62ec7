"""Scales of first-layer codes that rows choose: weights of features that are nearly always 0 may be cut off.

A `StandardScaler` divides each feature by its deviation, so that a pixel that is hardly ever set has a weight for raw
rows a hundred times those that matter. With the scale that takes the largest weight to 127, the others round to 0. Here
each output gets the scale with the least mean squared error of its sums over rows. Rows in which such a feature is set
get another sum: whether that is good enough is for an accuracy gate to say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp.errors import DataError, InvalidInput
from gigamlp.mlp import MLP

__all__ = ["first_scale"]

Array = NDArray[Any]
_STEPS = 0.87 ** np.arange(56)  # of the plain scale, down to 1 / 2,100
_TOP = 127
_MOST_ROWS = 32_768
_MOST_FEATURES = 2048  # beyond, features are taken to be independent: a Gram matrix would be too large


def first_scale(mlp: MLP, rows: ArrayLike) -> NDArray[np.float32]:
    """Return the scales [out] of scheme ``w8``'s codes with the least mean squared error of the sums over `rows`.

    Parameters
    ----------
    mlp : MLP
    rows : array_like, shape [n, features]
        Raw rows, best some that the MLP was trained with. At most 32,768 of them are used, evenly spread.

    Raises
    ------
    DataError, InvalidInput
        If there are no rows, or they do not fit the MLP or are not finite.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[0.3, 127.0]])], head="regression")
    >>> first_scale(mlp, [[9, 0], [0, 9]]).tolist()  # as without rows: the second feature counts
    [1.0]
    >>> bool(first_scale(mlp, [[9, 0], [7, 0]])[0] < 0.5)  # it is never set: its weight may be cut off
    True
    """
    x = mlp.check_rows(rows)
    if len(x) == 0:
        raise DataError("calibration needs at least one row")
    x = mlp.read_columns(x[:: -(-len(x) // _MOST_ROWS)]).astype(np.float32)
    if not np.isfinite(x).all():
        raise InvalidInput("calibration rows hold NaN or infinite values; clean or drop such rows first")
    weight = mlp.layers[0].weight.astype(np.float64) * np.asarray(mlp.input_scale, np.float64)
    largest = max(float(np.abs(x).max()), 1.0)  # the squares stay in float32
    x = x / np.float32(largest)
    dense = x.shape[1] <= _MOST_FEATURES
    mean = x.mean(axis=0, dtype=np.float64)
    moments = (x.T @ x).astype(np.float64) / len(x) if dense else x.var(axis=0, dtype=np.float64)
    peak = np.abs(weight).max(axis=1)
    plain = np.where(peak == 0, 1.0, peak / _TOP)
    best, least = plain.copy(), np.full(len(plain), np.inf)
    for step in _STEPS:
        scale = plain * step
        codes = np.clip(np.rint(weight / scale[:, None]), -_TOP, _TOP)
        off = codes * scale[:, None] - weight
        error = ((off @ moments if dense else off * moments) * off).sum(axis=1)
        if not dense:
            error += (off @ mean) ** 2
        better = error < least  # the plain scale comes first and wins ties
        best, least = np.where(better, scale, best), np.where(better, error, least)
    found: NDArray[np.float32] = np.clip(best, np.finfo(np.float32).tiny, np.finfo(np.float32).max).astype(np.float32)
    return found
