"""The runner of `cuda_fused` without a GPU: which launches, copies and waits it makes, on a driver of host memory.

The kernel is a Python function with the same arguments, which answers with the MLP's own logits.
"""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from gigamlp.engines import cuda_runner
from gigamlp.engines.cuda_runner import CudaFusedRunner, Program
from gigamlp.errors import InvalidInput
from gigamlp.kernels.cuda.driver import open_gpu
from gigamlp.kernels.cuda.launch import Kernel
from gigamlp.kernels.cuda.memory import Buffer
from gigamlp.spec import Spec, Variant
from tests.fakes import make_mlp
from tests.kernels.cuda.fake_driver import FakeDriver, at

BATCH, FEATURES = 5, 6
MLP = make_mlp()


def kernel(values, grid, block, shared):
    """The fused kernel's signature, with the answers of `MLP`."""
    x, stride, weights, out, out2, rows, table, batches = values
    assert at(weights, (4,), np.uint8).tolist() == [1, 2, 3, 4]
    assert (stride >= FEATURES, grid, block, shared) == (True, 7, 64, 1000)
    jobs = at(table, (batches, 4), np.int64).tolist() if table else [[x, out, out2, rows]]
    for source, first, second, count in jobs:
        span = at(source, ((count - 1) * stride + FEATURES,), np.uint8)
        rows_read = np.lib.stride_tricks.as_strided(span, (count, FEATURES), (stride, 1))
        logits = MLP.logits(rows_read.copy())
        at(first, (count,), np.uint8)[:] = MLP.class_ids(logits)
        if second:
            top = np.sort(logits, axis=1)
            at(second, (count,), np.float32)[:] = top[:, -1] - top[:, -2]


kernel.arguments = 8


@pytest.fixture
def fake(monkeypatch):
    made = FakeDriver({"fused": kernel})
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    monkeypatch.setattr(cuda_runner, "open_torch", lambda: None)
    return made


def make(fake, output="class", graph=False, x=None):
    gpu = open_gpu(0)
    outputs = (((), "uint8"),) if output == "class" else (((), "uint8"), ((), "float32"))
    program = Program(
        gpu=gpu,
        kernel=Kernel(gpu, b"\x7fELF", "fused", 1000),
        weights=Buffer.of(gpu, np.array([1, 2, 3, 4], np.uint8)),
        block=64,
        grid=lambda rows, batches: 7,
        features=FEATURES,
        row_bytes=FEATURES,
        alignment=16,
        stride_fits=lambda stride: stride >= FEATURES and stride % 2 == 0,
        outputs=outputs,
    )
    return CudaFusedRunner(program, Spec("cuda:0", BATCH, "uint8", output), Variant.of(graph=graph), x)


def draw(seed, shape=(BATCH, FEATURES)):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def ids(x):
    return MLP.class_ids(MLP.logits(x))


def launches(fake):
    return [each for each in fake.log if each[0] in ("launch", "replay", "copy rows", "record", "wait")]


class Foreign:
    """An array of another library."""

    def __init__(self, buffer, offset=0, strides=None, shape=(BATCH, FEATURES), typestr="|u1", stream=None):
        self.keep = buffer
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (buffer.pointer + offset, False),
            "version": 3,
            "strides": strides,
            "stream": stream,
        }


@pytest.mark.parametrize("graph", [False, True])
def test_three_inputs_through_the_static_buffer(fake, graph):
    runner = make(fake, graph=graph)
    for seed in range(3):
        x = draw(seed)
        runner.input.fill(x)
        np.testing.assert_array_equal(runner.run(runner.input).numpy(), ids(x))
    assert launches(fake) == [("replay" if graph else "launch", 0)] * 3


@pytest.mark.parametrize("graph", [False, True])
def test_other_rows_are_read_where_they_lie(fake, graph):
    runner = make(fake, graph=graph)
    x = draw(1)
    runner.stream = 9
    np.testing.assert_array_equal(runner.run(Buffer.of(runner.input.gpu, x)).numpy(), ids(x))
    assert launches(fake) == [("launch", 9)]
    np.testing.assert_array_equal(runner.input.numpy(), np.zeros((BATCH, FEATURES)))  # untouched
    np.testing.assert_array_equal(runner.run(runner.input).numpy(), ids(np.zeros((BATCH, FEATURES), np.uint8)))


def test_host_rows_are_copied_into_the_static_buffer(fake):
    runner = make(fake)
    x = draw(2)
    np.testing.assert_array_equal(runner.run(x).numpy(), ids(x))
    np.testing.assert_array_equal(runner.run(x[::-1]).numpy(), ids(x[::-1]))


def test_rows_that_the_kernel_cannot_read_in_place_are_copied_on_the_device(fake):
    runner = make(fake)
    wide = draw(3, (BATCH, 16))
    held = Buffer.of(runner.input.gpu, wide)
    x = Foreign(held, offset=3, strides=(16, 1))  # an odd address
    np.testing.assert_array_equal(runner.run(x).numpy(), ids(wide[:, 3 : 3 + FEATURES]))
    x = Foreign(held, offset=1)  # contiguous, but at an odd address
    np.testing.assert_array_equal(runner.run(x).numpy(), ids(wide.ravel()[1:31].reshape(BATCH, FEATURES)))
    odd = Buffer.of(runner.input.gpu, draw(3, (BATCH, 7)))
    x = Foreign(odd, strides=(7, 1))  # an odd stride
    np.testing.assert_array_equal(runner.run(x).numpy(), ids(odd.numpy()[:, :FEATURES]))
    assert [each[0] for each in launches(fake)] == ["copy rows", "launch"] * 3


@pytest.mark.parametrize("graph", [False, True])
def test_rows_with_a_stride_that_fits_are_read_where_they_lie(fake, graph):
    runner = make(fake, graph=graph)
    wide = draw(3, (BATCH, 16))
    held = Buffer.of(runner.input.gpu, wide)
    np.testing.assert_array_equal(runner.run(Foreign(held, strides=(16, 1))).numpy(), ids(wide[:, :FEATURES]))
    assert launches(fake) == [("launch", 0)]
    x = draw(4)  # the stride of one run does not stay for the next
    np.testing.assert_array_equal(runner.run(Buffer.of(runner.input.gpu, x)).numpy(), ids(x))
    bound = runner.bind(Foreign(held, strides=(16, 1)))
    np.testing.assert_array_equal(bound.run(bound.input).numpy(), ids(wide[:, :FEATURES]))
    many = runner.bind_many([Foreign(held, strides=(16, 1)), Foreign(held, strides=(16, 1), offset=16)])
    assert many.run().numpy()[0].tolist() == ids(wide[:, :FEATURES]).tolist()
    with pytest.raises(InvalidInput, match=r"strides are \[6, 16\]"):
        runner.bind_many([Foreign(held, strides=(16, 1)), Buffer.of(runner.input.gpu, x)])


def test_the_producers_stream_is_waited_for(fake):
    runner = make(fake)
    x = draw(4)
    runner.stream = 8
    held = Buffer.of(runner.input.gpu, x)
    np.testing.assert_array_equal(runner.run(Foreign(held, stream=5)).numpy(), ids(x))
    assert launches(fake) == [("record", 5), ("wait", 8), ("launch", 8)]
    runner.run(Foreign(held, stream=8))
    assert launches(fake)[3:] == [("launch", 8)]


def test_margins_come_with_the_ids(fake):
    runner = make(fake, "margin")
    x = draw(5)
    classes, margin = runner.run(Buffer.of(runner.input.gpu, x))
    top = np.sort(MLP.logits(x), axis=1)
    np.testing.assert_array_equal(classes.numpy(), ids(x))
    np.testing.assert_allclose(margin.numpy(), top[:, -1] - top[:, -2])


def test_a_bound_runner_has_outputs_of_its_own(fake):
    first = make(fake, graph=True)
    x = draw(6)
    second = first.bind(Buffer.of(first.input.gpu, x))
    a = first.run(first.input)
    b = second.run(second.input)
    np.testing.assert_array_equal(b.numpy(), ids(x))
    np.testing.assert_array_equal(a.numpy(), ids(np.zeros((BATCH, FEATURES), np.uint8)))
    first.close()
    np.testing.assert_array_equal(second.run(second.input).numpy(), ids(x))
    with pytest.raises(InvalidInput, match="multiple of 16"):
        second.bind(Foreign(second.input, offset=1))


@pytest.mark.parametrize("output", ["class", "margin"])
def test_many_batches_in_one_launch(fake, output):
    runner = make(fake, output)
    xs = [draw(seed) for seed in range(10, 14)]
    many = runner.bind_many([Buffer.of(runner.input.gpu, x) for x in xs])
    fake.log.clear()
    y = many.run()
    assert launches(fake) == [("launch", 0)]
    got = y.numpy() if output == "class" else y[0].numpy()
    np.testing.assert_array_equal(got, [ids(x) for x in xs])
    if output == "margin":
        assert y[1].shape == (4, BATCH)
        assert (y[1].numpy() >= 0).all()
    with pytest.raises(InvalidInput, match="at least one batch"):
        runner.bind_many([])


def test_rows_that_do_not_fit_are_refused(fake):
    runner = make(fake)
    gpu = runner.input.gpu
    with pytest.raises(InvalidInput, match=r"shape \[5, 6\], got \[4, 6\]"):
        runner.run(Buffer.of(gpu, draw(0, (4, 6))))
    with pytest.raises(InvalidInput, match=r"rows of uint8, got int8"):
        runner.run(Buffer.of(gpu, draw(0).astype(np.int8)))
    with pytest.raises(InvalidInput, match=r"shape \[5, 6\], got \[5, 7\]"):
        runner.run(draw(0, (5, 7)))
    with pytest.raises(InvalidInput, match="got a list"):
        runner.run([[0] * FEATURES] * BATCH)
    with pytest.raises(InvalidInput, match="side by side"):
        runner.run(Foreign(Buffer.of(gpu, draw(0, (BATCH, 16))), strides=(16, 2)))


def test_a_closed_runner_gives_everything_back(fake):
    runner = make(fake, graph=True)
    assert (len(fake.memory), len(fake.graphs), len(fake.modules)) == (3, 1, 1)
    runner.close()
    runner.close()
    with pytest.raises(InvalidInput, match="closed"):
        runner.run(draw(0))
    with pytest.raises(InvalidInput, match="closed"):
        runner.bind(draw(0))
    del runner
    gc.collect()
    assert (fake.memory, fake.graphs, fake.modules) == ({}, {}, set())


def test_a_dropped_runner_waits_for_the_device_first(fake):
    runner = make(fake)
    fake.log.clear()
    del runner
    gc.collect()
    assert fake.log == [("synchronize",)]
    assert fake.memory == {}
