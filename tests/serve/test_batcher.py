"""The batcher: what runs together, how long it waits, what it refuses, and that leaving is clean."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from gigamlp.serve.batcher import Batcher
from gigamlp.serve.cost import Cost
from gigamlp.serve.errors import Refused


class Slow:
    """Answers rows with their first number; runs wait until they may."""

    def __init__(self, largest: int = 8, on_cpu: bool = True) -> None:
        self.on_cpu, self._largest = on_cpu, largest
        self.runs: list[int] = []
        self.gate = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.gated = True
        self.error: Exception | None = None
        self.threads: set[str] = set()

    def largest(self) -> int:
        return self._largest

    def run(self, kind: str, rows: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.runs.append(len(rows))
        self.began.release()
        if self.gated:
            assert self.gate.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        return rows[:, 0].astype(np.int64)


def rows(*values: int) -> Any:
    return np.array(values, np.uint8)[:, None]


def run(test: Callable[[Batcher, Slow], Awaitable[None]], most: int = 100, **own: Any) -> None:
    async def main() -> None:
        batcher, model = Batcher(most, **own), Slow()
        batcher.start()
        try:
            await test(batcher, model)
        finally:
            model.gated = False
            model.gate.release(100)
            await batcher.close()
        assert batcher.queued_rows == 0

    asyncio.run(asyncio.wait_for(main(), 30))


async def began(model: Slow) -> None:
    assert await asyncio.to_thread(model.began.acquire, timeout=20)


def test_what_comes_while_the_engine_is_busy_runs_together() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        first = batcher.submit(model, "class", rows(1))
        await began(model)
        others = [batcher.submit(model, "class", rows(n, n + 1)) for n in (2, 4, 6)]
        model.gate.release(2)
        assert (await first).tolist() == [1]
        assert [(await other).tolist() for other in others] == [[2, 3], [4, 5], [6, 7]]
        assert model.runs == [1, 6]
        assert model.threads == {"gigamlp-engine"}

    run(test)


def test_a_run_is_no_larger_than_the_ladder_unless_one_request_is() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        first = batcher.submit(model, "class", rows(0))
        await began(model)
        jobs = [batcher.submit(model, "class", rows(*range(n))) for n in (5, 3, 1, 20)]
        model.gate.release(9)
        await first
        for job, n in zip(jobs, (5, 3, 1, 20), strict=True):
            assert (await job).tolist() == list(range(n))
        assert model.runs == [1, 8, 1, 20]

    run(test)


def test_kinds_and_models_do_not_mix_and_the_oldest_runs_first() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        other = Slow()
        other.gated = False
        first = batcher.submit(model, "class", rows(0))
        await began(model)
        jobs = [
            batcher.submit(other, "class", rows(1)),
            batcher.submit(model, "logits", rows(2)),
            batcher.submit(other, "class", rows(3)),
        ]
        model.gate.release(9)
        await asyncio.gather(first, *jobs)
        assert model.runs == [1, 1]
        assert other.runs == [2]

    run(test)


def test_beyond_its_bound_the_queue_refuses_and_says_when_to_return() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        first = batcher.submit(model, "class", rows(0))
        await began(model)
        waiting = batcher.submit(model, "class", rows(*range(9)))
        with pytest.raises(Refused) as caught:
            batcher.submit(model, "class", rows(1, 2))
        assert (caught.value.status, caught.value.dropped) == (503, "queue_full")
        assert caught.value.retry_after is not None
        assert caught.value.retry_after >= 1
        last = batcher.submit(model, "class", rows(3))
        model.gate.release(9)
        await asyncio.gather(first, waiting, last)
        assert batcher.queued_rows == 0
        await batcher.submit(model, "class", rows(1))

    run(test, most=10)


def test_who_leaves_does_not_run_and_makes_room() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        first = batcher.submit(model, "class", rows(0))
        await began(model)
        stays = batcher.submit(model, "class", rows(1))
        leaves = batcher.submit(model, "class", rows(*range(8)))
        also = batcher.submit(model, "class", rows(2))
        leaves.cancel()
        await asyncio.sleep(0)
        assert batcher.queued_rows == 2
        model.gate.release(9)
        await asyncio.gather(first, stays, also)
        assert model.runs == [1, 2]

    run(test, most=10)


def test_who_leaves_during_the_run_does_not_disturb_it() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        first = batcher.submit(model, "class", rows(0))
        await began(model)
        leaves, stays = batcher.submit(model, "class", rows(1)), batcher.submit(model, "class", rows(2))
        model.gate.release()
        await first
        await began(model)
        leaves.cancel()
        model.gate.release()
        assert (await stays).tolist() == [2]
        assert leaves.cancelled()

    run(test)


def test_a_failed_run_is_told_to_those_in_it_and_the_next_one_runs() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        model.gated, model.error = False, RuntimeError("the device fell off the bus")
        with pytest.raises(RuntimeError, match="fell off"):
            await batcher.submit(model, "class", rows(1))
        model.error = None
        assert (await batcher.submit(model, "class", rows(1))).tolist() == [1]

    run(test)


def test_closing_answers_all_that_wait() -> None:
    async def main() -> None:
        batcher, model = Batcher(100), Slow(largest=1)
        batcher.start()
        jobs = [batcher.submit(model, "class", rows(n)) for n in range(5)]
        model.gate.release(9)
        await batcher.close()
        assert [(await job).tolist() for job in jobs] == [[n] for n in range(5)]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_small_rows_are_answered_at_once_when_that_is_quicker() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        model.gated = False
        assert batcher.at_once(model, "class", rows(5)) is None  # nothing is known of it yet
        await batcher.submit(model, "class", rows(5))
        await batcher.errand(lambda: None)  # the thread has put its tools down
        await asyncio.sleep(0.05)
        answers = batcher.at_once(model, "class", rows(5))
        assert answers is not None
        assert answers.tolist() == [5]
        assert "MainThread" in model.threads
        model.on_cpu = False
        assert batcher.at_once(model, "class", rows(5)) is None

    run(test, inline_us=1e6)


def test_nothing_is_answered_at_once_while_others_wait() -> None:
    async def test(batcher: Batcher, model: Slow) -> None:
        model.gated = False
        await batcher.submit(model, "class", rows(5))
        model.gated = True
        first = batcher.submit(model, "class", rows(1))
        await asyncio.to_thread(model.began.acquire)
        await began(model)
        assert batcher.at_once(model, "class", rows(5)) is None
        model.gate.release(9)
        await first

    run(test, inline_us=1e6)


class Slept(Slow):
    """Every run takes 30 ms, whatever its rows: company is worth waiting for."""

    def run(self, kind: str, rows: Any) -> Any:
        self.runs.append(len(rows))
        threading.Event().wait(0.03)
        return rows[:, 0].astype(np.int64)


@pytest.mark.parametrize(("delay_us", "together"), [(1e6, True), (0.0, False)])
def test_an_idle_engine_waits_for_company_as_long_as_that_saves(delay_us: float, together: bool) -> None:
    async def test(batcher: Batcher, _: Slow) -> None:
        model = Slept(on_cpu=False)
        for n in (1, 2, 4):
            await batcher.submit(model, "class", rows(*range(n)))
        model.runs.clear()
        first = batcher.submit(model, "class", rows(1))
        await asyncio.sleep(0.008)
        await asyncio.gather(first, batcher.submit(model, "class", rows(2)))
        assert model.runs == ([2] if together else [1, 1])

    run(test, max_delay_us=delay_us)


def test_a_full_batch_does_not_wait() -> None:
    async def test(batcher: Batcher, _: Slow) -> None:
        model = Slept(on_cpu=False)
        for n in (1, 2, 4):
            await batcher.submit(model, "class", rows(*range(n)))
        begin = asyncio.get_running_loop().time()
        await batcher.submit(model, "class", rows(*range(8)))
        assert asyncio.get_running_loop().time() - begin < 0.055  # the run's 30 ms; with a wait it would be 60

    run(test, max_delay_us=1e6)


def test_the_deadline_ends_the_wait() -> None:
    async def test(batcher: Batcher, _: Slow) -> None:
        model = Slept(on_cpu=False)
        for n in (1, 2, 4):
            await batcher.submit(model, "class", rows(*range(n)))
        assert (await asyncio.wait_for(batcher.submit(model, "class", rows(7)), 5)).tolist() == [7]

    run(test, max_delay_us=1e4)


def test_the_cost_of_a_run_is_learnt_and_forgotten() -> None:
    cost = Cost()
    assert (cost.fixed, cost.of(10)) == (0.0, 0.0)
    cost.learn(10, 1e-3)
    assert cost.fixed == 0.0
    assert cost.of(20) == pytest.approx(2e-3)
    for n in (1, 5, 100):
        cost.learn(n, 1e-4 + n * 1e-6)
    for _ in range(400):
        for n in (1, 100):
            cost.learn(n, 5e-4 + n * 1e-7)
    assert cost.fixed == pytest.approx(5e-4, rel=0.02)
    assert cost.of(100) == pytest.approx(5.1e-4, rel=0.02)
