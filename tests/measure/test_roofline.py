"""Roofs: rates from a scripted clock, and the arithmetic of a share."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gigamlp.errors import FileFormatError, InvalidInput, MeasurementError
from gigamlp.measure.roofline import Roofs, best_roof, roof, share
from tests.measure.fakes import FakeClock

ROOFS = Roofs(read_bytes_s=100.0, copy_bytes_s=80.0, macs_s={"float32": 1000.0, "int8": 4000.0}, cache_bytes=64)


@pytest.mark.parametrize(
    ("moved", "macs", "dtype", "in_cache", "floor"),
    [
        (200, 1000, "float32", False, 2.0),  # memory bound
        (200, 3000, "float32", False, 3.0),  # compute bound
        (200, 3000, "int8", False, 2.0),  # the same work, four times the matrix rate
        (200, 1000, "float32", True, 1.0),  # in cache only the compute roof counts
        (200, 3000, "bfloat16", False, 3.0),  # no rate of its own: computed as float32
        (200, 3000, "float16", True, 3.0),
        (200, 1000, "float64", False, 2.0),  # no rate for that dtype: only memory limits
        (200, 1000, "float64", True, None),  # nothing that was measured limits
        (0, 1000, "float32", False, 1.0),
        (200, 0, "float32", True, None),
        (0, 0, "float32", False, None),
    ],
)
def test_floor_and_share(moved, macs, dtype, in_cache, floor):
    assert ROOFS.floor_seconds(moved, macs, dtype, in_cache=in_cache) == floor
    found = share(4.0, bytes_moved=moved, macs=macs, dtype=dtype, roofs=ROOFS, in_cache=in_cache)
    assert found == (None if floor is None else floor / 4)


@pytest.mark.parametrize("bad", [{"bytes_moved": -1.0}, {"macs": -1.0}, {"seconds": 0.0}, {"seconds": math.nan}])
def test_share_refuses_impossible_work(bad):
    work = {"seconds": 1.0, "bytes_moved": 1.0, "macs": 1.0, "dtype": "float32", "roofs": ROOFS, "in_cache": False}
    with pytest.raises(InvalidInput):
        share(**{**work, **bad})


@pytest.mark.parametrize(
    "roofs", [ROOFS, replace(ROOFS, h2d_pinned_bytes_s=5.0, h2d_pageable_bytes_s=2.0, d2h_pinned_bytes_s=6.0)]
)
def test_json_round_trip(roofs):
    assert Roofs.from_json(json.loads(json.dumps(roofs.to_json()))) == roofs


@pytest.mark.parametrize(
    "change",
    [
        {"read_bytes_s": 0.0},
        {"read_bytes_s": None},
        {"copy_bytes_s": "fast"},
        {"macs_s": {"float32": -1.0}},
        {"macs_s": [1.0]},
        {"cache_bytes": 1.5},
        {"h2d_pinned_bytes_s": math.inf},
        {"surprise": 1},
    ],
)
def test_bad_json_is_refused(change):
    with pytest.raises(FileFormatError):
        Roofs.from_json({**ROOFS.to_json(), **change})


def test_missing_field_and_wrong_kind_are_refused():
    data = ROOFS.to_json()
    del data["copy_bytes_s"]
    for bad in (data, [], None, "roofs"):
        with pytest.raises(FileFormatError, match="fields"):
            Roofs.from_json(bad)


def test_a_roof_is_the_best_run():
    clock = FakeClock()
    work = clock.work("w", host=[9.0, 2.0, 1.0, 4.0])
    assert roof(work, clock, 100.0, repeats=3) == pytest.approx(100.0)


def test_a_roof_uses_device_time_where_there_is_one():
    clock = FakeClock("cuda:0")
    # the host spends another 6 s waiting before it hands the work over; the device does not
    assert roof(clock.work("w", device=2.0), clock, 100.0, repeats=3) == pytest.approx(50.0)


def test_a_roof_keeps_to_its_budget_but_takes_three_runs():
    clock = FakeClock()
    roof(clock.work("slow", host=1.0), clock, 1.0, budget_s=0.1)
    assert clock.log.count("slow") == 1 + 3
    clock = FakeClock()
    roof(clock.work("quick", host=0.01), clock, 1.0, budget_s=0.1, repeats=1000)
    assert clock.log.count("quick") == pytest.approx(11, abs=1)


def test_best_roof_takes_the_quickest_way():
    clock = FakeClock()
    ways = [clock.work("a", host=2.0), clock.work("b", host=0.5), clock.work("c", host=1.0)]
    assert best_roof(ways, clock, 10.0) == pytest.approx(20.0)
    with pytest.raises(MeasurementError):
        best_roof([], clock, 10.0)


def test_a_clock_that_stands_still_gives_no_roof():
    with pytest.raises(MeasurementError, match="did not advance"):
        roof(lambda: None, FakeClock(), 1.0)
