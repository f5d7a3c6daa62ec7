"""An MLP as a Python script that needs NumPy only."""

from __future__ import annotations

import base64
import os
from typing import Any

import numpy as np

from gigamlp._atomic import write_text
from gigamlp.cascade import one_mlp
from gigamlp.mlp import MLP

__all__ = ["to_numpy_script"]

_GATE = "1 / (1 + np.exp(-np.abs(z)))"  # logistic(|z|), which cannot overflow
_ACTIVATIONS = {
    "identity": "z",
    "relu": "np.maximum(z, 0)",
    "tanh": "np.tanh(z)",
    "logistic": f"np.where(z >= 0, {_GATE}, 1 - {_GATE})",
    "gelu": "0.5 * z * (1 + np.vectorize(math.erf, otypes=[z.dtype])(z * math.sqrt(0.5)))",
    "gelu_tanh": "0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))",
    "silu": f"z * np.where(z >= 0, {_GATE}, 1 - {_GATE})",
}


def to_numpy_script(mlp: MLP, path: str | os.PathLike[str]) -> str:
    """Write the MLP as a Python script with its weights inside, and return its text.

    Parameters
    ----------
    mlp : MLP
    path : path-like
        Written atomically.

    Returns
    -------
    str
        The script. It defines ``logits(x)``, ``predict(x)`` and ``CLASSES``; run with a ``.npy`` file of rows, it
        prints a prediction a line. It needs NumPy and nothing of gigamlp, and computes in float32.

    Examples
    --------
    >>> import tempfile, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, 0.0], [0.0, 1.0]])], classes=["left", "right"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = to_numpy_script(mlp, folder + "/net.py")
    >>> net = {"__name__": "net"}
    >>> exec(text, net)
    >>> net["predict"]([[3, 1], [1, 3]])
    array(['left', 'right'], dtype='<U5')
    """
    one_mlp(mlp, "to_numpy_script")
    text = _text(mlp)
    write_text(path, text)
    return text


def _packed(array: Any) -> str:
    data = base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode()
    return f"f32({data!r}, {np.shape(array)})"


def _text(mlp: MLP) -> str:
    lines = [
        '"""An MLP, written by gigamlp. Needs NumPy only."""',
        "",
        "import base64",
        "import math",
        "import sys",
        "",
        "import numpy as np",
        "",
        "",
        "def f32(text, shape):",
        '    return np.frombuffer(base64.b64decode(text), dtype="<f4").reshape(shape)',
        "",
        "",
        f"NAME = {mlp.name!a}",
        f"CLASSES = {None if mlp.classes is None else f'np.array({mlp.classes.tolist()!a})'}",
        f"SCALE = {_packed(mlp.input_scale)}",
        f"OFFSET = {_packed(mlp.input_offset)}",
        "LAYERS = [  # weight [out, in], bias [out], activation",
    ]
    for layer in mlp.layers:
        bias = np.zeros(len(layer.weight)) if layer.bias is None else layer.bias
        lines.append(f"    ({_packed(layer.weight)}, {_packed(bias)}, lambda z: {_ACTIVATIONS[layer.activation]}),")
    columns = mlp.columns or ((0, mlp.features),)
    read = ", ".join(f"x[:, {start}:{stop}]" for start, stop in columns)
    lines += [
        "]",
        "",
        "",
        "def logits(x):",
        f"    x = np.asarray(x)  # [n, {mlp.features}]",
        f"    z = np.concatenate([{read}], axis=1).astype(np.float32) * SCALE + OFFSET",
        "    for weight, bias, activation in LAYERS:",
        "        z = z @ weight.T + bias",
        "        z = np.asarray(activation(z), np.float32)",
        "    return z",
        "",
        "",
        "def predict(x):",
        f"    z = logits(x)\n    return {_answer(mlp)}",
        "",
        "",
        'if __name__ == "__main__":',
        "    for answer in predict(np.load(sys.argv[1], allow_pickle=False)).tolist():",
        "        print(answer)",
        "",
    ]
    return "\n".join(lines)


def _answer(mlp: MLP) -> str:
    if mlp.head == "softmax":
        return "CLASSES[z.argmax(axis=1)]"
    if mlp.head == "sigmoid":
        return "CLASSES[(z[:, 0] > 0).astype(int)]"
    if mlp.head == "multilabel":
        return "(z > 0).astype(int)"
    return "z[:, 0]" if mlp.outputs == 1 else "z"
