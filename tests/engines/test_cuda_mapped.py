"""The runner of `cuda_fused` for rows in host memory, on a driver whose device is host memory.

The kernel is a Python function with the same arguments, which answers in packets with the MLP's own logits.
"""

from __future__ import annotations

import gc
import os
import sys
import threading

import numpy as np
import pytest

from gigamlp.engines import cuda_fused, cuda_mapped
from gigamlp.engines.cuda_mapped import MappedRunner
from gigamlp.engines.cuda_runner import Program
from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.kernels.cuda.compile import toolchain_problem
from gigamlp.kernels.cuda.driver import open_gpu
from gigamlp.kernels.cuda.launch import Kernel
from gigamlp.kernels.cuda.memory import Buffer
from gigamlp.kernels.cuda.nvidia import core
from gigamlp.quantize import integer_form
from gigamlp.spec import Spec, Variant
from tests.fakes import make_mlp
from tests.kernels.cuda.fake_driver import FakeDriver, Status, at

BATCH, FEATURES = 5, 6
MLP = make_mlp()
OUTPUTS = {
    "class": (((2,), "uint32"),),
    "margin": (((2,), "uint32"), ((2,), "uint32")),
    "logits": (((MLP.outputs, 2), "uint32"),),
}


class FusedKernel:
    """The fused kernel's signature; `output` says what it answers with."""

    def __init__(self, output, carried=0):
        self.output, self.grids, self.carried = output, [], carried
        self.arguments = 10 if carried else 9

    def __call__(self, values, grid, block, shared):
        x, stride, weights, out, out2, rows, table, _, serial, *carried = values
        if carried:
            assert x == 0
            x = carried[0]
        assert (stride, block, shared, table) == (FEATURES, 64, 1000, 0)
        assert at(weights, (4,), np.uint8).tolist() == [1, 2, 3, 4]
        self.grids.append(grid)
        logits = MLP.logits(at(x, (rows, FEATURES), np.uint8).copy())
        top = np.sort(logits, axis=1)
        parts = {
            "class": [(out, MLP.class_ids(logits).astype(np.uint32))],
            "margin": [(out, MLP.class_ids(logits).astype(np.uint32)), (out2, (top[:, -1] - top[:, -2]))],
            "logits": [(out, logits)],
        }[self.output]
        for address, value in parts:
            bits = value if value.dtype == np.uint32 else value.astype(np.float32).view(np.uint32)
            packets = at(address, (bits.size, 2), np.uint32)
            packets[:, 0], packets[:, 1] = bits.reshape(-1), serial & 0xFFFFFFFF


@pytest.fixture
def fake(monkeypatch):
    if toolchain_problem() is None:
        core()  # NVIDIA's other packages must not meet the fake while they are imported
    made = FakeDriver({})
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    return made


def make(fake, output="class", memory="cached"):
    kernel = fake.kernels["fused"] = FusedKernel(output, BATCH * FEATURES if memory == "launch" else 0)
    gpu = open_gpu(0)
    program = Program(
        gpu=gpu,
        kernel=Kernel(gpu, b"\x7fELF", "fused", 1000),
        weights=Buffer.of(gpu, np.array([1, 2, 3, 4], np.uint8)),
        block=64,
        grid=lambda rows, batches: -(-rows // 2),
        features=FEATURES,
        row_bytes=FEATURES,
        alignment=4,
        stride_fits=lambda stride: True,
        outputs=OUTPUTS[output],
    )
    runner = MappedRunner(program, Spec("cuda:0", BATCH, "uint8", output, "host"), Variant.of(memory=memory))
    return runner, kernel


def draw(seed, shape=(BATCH, FEATURES)):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def ids(x):
    return MLP.class_ids(MLP.logits(x))


@pytest.mark.parametrize("memory", ["cached", "combined", "launch"])
def test_any_number_of_rows_up_to_the_batch(fake, memory):
    runner, kernel = make(fake, memory=memory)
    rows = {"cached": [3], "combined": [7], "launch": []}[memory]
    assert fake.flags == [*rows, 3]  # rows, packets: portable, mapped, write-combined
    for seed, count in enumerate((5, 1, 3, 5, 2)):
        x = draw(seed, (count, FEATURES))
        np.testing.assert_array_equal(runner.run(x), ids(x))
    assert kernel.grids == [3, 1, 2, 3, 1]
    assert len({each for each in fake.log if each[0] == "launch"}) == 1  # all on one stream, which nobody waited for
    assert not [each for each in fake.log if each == ("synchronize", runner.stream)]
    assert fake.current == []


@pytest.mark.parametrize("memory", ["cached", "launch"])
def test_the_static_input_is_not_copied(fake, memory):
    runner, _ = make(fake, memory=memory)
    runner.input[...] = draw(3)
    np.testing.assert_array_equal(runner.run(runner.input), ids(draw(3)))


def test_strided_rows(fake):
    runner, _ = make(fake)
    wide = draw(4, (10, 13))
    np.testing.assert_array_equal(runner.run(wide[::2, 1::2]), ids(wide[::2, 1::2].copy()))
    assert runner.one_id(wide[3, ::2][:6]) == ids(wide[3:4, ::2][:, :6].copy())[0]


@pytest.mark.parametrize("output", list(OUTPUTS))
def test_every_output_and_one_row_of_it(fake, output):
    runner, _ = make(fake, output)
    x = draw(5, (4, FEATURES))
    logits = MLP.logits(x)
    top = np.sort(logits, axis=1)
    want = {"class": ids(x), "margin": (ids(x), top[:, -1] - top[:, -2]), "logits": logits}[output]
    got, one = runner.run(x), runner.one_id(x[2])
    if output == "margin":
        for part, single, right in zip(got, one, want, strict=True):
            np.testing.assert_allclose(part, right)
            assert single == part[2]
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_array_equal(one, got[2])
    assert output != "class" or type(one) is int


def test_answers_are_the_callers_own(fake):
    runner, _ = make(fake, "logits")
    first = runner.run(draw(1))
    kept = first.copy()
    runner.run(draw(2))
    np.testing.assert_array_equal(first, kept)


def test_a_serial_number_that_comes_round_again(fake):
    runner, _ = make(fake)
    runner.run(draw(0))  # all five packets have serial number 1
    runner._serial = cuda_mapped._LAST - 1
    for count in (1, 2, 5, 1):  # the last number, then 1, which the packets behind would already have
        x = draw(count, (count, FEATURES))
        np.testing.assert_array_equal(runner.run(x), ids(x))
    assert runner._serial == 3


def test_packets_of_an_earlier_run_are_not_taken_for_answers(fake):
    runner, _ = make(fake)
    runner.run(draw(0))
    fake.late = []  # the kernel runs only when the stream is waited for
    x = draw(1)
    np.testing.assert_array_equal(runner.run(x), ids(x))
    assert ("synchronize", runner.stream) in fake.log


def test_packets_that_arrive_out_of_order_are_waited_for(fake, monkeypatch):
    runner, _ = make(fake)
    plain = FusedKernel("class")

    def last_first(values, grid, block, shared):
        packets = at(values[3], (values[5], 2), np.uint32)
        old = packets.copy()
        plain(values, grid, block, shared)
        new = packets.copy()
        packets[:-1] = old[:-1]  # only the last packet is there; the others come with the synchronise
        fake.late = [(lambda *_: packets.__setitem__(slice(None), new), [], 1, 64, 0)]

    fake.kernels["fused"] = last_first
    last_first.arguments = 9
    monkeypatch.setattr(cuda_mapped, "_LOOKS", 10)
    x = draw(6)
    np.testing.assert_array_equal(runner.run(x), ids(x))


def test_a_device_that_fails_is_an_error_and_no_hang(fake, monkeypatch):
    runner, _ = make(fake)
    monkeypatch.setattr(cuda_mapped, "_LOOKS", 10)

    def silent(values, grid, block, shared):
        pass

    silent.arguments = 9
    fake.kernels["fused"] = silent
    with pytest.raises(DeviceError, match="ended without an answer"):
        runner.run(draw(0))
    fake.broken = Status.INVALID_VALUE
    with pytest.raises(DeviceError, match=r"cannot finish its work: INVALID_VALUE \(fake error 1\)"):
        runner.run(draw(0))
    with pytest.raises(DeviceError, match="fake error 1"):
        runner.one_id(draw(0)[0])
    fake.broken, fake.kernels["fused"] = None, FusedKernel("class")
    np.testing.assert_array_equal(runner.run(draw(1)), ids(draw(1)))  # the lock is free


def test_a_launch_that_is_refused(fake):
    runner, _ = make(fake)
    fake.cuLaunchKernel = lambda *_: (Status.INVALID_VALUE,)
    with pytest.raises(DeviceError, match=r"cannot launch the kernel 'fused': INVALID_VALUE \(fake error 1\)"):
        runner.run(draw(0))


def test_an_old_driver_is_said(fake):
    fake.version = 11040
    with pytest.raises(DeviceError, match="no cuLaunchKernelEx; update the driver"):
        make(fake)


def test_two_runners_do_not_meet(fake):
    (first, _), (second, _) = make(fake), make(fake)
    assert first.stream != second.stream
    a, b = draw(1), draw(2)
    first.input[...], second.input[...] = a, b
    np.testing.assert_array_equal(first.run(first.input), ids(a))
    np.testing.assert_array_equal(second.run(second.input), ids(b))
    first.close()
    np.testing.assert_array_equal(second.run(b), ids(b))


def test_threads_take_turns(fake):
    runner, _ = make(fake)
    wrong = []

    def work(seed):
        x = draw(seed)
        for _ in range(100):
            if (runner.run(x) != ids(x)).any() or runner.one_id(x[0]) != ids(x)[0]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_rows_that_do_not_fit_are_refused(fake):
    runner, _ = make(fake)
    for x, words in (
        (draw(0, (6, FEATURES)), r"takes a NumPy array uint8 \[1 \.\. 5, 6\], got a ndarray uint8 \[6, 6\]"),
        (draw(0, (0, FEATURES)), r"got a ndarray uint8 \[0, 6\]"),
        (draw(0, (5, 7)), r"got a ndarray uint8 \[5, 7\]"),
        (draw(0).astype(np.int16), "got a ndarray int16"),
        ([[0] * FEATURES], "got a list"),
    ):
        with pytest.raises(InvalidInput, match=words):
            runner.run(x)
    for row in (draw(0, (7,)), draw(0, (1, FEATURES)), draw(0, (FEATURES,)).astype(np.float32), [0] * FEATURES):
        with pytest.raises(InvalidInput, match=r"takes a NumPy array uint8 \[6\]"):
            runner.one_id(row)


def test_a_closed_runner_gives_everything_back(fake):
    runner, _ = make(fake)
    other = runner.bind(draw(8))
    held = runner.input  # a caller may still look at the rows
    runner.close()
    runner.close()
    for name, x in (("run", draw(0)), ("one_id", draw(0)[0]), ("bind", draw(0))):
        with pytest.raises(InvalidInput, match="closed"):
            getattr(runner, name)(x)
    held[...] = 1
    np.testing.assert_array_equal(other.run(other.input), ids(draw(8)))
    del runner, other
    gc.collect()
    assert len(fake.host) == 1
    del held
    gc.collect()
    assert (fake.host, fake.memory, fake.modules) == ({}, {}, set())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_refused_before_the_memory_is_touched(fake):
    runner, _ = make(fake)
    parent = os.getpid()
    child = os.fork()
    if not child:
        code = 1
        try:
            runner.run(draw(0))
        except DeviceError as error:
            code = 0 if str(parent) in str(error) and len(fake.host) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(toolchain_problem() is not None, reason=str(toolchain_problem()))
@pytest.mark.parametrize("output", ["class", "margin", "logits", "proba"])
def test_the_engine_builds_it_for_rows_on_the_host(fake, monkeypatch, tmp_path, output):
    """All but the GPU: variants, compilation, packing, the launch; the kernel is the integer reference."""
    from gigamlp.kernels.cuda import cache

    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(cuda_fused, "_open", lambda device: open_gpu(0))
    mlp = make_mlp((64, 16, 4))
    spec = Spec("cuda:0", 40, output=output, input_on="host")
    logits_of = integer_form(mlp, "uint8").reference_logits

    def kernel(values, grid, block, shared):
        x, stride, _, out, out2, rows, _, _, serial = values
        assert (stride, block, grid) == (64, 32, -(-rows // 16))
        z = logits_of(at(x, (rows, 64), np.uint8).copy())
        top = np.sort(z, axis=1)
        ids = mlp.class_ids(z).astype(np.uint32)
        margin = (top[:, -1] - top[:, -2]).astype(np.float32)
        found = {"class": [ids], "margin": [ids, margin], "logits": [z], "proba": [mlp.probabilities(z)]}[output]
        for address, value in zip((out, out2), found, strict=False):
            bits = np.ascontiguousarray(value).view(np.uint32).reshape(-1)
            at(address, (bits.size, 2), np.uint32)[:] = np.stack([bits, np.full_like(bits, serial & 0xFFFFFFFF)], 1)

    kernel.arguments = 9
    fake.kernels["gigamlp_fused"] = kernel
    engine = cuda_fused.CudaFused()
    runner = engine.build(mlp, spec, engine.variants(mlp, spec)[1])
    x = draw(3, (37, 64))
    z = logits_of(x)
    got = runner.run(x)
    ids = got[0] if output == "margin" else got
    if output in ("class", "margin"):
        np.testing.assert_array_equal(ids, mlp.class_ids(z))
    else:
        np.testing.assert_allclose(got, z if output == "logits" else mlp.probabilities(z), rtol=1e-6)
    one = runner.one_id(x[5])
    np.testing.assert_allclose(one if output != "margin" else one[1], got[5] if output != "margin" else got[1][5])
    runner.close()
