"""What a run costs, learnt from runs: so much for any, and so much for each row."""

from __future__ import annotations

__all__ = ["Cost"]

_FORGET = 0.98  # the weight that a run keeps with every later one: some 50 runs count


class Cost:
    """A line through the latest runs, seconds over rows, by least squares that forget.

    Examples
    --------
    >>> cost = Cost()
    >>> for rows in (1, 10, 100):
    ...     cost.learn(rows, 50e-6 + rows * 2e-6)
    >>> round(cost.fixed * 1e6), round(cost.of(1000) * 1e6)
    (50, 2050)
    """

    __slots__ = ("_n", "_nn", "_nt", "_t", "_weight")

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """Take note of a run."""
        self._weight = self._weight * _FORGET + 1.0
        self._n = self._n * _FORGET + rows
        self._t = self._t * _FORGET + seconds
        self._nn = self._nn * _FORGET + rows * rows
        self._nt = self._nt * _FORGET + rows * seconds

    def _line(self) -> tuple[float, float]:
        """Return the seconds of any run and of a row, neither below 0."""
        if self._weight == 0.0:
            return 0.0, 0.0
        mean = self._n / self._weight
        spread = self._nn / self._weight - mean * mean
        average = self._t / self._weight
        if spread <= 1e-9 * mean * mean + 1e-12:  # all runs had as many rows
            return 0.0, average / mean if mean else 0.0
        slope = max(0.0, (self._nt / self._weight - mean * average) / spread)
        fixed = average - slope * mean
        return (fixed, slope) if fixed >= 0 else (0.0, average / mean)

    @property
    def fixed(self) -> float:
        """Seconds that a run takes whatever its rows; 0 until it is known."""
        return self._line()[0]

    def of(self, rows: int) -> float:
        """Return the seconds that a run of `rows` rows is expected to take; 0 until one was seen."""
        fixed, slope = self._line()
        return fixed + slope * rows
