"""The tuner: the candidates of every Spec, and a Plan with all of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gigamlp import plancache
from gigamlp.calibration import scheme_logits
from gigamlp.cascade import Cascade, Model
from gigamlp.engines.registry import engine as get_engine
from gigamlp.errors import BudgetExceeded, InvalidInput, Unsupported
from gigamlp.hosted import budget_shares, contenders, places
from gigamlp.integer import RANGES
from gigamlp.measure.clock import clock_for
from gigamlp.mlp import MLP
from gigamlp.plan import Candidate, Plan
from gigamlp.quantize import calibrate
from gigamlp.search import Effort, Progress, try_candidates
from gigamlp.spec import Spec
from gigamlp.trial import Gate, make_gate

__all__ = ["Effort", "optimize", "try_candidates"]

Array = NDArray[Any]


def optimize(
    mlp: Model,
    device: str = "auto",
    batch: int | Sequence[int] = (1, 1024, 65536),
    input_dtype: str = "uint8",
    output: str = "class",
    *,
    validation: tuple[ArrayLike, ArrayLike | None] | None = None,
    input_on: str | Sequence[str] | None = None,
    beside_cpu: bool | None = None,
    calibration: ArrayLike | None = None,
    threads: int | None = None,
    min_accuracy: float | None = None,
    max_disagreement: float | None = None,
    engines: Sequence[str] | None = None,
    effort: Effort | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
    cache: bool = True,
) -> Plan:
    """Measure the promising ways to run `mlp` on this machine (all with a full effort) and return the Plan.

    Parameters
    ----------
    mlp : MLP or Cascade
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    batch : int or sequence of int
        Rows per run; one winner for each.
    input_dtype, output : str
        See `Spec`.
    validation : (x, y) or (x, None), optional
        Rows, with labels if there are, that decide which candidates are accurate enough. Without them only engines
        whose logits agree with float64 within 1e-3 relative compete. For an MLP without a scheme they also give the
        hidden ranges of candidates in scheme ``w8a8`` or ``w7``, unless `calibration` does.
    input_on : {"device", "host"} or both, optional
        For a GPU: where rows live when a run begins. ``"host"`` is measured from host memory to host memory. Default:
        both for ``device="auto"``, else ``"device"``.
    beside_cpu : bool, optional
        Whether the CPU competes for rows in host memory, so that a Session sends each number of rows where they are
        answered sooner, and the Plan knows where that changes. Default: for ``device="auto"``.
    calibration : array_like, optional
        Rows that give these ranges, best some that the MLP was trained with.
    threads : int, optional
        CPU threads.
    min_accuracy, max_disagreement : float, optional
        Fractions. The default is ``max_disagreement=0.001`` of the validation rows.
    engines : sequence of str, optional
        Only these. One that cannot run here is an error then.
    effort : Effort, optional
    budget_s : float, optional
        Seconds after which no further candidate is started; what was measured by then decides.
    progress : callable, optional
        Called with (done, total, text).
    cache : bool
        Keep the Plan in the user's cache folder (`gigamlp.doctor` names it) for every ``Session(mlp)`` without a Plan,
        until the model, the machine or a version changes. Only Plans for the open question run there: no `engines`, no
        `threads`, a gate no wider than the default. Nothing is read from the cache: this function always measures.

    Returns
    -------
    Plan
        All candidates, the rejected with their reasons.

    Raises
    ------
    DeviceError, InvalidInput, DataError
        If an argument cannot be used.
    Unsupported
        If a named engine cannot run here, or no engine can serve the Spec.
    BudgetExceeded
        If the budget ended before any candidate was measured.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> rng = np.random.default_rng(0)
    >>> mlp = gm.MLP([gm.Layer(rng.normal(size=(16, 8)), activation="relu"), gm.Layer(rng.normal(size=(3, 16)))])
    >>> plan = gm.optimize(mlp, device="cpu", batch=64, engines=["torch_eager"], cache=False)
    >>> plan.winners[0].engine
    'torch_eager'
    """
    from gigamlp.measure.telemetry import machine_fingerprint, resolve_device, versions

    effort = effort or Effort()
    place = resolve_device(device)
    if budget_s is not None and not budget_s > 0:
        raise InvalidInput(f"budget_s must be a positive number of seconds, got {budget_s}")
    batches = list(batch) if isinstance(batch, Iterable) else [batch]
    if not batches:
        raise InvalidInput("batch is empty; name at least one batch size")
    specs = [Spec(place, b, input_dtype, output, threads=threads) for b in dict.fromkeys(batches)]
    question = {
        "batch": [spec.batch for spec in specs],
        "input_dtype": input_dtype,
        "output": output,
        "input_on": input_on if input_on is None or isinstance(input_on, str) else list(input_on),
        "beside_cpu": beside_cpu,
        "threads": threads,
        "engines": None if engines is None else list(engines),
    }
    specs = places(specs, device == "auto", input_on, beside_cpu)
    shares = budget_shares(specs)
    gate = make_gate(mlp, input_dtype, validation, min_accuracy=min_accuracy, max_disagreement=max_disagreement)
    gate = replace(gate, ranges=_ranges(mlp, input_dtype, gate, calibration))
    clock = clock_for(place)
    began, deadline = clock.now(), None
    candidates: list[Candidate] = []
    for index, spec in enumerate(specs):
        part = _part(progress, index, len(specs))
        if budget_s is not None:  # what is left, shared by the Specs that are left: one cannot eat all of it
            end = began + budget_s
            deadline = clock.now() + max(end - clock.now(), 0.0) * shares[index] / sum(shares[index:])
        if spec.input_on == "device":
            candidates += try_candidates(
                mlp, spec, gate, clock, effort=effort, engines=engines, deadline=deadline, progress=part
            )
            continue
        names, find = contenders(spec, engines, candidates, get_engine)
        if names != []:  # their calls wait by themselves: the host's clock times them
            once = effort if spec.is_cuda else replace(effort, compile=False)
            candidates += try_candidates(
                mlp,
                spec,
                gate,
                clock_for("cpu"),
                effort=once,
                engines=names,
                deadline=deadline,
                progress=part,
                find=find,
            )
    plan = Plan(
        machine=machine_fingerprint(place),
        versions=versions(),
        mlp_digest=mlp.digest(),
        mlp_name=mlp.name,
        candidates=tuple(candidates),
        settings={
            "validation_rows": len(gate.x) if gate.given else 0,
            "min_accuracy": gate.min_accuracy,
            "max_disagreement": gate.max_disagreement,
            "budget_s": budget_s,
            "full": effort.full,
            **_of_cascade(mlp, gate),
            "question": {
                **question,
                "effort": asdict(effort),
                "validation": _rows_digest(*(validation or ())),
                "calibration": _rows_digest(calibration),
            },
            **({} if gate.ranges is None else {"hidden_ranges": {k: v.tolist() for k, v in gate.ranges.items()}}),
        },
    )
    for spec in specs:
        answered = any(plan.winner(s) for s in specs if s.batch == spec.batch and s.input_on == spec.input_on)
        if not answered:
            _explain_no_winner(plan, spec, budget_s is not None and clock.now() >= began + budget_s)
    if cache:
        plancache.keep(plan)
    return plan


def _of_cascade(mlp: Model, gate: Gate) -> dict[str, Any]:
    """Return what a Plan says of a cascade: its times are those of rows of which this share went on."""
    if not isinstance(mlp, Cascade):
        return {}
    deciding = mlp.decide(gate.x, scheme_logits)[1]
    unsure = [float((deciding > index).mean()) for index in range(len(mlp.thresholds))]
    return {
        "cascade": {
            "stages": [stage.name for stage in mlp.stages],
            "thresholds": [each if math.isfinite(each) else None for each in mlp.thresholds],
            "unsure": unsure,
        }
    }


def _rows_digest(*arrays: ArrayLike | None) -> str | None:
    """Return a digest of rows and labels, by which two questions are told apart; None if there are none."""
    if all(each is None for each in arrays):
        return None
    found = hashlib.sha256()
    for array in (np.asarray(each) for each in arrays if each is not None):
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        found.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).data)
    return found.hexdigest()


def _ranges(mlp: Model, input_dtype: str, gate: Gate, calibration: ArrayLike | None) -> dict[str, Array] | None:
    """Return what bytes in hidden layers must hold, from the rows that were given; None where no scheme needs it."""
    if not isinstance(mlp, MLP) or mlp.scheme is not None or input_dtype not in RANGES:
        return None
    if calibration is None and not gate.given:
        return None
    return calibrate(mlp, gate.x if calibration is None else calibration)


def _part(progress: Progress | None, index: int, count: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total, text: progress(index * 1000 + done * 1000 // max(total, 1), count * 1000, text)


def _explain_no_winner(plan: Plan, spec: Spec, late: bool) -> None:
    reasons = dict.fromkeys(f"{c.engine}: {c.rejected}" for c in plan.candidates if c.spec == spec and c.rejected)
    if late:
        raise BudgetExceeded(f"the budget ended before any candidate for {spec.label} was measured; raise it")
    raise Unsupported(f"no engine serves {spec.label}:\n  " + "\n  ".join(reasons))
