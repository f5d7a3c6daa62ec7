"""Hold rows out of a training set, so that choices are never made on the test set."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput

__all__ = ["hold_out"]

Array = NDArray[Any]


def hold_out(x: Array, y: Array, rows: int = 5000, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Split rows into those to fit on and those to choose by.

    The held-out rows are drawn without replacement with NumPy's PCG64, so a seed means the same rows on every machine.
    They are not stratified. Both parts keep the order of the input. From a small data set no more than a sixth is held
    out: ``min(rows, len(x) // 6)`` rows.

    Parameters
    ----------
    x : ndarray, shape [n, ...]
    y : ndarray, shape [n, ...]
    rows : int
        Rows to hold out, at least 1.
    seed : int

    Returns
    -------
    x_fit, y_fit, x_val, y_val : ndarray
        Owned copies; `x_fit` and `x_val` share no row of `x`.

    Raises
    ------
    InvalidInput
        If `x` and `y` differ in length, there are fewer than 6 rows, or `rows` or `seed` is not usable.

    Examples
    --------
    >>> import numpy as np
    >>> x_fit, y_fit, x_val, y_val = hold_out(np.arange(24).reshape(12, 2), np.arange(12), rows=5000)
    >>> len(x_fit), len(x_val)
    (10, 2)
    """
    if len(x) != len(y):
        raise InvalidInput(f"x has {len(x)} rows and y has {len(y)}; they must be as many")
    if len(x) < 6:
        raise InvalidInput(f"holding rows out takes at least 6 rows, got {len(x)}; pass validation rows of your own")
    for what, value, least in (("rows", rows, 1), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise InvalidInput(f"{what} must be a whole number >= {least}, got {value!r}")
    chosen = np.zeros(len(x), dtype=bool)
    chosen[np.random.default_rng(seed).permutation(len(x))[: min(rows, len(x) // 6)]] = True
    return x[~chosen], y[~chosen], x[chosen], y[chosen]
