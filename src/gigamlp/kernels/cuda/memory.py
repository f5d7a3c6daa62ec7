"""Device memory: buffers, and copies into and out of them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.errors import InvalidInput
from gigamlp.kernels.cuda.driver import Gpu, api, check, on, synchronize

__all__ = ["Buffer", "copy", "copy_rows"]


def copy(gpu: Gpu, target: int, source: int, size: int, stream: int = 0) -> None:
    """Queue the copy of `size` bytes on `stream`; both pointers may be of the host or the device."""
    driver = api()
    with on(gpu):
        check(driver.cuMemcpyAsync(target, source, size, driver.CUstream(stream)), f"copy {size} bytes")


def copy_rows(  # noqa: PLR0917
    gpu: Gpu, target: int, source: int, shape: tuple[int, int], pitch: int, stream: int
) -> None:
    """Queue the copy of `shape` = (rows, bytes), rows `pitch` bytes apart at `source`, side by side to `target`."""
    rows, width = shape
    driver = api()
    kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    box = driver.CUDA_MEMCPY2D()
    box.srcMemoryType, box.srcDevice, box.srcPitch = kind, source, max(pitch, width)
    box.dstMemoryType, box.dstDevice, box.dstPitch = kind, target, width
    box.WidthInBytes, box.Height = width, rows
    with on(gpu):
        check(driver.cuMemcpy2DAsync(box, driver.CUstream(stream)), f"copy {rows:,} rows")


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
        driver = api()
        with on(gpu):
            pointer = check(driver.cuMemAlloc(max(self.nbytes, 1)), f"allocate {self.nbytes:,} bytes on the device")
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
        api().cuMemFree(pointer)  # waits for the work that uses it
