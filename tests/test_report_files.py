"""`gigamlp report`: every committed record as a page, two of them compared, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gigamlp.cli import main
from gigamlp.record import Record, Row
from gigamlp.report.compare import compare
from gigamlp.report.html import render
from gigamlp.report.roofline import limits, meaning, roofline_figure
from tests.docblocks import ROOT
from tests.test_report import Page

pytest.importorskip("matplotlib", reason="the report needs matplotlib")

SCHEMAS = {path: json.loads(path.read_text()).get("schema") for path in sorted((ROOT / "records").glob("*.json"))}
RECORDS = [path for path, schema in SCHEMAS.items() if schema == "gigamlp-record/1"]
H200 = ROOT / "records" / "h200-reproduce-2026-12-01.json"


def row(**values):
    return Row(**{"name": "m", "engine": "e", "batch": 8, "samples_per_s": 1e6, "wall_us": 8.0, "iqr": 0.08, **values})


def record(*rows, **extra):
    return Record({"name": "here"}, {}, "bench", list(rows), extra)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_committed_record_is_a_page(path):
    page = Page(render(Record.load(path)))
    assert len(page.ids) == len(set(page.ids))
    assert "mathdefault" not in page.text


class TestCompare:
    def test_ratio_and_noise(self):
        found = compare(record(row()), record(row(samples_per_s=1.5e6, wall_us=5.333, iqr=0.1)))
        (pair,) = found.pairs
        assert pair.ratio == 1.5
        assert pair.noise == pytest.approx((0.01**2 + (0.1 / 5.333) ** 2) ** 0.5)
        assert pair.verdict == "faster"
        assert compare(record(row(samples_per_s=1.5e6)), record(row())).pairs[0].verdict == "slower"

    @pytest.mark.parametrize("speed", [0.99e6, 1.01e6])
    def test_within_noise(self, speed):
        assert compare(record(row()), record(row(samples_per_s=speed))).pairs[0].verdict == "within noise"

    def test_no_spread_no_verdict(self):
        pair = compare(record(row(iqr=None)), record(row(samples_per_s=9e6))).pairs[0]
        assert (pair.noise, pair.verdict) == (None, "spread unknown")

    @pytest.mark.parametrize(
        "other",
        [{"batch": 9}, {"threads": 2}, {"residence": "cold"}, {"scheme": "w8"}, {"hidden": [3]}, {"output": "logits"}],
        ids=str,
    )
    def test_other_work_is_not_compared(self, other):
        found = compare(record(row()), record(row(**other)))
        assert (found.pairs, len(found.only_before), len(found.only_after)) == ((), 1, 1)
        assert found.geometric_mean is None

    def test_the_fastest_variant_counts_and_quoted_rows_do_not(self):
        before = record(row(variant="a"), row(variant="b", samples_per_s=2e6), row(name="q", quoted=True))
        found = compare(before, record(row(variant="c", samples_per_s=3e6), row(name="q", quoted=True)))
        assert [(pair.before.variant, pair.after.variant, pair.ratio) for pair in found.pairs] == [("b", "c", 1.5)]
        assert (found.only_before, found.only_after) == ((), ())

    def test_latencies_without_a_throughput(self):
        before, after = (record(row(samples_per_s=None, p50_us=us)) for us in (10.0, 4.0))
        assert compare(before, after).pairs[0].ratio == pytest.approx(2.5)


class TestRoofline:
    def test_lines_for_what_was_measured(self):
        rows = (row(residence="cold", features_read_bytes=784), row(residence="host-pinned", features_read_bytes=784))
        found = roofline_figure(record(*rows, roofs={"read_bytes_s": 4e12, "h2d_pinned_bytes_s": 5e10}))
        assert "memory, read: 4,000 GB/s" in found
        assert "bus, from pinned host memory: 50 GB/s" in found
        assert "pageable" not in found
        assert meaning(list(rows)) == "circles: cold, triangles: host-pinned"

    @pytest.mark.parametrize(
        ("values", "roofs"),
        [
            ({"residence": "cold", "features_read_bytes": 784}, {}),
            ({"residence": None, "features_read_bytes": 784}, {"read_bytes_s": 1e9}),
            ({"residence": "cold"}, {"read_bytes_s": 1e9}),
            ({"residence": "cold", "features_read_bytes": 784, "quoted": True}, {"read_bytes_s": 1e9}),
        ],
    )
    def test_nothing_to_draw(self, values, roofs):
        assert roofline_figure(record(row(**values), roofs=roofs)) is None

    def test_limits_by_threads(self):
        nested = {"1": {"read_bytes_s": 1e9}, "2": {"read_bytes_s": 2e9}}
        assert limits(record(roofs=nested)) == {"read_bytes_s": 2e9}


class TestCommand:
    def test_records_and_a_plan(self, tmp_path, capsys):
        out = tmp_path / "page.html"
        plan = ROOT / "records" / "h200-plan-reader-40-2026-12-01.json"
        assert main(["report", str(H200), str(H200), str(plan), "--out", str(out), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["plans"] == ["reader-40"]
        assert len(facts["records"]) == 2
        page = Page(out.read_text())
        assert "Compared: record 2 with record 1" in page.text
        assert "within noise" in page.text
        assert "Roofline" in page.text

    def test_other_machines_are_named(self, tmp_path):
        other = Record.load(H200)
        other = replace(other, device={**other.device, "name": "another card"})
        (tmp_path / "other.json").write_text(other.dumps())
        assert main(["report", str(H200), str(tmp_path / "other.json"), "--out", str(tmp_path / "p.html")]) == 0
        assert "The records are of different machines." in Page((tmp_path / "p.html").read_text()).text

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[1]", "not a JSON object"),
            ("{", "not a JSON object"),
            ("{}", "schema is None, expected 'gigamlp-record/1' or 'gigamlp-plan/1'"),
            ('{"schema": "gigamlp-record/9"}', "schema is 'gigamlp-record/9'"),
        ],
    )
    def test_what_is_no_result(self, tmp_path, capsys, text, words):
        path = tmp_path / "bad.json"
        path.write_text(text)
        assert main(["report", str(H200), str(path), "--out", str(tmp_path / "p.html")]) == 1
        assert words in capsys.readouterr().err.replace("\n", " ")
        assert not (tmp_path / "p.html").exists()

    def test_plans_alone_and_nothing(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        plan = ROOT / "records" / "h200-plan-reader-40-2026-12-01.json"
        assert main(["report", str(plan)]) == 1
        assert main(["report"]) == 2
        assert main(["report", "missing.json"]) == 1
        assert not list(Path().glob("*.html"))
        assert "at least one" in capsys.readouterr().err
