"""Proposed cascades: the cost model, what is kept, and the benchmark that measures them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.data import hold_out
from gigamlp.errors import InvalidInput
from gigamlp.propose import predicted_speed, propose

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SPEEDS = {"mnist-16": 8e6, "mnist-64": 4e6, "mnist-128": 2e6}


def test_a_row_pays_for_the_stages_that_it_reaches() -> None:
    assert predicted_speed([4.0, 2.0, 1.0], [0.5, 0.1]) == pytest.approx(1 / (1 / 4 + 0.5 / 2 + 0.1 / 1))
    assert predicted_speed([4.0, 2.0], [0.0]) == 4.0


def test_what_is_proposed_should_beat_every_single_network() -> None:
    x, y, _, _ = gm.data.load_mnist()
    x_val, y_val = hold_out(x, y)[2:]
    models = [gm.load(name) for name in SPEEDS]
    found = propose(models, SPEEDS, x_val, y_val, max_loss=(0.002, 0.005), top=4)
    assert 0 < len(found) <= 4
    speeds = [each.predicted_samples_per_s for each in found]
    assert speeds == sorted(speeds, reverse=True)
    accuracies = [each.validation_accuracy for each in found]
    assert accuracies == sorted(accuracies)
    for each in found:
        names = [stage.name for stage in each.cascade.stages]
        assert each.predicted_samples_per_s == predicted_speed([SPEEDS[name] for name in names], each.unsure)
        for single in models:
            own = float(np.mean(single.predict(x_val) == y_val))
            assert each.predicted_samples_per_s > SPEEDS[single.name] or each.validation_accuracy > own - 0.001
        same = gm.calibrate(each.cascade.stages, x_val, y_val, max_loss=each.cascade.calibration.max_loss)
        assert same.thresholds == each.cascade.thresholds
        assert same.calibration == each.cascade.calibration
    assert len({each.cascade.name for each in found}) == len(found)


def test_nothing_is_proposed_where_nothing_can_be_better() -> None:
    x = np.random.default_rng(0).normal(size=(4000, 3)).astype(np.float32)
    mlp = gm.MLP((gm.Layer(np.eye(3)),), name="a")
    y = mlp.predict(x)
    assert propose([mlp, mlp.with_(name="b")], {"a": 2.0, "b": 1.0}, x, y) == []
    assert propose([], {}, x, y) == []
    with pytest.raises(InvalidInput, match="different names and a speed each"):
        propose([mlp, mlp], {"a": 1.0}, x, y)
    with pytest.raises(InvalidInput, match="different names and a speed each"):
        propose([mlp], {}, x, y)


@pytest.mark.soak
def test_the_benchmark_writes_its_record(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("cascade_cpu", BENCHMARKS / "cascade_cpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cascade_cpu"] = module
    spec.loader.exec_module(module)
    module.main(["--quick", "--top", "2", "--threads", "1", "--out", str(tmp_path / "r.json")])
    record = gm.Record.load(tmp_path / "r.json")
    assert {row.engine for row in record.rows} == {"cpu_fused"}
    assert sum("garments" in row.name for row in record.rows) == sum("random" in row.name for row in record.rows) > 2
    assert len(record.extra["proposals"]) == 2
