"""Trained int8 networks for MNIST: 784-40-10, 784-64-10 and 784-128-10 with known accuracies on the test rows.

``data_files/reference_int8.npz`` holds the int8 weights of these widths that the prototypes of the fused kernel were
measured with. Per width: codes ``q`` int8 [784, hidden]; scales ``s`` and biases ``b1`` float32 [hidden] for raw bytes;
``W2`` float32 [hidden, 10]; ``b2`` float32 [10]; ``acc``, accuracy on held-out training rows and on the test rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gigamlp as gm

__all__ = ["WIDTHS", "reference_mlp", "test_accuracy"]

WIDTHS = (40, 64, 128)
_PATH = Path(__file__).parent / "data_files" / "reference_int8.npz"


def reference_mlp(hidden: int) -> gm.MLP:
    """Return the network with this many hidden units, its codes and scales in its scheme."""
    with np.load(_PATH) as file:
        q, s, b1, w2, b2 = (file[f"h{hidden}.{key}"] for key in ("q", "s", "b1", "W2", "b2"))
    scheme = gm.Scheme("w8", {"codes.0": q.T, "scale.0": s})
    layers = [gm.Layer(q.T * s[:, None], b1, "relu"), gm.Layer(w2.T, b2)]
    return gm.MLP(layers, scheme=scheme, name=f"reference-{hidden}")


def test_accuracy(hidden: int) -> float:
    """Return the accuracy on MNIST's test rows that came with the weights."""
    with np.load(_PATH) as file:
        return float(file[f"h{hidden}.acc"][1])


test_accuracy.__test__ = False  # type: ignore[attr-defined]
