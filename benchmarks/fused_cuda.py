"""The fused CUDA engine beside its peers: MNIST rows as raw uint8 in device memory, class ids out.

    python benchmarks/fused_cuda.py --out records/fused-cuda.json [--peers torch_graph,jax] [--cases NAME,…]

Every line of the table is one network and batch. For each, the fused engine's variants are tried and the best is timed
interleaved with the best variant of each peer: torch in a CUDA Graph, torch.compile in a CUDA Graph, XLA through JAX.
Rows are cold (they rotate over more than 3x the L2 cache) unless a line says hot; batch 1 and "one replay each" are
launches back to back with one synchronise at the end. Accuracies are those of the timed runner's own answers for the
10,000 test images. The weights are the int8 reference networks that the tests use (tests/data_files), for the line that
reads a window those of the shipped mnist-40-w384.

A row's roof is the least time that this machine allows for its launch, and its share of that is in `roof_share`: the
bytes it moves at the read bandwidth (rows that are hot in the cache are not bound by it), its multiply-accumulates at
the measured matrix rate, or one launch of an empty kernel, whichever is longest. The note names it and has the counts.

Lines of few hot rows are a matter of where buffers happen to lie and of the host's clock: each is built three times and
the median of the builds counts; batch 1 is visited three times in the course of the run besides, and the median visit
counts. Lines marked extra have no bar. Exit status: 0 only if every bar of the table was measured and met within 3 %.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fused_cases import CASES, OURS, Case, Work, explained, line, schedule, typical, verdict

import gigamlp as gm
from gigamlp.engines.probes import measure_roofs
from gigamlp.engines.registry import engine as get_engine
from gigamlp.errors import GigaMLPError
from gigamlp.folding import folded_layers
from gigamlp.jobs import Job, measure_jobs
from gigamlp.kernels.cuda.compile import architecture, compile_cubin
from gigamlp.kernels.cuda.driver import open_gpu
from gigamlp.kernels.cuda.launch import Graph, Kernel, Launch
from gigamlp.measure.clock import HostClock, clock_for
from gigamlp.measure.roofline import Roofs
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.measure.timing import Throughput, latency, rotating, throughput
from gigamlp.record import Record, Row
from gigamlp.spec import Spec
from gigamlp.trial import make_gate, run_rows
from gigamlp.tune import Effort, try_candidates

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "tests" / "data_files" / "reference_int8.npz"
WIDE = HERE / "data_files"  # reference_int8_256.npz and _512.npz: the wider networks of the same experiment
PEERS = "torch_graph,torch_compile,jax"


def reference(hidden: int, window: tuple[int, int] | None = None) -> gm.MLP:
    """The int8 reference network of that width; with a window, the shipped network that reads it."""
    if window is not None:
        mlp: gm.MLP = gm.load(f"mnist-{hidden}-w{window[1] - window[0]}")
        assert mlp.columns == (window,)
        return mlp
    with np.load(REFERENCE if hidden <= 128 else WIDE / f"reference_int8_{hidden}.npz") as data:
        q, s, b1, w2, b2 = (data[f"h{hidden}.{key}"] for key in ("q", "s", "b1", "W2", "b2"))
    return gm.MLP(
        [gm.Layer(q.T * s[:, None], b1, "relu"), gm.Layer(w2.T, b2)],
        features=784,
        scheme=gm.Scheme("w8", {"codes.0": q.T, "scale.0": s}),
        name=f"784-{hidden}-10",
    )


def best_variant(name: str, mlp: gm.MLP, spec: Spec, x: np.ndarray) -> Any:
    """The variant of an engine with the highest throughput here, or None. Of a compiling engine one is tried."""
    gate = make_gate(mlp, spec.input_dtype, (x[:2000], None), max_disagreement=0.02)
    effort = Effort(compile_top=1, latency_calls=5, latency_top=0, repeats=5)
    found = try_candidates(mlp, spec, gate, clock_for(spec.device), effort=effort, engines=[name])
    tried = [c for c in found if c.wall_us is not None or not str(c.rejected).startswith("not compiled")]
    for each in tried:
        speed = "" if each.wall_us is None else f"{each.wall_us:9.2f} us {spec.batch / each.wall_us:8.0f} M/s"
        print(f"    {name} {each.variant.label} {speed} {each.rejected or ''}", flush=True)
    usable = [c for c in found if c.rejected is None and c.wall_us is not None]
    return min(usable, key=lambda c: c.wall_us) if usable else None


def many_batches(case: Case, mlp: gm.MLP, x: np.ndarray, y: np.ndarray, roofs: Roofs) -> Row:
    """One launch over a table of batches; cold: several tables, together more than 3x the L2 cache."""
    spec = Spec("cuda:0", case.batch)
    clock = clock_for(spec.device)
    engine: Any = get_engine(OURS)
    tables = max(2, -(-3 * roofs.cache_bytes // (case.batches * case.batch * mlp.features)))
    work: dict[str, Callable[[], object]] = {}
    accuracy: dict[str, float] = {}
    for variant in engine.variants(mlp, spec):
        if variant.get("graph"):
            continue
        runner = engine.build(mlp, spec, variant)
        count = tables * case.batches
        rows = torch.from_numpy(np.resize(x, (count * case.batch, x.shape[1]))).to(spec.device)
        parts = rows.split(case.batch)
        many = [runner.bind_many(parts[i * case.batches : (i + 1) * case.batches]) for i in range(tables)]
        ids = np.concatenate([each.run().flatten().cpu().numpy() for each in many])
        accuracy[variant.label] = float(np.mean(ids[: len(y)] == y))
        work[variant.label] = rotating([each.run for each in many])
    times = throughput(work, clock, repeats=7, min_s=0.03)
    good = {k: t for k, t in times.items() if isinstance(t, Throughput)}
    best = min(good, key=lambda k: good[k].wall_us)
    for key, t in good.items():
        print(f"    {key} {t.wall_us:9.2f} us {case.batch * case.batches / t.wall_us:8.0f} M/s", flush=True)
    t, total = good[best], case.batch * case.batches
    p = latency(work[best], clock, calls=200, budget_s=0.5)
    return Row(
        name=case.name,
        engine=OURS,
        variant=best,
        scheme="w8",
        hidden=[case.hidden],
        features_read_bytes=mlp.features_read,
        batch=case.batch,
        batches_per_launch=case.batches,
        residence="cold",
        input_dtype="uint8",
        output="class",
        samples_per_s=total / t.wall_us * 1e6,
        wall_us=t.wall_us,
        device_us=t.device_us,
        iqr=t.iqr,
        p50_us=p.p50_us,
        p99_us=p.p99_us,
        accuracy=accuracy[best],
        clock_mhz=snapshot(spec.device).get("clock_mhz"),
    )


def jax_row(case: Case, mlp: gm.MLP, x: np.ndarray, y: np.ndarray) -> Row:
    """XLA: uint8 rows to class ids, float rows (in bfloat16) to logits; products in bfloat16, jitted for the shape."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes three quarters of the memory
    import jax
    import jax.numpy as jnp

    floats = case.input_dtype != "uint8"
    weights = [(jnp.asarray(weight, jnp.bfloat16), jnp.asarray(bias)) for weight, bias, _ in folded_layers(mlp)]

    @jax.jit
    def classes(rows: Any) -> Any:
        h = rows[:, start:stop].astype(jnp.bfloat16)
        for index, (weight, bias) in enumerate(weights):
            z = jnp.dot(h, weight, preferred_element_type=jnp.float32) + bias
            h = jnp.maximum(z, 0).astype(jnp.bfloat16) if index + 1 < len(weights) else z
        return h if floats else jnp.argmax(h, axis=1).astype(jnp.uint8)

    start, stop = case.window or (0, mlp.features)
    blocks = [
        np.resize(x[begin : begin + case.batch], (case.batch, x.shape[1])) for begin in range(0, len(x), case.batch)
    ]
    given = [jnp.asarray(block, jnp.bfloat16 if floats else jnp.uint8) for block in blocks]
    answers = np.concatenate([np.asarray(classes(block)) for block in given])[: len(y)]
    ids = answers.argmax(axis=1) if floats else answers
    rows = given[0]
    clock = clock_for("cuda:0")
    t = throughput({"jax": lambda: classes(rows)}, clock, repeats=7, min_s=0.05)["jax"]
    if not isinstance(t, Throughput):
        raise t
    p = latency(lambda: classes(rows), clock, calls=200, budget_s=0.5)
    return Row(
        name=case.name,
        engine="jax",
        variant="jit compute=bfloat16",
        hidden=[case.hidden],
        features_read_bytes=mlp.features_read * (2 if floats else 1),
        batch=case.batch,
        residence=case.residence,
        input_dtype="bfloat16" if floats else "uint8",
        output="logits" if floats else "class",
        samples_per_s=case.batch / t.wall_us * 1e6,
        wall_us=t.wall_us,
        iqr=t.iqr,
        p50_us=p.p50_us,
        p99_us=p.p99_us,
        accuracy=float(np.mean(ids == y)),
        clock_mhz=snapshot("cuda:0").get("clock_mhz"),
        note=f"jax {jax.__version__}",
    )


def measure(
    case: Case, peers: Sequence[str], data: tuple[np.ndarray, np.ndarray], roofs: Roofs, skipped: list[str]
) -> list[Row]:
    """One visit of a case: ours and the peers, interleaved. What a peer cannot do is printed and kept in `skipped`."""
    x, y = data
    mlp = reference(case.hidden, case.window).with_(name=case.name)
    if case.batches > 1:
        return [many_batches(case, mlp, x, y, roofs)]
    spec, jobs = Spec("cuda:0", case.batch, case.input_dtype), []
    for name in [OURS, *(p for p in peers if p != "jax")]:
        try:
            best = best_variant(name, mlp, spec, x)
        except GigaMLPError as error:
            best, why = None, str(error)
        else:
            why = "no variant could be timed"
        if best is None:
            skipped.append(f"{case.name}: {name}: {why}")
            print(f"    {skipped[-1]}", flush=True)
            continue
        jobs.append(Job(mlp, spec, name, best.variant, case.residence))
    rows = measure_jobs(jobs, x, y, clock_for("cuda:0"), roofs, repeats=7, cache_bytes=roofs.cache_bytes).rows
    if "jax" in peers and case.least is not None:
        try:
            rows.append(jax_row(case, mlp, x, y))
        except Exception as error:  # noqa: BLE001  jax may be missing, or refuse the driver: the table goes on without
            skipped.append(f"{case.name}: jax: {type(error).__name__}: {error}"[:300])
            print(f"    {skipped[-1]}", flush=True)
    return rows


def empty_launch_s() -> float:
    """Seconds of a launch that does nothing: back to back, as a replay of a graph or plainly, whichever is quicker."""
    gpu = open_gpu(0)
    cubin = compile_cubin('extern "C" __global__ void empty() {}', architecture(gpu.capability))
    launch = Launch(Kernel(gpu, cubin.image, "empty"), 1, 32, ())
    graph = Graph([launch])
    times = throughput({"plain": lambda: launch(0), "graph": lambda: graph(0)}, clock_for("cuda:0"), repeats=9)
    taken = {key: t.wall_us for key, t in times.items() if isinstance(t, Throughput)}
    print(f"an empty kernel: {', '.join(f'{key} {us:.2f} us' for key, us in taken.items())}", flush=True)
    return min(taken.values()) * 1e-6


# ---- the run --------------------------------------------------------------------------------------------------------


def equality(cases: Sequence[Case], x: np.ndarray) -> None:
    """Refuse to time what does not answer as the scheme's reference does."""
    from gigamlp.quantize import integer_form

    for hidden, window in dict.fromkeys((case.hidden, case.window) for case in cases):
        mlp = reference(hidden, window)
        runner = get_engine(OURS).build(mlp, Spec("cuda:0", 1000))
        ids = run_rows(runner, x)
        want = integer_form(mlp).reference_logits(x)
        top = np.sort(want, axis=1)
        clear = top[:, -1] - top[:, -2] > 1e-3  # closer than that, the order of float32 sums may decide
        wrong = int(np.sum((ids != want.argmax(axis=1)) & clear))
        if wrong:
            raise SystemExit(f"784-{hidden}-10: {wrong} of {len(x)} answers differ from the integer reference")


def compile_ahead(cases: Sequence[Case]) -> None:
    """Compile all variants of our engine into the cache, on all cores: that is no part of any measurement."""
    engine: Any = get_engine(OURS)

    def one(case: Case) -> int:
        return sum(1 for _ in engine.compile_all(reference(case.hidden, case.window), Spec("cuda:0", case.batch)))

    with ThreadPoolExecutor(8) as pool:
        print(f"{sum(pool.map(one, cases))} variants compiled", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--cases", default="", help="names of lines, separated by commas; all if not given")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds; after them peers and extras are left out")
    options = parser.parse_args()
    resolve_device("cuda:0")
    begin = HostClock.now()
    _, _, x, y = gm.data.load_mnist()
    wanted = [name for name in options.cases.split(",") if name]
    unknown = set(wanted) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such lines: {', '.join(sorted(unknown))}; there are: {', '.join(c.name for c in CASES)}")
    chosen = [case for case in CASES if not wanted or case.name in wanted]
    compile_ahead(chosen)
    equality(chosen, x)
    roofs, launch_s = measure_roofs("cuda:0"), empty_launch_s()
    print(f"read {roofs.read_bytes_s / 1e12:.2f} TB/s, L2 {roofs.cache_bytes >> 20} MB", flush=True)
    visits: dict[tuple[Case, str], list[Row]] = {}
    skipped: list[str] = []
    for case in schedule(chosen):
        again = (case, OURS) in visits
        late = HostClock.now() - begin > options.budget
        # a second visit has the peers that need no compilation only
        peers = [p for p in options.peers.split(",") if p and not late and not (again and p != "torch_graph")]
        if late and case.least is None:
            skipped.append(f"{case.name}: the budget of {options.budget:.0f} s had ended")
            continue
        if late:
            skipped.append(f"{case.name}: no peers: the budget of {options.budget:.0f} s had ended")
        print(f"{case.name}{' again' if again else ''}, after {HostClock.now() - begin:.0f} s:", flush=True)
        for row in measure(case, peers, (x, y), roofs, skipped):
            visits.setdefault((case, str(row.engine)), []).append(row)
        rows = [explained(typical(v), c, roofs, launch_s) for (c, _), v in visits.items()]
        for row in rows:
            if row.name == case.name:
                print(line(row, case), flush=True)
        command = " ".join(["python", "benchmarks/fused_cuda.py", *sys.argv[1:]])
        extra = {
            "roofs": roofs.to_json(),
            "empty_launch_us": launch_s * 1e6,
            "bars_samples_per_s": {c.name: c.least for c in chosen if c.least is not None},
            "missed": verdict(rows, chosen),
            "per_row": {f"{c.name} {e}": asdict(Work.of(c, v[0])) for (c, e), v in visits.items()},
            "visits_us": {f"{c.name} {e}": [r.wall_us for r in v] for (c, e), v in visits.items() if len(v) > 1},
            "skipped": skipped,
        }
        Record(device_info("cuda:0"), versions(), command, rows, extra).save(options.out)
    missed = verdict(rows, chosen)
    print(f"bars missed: {'; '.join(f'{name}: {why}' for name, why in missed.items()) or 'none'}")
    print(f"{HostClock.now() - begin:.0f} s in all")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
