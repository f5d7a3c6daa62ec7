"""The CUDA driver: its calls, devices, and the order of work on streams. `memory` and `launch` stand on it.

Everything lives in a device's primary context, which torch, CuPy and the CUDA runtime use too, so that pointers and
streams are shared with them. That context is kept for the life of the process, as the CUDA runtime keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gigamlp.errors import DeviceError
from gigamlp.kernels.cuda.nvidia import nvidia

__all__ = ["Gpu", "api", "check", "driver_cuda", "on", "open_gpu", "synchronize", "wait_for", "words"]


def api() -> Any:
    """Return the driver's calls (cuda.bindings.driver)."""
    return nvidia("cuda.bindings.driver")


def check(result: Any, what: str) -> Any:
    """Return what a driver call gave besides its status, or raise."""
    status, *rest = result
    if int(status):
        raise DeviceError(f"the CUDA driver cannot {what}: {words(status)}")
    return rest[0] if len(rest) == 1 else tuple(rest)


def words(status: Any) -> str:
    """Return the name of a driver's status and what it means."""
    failed, text = api().cuGetErrorString(status)
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
        driver = api()
        check(driver.cuInit(0), "start")
        version = check(driver.cuDriverGetVersion(), "say its version")
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
    driver = api()
    count = check(driver.cuDeviceGetCount(), "count its devices")
    if not 0 <= index < count:
        raise DeviceError(f"there is no CUDA device {index}; the driver has {count}, numbered from 0")
    device = check(driver.cuDeviceGet(index), f"open device {index}")
    context = check(driver.cuDevicePrimaryCtxRetain(device), f"use device {index}")
    kinds = driver.CUdevice_attribute

    def ask(name: str) -> int:
        return int(check(driver.cuDeviceGetAttribute(getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device), name))

    name = check(driver.cuDeviceGetName(256, device), "name its device")
    return Gpu(
        index=index,
        name=name.split(b"\0")[0].decode(errors="replace").strip(),
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
    driver = api()
    check(driver.cuCtxPushCurrent(gpu.context), f"make device {gpu.index} current")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def synchronize(gpu: Gpu, stream: int | None = None) -> None:
    """Return when the work on `stream` is done, or without one all work on `gpu`."""
    driver = api()
    with on(gpu):
        if stream is None:
            check(driver.cuCtxSynchronize(), "finish its work")
        else:
            check(driver.cuStreamSynchronize(driver.CUstream(stream)), "finish its work")


def wait_for(gpu: Gpu, stream: int, producer: int) -> None:
    """Let `stream` wait for what is queued on the stream `producer` now. The host waits for nothing."""
    driver = api()
    with on(gpu):
        flag = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        event = check(driver.cuEventCreate(flag), "make an event")
        try:
            check(driver.cuEventRecord(event, driver.CUstream(producer)), "record an event")
            check(driver.cuStreamWaitEvent(driver.CUstream(stream), event, 0), "wait for an event")
        finally:
            driver.cuEventDestroy(event)  # the driver keeps it until the wait is over
