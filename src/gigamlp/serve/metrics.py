"""What a server counts, shown as Prometheus reads it.

Counting is part of every request, so it is plain numbers here: with prometheus-client's counters it took twice as long
(6.5 and 3.4 us), and five times where processes share them, which has to be arranged by an environment variable before
it is imported. Processes that share a port write theirs to files once a second, and each shows the sums.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gigamlp._atomic import write_text

__all__ = ["Metrics", "forget_process"]

_MODEL = ("model", "version")
_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_RUN_SECONDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, *_SECONDS[:-3])
_ROWS = tuple(float(4**n) for n in range(10))
_REQUESTS = tuple(float(2**n) for n in range(9))

# name -> (what it says, its labels, the bounds of a histogram)
_COUNTERS = {
    "gigamlp_requests": ("Requests for answers; status 499: the caller hung up.", (*_MODEL, "status")),
    "gigamlp_rows": ("Rows answered.", _MODEL),
    "gigamlp_dropped": ("Requests that were not answered through no fault of theirs.", ("reason",)),
    "gigamlp_reloads": ("Model files read anew while serving.", ("model", "result")),
}
_HISTOGRAMS = {
    "gigamlp_request_seconds": ("From a request's head to its answer's last byte.", _MODEL, _SECONDS),
    "gigamlp_batch_rows": ("Rows that ran together.", _MODEL, _ROWS),
    "gigamlp_batch_requests": ("Requests that ran together.", _MODEL, _REQUESTS),
    "gigamlp_run_seconds": ("The engine's time for what ran together.", _MODEL, _RUN_SECONDS),
}
_LEVELS = {
    "gigamlp_queue_rows": ("Rows that wait for the engine.", ()),
    "gigamlp_body_bytes": ("Bytes of bodies held.", ()),
    "gigamlp_connections": ("Open connections.", ()),
    "gigamlp_model_info": ("Processes that serve this.", (*_MODEL, "engine", "device")),
}
_REASONS = ("queue_full", "bodies_full", "gone", "late")

Key = tuple[str, tuple[str, ...]]


@dataclass
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: list[int], total: float) -> None:
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.total += total


@dataclass
class _Numbers:
    counts: dict[Key, float] = field(default_factory=dict)
    levels: dict[Key, float] = field(default_factory=dict)
    histograms: dict[Key, _Histogram] = field(default_factory=dict)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self.counts[name, labels] = self.counts.get((name, labels), 0) + by

    def histogram(self, name: str, *labels: str) -> _Histogram:
        found = self.histograms.get((name, labels))
        if found is None:
            bounds = _HISTOGRAMS[name][2]
            found = self.histograms[name, labels] = _Histogram(bounds, [0] * (len(bounds) + 1))
        return found

    def add(self, data: dict[str, Any]) -> None:
        for name, labels, value in data.get("counts", ()):
            self.count(name, *labels, by=value)
        for name, labels, value in data.get("levels", ()):
            self.levels[name, tuple(labels)] = self.levels.get((name, tuple(labels)), 0) + value
        for name, labels, counts, total in data.get("histograms", ()):
            self.histogram(name, *labels).add(counts, total)


class Metrics:
    """Counters, levels and histograms of one process.

    Parameters
    ----------
    folder : str, optional
        Where the processes of one server put their numbers.

    Examples
    --------
    >>> metrics = Metrics()
    >>> metrics.answered("mnist-40", "1", 200, rows=3, seconds=0.001)
    >>> [line for line in metrics.text().decode().splitlines() if line.startswith("gigamlp_rows_total")]
    ['gigamlp_rows_total{model="mnist-40",version="1"} 3.0']
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._numbers = _Numbers()
        self._runs: dict[tuple[str, str], tuple[_Histogram, ...]] = {}
        self._lock = threading.Lock()  # runs are counted in the engine's thread and in the loop's
        for reason in _REASONS:
            self._numbers.count("gigamlp_dropped", reason, by=0)

    def answered(self, model: str, version: str, status: int, rows: int, seconds: float) -> None:
        """Count a request for answers; `model` and `version` are "" where there is no such model."""
        numbers = self._numbers
        numbers.count("gigamlp_requests", model, version, str(status))
        if rows:
            numbers.count("gigamlp_rows", model, version, by=rows)
        numbers.histogram("gigamlp_request_seconds", model, version).observe(seconds)

    def ran(self, model: Any, rows: int, requests: int, seconds: float) -> None:
        """Count a run of the engine."""
        key = (model.name, model.version)
        with self._lock:
            found = self._runs.get(key)
            if found is None:
                names = ("gigamlp_batch_rows", "gigamlp_batch_requests", "gigamlp_run_seconds")
                found = self._runs[key] = tuple(self._numbers.histogram(name, *key) for name in names)
            for histogram, value in zip(found, (rows, requests, seconds), strict=True):
                histogram.observe(value)

    def dropped(self, reason: str) -> None:
        """Count a request that was not answered."""
        self._numbers.count("gigamlp_dropped", reason)

    def reloaded(self, model: str, result: str) -> None:
        """Count a model file that was read anew; `result` is ``ok`` or ``failed``."""
        self._numbers.count("gigamlp_reloads", model, result)

    def serving(self, served: Any, *, on: bool = True) -> None:
        """Note that a model version is served, or is no more."""
        key = (served.name, served.version, ",".join(served.engines), served.session.device)
        self._numbers.levels["gigamlp_model_info", key] = int(on)

    def levels(self, **values: float) -> None:
        """Note what there is at present: ``queue_rows``, ``body_bytes``, ``connections``."""
        for name, value in values.items():
            self._numbers.levels[f"gigamlp_{name}", ()] = value

    # ---- shown ------------------------------------------------------------------------------------------------------

    def _data(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what outlives this process, and what does not."""
        with self._lock:
            histograms = [(*key, list(each.counts), each.total) for key, each in self._numbers.histograms.items()]
        counts = [(*key, value) for key, value in self._numbers.counts.items()]
        levels = [(*key, value) for key, value in self._numbers.levels.items()]
        return {"counts": counts, "histograms": histograms}, {"levels": levels}

    def share(self) -> None:
        """Put this process's numbers into the folder, if there is one."""
        if self._folder is None:
            return
        for kind, data in zip(("counts", "levels"), self._data(), strict=True):
            write_text(self._folder / f"{os.getpid()}.{kind}.json", json.dumps(data))

    def text(self) -> bytes:
        """Return all numbers, of all processes, as Prometheus reads them."""
        from prometheus_client import CollectorRegistry, generate_latest

        numbers = _Numbers()
        for data in self._data():
            numbers.add(data)
        if self._folder is not None:
            for path in self._folder.glob("*.json"):
                if path.name.partition(".")[0] != str(os.getpid()):
                    with suppress(FileNotFoundError):  # of a process that ended just now
                        numbers.add(json.loads(path.read_text(encoding="utf-8")))
        registry = CollectorRegistry()
        registry.register(_Collector(numbers))
        return generate_latest(registry)


class _Collector:
    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for families, kind, values in (
            (_COUNTERS, CounterMetricFamily, self._numbers.counts),
            (_LEVELS, GaugeMetricFamily, self._numbers.levels),
        ):
            for name, (text, labels) in families.items():
                family = kind(name, text, labels=labels)
                for (its, values_of), value in values.items():
                    if its == name:
                        family.add_metric(values_of, value)
                yield family
        for name, (text, labels, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for (its, values_of), each in self._numbers.histograms.items():
                if its == name:
                    histogram.add_metric(values_of, _buckets(each), each.total)
            yield histogram


def _buckets(histogram: _Histogram) -> list[tuple[str, float]]:
    below, found = 0, []
    for bound, count in zip((*(str(b) for b in histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        found.append((bound, float(below)))
    return found


def forget_process(folder: str, pid: int) -> None:
    """Drop the present levels of a process that ended; its counts stay."""
    (Path(folder) / f"{pid}.levels.json").unlink(missing_ok=True)
