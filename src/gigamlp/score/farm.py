"""Several devices of one host, a process each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from gigamlp.errors import DeviceError, GigaMLPError, InvalidInput
from gigamlp.score.blocks import Shape
from gigamlp.score.parts import Job, Part, Result, Worker, shared

__all__ = ["Farm", "find_devices"]

_AHEAD = 2  # parts that wait at each device, so that none rests


def find_devices(named: Sequence[str]) -> list[str]:
    """Return the devices that ``--devices`` means.

    Parameters
    ----------
    named : sequence of str
        ``("all",)`` for every GPU, or devices by name. ``cpu`` may be named several times: a process each.

    Raises
    ------
    DeviceError
        If ``all`` finds no GPU.
    InvalidInput
        If CPUs and GPUs are mixed, or a GPU is named twice.

    Examples
    --------
    >>> find_devices(["cpu", "cpu"])
    ['cpu', 'cpu']
    """
    if list(named) == ["all"]:
        from gigamlp.measure.telemetry import resolve_device

        resolve_device("cuda")  # an error that says why there is none
        import torch

        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    found = ["cuda:0" if each == "cuda" else each for each in named]
    for each in found:
        kind, _, number = each.partition(":")
        if kind not in ("cpu", "cuda") or (kind == "cpu" and number) or (kind == "cuda" and not number.isdecimal()):
            raise InvalidInput(f"unknown device {each!r}; name cpu or cuda:N, or all for every GPU")
    if not found or len({each.partition(":")[0] for each in found}) > 1:
        raise InvalidInput("name devices of one kind: several cuda:N, or cpu once for each process")
    twice = [each for each in found if each != "cpu" and found.count(each) > 1]
    if twice:
        raise InvalidInput(f"{twice[0]} is named twice; a second process there would only share its time")
    return found


_worker: Worker | GigaMLPError | None = None  # of a process that `Farm` started, or why there is none


def _start(job: Job) -> None:
    global _worker  # noqa: PLW0603  (what a pool's tasks find is what its initializer left)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:  # a parent that was killed says nothing
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
    try:
        _worker = Worker(job)
    except GigaMLPError as error:
        _worker = error  # an initializer cannot raise it to the caller; the first task does


def _working() -> Worker:
    if isinstance(_worker, GigaMLPError):
        raise _worker
    assert _worker is not None
    return _worker


def _told() -> tuple[str, str]:
    return _working().told()


def _run(part: Part, shape: Shape) -> Result:
    return _working().run(part, shape)


class Farm(ExitStack):
    """A process for each device.

    Parameters
    ----------
    job : Job
    devices : sequence of str
        See `find_devices`.
    """

    def __init__(self, job: Job, devices: Sequence[str]) -> None:
        super().__init__()
        job = job if devices[0] != "cpu" else shared(job)
        self.size, self.threads = len(devices), job.options["threads"]
        self._pools: list[ProcessPoolExecutor] = []
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        for device in devices:
            own = replace(job, options={**job.options, "device": device})
            pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=(own,))
            self.callback(pool.shutdown, wait=True, cancel_futures=True)
            self._pools.append(pool)

    def told(self) -> tuple[str, str]:
        """Return the device and the engines that run, as the manifest names them."""
        found = [_submit(pool, _told) for pool in self._pools]  # all start at once
        told: list[tuple[str, str]] = [_result(each) for each in found]
        kinds = {(device.partition(":")[0], engines) for device, engines in told}
        if len(kinds) > 1:
            raise DeviceError(f"the devices would run different engines: {sorted(kinds)}; name one with --engine")
        return told[0]

    def run(self, parts: Iterator[Part], shape: Shape) -> Iterator[Result]:
        """Yield the results in the order of the parts; a device that is free takes the next part."""
        waiting: deque[Future[Result]] = deque()
        load: list[list[Future[Result]]] = [[] for _ in self._pools]
        for part in parts:
            for each in load:
                each[:] = [future for future in each if not future.done()]
            free = min(range(self.size), key=lambda index: len(load[index]))
            future = _submit(self._pools[free], _run, part, shape)
            load[free].append(future)
            waiting.append(future)
            while waiting and (len(waiting) >= _AHEAD * self.size or waiting[0].done()):
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())


def _submit(pool: ProcessPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    try:
        return pool.submit(work, *arguments)
    except BrokenProcessPool as error:
        raise _lost() from error


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _lost() from error


def _lost() -> DeviceError:
    return DeviceError(
        "a worker process ended: killed, or out of memory. In a script, call score() below "
        "`if __name__ == '__main__':`. What was answered is kept; --resume goes on"
    )
