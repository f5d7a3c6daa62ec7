"""Take an ONNX file that another program wrote, here skl2onnx, run it, and write a faster one that takes bytes.

Run with `python examples/bring_an_onnx_file.py`. Needs `gigamlp[torch,onnx,sklearn]` and skl2onnx.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

import gigamlp as gm


def main(folder: Path, device: str = "auto") -> float:
    """Return the share of classes that are those of onnxruntime."""
    x, y = load_digits(return_X_y=True)
    rows = x.astype(np.float32)
    model = make_pipeline(MinMaxScaler(), MLPClassifier((32,), max_iter=30, random_state=0)).fit(rows, y)
    (folder / "theirs.onnx").write_bytes(to_onnx(model, rows[:1]).SerializeToString())

    mlp = gm.from_onnx(folder / "theirs.onnx")  # scaler, layers, softmax, labels: all in one MLP
    print(mlp)
    with gm.Session(mlp, device=device) as session:
        answers = session.predict(rows)

    gm.to_onnx(mlp, folder / "ours.onnx", input_dtype="uint8", output="class")
    ours = onnxruntime.InferenceSession(folder / "ours.onnx", providers=["CPUExecutionProvider"])
    (classes,) = ours.run(None, {"rows": rows.astype(np.uint8)})
    share = float(np.mean(mlp.labels(classes) == answers))
    print(f"{share:.1%} of the classes are those of onnxruntime")
    return share


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        main(Path(where))
