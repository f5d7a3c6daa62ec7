"""`gigamlp.bench.bench` on this CPU with small networks."""

from __future__ import annotations

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
