"""Which engine, variant and batches a Session runs: from a Plan, or, without one, from one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

from gigamlp.cascade import Cascade, Model
from gigamlp.engines import registry
from gigamlp.engines.base import Engine, Unsupported
from gigamlp.engines.cascades import for_model
from gigamlp.errors import DeviceError, InvalidInput, PlanMismatch
from gigamlp.ladder import Ladder, Rung, default_batches
from gigamlp.measure.telemetry import machine_fingerprint, resolve_device
from gigamlp.mlp import MLP
from gigamlp.plan import Candidate, Plan
from gigamlp.spec import INPUT_DTYPES, OUTPUTS, Spec, Variant

__all__ = ["Choice", "EngineChoice", "PlanChoice", "from_engine", "from_plan"]

_SESSION_US = 5.0  # what the Session itself adds to a run: slicing, a lock, copying the answers out
# Without a Plan a run of b rows is taken to cost as much as b rows and these many more.
_CPU_LAUNCH_ROWS = 64
_CUDA_LAUNCH_ROWS = 16384
# torch on a CPU is fastest while rows and hidden values stay in cache: 784-40-10 from uint8 ran 2.1 M rows/s at batch
# 1,024, 1.6 M at 4,096, 0.8 M at 65,536 (2 cores, 32 MB L3).
_CPU_MEMORY = 16 << 20
_CPU_LARGEST = 65536
_CUDA_MEMORY = 2 << 30
_CUDA_LARGEST = 1 << 20
_ITEM = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


class Choice(Protocol):
    """What a Session asks: the device, the input dtypes there are, and a `Ladder` for one of them and an output."""

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        ...

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Input dtypes that can be run."""
        ...

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that run."""
        ...

    @property
    def ranges(self) -> Mapping[str, list[float]] | None:
        """Hidden ranges for variants in a byte scheme, or None."""
        ...

    @property
    def title(self) -> str:
        """Where the choice comes from, in a few words."""
        ...

    def ladder(self, input_dtype: str, output: str) -> Ladder:
        """Return the batches for rows of `input_dtype` and answers of kind `output`."""
        ...

    def host_ladder(self, input_dtype: str, output: str) -> Ladder | None:
        """Return the batches for such rows in host memory, where they were measured from there; else None."""
        ...


# ---- from a Plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanChoice:
    """The winners of a Plan."""

    plan: Plan
    winners: tuple[Candidate, ...]
    device: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Input dtypes that have a winner."""
        return tuple(dict.fromkeys(c.spec.input_dtype for c in self.winners))

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that won."""
        return tuple(dict.fromkeys(c.engine for c in self.winners))

    @property
    def ranges(self) -> Mapping[str, list[float]] | None:
        """The Plan's hidden ranges."""
        return self.plan.hidden_ranges

    @property
    def title(self) -> str:
        """Where the choice comes from."""
        return f"the plan for {self.plan.mlp_name!r}"

    def ladder(self, input_dtype: str, output: str) -> Ladder:
        """Return the winners for `input_dtype` and `output`.

        If the Plan has none for that output, the winners for another output run, the same engine and variant asked for
        `output`: ``class`` first, then ``margin``, ``logits``, ``proba``.
        """
        found = self._ladder("device", input_dtype, output)
        if found is None and input_dtype in self.dtypes:
            raise InvalidInput(
                f"the plan is for {input_dtype} rows in host memory only; pass NumPy rows, or plan for rows on the "
                "device with gigamlp.optimize(..., input_on='device')"
            )
        if found is None:
            have = ", ".join(self.dtypes)
            raise InvalidInput(f"the plan has no winner for {input_dtype} rows; it has them for {have}")
        return found

    def host_ladder(self, input_dtype: str, output: str) -> Ladder | None:
        """Return the winners from host memory to host memory, on the CPU and on the GPU; None if there are none."""
        return self._ladder("host", input_dtype, output)

    def _ladder(self, input_on: str, input_dtype: str, output: str) -> Ladder | None:
        mine = [c for c in self.winners if c.spec.input_dtype == input_dtype and c.spec.input_on == input_on]
        for kind in (output, *OUTPUTS):
            found = [c for c in mine if c.spec.output == kind]
            if found:
                return Ladder([_rung(c, output) for c in found])
        return None


def _rung(c: Candidate, output: str) -> Rung:
    cost = c.cost_us if c.wall_us is None else c.wall_us
    return Rung(replace(c.spec, output=output), c.engine, c.variant, cost + _SESSION_US, planned_us=cost)


def from_plan(mlp: Model, plan: Plan, device: str, *, retune: bool) -> PlanChoice:
    """Check that `plan` holds for `mlp`, `device` and this machine, and return its winners; else `retune` replaces it.

    Raises
    ------
    PlanMismatch
        If it does not hold and `retune` is false, or it has no winner.
    """
    winners = plan.winners
    if not winners:
        raise PlanMismatch("the plan has no winner: every candidate in it was rejected; tune again")
    reason = _mismatch(mlp, plan, winners, device)
    if reason is not None:
        if not retune:
            raise PlanMismatch(f"{reason}; tune again with gigamlp.optimize, or Session(..., retune=True)")
        plan = _retune(mlp, winners, device)
        winners = plan.winners
    return PlanChoice(plan, winners, _devices(winners)[0])


def _mismatch(mlp: Model, plan: Plan, winners: Sequence[Candidate], device: str) -> str | None:
    planned, *others = _devices(winners)
    if others:
        return "the plan holds winners for several devices"
    try:
        here = resolve_device(planned)
    except DeviceError as error:
        return f"the plan was made for {planned}: {error}"
    if device != "auto" and resolve_device(device) != here:
        return f"the plan was made for {planned}, but device={device!r} was asked for"
    return plan.mismatch(mlp.digest(), machine_fingerprint(here))


def _devices(winners: Sequence[Candidate]) -> list[str]:
    """Return the devices of the winners. Host rows that the CPU answers in place of a GPU do not count."""
    found = list(dict.fromkeys(c.spec.device for c in winners if c.spec.device != "cpu" or c.spec.input_on != "host"))
    return found or ["cpu"]


def _retune(mlp: Model, winners: Sequence[Candidate], device: str) -> Plan:
    """Tune again for the Specs of the old winners, on the old device if it is here and no other was asked for."""
    from gigamlp import tune

    if device == "auto":
        try:
            device = resolve_device(_devices(winners)[0])
        except DeviceError:
            device = resolve_device("auto")
    groups: dict[tuple[str, str, int | None], list[Spec]] = {}
    for c in winners:
        groups.setdefault((c.spec.input_dtype, c.spec.output, c.spec.threads), []).append(c.spec)
    plans = []
    for (input_dtype, output, threads), specs in groups.items():
        own: dict[str, Any] = {}
        if device != "cpu":
            beside = any(s.device == "cpu" and s.input_on == "host" for s in specs)
            own = {"input_on": sorted({s.input_on for s in specs}), "beside_cpu": beside}
        batches = sorted({s.batch for s in specs if s.input_on == "device"} or {s.batch for s in specs})
        plans.append(tune.optimize(mlp, device, batches, input_dtype, output, threads=threads, **own))
    return replace(plans[0], candidates=tuple(c for p in plans for c in p.candidates))


# ---- from one engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineChoice:
    """One engine, with batch sizes that are not measured."""

    mlp: Model
    engine: Engine
    device: str
    dtypes: tuple[str, ...]
    named: bool
    variant: Variant | None = None
    batches: tuple[int, ...] | None = None
    threads: int | None = None

    @property
    def engines(self) -> tuple[str, ...]:
        """The engine's name."""
        return (self.engine.name,)

    @property
    def ranges(self) -> None:
        """None: without a Plan nothing was calibrated."""
        return

    @property
    def title(self) -> str:
        """Where the choice comes from."""
        return f"engine {self.engine.name!r}, {'as asked for' if self.named else 'the default without a plan'}"

    def ladder(self, input_dtype: str, output: str) -> Ladder:
        """Return the batches for `input_dtype` and `output`, every one on the same engine."""
        launch = _CPU_LAUNCH_ROWS if self.device == "cpu" else _CUDA_LAUNCH_ROWS
        rungs = []
        for batch in self.batches or self._default_batches(input_dtype):
            spec = Spec(self.device, batch, input_dtype, output, threads=self.threads)
            rungs.append(Rung(spec, self.engine.name, self.variant or self._float32(spec), launch + batch))
        return Ladder(rungs)

    def host_ladder(self, input_dtype: str, output: str) -> None:
        """Return None: nothing was measured."""

    def _float32(self, spec: Spec) -> Variant:
        """Return the engine's first variant that computes in float32; its first one if none says so."""
        variants = list(self.engine.variants(self.mlp, spec, full=True))
        if not variants:
            raise Unsupported(f"engine {self.engine.name!r} has no variant for {spec.label}")
        plain = isinstance(self.mlp, Cascade) and any(stage.scheme is None for stage in self.mlp.stages)
        keys = ("compute", "scheme") if plain and not self.named else ("compute",)  # it was calibrated in float32
        exact = (v for v in variants if "float32" in [v.get(key) for key in keys])
        return next(exact, variants[0])

    def _default_batches(self, input_dtype: str) -> tuple[int, ...]:
        mlp = self.mlp
        hidden = mlp.features_read + sum(mlp.hidden) + mlp.outputs
        cpu = self.device == "cpu"
        return default_batches(
            bytes_per_row=mlp.features * _ITEM[input_dtype] + 4 * hidden,
            memory=_CPU_MEMORY if cpu else _cuda_memory(self.device),
            largest=_CPU_LARGEST if cpu else _CUDA_LARGEST,
            step=32 if self.engine.compiles else 4,  # each size of a compiling engine costs seconds
        )


def _cuda_memory(device: str) -> int:
    """Bytes that the largest batch may take: all smaller ones, for each dtype and output used, come on top."""
    import torch

    return min(_CUDA_MEMORY, torch.cuda.get_device_properties(device).total_memory // 16)


def _default_engine(mlp: Model, device: str) -> str:
    """Return the engine that runs `mlp` if none is named: a cascade needs one that can gather rows."""
    if isinstance(mlp, MLP):
        return "torch_eager" if find_spec("torch") is not None else "numpy"
    if resolve_device(device) != "cpu" and getattr(registry.engine("cuda_fused"), "cascades", False):
        return "cuda_fused"
    return "numpy" if registry.engine("cpu_fused").unavailable("cpu") else "cpu_fused"


def from_engine(
    mlp: Model,
    device: str,
    *,
    engine: str | None = None,
    variant: Variant | None = None,
    batch: int | Sequence[int] | None = None,
    threads: int | None = None,
) -> EngineChoice:
    """Return the choice of one engine: the named one, else ``torch_eager`` if torch is installed, else ``numpy``.

    Raises
    ------
    Unsupported
        If that engine cannot run `mlp` here.
    InvalidInput, DeviceError
        If an argument cannot be used.
    """
    if variant is not None and engine is None:
        raise InvalidInput("a variant needs its engine; name it too, e.g. engine='torch_eager'")
    name = engine or _default_engine(mlp, device)
    chosen = for_model(registry.engine(name), mlp)
    on_cpu = name == "numpy" or (isinstance(mlp, Cascade) and name != "cuda_fused")
    place = "cpu" if device == "auto" and on_cpu else resolve_device(device)
    reason = chosen.unavailable(place)
    if reason is not None:
        raise Unsupported(f"engine {name!r} cannot run on {place}: {reason}")
    batches = None if batch is None else (batch,) if isinstance(batch, int) else tuple(batch)
    if batches == ():
        raise InvalidInput("batch is empty; name at least one batch size, or leave it out")
    for size in batches or (1,):
        Spec(place, size, threads=threads)  # refuses what is not a whole number >= 1
    dtypes, refused = [], {}
    for dtype in INPUT_DTYPES:
        try:
            output = "logits" if isinstance(mlp, MLP) else "class"
            chosen.variants(mlp, Spec(place, 1, dtype, output, threads=threads))
            dtypes.append(dtype)
        except Unsupported as error:
            refused[dtype] = error.reason
    if not dtypes:
        raise Unsupported(f"engine {name!r} cannot run this model: {next(iter(refused.values()))}")
    return EngineChoice(mlp, chosen, place, tuple(dtypes), engine is not None, variant, batches, threads)
