"""Scoring on a Ray cluster, through Ray Data: tasks read, a pool of actors computes, the caller writes in order.

Only parts of inputs and answers travel by name; rows go from a reading task to an actor as Arrow batches in shared
memory, which the actor reads where they are. Where both stages ask for the same resources (CPU clusters), Ray runs them
in one process and rows do not travel at all.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gigamlp.errors import DeviceError, GigaMLPError
from gigamlp.measure.clock import HostClock
from gigamlp.score.blocks import Block, Shape
from gigamlp.score.parts import Job, Part, Result, Worker, read_part, shared, worker_threads

__all__ = ["RayCrew"]


class RayCrew(ExitStack):
    """Actors of a Ray cluster: one on each GPU, or one on each group of ``threads`` CPUs.

    Parameters
    ----------
    job : Job
        Its device may be ``auto``: GPUs if the cluster has any.
    address : str
        ``auto`` for the cluster that runs here, ``local`` to start one, else its address.

    Raises
    ------
    DeviceError
        If there is no such cluster, or it lacks what an actor needs.
    """

    def __init__(self, job: Job, address: str) -> None:
        super().__init__()
        import ray

        self._ray: Any = ray
        told = logging.getLogger("ray.data")  # a line for every run; the level is put back
        self.callback(told.setLevel, told.level)
        told.setLevel(logging.ERROR)
        if not ray.is_initialized():
            try:
                ray.init(
                    address=None if address == "local" else address,
                    log_to_driver=False,
                    include_dashboard=False if address == "local" else None,
                    logging_level="warning",
                )
            except ConnectionError as error:
                raise DeviceError(
                    f"no Ray cluster at {address!r}: {error}. Start one with `ray start --head`, or use --ray local"
                ) from error
            self.callback(ray.shutdown)
        total = ray.cluster_resources()
        device = job.options["device"]
        if device == "auto":
            device = "cuda" if total.get("GPU", 0) >= 1 else "cpu"
        gpu = device != "cpu"
        job = job if gpu else shared(job)
        self.threads, threads = job.options["threads"], worker_threads(job)
        self._needs: dict[str, float] = {"num_cpus": 1, "num_gpus": 1} if gpu else {"num_cpus": threads}
        own = "GPU" if gpu else "CPU"
        nodes = [node["Resources"].get(own, 0) for node in ray.nodes() if node["Alive"]]
        self.size = int(sum(n // (1 if gpu else threads) for n in nodes))
        if not self.size:
            need = "a GPU" if gpu else f"{threads} CPUs"
            raise DeviceError(f"no node of the Ray cluster has {need}: it has {total}")
        self._job = replace(job, options={**job.options, "device": "cuda:0" if gpu else "cpu"})

    def told(self) -> tuple[str, str]:
        """Return the device and the engines that run, as the manifest names them."""
        found: tuple[str, str] = self._get(self._ray.remote(_told).options(**self._needs).remote(self._job))
        return found

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise _ours(error) from error

    def run(self, parts: Iterator[Part], shape: Shape) -> Iterator[Result]:
        """Yield the results in the order of the parts."""
        from ray.data import ActorPoolStrategy, from_arrow

        named = [pa.table({"part": pa.array([pickle.dumps(part)], pa.large_binary())}) for part in parts]
        if not named:
            return
        whole = {"batch_format": "pyarrow", "batch_size": None, "zero_copy_batch": True}
        read = from_arrow(named).map_batches(
            _read,
            fn_args=(shape,),
            num_cpus=self._needs["num_cpus"] if "num_gpus" not in self._needs else 0.5,
            **whole,
        )
        pool = ActorPoolStrategy(min_size=1, max_size=self.size)
        answers = read.map_batches(_Actor, fn_constructor_args=(self._job,), compute=pool, **self._needs, **whole)
        answers.context.execution_options.preserve_order = True
        answers.context.enable_progress_bars = False
        try:
            for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for each in batch.column("result"):
                    yield pickle.loads(each.as_buffer())
        except self._ray.exceptions.RayError as error:
            raise _ours(error) from error


def _ours(error: BaseException) -> BaseException:
    """Return the error of gigamlp or of the system behind one of Ray, or Ray's own."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)
        for each in (seen, cause):
            if isinstance(each, GigaMLPError | OSError) and not type(each).__module__.startswith("ray"):
                return each
        seen = cause if isinstance(cause, BaseException) and cause is not seen else seen.__cause__
    return DeviceError(f"the Ray run ended: {error}; what was answered is kept, --resume goes on")


def _told(job: Job) -> tuple[str, str]:
    worker = Worker(job)
    try:
        return worker.told()
    finally:
        worker.close()


def _read(batch: pa.Table, shape: Shape) -> Iterator[pa.Table]:
    """Read parts: a row of the result is a block, its rows one buffer."""
    for each in batch.column("part"):
        begin = HostClock.now()
        for block in read_part(pickle.loads(each.as_py()), shape):
            x = np.ascontiguousarray(block.x)
            head = replace(block, x=np.empty((len(x), 0), x.dtype), release=None)
            offsets = pa.py_buffer(np.array([0, x.nbytes], np.int64))
            rows = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(x)])
            took = HostClock.now() - begin
            heads = pa.array([pickle.dumps((head, took))], pa.large_binary())
            yield pa.table({"head": heads, "x": rows})
            if block.release is not None:
                block.release()
            begin = HostClock.now()


class _Actor:
    """A Session on a node."""

    def __init__(self, job: Job) -> None:
        self._features = job.mlp.features
        self._worker = Worker(job)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Answer blocks."""
        made = []
        for head, rows in zip(batch.column("head"), batch.column("x"), strict=True):
            bare: Block
            bare, took = pickle.loads(head.as_py())
            x = np.frombuffer(rows.as_buffer(), bare.x.dtype).reshape(len(bare.x), self._features)
            begin = HostClock.now()
            done = self._worker.answer(replace(bare, x=x))
            made.append(pickle.dumps(Result([done], took, HostClock.now() - begin)))
        return pa.table({"result": pa.array(made, pa.large_binary())})
