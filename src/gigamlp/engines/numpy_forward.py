"""The engine ``numpy``: float32 in plain NumPy, for machines without torch. It needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.activations import apply_activation
from gigamlp.engines.base import Spec, Unsupported, Variant
from gigamlp.errors import InvalidInput
from gigamlp.folding import folded_layers
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP

__all__ = ["NumpyForward"]

Array = NDArray[Any]
_Folded = tuple[Array, Array | None, str]
# 784-512-10 keeps its working set within 5 MB, so that a block's hidden values are still in cache for the next layer
_ROWS_PER_BLOCK = 1024


class NumpyForward:
    """Run an MLP with NumPy's matrix product, in float32.

    The input's scale and offset are folded into the first layer in float64. BLAS decides about threads.
    """

    name = "numpy"
    integer = False
    compiles = False

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`: it can on the CPU."""
        return None if device == "cpu" else "NumPy computes on the CPU only"

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the one variant there is.

        Raises
        ------
        Unsupported
            For bfloat16 rows, a thread count, or an output that the MLP's head does not have.
        """
        del full
        _refuse(mlp, spec)
        return [Variant.of(op="matmul", compute="float32")]

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> _NumpyRunner:
        """Return a runner. See `variants` for what is refused."""
        watch = stopwatch()
        known = self.variants(mlp, spec)[0]
        if variant not in (None, known):
            raise Unsupported(f"engine 'numpy' has the variant {known.label!r} only, not {variant.label!r}")
        shape = (spec.batch, mlp.features)
        runner = _NumpyRunner(mlp, spec, known, np.zeros(shape, spec.input_dtype))
        runner.build_s = watch.seconds
        return runner


def _refuse(mlp: MLP, spec: Spec) -> None:
    if spec.device != "cpu":
        raise Unsupported("NumPy computes on the CPU only")
    if spec.input_dtype == "bfloat16":
        raise Unsupported("NumPy has no bfloat16; float32 holds the same values")
    if spec.threads is not None:
        raise Unsupported("NumPy's BLAS takes its thread count from the environment, e.g. OPENBLAS_NUM_THREADS")
    if spec.output in ("class", "margin") and mlp.head not in ("softmax", "sigmoid"):
        raise Unsupported(f"head {mlp.head!r} has no single class per row; ask for logits")
    if spec.output == "margin" and mlp.head == "softmax" and mlp.outputs < 2:
        raise Unsupported("one class has no margin")
    if spec.output == "proba" and mlp.head == "regression":
        raise Unsupported("head 'regression' has no probabilities; ask for logits")


class _NumpyRunner:
    engine = "numpy"
    build_s = 0.0

    def __init__(self, mlp: MLP, spec: Spec, variant: Variant, x: Array, shared: _NumpyRunner | None = None) -> None:
        self.spec, self.variant, self.input = spec, variant, x
        self._mlp = mlp
        self._layers: list[_Folded] = folded_layers(mlp) if shared is None else shared._layers
        block = min(spec.batch, _ROWS_PER_BLOCK)
        self._x = np.empty((block, mlp.features_read), np.float32)
        self._h = [np.empty((block, weight.shape[1]), np.float32) for weight, _, _ in self._layers]
        self._logits = np.empty((spec.batch, mlp.outputs), np.float32)
        self._closed = False

    def run(self, x: Any) -> Any:
        if self._closed:
            raise InvalidInput("this runner is closed")
        if not isinstance(x, np.ndarray) or x.shape != self.input.shape or x.dtype != self.input.dtype:
            want, got = (f"{getattr(a, 'dtype', '')} {list(getattr(a, 'shape', ()))}" for a in (self.input, x))
            raise InvalidInput(f"the runner takes a NumPy array {want}, got a {type(x).__name__} {got}")
        for begin in range(0, self.spec.batch, _ROWS_PER_BLOCK):
            self._forward(x[begin : begin + _ROWS_PER_BLOCK], self._logits[begin : begin + _ROWS_PER_BLOCK])
        return self._output()

    def _forward(self, x: Array, out: Array) -> None:
        count = len(x)
        h = self._x[:count]
        begin = 0
        for start, stop in self._mlp.columns or ((0, self._mlp.features),):
            h[:, begin : begin + stop - start] = x[:, start:stop]
            begin += stop - start
        last = len(self._layers) - 1
        for index, (weight, bias, activation) in enumerate(self._layers):
            z = out if index == last else self._h[index][:count]
            np.matmul(h, weight, out=z)
            if bias is not None:
                z += bias
            if activation == "relu":
                np.maximum(z, 0, out=z)
            elif activation != "identity":
                z[...] = apply_activation(activation, z)
            h = z

    def _output(self) -> Any:
        z, mlp = self._logits, self._mlp
        if self.spec.output == "logits":
            return z
        if self.spec.output == "proba":
            return mlp.probabilities(z)
        ids = mlp.class_ids(z)
        if self.spec.output == "class":
            return ids
        return ids, mlp.margins(z)

    def bind(self, x: Any) -> _NumpyRunner:
        """Return a runner with the same weights whose static input is `x`."""
        return _NumpyRunner(self._mlp, self.spec, self.variant, x, self)

    def close(self) -> None:
        """Free the buffers."""
        self._closed = True
        self._x = self._logits = self.input = np.empty((0, 0), np.float32)
        self._h = []
