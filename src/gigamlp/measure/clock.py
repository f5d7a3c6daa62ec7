"""Clocks: host seconds, device seconds, and the synchronise between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol

from gigamlp.errors import DeviceError

__all__ = ["Clock", "CudaClock", "HostClock", "Stopwatch", "clock_for", "stopwatch", "timestamp"]


class Clock(Protocol):
    """What a measurement reads time from.

    Attributes
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    """

    @property
    def device(self) -> str:
        """The device whose work is timed."""
        ...

    def now(self) -> float:
        """Return host seconds from an arbitrary, fixed origin."""
        ...

    def synchronize(self) -> None:
        """Return when all work queued on the device is finished."""
        ...

    def span(self, work: Callable[[], object]) -> float | None:
        """Call `work` once; return the device seconds from its start to its end, None without a device timer.

        With a device timer the work is finished on return.
        """
        ...


class HostClock:
    """The clock of CPU work: a monotonic host timer; nothing to wait for.

    Examples
    --------
    >>> clock = HostClock()
    >>> begin = clock.now()
    >>> clock.now() >= begin, clock.span(lambda: None)
    (True, None)
    """

    device = "cpu"

    @staticmethod
    def now() -> float:
        """Return host seconds from an arbitrary, fixed origin."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: CPU work is finished when its call returns."""

    def span(self, work: Callable[[], object]) -> float | None:
        """Call `work`; return None, as a CPU has no separate device timer."""
        work()
        return None


class CudaClock:
    """The clock of one CUDA device: host timer, device synchronise, and a pair of CUDA events that is used again.

    Parameters
    ----------
    device : str
        ``"cuda:N"``.

    Raises
    ------
    DeviceError
        If torch is not installed, or cannot use that device.
    """

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise DeviceError(f"cannot time {device} without torch: pip install 'gigamlp[torch]'") from error
        if not torch.cuda.is_available():
            raise DeviceError(f"cannot time {device}: torch {torch.__version__} finds no usable CUDA device")
        self.device = device
        self._cuda: Any = torch.cuda
        self._index = torch.device(device).index or 0
        if self._index >= torch.cuda.device_count():
            raise DeviceError(f"cannot time {device}: this machine has {torch.cuda.device_count()} CUDA device(s)")
        # the typed signature of Event differs between torch versions
        make: Any = torch.cuda.Event
        self._start, self._stop = make(enable_timing=True), make(enable_timing=True)

    @staticmethod
    def now() -> float:
        """Return host seconds from an arbitrary, fixed origin."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Return when all work queued on the device, on any stream, is finished."""
        self._cuda.synchronize(self._index)

    def span(self, work: Callable[[], object]) -> float | None:
        """Call `work` between two events on the device's current stream; return the seconds between them.

        Work that `work` queues on another stream counts only as far as the current stream waits for it.
        """
        with self._cuda.device(self._index):
            stream = self._cuda.current_stream(self._index)
            self._start.record(stream)
            work()
            self._stop.record(stream)
            self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) * 1e-3


def clock_for(device: str) -> HostClock | CudaClock:
    """Return the clock for a resolved device, ``"cpu"`` or ``"cuda:N"``.

    Raises
    ------
    DeviceError
        If the name is neither, or the CUDA device cannot be used.
    """
    if device == "cpu":
        return HostClock()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise DeviceError(f"no clock for device {device!r}; give 'cpu' or 'cuda:N'")
    return CudaClock(device)


class Stopwatch:
    """Host seconds since it was made; used as a context manager it stops at the end of the block.

    Examples
    --------
    >>> with stopwatch() as watch:
    ...     total = sum(range(1000))
    >>> watch.seconds > 0
    True
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._end: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far, or up to `stop`."""
        return (time.perf_counter() if self._end is None else self._end) - self._begin

    def stop(self) -> float:
        """Stop (the first call counts) and return the seconds."""
        if self._end is None:
            self._end = time.perf_counter()
        return self.seconds

    def __enter__(self) -> Stopwatch:
        self._begin, self._end = time.perf_counter(), None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def stopwatch() -> Stopwatch:
    """Return a running `Stopwatch`: for build and fit seconds, progress and budgets."""
    return Stopwatch()


def timestamp(at: float | None = None) -> str:
    """Return a time as ISO 8601 in UTC: the present one in whole seconds, or `at`, Unix seconds, in milliseconds."""
    if at is not None:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return datetime.now(UTC).isoformat(timespec="seconds")
