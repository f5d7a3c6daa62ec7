"""Measuring: clocks, statistics, timing, rooflines and telemetry.

This package is the only place that reads a clock, and it knows nothing of MLPs: what it times is a callable that it is
handed. Importing it imports neither torch nor NVML.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Clock": "clock",
    "CudaClock": "clock",
    "HostClock": "clock",
    "Stopwatch": "clock",
    "clock_for": "clock",
    "stopwatch": "clock",
    "timestamp": "clock",
    "Stat": "stats",
    "percentile": "stats",
    "summarise": "stats",
    "Latency": "timing",
    "Split": "timing",
    "Throughput": "timing",
    "latency": "timing",
    "rotating": "timing",
    "split": "timing",
    "throughput": "timing",
    "Roofs": "roofline",
    "roof": "roofline",
    "share": "roofline",
    "device_info": "telemetry",
    "machine_fingerprint": "telemetry",
    "resolve_device": "telemetry",
    "snapshot": "telemetry",
    "versions": "telemetry",
}

__all__ = [
    "Clock",
    "CudaClock",
    "HostClock",
    "Latency",
    "Roofs",
    "Split",
    "Stat",
    "Stopwatch",
    "Throughput",
    "clock_for",
    "device_info",
    "latency",
    "machine_fingerprint",
    "percentile",
    "resolve_device",
    "roof",
    "rotating",
    "share",
    "snapshot",
    "split",
    "stopwatch",
    "summarise",
    "throughput",
    "timestamp",
    "versions",
]

if TYPE_CHECKING:
    from gigamlp.measure.clock import Clock, CudaClock, HostClock, Stopwatch, clock_for, stopwatch, timestamp
    from gigamlp.measure.roofline import Roofs, roof, share
    from gigamlp.measure.stats import Stat, percentile, summarise
    from gigamlp.measure.telemetry import device_info, machine_fingerprint, resolve_device, snapshot, versions
    from gigamlp.measure.timing import Latency, Split, Throughput, latency, rotating, split, throughput


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gigamlp.measure' has no attribute {name!r}")
    value = getattr(import_module(f"gigamlp.measure.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
