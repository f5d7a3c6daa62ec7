"""What the NVIDIA driver says about a GPU, through NVML (nvidia-ml-py). It does not initialise CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["driver_version", "gpu_names", "gpu_now", "gpu_static", "throttle_words"]

# NVML reference, "Clocks event reasons"
_REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
SLOWED = frozenset(
    {"power cap", "hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake"}
)  # the reasons that make a figure lower than the card's own

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def throttle_words(mask: int) -> list[str]:
    """Return the reasons in an NVML clocks-event mask as words.

    Examples
    --------
    >>> throttle_words(0x24)
    ['power cap', 'thermal slowdown']
    """
    words = [word for bit, word in _REASONS.items() if mask & bit]
    rest = mask & ~sum(_REASONS)
    return words + ([f"reason 0x{rest:x}"] if rest else [])


def _session(ask: Callable[[Any], Any]) -> tuple[Any, str | None]:
    """Return (what `ask(pynvml)` returns, None), or (None, why NVML cannot be asked)."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        return ask(pynvml), None
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def driver_version() -> str | None:
    """Return the driver's version, from NVML or else from the kernel module; None if there is no driver."""
    found, _ = _session(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))
    if found is not None:
        return str(found)
    if not _KERNEL_MODULE.is_file():
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _KERNEL_MODULE.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else None


def gpu_names() -> tuple[list[str], str | None]:
    """Return (the names of all GPUs that the driver lists, None) or ([], why it cannot be asked)."""

    def ask(nvml: Any) -> list[str]:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]

    names, reason = _session(ask)
    return names or [], reason


def gpu_static(pci_bus: str) -> tuple[dict[str, Any], str | None]:
    """Return what does not change of the GPU at a PCI address: power limit (W) and highest clocks (MHz)."""

    def ask(nvml: Any) -> dict[str, Any]:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus.encode())
        limit = _maybe(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return {
            "power_limit_w": None if limit is None else limit / 1000,
            "max_clock_mhz": _maybe(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            "max_memory_clock_mhz": _maybe(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
        }

    found, reason = _session(ask)
    return found or {"power_limit_w": None, "max_clock_mhz": None, "max_memory_clock_mhz": None}, reason


def gpu_now(pci_bus: str) -> tuple[dict[str, Any], str | None]:
    """Return the present clocks (MHz), temperature (C), power (W) and throttle reasons of the GPU at a PCI address."""

    def ask(nvml: Any) -> dict[str, Any]:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus.encode())
        power = _maybe(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        mask = _maybe(nvml, _reasons_call(nvml), handle)
        return {
            "clock_mhz": _maybe(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": _maybe(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": _maybe(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "throttle": None if mask is None else throttle_words(int(mask)),
        }

    found, reason = _session(ask)
    keys = ("clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "throttle")
    return found or dict.fromkeys(keys), reason


def _reasons_call(nvml: Any) -> Any:
    # renamed by NVIDIA in driver 535; old bindings have only the old name
    new = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return new or nvml.nvmlDeviceGetCurrentClocksThrottleReasons


def _maybe(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what one NVML query says, or None where this card or driver does not support it."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None
