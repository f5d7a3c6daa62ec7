"""The words of a run that need no engine: `Spec`, what a run must do, and `Variant`, one way to do it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gigamlp.errors import InvalidInput

__all__ = ["INPUT_DTYPES", "OUTPUTS", "Spec", "Variant"]

INPUT_DTYPES = ("uint8", "int8", "float16", "bfloat16", "float32")
MAX_THREADS = 1024  # thread pools of tens of thousands end in a segmentation fault
OUTPUTS = ("class", "margin", "logits", "proba")

Option = str | int | bool


@dataclass(frozen=True)
class Spec:
    """What a run must do.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:0"``; resolved, never ``"auto"``.
    batch : int
        Rows per run, at least 1.
    input_dtype : {"uint8", "int8", "float16", "bfloat16", "float32"}
    output : {"class", "margin", "logits", "proba"}
        ``class`` is class indices [batch], whole numbers; ``margin`` is class indices with the difference of the two
        largest logits; ``logits`` [batch, outputs]; ``proba`` [batch, classes].
    input_on : {"device", "host"}
        Where the rows live when a run begins.
    threads : int or None
        CPU threads; None leaves it to the engine.

    Raises
    ------
    InvalidInput
        If a field has a value that is not listed above.
    """

    device: str = "cpu"
    batch: int = 1024
    input_dtype: str = "uint8"
    output: str = "class"
    input_on: str = "device"
    threads: int | None = None

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not index.isdecimal()) or (kind == "cpu" and index):
            raise InvalidInput(f"device must be 'cpu' or 'cuda:N', got {self.device!r}")
        if not isinstance(self.batch, bool) and hasattr(self.batch, "__index__"):  # NumPy's whole numbers too
            object.__setattr__(self, "batch", operator.index(self.batch))
        if type(self.batch) is not int or self.batch < 1:
            raise InvalidInput(f"batch must be a whole number of rows >= 1, got {self.batch!r}")
        if self.input_dtype not in INPUT_DTYPES:
            raise InvalidInput(f"input_dtype must be one of {', '.join(INPUT_DTYPES)}; got {self.input_dtype!r}")
        if self.output not in OUTPUTS:
            raise InvalidInput(f"output must be one of {', '.join(OUTPUTS)}; got {self.output!r}")
        if self.input_on not in ("device", "host"):
            raise InvalidInput(f"input_on must be 'device' or 'host', got {self.input_on!r}")
        if self.threads is not None and (type(self.threads) is not int or not 1 <= self.threads <= MAX_THREADS):
            raise InvalidInput(f"threads must be None or a whole number in 1..{MAX_THREADS}, got {self.threads!r}")

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.startswith("cuda")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)

    @property
    def label(self) -> str:
        """The Spec in one line, as tables show it."""
        threads = "" if self.threads is None else f" threads={self.threads}"
        where = "" if self.input_on == "device" else f" on {self.input_on}"
        return f"{self.device} batch={self.batch} {self.input_dtype}{where} -> {self.output}{threads}"


@dataclass(frozen=True)
class Variant:
    """One way in which an engine can run an MLP: named options, hashable.

    Examples
    --------
    >>> Variant.of(op="linear", pad=16, inplace=True).label
    'op=linear pad=16 inplace=yes'
    """

    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def of(cls, **options: Option) -> Variant:
        """Make a Variant from keyword options; their order is kept and shown."""
        return cls(tuple(options.items()))

    @classmethod
    def from_json(cls, options: Mapping[str, Option]) -> Variant:
        """Make a Variant from what `to_json` gave."""
        return cls(tuple(options.items()))

    def to_json(self) -> dict[str, Option]:
        """Return the options as a dict."""
        return dict(self.options)

    def get(self, key: str, default: Option | None = None) -> Any:
        """Return the option called `key`."""
        return dict(self.options).get(key, default)

    @property
    def label(self) -> str:
        """The options in one line, as tables show them."""
        words = {True: "yes", False: "no"}
        return " ".join(f"{k}={words[v] if isinstance(v, bool) else v}" for k, v in self.options)
