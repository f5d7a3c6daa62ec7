"""One version of one model, ready to answer: its Session, and its inputs and outputs in the protocol's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.engines import registry
from gigamlp.engines.base import Unsupported
from gigamlp.errors import InvalidInput
from gigamlp.inputs import Rows, value_check
from gigamlp.measure.telemetry import resolve_device
from gigamlp.mlp import MLP
from gigamlp.plan import Plan
from gigamlp.serve.settings import Settings
from gigamlp.session import Session
from gigamlp.spec import Spec

__all__ = ["DATATYPES", "Served", "Tensor", "choose", "natural_input"]

Array = NDArray[Any]
# NumPy dtype -> the protocol's word
DATATYPES = {
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "int8": "INT8",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
}
_BYTES_SCALE = 1 / 255  # what a model trained on images multiplies its uint8 rows with


@dataclass(frozen=True)
class Tensor:
    """An input or output: its name, the protocol's word for its dtype, and how many numbers a row has (None: one)."""

    name: str
    datatype: str
    width: int | None

    def to_json(self) -> dict[str, Any]:
        """Return it as model metadata has it."""
        return {"name": self.name, "datatype": self.datatype, "shape": [-1] if self.width is None else [-1, self.width]}


def natural_input(mlp: MLP) -> str:
    """Return the dtype that rows of `mlp` most likely have: uint8 for integer schemes and for inputs scaled by 1/255.

    Examples
    --------
    >>> import gigamlp as gm
    >>> natural_input(gm.load("mnist-40")), natural_input(gm.MLP([gm.Layer([[1.0, 2.0]])], head="regression"))
    ('uint8', 'float32')
    """
    scaled = np.ndim(mlp.input_scale) == 0 and np.isclose(mlp.input_scale, _BYTES_SCALE, rtol=1e-3)
    return "uint8" if mlp.scheme is not None or scaled else "float32"


def choose(mlp: MLP, settings: Settings, plan: Plan | None) -> Session:
    """Return the Session that serves `mlp`: the Plan's, the named engine's, or the quickest of those that need no Plan.

    Without either, the order is: on a GPU ``cuda_fused`` (for models with a scheme), ``torch_graph``, ``torch_eager``;
    on a CPU ``cpu_fused``, then what `Session` takes. No engine makes a model integer that carries no scheme.

    Raises
    ------
    Unsupported
        If a named engine cannot run it.
    """
    if plan is not None:
        return Session(mlp, plan, device=settings.device, check_finite=False)
    device = resolve_device(settings.device)
    dtype = settings.input_dtype or natural_input(mlp)
    own: dict[str, Any] = {"device": device, "threads": settings.threads, "check_finite": False}
    if settings.engine is not None:
        return Session(mlp, engine=settings.engine, variant=_exact(mlp, settings.engine), **own)
    order = ("cuda_fused", "torch_graph", "torch_eager") if device != "cpu" else ("cpu_fused",)
    for name in order:
        if name == "cuda_fused" and (mlp.scheme is None or dtype != "uint8"):
            continue
        try:
            registry.engine(name).variants(mlp, Spec(device, 1, dtype, "logits"))
            return Session(mlp, engine=name, variant=_exact(mlp, name), **own)
        except Unsupported:
            continue  # not silent: what serves is printed, logged, and part of the metadata
    return Session(mlp, **own)


def _exact(mlp: MLP, engine: str) -> dict[str, Any] | None:
    """Return the options that keep `engine` from rounding the weights of a model without a scheme."""
    return {"scheme": "float32"} if engine == "cpu_fused" and mlp.scheme is None else None


class Served:
    """A model version that answers.

    Parameters
    ----------
    name, version : str
    mlp : MLP
    session : Session
        It is closed with this.
    input_dtype : str
        NumPy's name of the rows' dtype.

    Attributes
    ----------
    inputs, outputs : tuple of Tensor
    row_bytes : int
        Bytes of one row.
    users : int
        Requests that use it.
    """

    def __init__(self, name: str, version: str, mlp: MLP, session: Session, input_dtype: str) -> None:
        self.name, self.version, self.mlp, self.session = name, version, mlp, session
        self.dtype = np.dtype(input_dtype)
        self.input_dtype, self.datatype, self.features = input_dtype, DATATYPES[input_dtype], mlp.features
        self.row_bytes = mlp.features * self.dtype.itemsize
        self.inputs = (Tensor("rows", self.datatype, mlp.features),)
        self.outputs = _outputs(mlp)
        self.classifies = mlp.head in ("softmax", "sigmoid")
        self.first = self.outputs[0].name
        self.users = 0
        self._free: Callable[[], None] | None = None
        self.raw_dtype = _raw_dtype(mlp)
        self.raw_datatype = DATATYPES[self.raw_dtype.name].encode()
        classes = mlp.classes if mlp.classes is not None and self.classifies else None
        self.labels = None if classes is None or np.array_equal(classes, np.arange(len(classes))) else classes
        self._one = self.labels is None and self.classifies and session.device == "cpu" and input_dtype == "uint8"

    @property
    def on_cpu(self) -> bool:
        """Whether the engine runs on the CPU."""
        return self.session.device == "cpu"

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that run."""
        return self.session._choice.engines

    def largest(self) -> int:
        """Return the largest batch that is planned for."""
        kind = "class" if self.classifies else "logits"
        near = self.session._host_ladder(self.input_dtype, kind)
        return (near or self.session._ladder(self.input_dtype, kind)).rungs[0].batch

    def check(self, rows: Array) -> None:
        """Refuse rows [n, features] of the right dtype that hold NaN or infinities, with `InvalidInput`."""
        test = value_check(Rows(rows, "numpy", "cpu", self.input_dtype), self.input_dtype, self.mlp, finite=True)
        if test is not None:
            test(0, len(rows))

    def run(self, kind: str, rows: Array) -> Array:
        """Answer rows [n, features]: ``class`` gives class ids [n], ``logits`` float32 [n, outputs]."""
        if kind == "logits":
            return np.asarray(self.session.logits(rows))
        if self._one and len(rows) == 1:
            return np.array([self.session.predict_one(rows[0])], np.int64)
        return np.asarray(self.session.class_ids(rows))

    def finish(self, name: str, kind: str, answers: Array) -> Array:
        """Turn what `run` gave into the output called `name`."""
        mlp = self.mlp
        if name == "logits":
            return answers
        if name == "proba":
            return np.ascontiguousarray(mlp.probabilities(answers), np.float32)
        if name == "class":
            ids = answers if kind == "class" else mlp.class_ids(answers)
            return ids if self.labels is None else self.labels[ids]
        return np.ascontiguousarray(mlp.answers(answers))

    def warm(self) -> None:
        """Build the runners of the smallest and the largest batch, so that no caller waits for that."""
        for rows in (1, self.largest()):
            x = np.zeros((rows, self.features), self.dtype)
            for kind in ("class", "logits") if self.classifies else ("logits",):
                self.run(kind, x)

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """Return the protocol's model metadata."""
        return {
            "name": self.name,
            "versions": versions,
            "platform": f"gigamlp_{self.engines[0]}",
            "inputs": [each.to_json() for each in self.inputs],
            "outputs": [each.to_json() for each in self.outputs],
        }

    def enter(self) -> None:
        """Count a request that uses this."""
        self.users += 1

    def leave(self) -> None:
        """Count a request that used this."""
        self.users -= 1
        if self._free is not None and not self.users:
            free, self._free = self._free, None
            free()

    def retire(self, free: Callable[[], None]) -> None:
        """Call `free` as soon as no request uses this any more."""
        self._free = free
        self.users += 1
        self.leave()

    def close(self) -> None:
        """Free what the engine holds."""
        self.session.close()

    def __repr__(self) -> str:
        return f"Served({self.name!r}, version {self.version}, {', '.join(self.engines)} on {self.session.device})"


def _raw_dtype(mlp: MLP) -> np.dtype[Any]:
    """Return what a raw answer holds: for classes the smallest dtype that fits all ids."""
    if mlp.head == "regression":
        return np.dtype("<f4")
    if mlp.head == "multilabel" or mlp.classes is None:
        return np.dtype(np.uint8)
    return np.min_scalar_type(len(mlp.classes) - 1).newbyteorder("<")


def _outputs(mlp: MLP) -> tuple[Tensor, ...]:
    logits = Tensor("logits", "FP32", mlp.outputs)
    if mlp.head == "regression":
        return Tensor("prediction", "FP32", None if mlp.outputs == 1 else mlp.outputs), logits
    if mlp.head == "multilabel":
        return Tensor("prediction", "INT64", mlp.outputs), Tensor("proba", "FP32", mlp.outputs), logits
    if mlp.classes is None:
        raise InvalidInput(f"{mlp.name!r} has no classes")
    word = "BYTES" if mlp.classes.dtype.kind in "US" else "INT64"
    return Tensor("class", word, None), Tensor("proba", "FP32", len(mlp.classes)), logits
