"""Kernels, their launches, and graphs of launches."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

from gigamlp.errors import DeviceError
from gigamlp.kernels.cuda.driver import Gpu, api, check, on, words

__all__ = ["Graph", "Kernel", "Launch"]

# CUDA_ERROR_INVALID_CONTEXT and _INVALID_HANDLE: the calling thread has no device, or another one, current. Making the
# right one current costs 0.5 us, so where there is one GPU only, that is done when a launch says so.
_NO_CONTEXT = (201, 400)
_no_context = _NO_CONTEXT[0]


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
        driver = api()
        self.gpu, self.name, self.shared_bytes = gpu, name, shared_bytes
        with on(gpu):
            module = check(driver.cuModuleLoadData(image), f"load the kernel {name!r}")
            self._unload = weakref.finalize(self, _unload, gpu, module)
            self._unload.atexit = False
            self.function = check(driver.cuModuleGetFunction(module, name.encode()), f"find the kernel {name!r}")
            if shared_bytes > 48 << 10:
                word = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(
                    driver.cuFuncSetAttribute(self.function, word, shared_bytes),
                    f"give a block {shared_bytes:,} bytes of shared memory",
                )

    def blocks_per_multiprocessor(self, threads: int) -> int:
        """Return how many blocks of `threads` threads run on a multiprocessor at once."""
        driver = api()
        with on(self.gpu):
            ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            return int(check(ask(self.function, threads, self.shared_bytes), "say its occupancy"))

    def clusters(self, threads: int, blocks: int) -> int:
        """Return how many clusters of `blocks` blocks of `threads` threads run on the device at once."""
        driver = api()
        shape = driver.CUlaunchAttribute()
        shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = blocks, 1, 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks * self.gpu.multiprocessors, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = self.shared_bytes, [shape], 1
        with on(self.gpu):
            return int(check(driver.cuOccupancyMaxActiveClusters(self.function, config), "say its occupancy"))

    def close(self) -> None:
        """Unload the code. Nothing may be running it."""
        self._unload()


def _unload(gpu: Gpu, module: Any) -> None:
    with on(gpu):
        api().cuModuleUnload(module)


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
        driver = api()
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
                raise DeviceError(f"the CUDA driver cannot launch the kernel {kernel.name!r}: {words(status)}")

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
        driver = api()
        gpu = launches[0].kernel.gpu
        self.gpu = gpu
        with on(gpu):
            stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "make a stream")
            try:
                # thread-local: what other threads do meanwhile is no business of this capture
                mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                check(driver.cuStreamBeginCapture(stream, mode), "begin to capture")
                try:
                    for launch in launches:
                        launch(int(stream))
                finally:
                    ended = driver.cuStreamEndCapture(stream)
                graph = check(ended, "end the capture")
                made = driver.cuGraphInstantiate(graph, 0)
                driver.cuGraphDestroy(graph)
                self._exec = check(made, "make the captured launches executable")
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
                raise DeviceError(f"the CUDA driver cannot replay a graph: {words(status)}")


def _destroy(gpu: Gpu, executable: Any) -> None:
    with on(gpu):
        api().cuGraphExecDestroy(executable)  # the driver keeps it until its launches are done
