"""A CUDA driver of host memory: the calls that gigamlp makes, with their rules, and kernels that are Python functions.

It refuses what the driver refuses: work without a current context, memory that was freed, a launch while unloaded.
"""

# ruff: noqa: N802  the names are the driver's

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np


class Status(IntEnum):
    OK = 0
    INVALID_VALUE = 1
    INVALID_CONTEXT = 201


OK = (Status.OK,)

# a kernel takes the raw addresses of its arguments, its grid, block and shared bytes
FakeKernel = Callable[[list[int], int, int, int], None]


class _Attributes:
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 9
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 0
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 132
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 232448
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 233472
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 60 << 20


class _Config(ctypes.Structure):
    """CUlaunchConfig, as the driver's header has it."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_LaunchEx = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class FakeDriver:
    CUresult = Status
    CUdevice_attribute = _Attributes
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread_local")
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE="device")
    CUstream = int
    CUDA_MEMCPY2D = SimpleNamespace

    def __init__(self, kernels: dict[str, FakeKernel] | None = None, devices: int = 1, version: int = 13000) -> None:
        self.kernels = kernels or {}
        self.devices, self.version = devices, version
        self.current: list[str] = []
        self.memory: dict[int, Any] = {}
        self.modules: set[int] = set()
        self.graphs: dict[int, list[Any]] = {}
        self.capturing: dict[int, list[Any]] = {}
        self.log: list[tuple[Any, ...]] = []
        self.copies: list[Any] = []  # of arguments that are whole rows
        self.functions: dict[int, tuple[int, str]] = {}
        self.host: dict[int, Any] = {}
        self.flags: list[int] = []
        self.late: list[Any] | None = None  # a list: kernels wait in it until their stream is synchronised
        self.broken: Any = None  # what a synchronise says from now on
        self._launch_ex = _LaunchEx(self.launch_ex)
        self._numbers = itertools.count(1000)

    # ---- device ---------------------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> Any:
        return OK

    def cuDriverGetVersion(self) -> Any:
        return (Status.OK, self.version)

    def cuGetErrorString(self, status: Any) -> Any:
        return (Status.OK, f"fake error {int(status)}".encode())

    def cuDeviceGetCount(self) -> Any:
        return (Status.OK, self.devices)

    def cuDeviceGet(self, index: int) -> Any:
        return (Status.OK, index)

    def cuDeviceGetName(self, size: int, device: int) -> Any:
        return (Status.OK, b"Fake H200\0\0")

    def cuDeviceGetAttribute(self, value: int, device: int) -> Any:
        return (Status.OK, value)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return (Status.OK, f"context {device}")

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.current.append(context)
        return OK

    def cuCtxPopCurrent(self) -> Any:
        return (Status.OK, self.current.pop())

    def _bad(self) -> bool:
        return not self.current

    def cuCtxSynchronize(self) -> Any:
        self.log.append(("synchronize",))
        return (Status.INVALID_CONTEXT,) if self._bad() else OK

    def cuStreamSynchronize(self, stream: int) -> Any:
        self.log.append(("synchronize", stream))
        for kernel, values, gx, bx, shared in self.late or ():
            kernel(values, gx, bx, shared)
        if self.late:
            self.late.clear()
        if self.broken:
            return (self.broken,)
        return (Status.INVALID_CONTEXT,) if self._bad() else OK

    # ---- memory ---------------------------------------------------------------------------------------------------

    def cuMemAlloc(self, size: int) -> Any:
        if self._bad():
            return (Status.INVALID_CONTEXT, 0)
        raw = np.full(size + 256, 0xA5, np.uint8)  # never zeros: what was not written must show
        address = -(-raw.ctypes.data // 256) * 256
        self.memory[address] = raw
        return (Status.OK, address)

    def cuMemFree(self, address: int) -> Any:
        self.memory.pop(address).fill(0xDD)
        return OK

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:
        if self._bad():
            return (Status.INVALID_CONTEXT, 0)
        raw = np.full(size + 4096, 0xA5, np.uint8)
        address = -(-raw.ctypes.data // 4096) * 4096
        self.host[address] = raw
        self.flags.append(flags)
        return (Status.OK, address)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        return (Status.OK, address) if address in self.host else (Status.INVALID_VALUE, 0)

    def cuMemFreeHost(self, address: int) -> Any:
        self.host.pop(address).fill(0xDD)
        return OK

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: int) -> Any:
        if self._bad():
            return (Status.INVALID_CONTEXT,)
        ctypes.memmove(target, source, size)
        return OK

    def cuMemcpy2DAsync(self, box: Any, stream: int) -> Any:
        for row in range(box.Height):
            ctypes.memmove(box.dstDevice + row * box.dstPitch, box.srcDevice + row * box.srcPitch, box.WidthInBytes)
        self.log.append(("copy rows", box.Height))
        return OK

    # ---- code -----------------------------------------------------------------------------------------------------

    def cuModuleLoadData(self, image: bytes) -> Any:
        if self._bad() or image[:4] != b"\x7fELF":
            return (Status.INVALID_VALUE, 0)
        number = next(self._numbers)
        self.modules.add(number)
        return (Status.OK, number)

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        if name.decode() not in self.kernels:
            return (Status.INVALID_VALUE, 0)
        number = next(self._numbers)
        self.functions[number] = (module, name.decode())
        return (Status.OK, number)

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> Any:
        if symbol != b"cuLaunchKernelEx" or version > self.version:
            return (Status.OK, 0, 1)
        return (Status.OK, ctypes.cast(self._launch_ex, ctypes.c_void_p).value, 0)

    def launch_ex(self, config: int, function: int, table: int, extra: int) -> int:
        c = _Config.from_address(config)
        if c.count:  # the one attribute that gigamlp has
            number, _, value = (ctypes.c_uint * 3).from_address(c.attributes)
            assert (c.count, number, value) == (1, 6, 1)
            self.log.append(("overlap", c.stream or 0))
        sizes = (c.gx, c.gy, c.gz, c.bx, c.by, c.bz, c.shared)
        return int(self.cuLaunchKernel(function, *sizes, c.stream or 0, table, extra)[0])

    def cuModuleUnload(self, module: int) -> Any:
        self.modules.remove(module)
        return OK

    def cuFuncSetAttribute(self, function: Any, word: Any, value: int) -> Any:
        self.log.append(("attribute", word, value))
        return OK if value <= 232448 else (Status.INVALID_VALUE,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, threads: int, shared: int) -> Any:
        return (Status.OK, min(2048 // threads, 233472 // max(shared, 1)))

    def cuLaunchKernel(
        self, function: Any, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int, table: int, extra: int,
    ) -> Any:  # fmt: skip
        if self._bad():
            return (Status.INVALID_CONTEXT,)
        module, name = self.functions[function]
        assert module in self.modules, "the code was unloaded"
        assert (gy, gz, by, bz) == (1, 1, 1, 1)
        assert gx >= 1
        assert 1 <= bx <= 1024
        kernel = self.kernels[name]
        count = kernel.arguments  # type: ignore[attr-defined]
        slots = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p * count)).contents
        values = [ctypes.cast(slots[i], ctypes.POINTER(ctypes.c_longlong)).contents.value for i in range(count)]
        size = getattr(kernel, "carried", 0)  # bytes of a last argument, which the driver copies now
        if size:
            copy = ctypes.create_string_buffer(ctypes.string_at(slots[count - 1], size), size)
            self.copies.append(copy)
            values[-1] = ctypes.addressof(copy)
        if stream in self.capturing:
            self.capturing[stream].append((kernel, values, gx, bx, shared))
        else:
            self.log.append(("launch", stream))
            if self.late is None:
                kernel(values, gx, bx, shared)
            else:
                self.late.append((kernel, values, gx, bx, shared))
        return OK

    # ---- streams and graphs ---------------------------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> Any:
        return (Status.OK, next(self._numbers))

    def cuStreamDestroy(self, stream: int) -> Any:
        assert stream not in self.capturing
        return OK

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        self.capturing[stream] = []
        return OK

    def cuStreamEndCapture(self, stream: int) -> Any:
        return (Status.OK, self.capturing.pop(stream))

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        number = next(self._numbers)
        self.graphs[number] = list(graph)
        return (Status.OK, number)

    def cuGraphDestroy(self, graph: Any) -> Any:
        return OK

    def cuGraphExecDestroy(self, number: int) -> Any:
        del self.graphs[number]
        return OK

    def cuGraphLaunch(self, number: int, stream: int) -> Any:
        if self._bad():
            return (Status.INVALID_CONTEXT,)
        self.log.append(("replay", stream))
        for kernel, values, gx, bx, shared in self.graphs[number]:
            kernel(values, gx, bx, shared)
        return OK

    def cuEventCreate(self, flags: int) -> Any:
        return (Status.OK, next(self._numbers))

    def cuEventRecord(self, event: int, stream: int) -> Any:
        self.log.append(("record", stream))
        return OK

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        self.log.append(("wait", stream))
        return OK

    def cuEventDestroy(self, event: int) -> Any:
        return OK


def at(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array at an address of the fake device."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
