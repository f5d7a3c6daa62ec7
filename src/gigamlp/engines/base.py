"""What an engine is: the protocols `Engine` and `Runner`, and nothing that needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from gigamlp.errors import Unsupported
from gigamlp.spec import INPUT_DTYPES, OUTPUTS, Spec, Variant

__all__ = ["INPUT_DTYPES", "OUTPUTS", "Engine", "Runner", "Spec", "Unsupported", "Variant"]


@runtime_checkable
class Runner(Protocol):
    """An engine bound to one MLP and one Spec. It owns its buffers, its stream and its graph.

    Attributes
    ----------
    engine : str
    spec : Spec
    variant : Variant
    input : Any
        The static input buffer [batch, features], on the device, of the Spec's dtype. ``run(runner.input)`` copies
        nothing; its content may be overwritten between runs.
    build_s : float
        Seconds that building took, compilation included.
    """

    engine: str
    spec: Spec
    variant: Variant
    input: Any
    build_s: float

    def run(self, x: Any) -> Any:
        """Run on exactly `batch` rows on the device and return the output buffer, valid until the next run.

        Class ids are int64, or a narrower integer type that holds them all. On CUDA the work is queued on the caller's
        current stream; nothing is synchronised.
        """
        ...

    def bind(self, x: Any) -> Runner:
        """Return another runner of the same variant whose static input is `x`: for a small ring of input buffers.

        It shares weights and compiled code with this one, so the two must not run at the same time.
        """
        ...

    def close(self) -> None:
        """Free buffers and graphs. Running afterwards is an error; closing twice is not."""
        ...


class Engine(Protocol):
    """One way to execute an MLP. One file each; adding one = that file and a line in `registry`.

    Attributes
    ----------
    name : str
    integer : bool
        Whether it computes with quantised weights (it then equals its scheme's reference, not float32).
    compiles : bool
        Whether building takes seconds (the tuner then builds it for survivors only).

    An engine with the attribute ``cascades = True`` takes a `Cascade` too; `gigamlp.engines.cascades.for_model` finds
    what runs one by the others.
    """

    name: str
    integer: bool
    compiles: bool

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run on `device` of this machine, or None if it can."""
        ...

    def variants(self, mlp: Any, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the variants worth measuring for this MLP and Spec, the most promising first; `full` gives all."""
        ...

    def build(self, mlp: Any, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner. Without `variant`, the first of `variants`.

        Raises
        ------
        Unsupported
            With the reason, if this engine cannot do it.
        """
        ...
