"""A clock on which time advances by scripted amounts only: a host, and a device that works behind its back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator


def _script(costs: float | Iterable[float]) -> Iterator[float]:
    return itertools.repeat(costs) if isinstance(costs, int | float) else iter(costs)


class FakeClock:
    """Host seconds, and a device queue that ends at `ready`.

    `work` makes callables that take scripted host and device seconds. `synchronize` moves the host to the end of the
    queue, as on a GPU. `log` holds the names of the calls, with ``"sync"`` for each synchronise.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.time = 0.0
        self.ready = 0.0
        self.log: list[str] = []

    def now(self) -> float:
        return self.time

    def synchronize(self) -> None:
        self.time = max(self.time, self.ready)
        self.log.append("sync")

    def span(self, work: Callable[[], object]) -> float | None:
        if self.device == "cpu":
            work()
            return None
        start = max(self.time, self.ready)
        work()
        self.time = max(self.time, self.ready)
        return max(start, self.ready) - start

    def work(
        self,
        name: str,
        host: float | Iterable[float] = 0.0,
        device: float | Iterable[float] = 0.0,
        *,
        waits: bool = False,
    ) -> Callable[[], None]:
        """Return a callable that takes `host` seconds, and queues `device` seconds; with `waits` it waits for them."""
        host_costs, device_costs = _script(host), _script(device)

        def call() -> None:
            self.log.append(name)
            self.time += next(host_costs)
            cost = next(device_costs)
            if cost:
                self.ready = max(self.ready, self.time) + cost
            if waits:
                self.time = max(self.time, self.ready)

        return call

    def calls(self) -> list[str]:
        """The log without synchronises, runs of the same name counted once."""
        return [name for name, _ in itertools.groupby(entry for entry in self.log if entry != "sync")]
