"""Dense, zero-skipping or decided for each block: one thread, by the share of 4-byte groups that hold anything.

    python benchmarks/zero_shares.py --out records/cpu-zeros-DATE.json [--quick] [--hidden 40,128,512]

Rows: groups drawn for each row anew (``random``; lists that rows share are then long), the same groups in all rows
(``aligned``), runs of 300 rows of each (``mixed``), and MNIST's. Rounds visit the three ways in turn; the median over
the rounds counts. `auto_to_best` is the time of ``auto`` over that of the quicker of the other two.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cpu_contenders import network

import gigamlp as gm
from gigamlp.engines.registry import engine
from gigamlp.measure.stats import summarise
from gigamlp.measure.telemetry import device_info, versions
from gigamlp.record import Record, Row
from gigamlp.spec import Spec, Variant

WAYS = ("dense", "skip", "auto")


def rows(kind: str, share: float, count: int) -> np.ndarray:
    """Return uint8 [count, 784] of which `share` of the 4-byte groups hold something."""
    rng = np.random.default_rng(0)
    held = rng.random((1 if kind == "aligned" else count, 196)) < share
    if kind == "mixed":
        held = rng.random((count, 196)) < np.repeat(rng.choice([0.0, share, 1.0], -(-count // 300)), 300)[:count, None]
    values = rng.integers(1, 256, (count, 196, 4))
    return np.ascontiguousarray((values * held[..., None]).reshape(count, 784).astype(np.uint8))


def measure(hidden: int, x: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Return seconds of a pass over `x` for each way, a number for each round."""
    mlp = network(hidden, "w8a8")
    spec = Spec("cpu", len(x), threads=1)
    made = {way: engine("cpu_fused").build(mlp, spec, Variant.of(scheme="w8a8", zeros=way)) for way in WAYS}
    first: Any = made["dense"].run(x).copy()
    for runner in made.values():
        if not np.array_equal(runner.run(x), first):
            raise RuntimeError("the ways with zeros answer differently")
    rng = np.random.default_rng(1)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in rng.permutation(WAYS):
            made[way].run(x)
            begin = time.thread_time()  # of this thread: what others do on the machine is not in it
            made[way].run(x)
            taken[way].append(time.thread_time() - begin)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=lambda text: [int(word) for word in text.split(",")], default=[40, 128, 512])
    parser.add_argument("--quick", action="store_true", help="few rounds and shares: to see that it works")
    options = parser.parse_args()
    rounds, count, step = (3, 1500, 50) if options.quick else (15, 6000, 10)
    table, found, worst = [], {}, 0.0
    cases = [(kind, percent) for kind in ("random", "aligned", "mixed") for percent in range(0, 101, step)]
    for hidden in options.hidden:
        for kind, percent in [*cases, ("mnist", None)]:
            x = gm.data.load_mnist()[2][:count] if percent is None else rows(kind, percent / 100, count)
            taken = measure(hidden, np.ascontiguousarray(x), rounds)
            stats = {way: summarise(s * 1e6 for s in seconds) for way, seconds in taken.items()}
            ratio = stats["auto"].median / min(stats["dense"].median, stats["skip"].median)
            worst = max(worst, ratio)
            what = f"784-{hidden}-10 {kind}" + ("" if percent is None else f" {percent} %")
            speeds = {way: count / stat.median for way, stat in stats.items()}
            found[what] = {**{f"{way}_m_rows_s": speed for way, speed in speeds.items()}, "auto_to_best": ratio}
            print(f"{what:28}", *(f"{way} {speed:7.3f}" for way, speed in speeds.items()), f"{ratio:.3f}", flush=True)
            for way, stat in stats.items():
                table.append(
                    Row(
                        name=f"784-{hidden}-10",
                        engine="cpu_fused",
                        variant=f"scheme=w8a8 zeros={way} threads=1",
                        scheme="w8a8",
                        hidden=[hidden],
                        features_read_bytes=784,
                        batch=count,
                        threads=1,
                        residence="hot",
                        input_dtype="uint8",
                        output="class",
                        samples_per_s=count / stat.median * 1e6,
                        wall_us=stat.median,
                        iqr=stat.iqr,
                        note=f"{what.split(' ', 1)[1]} of the 4-byte groups; time of the thread",
                    )
                )
            command = " ".join(["python", "benchmarks/zero_shares.py", *sys.argv[1:]])
            extra = {"cases": found, "worst_auto_to_best": worst, "rounds": rounds}
            Record(device_info("cpu"), versions(), command, table, extra).save(options.out)
    print(f"auto against the better of the two, at worst: {worst:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
