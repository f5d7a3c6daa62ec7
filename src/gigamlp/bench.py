"""`gigamlp bench`: time one MLP through named engines, batches, input types, outputs and residences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from numpy.typing import ArrayLike

from gigamlp.cascade import Model
from gigamlp.engines.registry import engine as get_engine
from gigamlp.engines.registry import engine_names
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.jobs import Job, measure_jobs
from gigamlp.measure.clock import Clock, clock_for
from gigamlp.measure.cpuinfo import last_level_bytes
from gigamlp.measure.roofline import Roofs
from gigamlp.record import Record, Row
from gigamlp.spec import Spec
from gigamlp.trial import Gate, as_input, class_indices, cold_count, make_gate, probe_rows
from gigamlp.tune import Effort, try_candidates

__all__ = ["Limits", "bench", "limits_of"]

Progress = Callable[[int, int, str], None]
Limits = tuple[Roofs | None, int, str | None]


def bench(
    mlp: Model,
    *,
    engines: Sequence[str] | None = None,
    batch: Sequence[int] = (1024,),
    input_dtype: Sequence[str] = ("uint8",),
    output: Sequence[str] = ("class",),
    residence: Sequence[str] = ("hot",),
    threads: int | None = None,
    data: tuple[ArrayLike, ArrayLike | None] | None = None,
    validation: ArrayLike | None = None,
    device: str = "auto",
    repeats: int = 7,
    full: bool = False,
    max_disagreement: float = 0.001,
    command: str = "gigamlp.bench.bench",
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Record:
    """Time `mlp`: for each engine and Spec its best variant, under each residence.

    Parameters
    ----------
    mlp : MLP or Cascade
    engines : sequence of str, optional
        Engines to time; all that can run here if not given. A named one that cannot run is an error.
    batch, input_dtype, output, residence : sequences
        Every combination is timed. See `Spec` and `Row` for the values.
    threads : int, optional
        CPU threads.
    data : (x, y) or (x, None), optional
        Rows to feed, with labels for the accuracy. Without it rows are drawn at random, and there is no accuracy.
    validation : array_like, optional
        Rows that decide which variants are sound: never those of `data`, which are for the accuracy alone. Without them
        rows are drawn, and the logits must agree with float64 within 1e-3.
    device : str
    repeats : int
        Timed repeats per row.
    full : bool
        Try every variant of each engine, not only the promising ones.
    max_disagreement : float
        Variants are timed that give another class than the float32 model for at most this share of the validation rows.
    command : str
        What the record says was run.
    limits : tuple, optional
        What `limits_of` gave for this device a moment ago; measured here otherwise, which takes seconds.
    progress : callable, optional
        Called with (done, total, text).

    Returns
    -------
    Record
        One row per engine, Spec and residence. ``extra["skipped"]`` says what did not run and why. Without torch,
        which measures roofs, ``extra["roofs"]`` and the rows' `roof_share` are None, and ``extra["no_roofs"]`` says so.

    Raises
    ------
    Unsupported
        If a named engine cannot run, or nothing can.
    """
    from gigamlp.measure.telemetry import device_info, resolve_device, versions

    place = resolve_device(device)
    for name, values in (("batch", batch), ("input_dtype", input_dtype), ("output", output), ("residence", residence)):
        if not values:
            raise InvalidInput(f"{name} is empty; name at least one value")
    for name in engines or ():
        reason = get_engine(name).unavailable(place)
        if reason is not None:
            raise Unsupported(f"engine {name!r} cannot run on {place}: {reason}")
    specs = [Spec(place, b, d, o, threads=threads) for d in input_dtype for o in output for b in batch]
    clock = clock_for(place)
    skipped: list[dict[str, str]] = []
    finder = _Finder(mlp, engines, residence, Effort(full=full), clock, skipped)
    roofs, cache_bytes, no_roofs = limits or limits_of(place)
    rows: list[Row] = []
    samples: dict[str, list[float]] = {}
    for index, spec in enumerate(specs):
        if progress is not None:
            progress(index, len(specs), spec.label)
        x, targets, gate = _rows(mlp, spec, data, validation, max_disagreement)
        jobs = finder.jobs(spec, gate, cache_bytes)
        if jobs:
            done = measure_jobs(jobs, x, targets, clock, roofs, repeats=repeats, cache_bytes=cache_bytes)
            rows += done.rows
            samples.update(done.latency_samples)
    if progress is not None:
        progress(len(specs), len(specs), "done")
    if not rows:
        reasons = dict.fromkeys(f"{s['engine']}: {s['reason']}" for s in skipped)
        raise Unsupported("nothing could be timed:\n  " + "\n  ".join(reasons))
    known = {"roofs": None, "no_roofs": no_roofs} if roofs is None else {"roofs": roofs.to_json()}
    extra = {**known, "latency_samples": samples, "skipped": skipped}
    return Record(device_info(place), versions(), command, rows, extra)


def limits_of(place: str) -> Limits:
    """Return the device's roofs and cache size; without torch no roofs, and the sentence that says so."""
    if find_spec("torch") is None:
        reason = "no roofs here: torch, which measures them, is not installed (pip install 'gigamlp[torch]')"
        return None, last_level_bytes() or 0, reason
    from gigamlp.engines.probes import measure_roofs

    roofs = measure_roofs(place)
    return roofs, roofs.cache_bytes, None


def _rows(
    mlp: Model,
    spec: Spec,
    data: tuple[ArrayLike, ArrayLike | None] | None,
    validation: ArrayLike | None,
    max_disagreement: float,
) -> tuple[Any, Any, Gate]:
    """Return the rows to feed, their class indices, and the gate that a variant must pass to be timed."""
    if validation is None:
        gate = make_gate(mlp, spec.input_dtype)
    else:
        gate = make_gate(mlp, spec.input_dtype, (validation, None), max_disagreement=max_disagreement)
    if data is None:
        rows = probe_rows(mlp, spec.input_dtype, rows=max(512, min(spec.batch, 8192)))
        return rows, None, gate
    x, y = mlp.check_rows(data[0]), data[1]
    targets = None if y is None or mlp.head not in ("softmax", "sigmoid") else class_indices(mlp, y)
    return as_input(x, spec.input_dtype, "the data"), targets, gate


@dataclass(frozen=True)
class _Finder:
    """Finds the best variant of each engine for a Spec, and keeps the reasons of those that cannot run."""

    mlp: Model
    engines: Sequence[str] | None
    residence: Sequence[str]
    effort: Effort
    clock: Clock
    skipped: list[dict[str, str]]

    def jobs(self, spec: Spec, gate: Gate, cache_bytes: int) -> list[Job]:
        out: list[Job] = []
        for name in self.engines or engine_names():
            reason = get_engine(name).unavailable(spec.device)
            found = (
                [] if reason else try_candidates(self.mlp, spec, gate, self.clock, effort=self.effort, engines=[name])
            )
            best = min((c for c in found if c.rejected is None), key=lambda c: c.cost_us, default=None)
            if best is None:
                self._skip(name, spec, reason or "; ".join(dict.fromkeys(c.rejected for c in found if c.rejected)))
                continue
            for where in self.residence:
                try:
                    if where == "cold":
                        cold_count(self.mlp, spec, cache_bytes)
                    out.append(Job(self.mlp, spec, name, best.variant, where))
                except InvalidInput as error:
                    self._skip(name, spec, str(error))
        return out

    def _skip(self, name: str, spec: Spec, reason: str) -> None:
        if self.engines is not None:
            raise Unsupported(f"engine {name!r} cannot run {spec.label}: {reason}")
        self.skipped.append({"engine": name, "spec": spec.label, "reason": reason})
