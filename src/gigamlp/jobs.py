"""Jobs: (MLP, Spec, engine, variant, residence) timed side by side, each one a row of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Cascade, Model
from gigamlp.engines.base import Runner
from gigamlp.engines.cascades import CascadeRunner, for_model, joined
from gigamlp.engines.registry import engine as get_engine
from gigamlp.errors import InvalidInput, MeasurementError
from gigamlp.integer import RANGES
from gigamlp.measure.clock import Clock
from gigamlp.measure.roofline import Roofs
from gigamlp.measure.stats import summarise
from gigamlp.measure.timing import Throughput, latency, split, throughput
from gigamlp.record import RESIDENCES, Row
from gigamlp.spec import Spec, Variant
from gigamlp.trial import accuracy_of, answer_bytes, fill, launch, launch_cold, row_bytes

__all__ = ["Job", "Measured", "measure_jobs"]

Array = NDArray[Any]
Work = Callable[[], object]
BUILDS = 3


@dataclass(frozen=True)
class Job:
    """One thing to time.

    Attributes
    ----------
    mlp : MLP or Cascade
        Its name becomes the row's.
    spec : Spec
    engine : str
    variant : Variant
    residence : {"hot", "cold", "host-pinned", "host-pageable"}
    """

    mlp: Model
    spec: Spec
    engine: str
    variant: Variant
    residence: str = "hot"

    def __post_init__(self) -> None:
        if self.residence not in RESIDENCES or self.residence == "mmap":
            raise InvalidInput(f"residence must be hot, cold, host-pinned or host-pageable; got {self.residence!r}")
        if self.residence == "host-pinned" and not self.spec.is_cuda:
            raise InvalidInput("host-pinned rows need a CUDA device; on a CPU use hot, cold or host-pageable")

    @property
    def key(self) -> str:
        """A name for tables and dictionaries, unique among jobs that differ."""
        s = self.spec
        return f"{self.mlp.name} {self.engine} {self.variant.label} {s.label} {self.residence}"


@dataclass(frozen=True)
class Measured:
    """The rows of some jobs, in their order, and the latency samples (us) behind each row's percentiles."""

    rows: list[Row]
    latency_samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class _Bench:
    """A built job: its work, and the copies around it where the rows come from the host."""

    job: Job
    runner: Runner
    accuracy: float | None
    work: Work
    in_cache: bool
    h2d: Work | None = None
    d2h: Work | None = None


def measure_jobs(
    jobs: Sequence[Job],
    x: Array,
    targets: Array | None,
    clock: Clock,
    roofs: Roofs | None,
    *,
    repeats: int = 7,
    min_s: float = 0.05,
    latency_calls: int = 1000,
    cache_bytes: int = 0,
) -> Measured:
    """Time `jobs` in interleaved rounds and return a row for each.

    On CUDA a job whose rows fit the cache is built three times, and its row is the median of the three: where buffers
    happen to lie moves such a run by up to 10 % from one build to the next (784-512-10 at 1,024 rows on the H200: 9.7
    and 11.0 us in one process, each within 0.1 % of itself).

    Parameters
    ----------
    jobs : sequence of Job
        All for the clock's device.
    x : ndarray [n, features]
        The rows that the runners are fed with; the accuracy is that of the runners' own answers for all of them.
    targets : ndarray of int64 [n] or None
        True class indices; without them a row has no accuracy.
    clock : Clock
    roofs : Roofs or None
        The measured limits; without them a row has no roof share.
    repeats, min_s, latency_calls
        See `gigamlp.measure.timing`.
    cache_bytes : int
        Size of the last-level cache; cold inputs rotate over more than 3x that.

    Raises
    ------
    Unsupported
        If an engine cannot run a job.
    MeasurementError
        If a runner fails while it is timed.
    """
    with ExitStack() as stack:
        benches = [_prepare(job, x, targets, cache_bytes, stack) for job in jobs]
        works = {f"{i}.0": bench.work for i, bench in enumerate(benches)}
        for i, bench in enumerate(benches):
            if bench.job.spec.is_cuda and bench.in_cache and bench.job.residence == "hot":
                for build in range(1, BUILDS):
                    again = _prepare(bench.job, x, None, cache_bytes, stack)
                    works[f"{i}.{build}"] = again.work
        times = throughput(works, clock, repeats=repeats, min_s=min_s)
        rows, samples = [], {}
        for i, bench in enumerate(benches):
            found = [result for key, result in times.items() if key.partition(".")[0] == str(i)]
            row, taken = _row(bench, _typical(bench.job, found), clock, roofs, latency_calls)
            rows.append(row)
            samples[bench.job.key] = taken
        return Measured(rows, samples)


def _typical(job: Job, builds: Sequence[Throughput | Exception]) -> Throughput:
    """Return the median over the builds of a job; its range is the wider of that within and that between builds."""
    for result in builds:
        if not isinstance(result, Throughput):
            raise MeasurementError(f"{job.key} failed while it was timed: {result}") from result
    good = [result for result in builds if isinstance(result, Throughput)]
    wall = summarise(result.wall_us for result in good)
    middle = min(good, key=lambda result: abs(result.wall_us - wall.median))
    return replace(middle, wall_us=wall.median, iqr=max(wall.iqr, summarise(r.iqr for r in good).median))


def _prepare(job: Job, x: Array, targets: Array | None, cache_bytes: int, stack: ExitStack) -> _Bench:
    runner = for_model(get_engine(job.engine), job.mlp).build(job.mlp, job.spec, job.variant)
    stack.callback(runner.close)
    accuracy = None if targets is None else accuracy_of(job.mlp, runner, x, targets)
    own = row_bytes(job.mlp, job.spec) * job.spec.batch
    fill(runner, x[: job.spec.batch])
    if job.residence == "hot":
        return _Bench(job, runner, accuracy, launch(runner), in_cache=own <= cache_bytes)
    if job.residence == "cold":
        work = launch_cold(job.mlp, runner, x[: job.spec.batch], cache_bytes)
        return _Bench(job, runner, accuracy, work, in_cache=False)
    h2d, d2h = _host_copies(job, runner)

    def from_host() -> None:
        h2d()
        runner.run(runner.input)
        d2h()

    return _Bench(job, runner, accuracy, from_host, in_cache=own <= cache_bytes, h2d=h2d, d2h=d2h)


def _host_copies(job: Job, runner: Runner) -> tuple[Work, Work]:
    """Return copies of the rows from host memory into the runner's input, and of its answers back."""
    if isinstance(runner.input, np.ndarray):
        source, answer = runner.input.copy(), runner.run(runner.input)
        outs = [np.empty_like(part) for part in (answer if isinstance(answer, tuple) else (answer,))]

        def in_numpy() -> None:
            np.copyto(runner.input, source)

        def out_numpy() -> None:
            for out, part in zip(outs, answer if isinstance(answer, tuple) else (answer,), strict=True):
                np.copyto(out, part)

        return in_numpy, out_numpy
    import torch

    pinned = job.residence == "host-pinned"
    source_t = runner.input.cpu().clone()
    y = runner.run(runner.input)
    parts = y if isinstance(y, tuple) else (y,)
    outs_t = [torch.empty(part.shape, dtype=part.dtype) for part in parts]
    if pinned:
        source_t, outs_t = source_t.pin_memory(), [out.pin_memory() for out in outs_t]
    result = list(parts)

    def h2d() -> None:
        runner.input.copy_(source_t, non_blocking=pinned)

    def d2h() -> None:
        for out, part in zip(outs_t, result, strict=True):
            out.copy_(part, non_blocking=pinned)

    return h2d, d2h


def _row(bench: _Bench, times: Throughput, clock: Clock, roofs: Roofs | None, calls: int) -> tuple[Row, list[float]]:
    from gigamlp.measure.telemetry import snapshot

    job, spec, mlp = bench.job, bench.job.spec, bench.job.mlp
    p = latency(bench.work, clock, calls=calls, budget_s=1.0)
    clock_mhz = snapshot(spec.device).get("clock_mhz")
    row = Row(
        name=mlp.name,
        engine=job.engine,
        variant=job.variant.label,
        scheme=_scheme(job),
        hidden=list(mlp.hidden),
        features_read_bytes=row_bytes(mlp, spec),
        batch=spec.batch,
        threads=_threads(job),
        residence=job.residence,
        input_dtype=spec.input_dtype,
        output=spec.output,
        samples_per_s=spec.batch / times.wall_us * 1e6,
        wall_us=times.wall_us,
        device_us=times.device_us,
        iqr=times.iqr,
        p50_us=p.p50_us,
        p99_us=p.p99_us,
        accuracy=bench.accuracy,
        roof_share=_roof_share(bench, times, roofs),
        clock_mhz=None if clock_mhz is None else float(clock_mhz),
        note=_note(bench, times),
    )
    if bench.h2d is not None and bench.d2h is not None and spec.is_cuda:
        parts = split(bench.h2d, launch(bench.runner), bench.d2h, clock)
        row = replace(
            row, h2d_us=parts.h2d_us, d2h_us=parts.d2h_us, enqueue_us=parts.enqueue_us, device_us=parts.device_us
        )
    elif spec.is_cuda:
        row = replace(row, enqueue_us=split(None, bench.work, None, clock).enqueue_us)
    return row, list(p.samples)


def _note(bench: _Bench, times: Throughput) -> str | None:
    parts = [] if times.repeats >= 5 else [f"only {times.repeats} repeats"]
    if isinstance(bench.job.mlp, Cascade):  # its speed is that for these rows
        before = cast("CascadeRunner", bench.runner).totals
        bench.runner.run(bench.runner.input)
        rows, *went_on = (b - a for a, b in zip(before, cast("CascadeRunner", bench.runner).totals, strict=True))
        parts.append("unsure: " + ", ".join(f"{count / rows:.2%}" for count in went_on))
    return "; ".join(parts) or None


def _scheme(job: Job) -> str | None:
    """Return the scheme that a row was computed in. Float engines run a model that carries one in float."""
    named, compute = job.variant.get("scheme"), job.variant.get("compute")
    if named is not None:
        return None if named == "float32" else str(named)
    schemes = [s.scheme for s in job.mlp.stages] if isinstance(job.mlp, Cascade) else [job.mlp.scheme]
    own = joined(["w8" if scheme is None else scheme.name for scheme in schemes])
    if compute is not None:
        return own if compute == "int8" and job.variant.get("hidden") != "bound" else None
    return own if job.spec.input_dtype in RANGES and get_engine(job.engine).integer else None


def _threads(job: Job) -> int | None:
    """CPU threads of a row: as asked for or as the variant says, else torch's own count for a torch engine."""
    if job.spec.is_cuda or job.spec.threads is not None:
        return job.spec.threads
    if job.variant.get("threads") is not None:
        return int(job.variant.get("threads"))
    if not job.engine.startswith("torch"):
        return None
    import torch

    return int(torch.get_num_threads())


def _roof_share(bench: _Bench, times: Throughput, roofs: Roofs | None) -> float | None:
    """Share of the least time that this machine's measured limits allow for the bytes and operations of the job."""
    if roofs is None or isinstance(bench.job.mlp, Cascade):  # what a cascade has to do depends on the rows
        return None
    job, spec = bench.job, bench.job.spec
    moved = row_bytes(job.mlp, spec) * spec.batch + answer_bytes(bench.runner)
    own = "int8" if get_engine(job.engine).integer else spec.input_dtype
    if job.variant.get("scheme") == "float32":  # an engine of integers may run float weights too
        own = "float32"
    compute = str(job.variant.get("compute") or own)
    floor = roofs.floor_seconds(moved, job.mlp.macs * spec.batch, compute, in_cache=bench.in_cache)
    link = roofs.h2d_pinned_bytes_s  # the wire's limit for pageable rows too: small ones are staged by the driver
    if spec.is_cuda and job.residence.startswith("host") and link is not None:
        floor = max(floor or 0.0, row_bytes(job.mlp, spec) * spec.batch / link)
    return None if not floor else floor / (times.wall_us * 1e-6)
