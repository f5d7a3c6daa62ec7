"""Rows that are drawn, not collected: what a cascade's speed is measured on beside the rows it was made for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput

__all__ = ["garment_images", "random_bytes"]


def random_bytes(rows: int, features: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return uniformly random bytes, uint8 [rows, features]: no model is sure of such rows.

    Examples
    --------
    >>> random_bytes(2, 3).shape, random_bytes(2, 3).dtype
    ((2, 3), dtype('uint8'))
    """
    return np.random.default_rng(seed).integers(0, 256, (rows, features), dtype=np.uint8)


def garment_images(rows: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return images [rows, 784] (28 x 28) with the looks of Fashion-MNIST: large filled, symmetric, textured shapes.

    About half of the bytes are 0, the others are mid grey on average, as they are there; MNIST's digits are thin
    strokes with four fifths of the bytes 0. No image of Fashion-MNIST is in them.

    Parameters
    ----------
    rows : int
    seed : int
        Of NumPy's PCG64: the same images on every machine.

    Examples
    --------
    >>> images = garment_images(200)
    >>> 0.4 < float((images == 0).mean()) < 0.6
    True
    """
    if rows < 0:
        raise InvalidInput(f"rows must be >= 0, got {rows}")
    rng = np.random.default_rng(seed)
    out = np.empty((rows, 784), np.uint8)
    coarse = np.linspace(0, 4, 28)
    at = np.minimum(coarse.astype(int), 3)
    smooth: Any = np.zeros((28, 5))  # linear interpolation of 5 points to 28
    smooth[np.arange(28), at], smooth[np.arange(28), at + 1] = 1 - (coarse - at), coarse - at
    x = np.abs(np.arange(28) - 13.5)
    for begin in range(0, rows, 4096):
        n = min(4096, rows - begin)
        halves = rng.uniform(4, 14, (n, 5)) @ smooth.T  # half the width of the shape in each line
        first, last = rng.integers(0, 6, n)[:, None], rng.integers(21, 28, n)[:, None]
        lines = (np.arange(28) >= first) & (np.arange(28) <= last)
        inside = (x[None, None, :] < halves[:, :, None]) & lines[:, :, None]
        light = rng.uniform(60, 220, n)[:, None, None] + smooth @ rng.normal(0, 40, (n, 5, 5)) @ smooth.T
        light += rng.normal(0, 12, (n, 28, 28))
        out[begin : begin + n] = np.where(inside, np.clip(light, 1, 255), 0).reshape(n, 784).astype(np.uint8)
    return out
