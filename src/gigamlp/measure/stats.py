"""Order statistics of a few samples, by linear interpolation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gigamlp.errors import MeasurementError

__all__ = ["Stat", "percentile", "summarise"]


@dataclass(frozen=True)
class Stat:
    """A summary of samples, in their unit.

    Attributes
    ----------
    median : float
    iqr : float
        Interquartile range: 75th minus 25th percentile.
    minimum, maximum : float
    count : int
        Number of samples.
    """

    median: float
    iqr: float
    minimum: float
    maximum: float
    count: int

    @property
    def noise(self) -> float:
        """The interquartile range as a share of the median; infinite if the median is 0 and the range is not."""
        if self.median == 0:
            return 0.0 if self.iqr == 0 else math.inf
        return self.iqr / abs(self.median)


def percentile(samples: Iterable[float], q: float) -> float:
    """Return the `q`-th percentile (0..100) of `samples`, by linear interpolation between the closest ranks.

    Raises
    ------
    MeasurementError
        If there are no samples, one is not finite, or `q` is outside 0..100.

    Examples
    --------
    >>> percentile([4.0, 1.0, 2.0, 3.0], 50)
    2.5
    """
    return _at(_ordered(samples), q)


def summarise(samples: Iterable[float]) -> Stat:
    """Return median, interquartile range and extremes of `samples`.

    Raises
    ------
    MeasurementError
        If there are no samples or one is not finite.

    Examples
    --------
    >>> summarise([1.0, 2.0, 3.0, 4.0, 10.0])
    Stat(median=3.0, iqr=2.0, minimum=1.0, maximum=10.0, count=5)
    """
    ordered = _ordered(samples)
    return Stat(_at(ordered, 50), _at(ordered, 75) - _at(ordered, 25), ordered[0], ordered[-1], len(ordered))


def _ordered(samples: Iterable[float]) -> list[float]:
    ordered = [float(value) for value in samples]
    if not ordered:
        raise MeasurementError("no samples: nothing was measured")
    for value in ordered:
        if not math.isfinite(value):
            raise MeasurementError(f"a sample is {value}; times must be finite numbers")
    ordered.sort()
    return ordered


def _at(ordered: list[float], q: float) -> float:
    if not 0 <= q <= 100:
        raise MeasurementError(f"a percentile lies in 0..100, got {q}")
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
