"""Distort training rows: images by affine and elastic maps, tables by noise and mixing.

Random numbers come from NumPy's PCG64 on the CPU, a few hundred a row at most; the arithmetic runs where the rows are.
So a seed gives the same rows on every machine, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from gigamlp.errors import InvalidInput
from gigamlp.train.rows import Array

__all__ = ["Augment", "ImageDraws", "TableAugment", "TableDraws", "distort", "mix", "prefetch"]

T = TypeVar("T")
Shape: TypeAlias = tuple[int, int]

_KEPT = 0.999  # share of the elastic field's variance that its low-rank factor keeps
_ROWS_AT_ONCE = {"cpu": 2048, "cuda": 65536}  # of a CPU's cache; of a GPU's memory


def _check(settings: Any) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < math.inf:
            raise InvalidInput(f"{field.name} must be a number >= 0, got {value!r}")


@dataclass(frozen=True)
class Augment:
    """How far images are distorted at strength 1; every image draws a strength of its own, uniform up to the pool's.

    Parameters
    ----------
    rotation : float
        Degrees.
    scale : float
        Share by which width and height grow or shrink, each for itself.
    shear : float
        Sideways pixels a pixel of height.
    shift : float
        Share of the side, horizontally and vertically.
    elastic : float
        Root mean square of the elastic displacement, as a share of the shorter side. It is smoothed white noise, as in
        Simard, Steinkraus and Platt, *Best practices for convolutional neural networks*, 2003.
    smoothness : float
        Standard deviation of the Gaussian that smooths it, as a share of the side.

    Examples
    --------
    >>> Augment(rotation=0).rotation, Augment().shift
    (0, 0.07)
    """

    rotation: float = 15.0
    scale: float = 0.12
    shear: float = 0.15
    shift: float = 0.07
    elastic: float = 0.05
    smoothness: float = 1 / 7

    def __post_init__(self) -> None:
        _check(self)

    def draw(self, rows: int, shape: Shape, strength: float, random: np.random.Generator) -> ImageDraws:
        """Draw the parameters of `rows` images of `shape` (height, width)."""
        height, width = shape
        own = random.random(rows, np.float32) * np.float32(strength)

        def uniform(size: float) -> Array:
            return (2 * random.random(rows, np.float32) - 1) * own * np.float32(size)

        angle = uniform(math.radians(self.rotation))
        across, down, shear = 1 + uniform(self.scale), 1 + uniform(self.scale), uniform(self.shear)
        cos, sin = np.cos(angle), np.sin(angle)
        matrix = np.empty((rows, 2, 3), np.float32)
        matrix[:, 0] = np.stack([cos * across, (cos * shear - sin) * down, uniform(self.shift * width)], 1)
        matrix[:, 1] = np.stack([sin * across, (sin * shear + cos) * down, uniform(self.shift * height)], 1)
        if not self.elastic:
            return ImageDraws(matrix, None, None)
        factors = tuple(_factor(side, self.smoothness * side) for side in shape)
        field = random.standard_normal((rows, 2, factors[0].shape[1] * factors[1].shape[1]), np.float32)
        field *= (own * np.float32(self.elastic * min(shape)))[:, None, None]
        return ImageDraws(matrix, field, np.einsum("ia,jb->abij", *factors).reshape(field.shape[2], height * width))


@dataclass(frozen=True)
class TableAugment:
    """How far rows of a table are changed at strength 1; every row draws its own strength, uniform up to the pool's.

    Parameters
    ----------
    noise : float
        Standard deviation of the noise that each feature gets, as a share of the feature's own.
    mixup : float
        Largest share of another row, labels included, that is mixed in, halved. Zhang et al., *mixup*, 2018.
    """

    noise: float = 0.1
    mixup: float = 0.2

    def __post_init__(self) -> None:
        _check(self)
        if self.mixup > 1:
            raise InvalidInput(f"mixup is a share in 0..1, got {self.mixup!r}")

    def draw(self, rows: int, features: int, strength: float, random: np.random.Generator) -> TableDraws:
        """Draw the parameters of `rows` rows."""
        own = random.random((rows, 1), np.float32) * np.float32(strength)
        noise = random.standard_normal((rows, features), np.float32) * (own * np.float32(self.noise))
        share = own * random.random((rows, 1), np.float32) * np.float32(self.mixup / 2)
        return TableDraws(noise, random.permutation(rows), share)


@dataclass(frozen=True)
class ImageDraws:
    """Where each output pixel comes from.

    Parameters
    ----------
    matrix : ndarray float32 [n, 2, 3]
        From (x, y, 1) in pixels from the image's centre to the place that is read, x first.
    field : ndarray float32 [n, 2, rank] or None
        Coefficients of the elastic displacement in x and y.
    basis : ndarray float32 [rank, height * width] or None
        The displacement in pixels is ``field @ basis``.
    """

    matrix: Array
    field: Array | None
    basis: Array | None


@dataclass(frozen=True)
class TableDraws:
    """Noise [n, features] in standard deviations, the row to mix with [n], and its share [n, 1]."""

    noise: Array
    partner: Array
    share: Array


@cache
def _factor(side: int, sigma: float) -> Array:
    """Return A [side, rank] such that A c, c white, is smooth noise of unit variance along an axis."""
    if sigma <= 0:
        return np.eye(side, dtype=np.float32)
    place = np.arange(side)
    blur = np.exp(-0.5 * ((place[:, None] - place) / sigma) ** 2)
    left, values, _ = np.linalg.svd(blur)
    rank = 1 + int(np.searchsorted(np.cumsum(values**2) / np.sum(values**2), _KEPT))
    factor = left[:, :rank] * values[:rank]
    factor /= math.sqrt(np.square(factor).sum(1).mean())
    return np.asarray(factor, np.float32)


def distort(x: Tensor, shape: Shape, draws: ImageDraws) -> Tensor:
    """Return distorted images: bilinear, with 0 outside.

    Parameters
    ----------
    x : Tensor [n, height * width]
        uint8, rounded to the nearest in the result; or float32.
    shape : (height, width)
    draws : ImageDraws
        Of n images.
    """
    height, width = shape
    out = torch.empty_like(x)
    down, across = torch.meshgrid(_axis(height, x.device), _axis(width, x.device), indexing="ij")
    places = torch.stack((across, down, torch.ones_like(down)), -1).view(-1, 3).t()
    to_grid = torch.tensor([2 / width, 2 / height], device=x.device)  # grid_sample's corners are at -1 and 1
    basis = None if draws.basis is None else torch.from_numpy(draws.basis).to(x.device)
    for begin in range(0, len(x), _ROWS_AT_ONCE[x.device.type]):
        part = slice(begin, begin + _ROWS_AT_ONCE[x.device.type])
        grid = torch.matmul(torch.from_numpy(draws.matrix[part]).to(x.device), places)
        if draws.field is not None and basis is not None:
            grid += torch.matmul(torch.from_numpy(draws.field[part]).to(x.device), basis)
        grid = (grid.transpose(1, 2) * to_grid).view(-1, height, width, 2)
        images = x[part].view(-1, 1, height, width).float()
        moved = torch.nn.functional.grid_sample(images, grid, "bilinear", "zeros", align_corners=False)
        moved = moved.view(-1, height * width)
        out[part] = moved.round_().clamp_(0, 255) if x.dtype == torch.uint8 else moved
    return out


def mix(x: Tensor, target: Tensor, spread: Tensor, draws: TableDraws) -> tuple[Tensor, Tensor]:
    """Return rows with noise and a share of another row, and their soft labels.

    Parameters
    ----------
    x : Tensor [n, features]
        uint8, rounded to the nearest in the result; or float32.
    target : Tensor float32 [n, classes]
    spread : Tensor float32 [features]
        Standard deviation of each feature.
    draws : TableDraws
        Of n rows.
    """
    partner = torch.from_numpy(draws.partner).to(x.device)
    share = torch.from_numpy(draws.share).to(x.device)
    noise = torch.from_numpy(draws.noise).to(x.device)
    rows = x.float()
    mixed = torch.lerp(rows, rows[partner], share).addcmul_(noise, spread)
    if x.dtype == torch.uint8:
        mixed = mixed.round_().clamp_(0, 255).to(torch.uint8)
    return mixed, torch.lerp(target, target[partner], share)


def _axis(side: int, device: torch.device) -> Tensor:
    return torch.arange(side, device=device, dtype=torch.float32) - (side - 1) / 2


def prefetch(make: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """Yield ``make(0) ... make(count - 1)`` in order, `workers` of them being made ahead in threads."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[Future[T]] = [pool.submit(make, index) for index in range(min(workers, count))]
        for index in range(count):
            ready = waiting.pop(0).result()
            if index + workers < count:
                waiting.append(pool.submit(make, index + workers))
            yield ready
