"""Integer codes and their scales for one layer's weights: what every quantisation scheme shares."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import ModelError, Unsupported

__all__ = ["codes_and_scale"]

Array = NDArray[Any]
_ACC_LIMIT = 2**31 - 1


def codes_and_scale(
    weight: Array, codes: Array | None, scale: Array | None, *, top: int = 127, layer: int = 0
) -> tuple[Array, Array]:
    """Return codes int8 [out, in] and scales float32 [out] for `weight`; those that are given are kept as they are.

    Parameters
    ----------
    weight : ndarray of float64, shape [out, in]
        What multiplies the layer's raw inputs.
    codes : ndarray of int8, shape [out, in], or None
    scale : ndarray of float32, shape [out], or None
    top : int
        The largest code that is derived.
    layer : int
        For error messages.

    Raises
    ------
    ModelError
        If codes and weights contradict each other.
    Unsupported
        If sums can leave int32, or a scale leaves float32.
    """
    if scale is None:
        scale = _scales(np.abs(weight).max(axis=1), codes, top, layer)
    if codes is None:
        codes = np.clip(np.rint(weight / scale.astype(np.float64)[:, None]), -top, top).astype(np.int8)
    largest = max(top, int(np.abs(codes.astype(np.int16)).max()))
    most = _ACC_LIMIT // (255 * largest)
    if codes.shape[1] > most:
        raise Unsupported(
            f"{codes.shape[1]:,} features of one byte times codes up to {largest} can overflow an int32 sum; "
            f"at most {most:,} fit: read fewer with `columns`"
        )
    return codes, scale


def _scales(peak: Array, codes: Array | None, top: int, layer: int) -> Array:
    """Return the scale that takes the largest code of each output to its largest weight, `peak` float64 [out]."""
    largest = np.full(len(peak), float(top))
    if codes is not None:
        largest = np.abs(codes.astype(np.float64)).max(axis=1)
        odd = np.flatnonzero((peak == 0) != (largest == 0))
        if odd.size:
            which = "weights" if peak[odd[0]] == 0 else "codes"
            raise ModelError(
                f"output {odd[0]} of layer {layer} has {which} that are all 0; store its scale.{layer} too"
            )
    with np.errstate(over="ignore"):
        scale = np.where(peak == 0, 1.0, peak / np.where(largest == 0, 1.0, largest)).astype(np.float32)
    if not np.isfinite(scale).all():
        raise Unsupported(
            f"layer {layer}'s weights times the input scale reach {peak.max():.3g}: too large a scale for float32"
        )
    return np.maximum(scale, np.finfo(np.float32).tiny)
