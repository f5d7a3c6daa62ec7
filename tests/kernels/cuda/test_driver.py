"""Devices, memory, launches and graphs, against a driver whose device is host memory."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.kernels.cuda import arrays, driver, memory
from gigamlp.kernels.cuda.driver import open_gpu
from gigamlp.kernels.cuda.launch import Graph, Kernel, Launch
from gigamlp.kernels.cuda.memory import Buffer
from tests.kernels.cuda.fake_driver import FakeDriver, at

ELF = b"\x7fELF code"


def add(values, grid, block, shared):
    """out[i] = x[i] + k, for n numbers."""
    x, out, n, k = values
    at(out, (n,), np.int32)[:] = at(x, (n,), np.int32) + k


add.arguments = 4


@pytest.fixture
def fake(monkeypatch):
    made = FakeDriver({"add": add})
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    return made


def launch_of(gpu, x, out, k=1, shared=0):
    values = (ctypes.c_void_p(x), ctypes.c_void_p(out), ctypes.c_longlong(5), ctypes.c_longlong(k))
    return Launch(Kernel(gpu, ELF, "add", shared), 3, 64, values)


def test_a_device_says_what_it_is(fake):
    gpu = open_gpu(0)
    assert (gpu.name, gpu.capability, gpu.multiprocessors, gpu.alone) == ("Fake H200", (9, 0), 132, True)
    with pytest.raises(DeviceError, match="no CUDA device 1; the driver has 1"):
        open_gpu(1)
    fake.devices = 2
    assert not open_gpu(0).alone
    assert driver.driver_cuda() == (13, 0)
    fake.version = 12080
    assert driver.driver_cuda() == (12, 8)


def test_without_a_driver_the_reason_is_said(monkeypatch):
    def missing():
        raise RuntimeError("libcuda.so.1 not found\nmore")

    monkeypatch.setattr(driver, "api", missing)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver can be loaded \(libcuda.so.1 not found\)"):
        open_gpu(0)


def test_buffers_carry_arrays_and_give_their_memory_back(fake):
    gpu = open_gpu(0)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = Buffer.of(gpu, x[:, ::-1])
    np.testing.assert_array_equal(buffer.numpy(), x[:, ::-1])
    words = buffer.__cuda_array_interface__
    assert (words["shape"], words["typestr"], words["data"]) == ((3, 4), "<f4", (buffer.pointer, False))
    with pytest.raises(InvalidInput, match=r"takes float32 \[3, 4\], got float64"):
        buffer.fill(x.astype(np.float64))
    assert len(fake.memory) == 1
    del buffer
    assert fake.memory == {}
    assert fake.current == []  # what was current before is again


def test_a_launch_hands_over_its_arguments_as_they_are_at_the_call(fake):
    gpu = open_gpu(0)
    x, out = Buffer.of(gpu, np.arange(5, dtype=np.int32)), Buffer(gpu, (5,), np.int32)
    launch = launch_of(gpu, x.pointer, out.pointer)
    launch(0)
    assert out.numpy().tolist() == [1, 2, 3, 4, 5]
    launch.arguments[3].value = 10
    launch(77)
    assert out.numpy().tolist() == [10, 11, 12, 13, 14]
    assert [each for each in fake.log if each[0] == "launch"] == [("launch", 0), ("launch", 77)]


def test_a_graph_keeps_the_arguments_that_it_was_made_with(fake):
    gpu = open_gpu(0)
    x, out = Buffer.of(gpu, np.arange(5, dtype=np.int32)), Buffer(gpu, (5,), np.int32)
    launch = launch_of(gpu, x.pointer, out.pointer)
    graph = Graph([launch])
    launch.arguments[3].value = 99
    graph(5)
    assert out.numpy().tolist() == [1, 2, 3, 4, 5]
    x.fill(np.full(5, 7, np.int32))  # the rows change, the graph reads them where they lie
    graph(5)
    assert out.numpy().tolist() == [8] * 5
    assert fake.log.count(("replay", 5)) == 2
    graph.close()
    assert fake.graphs == {}


def test_the_context_of_the_thread_is_set_only_when_it_has_to_be(fake):
    gpu = open_gpu(0)
    x, out = Buffer.of(gpu, np.arange(5, dtype=np.int32)), Buffer(gpu, (5,), np.int32)
    launch, calls = launch_of(gpu, x.pointer, out.pointer), []
    push = fake.cuCtxPushCurrent
    fake.cuCtxPushCurrent = lambda context: calls.append(context) or push(context)
    launch(0)
    assert calls == ["context 0"]  # the thread had none
    with driver.on(gpu):
        calls.clear()
        launch(0)
        assert calls == []
    fake.devices = 2  # another device may be current, which no error would tell
    gpu = open_gpu(0)
    launch = launch_of(gpu, x.pointer, out.pointer)
    with driver.on(gpu):
        calls.clear()
        launch(0)
        assert calls == ["context 0"]
    assert fake.current == []


def test_shared_memory_beyond_48_kib_is_asked_for(fake):
    gpu = open_gpu(0)
    launch_of(gpu, 0, 0, shared=48 << 10)
    assert fake.log == []
    launch_of(gpu, 0, 0, shared=200_000)
    assert fake.log == [("attribute", "shared", 200_000)]
    with pytest.raises(DeviceError, match="cannot give a block 300,000 bytes of shared memory"):
        launch_of(gpu, 0, 0, shared=300_000)


def test_code_that_cannot_be_loaded(fake):
    gpu = open_gpu(0)
    with pytest.raises(DeviceError, match="cannot load the kernel 'add'"):
        Kernel(gpu, b"nothing", "add")
    with pytest.raises(DeviceError, match="cannot find the kernel 'sub'"):
        Kernel(gpu, ELF, "sub")
    kernel = Kernel(gpu, ELF, "add")
    before = len(fake.modules)
    kernel.close()
    assert len(fake.modules) == before - 1


def test_rows_with_gaps_are_copied_side_by_side(fake):
    gpu = open_gpu(0)
    x = np.arange(40, dtype=np.uint8).reshape(4, 10)
    source, target = Buffer.of(gpu, x), Buffer(gpu, (4, 7), np.uint8)
    memory.copy_rows(gpu, target.pointer, source.pointer + 2, (4, 7), 10, 0)
    np.testing.assert_array_equal(target.numpy(), x[:, 2:9])


class Foreign:
    def __init__(self, **words):
        self.__cuda_array_interface__ = {"shape": (3, 4), "typestr": "<f4", "data": (640, False), "version": 3, **words}


def test_views_of_other_libraries():
    view = arrays.view_of(Foreign())
    assert (view.pointer, view.shape, view.dtype, view.strides, view.producer) == (640, (3, 4), "float32", (4, 1), None)
    view = arrays.view_of(Foreign(strides=(64, 4), stream=2))
    assert (view.strides, view.producer) == ((16, 1), 2)
    with pytest.raises(InvalidInput, match="mask"):
        arrays.view_of(Foreign(mask=Foreign()))


@pytest.mark.parametrize("x", [np.zeros((3, 4)), [1, 2], "rows"])
def test_what_is_not_on_a_device_is_refused(x):
    with pytest.raises(InvalidInput, match="must be on the runner's CUDA device"):
        arrays.view_of(x)


def test_host_tensors_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidInput, match="a tensor on cpu"):
        arrays.view_of(torch.zeros(3, 4))
