"""NVIDIA's Python packages, imported when they are needed, by one thread at a time."""

from __future__ import annotations

import importlib
import threading
from types import ModuleType

__all__ = ["core", "nvidia"]

# Their modules import one another in circles: two threads that begin at different ends get halves of modules.
_ONE_AT_A_TIME = threading.Lock()


def nvidia(name: str) -> ModuleType:
    """Return the module `name`, for example ``cuda.bindings.driver``."""
    with _ONE_AT_A_TIME:
        return importlib.import_module(name)


def core() -> ModuleType:
    """Return the package with `Program`: cuda.core, or cuda.core.experimental before cuda-core 0.5 or so."""
    found = nvidia("cuda.core")
    return found if hasattr(found, "Program") else nvidia("cuda.core.experimental")
