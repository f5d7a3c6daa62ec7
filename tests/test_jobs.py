"""Jobs become rows: arithmetic on a fake clock, and a real run on this CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gigamlp as gm
import gigamlp.jobs as jobs_module
from gigamlp.errors import InvalidInput, MeasurementError, Unsupported
from gigamlp.jobs import Job, measure_jobs
from gigamlp.measure.clock import clock_for
from gigamlp.measure.roofline import Roofs
from gigamlp.measure.timing import Throughput
from gigamlp.record import Record
from gigamlp.spec import Spec, Variant
from gigamlp.trial import probe_rows
from tests.fakes import FakeEngine, ManualClock, make_mlp

ROOFS = Roofs(
    read_bytes_s=1e9,
    copy_bytes_s=1e9,
    macs_s={"float32": 1e9, "uint8": 1e9},
    h2d_pinned_bytes_s=None,
    h2d_pageable_bytes_s=None,
    d2h_pinned_bytes_s=None,
    d2h_pageable_bytes_s=None,
    cache_bytes=1000,
)


@pytest.fixture
def fake(monkeypatch):
    engine = FakeEngine(ManualClock(), seconds={Variant(): 1e-3})
    monkeypatch.setattr(jobs_module, "get_engine", lambda name: engine)
    return engine


def measure(engine: FakeEngine, *jobs: Job, labels: bool = True, **more: object):
    mlp = jobs[0].mlp
    x = probe_rows(mlp, "uint8", rows=50)
    targets = mlp.class_ids(mlp.logits(x)) if labels else None
    if targets is not None:
        targets[:5] = (targets[:5] + 1) % 3
    options = {"repeats": 5, "min_s": 0.1, "latency_calls": 10, "cache_bytes": 1000, **more}
    return measure_jobs(jobs, x, targets, engine.clock, ROOFS, **options)


def test_a_row_carries_speed_accuracy_and_roof(fake) -> None:
    mlp = make_mlp()
    job = Job(mlp, Spec(batch=16), "fake", Variant())
    done = measure(fake, job)
    row = done.rows[0]
    assert row.wall_us == pytest.approx(16e3)
    assert row.samples_per_s == pytest.approx(1000)
    assert row.p50_us == pytest.approx(16e3)
    assert row.accuracy == pytest.approx(0.9)  # of the runner's own answers: 5 of 50 targets were spoiled
    assert (row.features_read_bytes, row.batch, row.hidden, row.residence) == (6, 16, [8], "hot")
    # 16 rows of 6 bytes fit the 1,000-byte cache, so the operations are the floor: 72 MACs a row at 1e9/s
    assert row.roof_share == pytest.approx(16 * 72 / 1e9 / 16e-3)
    assert len(done.latency_samples[job.key]) == 10
    assert fake.built == fake.closed


def test_answers_count_as_many_bytes_as_the_runner_writes(fake) -> None:
    fake.ids = "uint8"
    mlp = make_mlp((600, 8, 3))  # operations are no limit: 4,824 MACs a row at 1e12/s
    roofs = replace(ROOFS, macs_s={"int8": 1e12})
    fake.integer = True
    x = probe_rows(mlp, "uint8", rows=50)
    job = Job(mlp, Spec(batch=16), "fake", Variant(), "cold")
    limits = {"repeats": 5, "min_s": 0.1, "cache_bytes": 1000}
    row = measure_jobs([job], x, mlp.class_ids(mlp.logits(x)), fake.clock, roofs, **limits).rows[0]
    assert row.accuracy == 1
    assert row.roof_share == pytest.approx(16 * (600 + 1) / 1e9 / 16e-3)


def test_an_integer_engine_is_held_against_the_rate_of_integers(fake) -> None:
    fake.integer = True
    mlp = make_mlp()
    x = probe_rows(mlp, "uint8", rows=50)
    roofs = replace(ROOFS, macs_s={"int8": 1e6, "uint8": 1.0})
    row = measure_jobs([Job(mlp, Spec(batch=16), "fake", Variant())], x, None, fake.clock, roofs, min_s=0.1).rows[0]
    assert row.roof_share == pytest.approx(16 * 72 / 1e6 / 16e-3)


def test_cold_rows_count_their_bytes(fake) -> None:
    row = measure(fake, Job(make_mlp(), Spec(batch=16), "fake", Variant(), "cold")).rows[0]
    assert row.roof_share == pytest.approx(max(16 * (6 + 8), 16 * 72) / 1e9 / 16e-3)
    assert row.residence == "cold"


def test_without_labels_there_is_no_accuracy(fake) -> None:
    assert measure(fake, Job(make_mlp(), Spec(batch=16), "fake", Variant()), labels=False).rows[0].accuracy is None


def test_few_repeats_are_said(fake) -> None:
    assert measure(fake, Job(make_mlp(), Spec(batch=4), "fake", Variant()), repeats=3).rows[0].note == "only 3 repeats"


def test_a_runner_that_fails_while_timed_is_an_error_that_names_it(fake) -> None:
    fake.fails_after[Variant()] = 20
    with pytest.raises(MeasurementError, match=r"fake.*fell off the bus"):
        measure(fake, Job(make_mlp(), Spec(batch=4), "fake", Variant()))
    assert fake.built == fake.closed


def test_the_builds_of_a_job_become_their_median() -> None:
    job = Job(make_mlp(), Spec(), "fake", Variant())
    builds = [Throughput(wall, 0.1, wall - 1, 10, 5) for wall in (12.0, 9.0, 10.0)]
    row = jobs_module._typical(job, builds)
    assert (row.wall_us, row.device_us, row.launches) == (10.0, 9.0, 10)
    assert row.iqr == pytest.approx(1.5)  # between the builds; within them it is 0.1
    with pytest.raises(MeasurementError, match="boom"):
        jobs_module._typical(job, [builds[0], RuntimeError("boom")])


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="residence"):
        Job(make_mlp(), Spec(), "fake", Variant(), "lukewarm")
    with pytest.raises(InvalidInput, match="CUDA"):
        Job(make_mlp(), Spec(), "fake", Variant(), "host-pinned")
    with pytest.raises(Unsupported):
        measure_jobs(
            [Job(make_mlp(), Spec(), "torch_graph", Variant())],
            np.zeros((1, 6), np.uint8), None, clock_for("cpu"), None,
        )  # fmt: skip


def test_on_this_cpu_all_residences() -> None:
    mlp = make_mlp((32, 16, 4))
    x = probe_rows(mlp, "uint8", rows=300)
    targets = mlp.class_ids(mlp.logits(x))
    from gigamlp.engines import engine

    variant = engine("torch_eager").variants(mlp, Spec(batch=64))[0]
    jobs = [
        Job(mlp, Spec(batch=64, output=output), "torch_eager", variant, where)
        for where in ("hot", "cold", "host-pageable")
        for output in ("class", "logits")
    ]
    done = measure_jobs(
        jobs, x, targets, clock_for("cpu"), ROOFS, repeats=5, min_s=0.005, latency_calls=20, cache_bytes=4096
    )
    assert [r.residence for r in done.rows] == ["hot", "hot", "cold", "cold", "host-pageable", "host-pageable"]
    assert all(r.accuracy == 1.0 and r.wall_us > 0 and r.device_us is None for r in done.rows)
    Record.from_json(Record({"name": "cpu"}, {}, "test", done.rows).to_json())


@pytest.mark.parametrize(
    ("engine", "options", "dtype", "want"),
    [
        ("torch_eager", {"op": "linear", "compute": "float32"}, "uint8", None),
        ("cuda_fused", {"path": "ring", "compute": "int8"}, "uint8", "w8"),
        ("cuda_fused", {"path": "ring", "compute": "float16"}, "uint8", None),
        ("onnxruntime", {"compute": "int8", "hidden": "float"}, "uint8", "w8"),
        ("onnxruntime", {"compute": "int8", "hidden": "bound"}, "uint8", None),
        ("cpu_fused", {"scheme": "w8a8"}, "uint8", "w8a8"),
        ("cpu_fused", {"scheme": "float32"}, "float32", None),
    ],
)
def test_a_row_has_the_scheme_that_it_was_computed_in(engine, options, dtype, want):
    mlp = gm.quantise(gm.MLP([gm.Layer(np.eye(4), activation="relu"), gm.Layer(np.eye(4))]))
    job = Job(mlp, Spec("cpu", 8, dtype), engine, Variant.from_json(options), "hot")
    assert jobs_module._scheme(job) == want
