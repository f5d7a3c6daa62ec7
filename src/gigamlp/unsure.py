"""How many rows a cascade was unsure of, as they run: what drift shows in first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gigamlp.cascade import Calibration, Cascade, Model
from gigamlp.errors import InvalidInput

__all__ = ["Unsure", "UnsureCount", "drift", "unsure_of"]


@dataclass(frozen=True)
class UnsureCount:
    """Rows that a cascade answered, and how many went on from each stage but the last.

    Attributes
    ----------
    rows : int
    went_on : tuple of int
    """

    rows: int
    went_on: tuple[int, ...]

    @property
    def share(self) -> float | None:
        """Share of the rows that the first stage was unsure of; None without rows."""
        return self.went_on[0] / self.rows if self.rows else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the rows that went on from each stage; empty without rows."""
        return tuple(count / self.rows for count in self.went_on) if self.rows else ()

    def since(self, before: UnsureCount) -> UnsureCount:
        """Return what came after `before`."""
        later = tuple(b - a for a, b in zip(before.went_on, self.went_on, strict=True))
        return UnsureCount(self.rows - before.rows, later)


class Unsure:
    """The counts of a Session that runs a cascade; `Session.unsure` gives it.

    Parameters
    ----------
    totals : callable
        Gives the rows so far, and how many of them went on from each stage but the last.
    calibration : Calibration or None
        The cascade's own.
    """

    def __init__(self, totals: Callable[[], Sequence[int]], calibration: Calibration | None) -> None:
        self._totals, self._calibration = totals, calibration
        self._before: UnsureCount | None = None

    @property
    def total(self) -> UnsureCount:
        """All rows of the Session so far. On CUDA, reading it waits for the runs."""
        rows, *went_on = self._totals()
        return UnsureCount(rows, tuple(went_on))

    @property
    def share(self) -> float | None:
        """The running share of rows that the first stage was unsure of; None before the first row."""
        return self.total.share

    @property
    def last(self) -> UnsureCount | None:
        """The rows of the last call. None before the first one, and after one with rows on CUDA.

        Counting those alone would wait for the device in every call.
        """
        return None if self._before is None else self.total.since(self._before)

    def drift(self, *, last: bool = False) -> float:
        """Return the p-value of the running share (or of the `last` call's) against the calibration's; see `drift`.

        Raises
        ------
        InvalidInput
            If the cascade carries no calibration, or no row was answered.
        """
        if self._calibration is None:
            raise InvalidInput("this cascade carries no calibration to compare with; gigamlp.calibrate makes one")
        counts = self.last if last else self.total
        if counts is None or counts.rows == 0:
            raise InvalidInput("no rows were counted yet")
        return drift(self._calibration, counts)

    def start(self, known: bool) -> None:
        """Note that a call begins, and whether its rows can be counted without waiting."""
        self._before = self.total if known else None


class _Counts(Protocol):
    def totals(self, stages: int) -> Sequence[int]: ...


def unsure_of(mlp: Model, counted: Sequence[_Counts]) -> Unsure | None:
    """Return the counts of a cascade over what `counted` has run; None for an MLP."""
    if not isinstance(mlp, Cascade):
        return None
    stages = len(mlp.stages)

    def totals() -> list[int]:
        return [sum(parts) for parts in zip(*(each.totals(stages) for each in counted), strict=True)]

    return Unsure(totals, mlp.calibration)


def drift(calibration: Calibration, counts: UnsureCount) -> float:
    """Return how probable it is that rows of the calibration's kind differ this much in the share of unsure ones.

    A two-sided test of two proportions with their pooled variance (the normal approximation; Agresti, Categorical Data
    Analysis, 3rd ed., section 3.2) for each stage but the last; the smallest p-value, times their number (Bonferroni).
    A small one says that rows have changed: the promise of `gigamlp.calibrate` then no longer holds.

    Parameters
    ----------
    calibration : Calibration
    counts : UnsureCount
        At least one row.

    Returns
    -------
    float
        In 0..1. A threshold of 0.001 or less is advised: among millions of rows a tiny change is significant.

    Examples
    --------
    >>> from gigamlp.cascade import Calibration, Cascade, Model
    >>> known = Calibration(10_000, (900,), max_loss=0.001, confidence=0.95, labelled=True)
    >>> drift(known, UnsureCount(10_000, (930,))) > 0.001, drift(known, UnsureCount(10_000, (1300,))) < 0.001
    (True, True)
    """
    if counts.rows < 1 or len(counts.went_on) != len(calibration.unsure):
        raise InvalidInput(f"{counts} cannot be compared with a calibration of {len(calibration.unsure) + 1} stages")
    least = 1.0
    for then, now in zip(calibration.unsure, counts.went_on, strict=True):
        n, m = calibration.rows, counts.rows
        pooled = (then + now) / (n + m)
        spread = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
        if spread > 0:
            least = min(least, math.erfc(abs(then / n - now / m) / spread / math.sqrt(2)))
    return min(1.0, least * len(calibration.unsure))
