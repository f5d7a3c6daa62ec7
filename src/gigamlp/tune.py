"""The tuner: build every candidate, judge its answers, time the good ones side by side, keep it all in a Plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import ArrayLike, NDArray

from gigamlp.engines.base import Engine, Runner
from gigamlp.engines.registry import engine as get_engine
from gigamlp.engines.registry import engine_names
from gigamlp.errors import BudgetExceeded, InvalidInput, Unsupported
from gigamlp.integer import RANGES
from gigamlp.measure.clock import Clock, clock_for
from gigamlp.measure.stats import percentile
from gigamlp.measure.timing import Throughput, latency, throughput
from gigamlp.mlp import MLP
from gigamlp.plan import Candidate, Plan
from gigamlp.quantize import calibrate, in_scheme
from gigamlp.spec import Spec, Variant
from gigamlp.trial import Gate, fill, judge, launch, make_gate

__all__ = ["Effort", "optimize", "try_candidates"]

Array = NDArray[Any]
Progress = Callable[[int, int, str], None]
LATENCY_ROUNDS = 5
LATE = "not tried: the budget had ended"


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes
    ----------
    repeats : int
        Timed repeats per candidate.
    min_s, warmup_s : float
        Seconds that one repeat lasts at least, and seconds of launches before the first.
    latency_calls : int
        Synchronised calls behind p50 and p99.
    latency_top : int
        How many of the quickest candidates get a latency measurement when throughput decides.
    full : bool
        Try all variants of every engine, not only the promising ones.
    compile : bool
        Whether engines that compile for seconds take part.
    compile_top : int
        How many variants of a compiling engine are built; all with `full`.
    """

    repeats: int = 5
    min_s: float = 0.02
    warmup_s: float = 0.03
    latency_calls: int = 300
    latency_top: int = 2
    full: bool = False
    compile: bool = True
    compile_top: int = 3


def optimize(
    mlp: MLP,
    device: str = "auto",
    batch: int | Sequence[int] = (1, 1024, 65536),
    input_dtype: str = "uint8",
    output: str = "class",
    *,
    validation: tuple[ArrayLike, ArrayLike | None] | None = None,
    calibration: ArrayLike | None = None,
    threads: int | None = None,
    min_accuracy: float | None = None,
    max_disagreement: float | None = None,
    engines: Sequence[str] | None = None,
    effort: Effort | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Measure the promising ways to run `mlp` on this machine (all with a full effort) and return the Plan.

    Parameters
    ----------
    mlp : MLP
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
    >>> plan = gm.optimize(mlp, device="cpu", batch=64, engines=["torch_eager"])
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
    gate = make_gate(mlp, input_dtype, validation, min_accuracy=min_accuracy, max_disagreement=max_disagreement)
    gate = replace(gate, ranges=_ranges(mlp, input_dtype, gate, calibration))
    clock = clock_for(place)
    began, deadline = clock.now(), None
    candidates: list[Candidate] = []
    for index, spec in enumerate(specs):
        part = _part(progress, index, len(specs))
        if budget_s is not None:  # what is left, shared by the Specs that are left: one cannot eat all of it
            end = began + budget_s
            deadline = clock.now() + max(end - clock.now(), 0.0) / (len(specs) - index)
        candidates += try_candidates(
            mlp, spec, gate, clock, effort=effort, engines=engines, deadline=deadline, progress=part
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
            **({} if gate.ranges is None else {"hidden_ranges": {k: v.tolist() for k, v in gate.ranges.items()}}),
        },
    )
    for spec in specs:
        if plan.winner(spec) is None:
            _explain_no_winner(plan, spec, budget_s is not None and clock.now() >= began + budget_s)
    return plan


def _ranges(mlp: MLP, input_dtype: str, gate: Gate, calibration: ArrayLike | None) -> dict[str, Array] | None:
    """Return what bytes in hidden layers must hold, from the rows that were given; None where no scheme needs it."""
    if mlp.scheme is not None or input_dtype not in RANGES:
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


# ---- one Spec -------------------------------------------------------------------------------------------------------


def try_candidates(
    mlp: MLP,
    spec: Spec,
    gate: Gate,
    clock: Clock,
    *,
    effort: Effort,
    engines: Sequence[str] | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
    find: Callable[[str], Engine] = get_engine,
) -> list[Candidate]:
    """Build, judge and time every candidate for one Spec.

    Engines that need no compilation go first, all timed in interleaved rounds; then the compiling ones are built, and
    timed interleaved with the best of the others. A candidate that fails is a Candidate with its reason.

    Parameters
    ----------
    mlp, spec, gate, clock, effort
    engines : sequence of str, optional
        Only these; one that cannot run on the device raises `Unsupported`.
    deadline : float, optional
        ``clock.now()`` after which no further candidate is started, once one of its kind is good enough to compete.
    progress : callable, optional
    find : callable
        How an engine is found by its name.
    """
    found = [find(name) for name in engines or engine_names()]
    for e in found if engines is not None else ():
        reason = e.unavailable(spec.device)
        if reason is not None:
            raise Unsupported(f"engine {e.name!r} cannot run on {spec.device}: {reason}")
    slow = [e for e in found if e.compiles]
    with ExitStack() as stack:
        search = _Search(mlp, spec, gate, clock, effort, deadline, progress or (lambda done, total, text: None), stack)
        quick = [e for e in found if not e.compiles]
        built, out = search.build(quick)
        if not built and not effort.full:  # none of the promising variants is exact enough: another dtype may be
            search.effort = replace(effort, full=True)
            built, more = search.build(quick, but={(c.engine, c.variant) for c in out})
            search.effort, out = effort, out + more
        timed = search.time(built)
        out += timed
        if slow and not effort.compile:
            return out + [Candidate(spec, e.name, Variant(), rejected="not compiled: outside the grid") for e in slow]
        if not slow:
            return out
        best = min((c for c in timed if c.rejected is None), key=lambda c: c.cost_us, default=None)
        if best is not None and deadline is not None and clock.now() >= deadline:
            return out + [Candidate(spec, e.name, Variant(), rejected=LATE) for e in slow]
        kept = {key: pair for key, pair in built.items() if best and key == (best.engine, best.variant)}
        for key, (runner, _) in built.items():
            if key not in kept:
                runner.close()
        built, rejected = search.build(slow)
        if not built:
            return out + rejected
        # the best of the others is timed again, beside the compiled ones
        again = {(c.engine, c.variant): c for c in search.time({**kept, **built})}
        return [again.pop((c.engine, c.variant), c) for c in out] + rejected + list(again.values())


_Key = tuple[str, Variant]
_Built = dict[_Key, tuple[Runner, Candidate]]


@dataclass
class _Search:
    """The steps of `try_candidates`; every runner that it builds is closed by `stack`."""

    mlp: MLP
    spec: Spec
    gate: Gate
    clock: Clock
    effort: Effort
    deadline: float | None
    report: Progress
    stack: ExitStack

    def build(self, engines: Iterable[Engine], but: Collection[_Key] = ()) -> tuple[_Built, list[Candidate]]:
        """Build and judge the variants of `engines` but those in `but`: those that may be timed, and the rejected."""
        built: _Built = {}
        rejected: list[Candidate] = []
        work: list[tuple[Engine, Variant]] = []
        for e in engines:
            chosen, refused = self._variants(e)
            work += [(e, v) for v in chosen if (e.name, v) not in but]
            rejected += [c for c in refused if (c.engine, c.variant) not in but]
        for index, (e, v) in enumerate(work):
            self.report(index, len(work), f"{self.mlp.name} {self.spec.label}: {e.name} {v.label}")
            blank = Candidate(self.spec, e.name, v)
            if built and self.deadline is not None and self.clock.now() >= self.deadline:
                rejected.append(replace(blank, rejected=LATE))
                continue
            runner, candidate = self._build_one(e, blank)
            if runner is None:
                rejected.append(candidate)
            else:
                built[e.name, v] = (runner, candidate)
        self.report(len(work), len(work), f"{self.mlp.name} {self.spec.label}: timing")
        return built, rejected

    def _variants(self, e: Engine) -> tuple[list[Variant], list[Candidate]]:
        reason = e.unavailable(self.spec.device)
        if reason is None:
            try:
                variants = list(e.variants(self.mlp, self.spec, full=self.effort.full))
                variants += self._byte_variants(e)
            except Unsupported as error:
                reason = error.reason
        if reason is not None:
            return [], [Candidate(self.spec, e.name, Variant(), rejected=reason)]
        chosen = variants[: self.effort.compile_top] if e.compiles and not self.effort.full else variants
        left_out = variants[len(chosen) :]
        return chosen, [Candidate(self.spec, e.name, v, rejected="not compiled: outside the grid") for v in left_out]

    def _byte_variants(self, e: Engine) -> list[Variant]:
        """Return the variants in schemes that need the hidden ranges which the gate's rows gave."""
        found: list[Variant] = []
        if self.gate.ranges is None or self.spec.input_dtype not in RANGES:
            return found
        for scheme in getattr(e, "byte_schemes", ()):
            model = in_scheme(self.mlp, scheme, self.gate.ranges)
            every = e.variants(model, self.spec, full=self.effort.full)
            found += [v for v in every if v.get("scheme") == scheme]
        return found

    def _build_one(self, e: Engine, blank: Candidate) -> tuple[Runner | None, Candidate]:
        """Build and judge one candidate; a failure of any kind becomes its reason, shown in the Plan."""
        runner: Runner | None = None
        try:
            model = in_scheme(self.mlp, blank.variant.get("scheme"), self.gate.ranges)
            runner = e.build(model, self.spec, blank.variant)
            self.stack.callback(runner.close)
            verdict = judge(e, model, runner, self.gate)
            candidate = replace(
                blank,
                build_s=runner.build_s,
                accuracy=verdict.accuracy,
                disagreement=verdict.disagreement,
                logit_error=verdict.logit_error,
                rejected=verdict.rejected,
            )
            if verdict.rejected is None:
                fill(runner, self.gate.x[: self.spec.batch])
                return runner, candidate
        except Unsupported as error:
            candidate = replace(blank, rejected=error.reason)
        except Exception as error:  # noqa: BLE001  a compiler or driver may raise anything; the Plan shows it
            candidate = replace(blank, rejected=_first_line(error))
        if runner is not None:
            runner.close()
        return None, candidate

    def time(self, built: _Built) -> list[Candidate]:
        """Time `built` in interleaved rounds, and take the latency of those that need one."""
        if not built:
            return []
        times = throughput(
            {str(index): launch(runner) for index, (runner, _) in enumerate(built.values())},
            self.clock,
            repeats=self.effort.repeats,
            min_s=self.effort.min_s,
            warmup_s=self.effort.warmup_s,
            deadline=self.deadline,
        )
        out = [_with_times(c, times[str(index)]) for index, (_, c) in enumerate(built.values())]
        usable = sorted((c for c in out if c.rejected is None), key=lambda c: c.cost_us)
        if self.spec.batch != 1:
            usable = usable[: self.effort.latency_top]
        found = self._latencies({(c.engine, c.variant): built[c.engine, c.variant][0] for c in usable})
        return [_with_latency(c, found.get((c.engine, c.variant))) for c in out]

    def _latencies(self, runners: dict[_Key, Runner]) -> dict[_Key, tuple[float, float]]:
        """Take p50 and p99 in interleaved rounds, so that one slow moment of the machine decides nothing."""
        taken: dict[_Key, list[float]] = {key: [] for key in runners}
        calls = max(1, self.effort.latency_calls // LATENCY_ROUNDS)
        for _ in range(LATENCY_ROUNDS):
            for key, runner in runners.items():
                taken[key] += latency(launch(runner), self.clock, calls=calls, warmup=10, budget_s=0.1).samples
        return {key: (percentile(t, 50), percentile(t, 99)) for key, t in taken.items()}


def _with_times(c: Candidate, result: Throughput | Exception) -> Candidate:
    if not isinstance(result, Throughput):
        return replace(c, rejected=f"failed while timed: {_first_line(result)}")
    return replace(c, wall_us=result.wall_us, iqr=result.iqr, device_us=result.device_us, repeats=result.repeats)


def _with_latency(c: Candidate, times: tuple[float, float] | None) -> Candidate:
    return c if times is None else replace(c, p50_us=times[0], p99_us=times[1])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
