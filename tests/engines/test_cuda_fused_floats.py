"""The engine `cuda_fused` on float rows, and on bytes with weights that are not quantised, on a GPU.

Answers are compared with `Rounded.reference`: operands rounded as the kernel does, sums in float64, within the bound
that float32 sums can be from it; class ids are equal wherever the margin exceeds twice that bound.
"""

from __future__ import annotations

import numpy as np
import pytest

from gigamlp.engines.cuda_fused import CudaFused
from gigamlp.mlp import MLP
from gigamlp.rounded import rounded_form
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import net

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

ENGINE = CudaFused()
MNIST = net(784, 40, 10, scale=1.0)
NETWORKS = [
    pytest.param(MNIST, id="mnist-40"),
    pytest.param(net(784, 64, 10), id="half of shared memory"),
    pytest.param(net(784, 128, 10), id="widest"),
    pytest.param(net(371, 40, 10, columns=((213, 584),), features=784), id="a window that is aligned to nothing"),
    pytest.param(net(384, 40, 10, columns=((208, 592),), features=784), id="a window of whole 16 bytes"),
    pytest.param(net(300, 24, 10, columns=((100, 250), (400, 550)), features=784), id="two windows"),
    pytest.param(net(101, 17, 5), id="rows of an odd number of features"),
    pytest.param(net(1, 1, 2), id="smallest"),
    pytest.param(net(256, 64, 32, 16, 100), id="deep"),
    pytest.param(net(784, 32, 16, 10, activation="gelu"), id="gelu"),
    pytest.param(net(200, 40, 1, head="sigmoid", activation="tanh"), id="sigmoid"),
]
KINDS = [
    ("float16", "float16"),
    ("float16", "float16x2"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16x2"),
    ("float32", "tf32"),
    ("uint8", "float16"),
    ("int8", "float16x2"),
]
ROWS = (1, 17, 1023, 10007)


def draw(mlp: MLP, rows: int, dtype: str, seed: int = 0):
    """Rows on the device, NaN in features that are not read, and the same rows in NumPy (bfloat16 as float32)."""
    rng = np.random.default_rng(seed)
    if dtype in ("uint8", "int8"):
        info = np.iinfo(dtype)
        x = torch.from_numpy(rng.integers(info.min, info.max + 1, (rows, mlp.features)).astype(dtype))
        return x.cuda(), x.numpy()
    wide = 1 if mlp.input_scale == 1 else 255
    x = wide * rng.standard_normal((rows, mlp.features)).astype(np.float32)
    unread = np.ones(mlp.features, bool)
    for start, stop in mlp.columns or ((0, mlp.features),):
        unread[start:stop] = False
    x[:, unread] = np.nan
    tensor = torch.from_numpy(x).to(getattr(torch, dtype))
    return tensor.cuda(), tensor.float().numpy() if dtype == "bfloat16" else tensor.numpy()


def form_of(mlp: MLP, dtype: str, compute: str):
    later = "tf32" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    return rounded_form(mlp, dtype, compute, later)


def check(form, x: np.ndarray, y, output: str = "class") -> None:
    want, bound = form.reference(x)
    near = bound.max(axis=1)
    assert len(x) < 100 or np.median(near) < 0.01 * np.abs(want).max()  # or nothing would be compared
    if output == "logits":
        assert (np.abs(y.cpu().numpy() - want) <= near[:, None] + 1e-6).all()
        return
    if output == "proba":
        assert (np.abs(y.cpu().numpy() - form.mlp.probabilities(want)) <= near[:, None] + 1e-5).all()
        return
    ids, margin = (y[0].cpu().numpy(), y[1].cpu().numpy()) if output == "margin" else (y.cpu().numpy(), None)
    top = np.sort(want, axis=1)
    gap = np.abs(want[:, 0]) if form.mlp.head == "sigmoid" else top[:, -1] - top[:, -2]
    clear = gap > 2 * near
    np.testing.assert_array_equal(ids[clear], form.mlp.class_ids(want)[clear])
    assert len(x) < 100 or clear.mean() > 0.5
    if margin is not None:
        assert (np.abs(margin - gap) <= 2 * near + 1e-5).all()


def variants(mlp: MLP, spec: Spec, compute: str, every: bool = False) -> list[Variant]:
    """The first two variants of each path, or all, without a graph."""
    found = ENGINE.variants(mlp, spec, full=True)
    first = next(v.get("dtype") for v in found)
    plain = [v for v in found if not v.get("graph") and v.get("compute") == compute and v.get("dtype") == first]
    paths = [[v for v in plain if v.get("path") == path] for path in dict.fromkeys(v.get("path") for v in plain)]
    return plain if every else [v for kind in paths for v in kind[:2]]


@pytest.mark.parametrize(("dtype", "compute"), KINDS)
@pytest.mark.parametrize("mlp", NETWORKS)
def test_ids_equal_the_reference_and_nothing_else_is_written(mlp, dtype, compute):
    form = form_of(mlp, dtype, compute)
    for rows in ROWS:
        x, host = draw(mlp, rows, dtype)
        spec = Spec("cuda:0", rows, dtype)
        for variant in variants(mlp, spec, compute, every=mlp is MNIST and rows == 1023):
            runner = ENGINE.build(mlp, spec, variant)
            poisoned = torch.full((rows + 512,), 0xA5, dtype=torch.uint8, device="cuda")
            runner._other.arguments[3].value = poisoned.data_ptr() + 256
            # the rows lie between NaNs
            around = torch.full((512 + host.size * x.element_size(),), 0xFF, dtype=torch.uint8, device="cuda")
            inside = around[256 : 256 + host.size * x.element_size()].view(x.dtype).view(x.shape)
            inside.copy_(x)
            runner.run(inside)
            got = poisoned.cpu().numpy()
            assert (got[:256] == 0xA5).all(), variant.label
            assert (got[256 + rows :] == 0xA5).all(), variant.label
            check(form, host, torch.from_numpy(got[256 : 256 + rows]))
            runner.close()


@pytest.mark.parametrize(("dtype", "compute"), KINDS)
@pytest.mark.parametrize("output", ["logits", "margin", "proba"])
@pytest.mark.parametrize("mlp", [NETWORKS[0], NETWORKS[8], NETWORKS[10]])
def test_other_outputs(mlp, output, dtype, compute):
    x, host = draw(mlp, 1023, dtype)
    spec = Spec("cuda:0", 1023, dtype, output)
    for variant in variants(mlp, spec, compute)[::2]:
        runner = ENGINE.build(mlp, spec, variant)
        check(form_of(mlp, dtype, compute), host, runner.run(x), output)
        runner.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("graph", [True, False])
def test_three_inputs_other_rows_and_other_strides(dtype, graph):
    mlp = net(784, 40, 10)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1000, dtype), Variant.of(graph=graph))
    form = form_of(mlp, dtype, runner.variant.get("compute"))
    for seed in range(3):
        x, host = draw(mlp, 1000, dtype, seed)
        runner.input.copy_(x)
        check(form, host, runner.run(runner.input))
    x, host = draw(mlp, 1000, dtype, 7)
    check(form, host, runner.run(x))
    if dtype != "bfloat16":
        check(form, host, runner.run(host))  # host rows
    for begin, width in ((0, 800), (8, 800), (3, 791)):  # a stride that fits, an offset that does, and neither
        wide = torch.full((1000, width), float("nan"), dtype=x.dtype, device="cuda")
        wide[:, begin : begin + 784] = x
        check(form, host, runner.run(wide[:, begin : begin + 784]))
    across = torch.full((784, 1000), 0.0, dtype=x.dtype, device="cuda")
    across.copy_(x.t())
    check(form, host, runner.run(across.t()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_many_batches_in_one_launch(dtype):
    mlp = net(784, 40, 10)
    spec = Spec("cuda:0", 1024, dtype)
    for variant in variants(mlp, spec, ENGINE.variants(mlp, spec)[0].get("compute")):
        runner = ENGINE.build(mlp, spec, variant)
        drawn = [draw(mlp, 1024, dtype, seed) for seed in range(5)]
        y = runner.bind_many([x for x, _ in drawn]).run()
        for (_, host), ids in zip(drawn, y, strict=True):
            check(form_of(mlp, dtype, variant.get("compute")), host, ids)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_without_torch(monkeypatch, dtype):
    from gigamlp.engines import cuda_runner

    monkeypatch.setattr(cuda_runner, "open_torch", lambda: None)
    mlp = net(784, 40, 10)
    runner = ENGINE.build(mlp, Spec("cuda:0", 1000, dtype), Variant.of(graph=True))
    _, host = draw(mlp, 1000, dtype)
    check(form_of(mlp, dtype, runner.variant.get("compute")), host, torch.from_numpy(runner.run(host).numpy()))
    runner.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_session_takes_float_rows(dtype):
    import gigamlp as gm

    mlp = net(784, 40, 10)
    x, host = draw(mlp, 3001, "float32" if dtype == "float64" else dtype)
    given = host.astype(np.float64) if dtype == "float64" else host
    with gm.Session(mlp, device="cuda:0", engine="cuda_fused", batch=(1024,)) as session:
        exact = mlp.reference_logits(host)
        for got in (session.logits(given), session.logits(x).float().cpu().numpy()):
            assert np.linalg.norm(got - exact) < 1e-3 * np.linalg.norm(exact)
        assert np.mean(session.class_ids(given) == mlp.class_ids(exact)) > 0.995


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
def test_without_validation_rows_a_variant_within_1e3_competes(dtype):
    import gigamlp as gm

    mlp = net(784, 40, 10)
    plan = gm.optimize(mlp, device="cuda:0", batch=1024, input_dtype=dtype, engines=["cuda_fused"])
    best = plan.winners[0]
    assert best.logit_error is not None
    assert best.logit_error < 1e-3
    assert best.variant.get("compute") != "int8" or best.logit_error < 1e-3
    for each in plan.candidates:
        assert (each.rejected is None) == (each.logit_error is not None and each.logit_error <= 1e-3), each
