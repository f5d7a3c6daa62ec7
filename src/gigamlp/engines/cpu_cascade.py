"""Cascades in engine ``cpu_fused``: all stages over a few hundred rows at a time, while these are in cache.

The native call is ``kernels/cpu/cascade.cpp``; what a stage computes is exactly what it computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Cascade
from gigamlp.engines.base import Spec, Variant
from gigamlp.engines.cascades import joined, refuse_output, split
from gigamlp.errors import InvalidInput
from gigamlp.mlp import MLP

__all__ = ["CpuCascadeRunner", "cascade_variants", "stage_variants", "whole_variant"]

Array = NDArray[Any]
_OPTIONS = ("scheme", "zeros", "isa")  # of each stage; threads are those of the whole


def cascade_variants(cascade: Cascade, spec: Spec, of_stage: Callable[[MLP, Spec], list[Variant]]) -> Iterator[Variant]:
    """Yield the variants worth measuring: every stage in its first way, then alike in each way that all have.

    Parameters
    ----------
    cascade : Cascade
    spec : Spec
    of_stage : callable
        Gives the variants of one stage alone, the most promising first.
    """
    refuse_output(spec)
    each = [of_stage(stage, spec) for stage in cascade.stages]
    seen = set()
    for first in each[0]:
        for rest in each[1]:
            ways = [first] + [_alike(rest, others) for others in each[1:]]
            if len({way.get("scheme") == "float32" for way in ways}) > 1:
                continue
            variant = whole_variant(ways)
            if variant not in seen:
                seen.add(variant)
                yield variant


def _alike(way: Variant, others: list[Variant]) -> Variant:
    """Return of `others` the one that is most like `way`: schemes differ from stage to stage."""
    return max(others, key=lambda v: sum((v.get(key) == way.get(key)) for key in ("zeros", "isa", "threads", "scheme")))


def whole_variant(ways: Sequence[Variant]) -> Variant:
    """Return the variant of a cascade whose stages run in the variants `ways`, on the first one's threads."""
    scheme, zeros, isa = (joined([str(way.get(key)) for way in ways]) for key in _OPTIONS)
    threads = int(ways[0].get("threads"))
    return Variant.of(cascade=len(ways), scheme=scheme, zeros=zeros, threads=threads, isa=isa)


def stage_variants(cascade: Cascade, variant: Variant) -> list[Variant]:
    """Return the variant of each stage that the variant of a cascade names."""
    given = variant.to_json()
    count = given.pop("cascade", len(cascade.stages))
    if count != len(cascade.stages):
        raise InvalidInput(f"the variant is one of {count} stages, but the cascade has {len(cascade.stages)}")
    parts = {key: split(given[key], len(cascade.stages)) for key in _OPTIONS if key in given}
    others = {key: value for key, value in given.items() if key not in _OPTIONS}
    return [
        Variant.from_json({**{key: values[index] for key, values in parts.items()}, **others})
        for index in range(len(cascade.stages))
    ]


class CpuCascadeRunner:
    """The packed networks of all stages, an input and answers. It takes any number of rows up to the batch."""

    engine = "cpu_fused"
    partial = True
    build_s = 0.0

    def __init__(self, cascade: Cascade, spec: Spec, variant: Variant, nets: tuple[Any, ...], x: Array) -> None:
        self.spec, self.variant, self.input = spec, variant, x
        self.totals: tuple[int, ...] = (0,) * len(nets)
        self._cascade, self._nets = cascade, nets
        self._thresholds = np.asarray(cascade.thresholds, np.float32)
        self._threads = int(variant.get("threads"))
        self._ids = np.empty(spec.batch, np.int64)
        self._margin = np.empty(spec.batch, np.float32) if spec.output == "margin" else None

    def run(self, x: Any) -> Any:
        """Return the answers for `x` [up to batch, features], rows at any distance from each other."""
        if not self._nets:
            raise InvalidInput("this runner is closed")
        rows = x if isinstance(x, np.ndarray) else np.asarray(x)
        shape, dtype = self.input.shape, self.input.dtype
        if rows.ndim != 2 or rows.shape[1] != shape[1] or len(rows) > shape[0] or rows.dtype != dtype:
            got = f"a {type(x).__name__} {rows.dtype} {list(rows.shape)}"
            raise InvalidInput(f"the runner takes an array {dtype} [up to {shape[0]}, {shape[1]}], got {got}")
        n = len(rows)
        ids, margin = self._ids[:n], None if self._margin is None else self._margin[:n]
        counts = self._nets[0].cascade(self._nets[1:], self._thresholds, rows, ids, margin, self._threads)
        self.totals = tuple(a + b for a, b in zip(self.totals, (n, *counts), strict=True))
        return ids if margin is None else (ids, margin)

    def bind(self, x: Array) -> CpuCascadeRunner:
        """Return a runner with the same weights whose static input is `x`."""
        return CpuCascadeRunner(self._cascade, self.spec, self.variant, self._nets, x)

    def close(self) -> None:
        """Free the weights and buffers."""
        self._nets = ()
        self.input = self._ids = np.empty((0, 0), np.float32)
