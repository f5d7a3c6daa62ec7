"""On a GPU: a cascade's chain of kernels against its stages run alone by the same kernels, bit for bit."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.cascade import merge
from gigamlp.engines.cuda_fused import CudaFused
from gigamlp.errors import GigaMLPError, Unsupported
from gigamlp.spec import Spec, Variant

pytestmark = pytest.mark.gpu
ENGINE = CudaFused()
ROWS = (1, 31, 33, 4095, 70_001)


def drawn(seed, stages, features=784):
    rng = np.random.default_rng(seed)
    classes, made = int(rng.integers(2, 18)), []
    for index in range(stages):
        hidden = int(rng.choice([7, 40, 64, 128, 200, 512]))
        columns = ((192, 576),) if features == 784 and index == 0 else ((0, features),)
        read = columns[0][1] - columns[0][0]
        layers = [
            gm.Layer(rng.normal(size=(hidden, read)) / read, rng.normal(size=hidden), "relu"),
            gm.Layer(rng.normal(size=(classes, hidden)), rng.normal(size=classes)),
        ]
        made.append(gm.quantise(gm.MLP(layers, columns=columns, features=features, name=f"stage-{index}")))
    return gm.Cascade(made, [0.0] * (stages - 1))


def alone(mlp, x, label):
    """Class ids and margins of a stage, by the path and the sharing out of its first layer that a label names."""
    path, _, sizes = label.partition("-")
    outputs = re.search(r"n(\d+)", sizes)
    variant = Variant.of(path=path, **({"outputs": int(outputs.group(1))} if outputs else {}))
    runner = ENGINE.build(mlp, Spec("cuda:0", len(x), output="margin"), variant)
    ids, margins = (part.cpu().numpy() for part in runner.run(x))
    runner.close()
    return ids, margins


def chosen(cascade, answers, share):
    """Thresholds by which about that share of the rows goes on from each stage."""
    found = []
    for _, margins in answers[:-1]:
        some = np.sort(margins)
        at = min(int(share * len(some)), len(some) - 1)
        found.append(np.inf if share == 1 else 0.0 if share == 0 else float(np.nextafter(some[at], np.float32(np.inf))))
    return cascade.with_(thresholds=found)


def expected(cascade, answers):
    ids, deciding = merge(cascade.thresholds, [a for a, _ in answers], [m for _, m in answers])
    margins = np.choose(deciding, [m for _, m in answers])
    return ids, margins, [int((deciding > index).sum()) for index in range(len(cascade.thresholds))]


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.2, 1.0], ids=["nobody", "one", "some", "all"])
@pytest.mark.parametrize("seed", range(10))
def test_equal_to_the_stages_alone(seed, share):
    torch = pytest.importorskip("torch")
    cascade = drawn(seed, 2 + seed % 2, (784, 13, 160, 99, 1)[seed // 2])
    x = np.random.default_rng(seed).integers(0, 256, (ROWS[seed % 5], cascade.features), np.uint8)
    rows = torch.from_numpy(x).cuda()
    spec = Spec("cuda:0", len(x), output="margin")
    for variant in ENGINE.variants(cascade, spec)[::3]:
        answers = [
            alone(mlp, rows, label)
            for mlp, label in zip(cascade.stages, str(variant.get("form")).split("+"), strict=True)
        ]
        asked = chosen(cascade, answers, share)
        ids, margins, counts = expected(asked, answers)
        runner = ENGINE.build(asked, spec, variant)
        for turn in range(3):  # the counters begin anew
            got = [part.cpu().numpy() for part in runner.run(rows)]
            np.testing.assert_array_equal(got[0], ids, err_msg=variant.label)
            np.testing.assert_array_equal(got[1], margins, err_msg=variant.label)
            assert list(runner.unsure) == counts
            assert runner.totals == (len(x) * (turn + 1), *(count * (turn + 1) for count in counts))
        runner.close()


@pytest.mark.parametrize("graph", [True, False])
def test_every_run_is_about_the_rows_of_that_run(graph):
    torch = pytest.importorskip("torch")
    cascade = gm.Cascade([gm.load("mnist-40-w384"), gm.load("mnist-512")], [3.0])
    images = gm.data.load_mnist()[2]
    runner = ENGINE.build(cascade, Spec("cuda:0", 1000, output="margin"), Variant.of(graph=graph))
    labels = str(runner.variant.get("form")).split("+")
    seen = set()
    for begin in range(0, 5000, 1000):
        rows = torch.from_numpy(images[begin : begin + 1000]).cuda()
        answers = [alone(mlp, rows, label) for mlp, label in zip(cascade.stages, labels, strict=True)]
        ids, margins, counts = expected(cascade, answers)
        runner.input.copy_(rows)
        got = [part.cpu().numpy() for part in runner.run(runner.input)]
        np.testing.assert_array_equal(got[0], ids)
        np.testing.assert_array_equal(got[1], margins)
        assert list(runner.unsure) == counts
        seen.add(counts[0])
    assert len(seen) > 1
    runner.close()


def test_nothing_else_is_written():
    torch = pytest.importorskip("torch")
    cascade = gm.Cascade([gm.load("mnist-40-w352"), gm.load("mnist-64"), gm.load("mnist-128")], [4.0, 3.0])
    images = gm.data.load_mnist()[2]
    for n in (1, 33, 1023):
        rows = torch.from_numpy(images[:n]).cuda()
        runner = ENGINE.build(cascade, Spec("cuda:0", n), Variant.of(graph=False))
        plain = runner.run(rows).cpu().numpy()
        poisoned = torch.full((n + 512,), 0xA5, dtype=torch.uint8, device="cuda")
        runner._other.arguments[3].value = poisoned.data_ptr() + 256
        runner.run(rows)
        got = poisoned.cpu().numpy()
        assert (got[:256] == 0xA5).all()
        assert (got[256 + n :] == 0xA5).all()
        np.testing.assert_array_equal(got[256 : 256 + n], plain)
        runner.close()


def test_two_runners_on_two_streams():
    torch = pytest.importorskip("torch")
    cascade = gm.Cascade([gm.load("mnist-40-w384"), gm.load("mnist-128")], [5.0])
    images = torch.from_numpy(gm.data.load_mnist()[2]).cuda()
    want = [ENGINE.build(cascade, Spec("cuda:0", 5000)).run(part).clone() for part in images.split(5000)]
    runners, wrong = [ENGINE.build(cascade, Spec("cuda:0", 5000)) for _ in range(2)], []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(runners[index].run(images[5000 * index : 5000 * (index + 1)]), want[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_other_rows(dtype):
    torch = pytest.importorskip("torch")
    cascade = drawn(3, 2)
    cascade = gm.Cascade([stage.with_(scheme=None) for stage in cascade.stages], [0.3])
    x = np.random.default_rng(0).integers(-100, 100, (777, 784)).astype(dtype)
    try:
        runner = ENGINE.build(cascade, Spec("cuda:0", 777, dtype))
    except Unsupported as error:
        pytest.skip(str(error))
    got = runner.run(torch.from_numpy(x).cuda()).cpu().numpy()
    ids, deciding = cascade.decide(x.astype(np.float32))
    assert 0 < deciding.mean() < 1
    assert (got == ids).mean() > 0.97  # int8 weights, and rows whose margin is next to the threshold
    runner.close()


def test_a_session_and_its_share():
    cascade = gm.Cascade([gm.load("mnist-40-w384"), gm.load("mnist-512")], [3.0])
    *_, images, labels = gm.data.load_mnist()
    with gm.Session(cascade, device="cuda:0", engine="cuda_fused", batch=(4096,)) as session:
        accuracy = (session.predict(images) == labels).mean()
        share = session.unsure.share
    assert accuracy > 0.99
    assert 0.01 < share < 0.3


def test_what_chains_do_not_do():
    cascade = gm.Cascade([gm.load("mnist-40-w384"), gm.load("mnist-512")], [3.0])
    with pytest.raises(Unsupported, match="device memory"):
        ENGINE.build(cascade, Spec("cuda:0", 64, input_on="host"))
    for output in ("logits", "proba"):
        with pytest.raises(GigaMLPError):
            ENGINE.build(cascade, Spec("cuda:0", 64, output=output))
    runner = ENGINE.build(cascade, Spec("cuda:0", 64))
    with pytest.raises(Unsupported, match="one batch at a time"):
        runner.bind_many([runner.input])
    runner.close()
