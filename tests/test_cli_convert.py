"""`gigamlp convert` and `gigamlp export`: files in, files out, nothing executed."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.cli import main

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")


@pytest.fixture
def call(capfd):
    def run(*argv):
        code = main([str(word) for word in argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def mlp():
    rng = np.random.default_rng(0)
    layers = [gm.Layer(rng.normal(size=(5, 4)), rng.normal(size=5), "relu"), gm.Layer(rng.normal(size=(3, 5)))]
    return gm.MLP(layers, name="mine", classes=["a", "b", "c"])


@pytest.fixture
def model(mlp, tmp_path):
    mlp.save(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_onnx_there_and_back(call, mlp, model, tmp_path):
    code, out, _ = call("export", model, "--out", tmp_path / "m.onnx", "--input-dtype", "uint8")
    assert (code, "m.onnx" in out) == (0, True)
    code, out, _ = call("convert", tmp_path / "m.onnx", "--out", tmp_path / "back.safetensors", "--json")
    found = json.loads(out)
    assert code == 0
    assert gm.load(tmp_path / "back.safetensors") == mlp
    assert (found["schema"], found["digest"], found["head"]) == ("gigamlp-convert/1", mlp.digest(), "softmax")


def test_torch_there_and_back(call, mlp, model, tmp_path):
    assert call("export", model, "--out", tmp_path / "m.pt", "--json")[0] == 0
    back = tmp_path / "back.safetensors"
    code, out, err = call(
        "convert", tmp_path / "m.pt", "--activation", "relu", "--classes", "a,b,c", "--name", "mine", "--out", back
    )
    assert (code, err) == (0, "")
    assert "4 → 5 relu" in out
    assert gm.load(back) == mlp
    call(
        "convert", tmp_path / "m.pt", "--activation", "relu", "--classes", "-1,5,7", "--dtype", "float16", "--out", back
    )
    assert gm.load(back).classes.tolist() == [-1, 5, 7]


@pytest.mark.parametrize("suffix", [".c", ".py"])
def test_code(call, model, tmp_path, suffix):
    code, out, _ = call("export", model, "--out", tmp_path / f"net{suffix}", "--json")
    files = json.loads(out)["files"]
    assert code == 0
    assert [os.path.splitext(file)[1] for file in files] == ([".c", ".h"] if suffix == ".c" else [".py"])  # noqa: PTH122
    assert all(os.path.getsize(file) > 100 for file in files)  # noqa: PTH202
    if suffix == ".c":
        assert call("export", model, "--out", tmp_path / "q.c", "--weights", "int8", "--function", "q")[0] == 0
        assert "int q_predict(const unsigned char *row);" in (tmp_path / "q.h").read_text()


def test_what_does_not_go_together(call, model, tmp_path):
    (tmp_path / "net.pkl").write_bytes(pickle.dumps(print))
    for argv, words in [
        (("export", model, "--out", tmp_path / "x.txt"), "the name must end in .onnx, .c, .py, .pt"),
        (("export", model, "--out", tmp_path / "x.py", "--output", "class"), "--output does not go with a .py file"),
        (
            ("export", model, "--out", tmp_path / "x.onnx", "--weights", "int8"),
            "--weights does not go with a .onnx file",
        ),
        (("convert", model, "--out", tmp_path / "x.onnx"), "must end in .safetensors"),
        (("convert", tmp_path / "net.pkl", "--out", tmp_path / "x.safetensors"), "executes what it holds"),
        (("convert", tmp_path / "net.h5", "--out", tmp_path / "x.safetensors"), "the name must end in .onnx, .pt"),
    ]:
        code, _, err = call(*argv)
        assert code == 2, argv
        assert words in " ".join(err.split())


def test_failures_are_one_line_and_leave_nothing(call, model, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "crater"),)

    torch.save(Bomb(), tmp_path / "bomb.pt")
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    out = tmp_path / "x.safetensors"
    for source, activation, words in [
        ("bomb.pt", ["--activation", "relu"], "nothing in a file is executed"),
        ("bad.onnx", [], "not an ONNX file"),
        ("none.pt", [], "no checkpoint"),
    ]:
        code, _, err = call("convert", tmp_path / source, *activation, "--out", out)
        assert (code, err.startswith("error: "), err.count("\n")) == (1, True, 1)
        assert words in err
    assert not out.exists()
    assert not (tmp_path / "crater").exists()
