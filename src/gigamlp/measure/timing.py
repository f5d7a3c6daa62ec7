"""The one timing module: throughput, latency, and the parts of a host-inclusive run.

Rules: warm up first; visit all contenders in every round; at least five repeats; median and interquartile range; no
time without a synchronise (one at the end of a throughput repeat, one per latency call). Garbage collection is off
while samples are taken.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gigamlp.errors import InvalidInput, MeasurementError
from gigamlp.measure.clock import Clock
from gigamlp.measure.stats import percentile, summarise

__all__ = ["Latency", "Split", "Throughput", "latency", "rotating", "split", "throughput"]

Work = Callable[[], object]

_KEPT_SAMPLES = 2000
_MAX_LAUNCHES = 1 << 20  # a launch costs at least a Python call, 30 ns or so: any clock that runs has moved by then


@dataclass(frozen=True)
class Throughput:
    """Microseconds per launch over many back-to-back launches.

    Attributes
    ----------
    wall_us : float
        Median over the repeats of (end of the final synchronise - start) / launches.
    iqr : float
        Interquartile range of that, in microseconds.
    device_us : float or None
        Median of the device time around all launches / launches; None on a CPU.
    launches : int
        Launches per repeat.
    repeats : int
        Repeats taken; fewer than five only if a deadline cut them short.
    """

    wall_us: float
    iqr: float
    device_us: float | None
    launches: int
    repeats: int

    @property
    def noise(self) -> float:
        """The interquartile range as a share of the median."""
        return self.iqr / self.wall_us


@dataclass(frozen=True)
class Latency:
    """Microseconds from issue to answer, synchronised each time; nothing is subtracted.

    Attributes
    ----------
    p50_us, p99_us : float
    calls : int
        Timed calls.
    samples : tuple of float
        Up to 2,000 of the times, in the order taken: for a plot of the distribution.
    """

    p50_us: float
    p99_us: float
    calls: int
    samples: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Split:
    """The parts of a host-inclusive run, medians in microseconds; None where a part does not exist or has no timer.

    Attributes
    ----------
    h2d_us, device_us, d2h_us : float or None
        Device time of the copy in, of the computation, and of the copy out, each in a loop of its own. None on a CPU.
    enqueue_us : float or None
        Host time to issue all parts, before any wait. A copy from pageable memory waits by itself and counts here.
        None on a CPU, where issuing is doing.
    wall_us : float
        Copy in, compute, copy out, synchronise: end to end.
    repeats : int
        End-to-end repeats taken.
    """

    h2d_us: float | None
    device_us: float | None
    d2h_us: float | None
    enqueue_us: float | None
    wall_us: float
    repeats: int = 0


def throughput(
    work: Mapping[str, Work],
    clock: Clock,
    *,
    repeats: int = 7,
    min_s: float = 0.05,
    warmup_s: float = 0.05,
    deadline: float | None = None,
    seed: int = 0,
) -> dict[str, Throughput | Exception]:
    """Time several callables side by side.

    Each is warmed up and gets a number of launches that lasts about `min_s`; then every round visits every key, in an
    order that is drawn anew, so that a slow phase of the machine hits all alike.

    Parameters
    ----------
    work : mapping of str to callable
        Each call is one launch. For rotating (cold) inputs see `rotating`.
    clock : Clock
    repeats : int
        Rounds.
    min_s : float
        Seconds that one repeat lasts at least, by the calibration.
    warmup_s : float
        Seconds of launches before the first repeat.
    deadline : float, optional
        A value of ``clock.now()`` after which no repeat is started; every key still gets one.
    seed : int
        Of the order.

    Returns
    -------
    dict of str to Throughput or Exception
        In the order of `work`. A callable that raises has its exception as its value, and the others go on.

    Raises
    ------
    InvalidInput
        If `repeats` is below 1 or a duration is not positive.

    Examples
    --------
    >>> from gigamlp.measure import HostClock
    >>> found = throughput({"sum": lambda: sum(range(100))}, HostClock(), repeats=5, min_s=0.001, warmup_s=0.001)
    >>> found["sum"].wall_us > 0, found["sum"].device_us, found["sum"].repeats
    (True, None, 5)
    """
    if repeats < 1 or not min_s > 0 or not warmup_s >= 0:
        raise InvalidInput(f"repeats >= 1, min_s > 0, warmup_s >= 0; got {repeats}, {min_s}, {warmup_s}")
    names = list(work)
    failed: dict[str, Exception] = {}
    launches: dict[str, int] = {}
    samples: dict[str, list[tuple[float, float | None]]] = {name: [] for name in names}
    with _no_garbage_collection():
        for name in names:
            try:
                launches[name] = _calibrate(work[name], clock, min_s, warmup_s, deadline)
            except Exception as error:  # noqa: BLE001  whatever a contender raises is its result; the others go on
                failed[name] = error
        for order in _orders(names, repeats, seed):
            for name in order:
                if name in failed or (samples[name] and _past(clock, deadline)):
                    continue
                try:
                    samples[name].append(_repeat(work[name], clock, launches[name]))
                except Exception as error:  # noqa: BLE001  as above
                    failed[name] = error
    return {name: failed[name] if name in failed else _throughput(samples[name], launches[name]) for name in names}


def _orders(names: Sequence[str], rounds: int, seed: int) -> Iterator[list[str]]:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        yield [names[index] for index in rng.permutation(len(names))]


def _past(clock: Clock, deadline: float | None) -> bool:
    return deadline is not None and clock.now() >= deadline


def _calibrate(work: Work, clock: Clock, min_s: float, warmup_s: float, deadline: float | None) -> int:
    """Warm up for `warmup_s` and return how many launches last `min_s`.

    The number of launches doubles until one run is long enough to judge by: a quarter of `min_s`. Only the last run
    counts, so first-call costs do not spoil the estimate.
    """
    begin = clock.now()
    launches = 1
    while True:
        seconds = _repeat(work, clock, launches)[0]
        late = _past(clock, deadline)
        enough = seconds >= min_s / 4 and clock.now() - begin >= warmup_s
        if seconds > 0 and (late or enough):
            return max(1, math.ceil(launches * min_s / seconds))
        if seconds < min_s / 4:
            launches *= 2


def _repeat(work: Work, clock: Clock, launches: int) -> tuple[float, float | None]:
    """Return (wall, device) seconds of `launches` launches and one synchronise."""

    def run() -> None:
        for _ in itertools.repeat(None, launches):
            work()

    begin = clock.now()
    device = clock.span(run)
    clock.synchronize()
    wall = clock.now() - begin
    if not wall > 0 and launches >= _MAX_LAUNCHES:
        raise MeasurementError(f"the clock did not advance over {launches} launches")
    return wall, device


def _throughput(samples: Sequence[tuple[float, float | None]], launches: int) -> Throughput:
    wall = summarise(seconds / launches * 1e6 for seconds, _ in samples)
    device = [seconds / launches * 1e6 for _, seconds in samples if seconds is not None]
    return Throughput(
        wall_us=wall.median,
        iqr=wall.iqr,
        device_us=percentile(device, 50) if device else None,
        launches=launches,
        repeats=len(samples),
    )


def latency(work: Work, clock: Clock, *, calls: int = 1000, warmup: int = 50, budget_s: float = 2.0) -> Latency:
    """Time single calls, each from issue to the end of its own synchronise.

    Parameters
    ----------
    work : callable
    clock : Clock
    calls, warmup : int
        Timed calls, and calls before them.
    budget_s : float
        Seconds after which no further call is started; a quarter of it is for the warm-up. One call is always timed,
        and ``Latency.calls`` says how many were.

    Raises
    ------
    InvalidInput
        If `calls` is below 1.
    """
    if calls < 1 or warmup < 0 or not budget_s > 0:
        raise InvalidInput(f"calls >= 1, warmup >= 0, budget_s > 0; got {calls}, {warmup}, {budget_s}")
    now, synchronize = clock.now, clock.synchronize
    taken: list[float] = []
    with _no_garbage_collection():
        begin = now()
        for _ in range(warmup):
            work()
            synchronize()
            if now() - begin >= budget_s / 4:
                break
        synchronize()
        for _ in range(calls):
            start = now()
            work()
            synchronize()
            stop = now()
            taken.append((stop - start) * 1e6)
            if stop - begin >= budget_s:
                break
    kept = taken[:: math.ceil(len(taken) / _KEPT_SAMPLES)]
    return Latency(percentile(taken, 50), percentile(taken, 99), len(taken), tuple(kept))


def split(
    h2d: Work | None,
    compute: Work,
    d2h: Work | None,
    clock: Clock,
    *,
    repeats: int = 20,
    budget_s: float = 2.0,
) -> Split:
    """Time the parts of a run from host memory to host memory, each alone, and the whole.

    Parameters
    ----------
    h2d, d2h : callable or None
        The copies in and out; None if the rows are on the device, or the answers stay there.
    compute : callable
    clock : Clock
    repeats : int
        Samples of each part and of the whole.
    budget_s : float
        Seconds, shared by the parts; each gets one sample at least.
    """
    if repeats < 1 or not budget_s > 0:
        raise InvalidInput(f"repeats >= 1, budget_s > 0; got {repeats}, {budget_s}")
    parts = [part for part in (h2d, compute, d2h) if part is not None]
    share = budget_s / (len(parts) + 1)
    enqueue: list[float] = []
    wall: list[float] = []
    with _no_garbage_collection():
        for part in parts:  # warm-up, in the order that the data takes
            part()
        clock.synchronize()
        begin = clock.now()
        while len(wall) < repeats and (not wall or clock.now() - begin < share):
            start = clock.now()
            for part in parts:
                part()
            issued = clock.now()
            clock.synchronize()
            wall.append((clock.now() - start) * 1e6)
            enqueue.append((issued - start) * 1e6)
        alone = {id(part): _device_us(part, clock, repeats, share) for part in parts}
    device_us = alone[id(compute)]
    return Split(
        h2d_us=None if h2d is None else alone[id(h2d)],
        device_us=device_us,
        d2h_us=None if d2h is None else alone[id(d2h)],
        enqueue_us=None if device_us is None else percentile(enqueue, 50),
        wall_us=percentile(wall, 50),
        repeats=len(wall),
    )


def _device_us(work: Work, clock: Clock, repeats: int, budget_s: float) -> float | None:
    """Median device time of one call. Short calls are taken ten at a time, as one alone is mostly the gap before it."""
    first = clock.span(work)
    if first is None:
        return None
    count = 10 if first * 10 * repeats < budget_s else 1

    def several() -> None:
        for _ in range(count):
            work()

    begin = clock.now()
    taken: list[float] = []
    while len(taken) < repeats and (not taken or clock.now() - begin < budget_s):
        seconds = clock.span(several)
        if seconds is not None:
            taken.append(seconds / count * 1e6)
    return percentile(taken, 50)


def rotating(calls: Sequence[Work]) -> Work:
    """Return a callable that calls `calls` in turn, one per call: inputs that rotate stay out of the cache.

    Raises
    ------
    InvalidInput
        If there is nothing to call.

    Examples
    --------
    >>> said = []
    >>> work = rotating([lambda: said.append("a"), lambda: said.append("b")])
    >>> for _ in range(3):
    ...     work()
    >>> said
    ['a', 'b', 'a']
    """
    turn = itertools.cycle(tuple(calls))
    if not calls:
        raise InvalidInput("rotating needs at least one callable")

    def work() -> object:
        return next(turn)()

    return work


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
