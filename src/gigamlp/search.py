"""The candidates for one Spec: each is built, its answers judged, the good ones timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from gigamlp.cascade import Model
from gigamlp.engines.base import Engine, Runner
from gigamlp.engines.cascades import for_model
from gigamlp.engines.registry import engine as get_engine
from gigamlp.engines.registry import engine_names
from gigamlp.errors import Unsupported
from gigamlp.integer import RANGES
from gigamlp.measure.clock import Clock
from gigamlp.measure.stats import percentile
from gigamlp.measure.timing import Throughput, latency, throughput
from gigamlp.mlp import MLP
from gigamlp.plan import Candidate
from gigamlp.quantize import in_scheme
from gigamlp.spec import Spec, Variant
from gigamlp.trial import Gate, fill, judge, launch

__all__ = ["LATE", "Effort", "Progress", "try_candidates"]

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


def try_candidates(
    mlp: Model,
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
    found = [for_model(find(name), mlp) for name in engines or engine_names()]
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

    mlp: Model
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
            own = self.mlp if isinstance(self.mlp, MLP) else None  # a cascade's stages keep their schemes
            carried = None if own is None else own.scheme is not None
            verdict = judge(e, model, runner, self.gate, carried=carried)
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
