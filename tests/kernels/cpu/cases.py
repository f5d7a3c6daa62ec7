"""Networks, rows and runs for the tests of the native kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import gigamlp as gm
from gigamlp.byteform import ByteForm
from gigamlp.integer import Integer
from gigamlp.kernels.cpu import native
from gigamlp.kernels.cpu.pack import pack
from gigamlp.quantize import form_of, quantise

__all__ = ["SETS", "form", "network", "new_net", "rows", "run", "sets_for"]

# every set that was compiled and that this machine has; empty without the native extension
SETS = [] if native.native_problem() else [each for each in native.instruction_sets() if each.missing is None]


def sets_for(scheme: str) -> list[native.InstructionSet]:
    return [each for each in SETS if each.bits == 8 or scheme in ("w7", "float32")]


def network(widths: tuple[int, ...], activation: str = "relu", seed: int = 0, **more: Any) -> gm.MLP:
    """An MLP with weights of a size that keeps values near 1 for bytes."""
    rng = np.random.default_rng(seed)
    layers = [
        gm.Layer(
            rng.normal(size=(out, width)) / np.sqrt(width),
            rng.normal(size=out) / 10,
            "identity" if index == len(widths) - 2 else activation,
        )
        for index, (width, out) in enumerate(pairwise(widths))
    ]
    return gm.MLP(layers, **{"input_scale": 1 / 64, **more})


def rows(mlp: gm.MLP, count: int, *, dtype: str = "uint8", share: float = 0.3, seed: int = 1) -> np.ndarray:
    """Rows of which `share` of the values are not 0."""
    rng = np.random.default_rng(seed)
    low, high = (0, 256) if dtype == "uint8" else (-128, 128)
    x = rng.integers(low, high, (count, mlp.features))
    x[rng.random(x.shape) >= share] = 0
    return x.astype(dtype)


def form(mlp: gm.MLP, scheme: str, x: np.ndarray) -> Integer | ByteForm | gm.MLP:
    if scheme == "float32":
        return mlp
    more = {} if scheme == "w8" else {"calibration": x if len(x) else np.zeros((1, mlp.features))}
    return form_of(quantise(mlp, scheme, **more), x.dtype.name)


def new_net(
    made: Integer | ByteForm | gm.MLP,
    isa: native.InstructionSet,
    dtype: str = "uint8",
    output: str = "logits",
    zeros: str = "dense",
    labels: tuple[Any, ...] | None = None,
) -> Any:
    packed = pack(made, isa, input_dtype=dtype, output=output, zeros=zeros)
    return native.load().Net(isa.name, packed.header, packed.blob, labels)


def run(
    made: Integer | ByteForm | gm.MLP,
    isa: native.InstructionSet,
    x: np.ndarray,
    *,
    output: str = "logits",
    zeros: str = "dense",
    threads: int = 1,
    net: Any = None,
) -> Any:
    """Run `x` and return the answers; for ``margin`` ids and margins."""
    mlp = made if isinstance(made, gm.MLP) else made.mlp
    net = net or new_net(made, isa, x.dtype.name, output, zeros)
    margin = np.full(len(x), np.nan, np.float32) if output == "margin" else None
    if output in ("class", "margin"):
        out = np.full(len(x), -1, np.int64)
    else:
        width = 2 if output == "proba" and mlp.head == "sigmoid" else mlp.outputs
        out = np.full((len(x), width), np.nan, np.float32)
    net.run(x, out, margin, threads)
    return out if margin is None else (out, margin)
