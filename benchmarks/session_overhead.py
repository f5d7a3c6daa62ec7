"""What a Session costs over the bare runner, at equal residence of the rows.

    python benchmarks/session_overhead.py --device cpu --out records/session-overhead-cpu.json

Pairs of rows, timed interleaved: ``run(x)`` of the runner itself, into its own output buffer, and
``Session.predict(x)`` with owned answers, on the same rows in the same memory. On CUDA also from pinned and pageable
host memory; there the bare runner is fed by hand from one pinned buffer that already holds the rows. The limit is 10 %
at batch 65,536, for rows that need no check of their values (uint8): the exit code is 1 if a pair is above it. Random
weights: the time does not depend on them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gigamlp as gm
from gigamlp.engines.base import Runner
from gigamlp.measure.clock import clock_for
from gigamlp.measure.telemetry import device_info, resolve_device, snapshot, versions
from gigamlp.measure.timing import Throughput, throughput
from gigamlp.record import Record, Row

LIMIT = 1.10
LIMIT_BATCH = 65_536


def random_mlp(hidden: int) -> gm.MLP:
    rng = np.random.default_rng(0)
    layers = [
        gm.Layer(rng.normal(size=(hidden, 784)) / 28, rng.normal(size=hidden), "relu"),
        gm.Layer(rng.normal(size=(10, hidden)), rng.normal(size=10)),
    ]
    return gm.MLP(layers, input_scale=1 / 255, name=f"random-{hidden}")


def by_hand(runner: Runner, x: np.ndarray) -> Callable[[], object]:
    """The bare runner from pinned host memory to pinned host memory, waited for."""
    pinned = torch.from_numpy(x).pin_memory()
    answers = torch.empty(len(x), dtype=torch.int64, pin_memory=True)
    make: Any = torch.cuda.Event
    event = make()

    def work() -> None:
        runner.input.copy_(pinned, non_blocking=True)
        answers.copy_(runner.run(runner.input), non_blocking=True)
        event.record()
        event.synchronize()

    return work


def contenders(session: gm.Session, x: np.ndarray) -> dict[tuple[str, str], Callable[[], object]]:
    """(residence, who) -> work."""
    session.predict(x)
    (bound,) = session._runners._bound.values()
    runner = bound.runner
    rows: Any = x if bound.numpy else torch.from_numpy(x).to(session.device)
    found: dict[tuple[str, str], Callable[[], object]] = {
        ("hot", "bare"): lambda: runner.run(rows),
        ("hot", "session"): lambda: session.predict(rows),
    }
    if session.device != "cpu":
        pinned = torch.from_numpy(x).pin_memory()
        found |= {
            ("host-pinned", "bare"): by_hand(runner, x),
            ("host-pinned", "session"): lambda: session.predict(pinned),
            ("host-pageable", "session"): lambda: session.predict(x),
        }
    return found


def measure(device: str, args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    clock = clock_for(device)
    rows: list[Row] = []
    above: list[str] = []
    engines = args.engine or (["numpy", "torch_eager"] if device == "cpu" else ["torch_eager", "torch_graph"])
    rng = np.random.default_rng(1)
    for hidden in args.hidden:
        mlp = random_mlp(hidden)
        for batch in args.batch:
            raw = rng.integers(0, 256, (batch, 784), dtype=np.uint8)
            for dtype in args.input_dtype:
                for engine in engines:
                    x = raw.astype(dtype)
                    with gm.Session(mlp, device=device, engine=engine, batch=batch, input_dtype=dtype) as session:
                        work = contenders(session, x)
                        times = throughput(
                            {f"{a} {b}": f for (a, b), f in work.items()}, clock, repeats=args.repeats, min_s=args.min_s
                        )
                        (bound,) = session._runners._bound.values()
                        variant = bound.runner.variant.label
                    clock_mhz = snapshot(device).get("clock_mhz")
                    for residence, who in work:
                        t = times[f"{residence} {who}"]
                        if not isinstance(t, Throughput):
                            raise t
                        rows.append(
                            Row(
                                name=mlp.name,
                                engine=engine,
                                variant=variant,
                                hidden=[hidden],
                                features_read_bytes=784 * x.itemsize,
                                batch=batch,
                                threads=torch.get_num_threads() if device == "cpu" else None,
                                residence=residence,
                                input_dtype=dtype,
                                output="class",
                                samples_per_s=batch / t.wall_us * 1e6,
                                wall_us=t.wall_us,
                                device_us=t.device_us,
                                iqr=t.iqr,
                                clock_mhz=clock_mhz,
                                note="bare runner" if who == "bare" else "Session.predict",
                            )
                        )
                        bare = times.get(f"{residence} bare")
                        compared = who != "bare" and isinstance(bare, Throughput)
                        ratio = t.wall_us / bare.wall_us if compared else None
                        line = f"784-{hidden}-10 {engine:<12} {dtype:<8} batch {batch:<7,} {residence:<14} {who:<8}"
                        line += f"{t.wall_us:12.1f} us  IQR {t.iqr:8.1f}"
                        print(line + ("" if ratio is None else f"  {ratio:6.3f} x bare"), flush=True)
                        if ratio is not None and ratio > LIMIT and batch == LIMIT_BATCH and dtype == "uint8":
                            above.append(f"784-{hidden}-10 {engine} {dtype} {residence}: {ratio:.3f}")
    return rows, above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", action="append", help="may be given several times")
    parser.add_argument("--hidden", type=int, nargs="+", default=[40, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 1024, LIMIT_BATCH])
    parser.add_argument("--input-dtype", nargs="+", default=["uint8", "float32"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--min-s", type=float, default=0.1, help="seconds a repeat lasts at least")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = resolve_device(args.device)
    rows, above = measure(device, args)
    if args.out is not None:
        command = " ".join(["python", *sys.argv])
        record = Record(device_info(device), versions(), command, rows, {"limit": LIMIT, "above_limit": above})
        record.save(args.out)
    for line in above:
        print(f"above the limit of {LIMIT:.2f}: {line}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
