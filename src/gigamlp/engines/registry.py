"""The list of engines. Adding one = one new file and one line here."""

from __future__ import annotations

from importlib import import_module

from gigamlp.engines.base import Engine
from gigamlp.errors import InvalidInput

__all__ = ["engine", "engine_names"]

# name -> "module:class"; imported when it is asked for, so that listing engines costs nothing
_ENGINES = {
    "numpy": "gigamlp.engines.numpy_forward:NumpyForward",
    "torch_eager": "gigamlp.engines.torch_eager:TorchEager",
    "torch_graph": "gigamlp.engines.torch_graph:TorchGraph",
    "torch_compile": "gigamlp.engines.torch_compile:TorchCompile",
    "cpu_fused": "gigamlp.engines.cpu_fused:CpuFused",
    "cuda_fused": "gigamlp.engines.cuda_fused:CudaFused",
    "onnxruntime": "gigamlp.engines.onnxruntime:OnnxRuntime",
    "openvino": "gigamlp.engines.openvino:OpenVino",
}


def engine_names() -> tuple[str, ...]:
    """Return the names of all engines, available here or not."""
    return tuple(_ENGINES)


def engine(name: str) -> Engine:
    """Return the engine called `name`.

    Raises
    ------
    InvalidInput
        If there is no engine of that name. That it cannot run here is said by `Engine.unavailable`, not here.
    """
    if name not in _ENGINES:
        raise InvalidInput(f"unknown engine {name!r}; known: {', '.join(_ENGINES)}")
    module, _, attribute = _ENGINES[name].partition(":")
    made: Engine = getattr(import_module(module), attribute)()
    return made
