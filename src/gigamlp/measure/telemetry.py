"""What machine this is: device names and sizes, versions, clocks now, and which device ``auto`` means.

Nothing here initialises CUDA for a CPU device, and nothing imports torch unless a CUDA device is in question.
"""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.measure import nvml
from gigamlp.measure.cpuinfo import cpu_clock_mhz, cpu_info, usable_cpus

__all__ = [
    "cuda_problem",
    "device_info",
    "machine_fingerprint",
    "resolve_device",
    "snapshot",
    "torch_cuda_version",
    "versions",
]

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")


# ---- which device ---------------------------------------------------------------------------------------------------


def resolve_device(device: str = "auto") -> str:
    """Return ``"cpu"`` or ``"cuda:N"`` for a device as users write it.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda", "cuda:N"}
        ``auto`` is ``cuda:0`` if it can be used, otherwise ``cpu``. ``cuda`` is ``cuda:0``.

    Raises
    ------
    InvalidInput
        If it is none of these.
    DeviceError
        If a CUDA device was asked for that cannot be used; the message says why.

    Examples
    --------
    >>> resolve_device("cpu")
    'cpu'
    """
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise InvalidInput(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if device == "cpu":
        return device
    index = int(device.partition(":")[2] or 0)
    problem = cuda_problem(index)
    if problem is None:
        return f"cuda:{index}"
    if device == "auto":
        return "cpu"
    raise DeviceError(f"device {device!r} cannot be used: {problem}")


def cuda_problem(index: int = 0) -> str | None:
    """Return why torch cannot use CUDA device `index`, or None if it can. A torch without CUDA is not imported."""
    version = _version("torch")
    if version is None:
        return "torch is not installed; install gigamlp[torch]"
    if torch_cuda_version() is None:
        there = nvml.driver_version()
        seen = f", although there is an NVIDIA driver ({there})" if there else ""
        return f"torch {version} is a build without CUDA{seen}; install a CUDA build of torch to use a GPU"
    import torch

    if not torch.cuda.is_available():
        there = nvml.driver_version()
        seen = f"with driver {there}" if there else "no NVIDIA driver is loaded"
        return f"torch {version} finds no usable CUDA device ({seen})"
    count = torch.cuda.device_count()
    if index >= count:
        return f"there is no CUDA device {index}; this machine has {count}, numbered from 0"
    return _arch_problem(torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())


def _arch_problem(capability: tuple[int, int], built_for: list[str]) -> str | None:
    """Say why kernels built for `built_for` cannot run on a GPU of `capability`.

    Binary code (``sm_XY``) runs on the same major and an equal or higher minor version, except ``sm_XYa``, which runs
    on exactly that one; ``compute_XY`` is compiled on the spot for anything from XY up (CUDA C++ guide, "Binary
    compatibility").
    """
    major, minor = capability
    for name in built_for:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if not found:
            continue
        kind, of_major, of_minor, suffix = found[1], int(found[2]), int(found[3]), found[4]
        if suffix == "a":
            fits = (of_major, of_minor) == (major, minor)
        elif kind == "sm":
            fits = of_major == major and of_minor <= minor
        else:
            fits = (of_major, of_minor) <= (major, minor)
        if fits:
            return None
    known = " ".join(built_for) or "nothing"
    return f"the GPU has compute capability {major}.{minor}, and the installed torch is built for {known}"


# ---- versions -------------------------------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built with, read from its files without importing it."""
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    except metadata.PackageNotFoundError:
        return None
    if not file.is_file():
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def versions() -> dict[str, str]:
    """Return the versions that a figure depends on; what is not installed is left out. Imports none of them.

    Examples
    --------
    >>> sorted({"gigamlp", "numpy", "os", "python"} - versions().keys())
    []
    """
    from gigamlp import __version__

    found: dict[str, str | None] = {
        "gigamlp": __version__,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "onnxruntime": _version("onnxruntime"),
        "openvino": _version("openvino"),
        "cuda": torch_cuda_version(),
        "driver": nvml.driver_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return {key: value for key, value in found.items() if value}


# ---- the device -----------------------------------------------------------------------------------------------------


def _split(device: str) -> int | None:
    """Return the index of a resolved CUDA device, or None for the CPU."""
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise InvalidInput(f"device must be 'cpu' or 'cuda:N' (see resolve_device), got {device!r}")
    return int(index)


def _properties(index: int) -> Any:
    problem = cuda_problem(index)
    if problem is not None:
        raise DeviceError(f"cuda:{index} cannot be used: {problem}")
    import torch

    return torch.cuda.get_device_properties(index)


def _pci_bus(properties: Any) -> str:
    domain = getattr(properties, "pci_domain_id", 0)
    return f"{domain:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"


def device_info(device: str) -> dict[str, Any]:
    """Describe a resolved device; JSON-ready, None where unknown.

    Returns
    -------
    dict
        ``name`` as the driver or CPU reports it, ``kind``, and sizes: for a CPU see `cpuinfo.cpu_info`; for a GPU
        ``compute_capability``, ``multiprocessors``, ``memory_bytes``, ``l2_bytes``, ``driver``, ``power_limit_w``,
        ``max_clock_mhz``, ``max_memory_clock_mhz``, ``nvml`` (why NVML could not be asked, or None) and the ``host``
        CPU. No serial number or UUID.

    Raises
    ------
    DeviceError
        If the CUDA device cannot be used.
    """
    index = _split(device)
    if index is None:
        return cpu_info()
    properties = _properties(index)
    static, reason = nvml.gpu_static(_pci_bus(properties))
    host = cpu_info()
    return {
        "name": properties.name,
        "kind": "cuda",
        "index": index,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": nvml.driver_version(),
        **static,
        "nvml": reason,
        "host": {key: host[key] for key in ("name", "cores", "affinity", "cgroup_cpus", "memory_bytes")},
    }


def snapshot(device: str) -> dict[str, Any]:
    """Return the state of a resolved device now; None where unknown.

    Returns
    -------
    dict
        ``clock_mhz`` (SM clock, or the fastest core's), ``memory_clock_mhz``, ``temperature_c``, ``power_w``,
        ``throttle`` (list of words, empty if nothing slows it), ``note`` (why NVML could not be asked).
    """
    index = _split(device)
    if index is not None:
        now, reason = nvml.gpu_now(_pci_bus(_properties(index)))
        return {**now, "note": reason}
    unknown = dict.fromkeys(("memory_clock_mhz", "temperature_c", "power_w", "throttle", "note"))
    return {"clock_mhz": cpu_clock_mhz(), **unknown}


def machine_fingerprint(device: str) -> dict[str, str]:
    """Return what decides whether a Plan made for a resolved device still holds.

    Returns
    -------
    dict of str to str
        ``device`` (name), ``cpu``, ``cpus`` (logical cores that this process may use), ``gigamlp``, ``numpy``,
        ``torch``, and for a GPU ``compute_capability``, ``driver`` and ``cuda``. What does not exist is left out.
    """
    index = _split(device)
    known = versions()
    name = cpu_info()["name"]
    out = {"device": name, "cpu": name, "cpus": str(usable_cpus())}
    names = ["gigamlp", "numpy", "torch"]
    if index is not None:
        properties = _properties(index)
        out |= {"device": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"}
        names += ["driver", "cuda"]
    return out | {key: known[key] for key in names if key in known}
