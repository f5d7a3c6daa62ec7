"""Three stages in three threads: read, compute, write, with a bounded channel between each two."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from gigamlp.measure.clock import HostClock

__all__ = ["Busy", "Channel", "flow"]

T = TypeVar("T")
U = TypeVar("U")


@dataclass
class Busy:
    """Seconds that each stage worked, waiting for the others left out."""

    read: float = 0.0
    compute: float = 0.0
    write: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The stage that worked longest: the others wait for it."""
        return max(("compute", "read", "write"), key=lambda stage: getattr(self, stage))

    def share(self, seconds: float) -> float:
        """Return which part of `seconds` the bottleneck worked: at 1 nothing but a quicker bottleneck helps.

        Examples
        --------
        >>> Busy(read=1.0, compute=3.0).share(4.0)
        0.75
        """
        return float(getattr(self, self.bottleneck)) / seconds


class Channel(Generic[T]):
    """A queue of bounded length that either end may close.

    Parameters
    ----------
    depth : int
        Items that it holds at most; `put` waits for room.
    """

    def __init__(self, depth: int) -> None:
        self._items: deque[T] = deque()
        self._depth = depth
        self._change = threading.Condition()
        self._ended = self._refused = False

    def put(self, item: T) -> bool:
        """Add an item; return False, and drop it, if nobody takes items any more."""
        with self._change:
            self._change.wait_for(lambda: self._refused or len(self._items) < self._depth)
            if self._refused:
                return False
            self._items.append(item)
            self._change.notify_all()
            return True

    def end(self) -> None:
        """Say that no more items come."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def refuse(self) -> None:
        """Say that no more items are taken."""
        with self._change:
            self._refused = True
            self._items.clear()
            self._change.notify_all()

    def __iter__(self) -> Iterator[T]:
        """Yield items until the channel ended."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._items or self._ended or self._refused)
                if not self._items:
                    return
                item = self._items.popleft()
                self._change.notify_all()
            yield item


def flow(
    read: Iterator[T],
    compute: Callable[[T], U],
    write: Callable[[U], None],
    *,
    depth: int = 2,
    busy: Busy | None = None,
    watch: Busy | None = None,
) -> Busy:
    """Pass every item of `read` through `compute` and then `write`, in order, each in its own thread.

    `compute` runs in the caller's thread. If a stage fails, or the caller is interrupted, what earlier stages have
    handed on is still computed and written; then the error is raised. If `write` fails, the others stop at once.

    Parameters
    ----------
    read : iterator
    compute, write : callable
    depth : int
        Items that wait between two stages at most: with those at work, ``2 * depth + 3`` are alive.
    busy : Busy, optional
        Where the seconds are added, for who watches meanwhile.
    watch : Busy, optional
        Where those of `write` alone are added: reading and computing happen elsewhere.

    Returns
    -------
    Busy

    Examples
    --------
    >>> out = []
    >>> _ = flow(iter(range(5)), lambda n: n * n, out.append)
    >>> out
    [0, 1, 4, 9, 16]
    """
    spent = Busy() if busy is None else busy
    now = HostClock.now
    before: Channel[T] = Channel(depth)
    after: Channel[U] = Channel(depth)
    failed: dict[str, BaseException] = {}

    def reading() -> None:
        try:
            while True:
                begin = now()
                item = next(read, None)
                spent.read += now() - begin
                if item is None or not before.put(item):
                    return
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            failed["read"] = error
        finally:
            before.end()

    def writing() -> None:
        try:
            for answers in after:
                begin = now()
                write(answers)
                spent.write += now() - begin
                if watch is not None:
                    watch.write = spent.write
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            failed["write"] = error
        finally:
            after.refuse()

    threads = [threading.Thread(target=work, name=f"gigamlp-{work.__name__}") for work in (reading, writing)]
    for thread in threads:
        thread.start()
    try:
        for item in before:
            begin = now()
            answers = compute(item)
            spent.compute += now() - begin
            if not after.put(answers):
                break
    finally:
        before.refuse()
        after.end()
        for thread in threads:
            thread.join()
    for error in failed.values():
        raise error
    return spent
