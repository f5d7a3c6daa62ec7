"""Data: MNIST from the package, and a user's own rows from files. Importing this loads nothing heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# public name -> the module that defines it; loaded when the name is first used
_PUBLIC = {
    "Dataset": "gigamlp.data.arrays",
    "hold_out": "gigamlp.data.split",
    "load_arrays": "gigamlp.data.arrays",
    "load_mnist": "gigamlp.data.mnist",
    "read_idx": "gigamlp.data.idx",
}

__all__ = ["Dataset", "hold_out", "load_arrays", "load_mnist", "read_idx"]

if TYPE_CHECKING:
    from gigamlp.data.arrays import Dataset, load_arrays
    from gigamlp.data.idx import read_idx
    from gigamlp.data.mnist import load_mnist
    from gigamlp.data.split import hold_out


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'gigamlp.data' has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
