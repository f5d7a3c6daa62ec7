"""What a Session runs: its Plan, its named engine, or, without either, the kept Plans and else the default engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gigamlp import plancache
from gigamlp.cascade import Model
from gigamlp.choice import Choice, EngineChoice, PlanChoice, from_engine, from_plan
from gigamlp.errors import InvalidInput
from gigamlp.integer import RANGES
from gigamlp.ladder import Ladder
from gigamlp.layers import SCHEMES
from gigamlp.plan import Candidate, Plan
from gigamlp.spec import OUTPUTS, Variant
from gigamlp.trial import LOGIT_TOLERANCE

__all__ = ["KeptChoice", "choose"]

_DISAGREEMENT = 0.001  # the tuner's own gate; a Plan that let more through runs only where it is handed over


def choose(
    mlp: Model,
    plan: Plan | None,
    device: str,
    *,
    engine: str | None = None,
    variant: Variant | Mapping[str, Any] | None = None,
    batch: int | Sequence[int] | None = None,
    threads: int | None = None,
    retune: bool = False,
    cache: bool = True,
) -> Choice:
    """Return what runs `mlp`; see `gigamlp.Session` for the parameters.

    Raises
    ------
    PlanMismatch, Unsupported, InvalidInput, DeviceError
        See `from_plan` and `from_engine`.
    """
    own = {"engine": engine, "variant": variant, "batch": batch, "threads": threads}
    named = [name for name, value in own.items() if value is not None]
    if plan is not None:
        if named:
            raise InvalidInput(f"the plan decides about {', '.join(named)}; leave that out, or leave out the plan")
        return from_plan(mlp, plan, device, retune=retune)
    options = Variant.from_json(variant) if isinstance(variant, Mapping) else variant
    default = from_engine(mlp, device, engine=engine, variant=options, batch=batch, threads=threads)
    if named or not cache:
        return default
    kept = _usable(plancache.find(mlp.digest(), default.device))
    return KeptChoice(kept, default) if kept else default


@dataclass(frozen=True)
class KeptChoice:
    """The winners of Plans that were kept, the newest first, and an engine for what none of them measured."""

    plans: tuple[PlanChoice, ...]
    default: EngineChoice

    @property
    def device(self) -> str:
        """The device of all of them."""
        return self.default.device

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those of the default engine come first: no dtype of rows is served worse than without kept Plans."""
        return tuple(dict.fromkeys((*self.default.dtypes, *(d for p in self.plans for d in p.dtypes))))

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that may run."""
        return tuple(dict.fromkeys((*(e for p in self.plans for e in p.engines), *self.default.engines)))

    @property
    def ranges(self) -> Mapping[str, list[float]] | None:
        """The hidden ranges of the Plans; `_usable` lets only one set in."""
        return next((p.ranges for p in self.plans if p.ranges is not None), None)

    @property
    def title(self) -> str:
        """Where the choice comes from."""
        count = "a kept plan" if len(self.plans) == 1 else f"{len(self.plans)} kept plans"
        return f"{count}, and for what they did not measure {self.default.title}"

    def ladder(self, input_dtype: str, output: str) -> Ladder:
        """Return the winners of the newest Plan that measured this, else the default engine's batches."""
        for plan in self.plans:
            if _measured(plan, "device", input_dtype, output):
                return plan.ladder(input_dtype, output)
        return self.default.ladder(input_dtype, output)

    def host_ladder(self, input_dtype: str, output: str) -> Ladder | None:
        """Return the winners from host memory of the newest Plan that measured them."""
        for plan in self.plans:
            if _measured(plan, "host", input_dtype, output):
                return plan.host_ladder(input_dtype, output)
        return None


def _usable(plans: Sequence[Plan]) -> tuple[PlanChoice, ...]:
    """Return the Plans that may run where nobody handed them over, with only the winners that may.

    The question must have been the open one (all engines, the machine's threads), the gate at least as strict as the
    tuner's own, and float rows must be answered in floats.
    """
    found: list[PlanChoice] = []
    ranges: object = None
    for plan in plans:
        question = plan.settings.get("question")
        if not isinstance(question, dict) or question.get("engines") is not None or question.get("threads") is not None:
            continue
        allowed = plan.settings.get("max_disagreement")
        if plan.settings.get("validation_rows") and not (allowed is not None and allowed <= _DISAGREEMENT):
            continue
        floats = replace(plan, candidates=tuple(c for c in plan.candidates if _fits(c)))
        if not floats.winners:
            continue
        if plan.hidden_ranges is not None:
            if ranges is not None and plan.hidden_ranges != ranges:
                continue  # an older calibration; codes of two in one Session would be confused
            ranges = plan.hidden_ranges
        device = next((c.spec.device for c in floats.winners if c.spec.device != "cpu"), "cpu")
        found.append(PlanChoice(floats, floats.winners, device))
    return tuple(found)


def _fits(c: Candidate) -> bool:
    integer = c.variant.get("compute") == "int8" or c.variant.get("scheme") in SCHEMES
    return c.spec.input_dtype in RANGES or not integer


def _measured(plan: PlanChoice, input_on: str, input_dtype: str, output: str) -> bool:
    """Whether the Plan measured `output`, or else whether all the logits of what runs in its place were exact."""
    mine = [c for c in plan.winners if c.spec.input_on == input_on and c.spec.input_dtype == input_dtype]
    if any(c.spec.output == output for c in mine):
        return True
    kinds = {c.spec.output for c in mine}
    first = next((kind for kind in OUTPUTS if kind in kinds), None)
    instead = [c for c in mine if c.spec.output == first]
    return bool(instead) and all(c.logit_error is not None and c.logit_error <= LOGIT_TOLERANCE for c in instead)
