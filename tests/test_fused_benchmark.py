"""`benchmarks/fused_cuda.py` without a GPU: its order, roofs, record and exit status, on rows that are made up."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gigamlp.measure.roofline import Roofs
from gigamlp.record import Record, Row

pytest.importorskip("torch")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROOFS = Roofs(4.5e12, 4.2e12, {"float32": 2.5e13, "float16": 4.4e14, "int8": 4.8e14}, cache_bytes=60 << 20)


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fused_cases")


@pytest.fixture
def bench(cases, monkeypatch):
    """The script, with a machine that runs every case at its bar."""
    script = importlib.import_module("fused_cuda")
    monkeypatch.setattr(script, "resolve_device", lambda device: device)
    monkeypatch.setattr(script.gm.data, "load_mnist", lambda: (None, None, np.zeros((9, 784), np.uint8), np.zeros(9)))
    monkeypatch.setattr(script, "compile_ahead", lambda cases: None)
    monkeypatch.setattr(script, "equality", lambda cases, x: None)
    monkeypatch.setattr(script, "measure_roofs", lambda device: ROOFS)
    monkeypatch.setattr(script, "empty_launch_s", lambda: 2.3e-6)
    monkeypatch.setattr(script, "device_info", lambda device: {"name": "made up"})
    monkeypatch.setattr(script, "seen", [], raising=False)
    monkeypatch.setattr(script, "speed", {}, raising=False)

    def measure(case, peers, data, roofs, skipped):
        script.seen.append((case.name, tuple(peers)))
        rate = script.speed.get(case.name, 1.0) * (case.least or 1e6)
        return [made(case, engine, rate / (index + 1)) for index, engine in enumerate(("cuda_fused", *peers))]

    monkeypatch.setattr(script, "measure", measure)
    return script


def made(case, engine, rate, variant="compute=float16"):
    rows = case.batch * case.batches
    wall_us = rows / rate * 1e6
    return Row(case.name, engine, variant, batch=case.batch, samples_per_s=rate, wall_us=wall_us, iqr=0.1, accuracy=0.9)


def run(bench, tmp_path, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fused_cuda.py", "--out", str(tmp_path / "r.json"), *arguments])
    status = bench.main()
    return status, Record.load(tmp_path / "r.json") if (tmp_path / "r.json").exists() else None


def test_the_bars_are_the_issues(cases):
    bars = {case.name: case.least for case in cases.CASES if case.least}
    part_1 = [5.4e9, 9.1e9, 1.8e9, 300e6, 210e6, 3.0e9, 1 / 3.2e-6]
    part_2 = [5.4e9, 4.8e9, 2.6e9, 1.6e9, 180e6, 800e6, 2.7e9]  # the first is above part 1's for that network
    assert sorted(bars.values()) == sorted(part_1 + part_2)
    assert [case.name for case in cases.CASES if case.least is None] == [
        "784-40-10 b10000 cold (extra)",
        "784-40-10 b1024 cold (extra)",
    ]


def test_batch_1_is_visited_at_the_start_inside_and_at_the_end(cases):
    order = [case.name for case in cases.schedule(cases.CASES)]
    places = [index for index, name in enumerate(order) if name == "784-40-10 b1"]
    assert (places[0], places[2], len(places)) == (0, len(order) - 1, 3)
    assert 2 <= places[1] <= len(order) - 3
    assert set(order) == {case.name for case in cases.CASES}
    assert cases.schedule(cases.CASES[1:3]) == list(cases.CASES[1:3])


def test_every_row_has_the_share_of_the_roof_that_binds_it(cases):
    case = {each.name: each for each in cases.CASES}
    large, hot = case["784-40-10"], case["784-40-10 b1024"]
    (which, seconds), work = cases.Work.of(large, made(large, "cuda_fused", 1.0)).roof(large, ROOFS, 2e-6), 784 + 1
    assert (which, seconds) == ("memory", pytest.approx((1 << 21) * work / 4.5e12))
    # a peer's class ids are int64
    assert cases.Work.of(large, made(large, "torch_graph", 1.0)).bytes_out == 8
    which, seconds = cases.Work.of(hot, made(hot, "cuda_fused", 1.0)).roof(hot, ROOFS, 2e-6)
    assert (which, seconds) == ("one empty launch", 2e-6)
    which, seconds = cases.Work.of(hot, made(hot, "cuda_fused", 1.0)).roof(hot, ROOFS, 1e-9)
    assert (which, seconds) == ("int8 products", pytest.approx(1024 * 784 * 40 / 4.8e14))
    row = cases.explained(made(hot, "cuda_fused", 256e6), hot, ROOFS, 2e-6)
    assert row.roof_share == pytest.approx(0.5)  # 4 us for what 2 us would allow
    assert "802,816 bytes of rows, writes 1,024 of answers; 32,112,640 int8 and 409,600 float16" in row.note
    window = case["784-40-10 window 384"]
    assert cases.Work.of(window, made(window, "cuda_fused", 1.0)).bytes_in == 384


def test_the_median_visit_counts_and_its_range_is_the_visits(cases):
    case = cases.CASES[0]
    row = cases.typical([made(case, "cuda_fused", 1e6 / us) for us in (3.4, 2.7, 2.9)])
    assert row.wall_us == pytest.approx(2.9)
    assert row.iqr == pytest.approx(0.35)
    assert row.note == "the median of 3 visits: 3.40, 2.70, 2.90 us"


def test_all_bars_met_is_0_and_the_record_has_it_all(bench, cases, tmp_path, monkeypatch):
    bench.speed["784-64-10"] = 0.971
    bench.speed["784-40-10 b1024 cold (extra)"] = 0.01
    status, record = run(bench, tmp_path, monkeypatch)
    assert status == 0
    assert record.extra["missed"] == {}
    assert len([r for r in record.rows if r.engine == "cuda_fused"]) == len(cases.CASES)
    assert all(row.roof_share > 0 for row in record.rows)
    assert len(record.extra["visits_us"]["784-40-10 b1 cuda_fused"]) == 3
    assert record.extra["empty_launch_us"] == pytest.approx(2.3)
    assert record.extra["per_row"]["784-40-10 cuda_fused"]["macs"] == {"int8": 31_360, "float16": 400}
    assert bench.seen[1] == ("784-40-10", ("torch_graph", "torch_compile", "jax"))
    assert bench.seen[-1] == ("784-40-10 b1", ("torch_graph",))
    json.dumps(record.to_json())


def test_one_bar_missed_or_not_measured_is_1(bench, tmp_path, monkeypatch, capsys):
    bench.speed["784-64-10"] = 0.969
    status, record = run(bench, tmp_path, monkeypatch)
    assert (status, record.extra["missed"]) == (1, {"784-64-10": "96.9% of the bar"})
    bench.speed.clear()
    status, record = run(bench, tmp_path, monkeypatch, "--cases", "784-64-10,784-40-10 b1024 cold (extra)")
    assert status == 1
    assert record.extra["missed"]["784-40-10 b1"] == "not measured"
    assert "784-64-10" not in record.extra["missed"]
    with pytest.raises(SystemExit):
        run(bench, tmp_path, monkeypatch, "--cases", "784-65-10")
    assert "no such lines: 784-65-10" in capsys.readouterr().err


def test_when_the_budget_has_ended_our_own_rows_are_still_measured(bench, tmp_path, monkeypatch):
    status, record = run(bench, tmp_path, monkeypatch, "--budget", "-1")
    assert status == 0
    assert {row.engine for row in record.rows} == {"cuda_fused"}
    assert "784-40-10 b1024 cold (extra): the budget of -1 s had ended" in record.extra["skipped"]
    assert not any(name.endswith("(extra)") for name, _ in bench.seen)
