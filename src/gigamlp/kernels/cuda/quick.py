"""Launches by the driver's own function, without cuda-bindings in between: for calls that are all launch cost.

``cuLaunchKernelEx`` takes four arguments, all prepared beforehand, and the attributes that ``cuLaunchKernel`` lacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gigamlp.errors import DeviceError
from gigamlp.kernels.cuda import driver as cuda
from gigamlp.kernels.cuda.driver import on
from gigamlp.kernels.cuda.launch import Kernel

__all__ = ["QuickLaunch", "entry"]

_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NO_CONTEXT = (201, 400)  # see driver.py


class _Attribute(ctypes.Structure):
    """The C type CUlaunchAttribute: a number, padding, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """The C type CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def entry(name: str, cuda_version: int, *, hold: bool = False) -> Any:
    """Return the driver's function `name` as of `cuda_version` (``12000`` is 12.0), which returns its status.

    Its arguments must be ctypes values: their types are not looked at, which saves a tenth of a microsecond.

    Parameters
    ----------
    name : str
    cuda_version : int
    hold : bool
        Keep Python's lock during calls. That is quicker, but a call that waits then stops every thread.

    Raises
    ------
    DeviceError
        If the driver has no such function.
    """
    driver = cuda.api()
    # A driver that does not have it says so in its status, or gives no address
    status, address, *_ = driver.cuGetProcAddress(name.encode(), cuda_version, 0)
    if int(status) or not int(address):
        raise DeviceError(f"the CUDA driver has no {name}; update the driver")
    make = ctypes.PYFUNCTYPE if hold else ctypes.CFUNCTYPE
    return make(ctypes.c_int)(int(address))


class QuickLaunch:
    """A kernel with its grid and its arguments, as `Launch`; a call costs about the driver's own time.

    Parameters
    ----------
    kernel : Kernel
    grid, block : int
    arguments : sequence of ctypes values
        In the kernel's order and of its types. They may change between calls.
    overlap : bool
        Whether the launch may begin before the one before it in the stream has ended (9.0 and later). The kernel must
        then wait by itself.
    hold : bool
        See `entry`.

    Raises
    ------
    DeviceError
        If the driver is older than CUDA 11.8.
    """

    def __init__(  # noqa: PLR0917
        self,
        kernel: Kernel,
        grid: int,
        block: int,
        arguments: Sequence[Any],
        overlap: bool = False,
        hold: bool = False,
    ) -> None:
        self.kernel, self.grid, self.block = kernel, grid, block
        self.arguments = tuple(arguments)
        self._pointers = (ctypes.c_void_p * len(self.arguments))(*(ctypes.addressof(each) for each in self.arguments))
        self._attribute = _Attribute(_STREAM_SERIALIZATION, 0, (1,))
        self.config = config = _Config((grid, 1, 1), (block, 1, 1), kernel.shared_bytes)
        if overlap:
            config.attributes, config.count = ctypes.addressof(self._attribute), 1
        addresses = (ctypes.addressof(config), int(kernel.function), ctypes.addressof(self._pointers), 0)
        self._go = partial(entry("cuLaunchKernelEx", 11080, hold=hold), *(ctypes.c_void_p(each) for each in addresses))
        self._stream = 0

    def resize(self, grid: int) -> None:
        """Launch `grid` blocks from now on."""
        self.grid = self.config.grid[0] = grid

    def bound(self, stream: int) -> Callable[[], int]:
        """Return what queues the kernel on `stream`, not 0, and returns the driver's status: `failed` is for that."""
        self._stream = self.config.stream = stream
        return self._go

    def __call__(self, stream: int) -> None:
        """Queue the kernel on `stream`, a CUstream as a number.

        Raises
        ------
        DeviceError
            If the driver refuses.
        """
        if stream != self._stream:
            self._stream = self.config.stream = stream
        gpu = self.kernel.gpu
        # another device may be current in this thread, which for stream 0 no error would tell
        status = self._go() if gpu.alone or stream else 201
        if status:
            self.failed(status)

    def failed(self, status: int) -> None:
        """Try again with the device current, if the lack of that is the trouble; else raise `DeviceError`."""
        if status in _NO_CONTEXT:
            with on(self.kernel.gpu):
                status = self._go()
        if status:
            words = cuda.words(cuda.api().CUresult(status))
            raise DeviceError(f"the CUDA driver cannot launch the kernel {self.kernel.name!r}: {words}")
