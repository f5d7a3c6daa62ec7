"""A clock that advances only when told to, and a NumPy engine whose runs take scripted times on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from gigamlp.engines.base import Spec, Unsupported, Variant
from gigamlp.mlp import MLP, Layer

__all__ = ["FakeEngine", "FakeRunner", "ManualClock", "make_mlp"]


class ManualClock:
    """Host time in seconds; `advance` is the only thing that moves it."""

    device = "cpu"

    def __init__(self) -> None:
        self.time = 0.0
        self.synchronised = 0

    def now(self) -> float:
        return self.time

    def synchronize(self) -> None:
        self.synchronised += 1

    def span(self, work: Callable[[], object]) -> float | None:
        work()
        return None

    def advance(self, seconds: float) -> None:
        self.time += seconds


class FakeRunner:
    """The MLP's own NumPy forward pass; each run takes `seconds` on the clock, and may distort the logits."""

    def __init__(self, engine: FakeEngine, mlp: MLP, spec: Spec, variant: Variant, x: Any = None) -> None:
        dtype = np.float32 if spec.input_dtype == "bfloat16" else spec.input_dtype
        self.owner, self.mlp, self.engine, self.spec, self.variant = engine, mlp, engine.name, spec, variant
        self.input = np.zeros((spec.batch, mlp.features), dtype) if x is None else x
        self.build_s = engine.build_seconds.get(variant, 0.0)
        self.runs = 0
        self.closed = False

    def run(self, x: Any) -> Any:
        if self.closed:
            raise RuntimeError("run after close")
        self.runs += 1
        self.owner.log.append(self.variant)
        self.owner.clock.advance(self.owner.seconds.get(self.variant, 1e-3) * self.spec.batch)
        failure = self.owner.fails_after.get(self.variant)
        if failure is not None and self.runs > failure:
            raise RuntimeError("the device fell off the bus\nsecond line")
        z = self.mlp.logits(x) + self.owner.distort.get(self.variant, 0.0)
        if self.spec.output == "class":
            return self.mlp.class_ids(z).astype(self.owner.ids)
        if self.spec.output == "margin":
            top = np.sort(z, axis=1)
            return self.mlp.class_ids(z), top[:, -1] - top[:, -2]
        return z if self.spec.output == "logits" else self.mlp.probabilities(z)

    def bind(self, x: Any) -> FakeRunner:
        return FakeRunner(self.owner, self.mlp, self.spec, self.variant, x)

    def close(self) -> None:
        if not self.closed:
            self.owner.closed += 1
        self.closed = True


@dataclass
class FakeEngine:
    """An engine with scripted variants. `seconds` are per row and run."""

    clock: ManualClock
    name: str = "fake"
    compiles: bool = False
    integer: bool = False
    ids: str = "int64"
    offered: Sequence[Variant] = (Variant(),)
    reason: str | None = None
    refuses: dict[Variant, str] = field(default_factory=dict)
    breaks: dict[Variant, Exception] = field(default_factory=dict)
    seconds: dict[Variant, float] = field(default_factory=dict)
    build_seconds: dict[Variant, float] = field(default_factory=dict)
    distort: dict[Variant, Any] = field(default_factory=dict)
    fails_after: dict[Variant, int] = field(default_factory=dict)
    log: list[Variant] = field(default_factory=list)
    built: int = 0
    closed: int = 0

    def unavailable(self, device: str) -> str | None:
        return self.reason

    def variants(self, mlp: MLP, spec: Spec, *, full: bool = False) -> Sequence[Variant]:
        return list(self.offered)

    def build(self, mlp: MLP, spec: Spec, variant: Variant | None = None) -> FakeRunner:
        variant = self.offered[0] if variant is None else variant
        if variant in self.refuses:
            raise Unsupported(self.refuses[variant])
        if variant in self.breaks:
            raise self.breaks[variant]
        self.clock.advance(self.build_seconds.get(variant, 0.0))
        self.built += 1
        return FakeRunner(self, mlp, spec, variant)


def make_mlp(widths: Sequence[int] = (6, 8, 3), *, seed: int = 0, activation: str = "relu", **more: Any) -> MLP:
    """A random MLP of the given widths."""
    rng = np.random.default_rng(seed)
    last = len(widths) - 2
    layers = [
        Layer(
            rng.normal(size=(out, width)) / np.sqrt(width),
            rng.normal(size=out),
            "identity" if i == last else activation,
        )
        for i, (width, out) in enumerate(pairwise(widths))
    ]
    return MLP(layers, **{"name": "random", "input_scale": 1 / 64, **more})
