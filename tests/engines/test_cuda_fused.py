"""The engine `cuda_fused`: what it offers and refuses (no GPU needed), and on a GPU its answers, bit by bit.

A network's answers are compared with the scheme's own reference: class ids must be equal wherever the two largest
logits are further apart than float32 sums of float16 products can move them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gigamlp.engines import cuda_fused
from gigamlp.engines.cuda_fused import CudaFused
from gigamlp.errors import DeviceError, InvalidInput, Unsupported
from gigamlp.kernels.cuda.compile import toolchain_problem
from gigamlp.kernels.cuda.driver import Gpu
from gigamlp.mlp import MLP, Layer, Scheme
from gigamlp.quantize import integer_form, quantise
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import net

ENGINE = CudaFused()
CARDS = {
    "T4": Gpu(0, "T4", (7, 5), 40, 65536, 65536, 4 << 20, True, None),
    "A100": Gpu(0, "A100", (8, 0), 108, 166912, 167936, 40 << 20, True, None),
    "H200": Gpu(0, "H200", (9, 0), 132, 232448, 233472, 60 << 20, True, None),
    "5090": Gpu(0, "5090", (12, 0), 170, 101376, 102400, 96 << 20, True, None),
}


@pytest.fixture(params=list(CARDS))
def card(request, monkeypatch):
    monkeypatch.setattr(cuda_fused, "_open", lambda device: CARDS[request.param])
    return CARDS[request.param]


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(cuda_fused, "_open", lambda device: CARDS["H200"])


# ---- what is offered and refused ------------------------------------------------------------------------------------


def test_every_card_has_a_form_for_every_batch(card):
    for batch in (1, 1024, 1 << 20):
        few = ENGINE.variants(net(784, 40, 10), Spec("cuda:0", batch))
        assert len(set(few)) == len(few) >= 1
        paths = {each.get("path") for each in few}
        assert paths <= {"direct", "ring", "window", "split", "wgmma"}
        if card.capability < (9, 0):
            assert not paths & {"ring", "window"}
        # the few that the tuner tries come from all that there are
        everything = ENGINE.variants(net(784, 40, 10), Spec("cuda:0", batch), full=True)
        assert set(few) <= set(everything)


def test_graphs_are_offered_where_a_launch_costs_something(h200):
    small = ENGINE.variants(net(784, 40, 10), Spec("cuda:0", 1024))
    large = ENGINE.variants(net(784, 40, 10), Spec("cuda:0", 1 << 21))
    assert {each.get("graph") for each in small} == {True, False}
    assert {each.get("graph") for each in large} == {False}


def test_dtypes_of_the_answers(h200):
    def dtypes(output, **more):
        return {v.get("dtype") for v in ENGINE.variants(net(784, 40, 10), Spec("cuda:0", 64, output=output), **more)}

    assert dtypes("class") == {"uint8"}
    assert dtypes("class", full=True) == dtypes("margin", full=True) == {"uint8", "int32"}
    assert dtypes("logits", full=True) == {"float32", "float16"}
    assert dtypes("proba", full=True) == {"float32"}


def test_what_the_first_layer_is_multiplied_in(card):
    def computes(dtype, mlp=None, **more):
        mlp = mlp or net(784, 40, 10)
        return list(dict.fromkeys(v.get("compute") for v in ENGINE.variants(mlp, Spec("cuda:0", 64, dtype), **more)))

    assert computes("float16") == ["float16"]
    assert computes("float16", full=True) == ["float16", "float16x2"]
    # weights that carry a scheme are meant to be integer; others may lose too much by it, which a trial finds out
    assert computes("uint8") == ["int8", "float16"]
    assert computes("int8", quantise(net(784, 40, 10))) == ["int8"]
    assert computes("int8", quantise(net(784, 40, 10)), full=True) == ["int8", "float16", "float16x2"]
    if card.capability >= (8, 0):
        assert computes("bfloat16") == ["bfloat16x2", "bfloat16"]
        assert computes("float32") == ["tf32"]
    else:
        for dtype in ("bfloat16", "float32"):
            with pytest.raises(Unsupported, match=r"tf32 .*8\.0|float16's range"):
                computes(dtype)


def test_weights_that_int8_cannot_hold_run_in_float16(h200):
    mlp = MLP([Layer(np.full((3, 70_000), 1e-3), None, "relu"), Layer(np.eye(3))])  # an int32 sum could overflow
    assert {v.get("compute") for v in ENGINE.variants(mlp, Spec("cuda:0", 64))} == {"float16"}
    with pytest.raises(Unsupported, match="int32"):
        ENGINE.variants(mlp.with_(scheme=Scheme("w8")), Spec("cuda:0", 64))


@pytest.mark.parametrize(
    ("mlp", "spec", "reason"),
    [
        (net(784, 40, 10), {"input_on": "host", "batch": 5000}, "in batches of up to 4,096, not 5,000"),
        (net(784, 40, 10), {"input_on": "host", "input_dtype": "float32"}, "rows must be uint8 or int8"),
        (net(784, 40, 10, head="multilabel"), {}, "head 'multilabel' has no single class"),
        (net(784, 40, 10, head="regression"), {"output": "proba"}, "head 'regression' has no probabilities"),
        (net(784, 1025, 10), {}, "1,025"),
        (net(4000, 1000, 10), {}, "no form of the fused kernel fits"),
        (net(784, 129), {}, "129"),
        (net(784, 40, 129), {}, "129"),
        (net(784, 40, 200, 10), {}, "200"),
        (net(64, 8, 8, 8, 8, 8, 3), {}, "5 hidden"),
        (net(784, 40, 10).with_(scheme=Scheme("w7")), {}, "scheme 'w7'"),
    ],
)
def test_what_it_cannot_do_is_refused_with_its_reason(h200, mlp, spec, reason):
    with pytest.raises(Unsupported, match=reason):
        ENGINE.variants(mlp, Spec("cuda:0", **{"batch": 64, **spec}))
    with pytest.raises(Unsupported, match=reason):
        ENGINE.build(mlp, Spec("cuda:0", **{"batch": 64, **spec}))


def test_codes_that_contradict_the_weights_are_a_reason_not_a_crash(h200):
    layers = [Layer(np.zeros((2, 4))), Layer(np.ones((2, 2)))]
    mlp = MLP(layers, scheme=Scheme("w8", {"codes.0": np.ones((2, 4), np.int8)}))
    with pytest.raises(Unsupported, match="all 0"):
        ENGINE.variants(mlp, Spec("cuda:0", 64))


def test_a_variant_may_name_some_options_only(h200):
    mlp, spec = net(784, 40, 10), Spec("cuda:0", 64)
    choices = cuda_fused._choices(CARDS["H200"], mlp, spec, True)
    found = cuda_fused._find(choices, Variant.of(path="direct", graph=False))
    assert (found.variant.get("path"), found.variant.get("graph")) == ("direct", False)
    assert cuda_fused._find(choices, None) is choices[0]
    with pytest.raises(InvalidInput, match=r"unknown options waprs; known: path, tiles, warps"):
        cuda_fused._find(choices, Variant.of(waprs=4))
    with pytest.raises(Unsupported, match=r"no form of the fused kernel is 'warps=77'.*there are: "):
        cuda_fused._find(choices, Variant.of(warps=77))


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("batch", [1, 1024])
@pytest.mark.parametrize("output", ["margin", "logits", "proba"])
def test_a_variant_for_classes_runs_for_other_outputs(h200, where, batch, output):
    mlp, gpu = net(784, 40, 10), CARDS["H200"]
    other = cuda_fused._choices(gpu, mlp, Spec("cuda:0", batch, output=output, input_on=where), True)
    for each in cuda_fused._choices(gpu, mlp, Spec("cuda:0", batch, input_on=where), False):
        assert cuda_fused._find(other, each.variant).config == each.config
    if where == "device":
        with pytest.raises(Unsupported, match="no form of the fused kernel"):
            cuda_fused._find(other, Variant.of(dtype="float64"))


def test_rows_in_host_memory_have_variants_of_their_own(h200):
    mlp = net(784, 40, 10)
    few = ENGINE.variants(mlp, Spec("cuda:0", 64, input_on="host"))
    assert {(v.get("path"), v.get("overlap")) for v in few} == {("split", False)}
    assert [v.get("memory") for v in few[:2]] == ["cached", "combined"]
    assert set(few) < set(ENGINE.variants(mlp, Spec("cuda:0", 64, input_on="host"), full=True))
    for batch, travels in ((1, True), (5, True), (6, False)):  # 4,704 bytes are more than a kernel's arguments
        found = {v.get("memory") for v in ENGINE.variants(mlp, Spec("cuda:0", batch, input_on="host"))}
        assert found == {"cached", "combined"} | ({"launch"} if travels else set())
    with pytest.raises(InvalidInput, match="unknown options graph"):
        ENGINE.build(mlp, Spec("cuda:0", 64, input_on="host"), Variant.of(graph=True))


def test_launches_that_overlap_are_offered_where_there_are_such(card):
    found = ENGINE.variants(net(784, 40, 10), Spec("cuda:0", 1024))
    overlapping = [v for v in found if v.get("overlap")]
    assert len(overlapping) == (1 if card.capability >= (9, 0) else 0)
    assert not any(v.get("graph") for v in overlapping)


def test_why_a_device_cannot_be_used(monkeypatch):
    assert "needs a CUDA device" in str(ENGINE.unavailable("cpu"))
    monkeypatch.setattr(cuda_fused, "toolchain_problem", lambda *version: "cuda-core not installed; get it")
    assert ENGINE.unavailable("cuda:0") == "cuda-core not installed; get it"
    monkeypatch.setattr(cuda_fused, "toolchain_problem", lambda *version: "NVRTC 13.5 makes" if version else None)
    monkeypatch.setattr(cuda_fused, "driver_cuda", lambda: (12, 8))
    assert ENGINE.unavailable("cuda:0") == "NVRTC 13.5 makes"

    def no_driver():
        raise DeviceError("no NVIDIA driver can be loaded")

    monkeypatch.setattr(cuda_fused, "driver_cuda", no_driver)
    monkeypatch.setattr(cuda_fused, "toolchain_problem", lambda *version: None)
    assert ENGINE.unavailable("cuda:0") == "no NVIDIA driver can be loaded"
    monkeypatch.setattr(cuda_fused, "driver_cuda", lambda: (13, 0))
    old = Gpu(0, "V100", (7, 0), 80, 98304, 98304, 6 << 20, True, None)
    monkeypatch.setattr(cuda_fused, "open_gpu", lambda index: old)
    assert "compute capability 7.0" in str(ENGINE.unavailable("cuda:0"))


@pytest.mark.skipif(toolchain_problem() is not None, reason=str(toolchain_problem()))
def test_code_is_compiled_once_and_kept(h200, monkeypatch, tmp_path):
    from gigamlp.kernels.cuda import cache

    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path)
    mlp, spec = net(64, 16, 4), Spec("cuda:0", 64)
    first = next(iter(ENGINE.compile_all(mlp, spec)))
    assert first.image[:4] == b"\x7fELF"
    monkeypatch.setattr(cache, "compile_cubin", None)  # calling it would fail
    assert next(iter(ENGINE.compile_all(mlp, spec))) == first


# ---- on a GPU -------------------------------------------------------------------------------------------------------

MNIST = net(784, 40, 10)
# (network, why it is here)
NETWORKS = [
    pytest.param(MNIST, id="mnist-40"),
    pytest.param(net(784, 128, 10), id="widest but for clusters"),
    pytest.param(net(784, 256, 10), id="wide"),
    pytest.param(net(784, 512, 10), id="the article's"),
    pytest.param(net(500, 1000, 10), id="widest"),
    pytest.param(net(200, 300, 128, 20, 7, activation="tanh"), id="wide and deep"),
    pytest.param(net(301, 200, 3, columns=((17, 318),), features=333), id="wide, single bytes"),
    pytest.param(net(371, 40, 10, columns=((213, 584),), features=784), id="a window that is aligned to nothing"),
    pytest.param(net(384, 40, 10, columns=((208, 592),), features=784), id="a window of whole 16 bytes"),
    pytest.param(net(300, 24, 10, columns=((100, 250), (400, 550)), features=784), id="two windows"),
    pytest.param(net(100, 17, 5), id="rows of 4-byte words"),
    pytest.param(net(33, 5, 2), id="rows of single bytes"),
    pytest.param(net(1, 1, 2), id="smallest"),
    pytest.param(net(256, 64, 32, 16, 100), id="deep"),
    pytest.param(net(784, 40, 128), id="most classes"),
    pytest.param(net(784, 32, 10, activation="tanh"), id="tanh"),
    pytest.param(net(784, 32, 16, 10, activation="gelu"), id="gelu"),
    pytest.param(net(200, 40, 1, head="sigmoid"), id="sigmoid"),
]
ROWS = (1, 15, 17, 1023, 10007)  # one, a tile of 16 but one, a tile and one, an odd block, a prime beyond one wave


def draw(mlp: MLP, rows: int, dtype: str = "uint8", seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max + 1, (rows, mlp.features)).astype(dtype)


def gap(logits: np.ndarray) -> np.ndarray:
    if logits.shape[1] == 1:
        return np.abs(logits[:, 0])
    top = np.sort(logits, axis=1)
    return top[:, -1] - top[:, -2]


def tolerance(mlp: MLP) -> float:
    """Relative to the largest logit: sums of some 100 float32 numbers; with a second rounding to half, half's step."""
    exact = len(mlp.layers) == 2 and mlp.layers[0].activation == "relu"
    return 1e-4 if exact else 4e-3


def check_ids(mlp: MLP, x: np.ndarray, ids: np.ndarray) -> None:
    want = integer_form(mlp, x.dtype.name).reference_logits(x).astype(np.float64)
    clear = gap(want) > 2 * tolerance(mlp) * np.abs(want).max()
    np.testing.assert_array_equal(ids[clear], mlp.class_ids(want)[clear])
    assert len(x) < 100 or clear.mean() > 0.5  # or nothing was compared


def to_device(x: np.ndarray):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x).cuda()


def configs(mlp: MLP, batch: int, dtype: str = "uint8", output: str = "class", every: bool = False) -> list[Variant]:
    """Return the variants of a network: the first two of each path, or all."""
    found = ENGINE.variants(mlp, Spec("cuda:0", batch, dtype, output), full=True)
    first = found[0].get("dtype")
    plain = [
        v for v in found if v.get("graph") is False and v.get("dtype") == first and v.get("compute") in ("int8", None)
    ]
    paths = {
        path: [v for v in plain if v.get("path") == path] for path in ("direct", "ring", "window", "split", "wgmma")
    }
    return plain if every else [v for kind in paths.values() for v in kind[:2]]


@pytest.mark.gpu
@pytest.mark.parametrize("mlp", NETWORKS)
@pytest.mark.parametrize("rows", ROWS)
def test_ids_equal_the_reference_and_nothing_else_is_written(mlp, rows):
    torch = pytest.importorskip("torch")
    x = draw(mlp, rows)
    for variant in configs(mlp, rows, every=mlp is MNIST and rows == 1023):
        runner = ENGINE.build(mlp, Spec("cuda:0", rows), variant)
        poisoned = torch.full((rows + 512,), 0xA5, dtype=torch.uint8, device="cuda")
        runner._other.arguments[3].value = poisoned.data_ptr() + 256
        # the rows lie between two canaries too: they must not decide anything
        around = torch.full((512 + x.size,), 0xFF, dtype=torch.uint8, device="cuda")
        inside = around[256 : 256 + x.size].view(x.shape)
        inside.copy_(torch.from_numpy(x))
        runner.run(inside)
        host = poisoned.cpu().numpy()
        assert (host[:256] == 0xA5).all(), variant.label
        assert (host[256 + rows :] == 0xA5).all(), variant.label
        check_ids(mlp, x, host[256 : 256 + rows])
        np.testing.assert_array_equal(inside.cpu().numpy(), x)
        runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("output", ["logits", "margin", "proba"])
@pytest.mark.parametrize("mlp", [NETWORKS[0], NETWORKS[3], NETWORKS[5], *NETWORKS[-5::2]])
def test_other_outputs(mlp, output):
    x = draw(mlp, 1023)
    want = integer_form(mlp).reference_logits(x).astype(np.float64)
    worst = tolerance(mlp) * np.abs(want).max()
    for variant in configs(mlp, 1023, output=output)[::2]:
        runner = ENGINE.build(mlp, Spec("cuda:0", 1023, output=output), variant)
        y = runner.run(to_device(x))
        if output == "margin":
            check_ids(mlp, x, y[0].cpu().numpy())
            np.testing.assert_allclose(y[1].cpu().numpy(), gap(want), atol=2 * worst, rtol=0)
        elif output == "logits":
            np.testing.assert_allclose(y.cpu().numpy(), want, atol=worst, rtol=0)
        else:
            exact = mlp.probabilities(want)
            np.testing.assert_allclose(y.cpu().numpy(), exact, atol=2 * worst, rtol=0)
        runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("output", "dtype"), [("class", "int32"), ("logits", "float16")])
def test_other_dtypes_of_the_answers(output, dtype):
    mlp = net(784, 40, 10)
    x = draw(mlp, 1000)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1000, output=output), Variant.of(dtype=dtype))
    y = runner.run(to_device(x))
    assert str(y.dtype) == f"torch.{dtype}"
    want = integer_form(mlp).reference_logits(x)
    if output == "class":
        check_ids(mlp, x, y.cpu().numpy())
    else:
        np.testing.assert_allclose(y.float().cpu().numpy(), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


@pytest.mark.gpu
def test_int8_rows_and_an_input_offset():
    mlp = net(784, 40, 10, offset=0.7)
    x = draw(mlp, 1023, "int8")
    for variant in configs(mlp, 1023, "int8"):
        runner = ENGINE.build(mlp, Spec("cuda:0", 1023, "int8"), variant)
        check_ids(mlp, x, runner.run(to_device(x)).cpu().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_three_inputs_other_rows_and_other_strides(graph):
    torch = pytest.importorskip("torch")
    mlp = net(784, 40, 10)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1000), Variant.of(graph=graph))
    for seed in range(3):
        x = draw(mlp, 1000, seed=seed)
        runner.input.copy_(torch.from_numpy(x))
        check_ids(mlp, x, runner.run(runner.input).cpu().numpy())
    x = draw(mlp, 1000, seed=7)
    check_ids(mlp, x, runner.run(to_device(x)).cpu().numpy())
    check_ids(mlp, x, runner.run(x).cpu().numpy())  # host rows
    for begin, width in ((0, 800), (16, 800), (3, 791)):  # a stride that fits, an offset that does, and neither
        wide = torch.zeros((1000, width), dtype=torch.uint8, device="cuda")
        wide[:, begin : begin + 784] = torch.from_numpy(x).cuda()
        check_ids(mlp, x, runner.run(wide[:, begin : begin + 784]).cpu().numpy())
    with pytest.raises(InvalidInput, match="shape"):
        runner.run(to_device(x[:999]))


@pytest.mark.gpu
def test_it_runs_on_the_callers_stream():
    torch = pytest.importorskip("torch")
    mlp = net(784, 40, 10)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1 << 16), None)
    x, later = draw(mlp, 1 << 16, seed=1), draw(mlp, 1 << 16, seed=2)
    source, stream = to_device(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # ten milliseconds: a run on another stream would read the old rows
        source.copy_(torch.from_numpy(later))
        y = runner.run(source).clone()
    stream.synchronize()
    check_ids(mlp, later[:2000], y.cpu().numpy()[:2000])


@pytest.mark.gpu
def test_two_runners_at_once_and_one_that_is_deleted():
    torch = pytest.importorskip("torch")
    first, second = net(784, 40, 10), net(784, 64, 10, seed=5)
    runners = [ENGINE.build(mlp, Spec("cuda:0", 4096), Variant.of(graph=True)) for mlp in (first, second)]
    xs = [draw(mlp, 4096, seed=seed) for seed, mlp in enumerate((first, second))]
    streams = [torch.cuda.Stream() for _ in runners]
    inputs = [to_device(x) for x in xs]
    torch.cuda.synchronize()
    for _ in range(20):
        for runner, stream, x in zip(runners, streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                runner.run(x)
                runner.input.copy_(x)
                runner.run(runner.input)
    torch.cuda.synchronize()
    for runner, mlp, x in zip(runners, (first, second), xs, strict=True):
        check_ids(mlp, x, runner._answer.cpu().numpy())
    runners[0].close()
    check_ids(second, xs[1], runners[1].run(runners[1].input).cpu().numpy())
    with pytest.raises(InvalidInput, match="closed"):
        runners[0].run(inputs[0])


@pytest.mark.gpu
def test_many_batches_in_one_launch():
    mlp = net(784, 40, 10)
    for variant in configs(mlp, 1024):
        runner = ENGINE.build(mlp, Spec("cuda:0", 1024), variant)
        xs = [draw(mlp, 1024, seed=seed) for seed in range(7)]
        y = runner.bind_many([to_device(x) for x in xs]).run().cpu().numpy()
        for x, ids in zip(xs, y, strict=True):
            check_ids(mlp, x, ids)


@pytest.mark.gpu
def test_a_thread_without_a_context():
    mlp = net(784, 40, 10)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1000), Variant.of(graph=True))
    x, got = draw(mlp, 1000), []
    thread = threading.Thread(target=lambda: got.append(runner.run(x).cpu().numpy()))
    thread.start()
    thread.join()
    check_ids(mlp, x, got[0])


@pytest.mark.gpu
def test_without_torch(monkeypatch):
    from gigamlp.engines import cuda_runner

    monkeypatch.setattr(cuda_runner, "open_torch", lambda: None)
    mlp = net(784, 40, 10)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1000), Variant.of(graph=True))
    x = draw(mlp, 1000)
    check_ids(mlp, x, runner.run(x).numpy())
    runner.close()


@pytest.mark.gpu
def test_a_session_gives_int64(monkeypatch):
    torch = pytest.importorskip("torch")
    import gigamlp as gm

    mlp = net(784, 40, 10)
    x = draw(mlp, 3001)
    with gm.Session(mlp, device="cuda:0", engine="cuda_fused", batch=(1024,)) as session:
        host, device = session.class_ids(x), session.class_ids(to_device(x))
    assert host.dtype == np.int64
    assert device.dtype == torch.int64
    check_ids(mlp, x, host)
    check_ids(mlp, x, device.cpu().numpy())


SANITIZED = """
import numpy as np
from gigamlp.engines.cuda_fused import CudaFused
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import net
import torch
shapes = ((784, 40, 10), 77), ((100, 17, 5), 33), ((33, 5, 2), 19), ((784, 128, 10), 70), ((300, 300, 40, 4), 200)
for widths, rows in shapes:
    mlp = net(*widths)
    seen = set()
    for v in CudaFused().variants(mlp, Spec("cuda:0", rows), full=True):
        if v.get("graph") or v.get("dtype") != "uint8" or v.get("path") in seen:
            continue
        seen.add(v.get("path"))
        runner = CudaFused().build(mlp, Spec("cuda:0", rows), v)
        runner.run(torch.randint(0, 256, (rows, mlp.features), dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        print(v.label)
"""


@pytest.mark.gpu
@pytest.mark.slow  # the sanitizer slows kernels down a hundredfold
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_is_clean(tool):
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    # API errors are not reported: cuda-bindings looks up symbols that this driver lacks, and lives with that
    options = ["--tool", tool, "--error-exitcode", "9", *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = [program, *options, sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "direct" in done.stdout
