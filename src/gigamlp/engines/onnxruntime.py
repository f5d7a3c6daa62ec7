"""Engine ``onnxruntime``: the MLP as an ONNX model, in float32 or with int8 products, as a user would deploy it.

``docs/cpu-peers.md`` says how it is configured, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from gigamlp.engines.onnx_graph import INPUT, OUTPUTS, float32_model, integer_model, qdq_model
from gigamlp.engines.static_int8 import first_layer, hidden_choices, static_int8
from gigamlp.errors import ModelError, Unsupported
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = ["OnnxRuntime"]

Array = NDArray[Any]
_ERRORS_ONLY = 3


class OnnxRuntime:
    """Run the MLP with onnxruntime's CPU provider, on the caller's rows and into buffers allocated once.

    Variants: ``compute`` (float32, int8), ``hidden`` (for int8: how hidden values are kept, see
    `gigamlp.engines.static_int8`), ``chunk`` (rows per call). With ``hidden=float`` the first layer is a MatMulInteger,
    otherwise all layers are QuantizeLinear/DequantizeLinear pairs, which onnxruntime makes integer products of.
    """

    name = "onnxruntime"
    integer = False
    compiles = False

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device`, or None."""
        if device != "cpu":
            return "onnxruntime is run on the CPU only here"
        return missing(("onnxruntime", "onnx"), "onnx")

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring. Raises `Unsupported` as `build` does."""
        return with_chunks(self._forms(mlp, spec, full), spec, full)

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner; see `Engine.build`."""
        with stopwatch() as watch:
            form, variant = choose(self._forms(mlp, spec, variant is not None), spec, variant, self.name)
            program = _Session(_model(mlp, spec, form), spec)
            runner = ChunkedRunner(mlp, spec, variant, program)
        runner.build_s = watch.seconds
        return runner

    def _forms(self, mlp: MLP, spec: Spec, full: bool) -> list[Variant]:
        reason = self.unavailable(spec.device)
        if reason is not None:
            raise Unsupported(reason)
        check_spec(mlp, spec, self.name)
        choices = hidden_choices(mlp, spec.input_dtype, full=full)
        return [Variant.of(compute="int8", hidden=hidden) for hidden in choices] + [Variant.of(compute="float32")]


def _model(mlp: MLP, spec: Spec, form: Variant) -> bytes:
    if form.get("compute") == "float32":
        return float32_model(mlp, spec.input_dtype, spec.output)
    try:
        if form.get("hidden") == "float":
            return integer_model(mlp, *first_layer(mlp), spec.input_dtype, spec.output)
        return qdq_model(static_int8(mlp, spec.input_dtype, str(form.get("hidden"))), spec.output)
    except ModelError as error:
        raise Unsupported(str(error)) from error


class _Session:
    """A compiled model. Its threads sleep when there is nothing to do."""

    engine = OnnxRuntime.name

    def __init__(self, model: bytes, spec: Spec) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads_of(spec)
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = _ERRORS_ONLY
        # threads that spin for the next call take the core from whoever else could use it
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if bytes_saturate():  # multiply uint8 by uint8 then: slower, and exact
            options.add_session_config_entry("session.x64quantprecision", "1")
        self._session: Any = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._names = OUTPUTS[spec.output]

    def call(self, rows: Array, answers: tuple[Array, ...]) -> partial[None]:
        """Return what runs the model on `rows` and writes `answers`, without a copy of either."""
        binding = self._session.io_binding()
        binding.bind_input(INPUT, "cpu", 0, rows.dtype.type, rows.shape, rows.ctypes.data)
        for name, answer in zip(self._names, answers, strict=True):
            binding.bind_output(name, "cpu", 0, answer.dtype.type, answer.shape, answer.ctypes.data)
        # the arrays are bound by address: `hold` keeps them alive as long as the call
        return partial(self._run, binding, hold=(rows, answers))

    def _run(self, binding: Any, hold: object) -> None:
        del hold
        self._session.run_with_iobinding(binding)
