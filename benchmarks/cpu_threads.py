"""The native CPU engine on 1, 4 and 16 threads, every instruction set that the tuner offers, and a single row.

    python benchmarks/cpu_threads.py --models FOLDER --out records/cpu-threads.json [--threads 1 4 16]

FOLDER holds mnist-40.safetensors, mnist-128 and mnist-512, as benchmarks/distill_h200.py writes them. Schemes w8a8 and,
on one thread, w8; 10,000 MNIST test rows, uint8 in, class out; each instruction set and way with zeros at its best.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gigamlp as gm
from gigamlp.measure.clock import HostClock
from gigamlp.measure.stats import percentile
from gigamlp.measure.telemetry import device_info, versions
from gigamlp.measure.timing import latency
from gigamlp.plan import Candidate
from gigamlp.record import Record, Row
from gigamlp.tune import Effort

BATCH = 10_000
LOOSE = 0.05  # of the rows may differ from float32: every scheme competes, and its accuracy is in its row


def row(mlp: gm.MLP, hidden: int, candidate: Candidate) -> Row:
    assert candidate.wall_us is not None
    return Row(
        name=mlp.name,
        engine="cpu_fused",
        variant=candidate.variant.label,
        scheme=str(candidate.variant.get("scheme")),
        hidden=[hidden],
        features_read_bytes=784,
        batch=BATCH,
        batches_per_launch=1,
        threads=candidate.spec.threads,
        residence="hot",
        input_dtype="uint8",
        output="class",
        samples_per_s=BATCH / candidate.wall_us * 1e6,
        wall_us=candidate.wall_us,
        iqr=candidate.iqr,
        accuracy=candidate.accuracy,
    )


def single_row(mlp: gm.MLP, hidden: int, x: object, y: object) -> Row:
    """p50 and p99 of `Session.predict_one`, the timer's own time included."""
    options = {"engines": ["cpu_fused"], "validation": (x, y), "max_disagreement": LOOSE, "threads": 1}
    with gm.Session(mlp, gm.optimize(mlp, "cpu", 1, **options)) as session:  # type: ignore[arg-type]
        first = x[0]  # type: ignore[index]
        session.predict_one(first)
        one = session.predict_one
        taken = latency(lambda: one(first), HostClock(), calls=4000, budget_s=1.0).samples
    p50, p99 = percentile(taken, 50), percentile(taken, 99)
    print(f"{mlp.name} single row p50 {p50:.2f} us p99 {p99:.2f} us", flush=True)
    return Row(
        name=mlp.name,
        engine="cpu_fused",
        variant="Session.predict_one",
        hidden=[hidden],
        features_read_bytes=784,
        batch=1,
        batches_per_launch=1,
        threads=1,
        residence="hot",
        input_dtype="uint8",
        output="class",
        p50_us=p50,
        p99_us=p99,
        note="one row again and again; the timer's own 0.1 us is in it",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    x_train, _, x, y = gm.data.load_mnist()
    effort = Effort(repeats=5, min_s=0.03, latency_calls=5)
    rows = []
    for hidden in (40, 128, 512):
        base = gm.load(options.models / f"mnist-{hidden}.safetensors")
        for scheme in ("w8a8", "w8"):
            mlp = gm.quantise(base, scheme, **({} if scheme == "w8" else {"calibration": x_train[:4000]}))
            for threads in options.threads if scheme == "w8a8" else (1,):
                plan = gm.optimize(
                    mlp,
                    "cpu",
                    BATCH,
                    threads=threads,
                    engines=["cpu_fused"],
                    validation=(x, y),
                    max_disagreement=LOOSE,
                    effort=effort,
                )
                best: dict[tuple[object, object], Candidate] = {}
                for c in plan.candidates:
                    key = (c.variant.get("isa"), c.variant.get("zeros"))
                    if (
                        c.wall_us is not None
                        and c.rejected is None
                        and (key not in best or c.wall_us < (best[key].wall_us or 0))
                    ):
                        best[key] = c
                for (isa, zeros), c in sorted(best.items(), key=lambda pair: pair[1].wall_us or 0):
                    rows.append(row(mlp, hidden, c))
                    rate = BATCH / (c.wall_us or 1)
                    print(
                        f"H={hidden} {scheme} {threads} threads {isa} {zeros} {rate:8.3f} M/s {c.accuracy}", flush=True
                    )
            if scheme == "w8a8":
                rows.append(single_row(mlp, hidden, x, y))
    command = " ".join(["python", "benchmarks/cpu_threads.py", *sys.argv[1:]])
    Record(device_info("cpu"), versions(), command, rows).save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
