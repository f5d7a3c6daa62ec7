"""gigamlp: small MLPs as fast as the hardware allows, with honest numbers.

An MLP goes in, a measured Plan comes out, a Session runs it::

    import gigamlp as gm

    x_train, y_train, x_test, y_test = gm.data.load_mnist()
    mlp = gm.train.ridge(x_train, y_train, hidden=512, seed=0)
    plan = gm.optimize(mlp, device="auto", batch=(1, 1024))
    with gm.Session(mlp, plan) as session:
        classes = session.predict(x_test)

Importing this package imports neither torch nor CUDA nor matplotlib: each name below is loaded when it is first used.
"""

from __future__ import annotations

# False at run time, as typing's own is. typing and importlib take 10 ms to load, and until the command line's `main`
# runs, Ctrl-C is a traceback.
TYPE_CHECKING = False

__version__ = "0.1.0"

# public name -> the module that defines it ("" = the name is itself a submodule)
_PUBLIC = {
    "GigaMLPClassifier": "gigamlp.estimator",
    "Cascade": "gigamlp.cascade",
    "MLP": "gigamlp.mlp",
    "Layer": "gigamlp.mlp",
    "Plan": "gigamlp.plan",
    "Record": "gigamlp.record",
    "Scheme": "gigamlp.mlp",
    "Session": "gigamlp.session",
    "Spec": "gigamlp.spec",
    "agreement": "gigamlp.quantize",
    "calibrate": "gigamlp.calibration",
    "from_onnx": "gigamlp.convert.onnx",
    "from_sklearn": "gigamlp.convert.sklearn",
    "from_torch": "gigamlp.convert.torch",
    "load": "gigamlp.mlp",
    "optimize": "gigamlp.tune",
    "quantise": "gigamlp.quantize",
    "to_c": "gigamlp.convert.c",
    "to_numpy_script": "gigamlp.convert.numpy_script",
    "to_onnx": "gigamlp.convert.onnx",
    "to_torch": "gigamlp.convert.torch",
    "convert": "",
    "data": "",
    "engines": "",
    "errors": "",
    "measure": "",
    "models": "",
    "train": "",
}

__all__ = [
    "Cascade",
    "GigaMLPClassifier",
    "MLP",
    "Layer",
    "Plan",
    "Record",
    "Scheme",
    "Session",
    "Spec",
    "__version__",
    "agreement",
    "calibrate",
    "convert",
    "data",
    "engines",
    "errors",
    "from_onnx",
    "from_sklearn",
    "from_torch",
    "load",
    "measure",
    "models",
    "optimize",
    "quantise",
    "to_c",
    "to_numpy_script",
    "to_onnx",
    "to_torch",
    "train",
]

if TYPE_CHECKING:
    from typing import Any

    from gigamlp import convert, data, engines, errors, measure, models, train
    from gigamlp.calibration import calibrate
    from gigamlp.cascade import Cascade
    from gigamlp.convert.c import to_c
    from gigamlp.convert.numpy_script import to_numpy_script
    from gigamlp.convert.onnx import from_onnx, to_onnx
    from gigamlp.convert.sklearn import from_sklearn
    from gigamlp.convert.torch import from_torch, to_torch
    from gigamlp.estimator import GigaMLPClassifier
    from gigamlp.mlp import MLP, Layer, Scheme, load
    from gigamlp.plan import Plan
    from gigamlp.quantize import agreement, quantise
    from gigamlp.record import Record
    from gigamlp.session import Session
    from gigamlp.spec import Spec
    from gigamlp.tune import optimize


def __getattr__(name: str) -> Any:
    from importlib import import_module

    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'gigamlp' has no attribute {name!r}") from None
    value = import_module(f"gigamlp.{name}") if not module else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
