"""Measure, then read what was measured: rows, shares of the roof, and a page to look at.

Run with `python examples/read_a_record.py`. Needs `gigamlp[torch,report]`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gigamlp as gm
from gigamlp.bench import bench
from gigamlp.report import write_report


def main(folder: Path, device: str = "cpu", repeats: int = 5) -> gm.Record:
    """Return the record."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(40, 784)) / 28, rng.normal(size=(10, 40)) / 6]
    mlp = gm.MLP([gm.Layer(weights[0], activation="relu"), gm.Layer(weights[1])], input_scale=1 / 255, name="untrained")

    record = bench(
        mlp, engines=["torch_eager"], batch=(1024,), residence=("hot", "cold"), device=device, repeats=repeats
    )
    record.save(folder / "record.json")

    for row in gm.Record.load(folder / "record.json").rows:
        share = "unknown" if row.roof_share is None else f"{row.roof_share:.1%}"
        speed = (row.samples_per_s or 0.0) / 1e6
        print(f"batch {row.batch:5} {row.residence:4} {speed:8.3f} M/s, p99 {row.p99_us:8.1f} us, {share} of its roof")

    write_report(record, folder / "report.html")
    return record


if __name__ == "__main__":
    where = Path("results/read_a_record")
    main(where)
    print(f"open {where / 'report.html'} in a browser")
