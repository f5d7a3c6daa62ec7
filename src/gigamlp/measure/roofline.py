"""The roofline: what this machine can move and multiply per second, measured, and a time's share of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gigamlp.errors import FileFormatError, InvalidInput, MeasurementError
from gigamlp.measure.clock import Clock

__all__ = ["DTYPES", "Roofs", "best_roof", "roof", "share"]

DTYPES = ("float32", "float16", "bfloat16", "int8")


@dataclass(frozen=True)
class Roofs:
    """The measured limits of one device. Bandwidths in bytes/s, matrix rates in multiply-accumulates (MACs)/s.

    Attributes
    ----------
    read_bytes_s : float
        Reading device memory, far more of it than fits a cache.
    copy_bytes_s : float
        Copying device memory: bytes read plus bytes written.
    macs_s : dict of str to float
        By dtype: float32 (no TF32), float16, bfloat16, int8. A dtype that cannot be measured here has no entry.
    h2d_pinned_bytes_s, h2d_pageable_bytes_s, d2h_pinned_bytes_s, d2h_pageable_bytes_s : float or None
        Between host and device; None on a CPU.
    cache_bytes : int
        Size of the last-level cache; 0 if unknown.
    """

    read_bytes_s: float
    copy_bytes_s: float
    macs_s: dict[str, float] = field(default_factory=dict)
    h2d_pinned_bytes_s: float | None = None
    h2d_pageable_bytes_s: float | None = None
    d2h_pinned_bytes_s: float | None = None
    d2h_pageable_bytes_s: float | None = None
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        rates = {name: value for name, value in asdict(self).items() if name.endswith("bytes_s")}
        for name, value in {**rates, **self.macs_s}.items():
            if value is None and name.startswith(("h2d", "d2h")):
                continue
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise MeasurementError(f"roof {name} must be a positive, finite rate, got {value!r}")

    def floor_seconds(self, bytes_moved: float, macs: float, dtype: str, *, in_cache: bool = False) -> float | None:
        """Return the least seconds that these limits allow, or None if none of them applies.

        Parameters
        ----------
        bytes_moved : float
            Bytes that go through device memory.
        macs : float
            Multiply-accumulates.
        dtype : str
            What they are computed in. float16 and bfloat16 without a rate of their own are limited by float32's, as
            hardware without that path computes them so; any other dtype without a rate sets no compute limit.
        in_cache : bool
            The working set fits the last-level cache: memory bandwidth then is no limit.
        """
        if bytes_moved < 0 or macs < 0:
            raise InvalidInput(f"bytes_moved and macs must not be negative, got {bytes_moved} and {macs}")
        floors = []
        if not in_cache and bytes_moved:
            floors.append(bytes_moved / self.read_bytes_s)
        rate = self.macs_s.get(dtype)
        if rate is None and dtype in ("float16", "bfloat16"):
            rate = self.macs_s.get("float32")
        if macs and rate is not None:
            floors.append(macs / rate)
        return max(floors, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Roofs:
        """Make Roofs from what `to_json` gave.

        Raises
        ------
        FileFormatError
            If a field is missing, unknown or not a positive number.
        """
        names = {item.name for item in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            found = sorted(set(data) ^ names) if isinstance(data, dict) else type(data).__name__
            raise FileFormatError(f"roofs must be an object with the fields {sorted(names)}; differing: {found}")
        if not isinstance(data["macs_s"], dict) or not isinstance(data["cache_bytes"], int):
            raise FileFormatError("roofs: macs_s must be an object and cache_bytes a whole number")
        try:
            return cls(**{**data, "macs_s": dict(data["macs_s"])})
        except MeasurementError as error:
            raise FileFormatError(f"roofs: {error}") from error


def roof(work: Callable[[], object], clock: Clock, amount: float, *, budget_s: float = 0.2, repeats: int = 20) -> float:
    """Return the highest rate at which `work` gets `amount` done, in amount/s.

    A roof is a limit, so the best run counts, not the median. Device time is used where the clock has it.

    Parameters
    ----------
    work : callable
        Moves or computes `amount` of something (bytes, MACs) per call; long enough that starting it costs nothing.
    clock : Clock
    amount : float
    budget_s : float
        Seconds, after one call to warm up; three calls are timed at least.
    repeats : int
        Timed calls at most.

    Raises
    ------
    MeasurementError
        If the clock does not advance.
    """
    work()
    clock.synchronize()
    begin = clock.now()
    best = math.inf
    for count in range(max(3, repeats)):
        start = clock.now()
        device = clock.span(work)
        clock.synchronize()
        stop = clock.now()
        best = min(best, stop - start if device is None else device)
        if count >= 2 and stop - begin >= budget_s:
            break
    if not best > 0:
        raise MeasurementError("a roof cannot be measured: the clock did not advance")
    return amount / best


def best_roof(
    ways: Iterable[Callable[[], object]], clock: Clock, amount: float, *, budget_s: float = 0.2, repeats: int = 20
) -> float:
    """Return the highest `roof` over several ways of doing the same amount; the budget is for each.

    Raises
    ------
    MeasurementError
        If there is no way, or the clock does not advance.
    """
    rates = [roof(work, clock, amount, budget_s=budget_s, repeats=repeats) for work in ways]
    if not rates:
        raise MeasurementError("a roof needs at least one way to measure it")
    return max(rates)


def share(seconds: float, *, bytes_moved: float, macs: float, dtype: str, roofs: Roofs, in_cache: bool) -> float | None:
    """Return the least possible time / `seconds`: 1 is the roof itself. None if no measured limit applies.

    Parameters
    ----------
    seconds : float
        The time that the work took.
    bytes_moved, macs, dtype, in_cache
        See `Roofs.floor_seconds`.
    roofs : Roofs

    Examples
    --------
    >>> roofs = Roofs(read_bytes_s=100.0, copy_bytes_s=80.0, macs_s={"float32": 1000.0})
    >>> share(2.0, bytes_moved=100.0, macs=500.0, dtype="float32", roofs=roofs, in_cache=False)
    0.5
    >>> share(2.0, bytes_moved=100.0, macs=500.0, dtype="float32", roofs=roofs, in_cache=True)
    0.25
    """
    if not seconds > 0:
        raise InvalidInput(f"seconds must be positive, got {seconds}")
    floor = roofs.floor_seconds(bytes_moved, macs, dtype, in_cache=in_cache)
    return None if floor is None else floor / seconds
