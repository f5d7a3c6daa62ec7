"""Clocks, and the rule that nothing outside `measure` reads one."""

from __future__ import annotations

import ast
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import gigamlp
from gigamlp.errors import DeviceError
from gigamlp.measure.clock import HostClock, Stopwatch, clock_for, stopwatch, timestamp

SOURCE = Path(gigamlp.__file__).parent
TIMERS = {"time", "timeit", "datetime"}
# events without timing order streams, which is no measurement
TIMING_NAMES = {"elapsed_time", "enable_timing", "perf_counter", "monotonic", "process_time"}


def time_reads(source: str) -> list[str]:
    """Return what in a module reads a clock: imports of timer modules, and CUDA events made for timing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in TIMERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TIMERS:
            found.append(node.module)
        elif isinstance(node, ast.Attribute) and node.attr in TIMING_NAMES:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in TIMING_NAMES:
            found.append(node.arg)
    return found


def test_only_measure_reads_a_clock():
    offenders = {
        str(path.relative_to(SOURCE)): found
        for path in sorted(SOURCE.rglob("*.py"))
        if "measure" not in path.relative_to(SOURCE).parts[:1] and (found := time_reads(path.read_text("utf-8")))
    }
    assert offenders == {}


@pytest.mark.parametrize(
    "source",
    [
        "import time\n",
        "import os, time as t\n",
        "from time import perf_counter\n",
        "def f():\n    from datetime import datetime\n",
        "import torch\ne = torch.cuda.Event(enable_timing=True)\n",
        "ms = a.elapsed_time(b)\n",
        "import x\nx.perf_counter()\n",
    ],
)
def test_the_rule_catches_a_reader(source):
    assert time_reads(source)


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.cuda.Event()\n", "time = 3\n", "from gigamlp.measure.timing import x\n"]
)
def test_the_rule_lets_others_pass(source):
    assert time_reads(source) == []


def test_host_clock_advances_and_has_no_device_timer():
    clock, calls = HostClock(), []
    begin = clock.now()
    assert clock.span(lambda: calls.append(1)) is None
    clock.synchronize()
    assert calls == [1]
    assert clock.now() > begin
    assert HostClock.now() >= begin
    assert clock.device == "cpu"


def test_clock_for_names():
    assert isinstance(clock_for("cpu"), HostClock)
    for bad in ("gpu", "cuda", "cuda:", "cuda:x", "auto", ""):
        with pytest.raises(DeviceError, match="no clock"):
            clock_for(bad)


def test_no_cuda_clock_without_cuda():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(DeviceError, match="no usable CUDA device"):
        clock_for("cuda:0")


def test_a_cuda_clock_needs_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match=r"cannot time cuda:0 without torch: pip install 'gigamlp\[torch\]'"):
        clock_for("cuda:0")


def test_stopwatch_runs_until_stopped():
    watch = stopwatch()
    assert isinstance(watch, Stopwatch)
    first = watch.seconds
    assert watch.seconds > first
    stopped = watch.stop()
    assert watch.seconds == stopped == watch.stop()


def test_stopwatch_block_stops_at_its_end_even_after_an_error():
    watch = stopwatch()
    with pytest.raises(KeyError), watch:
        raise KeyError
    assert watch.seconds == watch.seconds > 0


def test_timestamp_is_utc_now():
    assert timestamp(1_700_000_000.1234) == "2023-11-14T22:13:20.123+00:00"
    made = datetime.fromisoformat(timestamp())
    assert made.utcoffset() == timedelta(0)
    assert abs(datetime.now(made.tzinfo) - made) < timedelta(minutes=1)


@pytest.mark.gpu
def test_cuda_span_is_device_time_and_events_are_used_again():
    import torch

    clock = clock_for("cuda:0")
    assert clock.device == "cuda:0"
    clock.span(lambda: torch.cuda._sleep(500_000_000))  # brings an idle GPU to its clock
    short = clock.span(lambda: torch.cuda._sleep(1_000_000))
    long = clock.span(lambda: torch.cuda._sleep(10_000_000))
    assert 3 < long / short < 30
    begin = clock.now()
    torch.cuda._sleep(10_000_000)
    issued = clock.now() - begin
    clock.synchronize()
    assert clock.now() - begin > 2 * issued
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        clock.span(lambda: None)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_cuda_span_times_the_current_stream():
    import torch

    clock = clock_for("cuda:0")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert clock.span(lambda: torch.cuda._sleep(10_000_000)) > 10_000_000 / 3e9


@pytest.mark.gpu
def test_cuda_clock_of_an_absent_device():
    import torch

    with pytest.raises(DeviceError, match="this machine has"):
        clock_for(f"cuda:{torch.cuda.device_count()}")
