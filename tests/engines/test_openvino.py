"""The engine ``openvino``; what it shares with the other peer is in `peer_suite`."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from gigamlp.engines import engine
from gigamlp.errors import Unsupported
from gigamlp.spec import Spec, Variant
from tests.engines.peer_cases import check_answers, net, rows
from tests.engines.peer_suite import PeerSuite

pytest.importorskip("onnx", reason="needs gigamlp[openvino]")
pytest.importorskip("openvino", reason="needs gigamlp[openvino]")

OV = engine("openvino")


class TestOpenVino(PeerSuite):
    engine = OV


@pytest.mark.parametrize("argmax", ["numpy", "graph"])
@pytest.mark.parametrize(("head", "outputs"), [("softmax", 10), ("softmax", 1), ("sigmoid", 1)])
@pytest.mark.parametrize("batch", [1, 37])
def test_where_the_largest_logit_is_found(batch, head, outputs, argmax):
    mlp = net(37, 13, outputs, head=head)
    variant = Variant.of(compute="float32", argmax=argmax, chunk=16)
    check_answers(OV, mlp, Spec("cpu", batch, threads=1), variant)
    # the gate asks for the logits of the same variant
    check_answers(OV, mlp, Spec("cpu", batch, output="logits", threads=1), variant)


def test_ties_in_the_graph_go_to_the_lowest_index():
    mlp = net(6, 4)
    flat = mlp.with_(layers=[type(mlp.layers[0])(np.zeros((4, 6)))])
    for argmax in ("numpy", "graph"):
        runner = OV.build(flat, Spec("cpu", 70, threads=1), Variant.of(argmax=argmax))
        assert runner.run(rows(flat, 70)).tolist() == [0] * 70


def test_what_is_offered():
    mlp = net(37, 13, 10)

    def argmax(spec, full=False):
        return {v.get("argmax") for v in OV.variants(mlp, spec, full=full)}

    assert argmax(Spec("cpu", 1000, threads=1)) == {"numpy"}
    assert argmax(Spec("cpu", 1000, threads=8)) == {"graph"}
    assert argmax(Spec("cpu", 1, threads=1)) == {"graph"}
    assert argmax(Spec("cpu", 1000, threads=1), full=True) == {"numpy", "graph"}
    assert argmax(Spec("cpu", 1000, output="logits", threads=1), full=True) == {"graph"}


def test_bfloat16_only_where_the_cpu_has_it():
    computes = {v.get("compute") for v in OV.variants(net(37, 13, 10), Spec("cpu", 64))}
    import openvino

    has = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert ("bfloat16" in computes) == has
    if not has:
        with pytest.raises(Unsupported, match="no variant 'compute=bfloat16' here"):
            OV.build(net(37, 13, 10), Spec("cpu", 64), Variant.of(compute="bfloat16"))
    else:
        mlp = net(37, 13, 10)
        x = rows(mlp, 64)
        z = OV.build(mlp, Spec("cpu", 64, output="logits"), Variant.of(compute="bfloat16")).run(x)
        want = mlp.reference_logits(x)
        # eight bits of mantissa in weights, inputs and hidden values
        assert 1e-5 < np.linalg.norm(z - want) / np.linalg.norm(want) < 0.02


def test_int8_is_refused_where_it_saturates(monkeypatch):
    monkeypatch.setattr("gigamlp.engines.openvino.bytes_saturate", lambda: True)
    assert {v.get("compute") for v in OV.variants(net(6, 3), Spec("cpu", 7), full=True)} <= {"float32", "bfloat16"}


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("gigamlp.engines.chunked.find_spec", lambda name: None)
    text = "openvino and onnx are not installed; get them with: pip install 'gigamlp[openvino]'"
    assert OV.unavailable("cpu") == text
    with pytest.raises(Unsupported, match=r"gigamlp\[openvino\]"):
        OV.build(net(6, 3), Spec("cpu", 7))


def test_the_module_does_not_hide_the_package():
    ours = importlib.import_module("gigamlp.engines.openvino")
    OV.build(net(6, 3), Spec("cpu", 1, threads=1))
    assert sys.modules["openvino"] is not ours
    assert hasattr(sys.modules["openvino"], "Core")
