"""Which engine runs a model: a cascade goes to engines that know it, or stage by stage through one that does not.

An engine that runs cascades by itself says so with ``cascades = True`` and takes a `Cascade` where it takes an MLP. Its
runners are `CascadeRunner`. Any other engine whose runners read and write NumPy arrays is `Composed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Cascade, Model, goes_on
from gigamlp.engines.base import Engine, Runner, Spec, Unsupported, Variant
from gigamlp.errors import InvalidInput
from gigamlp.measure.clock import stopwatch
from gigamlp.mlp import MLP

__all__ = ["CascadeRunner", "Composed", "for_model", "joined", "refuse_output", "split"]

Array = NDArray[Any]


class CascadeRunner(Runner, Protocol):
    """A runner of a cascade.

    Attributes
    ----------
    totals : tuple of int
        The rows of all runs so far, and how many of them went on from each stage but the last. Reading it on CUDA waits
        for the runs. A bound runner counts for itself.
    partial : bool
        Whether `run` takes fewer rows than the batch. Else rows of padding are counted too.
    """

    totals: tuple[int, ...]
    partial: bool


def for_model(engine: Engine, model: Model) -> Engine:
    """Return what runs `model` by `engine`: the engine itself, or around it what runs a cascade stage by stage."""
    if isinstance(model, MLP) or getattr(engine, "cascades", False):
        return engine
    return Composed(engine)


def refuse_output(spec: Spec) -> None:
    """Raise `Unsupported` for what no cascade answers with."""
    if spec.output not in ("class", "margin"):
        raise Unsupported(
            f"a cascade gives class or margin, not {spec.output}: rows are answered by different networks; run its "
            "last stage alone for them"
        )


def joined(values: Sequence[Any]) -> Any:
    """Return one value of a variant's option for all stages: itself if all are equal, else joined with ``+``."""
    return values[0] if all(value == values[0] for value in values) else "+".join(str(value) for value in values)


def split(value: Any, stages: int) -> list[str]:
    """Return what `joined` was made of.

    Raises
    ------
    InvalidInput
        If it names another number of stages.
    """
    parts = str(value).split("+")
    if len(parts) not in (1, stages):
        raise InvalidInput(f"{value!r} is for {len(parts)} stages, but the cascade has {stages}")
    return parts * stages if len(parts) == 1 else parts


class Composed:
    """Run a cascade stage by stage with an engine that runs MLPs: whole batches through the first, then what is left.

    Parameters
    ----------
    engine : Engine
        Its runners take and give NumPy arrays.
    """

    compiles: bool

    def __init__(self, engine: Engine) -> None:
        self.name, self.integer, self.compiles = engine.name, engine.integer, engine.compiles
        self._engine = engine

    def unavailable(self, device: str) -> str | None:
        """Return why this engine cannot run cascades on `device`, or None."""
        if self.name.startswith("torch_") or device != "cpu":
            return f"engine {self.name!r} runs no cascades: its rows would come back to the host after each stage"
        return self._engine.unavailable(device)

    def variants(self, mlp: Any, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        """Return the engine's variants that all stages have, the most promising first."""
        self._refuse(spec)
        of_stages = [self._engine.variants(stage, replace(spec, output="class"), full=full) for stage in mlp.stages]
        shared = [v for v in of_stages[0] if all(v in others for others in of_stages[1:])]
        if not shared:
            raise Unsupported(f"engine {self.name!r} has no variant that all stages of {mlp.name!r} share")
        return [Variant.of(cascade=len(mlp.stages), **v.to_json()) for v in shared]

    def build(self, mlp: Any, spec: Spec, variant: Variant | None = None) -> ComposedRunner:
        """Return a runner; see `Engine.build`."""
        self._refuse(spec)
        chosen = self.variants(mlp, spec)[0] if variant is None else variant
        own = Variant.from_json({k: v for k, v in chosen.to_json().items() if k != "cascade"})
        with stopwatch() as watch:
            runners: list[Runner] = []
            batch = spec.batch
            for index, stage in enumerate(mlp.stages):
                last = index == len(mlp.stages) - 1
                output = spec.output if last else "margin"
                if index:
                    batch = max(1, min(batch, max(64, batch // 4)))
                runners.append(self._engine.build(stage, replace(spec, batch=batch, output=output), own))
            runner = ComposedRunner(mlp, spec, chosen, runners)
        runner.build_s = watch.seconds
        return runner

    def _refuse(self, spec: Spec) -> None:
        refuse_output(spec)
        reason = self.unavailable(spec.device)
        if reason is not None:
            raise Unsupported(reason)


class ComposedRunner:
    """Runners of the stages; those after the first take what reaches them in smaller batches, the last one padded."""

    partial = False
    build_s = 0.0

    def __init__(
        self, cascade: Cascade, spec: Spec, variant: Variant, runners: Sequence[Runner], x: Any = None
    ) -> None:
        self.engine, self.spec, self.variant = runners[0].engine, spec, variant
        self.totals: tuple[int, ...] = (0,) * len(runners)
        self._cascade, self._runners = cascade, list(runners)
        self.input = runners[0].input if x is None else x

    def run(self, x: Any) -> Any:
        """Run on exactly `batch` rows; see `Runner.run`."""
        if not self._runners:
            raise InvalidInput("this runner is closed")
        ids, margins = (np.array(part) for part in self._runners[0].run(x))
        ids = ids.astype(np.int64, copy=False)
        at = np.arange(len(ids))
        counts = [len(ids)]
        for runner, threshold in zip(self._runners[1:], self._cascade.thresholds, strict=True):
            at = at[goes_on(margins[at], threshold)]
            counts.append(len(at))
            for begin in range(0, len(at), runner.spec.batch):
                some = at[begin : begin + runner.spec.batch]
                runner.input[: len(some)] = x[some]
                answer = runner.run(runner.input)
                if isinstance(answer, tuple):
                    margins[some] = answer[1][: len(some)]
                    answer = answer[0]
                ids[some] = answer[: len(some)]
        self.totals = tuple(a + b for a, b in zip(self.totals, counts, strict=True))
        return (ids, margins) if self.spec.output == "margin" else ids

    def bind(self, x: Any) -> ComposedRunner:
        """Return a runner that shares the stages' weights and whose static input is `x`."""
        runners = [self._runners[0].bind(x), *self._runners[1:]]
        return ComposedRunner(self._cascade, self.spec, self.variant, runners, x)

    def close(self) -> None:
        """Free the buffers of all stages."""
        for runner in self._runners:
            runner.close()
        self._runners = []
        self.input = np.empty((0, 0), np.float32)
