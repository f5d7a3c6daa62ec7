"""Train a small network on MNIST, save it, load it, and answer the test rows with it.

Run with `python examples/train_and_predict.py` (about ten seconds on two cores). Needs `gigamlp[torch]`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import gigamlp as gm


def main(folder: Path, rows: int = 60_000, hidden: int = 40, epochs: int = 5) -> float:
    """Return the accuracy on MNIST's test rows."""
    x_train, y_train, x_test, y_test = gm.data.load_mnist()
    x_train, y_train = x_train[:rows], y_train[:rows]

    ridge = gm.train.ridge(x_train, y_train, hidden=hidden, seed=0, device="cpu")
    print(f"ridge-ELM:  {np.mean(ridge.predict(x_test) == y_test):.2%}")

    mlp = gm.train.finetune(ridge, x_train, y_train, epochs=epochs, seed=0, device="cpu")
    mlp.save(folder / "mlp.safetensors")

    mlp = gm.load(folder / "mlp.safetensors")
    with gm.Session(mlp, device="cpu") as session:
        accuracy = float(np.mean(session.predict(x_test) == y_test))
        certain = session.predict_proba(x_test).max(axis=1)
    print(f"fine-tuned: {accuracy:.2%}, at least 99 % certain of {np.mean(certain > 0.99):.1%} of the rows")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        main(Path(where))
