"""Bring an MLP of your own, find the fastest way to run it here, keep the plan, and run it by the plan.

Run with `python examples/tune_for_this_machine.py`. Needs `gigamlp[torch]`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import gigamlp as gm


def main(folder: Path, device: str = "auto") -> gm.Plan:
    """Return the plan."""
    # any weights will do: here a random network of 20 bytes -> 32 -> 16 -> 3 classes
    rng = np.random.default_rng(0)
    mlp = gm.MLP(
        [
            gm.Layer(rng.normal(size=(32, 20)) / 8, rng.normal(size=32), "relu"),
            gm.Layer(rng.normal(size=(16, 32)) / 6, rng.normal(size=16), "tanh"),
            gm.Layer(rng.normal(size=(3, 16)) / 4),
        ],
        input_scale=1 / 255,
        classes=["cat", "dog", "neither"],
        name="mine",
    )
    rows = rng.integers(0, 256, (1000, 20), dtype=np.uint8)

    plan = gm.optimize(mlp, device, batch=(1, 256), validation=(rows, None), engines=["torch_eager"])
    plan.save(folder / "plan.json")
    print(plan.explain())

    with gm.Session(mlp, gm.Plan.load(folder / "plan.json")) as session:
        answers = session.predict(rows)
    agree = np.mean(answers == mlp.predict(rows))
    print(f"{agree:.1%} of the answers are those of plain NumPy")
    return plan


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        main(Path(where))
