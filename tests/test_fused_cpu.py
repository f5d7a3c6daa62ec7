"""The CPU benchmark: its networks, its contenders, and one contender in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.record import Record

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def contenders():
    spec = importlib.util.spec_from_file_location("cpu_contenders", BENCHMARKS / "cpu_contenders.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_contenders"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cpu_contenders"]


# accuracies of the int8 networks on the test rows; their float weights may differ in a row or two
@pytest.mark.parametrize(("hidden", "accuracy"), [(40, 0.9859), (128, 0.9938), (512, 0.9954)])
def test_networks(contenders, hidden, accuracy):
    _, _, x, y = gm.data.load_mnist()
    assert np.mean(contenders.network(hidden).predict(x) == y) == pytest.approx(accuracy, abs=2e-4)
    assert contenders.network(hidden, "w8a8").scheme.arrays["hidden_scale.0"].shape == (hidden,)
    small = contenders.network(hidden, "w8", window=True)
    assert (small.features, small.features_read) == (784, 400)


def test_every_pass_gives_the_same_classes(contenders):
    _, _, x, _ = gm.data.load_mnist()
    x = np.ascontiguousarray(x[:2500])
    want = contenders.network(40).predict(x)
    seen = []
    for who in contenders.CONTENDERS:
        if who.window or who.engine == "torch_compile":  # cut, not trained so; takes half a minute
            continue
        mlp = contenders.network(40, who.scheme)
        try:
            builds = contenders.candidates(who, mlp, x, 1)
        except gm.errors.Unsupported:  # not installed, or not on this CPU
            continue
        answers = next(iter(builds.values()))()()
        ids = np.concatenate(answers) if isinstance(answers, list) else answers
        assert np.mean(ids != want) <= 0.002, who.name
        seen.append(who.name)
    assert {"numpy float32", "scikit-learn"} <= set(seen)


@pytest.mark.slow  # starts three processes, and measures the machine's limits
def test_the_command(tmp_path):
    out = tmp_path / "record.json"
    command = [sys.executable, BENCHMARKS / "fused_cpu.py", "--out", out, "--quick", "--hidden", "40", "--threads", "1"]
    names = "numpy float32;cpu_fused;torch eager float32"
    done = subprocess.run([*command, "--only", names], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    record = Record.load(out)
    rows = {(row.engine, row.note.split(";")[1].strip()): row for row in record.rows}
    assert rows["numpy", "MNIST test rows"].accuracy == pytest.approx(0.9859, abs=2e-4)
    assert rows["numpy", "uniform random bytes"].accuracy is None
    assert rows["torch_eager", "MNIST test rows"].samples_per_s > 0
    assert record.extra["single_row"]["784-40-10 single row numpy float32"]["p50_us"] > 0
    assert record.extra["ratios"]["784-40-10 mnist threads=1"]["best_peer"] in ("numpy float32", "torch eager float32")
