"""doctor: what it finds is JSON, what it says is what the engines say, and its warnings fire for the right machine."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import gigamlp.doctor as doctor_module
from gigamlp.doctor import diagnose, render
from gigamlp.engines.registry import engine, engine_names
from gigamlp.errors import DeviceError, Unsupported
from gigamlp.measure import nvml, telemetry

STATE = {
    "clock_mhz": 1755.0,
    "temperature_c": 41,
    "power_w": 123.4,
    "memory_clock_mhz": 3200,
    "throttle": [],
    "note": None,
}


def shown(found, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115, PTH123
    console.print(render(found))
    return console.export_text()


@pytest.fixture(scope="module")
def here():
    return diagnose()


def test_it_is_json(here):
    assert json.loads(json.dumps(here)) == here


def test_the_cpu_is_always_there(here):
    cpu = here["devices"][0]
    assert (cpu["id"], cpu["problem"], cpu["roofs"]) == ("cpu", None, None)
    assert cpu["name"] == cpu["info"]["name"]


def test_every_engine_says_what_it_thinks_of_every_device(here):
    for device in here["devices"]:
        assert tuple(device["engines"]) == engine_names()
        for name, reason in device["engines"].items():
            assert reason == engine(name).unavailable(device["id"])


def test_render_shows_all_of_it(here):
    text = shown(here)
    assert here["versions"]["gigamlp"] in text
    assert here["devices"][0]["name"] in text
    for name in engine_names():
        assert name in text
    assert here["caches"]["gigamlp"] in text
    assert shown(json.loads(json.dumps(here))) == text


def test_reasons_with_brackets_are_shown_as_they_are(here):
    cpu = {**here["devices"][0], "engines": {"torch_eager": "install gigamlp[torch]"}}
    text = shown({**here, "devices": [cpu], "warnings": ["see [/red] here"]})
    assert "install gigamlp[torch]" in text
    assert "see [/red] here" in text


def gpu_machine(monkeypatch, *, problem=None, throttle=(), nvml_reason=None):
    """Make doctor see one GPU beside the CPU."""
    info = {
        "name": "NVIDIA Test", "kind": "cuda", "compute_capability": "9.0", "multiprocessors": 132,
        "memory_bytes": 150 << 30, "l2_bytes": 60 << 20, "driver": "580.1", "power_limit_w": 700.0,
        "max_clock_mhz": 1980, "nvml": nvml_reason,
    }  # fmt: skip
    real_info, real_state = telemetry.device_info, telemetry.snapshot
    monkeypatch.setattr(telemetry, "device_info", lambda d: info if d == "cuda:0" else real_info(d))
    monkeypatch.setattr(
        telemetry, "snapshot", lambda d: {**STATE, "throttle": list(throttle)} if d == "cuda:0" else real_state(d)
    )
    monkeypatch.setattr(telemetry, "cuda_problem", lambda i=0: problem if i == 0 else f"there is no CUDA device {i}")
    monkeypatch.setattr(doctor_module, "_torch_sees", lambda i: i == 0)
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")


def test_a_gpu_is_described(monkeypatch):
    gpu_machine(monkeypatch)
    found = diagnose()
    assert [device["id"] for device in found["devices"]] == ["cpu", "cuda:0"]
    assert not [warning for warning in found["warnings"] if "cuda" in warning or "NVIDIA" in warning]
    text = shown(found)
    for expected in ("cuda:0: NVIDIA Test", "150.0 GiB", "132", "700.0 W", "1755 MHz, 41 C, 123 W"):
        assert expected in text


def test_a_throttled_gpu_is_a_warning_and_an_idle_one_is_not(monkeypatch):
    gpu_machine(monkeypatch, throttle=["idle"])
    assert not [warning for warning in diagnose()["warnings"] if "slowed" in warning]
    gpu_machine(monkeypatch, throttle=["idle", "thermal slowdown", "power cap"])
    assert "cuda:0 is slowed down now by: power cap, thermal slowdown" in diagnose()["warnings"]


def test_a_gpu_that_torch_has_no_kernels_for_is_a_warning(monkeypatch):
    gpu_machine(monkeypatch, problem="the GPU has compute capability 6.1, and the installed torch is built for sm_80")
    found = diagnose()
    gpu = found["devices"][1]
    assert (gpu["info"], gpu["state"], gpu["name"]) == (None, None, None)
    assert any(
        warning.startswith("cuda:0 cannot be used: the GPU has compute capability") for warning in found["warnings"]
    )
    assert "compute capability 6.1" in shown(found)


def test_unknown_clocks_are_a_warning(monkeypatch):
    gpu_machine(monkeypatch, nvml_reason="nvidia-ml-py is not installed")
    assert any("unknown: nvidia-ml-py is not installed" in warning for warning in diagnose()["warnings"])


def cpu_torch(monkeypatch, names):
    monkeypatch.setattr(telemetry, "torch_cuda_version", lambda: None)
    monkeypatch.setattr(telemetry, "_version", lambda name: "2.13.0" if name == "torch" else "1")
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")
    monkeypatch.setattr(nvml, "gpu_names", lambda: (names, None if names else "nvidia-ml-py is not installed"))


def test_a_cpu_torch_beside_an_nvidia_gpu_is_a_warning(monkeypatch):
    cpu_torch(monkeypatch, ["NVIDIA T4"])
    found = diagnose()
    assert found["devices"][1]["problem"].startswith("NVIDIA T4: torch 2.13.0 is a build without CUDA")
    assert any("NVIDIA T4: torch 2.13.0 is a build without CUDA" in warning for warning in found["warnings"])


def test_a_driver_whose_gpus_cannot_be_listed_is_a_warning(monkeypatch):
    cpu_torch(monkeypatch, [])
    found = diagnose()
    assert len(found["devices"]) == 1
    assert any(warning.startswith("there is an NVIDIA driver (580.1), but torch") for warning in found["warnings"])


def test_no_gpu_and_no_driver_is_no_warning(monkeypatch):
    cpu_torch(monkeypatch, [])
    monkeypatch.setattr(nvml, "driver_version", lambda: None)
    assert not [warning for warning in diagnose()["warnings"] if "NVIDIA" in warning or "cuda" in warning]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"affinity": 4}, "may run on 4 of 8 cores"),
        ({"cgroup_cpus": 1.5}, "a container limit gives this process 1.5 of 8 cores"),
        ({"cgroup_cpus": 8.0}, None),
        ({"load": 0.9}, None),
        ({"load": 7.0}, "the load average is 7.0 on 8 cores"),
        ({"load": None}, None),
    ],
)
def test_cpu_warnings(monkeypatch, limits, expected):
    monkeypatch.setattr(doctor_module, "_load", lambda: limits.get("load", 0.0))
    info = {"cores": 8, "affinity": 8, "cgroup_cpus": None, **limits}
    found = doctor_module._cpu_warnings(info)
    assert found == [] if expected is None else len(found) == 1
    assert expected is None or expected in found[0]


@pytest.mark.parametrize("name", ["OPENBLAS_CORETYPE", "CUDA_LAUNCH_BLOCKING", "TORCHDYNAMO_DISABLE"])
def test_variables_that_change_a_figure_are_warnings(here, name):
    say = doctor_module._warnings
    assert any(warning.startswith(f"{name}=1 is set: ") for warning in say(here["devices"], {name: "1"}))
    assert not any(name in warning for warning in say(here["devices"], {name: ""}))
    assert not any(name in warning for warning in say(here["devices"], {}))


def test_an_engine_that_cannot_be_loaded_is_a_reason(monkeypatch):
    def broken(name):
        raise {"a": ModuleNotFoundError("No module named 'torch'"), "b": Unsupported("no AVX2")}[name]

    monkeypatch.setattr(doctor_module, "engine", broken)
    monkeypatch.setattr(doctor_module, "engine_names", lambda: ("a", "b"))
    found = diagnose()["devices"][0]["engines"]
    assert found == {"a": "cannot be loaded: No module named 'torch'", "b": "no AVX2"}


def test_a_bug_in_an_engine_is_not_hidden(monkeypatch):
    def unavailable(device):
        raise ZeroDivisionError

    monkeypatch.setattr(doctor_module, "engine", lambda name: SimpleNamespace(unavailable=unavailable))
    with pytest.raises(ZeroDivisionError):
        diagnose()


@pytest.mark.parametrize(
    ("driver", "fits", "other"),
    [
        ("580.159.03", "cuda13", "cuda12"),
        ("610.1", "cuda13", "cuda12"),
        (None, "cuda13", "cuda12"),
        ("575.57", "cuda12", "cuda13"),
    ],
)
def test_of_the_cuda_extras_the_one_that_fits_the_driver_is_shown(monkeypatch, driver, fits, other):
    monkeypatch.setattr(doctor_module.nvml, "driver_version", lambda: driver)
    extras = diagnose()["extras"]
    assert fits in extras
    assert other not in extras


def test_extras_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor_module, "_EXTRAS", {"one": ("numpy",), "two": ("numpy", "no-such-package-here")})
    assert diagnose()["extras"] == {"one": [], "two": ["no-such-package-here"]}


def test_roofs_on_request(monkeypatch):
    from gigamlp.engines import probes
    from gigamlp.measure.roofline import Roofs

    roofs = Roofs(2e9, 1e9, {"float32": 3e12}, h2d_pinned_bytes_s=5e9)
    monkeypatch.setattr(probes, "measure_roofs", lambda device: roofs)
    found = diagnose(roofs=True)
    assert found["devices"][0]["roofs"] == roofs.to_json()
    text = shown(found)
    for expected in ("2.0 GB/s", "h2d pinned", "5.0 GB/s", "float32 products", "3 TMAC/s"):
        assert expected in text


def test_roofs_that_cannot_be_measured_say_why(monkeypatch):
    from gigamlp.engines import probes

    def refuse(device):
        raise DeviceError("torch is not installed")

    monkeypatch.setattr(probes, "measure_roofs", refuse)
    found = diagnose(roofs=True)
    assert found["devices"][0]["roofs"] == {"not_measured": "torch is not installed"}
    assert "torch is not installed" in shown(found)


def test_without_torch_doctor_still_answers(monkeypatch):
    monkeypatch.setattr(telemetry, "_version", lambda name: None if name in ("torch", "triton") else "1")
    monkeypatch.setitem(sys.modules, "torch", None)
    found = diagnose()
    assert "torch" not in found["versions"]
    assert found["devices"][0]["engines"]["torch_eager"]


@pytest.mark.gpu
def test_every_gpu_is_listed():
    import torch

    found = diagnose()
    ids = [device["id"] for device in found["devices"]]
    assert ids == ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    assert found["devices"][1]["name"] == torch.cuda.get_device_name(0)
    assert found["devices"][1]["engines"]["torch_graph"] is None
    assert torch.cuda.get_device_name(0) in shown(found)
