"""Several processes that share one socket: for models on the CPU, where one interpreter is the limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

from gigamlp.errors import InvalidInput
from gigamlp.measure.cpuinfo import usable_cpus
from gigamlp.serve.logs import event, set_up
from gigamlp.serve.metrics import forget_process
from gigamlp.serve.repository import Repository
from gigamlp.serve.settings import Settings

__all__ = ["supervise", "worker_settings"]

_START_S = 60.0
_PAUSE_S = 1.0  # between the end of a worker and the next one, so that one that cannot live does not take the machine
_SPAWN = multiprocessing.get_context("spawn")  # a forked child inherits locks, threads and a CUDA context that is dead


@dataclass(frozen=True)
class _Worker:
    process: Any
    pipe: Pipe  # says "ready"; its other end tells the worker that its parent lives


def worker_settings(settings: Settings) -> Settings:
    """Return what each of the processes is told: the engine's threads and the limits are shared out.

    Examples
    --------
    >>> one = worker_settings(Settings(models=("mnist-40",), workers=2, threads=4, max_queue_rows=200_000))
    >>> one.threads, one.max_queue_rows, one.workers
    (4, 100000, 1)
    """
    n = settings.workers
    return replace(
        settings,
        workers=1,
        threads=settings.threads or max(1, usable_cpus() // n),
        max_queue_rows=max(settings.max_rows, settings.max_queue_rows // n),
        max_bodies_bytes=max(settings.max_body_bytes, settings.max_bodies_bytes // n),
    )


def supervise(settings: Settings, models: Repository, sock: socket.socket) -> None:
    """Start the workers, replace those that end, and end them all at SIGTERM or SIGINT.

    Parameters
    ----------
    settings : Settings
    models : Repository
        Loaded once, to see that it can be; it is closed.
    sock : socket
        Listening; this process keeps it only for workers to come.

    Raises
    ------
    InvalidInput
        If a model runs on a GPU, or a worker does not start.
    """
    on_gpu = [served.name for served in models if not served.on_cpu]
    models.close()
    if on_gpu:
        raise InvalidInput(
            f"{on_gpu[0]!r} runs on a GPU, which one process owns: leave out --workers, or give --device cpu"
        )
    stop, notify = os.pipe()
    os.set_blocking(notify, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(notify, b"."))
    own = worker_settings(settings)
    with tempfile.TemporaryDirectory(prefix="gigamlp-metrics-") as folder:
        workers: list[_Worker] = []
        try:
            workers += [_start(own, sock, folder) for _ in range(settings.workers)]
            for worker in workers:
                if not worker.pipe.poll(_START_S) or not _said_ready(worker):
                    raise InvalidInput("a worker process did not start; its log, above, says why")
            event("listening", workers=[worker.process.pid for worker in workers])
            _watch(workers, stop, own, sock, folder)
        finally:
            sock.close()
            _end(workers, settings)
            os.close(stop)
            os.close(notify)


def _start(settings: Settings, sock: socket.socket, folder: str) -> _Worker:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_work, args=(settings, sock, folder, theirs), name="gigamlp-worker", daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _said_ready(worker: _Worker) -> bool:
    try:
        return bool(worker.pipe.recv() == "ready")
    except EOFError:
        return False


def _watch(workers: list[_Worker], stop: int, settings: Settings, sock: socket.socket, folder: str) -> None:
    """Replace workers that end, until something can be read from `stop`."""
    pause = threading.Event()
    while True:
        happened = wait([stop, *(worker.process.sentinel for worker in workers)])
        if stop in happened:
            return
        for worker in [each for each in workers if each.process.sentinel in happened]:
            worker.process.join()
            event("worker ended", level="error", worker=worker.process.pid, exit_code=worker.process.exitcode)
            forget_process(folder, worker.process.pid)
            worker.pipe.close()
            workers.remove(worker)
            pause.wait(_PAUSE_S)
            workers.append(_start(settings, sock, folder))


def _end(workers: list[_Worker], settings: Settings) -> None:
    for worker in workers:
        if worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGTERM)
    for worker in workers:
        worker.process.join(settings.linger_s + settings.grace_s + 5)
        if worker.process.is_alive():
            event("worker killed", level="error", worker=worker.process.pid)
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()
    event("ended")


def _work(settings: Settings, sock: socket.socket, folder: str, pipe: Pipe) -> None:
    """Be a worker."""
    from gigamlp.serve.app import create_app
    from gigamlp.serve.metrics import Metrics
    from gigamlp.serve.run import Server, run

    set_up()
    models = Repository(settings)
    models.load()
    server = Server(create_app(settings, models, Metrics(folder)), lambda: pipe.send("ready"))

    def until_parent_ends() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            server.should_exit = True

    threading.Thread(target=until_parent_ends, name="gigamlp-parent", daemon=True).start()
    sock.setblocking(False)
    run(server, sock)
