"""The examples run, on little data, and give what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytest.importorskip("torch", reason="the examples train and run with torch")


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_test_for_every_example():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_train_and_predict(tmp_path, capsys):
    accuracy = load("train_and_predict").main(tmp_path, rows=6000, epochs=2)
    assert accuracy > 0.85
    assert "fine-tuned:" in capsys.readouterr().out


def test_tune_for_this_machine(tmp_path, capsys):
    plan = load("tune_for_this_machine").main(tmp_path, device="cpu")
    assert [winner.spec.batch for winner in plan.winners] == [1, 256]
    assert "100.0% of the answers" in capsys.readouterr().out


@pytest.mark.slow  # measures the machine's roofs and cold inputs: 10 seconds
def test_read_a_record(tmp_path, capsys):
    record = load("read_a_record").main(tmp_path, repeats=5)
    assert {(row.batch, row.residence) for row in record.rows} == {(b, r) for b in (1024,) for r in ("hot", "cold")}
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "of its roof" in capsys.readouterr().out


def test_bring_a_torch_module(tmp_path, capsys):
    pytest.importorskip("onnx")
    mlp = load("bring_a_torch_module").main(tmp_path, device="cpu")
    assert mlp.hidden == (32,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.c", "net.h", "net.onnx"]
    assert "100.0% of the classes are those of the module" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_bring_a_sklearn_pipeline(capsys):
    pytest.importorskip("sklearn")
    theirs, own = load("bring_a_sklearn_pipeline").main(device="cpu", hidden=16)
    assert theirs > 0.9
    assert own > 0.9
    assert "0 of 450 classes differ" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_bring_an_onnx_file(tmp_path):
    pytest.importorskip("skl2onnx")
    pytest.importorskip("onnxruntime")
    assert load("bring_an_onnx_file").main(tmp_path, device="cpu") > 0.999
