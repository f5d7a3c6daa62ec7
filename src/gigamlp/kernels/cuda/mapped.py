"""Host memory that a GPU reads and writes by itself, and a stream of one's own."""

from __future__ import annotations

import math
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gigamlp.kernels.cuda import driver as cuda
from gigamlp.kernels.cuda.driver import Gpu, on

__all__ = ["Mapped", "open_stream"]

# of cuMemHostAlloc: for every context of the process, with an address on the device, written past the CPU's caches
_PORTABLE, _DEVICEMAP, _WRITECOMBINED = 1, 2, 4


class Mapped:
    """Page-locked host memory that kernels reach over the bus. ``array`` is it for NumPy, `pointer` for kernels.

    Parameters
    ----------
    gpu : Gpu
    shape : tuple of int
    dtype : dtype
    combined : bool
        Write-combined memory: the CPU's writes go past its caches, which the GPU then need not ask. Reading it from the
        CPU is slow.

    Raises
    ------
    DeviceError
        If there is no such memory.

    Notes
    -----
    It is freed when the object and all views of `array` are gone; whoever queues work on it finishes that work first.
    """

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: Any, *, combined: bool = False) -> None:
        driver, kind = cuda.api(), np.dtype(dtype)
        size = max(1, math.prod(shape) * kind.itemsize)
        flags = _PORTABLE | _DEVICEMAP | (_WRITECOMBINED if combined else 0)
        with on(gpu):
            host = cuda.check(driver.cuMemHostAlloc(size, flags), f"lock {size:,} bytes of host memory")
            self._free = weakref.finalize(self, _free, gpu, int(host), os.getpid())
            self._free.atexit = False
            self.pointer = int(cuda.check(driver.cuMemHostGetDevicePointer(host, 0), "map host memory"))
        self.__array_interface__ = {
            "shape": shape,
            "typestr": kind.str,
            "data": (int(host), False),
            "version": 3,
            "strides": None,
        }

    @property
    def array(self) -> NDArray[Any]:
        """The memory as an array; it keeps the memory alive."""
        return np.asarray(self)


def _free(gpu: Gpu, host: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has neither the memory nor the driver
        return
    with on(gpu):
        cuda.api().cuMemFreeHost(host)


def open_stream(owner: object, gpu: Gpu) -> int:
    """Return a new stream, a CUstream as a number, that waits for no other one; it is closed when `owner` is gone."""
    driver = cuda.api()
    with on(gpu):
        stream = cuda.check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "make a stream")
    weakref.finalize(owner, _close_stream, gpu, stream, os.getpid()).atexit = False
    return int(stream)


def _close_stream(gpu: Gpu, stream: Any, pid: int) -> None:
    if os.getpid() != pid:
        return
    with on(gpu):
        cuda.api().cuStreamSynchronize(stream)  # what it still does may use memory that goes with its owner
        cuda.api().cuStreamDestroy(stream)
