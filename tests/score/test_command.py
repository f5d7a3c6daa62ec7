"""`gigamlp score`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gigamlp.cli.app import run
from tests.fakes import make_mlp

MLP = make_mlp((6, 8, 3))
X = np.random.default_rng(1).integers(0, 256, (1003, 6), dtype=np.uint8)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    MLP.save("m.safetensors")
    np.save("rows.npy", X)
    return "m.safetensors"


def test_a_file(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "score", model, "rows.npy", "--out", "a.npy", "--engine", "numpy", "--device", "cpu", "--json", "--batch", "64"
    ]  # fmt: skip
    assert run(line) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert (data["schema"], data["rows"], data["rejected"]) == ("gigamlp-scored/1", 1003, 0)
    assert data["bottleneck"] in data["busy"]
    assert data["busy"][data["bottleneck"]] == max(data["busy"].values())
    assert 0 < data["bottleneck_share"] <= 1
    assert "1,003 answers in a.npy" in shown.err
    assert "slowest: " in shown.err
    np.testing.assert_array_equal(np.load("a.npy"), MLP.predict(X))
    assert run([*line, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["already"] is True


def test_rejects_are_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = X.astype(np.float32)
    x[7, 1] = np.nan
    np.save("rows.npy", x)
    line = ["score", model, "rows.npy", "--out", "a.npy", "--engine", "numpy", "--device", "cpu"]
    assert run(line) == 1
    assert "row 7: holds nan in feature 1" in capsys.readouterr().err
    assert run([*line, "--on-error", "quarantine", "--output", "class,margin", "--id-columns", "_row"]) == 0
    assert "1 rows without an answer, in a.npy.rejected.jsonl" in capsys.readouterr().err
    assert np.load("a.npy").dtype.names == ("_row", "class", "margin")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "INPUT"),
        (["rows.npy", "--output", "klass"], "did you mean 'class'"),
        (["rows.npy", "--outptu", "class"], "--outptu"),
        (["rows.npy", "--batch", "0"], "neither auto nor"),
        (["rows.npy", "--on-error", "skp"], "did you mean 'skip'"),
        (["rows.npy", "--engine", "numpi"], "did you mean 'numpy'"),
    ],
)
def test_wrong_lines(model: str, line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["score", model, *line, "--out", "a.npy"]) == 2
    assert said in capsys.readouterr().err


def test_two_processes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["score", model, "rows.npy", "--out", "a.npy", "--engine", "numpy", "--devices", "cpu,cpu"]) == 0
    np.testing.assert_array_equal(np.load("a.npy"), MLP.predict(X))
    assert run(["score", model, "rows.npy", "--out", "a.npy", "--devices", "cpu", "--ray", "auto"]) == 1
    assert "not both" in capsys.readouterr().err


def test_rows_through_a_pipe(model: str) -> None:
    command = [sys.executable, "-m", "gigamlp", "score", model, "-", "--out", "a.npy", "--engine", "numpy"]
    subprocess.run([*command, "--device", "cpu"], input=X.tobytes(), check=True, capture_output=True)
    np.testing.assert_array_equal(np.load("a.npy"), MLP.predict(X))


def test_npy_to_npy_needs_no_pyarrow(model: str) -> None:
    program = (
        "import sys, gigamlp as gm; sys.modules['pyarrow'] = None; from gigamlp.score import score; "
        "score(gm.load('m.safetensors'), 'rows.npy', 'a.npy', device='cpu', engine='numpy')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    np.testing.assert_array_equal(np.load("a.npy"), MLP.predict(X))
