"""Models of other frameworks to MLPs, and MLPs to models of other frameworks, to C and to a NumPy script.

Nothing here imports a framework before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "from_onnx": "gigamlp.convert.onnx",
    "from_sklearn": "gigamlp.convert.sklearn",
    "from_torch": "gigamlp.convert.torch",
    "to_c": "gigamlp.convert.c",
    "to_numpy_script": "gigamlp.convert.numpy_script",
    "to_onnx": "gigamlp.convert.onnx",
    "to_torch": "gigamlp.convert.torch",
}

__all__ = ["from_onnx", "from_sklearn", "from_torch", "to_c", "to_numpy_script", "to_onnx", "to_torch"]

if TYPE_CHECKING:
    from gigamlp.convert.c import to_c
    from gigamlp.convert.numpy_script import to_numpy_script
    from gigamlp.convert.onnx import from_onnx, to_onnx
    from gigamlp.convert.sklearn import from_sklearn
    from gigamlp.convert.torch import from_torch, to_torch


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gigamlp.convert' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
