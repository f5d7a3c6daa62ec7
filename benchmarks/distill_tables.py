"""Is `distill` no worse than plain cross-entropy on data that is not MNIST? Five splits and seeds of each set.

scikit-learn's digits (8 x 8 images), breast cancer (a table of 569 rows) and a synthetic table of 100,000 rows. A third
of the rows of each set is kept for the end; both ways get the same other rows, and hold out as many of them. Writes a
record.

    python benchmarks/distill_tables.py --out distill-tables.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, make_classification

from gigamlp import Record
from gigamlp.measure.clock import stopwatch, timestamp
from gigamlp.measure.telemetry import device_info, resolve_device, versions
from gigamlp.record import Row
from gigamlp.train import distill, fit_finetune

SETS = ("digits", "breast-cancer", "synthetic")


def load(name: str) -> tuple[Any, Any, int]:
    """Return rows, labels and the hidden width."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        return (x * 15).astype(np.uint8).reshape(-1, 8, 8), y, 16
    if name == "breast-cancer":
        x, y = load_breast_cancer(return_X_y=True)
        return x, y, 8
    x, y = make_classification(
        100_000, 20, n_informative=12, n_redundant=4, n_classes=4, n_clusters_per_class=3, flip_y=0.02, random_state=0
    )
    return x.astype(np.float32), y, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    device = resolve_device(given.device)
    rows, extra = [], {"made": timestamp(), "sets": {}}
    for name in given.sets.split(","):
        x, y, hidden = load(name)
        found: dict[str, list[float]] = {"distill": [], "distill_s": [], "plain": [], "plain_s": []}
        for seed in range(given.seeds):
            order = np.random.default_rng(seed).permutation(len(x))
            fit, test = order[len(x) // 3 :], order[: len(x) // 3]
            held = min(5000, len(fit) // 12)
            with stopwatch() as watch:
                taught = distill(
                    x[fit], y[fit], hidden, seeds=1, seed=seed, device=device, validation=held, quick=given.quick
                )
            found["distill_s"].append(watch.seconds)
            flat = x.reshape(len(x), -1)
            with stopwatch() as watch:
                plain = fit_finetune(None, flat[fit], y[fit], hidden=hidden, seed=seed, device=device, validation=held)
            found["plain_s"].append(watch.seconds)
            for way, mlp in (("distill", taught.best(hidden).mlp), ("plain", plain.mlp)):
                found[way].append(float(np.mean(mlp.predict(flat[test]) == y[test])))
            print(f"{name} {seed}: distill {found['distill'][-1]:.4f}, plain {found['plain'][-1]:.4f}", flush=True)
        extra["sets"][name] = {"rows": len(x), "hidden": hidden, **found}
        for way in ("distill", "plain"):
            mean, seconds = float(np.mean(found[way])), float(np.median(found[way + "_s"]))
            note = f"mean of {given.seeds} splits and seeds; {seconds:.1f} s each (median)"
            rows.append(Row(name=name, variant=way, hidden=[hidden], output="class", accuracy=mean, note=note))
            print(f"{name} {way}: {100 * mean:.2f} %, {note}", flush=True)
    command = shlex.join(["python", "benchmarks/distill_tables.py", *sys.argv[1:]])
    Record(device_info(device), versions(), command, rows, extra).save(given.out)


if __name__ == "__main__":
    main()
