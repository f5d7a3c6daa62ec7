"""Rows in host memory to answers in host memory: the fused kernel on mapped memory, beside copies, and the CPU engines.

    python benchmarks/host_rows.py --out records/host-rows.json [--device cpu]

For each number of rows, p50 and p99 of single calls (2,000 of them), each from a pageable NumPy array to a NumPy array
of class ids or, for one row, an int:

- ``Session.predict`` of the fused engine, staged: rows and answers copied through pinned memory, then waited for
- ``Session.predict`` of a Plan that `gigamlp.optimize` measured for host rows on the CPU and the GPU
- the mapped runner, whose kernel reads the rows from host memory, as it is (it looks for its packets), and waiting for
  its stream instead; rows in cached and in write-combined memory
- every CPU engine's first variant, at this batch

Then what a launch costs by every way to make one, and what overlapping launches change back to back. Every contender's
answers must be the integer reference's (the CPU's float engines': the float32 model's); the exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import gigamlp as gm
from gigamlp.engines.registry import engine as get_engine
from gigamlp.engines.registry import engine_names
from gigamlp.errors import GigaMLPError
from gigamlp.measure.clock import HostClock, clock_for
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.measure.timing import Throughput, latency, throughput
from gigamlp.quantize import integer_form
from gigamlp.record import Record, Row
from gigamlp.spec import Spec, Variant
from gigamlp.trial import fill

REFERENCE = Path(__file__).parent.parent / "tests" / "data_files" / "reference_int8.npz"
FUSED = "cuda_fused"


def reference(hidden: int) -> gm.MLP:
    """The int8 reference network of that width."""
    with np.load(REFERENCE) as data:
        q, s, b1, w2, b2 = (data[f"h{hidden}.{key}"] for key in ("q", "s", "b1", "W2", "b2"))
    layers = [gm.Layer(q.T * s[:, None], b1, "relu"), gm.Layer(w2.T, b2)]
    scheme = gm.Scheme("w8", {"codes.0": q.T, "scale.0": s})
    return gm.MLP(layers, features=784, scheme=scheme, name=f"784-{hidden}-10")


@dataclass
class Report:
    """What was measured and what was wrong with it."""

    mlp: gm.MLP
    device: str
    calls: int
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(  # noqa: PLR0917
        self, engine: str, variant: str, batch: int, note: str, work: Callable[[], object], want: Any
    ) -> None:
        """Check what `work` answers, then time it."""
        label = f"{engine:<12} {batch:5,} rows  {note}"
        try:
            for _ in range(3):
                ids = np.atleast_1d(np.asarray(work()))
                if not np.array_equal(ids, want):
                    self.wrong.append(f"{label}: {int((ids != want).sum())} of {batch} answers are wrong")
                    break
            took = latency(work, HostClock(), calls=self.calls, warmup=200, budget_s=1.5)
        except GigaMLPError as error:
            self.wrong.append(f"{label}: {type(error).__name__}: {error}")
            return
        print(f"{label:<72} p50 {took.p50_us:9.2f} us  p99 {took.p99_us:9.2f} us  ({took.calls} calls)", flush=True)
        self.rows.append(
            Row(
                name=self.mlp.name,
                engine=engine,
                variant=variant,
                scheme="w8",
                hidden=list(self.mlp.hidden),
                features_read_bytes=self.mlp.features_read,
                batch=batch,
                residence="host-pageable",
                input_dtype="uint8",
                output="class",
                samples_per_s=batch / took.p50_us * 1e6,
                p50_us=took.p50_us,
                p99_us=took.p99_us,
                clock_mhz=snapshot(self.device).get("clock_mhz"),
                note=note,
            )
        )


def inputs(mlp: gm.MLP, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows whose class is beyond doubt, and their class ids by the integer reference and by the float32 model."""
    x = np.random.default_rng(batch).integers(0, 256, (4 * batch + 64, mlp.features), dtype=np.uint8)
    logits = integer_form(mlp, "uint8").reference_logits(x)
    top = np.sort(logits, axis=1)
    x = np.ascontiguousarray(x[np.argsort(top[:, -2] - top[:, -1], kind="stable")[:batch]])
    return x, mlp.class_ids(integer_form(mlp, "uint8").reference_logits(x)), mlp.class_ids(mlp.logits(x))


def cpu_engines(report: Report, batch: int) -> None:
    """Every engine that runs on the CPU here, its first variant."""
    mlp = report.mlp
    x, ids, plain = inputs(mlp, batch)
    for name in engine_names():
        engine = get_engine(name)
        if engine.compiles or engine.unavailable("cpu") is not None:
            continue
        try:
            variant = engine.variants(mlp, Spec("cpu", batch))[0]
        except GigaMLPError:
            continue
        runner = engine.build(mlp, Spec("cpu", batch), variant)
        rows: Any = x
        if not isinstance(runner.input, np.ndarray):
            import torch

            rows = torch.from_numpy(x)
        run = runner.run

        def work(run: Any = run, rows: Any = rows) -> Any:
            return run(rows)

        report.add(name, variant.label, batch, f"on the CPU, {variant.label}", work, ids if engine.integer else plain)
        runner.close()


def mapped(report: Report, batch: int) -> None:
    """The runner whose kernel reads host memory, every variant that the tuner would try."""
    mlp = report.mlp
    x, ids, _ = inputs(mlp, batch)
    engine = get_engine(FUSED)
    for variant in engine.variants(mlp, Spec(report.device, batch, input_on="host")):
        runner: Any = engine.build(mlp, Spec(report.device, batch, input_on="host"), variant)
        short = f"{variant.get('path')}-t{variant.get('tiles')}w{variant.get('warps')}, {variant.get('memory')}"
        if batch == 1:
            row, one = x[0], runner.one_id
            report.add(FUSED, variant.label, 1, f"mapped, one row, {short}", lambda: one(row), ids)  # noqa: B023
        run = runner.run
        report.add(FUSED, variant.label, batch, f"mapped, {short}", lambda: run(x), ids)  # noqa: B023
        wait = waiting(runner, x)
        report.add(FUSED, variant.label, batch, f"mapped, stream synchronised, {short}", wait, ids)
        runner.close()


def waiting(runner: Any, x: np.ndarray) -> Callable[[], Any]:
    """The same run with cuStreamSynchronize in the place of looking."""
    from cuda.bindings import driver

    stream, synchronize = driver.CUstream(runner.stream), driver.cuStreamSynchronize

    def work() -> Any:
        rows = runner._place(x)
        runner._start(rows)
        synchronize(stream)
        return runner._answers(rows)

    return work


def sessions(report: Report, batches: list[int]) -> gm.Plan:
    """Sessions: staged copies, and a Plan for host rows."""
    mlp, device = report.mlp, report.device
    x, _, _ = inputs(mlp, max(batches))
    # with a budget: torch_compile takes a minute to compile, and no small batch of host rows is quickest by it
    plan = gm.optimize(
        mlp, "auto", batches, input_on="host", validation=(x, None), max_disagreement=0.02, budget_s=30.0
    )
    print(plan.explain(), flush=True)
    for batch in batches:
        x, ids, _ = inputs(mlp, batch)
        with gm.Session(mlp, device=device, engine=FUSED, batch=batch) as staged:
            report.add(FUSED, "", batch, "Session, staged copies", lambda: staged.class_ids(x), ids)  # noqa: B023
        with gm.Session(mlp, plan) as planned:
            words = "Session, " + planned.explain(batch, input_on="host").splitlines()[-1].strip().partition(",")[0]
            report.add("plan", "", batch, words, lambda: planned.class_ids(x), ids)  # noqa: B023
            if batch == 1:
                report.add("plan", "", 1, "Session.predict_one", lambda: planned.predict_one(x[0]), ids)  # noqa: B023
    return plan


def launches(report: Report) -> dict[str, float]:
    """p50 of what a launch of the mapped kernel for one row costs the host, and until it is done, by every way."""
    from cuda.bindings import driver

    from gigamlp.kernels.cuda.launch import Graph, Launch
    from gigamlp.kernels.cuda.quick import QuickLaunch, entry

    engine, found = get_engine(FUSED), {}
    runner: Any = engine.build(report.mlp, Spec(report.device, 1, input_on="host"))
    own, stream = runner._launch, runner.stream
    plain = Launch(own.kernel, own.grid, own.block, own.arguments)
    graph = Graph([plain])
    replay = entry("cuGraphLaunch", 10000)
    handle, to = ctypes.c_void_p(int(graph._exec)), ctypes.c_void_p(stream)
    quick = QuickLaunch(own.kernel, own.grid, own.block, own.arguments)
    held = QuickLaunch(own.kernel, own.grid, own.block, own.arguments, hold=True)
    ways: dict[str, Callable[[], object]] = {
        "cuda-bindings cuLaunchKernel": lambda: plain(stream),
        "cuda-bindings cuGraphLaunch": lambda: graph(stream),
        "ctypes cuLaunchKernelEx": lambda: quick(stream),
        "ctypes cuLaunchKernelEx, Python's lock held": lambda: held(stream),
        "ctypes cuGraphLaunch": lambda: replay(handle, to),
    }
    waited = driver.CUstream(stream)
    for name, way in ways.items():

        def whole(way: Callable[[], object] = way) -> None:
            way()
            driver.cuStreamSynchronize(waited)

        done = latency(whole, HostClock(), calls=report.calls, warmup=200, budget_s=1.0)
        taken = []
        for _ in range(report.calls):
            begin = HostClock.now()
            way()
            taken.append((HostClock.now() - begin) * 1e6)
            driver.cuStreamSynchronize(waited)
        found[f"{name}: enqueue"] = float(np.median(taken))
        found[f"{name}: until synchronised"] = done.p50_us
        print(
            f"    {name:<48} enqueue {np.median(taken):6.2f} us, until synchronised {done.p50_us:6.2f} us", flush=True
        )
    graph.close()
    runner.close()
    return found


def overlap(report: Report) -> list[Row]:
    """Back-to-back launches on the static input, the most promising form of each batch: plain, graph, overlapping."""
    engine, mlp, out = get_engine(FUSED), report.mlp, []
    for batch in (1, 1024, 10_000, 65_536, 1 << 21):
        spec = Spec(report.device, batch)
        found = [v for v in engine.variants(mlp, spec) if v.get("overlap")]
        with ExitStack() as stack:
            work: dict[str, Callable[[], object]] = {}
            forms: dict[str, Variant] = {}
            for laps in found[:1]:
                options = laps.to_json()
                x = np.random.default_rng(0).integers(0, 256, (min(batch, 4096), mlp.features), dtype=np.uint8)
                for name, change in (
                    ("plain", {"overlap": False}),
                    ("graph", {"overlap": False, "graph": True}),
                    ("overlap", {}),
                ):
                    forms[name] = Variant.from_json({**options, **change})
                    try:
                        runner = engine.build(mlp, spec, forms[name])
                    except GigaMLPError as error:  # large batches have no graph
                        print(f"    {batch:9,} rows  {name}: {error}"[:160])
                        continue
                    stack.callback(runner.close)
                    fill(runner, x)
                    work[name] = lambda runner=runner: runner.run(runner.input)
            for name, t in throughput(work, clock_for(report.device), repeats=9, min_s=0.05).items():
                if not isinstance(t, Throughput):
                    raise t
                speed = batch / t.wall_us
                print(
                    f"    {batch:9,} rows  {name:<8} {t.wall_us:9.3f} us  IQR {t.iqr:6.3f}  {speed:8,.0f} M/s",
                    flush=True,
                )
                out.append(
                    Row(
                        name=mlp.name,
                        engine=FUSED,
                        variant=forms[name].label,
                        scheme="w8",
                        hidden=list(mlp.hidden),
                        features_read_bytes=mlp.features_read,
                        batch=batch,
                        residence="hot",
                        input_dtype="uint8",
                        output="class",
                        samples_per_s=batch / t.wall_us * 1e6,
                        wall_us=t.wall_us,
                        device_us=t.device_us,
                        iqr=t.iqr,
                        note=f"back to back, {name}",
                    )
                )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu: the CPU engines only")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--hidden", type=int, default=40, choices=(40, 64, 128))
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(reference(args.hidden), resolve_device(args.device), args.calls)
    extra: dict[str, Any] = {}
    for batch in args.batch:
        cpu_engines(report, batch)
        if report.device != "cpu":
            mapped(report, batch)
    if report.device != "cpu":
        plan = sessions(report, args.batch)
        extra = {"plan": plan.to_json(), "launch_us": launches(report)}
        report.rows += overlap(report)
    extra["wrong"] = report.wrong
    if args.out is not None:
        command = " ".join(["python", *sys.argv])
        Record(device_info(report.device), versions(), command, report.rows, extra).save(args.out)
    for line in report.wrong:
        print(f"WRONG: {line}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
