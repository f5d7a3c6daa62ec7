"""Two records side by side: rows that measured the same work, their ratio, and whether it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gigamlp.record import Record, Row

__all__ = ["Comparison", "Pair", "compare"]

# what must be equal for two rows to have done the same work; the variant may differ, the fastest one counts
_SAME = (
    "name",
    "hidden",
    "engine",
    "scheme",
    "features_read_bytes",
    "batch",
    "batches_per_launch",
    "threads",
    "residence",
    "input_dtype",
    "output",
)


@dataclass(frozen=True)
class Pair:
    """One piece of work in two records.

    Attributes
    ----------
    before, after : Row
    ratio : float
        Speed after over speed before: above 1 is faster. Of samples a second, or if a row has none, of p50.
    noise : float or None
        How far the ratio may be from 1 by the spread of the repeats alone: the root of the sum of the squares of both
        interquartile ranges over their medians. None where a row has no spread.
    """

    before: Row
    after: Row
    ratio: float
    noise: float | None

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``within noise``, or ``spread unknown``."""
        if self.noise is None:
            return "spread unknown"
        if abs(math.log(self.ratio)) <= math.log1p(self.noise):
            return "within noise"
        return "faster" if self.ratio > 1 else "slower"


@dataclass(frozen=True)
class Comparison:
    """What two records have in common, and what only one of them has.

    Attributes
    ----------
    pairs : tuple of Pair
        In the order of the first record.
    only_before, only_after : tuple of Row
        Measured rows without a counterpart.
    """

    pairs: tuple[Pair, ...]
    only_before: tuple[Row, ...]
    only_after: tuple[Row, ...]

    @property
    def geometric_mean(self) -> float | None:
        """Of the ratios; None if there is no pair."""
        if not self.pairs:
            return None
        return math.exp(sum(math.log(pair.ratio) for pair in self.pairs) / len(self.pairs))


def compare(before: Record, after: Record) -> Comparison:
    """Pair the measured rows of two records that did the same work. Quoted rows are left out.

    Of several rows of the same work (other variants) the fastest counts.

    Examples
    --------
    >>> row = {"name": "m", "engine": "numpy", "batch": 64, "wall_us": 10.0, "iqr": 0.2}
    >>> old = Record({"name": "here"}, {}, "bench", [Row(**row, samples_per_s=1e6)])
    >>> new = Record({"name": "here"}, {}, "bench", [Row(**row, samples_per_s=1.5e6)])
    >>> found = compare(old, new)
    >>> [(pair.ratio, pair.verdict) for pair in found.pairs]
    [(1.5, 'faster')]
    """
    old, new = _by_work(before.rows), _by_work(after.rows)
    pairs = tuple(_pair(row, new[key]) for key, row in old.items() if key in new)
    return Comparison(
        pairs,
        tuple(row for key, row in old.items() if key not in new),
        tuple(row for key, row in new.items() if key not in old),
    )


def _by_work(rows: Sequence[Row]) -> dict[Any, Row]:
    found: dict[Any, Row] = {}
    for row in rows:
        if row.quoted or not _speed(row):
            continue
        key = (row.samples_per_s is None, *(_plain(getattr(row, name)) for name in _SAME))
        if key not in found or _speed(row) > _speed(found[key]):
            found[key] = row
    return found


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _speed(row: Row) -> float:
    if row.samples_per_s is not None:
        return row.samples_per_s
    return 1e6 / row.p50_us if row.p50_us else 0.0


def _pair(before: Row, after: Row) -> Pair:
    spreads = [row.iqr / row.wall_us if row.iqr is not None and row.wall_us else None for row in (before, after)]
    noise = None if None in spreads else math.hypot(*(spread for spread in spreads if spread is not None))
    return Pair(before, after, _speed(after) / _speed(before), noise)
