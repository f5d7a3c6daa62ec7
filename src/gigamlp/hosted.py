"""Rows in host memory, answers in host memory: which ways lead there, and where a GPU begins to be worth the way.

Three kinds of runs compete for them: a CPU engine; a GPU whose kernel reads host memory by itself; a GPU to which rows
are copied, and from which answers are. All are measured from host array to host array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Model
from gigamlp.engines.base import Engine, Runner, Unsupported
from gigamlp.errors import InvalidInput
from gigamlp.ladder import Piece, Rung
from gigamlp.plan import Candidate
from gigamlp.runners import Runners
from gigamlp.spec import Spec, Variant

__all__ = [
    "STAGED",
    "HostEngine",
    "budget_shares",
    "contenders",
    "host_specs",
    "is_staged",
    "on_device",
    "places",
    "run_from_host",
]

STAGED = "staged"  # the option of a variant whose rows are copied to the device
# Row counts that are measured besides the caller's, so that it is known where the GPU overtakes the CPU.
_STEPS = (1, 8, 64, 512, 4096)


def host_specs(spec: Spec, batches: Sequence[int], *, cpu: bool) -> list[Spec]:
    """Return the Specs to measure for host rows: those of `spec`'s CUDA device and, with `cpu`, of the CPU.

    Parameters
    ----------
    spec : Spec
        Of the device; its batch does not matter.
    batches : sequence of int
        The caller's. Between 1 and the largest of them some more are added if there is a CPU to compare with.

    Examples
    --------
    >>> [(s.device, s.batch) for s in host_specs(Spec("cuda:0"), (1, 100), cpu=True)]
    [('cuda:0', 1), ('cpu', 1), ('cuda:0', 8), ('cpu', 8), ('cuda:0', 64), ('cpu', 64), ('cuda:0', 100), ('cpu', 100)]
    """
    sizes = sorted({*batches, *(n for n in _STEPS if cpu and n < max(batches))})
    devices = (spec.device, "cpu") if cpu else (spec.device,)
    return [replace(spec, device=device, batch=n, input_on="host") for n in sizes for device in devices]


def places(specs: list[Spec], auto: bool, input_on: str | Sequence[str] | None, beside_cpu: bool | None) -> list[Spec]:
    """Return the Specs for the device's own rows, for rows in host memory, or both. On a CPU they are the same.

    See `gigamlp.optimize` for the parameters; `auto` is whether the device was chosen for the caller.
    """
    asked = [input_on] if isinstance(input_on, str) else list(input_on or (("device", "host") if auto else ("device",)))
    if not set(asked) <= {"device", "host"}:
        raise InvalidInput(f"input_on must be 'device', 'host' or both, got {input_on!r}")
    if not specs[0].is_cuda:
        return specs
    beside = auto if beside_cpu is None else beside_cpu
    near = host_specs(specs[0], [s.batch for s in specs], cpu=beside) if "host" in asked else []
    return [*(specs if "device" in asked else []), *near]


def budget_shares(specs: Sequence[Spec]) -> list[float]:
    """Return each Spec's share of a budget: those for host rows, however many, have half of it where there are others.

    Examples
    --------
    >>> budget_shares([Spec("cuda:0"), *host_specs(Spec("cuda:0"), (1,), cpu=True)])
    [1.0, 0.5, 0.5]
    """
    near = sum(s.input_on == "host" for s in specs)
    other = len(specs) - near
    return [other / near if other and s.input_on == "host" else 1.0 for s in specs]


def is_staged(rung: Rung) -> bool:
    """Return whether rows are copied to the device for `rung`."""
    return rung.variant is not None and bool(rung.variant.get(STAGED))


def on_device(rung: Rung) -> Rung:
    """Return the rung that runs on the device for a staged one."""
    assert rung.variant is not None
    return replace(rung, spec=replace(rung.spec, input_on="device"), variant=_plain(rung.variant))


def _plain(variant: Variant) -> Variant:
    return Variant(tuple((key, value) for key, value in variant.options if key != STAGED))


def contenders(
    spec: Spec, named: Sequence[str] | None, found: Sequence[Candidate], find: Callable[[str], Engine]
) -> tuple[Sequence[str] | None, Callable[[str], Engine]]:
    """Return which engines compete for host rows (None: all), and what finds them by name.

    Engines that the caller named need not run on the CPU as well.
    """
    if spec.is_cuda:
        device = [c for c in found if c.spec.input_on == "device"]
        return named, lambda name: HostEngine(find(name), device)
    return (None if named is None else [n for n in named if find(n).unavailable("cpu") is None]), find


class HostEngine:
    """An engine as host rows see it: its own variants for them, and its variants for device rows, staged.

    Parameters
    ----------
    engine : Engine
    found : sequence of Candidate
        What was measured for device rows. If there is a winner of this engine with the same batch, that variant alone
        is staged; if another engine won, none of this one is.
    """

    def __init__(self, engine: Engine, found: Sequence[Candidate] = ()) -> None:
        self._engine, self._found = engine, found
        self.name, self.integer, self.compiles = engine.name, engine.integer, engine.compiles

    def unavailable(self, device: str) -> str | None:
        """Return why the engine cannot run on `device`, or None."""
        return self._engine.unavailable(device)

    def variants(self, mlp: Model, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the engine's variants for host rows, then the staged ones.

        Raises
        ------
        Unsupported
            If there are neither.
        """
        own: list[Variant] = []
        reason = ""
        try:
            own = list(self._engine.variants(mlp, spec, full=full))
        except Unsupported as error:
            reason = error.reason
        staged: list[Variant] = []
        if spec.output == "margin" or spec.input_dtype == "bfloat16":
            reason = reason or f"host rows are not staged for {spec.input_dtype} -> {spec.output}"
        else:
            staged = self._staged(mlp, replace(spec, input_on="device"), full)
            if not staged:
                reason = "another engine is quicker once the rows are on the device"
        if not own and not staged:
            raise Unsupported(reason)
        return own + [Variant((*v.options, (STAGED, True))) for v in staged]

    def _staged(self, mlp: Model, spec: Spec, full: bool) -> list[Variant]:
        usable = [c for c in self._found if c.spec == spec and c.rejected is None]
        if not usable:
            offered = list(self._engine.variants(mlp, spec, full=full))
            return offered if full else offered[:1]
        best = min(usable, key=lambda c: c.cost_us)
        return [best.variant] if best.engine == self.name else []

    def build(self, mlp: Model, spec: Spec, variant: Variant | None = None) -> Runner:
        """Return a runner from host array to host array."""
        variant = self.variants(mlp, spec)[0] if variant is None else variant
        if not variant.get(STAGED):
            return self._engine.build(mlp, spec, variant)
        return Staged(mlp, spec, self.name, variant)


class Staged:
    """A runner on the device, fed from host memory and read back as a Session does it."""

    partial = True

    def __init__(self, mlp: Model, spec: Spec, engine: str, variant: Variant) -> None:
        self.engine, self.spec, self.variant = engine, spec, variant
        self._mlp = mlp
        self._rung = on_device(Rung(spec, engine, variant, cost=1.0))
        self._runners = Runners(mlp, spec.device)
        self.build_s = self._runners.get(self._rung).runner.build_s
        self.input: Any = np.zeros((spec.batch, mlp.features), spec.input_dtype)

    def run(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return the answers for rows `x` [n, features], n up to the batch, as a new array."""
        mlp, output = self._mlp, self.spec.output
        if output == "class":
            out = np.empty(len(x), np.int64)
        else:
            out = np.empty((len(x), 2 if output == "proba" and mlp.head == "sigmoid" else mlp.outputs), np.float32)
        self._runners.through_pinned(x, (Piece(self._rung, 1, len(x)),), out)
        return out

    def bind(self, x: Any) -> Staged:
        """Return another runner whose static input is `x`."""
        other = Staged(self._mlp, self.spec, self.engine, self.variant)
        other.input = x
        return other

    def close(self) -> None:
        """Free buffers and graphs."""
        self._runners.close()


def run_from_host(  # noqa: PLR0917
    near: Runners, far: Runners, x: Any, ready: bool, pieces: Sequence[Piece], answers: NDArray[Any]
) -> None:
    """Fill `answers` for host rows `x`, piece by piece: by `near` what reads host memory, by `far` what is staged.

    See `Runners.on_host` for the parameters.
    """
    begin = 0
    for staged, group in groupby(pieces, key=lambda piece: is_staged(piece.rung)):
        mine = list(group)
        end = begin + sum(piece.rows for piece in mine)
        if staged:
            mine = [replace(piece, rung=on_device(piece.rung)) for piece in mine]
            far.through_pinned(x[begin:end], mine, answers[begin:end])
        else:
            near.on_host(x[begin:end], ready, mine, answers[begin:end])
        begin = end
    if begin != len(x):
        raise InvalidInput(f"the pieces take {begin} rows of {len(x)}")
