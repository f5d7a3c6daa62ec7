"""`gigamlp.bench.bench` on this CPU with small networks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gigamlp.bench import bench
from gigamlp.engines.probes import measure_roofs
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.record import Record
from gigamlp.trial import probe_rows
from tests.fakes import make_mlp

MLP = make_mlp((24, 12, 5))
FAST = {"device": "cpu", "engines": ["torch_eager"], "repeats": 5}


@pytest.fixture(autouse=True)
def quick_roofs(monkeypatch):
    roofs = measure_roofs("cpu", budget_s=0.2)
    monkeypatch.setattr("gigamlp.engines.probes.measure_roofs", lambda *a, **k: roofs)


def test_every_combination_is_a_row_with_accuracy_from_its_own_answers() -> None:
    x = probe_rows(MLP, "uint8", rows=200)
    y = MLP.predict(x)
    record = bench(
        MLP, **FAST, batch=[1, 64], input_dtype=["uint8", "float32"], output=["class"], residence=["hot"], data=(x, y)
    )
    assert {(r.batch, r.input_dtype) for r in record.rows} == {(b, d) for b in (1, 64) for d in ("uint8", "float32")}
    assert all(r.accuracy == 1.0 and r.name == "random" and r.engine == "torch_eager" for r in record.rows)
    assert all(r.samples_per_s > 0 and r.p50_us > 0 and r.roof_share > 0 for r in record.rows)
    assert Record.from_json(record.to_json()) == record
    assert record.device["name"]


def test_without_data_rows_are_drawn_and_there_is_no_accuracy() -> None:
    assert bench(MLP, **FAST, batch=[8]).rows[0].accuracy is None


def test_what_cannot_run_is_said() -> None:
    record = bench(MLP, device="cpu", batch=[2**14], engines=None, repeats=5, residence=["hot"], output=["class"])
    assert {s["engine"] for s in record.extra["skipped"]} >= {"torch_graph"}
    with pytest.raises(Unsupported, match=r"torch_graph.*CUDA"):
        bench(MLP, device="cpu", engines=["torch_graph"])
    with pytest.raises(Unsupported, match="use a batch of"):
        bench(MLP, **FAST, batch=[1], residence=["cold"])
    with pytest.raises(Unsupported, match="CUDA"):
        bench(MLP, **FAST, residence=["host-pinned"])


def test_bad_arguments() -> None:
    with pytest.raises(InvalidInput, match="batch is empty"):
        bench(MLP, **FAST, batch=[])
    with pytest.raises(InvalidInput, match="values that uint8 cannot"):
        bench(MLP, **FAST, data=(np.full((9, 24), 0.5, np.float32), None))
    with pytest.raises(InvalidInput, match="features"):
        bench(MLP, **FAST, data=(np.zeros((9, 23), np.uint8), None))


def test_without_torch_rows_have_no_roofs_and_the_record_says_so(tmp_path: Path) -> None:
    make_mlp((24, 12, 5)).save(tmp_path / "m.safetensors")
    code = """
        import sys
        sys.modules["torch"] = None  # any import of torch fails from here on
        from gigamlp import load
        from gigamlp.bench import bench
        from gigamlp.cli import main
        from gigamlp.record import Record
        mlp = load("m.safetensors")
        record = bench(mlp, device="cpu", batch=[8, 64], repeats=5)
        assert [r.batch for r in record.rows if r.engine == "numpy"] == [8, 64]
        assert not any(r.engine.startswith("torch") for r in record.rows)
        assert {r.roof_share for r in record.rows} == {None}
        assert record.extra["roofs"] is None
        assert "gigamlp[torch]" in record.extra["no_roofs"]
        sys.exit(main(["bench", "m.safetensors", "--device", "cpu", "--out", "r.json"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "no roofs here: torch, which measures them, is not installed" in done.stderr
    saved = Record.load(tmp_path / "r.json")
    assert saved.extra["roofs"] is None
    assert {row.roof_share for row in saved.rows} == {None}
