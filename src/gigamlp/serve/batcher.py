"""Requests become batches: a bounded queue, one thread that owns the device, and no waiting that does not pay.

How long a request waits for company
    Nothing is gained by waiting while the engine is busy: who comes meanwhile runs next, together. While it is idle,
    two requests that run together save one fixed cost of a run; so a batch waits that long for company and no longer,
    and never longer than ``max_delay_us``. The fixed cost is learnt from the runs themselves. On a CPU it is some
    microseconds, and a request that the engine answers in less than a thread takes to wake (`INLINE_US`) is answered
    where it was read.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.measure.clock import HostClock
from gigamlp.serve.cost import Cost
from gigamlp.serve.errors import Refused

__all__ = ["INLINE_US", "Batcher", "Model", "Watcher"]

Array = NDArray[Any]
INLINE_US = 50.0  # handing rows to the thread and back takes 29 us where nothing else runs, and more under load


class Model(Protocol):
    """What a batcher runs."""

    @property
    def on_cpu(self) -> bool:
        """Whether a run keeps this thread busy."""
        ...

    def largest(self) -> int:
        """Return the rows of the largest batch."""
        ...

    def run(self, kind: str, rows: Array) -> Array:
        """Return the answers for rows, one each."""
        ...


class Watcher(Protocol):
    """What is told about every run, from the thread that ran it."""

    def ran(self, model: Any, rows: int, requests: int, seconds: float) -> None:
        """Take note of one run."""
        ...


@dataclass(eq=False)
class _Job:
    model: Model
    kind: str
    rows: Array
    answer: asyncio.Future[Array]
    at: float


@dataclass(eq=False)
class _Line:
    """The jobs that can run together, in the order in which they came."""

    cost: Cost = field(default_factory=Cost)
    jobs: deque[_Job] = field(default_factory=deque)
    rows: int = 0


class Batcher:
    """Merges requests into batches and runs them, one at a time.

    Parameters
    ----------
    max_queue_rows : int
        Rows that may wait; the row that would exceed it is refused with 503.
    max_delay_us : float
        How long a request waits for others, at most, while the engine is idle.
    inline_us : float
        What the engine answers in less is run by the caller's thread; 0: never.
    watcher : Watcher, optional
    now : callable
        The clock, in seconds.
    """

    def __init__(
        self,
        max_queue_rows: int,
        max_delay_us: float = 200.0,
        *,
        inline_us: float = INLINE_US,
        watcher: Watcher | None = None,
        now: Callable[[], float] = HostClock.now,
    ) -> None:
        self._most, self._delay, self._inline = max_queue_rows, max_delay_us * 1e-6, inline_us * 1e-6
        self._watcher, self._now = watcher, now
        self._change = threading.Condition()
        self._lines: dict[tuple[Model, str], _Line] = {}
        self._errands: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._queued = 0  # rows
        self._busy = self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ---- from the event loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; called in the running event loop that asks."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="gigamlp-engine", daemon=True)
        self._thread.start()

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return self._queued

    def at_once(self, model: Model, kind: str, rows: Array) -> Array | None:
        """Answer rows here and now if that takes less time than handing them over, and nothing waits; else None."""
        if self._busy or self._queued or not model.on_cpu:
            return None
        line = self._lines.get((model, kind))
        if line is None or line.cost.of(len(rows)) > self._inline:
            return None
        begin = self._now()
        answers = model.run(kind, rows)
        self._ran(line, model, len(rows), 1, self._now() - begin)
        return answers

    def submit(self, model: Model, kind: str, rows: Array) -> asyncio.Future[Array]:
        """Queue rows and return the future of their answers. Cancelling it takes them out of the queue.

        Raises
        ------
        Refused
            503 if the queue is full.
        """
        n = len(rows)
        with self._change:
            self.check_room(n)
            assert self._loop is not None
            job = _Job(model, kind, rows, self._loop.create_future(), self._now())
            line = self._lines.get((model, kind))
            if line is None:
                line = self._lines[model, kind] = _Line()
            line.jobs.append(job)
            line.rows += n
            self._queued += n
            self._change.notify()
        job.answer.add_done_callback(lambda answer: self._leave(job) if answer.cancelled() else None)
        return job.answer

    def check_room(self, rows: int) -> None:
        """Refuse `rows` more rows with 503 if the queue has no room for them."""
        if self._queued + rows > self._most:
            wait = sum(line.cost.of(line.rows) for line in list(self._lines.values()) if line.jobs)
            message = f"{self._queued:,} rows are waiting already; try again"
            raise Refused(503, message, retry_after=max(1, math.ceil(wait)), dropped="queue_full")

    def errand(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Let the thread that owns the device call `work` between two runs; return the future of what it gives."""
        assert self._loop is not None
        done = self._loop.create_future()
        with self._change:
            self._errands.append((work, done))
            self._change.notify()
        return done

    def forget(self, model: Model) -> None:
        """Forget a model that is asked for no more."""
        with self._change:
            for key in [key for key, line in self._lines.items() if key[0] is model and not line.jobs]:
                del self._lines[key]

    async def close(self) -> None:
        """Answer all that waits, then end the thread."""
        with self._change:
            self._closing = True
            self._change.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _leave(self, job: _Job) -> None:
        with self._change:
            line = self._lines.get((job.model, job.kind))
            if line is not None and job in line.jobs:
                line.jobs.remove(job)
                line.rows -= len(job.rows)
                self._queued -= len(job.rows)

    # ---- in the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.wait_for(lambda: self._queued or self._any_job() or self._errands or self._closing)
                if not self._errands and not self._any_job():
                    return
                errand = self._errands.popleft() if self._errands else None
                jobs, line = ([], None) if errand else self._gather()
                self._busy = True
            if errand is not None:
                self._do(*errand)
            elif jobs and line is not None:
                self._run(jobs, line)

    def _any_job(self) -> bool:
        return any(line.jobs for line in self._lines.values())

    def _gather(self) -> tuple[list[_Job], _Line | None]:
        """Wait as long as company pays, and take the jobs of the next run. The lock is held."""
        line = min((line for line in self._lines.values() if line.jobs), key=lambda line: line.jobs[0].at)
        head = line.jobs[0]
        most = head.model.largest()
        until = head.at + min(self._delay, line.cost.fixed)
        while line.rows < most and not self._closing:
            left = until - self._now()
            if left <= 0 or not self._change.wait(left):
                break
            if not line.jobs or line.jobs[0] is not head:  # it was cancelled
                return [], None
        jobs: list[_Job] = []
        rows = 0
        while line.jobs and (not jobs or rows + len(line.jobs[0].rows) <= most):
            job = line.jobs.popleft()
            jobs.append(job)
            rows += len(job.rows)
        line.rows -= rows
        self._queued -= rows
        return jobs, line

    def _run(self, jobs: list[_Job], line: _Line) -> None:
        model, kind = jobs[0].model, jobs[0].kind
        answers: Array | None = None
        error: Exception | None = None
        begin = self._now()
        try:
            rows = jobs[0].rows if len(jobs) == 1 else np.concatenate([job.rows for job in jobs])
            answers = model.run(kind, rows)
            self._ran(line, model, len(rows), len(jobs), self._now() - begin)
        except Exception as problem:  # noqa: BLE001  (raised where the answers are awaited)
            error = problem
        self._call(self._deliver, jobs, answers, error)

    def _ran(self, line: _Line, model: Model, rows: int, requests: int, seconds: float) -> None:
        line.cost.learn(rows, seconds)
        if self._watcher is not None:
            self._watcher.ran(model, rows, requests, seconds)

    def _do(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        try:
            result = work()
        except Exception as problem:  # noqa: BLE001  (raised where it is awaited)
            self._call(_fail, done, problem)
        else:
            self._call(_succeed, done, result)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    @staticmethod
    def _deliver(jobs: list[_Job], answers: Array | None, error: Exception | None) -> None:
        begin = 0
        for job in jobs:
            end = begin + len(job.rows)
            if answers is None:
                assert error is not None
                _fail(job.answer, error)
            else:
                _succeed(job.answer, answers[begin:end])
            begin = end


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
