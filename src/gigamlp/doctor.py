"""`gigamlp doctor`: versions, devices, what each engine says about them and why not, and what would spoil a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from gigamlp import plancache
from gigamlp.engines.registry import engine, engine_names
from gigamlp.errors import DeviceError, GigaMLPError
from gigamlp.measure import nvml, telemetry

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["diagnose", "render"]

# extra -> the packages that it needs, by distribution name
_EXTRAS = {
    "torch": ("torch", "nvidia-ml-py"),
    "cuda12": ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc-cu12"),
    "cuda13": ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"),
    "sklearn": ("scikit-learn",),
    "onnx": ("onnx", "onnxruntime"),
    "openvino": ("openvino",),
    "score": ("pyarrow", "fsspec"),
    "report": ("matplotlib",),
    "serve": ("starlette", "uvicorn", "prometheus-client"),
    "ray": ("ray",),
}

# environment variables that change what is measured, and how
_VARIABLES = {
    "OPENBLAS_CORETYPE": "NumPy's BLAS uses the kernels of that CPU, not of this one",
    "OPENBLAS_NUM_THREADS": "it sets the threads of NumPy's BLAS",
    "OMP_NUM_THREADS": "it sets the threads of torch and BLAS on the CPU",
    "MKL_NUM_THREADS": "it sets the threads of MKL",
    "ATEN_CPU_CAPABILITY": "it limits torch's vector instructions on the CPU",
    "ONEDNN_MAX_CPU_ISA": "it limits oneDNN's vector instructions on the CPU",
    "CUDA_LAUNCH_BLOCKING": "each kernel launch waits: throughput on the GPU will be far too low",
    "NVIDIA_TF32_OVERRIDE": "it overrides whether float32 products may use TF32",
    "TORCHDYNAMO_DISABLE": "torch.compile is off",
    "TORCH_COMPILE_DISABLE": "torch.compile is off",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch's CUDA allocator does not cache: CUDA Graphs fail",
}


def diagnose(*, roofs: bool = False) -> dict[str, Any]:
    """Look at this machine.

    Parameters
    ----------
    roofs : bool
        Also measure each usable device's memory bandwidth, matrix rates and host link: some seconds a device.

    Returns
    -------
    dict
        JSON-ready. ``versions``; ``devices``: a list of dicts with ``id``, ``name``, ``problem`` (why it cannot be
        used, or None), ``info``, ``state`` (clocks, temperature, power, throttling now), ``engines`` (name -> why it
        cannot run there, or None) and ``roofs`` (or None); ``extras`` (name -> what is missing for it); ``caches``
        (what -> folder); ``warnings`` (sentences).

    Examples
    --------
    >>> found = diagnose()
    >>> found["devices"][0]["id"]
    'cpu'
    """
    devices = [_device("cpu", None, roofs), *(_device(name, problem, roofs) for name, problem in _gpus())]
    return {
        "versions": telemetry.versions(),
        "devices": devices,
        "extras": {name: _missing(_EXTRAS[name]) for name in _fitting_extras(nvml.driver_version())},
        "caches": _caches(),
        "warnings": _warnings(devices, os.environ),
    }


# ---- devices --------------------------------------------------------------------------------------------------------


def _gpus() -> list[tuple[str, str | None]]:
    """Return (device, why it cannot be used) for every GPU that torch or the driver knows.

    What torch numbers counts; if it sees no GPU, then what the driver lists.
    """
    found = []
    index = 0
    while (problem := telemetry.cuda_problem(index)) is None or _torch_sees(index):
        found.append((f"cuda:{index}", problem))
        index += 1
    if found:
        return found
    names, _ = nvml.gpu_names()
    return [(f"cuda:{index}", f"{name}: {problem}") for index, name in enumerate(names)]


def _torch_sees(index: int) -> bool:
    """Whether torch lists this GPU, be it too old or too new to use."""
    if telemetry.torch_cuda_version() is None:
        return False
    import torch

    return torch.cuda.is_available() and index < torch.cuda.device_count()


def _device(device: str, problem: str | None, roofs: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"id": device, "name": None, "problem": problem, "info": None, "state": None, "roofs": None}
    if problem is None:
        found["info"] = telemetry.device_info(device)
        found["name"] = found["info"]["name"]
        found["state"] = telemetry.snapshot(device)
    found["engines"] = {name: _unavailable(name, device) for name in engine_names()}
    if roofs and problem is None:
        from gigamlp.engines.probes import measure_roofs

        try:
            found["roofs"] = measure_roofs(device).to_json()
        except DeviceError as error:
            found["roofs"] = {"not_measured": str(error)}
    return found


def _unavailable(name: str, device: str) -> str | None:
    """Return why an engine cannot run on a device; an engine whose libraries are not installed says so."""
    try:
        return engine(name).unavailable(device)
    except ImportError as error:
        return f"cannot be loaded: {error}"
    except GigaMLPError as error:
        return str(error)


# ---- the rest -------------------------------------------------------------------------------------------------------


def _fitting_extras(driver: str | None) -> list[str]:
    """Return the extras that make sense here: of the two CUDA lines the one that the driver can load code of.

    Drivers from 580 on load code of CUDA 13 (CUDA compatibility guide, table 2). Without a driver the newer is shown.
    """
    major = (driver or "").partition(".")[0]
    other = "cuda13" if major.isdecimal() and int(major) < 580 else "cuda12"
    return [name for name in _EXTRAS if name != other]


def _missing(packages: tuple[str, ...]) -> list[str]:
    out = []
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            out.append(package)
    return out


def _caches() -> dict[str, str]:
    from platformdirs import user_cache_dir

    out = {"gigamlp": user_cache_dir("gigamlp", appauthor=False), "plans": str(plancache.default_folder())}
    for what, variable in (("torch.compile", "TORCHINDUCTOR_CACHE_DIR"), ("triton", "TRITON_CACHE_DIR")):
        if os.environ.get(variable):
            out[what] = os.environ[variable]
    return out


def _warnings(devices: list[dict[str, Any]], environment: Mapping[str, str]) -> list[str]:
    """Say what on this machine would spoil a figure or keep a device idle."""
    out = []
    for device in devices:
        if device["problem"] is not None:
            out.append(f"{device['id']} cannot be used: {device['problem']}")
            continue
        slowed = sorted(nvml.SLOWED.intersection(device["state"]["throttle"] or ()))
        if slowed:
            out.append(f"{device['id']} is slowed down now by: {', '.join(slowed)}")
        if device["info"].get("nvml"):
            out.append(f"{device['id']}: clocks, power and temperature are unknown: {device['info']['nvml']}")
    driver = telemetry.versions().get("driver")
    if driver and len(devices) == 1:
        out.append(f"there is an NVIDIA driver ({driver}), but {telemetry.cuda_problem(0) or 'no GPU was found'}")
    return (
        out
        + _cpu_warnings(devices[0]["info"])
        + [
            f"{name}={environment[name]} is set: {effect}"
            for name, effect in _VARIABLES.items()
            if environment.get(name)
        ]
    )


def _cpu_warnings(info: Mapping[str, Any]) -> list[str]:
    out = []
    cores, affinity, limit = info["cores"], info["affinity"], info["cgroup_cpus"]
    if affinity < cores:
        out.append(f"this process may run on {affinity} of {cores} cores (CPU affinity)")
    if limit is not None and limit < affinity:
        out.append(f"a container limit gives this process {limit:g} of {affinity} cores; more threads than that stall")
    load = _load()
    if load is not None and load > 0.5 * affinity:
        out.append(f"the load average is {load:.1f} on {affinity} cores: others use this CPU, times will be noisy")
    return out


def _load() -> float | None:
    """Return the load average of the last minute; None where the system has none (Windows)."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# ---- for a terminal -------------------------------------------------------------------------------------------------


def render(found: Mapping[str, Any]) -> RenderableType:
    """Return what `diagnose` found as tables for a terminal.

    Parameters
    ----------
    found : mapping
        From `diagnose`, or read back from its JSON.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_pairs("versions", found["versions"])]
    for device in found["devices"]:
        parts += [Text(""), _pairs(f"{device['id']}: {device['name'] or 'cannot be used'}", _facts(device))]
        parts.append(_pairs("engines here", {name: why or "yes" for name, why in device["engines"].items()}))
    extras = {name: f"missing: {', '.join(lacks)}" if lacks else "yes" for name, lacks in found["extras"].items()}
    parts += [Text(""), _pairs("extras", extras), Text(""), _pairs("caches", found["caches"])]
    for warning in found["warnings"]:
        parts.append(Text.assemble(("! ", "bold yellow"), warning))
    return Group(*parts)


def _pairs(title: str, pairs: Mapping[str, str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    # Text, not str: a reason may hold square brackets, which rich would take for markup
    table = Table(
        title=Text(title, style="bold"), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 2)
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in pairs.items():
        table.add_row(Text(key), Text(str(value)))
    return table


def _facts(device: Mapping[str, Any]) -> dict[str, str]:
    if device["problem"] is not None:
        return {"problem": device["problem"]}
    info, state, out = device["info"], device["state"], {}
    for key, unit in (
        ("compute_capability", ""),
        ("multiprocessors", ""),
        ("cores", ""),
        ("affinity", ""),
        ("cgroup_cpus", ""),
        ("memory_bytes", "B"),
        ("l2_bytes", "B"),
        ("l3_bytes", "B"),
        ("driver", ""),
        ("power_limit_w", " W"),
        ("max_clock_mhz", " MHz"),
    ):
        if info.get(key) is not None:
            label = key.removesuffix("_bytes").removesuffix("_w").removesuffix("_mhz").replace("_", " ")
            out[label] = _bytes(info[key]) if unit == "B" else f"{info[key]}{unit}"
    if info.get("flags"):
        out["flags"] = " ".join(info["flags"])
    now = [
        f"{state[key]:.0f} {unit}"
        for key, unit in (("clock_mhz", "MHz"), ("temperature_c", "C"), ("power_w", "W"))
        if state.get(key) is not None
    ]
    if now:
        out["now"] = ", ".join(now + list(state.get("throttle") or ()))
    return out | _roof_facts(device["roofs"])


def _roof_facts(roofs: Mapping[str, Any] | None) -> dict[str, str]:
    if not roofs:
        return {}
    if "not_measured" in roofs:
        return {"roofs": roofs["not_measured"]}
    out = {
        key.removesuffix("_bytes_s").replace("_", " "): f"{value / 1e9:.1f} GB/s"
        for key, value in roofs.items()
        if key.endswith("_bytes_s") and value is not None
    }
    return out | {f"{dtype} products": f"{rate / 1e12:.3g} TMAC/s" for dtype, rate in roofs["macs_s"].items()}


def _bytes(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
