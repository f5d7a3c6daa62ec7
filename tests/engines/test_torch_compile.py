"""torch_compile: compiled once for each runner, never silently eager, never recompiled in the middle of a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gigamlp.engines import Runner, engine, torch_common
from gigamlp.errors import InvalidInput, Unsupported
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import CUDA, assert_answers, net, rows

torch = pytest.importorskip("torch")

COMPILE = engine("torch_compile")
DEVICES = ["cpu", CUDA]
cannot = COMPILE.unavailable("cpu")
compiles = pytest.mark.skipif(cannot is not None, reason=cannot or "")


def check(mlp, spec, variant=None):
    runner = COMPILE.build(mlp, spec, variant)
    for seed in (1, 2, 3):
        x = rows(mlp, spec.batch, spec.input_dtype, seed)
        assert_answers(mlp, spec, runner.variant, x, runner.run(x.to(spec.device)))
    runner.input.copy_(x)
    assert_answers(mlp, spec, runner.variant, x, runner.run(runner.input))
    return runner


# every case costs a C++ or Triton compilation of 2-10 s, so each one covers several things


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "dtype", "output", "options"),
    [
        (lambda: net(37, 24, 10), "uint8", "class", {"pad": 16, "op": "mm"}),
        (lambda: net(37, 24, 10), "uint8", "margin", {"pad": 10, "compute": "bfloat16"}),
        (lambda: net(20, 6, 13, columns=((0, 5), (9, 24)), features=30), "uint8", "logits", {"pad": 16}),
        (lambda: net(17, 9, 5, scale=1.0, activation="gelu"), "float32", "proba", {"pad": 8}),
        (lambda: net(17, 9, 1, head="sigmoid", activation="silu"), "int8", "margin", {}),
    ],
)
def test_agrees_with_the_reference(device, make, dtype, output, options):
    check(make(), Spec(device, 7, dtype, output), Variant.of(**options)).close()


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_more_shapes_than_dynamo_keeps_are_all_compiled(device):
    # Dynamo gives up on a function after 8 shapes (pytorch #139474) and would run the rest eager
    from torch._dynamo.utils import counters

    mlp = net(12, 6, 3, scale=1.0)
    before = counters["stats"]["unique_graphs"]
    runners = [
        check(mlp, Spec(device, batch, "float32", "logits"), Variant.of(mode="default")) for batch in range(1, 13)
    ]
    assert counters["stats"]["unique_graphs"] - before == 12
    for runner in runners:
        codes = _operators(runner)
        assert "aten::linear" not in codes, f"batch {runner.spec.batch} runs eager"
        assert "aten::relu" not in codes
        assert "aten::relu_" not in codes
        x = rows(mlp, runner.spec.batch, "float32", 9)
        assert_answers(mlp, runner.spec, runner.variant, x, runner.run(x.to(device)))  # none took another's place
    assert counters["stats"]["unique_graphs"] - before == 12


def _operators(runner):
    forward = runner._forward
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(runner.input)
    return {event.key for event in profile.key_averages()}


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_that_the_caller_changes_recompiles(device):
    from torch._dynamo.utils import counters

    mlp = net(20, 6, 5, scale=1.0)
    spec = Spec(device, 16, "float32", "logits")
    runner = COMPILE.build(mlp, spec, Variant.of(mode="default"))
    x = rows(mlp, 16, "float32").to(device)
    expected = runner.run(x).clone()
    before = counters["stats"]["unique_graphs"]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            assert torch.equal(runner.run(x), expected)
        with torch.inference_mode():
            assert torch.equal(runner.run(x), expected)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(runner.run(x.clone().requires_grad_()), expected)
    assert not runner.run(x).requires_grad
    assert counters["stats"]["unique_graphs"] == before


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_runner_keeps_its_contract_and_bind_compiles_nothing(device):
    from torch._dynamo.utils import counters

    mlp = net(20, 6, 5)
    spec = Spec(device, 16, "uint8", "logits")
    runner = COMPILE.build(mlp, spec, Variant.of(mode="default"))
    assert isinstance(runner, Runner)
    assert runner.engine == "torch_compile"
    assert list(runner.variant.to_json()) == ["op", "pad", "inplace", "compute", "mode", "graph", "gemm"]
    assert runner.build_s > 0
    before = counters["stats"]["unique_graphs"]
    x = rows(mlp, 16, "uint8", 7).to(device)
    second = runner.bind(x)
    assert second.input is x
    y = second.run(x)
    runner.run(runner.input)
    assert_answers(mlp, spec, second.variant, x.cpu(), y)
    assert counters["stats"]["unique_graphs"] == before
    with pytest.raises(InvalidInput, match="shape"):
        runner.run(x[:3])
    runner.close()
    with pytest.raises(InvalidInput, match="closed"):
        runner.run(x)
    assert_answers(mlp, spec, second.variant, x.cpu(), second.run(x))


@compiles
@pytest.mark.slow
def test_no_process_is_left_behind_and_exit_is_quick(tmp_path):
    code = """
import os
from pathlib import Path

import numpy as np

from gigamlp.engines import Spec, engine
from gigamlp.mlp import MLP, Layer

runner = engine("torch_compile").build(MLP([Layer(np.eye(4))]), Spec("cpu", 3, "float32", "logits"))
runner.run(runner.input)
mine = f"PPid:\\t{os.getpid()}\\n"
children = [status for status in Path("/proc").glob("[0-9]*/status") if mine in status.read_text()]
print(len(children))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"]


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("switch", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_disabled_compiler_is_an_error_not_eager(switch):
    code = """
import numpy as np

from gigamlp.engines import Spec, engine
from gigamlp.errors import Unsupported
from gigamlp.mlp import MLP, Layer

try:
    engine("torch_compile").build(MLP([Layer(np.eye(4))]), Spec("cpu", 3, "float32", "logits"))
except Unsupported as error:
    print(error.reason)
"""
    env = {**os.environ, switch: "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True
    )
    assert "compiled nothing" in done.stdout


# ---- what is offered and refused (nothing is compiled) --------------------------------------------------------------


@compiles
def test_what_is_offered_on_a_cpu():
    spec = Spec("cpu", 16, "uint8")
    few, all_of_them = (COMPILE.variants(net(20, 6, 10), spec, full=full) for full in (False, True))
    assert len(few) == 4  # two pads, float32 and bfloat16
    assert set(few) < set(all_of_them)
    assert {v.get("mode") for v in all_of_them} == {"default", "max-autotune-no-cudagraphs"}
    assert not any(v.get("graph") for v in all_of_them)


@compiles
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mode": "fast"}, InvalidInput, "mode must be one of default"),
        ({"graph": "yes"}, InvalidInput, "graph must be"),
        ({"graph": True}, Unsupported, "needs a CUDA device"),
        ({"mode": "reduce-overhead"}, Unsupported, "mode=reduce-overhead graph=no needs a CUDA device"),
        ({"mode": "max-autotune"}, Unsupported, "needs a CUDA device"),
        ({"op": "fused"}, Unsupported, "needs a CUDA device"),
        ({"workers": 4}, InvalidInput, "unknown options workers; known: op, pad, inplace, compute, mode, graph"),
    ],
)
def test_bad_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        COMPILE.build(net(20, 6, 10), Spec("cpu", 16), Variant.of(**options))


def test_unavailable_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert "needs a C++ compiler" in COMPILE.unavailable("cpu")
    assert "apt-get install g++" in COMPILE.unavailable("cpu")
    with pytest.raises(Unsupported, match=r"needs a C\+\+ compiler"):
        COMPILE.build(net(20, 6, 10), Spec("cpu", 16))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("gigamlp.engines.torch_compile.shutil.which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr("gigamlp.engines.torch_compile.sysconfig.get_path", lambda name: str(tmp_path))
    assert "Python's headers" in COMPILE.unavailable("cpu")


# ---- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "graph"),
    [
        ("default", False),
        ("default", True),
        ("reduce-overhead", False),
        ("max-autotune", False),
        ("max-autotune-no-cudagraphs", True),
        ("max-autotune-no-cudagraphs", False),
    ],
)
@pytest.mark.parametrize("output", ["class", "margin", "logits"])
def test_modes(mode, graph, output):
    spec = Spec("cuda:0", 65, "uint8", output)
    check(net(37, 24, 10), spec, Variant.of(mode=mode, graph=graph, pad=16)).close()


def test_what_is_offered_on_cuda(monkeypatch):
    monkeypatch.setattr(torch_common, "device_problem", lambda device: None)
    monkeypatch.setattr(type(COMPILE), "unavailable", lambda self, device: None)
    spec = Spec("cuda:0", 16, "uint8")
    few, all_of_them = (COMPILE.variants(net(20, 6, 10), spec, full=full) for full in (False, True))
    # two paddings x (autotuned x two choices of products, and not autotuned), and the two modes with their own graphs
    assert len(few) == 2 * (2 + 1) + 2
    assert set(few) < set(all_of_them)
    assert few[0].label.endswith("mode=max-autotune-no-cudagraphs graph=yes gemm=any")
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(Unsupported, match="captures CUDA Graphs itself"):
            COMPILE.build(net(20, 6, 10), spec, Variant.of(mode=mode, graph=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "graph"), [("reduce-overhead", False), ("default", True)])
def test_two_runners_do_not_overwrite_each_other(mode, graph):
    # Inductor's own graphs share one memory pool; ours share nothing
    mlp = net(37, 24, 10)
    spec = Spec("cuda:0", 65, "uint8", "logits")
    variant = Variant.of(mode=mode, graph=graph)
    first, other = COMPILE.build(mlp, spec, variant), COMPILE.build(net(37, 24, 10, seed=5), spec, variant)
    inputs = [rows(mlp, 65, "uint8", seed).to("cuda:0") for seed in range(3)]
    bound = [first.bind(x) for x in inputs]
    for _ in range(3):
        outputs = []
        for runner, x in zip(bound, inputs, strict=True):
            outputs.append(runner.run(x))
            other.run(inputs[0])
        torch.cuda.synchronize()
        for x, y in zip(inputs, outputs, strict=True):
            assert_answers(mlp, spec, first.variant, x.cpu(), y)


@pytest.mark.gpu
@pytest.mark.slow
def test_our_graphs_survive_inductors_graphs():
    # Inductor clears all cuBLAS workspaces when it records
    mlp = net(784, 512, 10)
    spec = Spec("cuda:0", 256, "uint8", "logits")
    ours = [engine("torch_graph").build(mlp, spec), COMPILE.build(mlp, spec, Variant.of(mode="default", graph=True))]
    x = rows(mlp, 256, "uint8").to("cuda:0")
    expected = [runner.run(x).clone() for runner in ours]
    theirs = COMPILE.build(mlp, spec, Variant.of(mode="reduce-overhead", graph=False))
    torch.cuda.empty_cache()
    noise = [torch.full((1 << 20,), float("nan"), device="cuda:0") for _ in range(64)]
    for _ in range(3):
        theirs.run(x)
        for runner, y in zip(ours, expected, strict=True):
            assert torch.equal(runner.run(x), y)
    assert all(bool(block.isnan().all()) for block in noise)
