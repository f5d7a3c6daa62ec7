"""`cuda_fused` on a GPU, from host memory to host memory, and launches that overlap. All of it needs a GPU."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.engines import cuda_mapped
from gigamlp.engines.cuda_fused import CudaFused
from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.mlp import MLP
from gigamlp.quantize import integer_form
from gigamlp.spec import Spec, Variant
from tests.engines.torch_cases import net

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ENGINE = CudaFused()
MNIST = net(784, 40, 10)
NETWORKS = [
    pytest.param(MNIST, id="mnist-40"),
    pytest.param(net(784, 128, 10), id="widest"),
    pytest.param(net(371, 40, 10, columns=((213, 584),), features=784), id="a window that is aligned to nothing"),
    pytest.param(net(33, 5, 2), id="rows of single bytes"),
    pytest.param(net(1, 1, 2), id="smallest"),
    pytest.param(net(256, 64, 32, 16, 100), id="deep"),
    pytest.param(net(200, 40, 1, head="sigmoid"), id="sigmoid"),
]


def draw(mlp: MLP, rows: int, seed: int = 0, dtype: str = "uint8") -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max + 1, (rows, mlp.features)).astype(dtype)


def gap(logits: np.ndarray) -> np.ndarray:
    if logits.shape[1] == 1:
        return np.abs(logits[:, 0])
    top = np.sort(logits, axis=1)
    return top[:, -1] - top[:, -2]


def tolerance(mlp: MLP) -> float:
    """See test_cuda_fused.py."""
    return 1e-4 if len(mlp.layers) == 2 and mlp.layers[0].activation == "relu" else 4e-3


def reference(mlp: MLP, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class ids, where they are beyond doubt, and logits."""
    want = integer_form(mlp, x.dtype.name).reference_logits(x).astype(np.float64)
    return mlp.class_ids(want), gap(want) > 2 * tolerance(mlp) * np.abs(want).max(), want


def check(mlp: MLP, x: np.ndarray, ids: np.ndarray) -> None:
    want, clear, _ = reference(mlp, x)
    np.testing.assert_array_equal(np.asarray(ids)[clear], want[clear])
    assert len(x) < 100 or clear.mean() > 0.5


def variants(mlp: MLP, batch: int, **spec: str) -> list[Variant]:
    return list(ENGINE.variants(mlp, Spec("cuda:0", batch, input_on="host", **spec)))


@pytest.mark.parametrize("mlp", NETWORKS)
def test_ids_equal_the_reference(mlp):
    for variant in variants(mlp, 100):
        runner = ENGINE.build(mlp, Spec("cuda:0", 100, input_on="host"), variant)
        for seed, rows in enumerate((1, 15, 100, 17, 16, 1, 99)):
            x = draw(mlp, rows, seed)
            check(mlp, x, runner.run(x))
        runner.close()


@pytest.mark.parametrize("output", ["margin", "logits", "proba"])
@pytest.mark.parametrize("mlp", [NETWORKS[0], NETWORKS[5], NETWORKS[6]])
def test_other_outputs(mlp, output):
    x = draw(mlp, 77, 3)
    _, _, want = reference(mlp, x)
    worst = 2 * tolerance(mlp) * np.abs(want).max()
    runner = ENGINE.build(mlp, Spec("cuda:0", 77, output=output, input_on="host"))
    y = runner.run(x)
    if output == "margin":
        check(mlp, x, y[0])
        np.testing.assert_allclose(y[1], gap(want), atol=worst, rtol=0)
    else:
        np.testing.assert_allclose(y, want if output == "logits" else mlp.probabilities(want), atol=worst, rtol=0)
    runner.close()


def test_int8_rows():
    mlp = net(784, 40, 10, offset=0.7)
    runner = ENGINE.build(mlp, Spec("cuda:0", 64, "int8", input_on="host"))
    x = draw(mlp, 64, 1, "int8")
    check(mlp, x, runner.run(x))


def test_every_call_reads_the_rows_of_that_call():
    """Thousands of calls: rows of an earlier one in some cache, or packets of it, would show."""
    x = draw(MNIST, 500, 5)
    want, clear, _ = reference(MNIST, x)
    for variant in variants(MNIST, 16):
        runner = ENGINE.build(MNIST, Spec("cuda:0", 16, input_on="host"), variant)
        for _ in range(6):
            got = np.array([runner.one_id(row) for row in x])
            np.testing.assert_array_equal(got[clear], want[clear])
        for begin in range(0, 500, 13):
            part = slice(begin, min(begin + 13, 500))
            got = runner.run(x[part])
            np.testing.assert_array_equal(got[clear[part]], want[part][clear[part]])
        runner.close()


@pytest.mark.parametrize("rows", [1024, 4096])
def test_many_rows(rows):
    x = draw(MNIST, rows, 6)
    runner = ENGINE.build(MNIST, Spec("cuda:0", rows, input_on="host"))
    for _ in range(50):
        ids = runner.run(x)
    check(MNIST, x, ids)


def test_a_thread_that_sleeps_until_the_device_is_done(monkeypatch):
    monkeypatch.setattr(cuda_mapped, "_LOOKS", 0)
    runner = ENGINE.build(MNIST, Spec("cuda:0", 64, input_on="host"))
    for seed in range(20):
        x = draw(MNIST, 64, seed)
        check(MNIST, x, runner.run(x))


def test_serial_numbers_come_round():
    runner = ENGINE.build(MNIST, Spec("cuda:0", 64, input_on="host"))
    runner.run(draw(MNIST, 64))
    runner._serial = cuda_mapped._LAST - 2
    for seed in range(6):
        x = draw(MNIST, 64 - seed, seed)
        check(MNIST, x, runner.run(x))


def test_two_runners_and_many_threads():
    other = net(784, 64, 10, seed=5)
    runners = [(m, ENGINE.build(m, Spec("cuda:0", 32, input_on="host"))) for m in (MNIST, other)]
    wrong = []

    def work(seed: int) -> None:
        mlp, runner = runners[seed % 2]
        x = draw(mlp, 32, seed)
        want, clear, _ = reference(mlp, x)
        for _ in range(200):
            if (runner.run(x)[clear] != want[clear]).any() or (clear[0] and runner.one_id(x[0]) != want[0]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_closed_while_others_run():
    runner, ended = ENGINE.build(MNIST, Spec("cuda:0", 8, input_on="host")), []
    x = draw(MNIST, 8)

    def work() -> None:
        try:
            while True:
                runner.run(x)
        except InvalidInput as error:
            ended.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    runner.close()
    for each in threads:
        each.join(timeout=20)
    assert ended == ["this runner is closed; build another"] * 3


def test_beside_a_busy_stream():
    """Work of another stream takes the GPU for longer than the host looks; the answer is right all the same."""
    runner = ENGINE.build(MNIST, Spec("cuda:0", 8, input_on="host"))
    a = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        a = a @ a * 1e-4
    x = draw(MNIST, 8, 9)
    check(MNIST, x, runner.run(x))
    torch.cuda.synchronize()


def _in_child(runner, results) -> None:
    try:
        runner.run(draw(MNIST, 8))
        results.put("ran")
    except DeviceError as error:
        results.put(str(error))


def test_a_fork_is_an_error():
    runner = ENGINE.build(MNIST, Spec("cuda:0", 8, input_on="host"))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(runner, results))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0
    assert "does not survive a fork" in results.get()
    x = draw(MNIST, 8)
    check(MNIST, x, runner.run(x))


def test_a_plan_for_host_rows_and_its_session():
    x = draw(MNIST, 3000, 11)
    plan = gm.optimize(MNIST, "auto", (1, 1024), validation=(x, None), max_disagreement=0.05)
    assert {(c.spec.device, c.spec.input_on) for c in plan.winners} == {
        ("cuda:0", "device"),
        ("cuda:0", "host"),
        ("cpu", "host"),
    }
    assert "rows in host memory, uint8 -> class: " in plan.explain()
    float_ids = MNIST.class_ids(MNIST.logits(x))
    with gm.Session(MNIST, plan) as session:
        for count in (1, 7, 64, 100, 1024, 2999):
            ids = session.class_ids(x[:count])
            assert ids.dtype == np.int64
            assert np.mean(ids != float_ids[:count]) <= 0.05
        one = [session.predict_one(row) for row in x[:50]]
        assert np.mean(one != float_ids[:50]) <= 0.1
        assert session.logits(x[:5]).shape == (5, 10)
        on_device = session.class_ids(torch.from_numpy(x).cuda()).cpu().numpy()
        assert np.mean(on_device != float_ids) <= 0.05


# ---- launches that overlap ------------------------------------------------------------------------------------------


def overlapping(mlp: MLP, batch: int) -> list[Variant]:
    found = ENGINE.variants(mlp, Spec("cuda:0", batch), full=True)
    return [v for v in found if v.get("overlap") and v.get("dtype") == "uint8" and v.get("compute") == "int8"]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="9.0 and later")
class TestOverlap:
    @pytest.mark.parametrize("mlp", [NETWORKS[0], NETWORKS[2], NETWORKS[3]])
    @pytest.mark.parametrize("batch", [16, 1023, 70_001])
    def test_rows_that_an_earlier_kernel_of_the_stream_writes(self, mlp, batch):
        sources = [torch.from_numpy(draw(mlp, batch, seed)).cuda() for seed in range(4)]
        want = [reference(mlp, s.cpu().numpy()) for s in sources]
        for variant in overlapping(mlp, batch):
            runner = ENGINE.build(mlp, Spec("cuda:0", batch), variant)
            rows, kept = torch.empty_like(sources[0]), []
            for turn in range(40):
                rows.copy_(sources[turn % 4])
                rows ^= 255
                rows ^= 255
                kept.append(runner.run(rows).clone())
            torch.cuda.synchronize()
            for turn, ids in enumerate(kept):
                right, clear, _ = want[turn % 4]
                np.testing.assert_array_equal(ids.cpu().numpy()[clear], right[clear], variant.label)
            runner.close()

    def test_many_launches_one_after_the_other(self):
        """No kernel in between: each launch may begin while the ones before it still run."""
        batch = 2048
        sources = [torch.from_numpy(draw(MNIST, batch, seed)).cuda() for seed in range(3)]
        for variant in overlapping(MNIST, batch):
            runners = [ENGINE.build(MNIST, Spec("cuda:0", batch), variant) for _ in range(3)]
            for _ in range(300):
                for runner, x in zip(runners, sources, strict=True):
                    y = runner.run(x)
            torch.cuda.synchronize()
            for runner, x in zip(runners, sources, strict=True):
                check(MNIST, x.cpu().numpy(), runner._answer.cpu().numpy())
            assert y is runners[2]._answer
            for runner in runners:
                runner.close()

    @pytest.mark.parametrize("path", ["split", "ring", "direct"])
    def test_the_answers_of_one_launch_are_the_rows_of_the_next(self, path):
        """Class ids of one MLP are the features of another; both overlap, and the answers change from turn to turn."""
        first, second = net(784, 40, 10), net(64, 16, 5, scale=1.0, seed=3)
        batch = 64 * 64
        found = [[v for v in overlapping(m, n) if v.get("path") == path] for m, n in ((first, batch), (second, 64))]
        if not all(found):
            pytest.skip(f"{path} is not offered for both")
        a = ENGINE.build(first, Spec("cuda:0", batch), found[0][0])
        b = ENGINE.build(second, Spec("cuda:0", 64), found[1][0])
        xs = [draw(first, batch, seed) for seed in range(3)]
        on_device = [torch.from_numpy(x).cuda() for x in xs]
        ids = a.run(on_device[0]).view(64, 64)
        kept = []
        for turn in range(300):
            a.run(on_device[turn % 3])
            kept.append(b.run(ids).clone())
        for turn in range(300, 303):
            rows = a.run(on_device[turn % 3]).cpu().numpy().reshape(64, 64)
            want, clear, _ = reference(second, rows)
            for got in kept[turn % 3 :: 3]:
                np.testing.assert_array_equal(got.cpu().numpy()[clear], want[clear])
