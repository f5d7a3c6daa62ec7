"""What the CPU peers share: a batch cut into chunks of rows, buffers of our own, and what is refused and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.measure.cpuinfo import cpu_info, usable_cpus
from gigamlp.mlp import MLP
from gigamlp.spec import Spec, Variant

__all__ = [
    "ChunkedRunner",
    "Program",
    "bytes_saturate",
    "check_spec",
    "choose",
    "missing",
    "threads_of",
    "with_chunks",
]

Array = NDArray[Any]
Call = Callable[[], object]

# rows per call. Measured on 784-40-10 to 784-512-10: float32 is quickest with 250 to 500 rows, int8 with 1,000 to 5,000
_CHUNKS = (512, 2048)
_MORE_CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)


class Program(Protocol):
    """A compiled network of a peer library, shared by the runners that are bound to it.

    Attributes
    ----------
    engine : str
    """

    engine: str

    def call(self, rows: Array, answers: tuple[Array, ...]) -> Call:
        """Return what runs the network on `rows` and writes `answers`, both contiguous and left where they are."""
        ...


class ChunkedRunner:
    """A runner that hands a batch to a `Program` in chunks of rows, one after the other.

    Large batches are slower in one piece: the hidden values of all rows no longer fit the cache.

    Parameters
    ----------
    mlp : MLP
    spec : Spec
    variant : Variant
        With the option ``chunk``, rows per call; a batch that is smaller is one chunk.
    program : Program
    x : ndarray, optional
        The static input.
    """

    build_s = 0.0

    def __init__(self, mlp: MLP, spec: Spec, variant: Variant, program: Program, x: Array | None = None) -> None:
        self.engine, self.spec, self.variant = program.engine, spec, variant
        self._mlp, self._program = mlp, program
        self.input: Any = np.zeros((spec.batch, mlp.features), spec.input_dtype) if x is None else x
        self._answers = _answer_buffers(mlp, spec)
        self._pid = os.getpid()
        self._closed = False
        self._own = self._bind(self._check(self.input))

    def run(self, x: Any) -> Any:
        """Run on exactly `batch` rows; see `Runner.run`."""
        if self._closed:
            raise InvalidInput("this runner is closed")
        if self._pid != os.getpid():
            raise InvalidInput(
                f"this {self.engine} runner was built before a fork, and its threads do not exist in the child; "
                "build it in the process that uses it"
            )
        for call in self._own if x is self.input else self._bind(self._check(x)):
            call()
        return self._answers if self.spec.output == "margin" else self._answers[0]

    def _check(self, x: Any) -> Array:
        want = (self.spec.batch, self._mlp.features)
        if not isinstance(x, np.ndarray) or x.shape != want or x.dtype != np.dtype(self.spec.input_dtype):
            got = f"{type(x).__name__} {getattr(x, 'dtype', '')} {list(getattr(x, 'shape', ()))}"
            raise InvalidInput(f"the runner takes a NumPy array {self.spec.input_dtype} {list(want)}, got a {got}")
        if not (x.flags.c_contiguous and x.flags.aligned):
            raise InvalidInput("the runner takes contiguous rows; copy them with numpy.ascontiguousarray first")
        return x

    def _bind(self, x: Array) -> list[Call]:
        size = int(self.variant.get("chunk"))
        starts = range(0, self.spec.batch, size)
        return [self._program.call(x[b : b + size], tuple(y[b : b + size] for y in self._answers)) for b in starts]

    def bind(self, x: Any) -> ChunkedRunner:
        """Return a runner that shares the compiled network and whose static input is `x`."""
        return ChunkedRunner(self._mlp, self.spec, self.variant, self._program, x)

    def close(self) -> None:
        """Free buffers, and the network with the last runner that uses it."""
        self._closed = True
        self._own = []
        self._answers = ()
        self.input = np.empty((0, 0), self.spec.input_dtype)
        self._program = _CLOSED


class _Closed:
    engine = ""

    def call(self, rows: Array, answers: tuple[Array, ...]) -> Call:
        del rows, answers
        raise InvalidInput("this runner is closed")


_CLOSED = _Closed()


def _answer_buffers(mlp: MLP, spec: Spec) -> tuple[Array, ...]:
    n = spec.batch
    if spec.output == "class":
        return (np.zeros(n, np.int64),)
    if spec.output == "margin":
        return np.zeros(n, np.int64), np.zeros(n, np.float32)
    width = 2 if spec.output == "proba" and mlp.head == "sigmoid" else mlp.outputs
    return (np.zeros((n, width), np.float32),)


# ---- what is offered, and what is refused ---------------------------------------------------------------------------


def missing(packages: Sequence[str], extra: str) -> str | None:
    """Return which of `packages` are not installed and how to get them, or None if all are here."""
    absent = [name for name in packages if find_spec(name) is None]
    if not absent:
        return None
    verb, it = ("is", "it") if len(absent) == 1 else ("are", "them")
    return f"{' and '.join(absent)} {verb} not installed; get {it} with: pip install 'gigamlp[{extra}]'"


def check_spec(mlp: MLP, spec: Spec, library: str) -> None:
    """Raise `Unsupported` if a peer library on the CPU cannot give what `spec` asks of `mlp`."""
    if spec.device != "cpu":
        raise Unsupported(f"{library} is run on the CPU only here")
    if spec.input_dtype == "bfloat16":
        raise Unsupported("the rows are NumPy's, which has no bfloat16; float32 holds the same values")
    if spec.output in ("class", "margin") and mlp.head not in ("softmax", "sigmoid"):
        raise Unsupported(f"head {mlp.head!r} has no single class per row; ask for logits")
    if spec.output == "margin" and mlp.head == "softmax" and mlp.outputs < 2:
        raise Unsupported("one class has no margin")
    if spec.output == "proba" and mlp.head == "regression":
        raise Unsupported("head 'regression' has no probabilities; ask for logits")


def threads_of(spec: Spec) -> int:
    """Return the threads to use: as many as asked for, else one for each core that this process may use."""
    return usable_cpus() if spec.threads is None else spec.threads


def bytes_saturate() -> bool:
    """Whether this CPU multiplies bytes with instructions that saturate at 16 bits (x86 without VNNI)."""
    info = cpu_info()
    if info["arch"] not in ("x86_64", "AMD64", "i686"):
        return False
    return not {"avx512_vnni", "avx_vnni"} & set(info["flags"])


def with_chunks(forms: Sequence[Variant], spec: Spec, full: bool) -> list[Variant]:
    """Return every form with the chunk sizes that are worth trying for the batch of `spec`."""
    sizes = sorted({min(size, spec.batch) for size in (_MORE_CHUNKS if full else _CHUNKS)})
    return [Variant.of(**form.to_json(), chunk=size) for form in forms for size in sizes]


def choose(forms: Sequence[Variant], spec: Spec, variant: Variant | None, engine: str) -> tuple[Variant, Variant]:
    """Return the first form that has the options of `variant`, without and with its chunk.

    Raises
    ------
    InvalidInput
        If `variant` names an option that does not exist, or its chunk is no number of rows.
    Unsupported
        If no form has these options.
    """
    asked = {} if variant is None else variant.to_json()
    size = asked.pop("chunk", _CHUNKS[0])
    if type(size) is not int or size < 1:
        raise InvalidInput(f"chunk must be a whole number of rows >= 1, got {size!r}")
    known = {key for form in forms for key in form.to_json()}
    unknown = sorted(set(asked) - known)
    if unknown:
        raise InvalidInput(f"unknown options {', '.join(unknown)}; known: {', '.join([*sorted(known), 'chunk'])}")
    for form in forms:
        if asked.items() <= form.to_json().items():
            return form, Variant.of(**form.to_json(), chunk=min(size, spec.batch))
    there = "; ".join(form.label for form in forms)
    raise Unsupported(f"engine {engine!r} has no variant {Variant.from_json(asked).label!r} here; there are: {there}")
