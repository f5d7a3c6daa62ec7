"""Engine ``openvino``: the MLP compiled by OpenVINO's CPU plugin, in float32, bfloat16 or int8.

``docs/cpu-peers.md`` says how it is configured, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.engines.base import Runner
from gigamlp.engines.chunked import (
    ChunkedRunner,
    bytes_saturate,
    check_spec,
    choose,
    missing,
    threads_of,
    with_chunks,
)
from gigamlp.engines.onnx_graph import INPUT, OUTPUTS, float32_model, qdq_model
from gigamlp.engines.static_int8 import hidden_choices, static_int8
from gigamlp.errors import ModelError, Unsupported
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = ["OpenVino"]

Array = NDArray[Any]
# OpenVINO finds the largest logit with a sort (TopK): for ten classes 65 ns a row on one thread, NumPy's argmax takes
# 35. NumPy runs on one thread, and costs a microsecond or two a call.
_NUMPY_ROWS, _NUMPY_THREADS = 64, 2


class OpenVino:
    """Run the MLP with OpenVINO, one stream, on the caller's rows and into buffers allocated once.

    Variants: ``compute`` (float32, bfloat16 if the CPU has it, int8), ``hidden`` (for int8: how hidden values are kept,
    see `gigamlp.engines.static_int8`), ``argmax`` (for class ids: by NumPy, or in the graph), ``chunk`` (rows per
    call).
    """

    name = "openvino"
    integer = False
    compiles = False

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        if device != "cpu":
            return "openvino is run on the CPU only here"
        return missing(("openvino", "onnx"), "openvino")

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring. Raises `Unsupported` as `build` does."""
        forms = self._forms(mlp, spec, full)
        usual = forms[0].get("argmax")
        both = full and spec.output == "class"
        return with_chunks([f for f in forms if both or f.get("argmax") == usual], spec, full)

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner; see `Engine.build`."""
        with stopwatch() as watch:
            form, variant = choose(self._forms(mlp, spec, variant is not None), spec, variant, self.name)
            runner = ChunkedRunner(mlp, spec, variant, _Compiled(mlp, spec, form))
        runner.build_s = watch.seconds
        return runner

    def _forms(self, mlp: MLP, spec: Spec, full: bool) -> list[Variant]:
        reason = self.unavailable(spec.device)
        if reason is not None:
            raise Unsupported(reason)
        check_spec(mlp, spec, self.name)
        options: list[dict[str, str]] = []
        if not bytes_saturate():  # without VNNI oneDNN multiplies bytes with saturation, or with halved weights
            options += [{"compute": "int8", "hidden": h} for h in hidden_choices(mlp, spec.input_dtype, full=full)]
        if _has_bfloat16():
            options.append({"compute": "bfloat16"})
        options.append({"compute": "float32"})
        numpy_first = spec.batch >= _NUMPY_ROWS and threads_of(spec) <= _NUMPY_THREADS and spec.output == "class"
        places = ("numpy", "graph") if numpy_first else ("graph", "numpy")
        return [Variant.of(**each, argmax=place) for each in options for place in places]


def _core() -> Any:
    import openvino

    return openvino.Core()


def _has_bfloat16() -> bool:
    return "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class _Compiled:
    """The network for each chunk size that occurs: OpenVINO is quickest when all shapes are known."""

    engine = OpenVino.name

    def __init__(self, mlp: MLP, spec: Spec, form: Variant) -> None:
        self._mlp, self._threads = mlp, threads_of(spec)
        self._by_numpy = spec.output == "class" and form.get("argmax") == "numpy"
        self._output = "logits" if self._by_numpy else spec.output
        self._compute = str(form.get("compute"))
        self._core = _core()
        self._network = self._core.read_model(_model(mlp, spec, form, self._output))
        self._requests: dict[int, _Request] = {}

    def call(self, rows: Array, answers: tuple[Array, ...]) -> Callable[[], None]:
        """Return what runs the network on `rows` and writes `answers`, without a copy of either."""
        request = self._request(len(rows))
        if not self._by_numpy:
            return request.call(rows, answers)
        ids, logits = answers[0], np.empty((len(rows), self._mlp.outputs), np.float32)
        forward = request.call(rows, (logits,))
        if self._mlp.head == "sigmoid":

            def positive() -> None:
                forward()
                np.greater(logits[:, 0], 0, out=ids, casting="unsafe")

            return positive

        def largest() -> None:
            forward()
            np.argmax(logits, axis=1, out=ids)

        return largest

    def _request(self, rows: int) -> _Request:
        if rows not in self._requests:
            network = self._network.clone()
            network.reshape([rows, self._mlp.features])
            options = {
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": 1,
                "INFERENCE_NUM_THREADS": self._threads,
                # the default rounds to bfloat16 where the CPU has it
                "INFERENCE_PRECISION_HINT": "bf16" if self._compute == "bfloat16" else "f32",
                # the default would round float32 hidden values to int8, 32 at a time, before int8 weights
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
                "ENABLE_CPU_PINNING": False,  # a pinned pool keeps other engines and processes from sharing the cores
            }
            self._requests[rows] = _Request(self._core.compile_model(network, "CPU", options), OUTPUTS[self._output])
        return self._requests[rows]


class _Request:
    """One infer request; it is handed other memory only when another call than the last one runs."""

    def __init__(self, compiled: Any, names: tuple[str, ...]) -> None:
        self._request: Any = compiled.create_infer_request()
        self._names = names
        self._last: object = None

    def call(self, rows: Array, answers: tuple[Array, ...]) -> Callable[[], None]:
        """Return what runs the network on `rows` and writes `answers`, which it keeps alive."""
        from openvino import Tensor

        infer, request = self._request.infer, self._request
        source = Tensor(rows, shared_memory=True)
        targets = [
            (name, Tensor(answer, shared_memory=True)) for name, answer in zip(self._names, answers, strict=True)
        ]
        me = object()

        def run() -> None:
            if self._last is not me:
                request.set_tensor(INPUT, source)
                for name, target in targets:
                    request.set_tensor(name, target)
                self._last = me
            infer(share_outputs=True)

        return run


def _model(mlp: MLP, spec: Spec, form: Variant, output: str) -> bytes:
    if form.get("compute") != "int8":
        return float32_model(mlp, spec.input_dtype, output)
    try:
        return qdq_model(static_int8(mlp, spec.input_dtype, str(form.get("hidden"))), output)
    except ModelError as error:
        raise Unsupported(str(error)) from error
