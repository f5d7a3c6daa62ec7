"""Measure a device's limits with torch: memory bandwidth, matrix rates, and the link between host and device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.measure.clock import Clock, clock_for
from gigamlp.measure.cpuinfo import last_level_bytes
from gigamlp.measure.roofline import Roofs, best_roof, roof
from gigamlp.measure.telemetry import resolve_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["measure_roofs"]

Work = Callable[[], object]

MIB = 1 << 20
GIB = 1 << 30
_CPU_BUFFER = 512 * MIB  # more than ten times the largest last-level cache of a desktop; filling it takes 0.4 s
_CUDA_BUFFER = 4 * GIB  # 80 times the L2 of an H200, and 1 ms of its bandwidth
_LINK_BUFFER = 256 * MIB
_BACK_TO_BACK = 8  # calls between two CUDA events, so that the gap before the first one does not count


def measure_roofs(device: str = "auto", *, budget_s: float | None = None) -> Roofs:
    """Measure what a device can move and multiply per second.

    Reading counts the best of several reductions over a buffer far larger than the caches; copying counts bytes read
    plus bytes written; matrix rates are those of large square products by torch. A dtype gets a rate only if that is
    at least the rate of float32: a lower one shows a library without that path, not a limit of the hardware.

    Parameters
    ----------
    device : str
        ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
    budget_s : float, optional
        Seconds to spend, roughly; 2 on a CPU and 3 on a GPU if not given. Filling the buffers comes on top.

    Returns
    -------
    Roofs

    Raises
    ------
    DeviceError
        If torch is not installed, or the device cannot be used or has too little free memory.
    InvalidInput
        If the budget is not positive.
    """
    place = resolve_device(device)
    budget = (2.0 if place == "cpu" else 3.0) if budget_s is None else budget_s
    if not budget > 0:
        raise InvalidInput(f"budget_s must be positive, got {budget_s}")
    try:
        import torch
    except ImportError as error:
        raise DeviceError("roofs are measured with torch, which is not installed; install gigamlp[torch]") from error
    with torch.inference_mode():
        return _cpu_roofs(clock_for(place), budget) if place == "cpu" else _cuda_roofs(place, clock_for(place), budget)


# ---- CPU ------------------------------------------------------------------------------------------------------------


def _cpu_roofs(clock: Clock, budget_s: float) -> Roofs:
    part = budget_s / 8
    read, copied = _cpu_memory(clock, part)
    sizes = (512, 1024, 1536)
    # float16 is left out: torch multiplies it on a CPU without a fast path, minutes for what float32 does in 0.1 s
    rates = {
        "float32": _matrix_rate("float32", "cpu", sizes, clock, part * 2),
        "bfloat16": _matrix_rate("bfloat16", "cpu", sizes, clock, part),
        "int8": _matrix_rate("int8", "cpu", sizes, clock, part),
    }
    return Roofs(
        read_bytes_s=max(read, copied),
        copy_bytes_s=copied,
        macs_s=_credible(rates),
        cache_bytes=last_level_bytes() or 0,
    )


def _cpu_memory(clock: Clock, budget_s: float) -> tuple[float, float]:
    """Return bytes/s of reading and of copying memory."""
    import torch

    x = torch.ones(_CPU_BUFFER // 4)
    half = len(x) // 2
    rows, vector = x.view(-1, 4096), torch.ones(4096)
    ways: list[Work] = [x.sum, x.view(torch.float64).sum, lambda: torch.mv(rows, vector)]
    read = best_roof(ways, clock, _CPU_BUFFER, budget_s=budget_s)
    return read, roof(_copy(x[:half], x[half:]), clock, _CPU_BUFFER, budget_s=budget_s)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


def _cuda_roofs(device: str, clock: Clock, budget_s: float) -> Roofs:
    import torch

    part = budget_s / 20
    with torch.cuda.device(device), _cache_emptied():
        read, copied = _cuda_memory(device, clock, part)
        sizes = (1024, 4096, 8192)
        with _exact_float32():
            rates = {
                dtype: _matrix_rate(dtype, device, sizes, clock, part * 2)
                for dtype in ("float32", "float16", "bfloat16", "int8")
            }
        link = _link_rates(device, clock, part)
        l2 = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return Roofs(read_bytes_s=max(read, copied), copy_bytes_s=copied, macs_s=_credible(rates), cache_bytes=l2, **link)


def _cuda_memory(device: str, clock: Clock, budget_s: float) -> tuple[float, float]:
    """Return bytes/s of reading and of copying device memory."""
    import torch

    size = _buffer_bytes(device)
    x = torch.ones(size // 4, device=device)
    half = len(x) // 2
    read = best_roof(_cuda_reads(x), clock, size * _BACK_TO_BACK, budget_s=budget_s)
    copied = roof(_times(_copy(x[:half], x[half:])), clock, size * _BACK_TO_BACK, budget_s=budget_s)
    return read, copied


def _buffer_bytes(device: str) -> int:
    """Return the size of the buffer to read: a power of two, at most a quarter of the free memory."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    size = min(_CUDA_BUFFER, 1 << int(math.log2(max(free // 4, 1))))
    if size < 64 * MIB:
        raise DeviceError(f"{device} has {free // MIB} MiB free; roofs need 256 MiB: close what else uses the GPU")
    return size


def _cuda_reads(x: torch.Tensor) -> list[Work]:
    """Return several ways to read all of `x`, ``_BACK_TO_BACK`` times each; which is quickest differs between GPUs."""
    import torch

    ints = x.view(torch.int32)
    rows, int_rows = x.view(-1, 1 << 16), ints.view(-1, 1 << 16)
    doubles = x.view(torch.float64)
    halves = x.view(torch.float16).view(-1, 1 << 16)
    short = torch.ones(4096, device=x.device)
    tall = x.view(-1, 4096)
    ways: list[Work] = [
        x.sum,
        ints.amax,
        doubles.sum,
        lambda: rows.sum(1),
        lambda: int_rows.amax(1),
        lambda: halves.amax(1),
        lambda: torch.mv(tall, short),
    ]
    return [_times(way) for way in ways]


def _times(work: Work, count: int = _BACK_TO_BACK) -> Work:
    def several() -> None:
        for _ in range(count):
            work()

    return several


def _link_rates(device: str, clock: Clock, budget_s: float) -> dict[str, float]:
    """Measure bytes/s between host and device, from and to page-locked and ordinary memory."""
    import torch

    there = torch.ones(_LINK_BUFFER, dtype=torch.uint8, device=device)
    out = {}
    for kind in ("pinned", "pageable"):
        here = torch.ones(_LINK_BUFFER, dtype=torch.uint8, pin_memory=kind == "pinned")
        out[f"h2d_{kind}_bytes_s"] = roof(_copy(there, here), clock, _LINK_BUFFER, budget_s=budget_s)
        out[f"d2h_{kind}_bytes_s"] = roof(_copy(here, there), clock, _LINK_BUFFER, budget_s=budget_s)
    return out


def _copy(target: torch.Tensor, source: torch.Tensor) -> Work:
    return lambda: target.copy_(source, non_blocking=True)


@contextmanager
def _cache_emptied() -> Iterator[None]:
    """Give the gigabytes that were measured with back to the driver."""
    import torch

    try:
        yield
    finally:
        torch.cuda.empty_cache()


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Switch TF32 off, as float32 means float32 here; restore what was set."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- matrix rates ---------------------------------------------------------------------------------------------------


def _matrix_rate(dtype: str, device: str, sizes: Iterable[int], clock: Clock, budget_s: float) -> float | None:
    """Return MACs/s of the best square product, or None if torch cannot do it here.

    Sizes rise; one that would break the budget, by the rate so far, is not tried.
    """
    best = 0.0
    for size in sizes:
        macs = size**3
        if best and 4 * macs / best > 2 * budget_s:
            break
        work = _product(dtype, device, size)
        try:
            best = max(best, roof(work, clock, macs, budget_s=budget_s / 3, repeats=200))
        except RuntimeError as error:
            # int8 products exist for some devices and builds only; every other dtype must work
            if dtype != "int8" or "out of memory" in str(error):
                raise
            return None
    return best or None


def _product(dtype: str, device: str, size: int) -> Work:
    """Return a callable that multiplies two square matrices of random numbers (zeros would draw less power)."""
    import torch

    # a draw of this odd length, repeated: drawing all of 2 x 8192 x 8192 would take longer than the measurement
    draw = np.resize(np.random.default_rng(0).integers(-8, 9, 1_000_003, dtype=np.int8), (2, size, size))
    if dtype == "int8":
        a, b = (torch.from_numpy(part).to(device) for part in draw)
        int_mm: Any = torch._int_mm
        second = b if device == "cpu" else b.t()  # cuBLASLt wants it column-major, oneDNN row-major
        return lambda: int_mm(a, second)
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    left, right = (torch.from_numpy(part).to(device).to(kind) / 8 for part in draw)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _credible(rates: dict[str, float | None]) -> dict[str, float]:
    """Keep the rates that say something about the hardware."""
    plain = rates["float32"] or 0.0
    return {dtype: rate for dtype, rate in rates.items() if rate is not None and rate >= plain}
