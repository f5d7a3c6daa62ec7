"""The CUDA driver, as far as launching one kernel needs it: devices, code, memory, launches and their graphs.

Everything lives in a device's primary context, which torch, CuPy and the CUDA runtime use too, so that pointers and
streams are shared with them. That context is kept for the life of the process, as the CUDA runtime keeps it.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import DeviceError, InvalidInput

__all__ = [
    "Buffer",
    "Gpu",
    "Graph",
    "Kernel",
    "Launch",
    "copy",
    "driver_cuda",
    "on",
    "open_gpu",
    "synchronize",
    "wait_for",
]

# CUDA_ERROR_INVALID_CONTEXT and _INVALID_HANDLE: the calling thread has no device, or another one, current. Making the
# right one current costs 0.5 us, so where there is one GPU only, that is done when a launch says so.
_NO_CONTEXT = (201, 400)
_no_context = _NO_CONTEXT[0]


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _check(result: Any, what: str) -> Any:
    """Return what a driver call gave besides its status, or raise."""
    status, *rest = result
    if int(status):
        raise DeviceError(f"the CUDA driver cannot {what}: {_words(status)}")
    return rest[0] if len(rest) == 1 else tuple(rest)


def _words(status: Any) -> str:
    failed, text = _driver().cuGetErrorString(status)
    spoken = text.decode() if not int(failed) and text else "unknown error"
    return f"{getattr(status, 'name', status)} ({spoken})"


def driver_cuda() -> tuple[int, int]:
    """Return the newest CUDA version that the installed driver knows.

    Raises
    ------
    DeviceError
        If there is no driver, or no usable one.
    """
    try:
        driver = _driver()
        _check(driver.cuInit(0), "start")
        version = _check(driver.cuDriverGetVersion(), "say its version")
    except (ImportError, RuntimeError, OSError) as error:  # cuda-pathfinder's "not found" is a RuntimeError
        if isinstance(error, DeviceError):
            raise
        lines = str(error).strip().splitlines()
        raise DeviceError(f"no NVIDIA driver can be loaded ({lines[0] if lines else type(error).__name__})") from error
    return version // 1000, version % 1000 // 10


@dataclass(frozen=True)
class Gpu:
    """A CUDA device and its primary context.

    Attributes
    ----------
    index : int
    name : str
    capability : (major, minor)
    multiprocessors : int
    shared_bytes : int
        Shared memory that one block may have, at most.
    shared_per_multiprocessor : int
    cache_bytes : int
        Size of the L2 cache.
    alone : bool
        Whether it is the only one: then no thread can have another one current.
    """

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    shared_per_multiprocessor: int
    cache_bytes: int
    alone: bool
    context: Any = field(repr=False, compare=False)


def open_gpu(index: int) -> Gpu:
    """Return CUDA device `index`.

    Raises
    ------
    DeviceError
        If there is no driver or no such device.
    """
    driver_cuda()
    driver = _driver()
    count = _check(driver.cuDeviceGetCount(), "count its devices")
    if not 0 <= index < count:
        raise DeviceError(f"there is no CUDA device {index}; the driver has {count}, numbered from 0")
    device = _check(driver.cuDeviceGet(index), f"open device {index}")
    context = _check(driver.cuDevicePrimaryCtxRetain(device), f"use device {index}")
    words = driver.CUdevice_attribute

    def ask(name: str) -> int:
        return int(_check(driver.cuDeviceGetAttribute(getattr(words, f"CU_DEVICE_ATTRIBUTE_{name}"), device), name))

    name = _check(driver.cuDeviceGetName(256, device), "name its device")
    return Gpu(
        index=index,
        name=name.decode(errors="replace").rstrip("\0"),
        capability=(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=ask("MULTIPROCESSOR_COUNT"),
        shared_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_multiprocessor=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        cache_bytes=ask("L2_CACHE_SIZE"),
        alone=count == 1,
        context=context,
    )


@contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """Make `gpu` the calling thread's device inside the block; what was current before is again afterwards."""
    driver = _driver()
    _check(driver.cuCtxPushCurrent(gpu.context), f"make device {gpu.index} current")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def synchronize(gpu: Gpu, stream: int | None = None) -> None:
    """Return when the work on `stream` is done, or without one all work on `gpu`."""
    driver = _driver()
    with on(gpu):
        if stream is None:
            _check(driver.cuCtxSynchronize(), "finish its work")
        else:
            _check(driver.cuStreamSynchronize(driver.CUstream(stream)), "finish its work")


def wait_for(gpu: Gpu, stream: int, producer: int) -> None:
    """Let `stream` wait for what is queued on the stream `producer` now. The host waits for nothing."""
    driver = _driver()
    with on(gpu):
        flag = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        event = _check(driver.cuEventCreate(flag), "make an event")
        try:
            _check(driver.cuEventRecord(event, driver.CUstream(producer)), "record an event")
            _check(driver.cuStreamWaitEvent(driver.CUstream(stream), event, 0), "wait for an event")
        finally:
            driver.cuEventDestroy(event)  # the driver keeps it until the wait is over


def copy(gpu: Gpu, target: int, source: int, size: int, stream: int = 0) -> None:
    """Queue the copy of `size` bytes on `stream`; both pointers may be of the host or the device."""
    driver = _driver()
    with on(gpu):
        _check(driver.cuMemcpyAsync(target, source, size, driver.CUstream(stream)), f"copy {size} bytes")


def copy_rows(  # noqa: PLR0917
    gpu: Gpu, target: int, source: int, shape: tuple[int, int], pitch: int, stream: int
) -> None:
    """Queue the copy of `shape` = (rows, bytes), rows `pitch` bytes apart at `source`, side by side to `target`."""
    rows, width = shape
    driver = _driver()
    kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    box = driver.CUDA_MEMCPY2D()
    box.srcMemoryType, box.srcDevice, box.srcPitch = kind, source, max(pitch, width)
    box.dstMemoryType, box.dstDevice, box.dstPitch = kind, target, width
    box.WidthInBytes, box.Height = width, rows
    with on(gpu):
        _check(driver.cuMemcpy2DAsync(box, driver.CUstream(stream)), f"copy {rows:,} rows")


class Buffer:
    """An array in device memory for those who have no torch: `numpy` copies it out, and CuPy, torch and Numba read it.

    Parameters
    ----------
    gpu : Gpu
    shape : tuple of int
    dtype : dtype
    """

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: Any) -> None:
        self.gpu, self.shape, self.dtype = gpu, shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        driver = _driver()
        with on(gpu):
            pointer = _check(driver.cuMemAlloc(max(self.nbytes, 1)), f"allocate {self.nbytes:,} bytes on the device")
        self.pointer = int(pointer)
        self.close = weakref.finalize(self, _free, gpu, pointer)
        self.close.atexit = False  # the process's end frees it, and the driver may be gone by then

    @classmethod
    def of(cls, gpu: Gpu, array: NDArray[Any]) -> Buffer:
        """Return a copy of `array` on `gpu`."""
        made = cls(gpu, array.shape, array.dtype)
        made.fill(array)
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The buffer in the words that CuPy, torch and Numba read (interface version 3)."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def fill(self, array: NDArray[Any], stream: int = 0) -> None:
        """Copy `array`, of the buffer's shape and dtype, into it. On return it is there."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise InvalidInput(f"the buffer takes {self.dtype} {list(self.shape)}, got {array.dtype} {array.shape}")
        kept = np.ascontiguousarray(array)
        if self.nbytes:
            copy(self.gpu, self.pointer, kept.ctypes.data, self.nbytes, stream)
            synchronize(self.gpu, stream)

    def numpy(self, stream: int = 0) -> NDArray[Any]:
        """Return a copy in host memory, of what the work queued on `stream` leaves in the buffer."""
        out = np.empty(self.shape, self.dtype)
        if self.nbytes:
            copy(self.gpu, out.ctypes.data, self.pointer, self.nbytes, stream)
            synchronize(self.gpu, stream)
        return out


def _free(gpu: Gpu, pointer: Any) -> None:
    with on(gpu):
        _driver().cuMemFree(pointer)  # waits for the work that uses it


class Kernel:
    """A kernel loaded on a device.

    Parameters
    ----------
    gpu : Gpu
    image : bytes
        A cubin for the device.
    name : str
        The kernel's name in it.
    shared_bytes : int
        Dynamic shared memory that a block takes.

    Raises
    ------
    DeviceError
        If the driver cannot load it, or a block cannot have that much shared memory.
    """

    def __init__(self, gpu: Gpu, image: bytes, name: str, shared_bytes: int = 0) -> None:
        driver = _driver()
        self.gpu, self.name, self.shared_bytes = gpu, name, shared_bytes
        with on(gpu):
            module = _check(driver.cuModuleLoadData(image), f"load the kernel {name!r}")
            self._unload = weakref.finalize(self, _unload, gpu, module)
            self._unload.atexit = False
            self.function = _check(driver.cuModuleGetFunction(module, name.encode()), f"find the kernel {name!r}")
            if shared_bytes > 48 << 10:
                word = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(
                    driver.cuFuncSetAttribute(self.function, word, shared_bytes),
                    f"give a block {shared_bytes:,} bytes of shared memory",
                )

    def blocks_per_multiprocessor(self, threads: int) -> int:
        """Return how many blocks of `threads` threads run on a multiprocessor at once."""
        driver = _driver()
        with on(self.gpu):
            ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            return int(_check(ask(self.function, threads, self.shared_bytes), "say its occupancy"))

    def close(self) -> None:
        """Unload the code. Nothing may be running it."""
        self._unload()


def _unload(gpu: Gpu, module: Any) -> None:
    with on(gpu):
        _driver().cuModuleUnload(module)


class Launch:
    """A kernel with its grid and its arguments: calling it queues one launch.

    A call costs one driver call; the arguments lie in memory that the driver reads during the call.

    Parameters
    ----------
    kernel : Kernel
    grid, block : int
        Blocks, and threads of a block.
    arguments : sequence of ctypes values
        In the kernel's order and of its types.
    """

    def __init__(self, kernel: Kernel, grid: int, block: int, arguments: Sequence[Any]) -> None:
        driver = _driver()
        self.kernel, self.grid, self.block = kernel, grid, block
        self.arguments = tuple(arguments)
        self._pointers = (ctypes.c_void_p * len(self.arguments))(*(ctypes.addressof(each) for each in self.arguments))
        self._table = ctypes.addressof(self._pointers)
        self._call, self._stream_type = driver.cuLaunchKernel, driver.CUstream
        self._stream, self._handle = 0, driver.CUstream(0)

    def __call__(self, stream: int) -> None:
        """Queue the kernel on `stream`, a CUstream as a number."""
        if stream != self._stream:
            self._stream, self._handle = stream, self._stream_type(stream)
        kernel = self.kernel
        status = self._queue(kernel) if kernel.gpu.alone else _no_context
        if status:
            if int(status) in _NO_CONTEXT:
                with on(kernel.gpu):
                    status = self._queue(kernel)
            if status:
                raise DeviceError(f"the CUDA driver cannot launch the kernel {kernel.name!r}: {_words(status)}")

    def _queue(self, kernel: Kernel) -> Any:
        return self._call(
            kernel.function,
            self.grid,
            1,
            1,
            self.block,
            1,
            1,
            kernel.shared_bytes,
            self._handle,
            self._table,
            0,
        )[0]


class Graph:
    """Launches, captured once: calling it replays them with one driver call.

    The arguments that the launches have now stay in the graph, whatever they are given later.

    Parameters
    ----------
    launches : sequence of Launch or QuickLaunch
        All of one device, at least one.
    """

    def __init__(self, launches: Sequence[Any]) -> None:
        driver = _driver()
        gpu = launches[0].kernel.gpu
        self.gpu = gpu
        with on(gpu):
            stream = _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "make a stream")
            try:
                # thread-local: what other threads do meanwhile is no business of this capture
                mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                _check(driver.cuStreamBeginCapture(stream, mode), "begin to capture")
                try:
                    for launch in launches:
                        launch(int(stream))
                finally:
                    ended = driver.cuStreamEndCapture(stream)
                graph = _check(ended, "end the capture")
                made = driver.cuGraphInstantiate(graph, 0)
                driver.cuGraphDestroy(graph)
                self._exec = _check(made, "make the captured launches executable")
            finally:
                driver.cuStreamDestroy(stream)
        self.close = weakref.finalize(self, _destroy, gpu, self._exec)
        self.close.atexit = False
        self._call, self._stream_type = driver.cuGraphLaunch, driver.CUstream
        self._stream, self._handle = 0, driver.CUstream(0)

    def __call__(self, stream: int) -> None:
        """Queue the launches on `stream`, a CUstream as a number."""
        if stream != self._stream:
            self._stream, self._handle = stream, self._stream_type(stream)
        status = self._call(self._exec, self._handle)[0] if self.gpu.alone else _no_context
        if status:
            if int(status) in _NO_CONTEXT:
                with on(self.gpu):
                    status = self._call(self._exec, self._handle)[0]
            if status:
                raise DeviceError(f"the CUDA driver cannot replay a graph: {_words(status)}")


def _destroy(gpu: Gpu, executable: Any) -> None:
    with on(gpu):
        _driver().cuGraphExecDestroy(executable)  # the driver keeps it until its launches are done
