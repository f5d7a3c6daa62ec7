"""The engine ``onnxruntime``; what it shares with the other peer is in `peer_suite`."""

from __future__ import annotations

import importlib
import sys

import pytest

from gigamlp.engines import engine
from gigamlp.errors import Unsupported
from gigamlp.spec import Spec
from tests.engines.peer_cases import net
from tests.engines.peer_suite import PeerSuite

pytest.importorskip("onnx", reason="needs gigamlp[onnx]")
pytest.importorskip("onnxruntime", reason="needs gigamlp[onnx]")

ORT = engine("onnxruntime")


class TestOnnxRuntime(PeerSuite):
    engine = ORT


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("gigamlp.engines.chunked.find_spec", lambda name: None if name == "onnxruntime" else object())
    assert ORT.unavailable("cpu") == "onnxruntime is not installed; get it with: pip install 'gigamlp[onnx]'"
    with pytest.raises(Unsupported, match=r"gigamlp\[onnx\]"):
        ORT.build(net(6, 3), Spec("cpu", 7))


def test_the_module_does_not_hide_the_package():
    ours = importlib.import_module("gigamlp.engines.onnxruntime")
    ORT.build(net(6, 3), Spec("cpu", 1, threads=1))
    assert sys.modules["onnxruntime"] is not ours
    assert hasattr(sys.modules["onnxruntime"], "InferenceSession")
