"""Measuring the cascades that the speeds of single networks propose, for `gigamlp.frontier`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gigamlp.bench import bench
from gigamlp.cascade import Cascade
from gigamlp.engines.registry import engine
from gigamlp.errors import Unsupported
from gigamlp.mlp import MLP
from gigamlp.propose import propose
from gigamlp.record import Row

__all__ = ["measure_cascades"]


def measure_cascades(
    measured: Sequence[tuple[MLP, Row]],
    count: int,
    validation: tuple[Any, Any],
    data: tuple[Any, Any],
    *,
    options: Mapping[str, Any],
    skipped: list[dict[str, str]],
) -> list[tuple[Cascade, Row, float]]:
    """Return up to `count` cascades, each with the row that was measured and its accuracy on the validation rows.

    Parameters
    ----------
    measured : sequence of (MLP, Row)
        Single networks, as they were timed. Stages are those with a scheme, of an engine that runs cascades by itself,
        each network in the scheme that was its fastest there.
    count : int
        None are looked for if it is 0.
    validation, data : (x, y)
        Rows that choose thresholds, and rows to time with.
    options : mapping
        What `gigamlp.bench.bench` takes beside; the first batch and residence are those that speeds are compared at.
    skipped : list
        Takes what could not be measured, and why.
    """
    if count == 0:
        return []
    batch, residence = options["batch"][0], options["residence"][0]
    found: dict[str, dict[str, tuple[MLP, float]]] = {}
    for mlp, row in measured:
        alike = (row.batch, row.residence, row.input_dtype) == (batch, residence, "uint8")
        integer = row.scheme is not None and mlp.scheme is not None  # a stage runs in the scheme that it carries
        if not (alike and integer and row.engine and getattr(engine(row.engine), "cascades", False)):
            continue
        own, speed = found.setdefault(row.engine, {}), float(row.samples_per_s or 0)
        if mlp.name not in own or own[mlp.name][1] < speed:
            own[mlp.name] = (mlp, speed)
    if not found:
        skipped.append({"model": "cascades", "reason": "no network was timed by an engine that runs cascades"})
    out = []
    for name, own in found.items():
        models = [mlp for mlp, _ in own.values()]
        speeds = {key: speed for key, (_, speed) in own.items()}
        for each in propose(models, speeds, *validation, top=count):
            try:
                record = bench(each.cascade, engines=[name], data=data, validation=validation[0], **options)
            except Unsupported as error:
                skipped.append({"model": each.cascade.name, "engine": name, "reason": str(error)})
                continue
            promised = f"predicted {each.predicted_samples_per_s / 1e6:,.3f} M/s"
            for row in record.rows:
                note = "; ".join(part for part in (promised, row.note) if part)
                out.append((each.cascade, replace(row, note=note), each.validation_accuracy))
    return out
