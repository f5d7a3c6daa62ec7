"""Telemetry: parsers against fixture files, a scripted driver, and which device a name means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.measure import cpuinfo, nvml, telemetry
from gigamlp.measure.telemetry import (
    device_info,
    machine_fingerprint,
    resolve_device,
    snapshot,
    torch_cuda_version,
    versions,
)

FIXTURES = Path(__file__).parent / "fixtures"


def fixture_text(name):
    return (FIXTURES / f"cpuinfo_{name}.txt").read_text("utf-8")


# ---- /proc and /sys -------------------------------------------------------------------------------------------------


def test_cpuinfo_amd():
    found = cpuinfo.parse_cpuinfo(fixture_text("amd"))
    assert found.name == "AMD EPYC 9R14 96-Core Processor"
    assert found.vendor == "AuthenticAMD"
    assert found.mhz == (3698.118, 2600.0)
    assert found.cache_bytes == 1 << 20
    # as the first core lists them; the second core's shorter list changes nothing
    assert set(found.flags) == {
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    }  # fmt: skip


def test_cpuinfo_intel():
    found = cpuinfo.parse_cpuinfo(fixture_text("intel"))
    assert found.name == "12th Gen Intel(R) Core(TM) i7-12700K"
    assert found.cache_bytes == 25600 * 1024
    # "vmx flags" is another line, and its avx512f is not the CPU's
    assert found.flags == ("avx2", "fma", "f16c", "avx_vnni")


def test_cpuinfo_arm_has_numbers_for_a_name():
    found = cpuinfo.parse_cpuinfo(fixture_text("arm"))
    assert found.name == "Arm Neoverse-V1 (implementer 0x41 part 0xd40)"
    assert found.flags == ("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve")
    assert found.mhz == ()
    unknown = cpuinfo.parse_cpuinfo("CPU implementer : 0x99\nCPU part : 0x001\n")
    assert unknown.name == "Arm CPU (implementer 0x99 part 0x001)"


@given(
    st.text()
    | st.lists(st.sampled_from(["cpu MHz : ", "cpu MHz : x", "cache size : 1 KB", "model name :", ": :"])).map(
        "\n".join
    )
)
def test_cpuinfo_reads_any_text(text):
    found = cpuinfo.parse_cpuinfo(text)
    assert all(flag in cpuinfo.FLAGS for flag in found.flags)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def cache(cpu, index, level, size, shared, kind="Unified"):
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    return {
        f"{folder}/level": f"{level}\n",
        f"{folder}/size": f"{size}\n",
        f"{folder}/type": f"{kind}\n",
        f"{folder}/shared_cpu_list": f"{shared}\n",
    }


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(cpuinfo, "_my_cpus", lambda: [0, 1, 2, 3])
    write(tmp_path, {"proc/cpuinfo": fixture_text("amd"), "proc/meminfo": "MemTotal:       1000 kB\nMemFree: 5 kB\n"})
    for cpu in range(4):
        socket = "0-1" if cpu < 2 else "2-3"
        write(tmp_path, cache(cpu, 0, 1, "32K", str(cpu), "Data"))
        write(tmp_path, cache(cpu, 1, 2, "1M", str(cpu), "Instruction"))
        write(tmp_path, cache(cpu, 2, 2, "1024K", str(cpu)))
        write(tmp_path, cache(cpu, 3, 3, "32768K", socket))
    return tmp_path


def test_cpu_info_from_files(two_sockets, monkeypatch):
    monkeypatch.setattr(cpuinfo.os, "cpu_count", lambda: 8)
    found = cpuinfo.cpu_info(two_sockets)
    assert found["name"] == "AMD EPYC 9R14 96-Core Processor"
    assert (found["cores"], found["affinity"], found["cgroup_cpus"]) == (8, 4, None)
    assert (found["l2_bytes"], found["l3_bytes"]) == (1 << 20, 32 << 20)
    assert found["cache_bytes"] == 64 << 20  # both sockets' caches
    assert found["memory_bytes"] == 1000 * 1024
    assert cpuinfo.cpu_clock_mhz(two_sockets) == 3698.118


def test_cache_of_the_cores_that_we_may_use_only(two_sockets, monkeypatch):
    monkeypatch.setattr(cpuinfo, "_my_cpus", lambda: [3])
    assert cpuinfo.last_level_bytes(two_sockets) == 32 << 20


def test_last_level_is_the_second_where_there_is_no_third(tmp_path, monkeypatch):
    monkeypatch.setattr(cpuinfo, "_my_cpus", lambda: [0, 1])
    write(tmp_path, {**cache(0, 0, 2, "512K", "0-1"), **cache(1, 0, 2, "512K", "0-1")})
    assert cpuinfo.last_level_bytes(tmp_path) == 512 << 10


def test_a_bare_system_says_unknown(tmp_path):
    found = cpuinfo.cpu_info(tmp_path)
    assert isinstance(found["name"], str)
    assert found["name"]
    for key in ("l2_bytes", "l3_bytes", "cache_bytes", "memory_bytes", "cgroup_cpus"):
        assert found[key] is None
    assert cpuinfo.cpu_clock_mhz(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (  # the tightest of the group and those above it
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (  # a container sees its own group as the root
            {
                "proc/self/cgroup": "4:cpu:/docker/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "garbage\n0:\n:::\n", "sys/fs/cgroup/cpu.max": ""}, None),
        ({"proc/self/cgroup": "0::/../../etc\n", "sys/fs/cgroup/cpu.max": "x y\n"}, None),
        ({}, None),
    ],
)
def test_cgroup_limit(tmp_path, files, expected):
    write(tmp_path, files)
    assert cpuinfo.cgroup_cpus(tmp_path) == expected


def test_usable_cpus_is_the_tighter_of_affinity_and_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(cpuinfo, "_my_cpus", lambda: [0, 1, 2, 3])
    assert cpuinfo.usable_cpus(tmp_path) == 4
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert cpuinfo.usable_cpus(tmp_path) == 2
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert cpuinfo.usable_cpus(tmp_path) == 1


# ---- the NVIDIA driver ----------------------------------------------------------------------------------------------


class FakeNvml:
    """As much of pynvml as is asked, with one GPU at one PCI address."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, no_driver=False, unsupported=(), old=False):
        self.no_driver, self.unsupported, self.open = no_driver, unsupported, 0
        name = "nvmlDeviceGetCurrentClocksThrottleReasons" if old else "nvmlDeviceGetCurrentClocksEventReasons"
        setattr(self, name, lambda handle: 0x4 | 0x1)

    def nvmlInit(self):  # noqa: N802
        if self.no_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus):  # noqa: N802
        if bus != b"00000000:0A:00.0":
            raise self.NVMLError("Not Found")
        return "gpu"

    def __getattr__(self, name):
        if name in self.unsupported:
            return self._refuse
        answers = {
            "nvmlSystemGetDriverVersion": lambda: b"580.159.04",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: f"NVIDIA Test {handle}",
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetMaxClockInfo": lambda handle, which: {1: 1980, 2: 3201}[which],
            "nvmlDeviceGetPowerUsage": lambda handle: 123_400,
            "nvmlDeviceGetClockInfo": lambda handle, which: {1: 1755, 2: 3200}[which],
            "nvmlDeviceGetTemperature": lambda handle, which: 41,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def _refuse(self, *arguments):
        raise self.NVMLError("Not Supported")


@pytest.fixture
def no_kernel_module(monkeypatch, tmp_path):
    monkeypatch.setattr(nvml, "_KERNEL_MODULE", tmp_path / "absent")


def install(monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize("old", [False, True])
def test_the_state_of_a_gpu(monkeypatch, old):
    fake = install(monkeypatch, FakeNvml(old=old))
    found, reason = nvml.gpu_now("00000000:0A:00.0")
    assert reason is None
    assert found == {
        "clock_mhz": 1755,
        "memory_clock_mhz": 3200,
        "temperature_c": 41,
        "power_w": 123.4,
        "throttle": ["idle", "power cap"],
    }
    static, _ = nvml.gpu_static("00000000:0A:00.0")
    assert static == {"power_limit_w": 700.0, "max_clock_mhz": 1980, "max_memory_clock_mhz": 3201}
    assert nvml.gpu_names() == (["NVIDIA Test 0", "NVIDIA Test 1"], None)
    assert nvml.driver_version() == "580.159.04"
    assert fake.open == 0  # each session was closed


def test_what_a_card_does_not_support_is_unknown(monkeypatch):
    install(monkeypatch, FakeNvml(unsupported=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit")))
    found, reason = nvml.gpu_now("00000000:0A:00.0")
    assert (found["power_w"], found["clock_mhz"], reason) == (None, 1755, None)
    assert nvml.gpu_static("00000000:0A:00.0")[0]["power_limit_w"] is None


def test_a_gpu_that_nvml_does_not_know_says_so(monkeypatch):
    fake = install(monkeypatch, FakeNvml())
    found, reason = nvml.gpu_now("00000000:FF:00.0")
    assert set(found.values()) == {None}
    assert "Not Found" in reason
    assert fake.open == 0


def test_without_pynvml(monkeypatch, no_kernel_module):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.driver_version() is None
    assert nvml.gpu_names() == ([], "nvidia-ml-py is not installed")
    found, reason = nvml.gpu_now("00000000:0A:00.0")
    assert set(found.values()) == {None}
    assert reason == "nvidia-ml-py is not installed"


def test_without_a_driver(monkeypatch, no_kernel_module):
    install(monkeypatch, FakeNvml(no_driver=True))
    assert nvml.driver_version() is None
    assert nvml.gpu_names() == ([], "NVML: Driver Not Loaded")


def test_the_kernel_module_knows_the_driver_too(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    path = tmp_path / "version"
    monkeypatch.setattr(nvml, "_KERNEL_MODULE", path)
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version:  gcc 12.2.0\n"
    )
    assert nvml.driver_version() == "580.159.04"
    path.write_text("something else\n")
    assert nvml.driver_version() is None


@pytest.mark.parametrize(
    ("mask", "words"),
    [(0, []), (0x1, ["idle"]), (0x60, ["thermal slowdown", "hardware thermal slowdown"]), (0x8000, ["reason 0x8000"])],
)
def test_throttle_words(mask, words):
    assert nvml.throttle_words(mask) == words


# ---- which device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", " cpu", "cuda:0\n", None, 0])
def test_malformed_devices_are_refused(bad):
    with pytest.raises(InvalidInput, match="device must be"):
        resolve_device(bad)


def test_cpu_is_the_cpu():
    assert resolve_device("cpu") == "cpu"


def set_torch(monkeypatch, *, version="2.13.0", cuda="13.0", capabilities=(), arches=("sm_80", "sm_90")):
    """Make telemetry see a torch with these GPUs."""
    monkeypatch.setattr(telemetry, "_version", lambda name: version if name == "torch" else None)
    monkeypatch.setattr(telemetry, "torch_cuda_version", lambda: cuda)
    fake = SimpleNamespace(
        is_available=lambda: bool(capabilities),
        device_count=lambda: len(capabilities),
        get_device_capability=lambda index: capabilities[index],
        get_arch_list=lambda: list(arches),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))


@pytest.mark.parametrize(
    ("device", "capabilities", "expected"),
    [
        ("auto", [(9, 0)], "cuda:0"),
        ("cuda", [(9, 0)], "cuda:0"),
        ("cuda:1", [(9, 0), (8, 6)], "cuda:1"),
        ("auto", [], "cpu"),
        ("auto", [(6, 1)], "cpu"),  # a GPU that the installed torch has no kernels for
        ("cpu", [(9, 0)], "cpu"),
    ],
)
def test_device_with_a_cuda_torch(monkeypatch, device, capabilities, expected):
    set_torch(monkeypatch, capabilities=capabilities)
    assert resolve_device(device) == expected


@pytest.mark.parametrize(
    ("device", "torch", "message"),
    [
        ("cuda", {"version": None}, r"'cuda' cannot be used: torch is not installed; install gigamlp\[torch\]"),
        ("cuda:0", {"cuda": None}, "a build without CUDA, although there is an NVIDIA driver"),
        ("cuda", {}, "finds no usable CUDA device"),
        ("cuda:2", {"capabilities": [(9, 0)]}, "no CUDA device 2; this machine has 1"),
        (
            "cuda",
            {"capabilities": [(6, 1)]},
            "compute capability 6.1, and the installed torch is built for sm_80 sm_90",
        ),
    ],
)
def test_an_absent_cuda_device_says_why(monkeypatch, device, torch, message):
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")
    set_torch(monkeypatch, **torch)
    with pytest.raises(DeviceError, match=message):
        resolve_device(device)


def test_auto_without_torch_is_the_cpu(monkeypatch):
    set_torch(monkeypatch, version=None)
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("capability", "arches", "fits"),
    [
        ((9, 0), ["sm_90"], True),
        ((8, 9), ["sm_80"], True),  # a higher minor version runs it
        ((8, 0), ["sm_86"], False),  # a lower one does not
        ((9, 0), ["sm_80"], False),  # another major version does not
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled on the spot
        ((7, 5), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_100a"], True),
        ((10, 3), ["sm_100a"], False),
        ((12, 1), ["sm_120"], True),
        ((9, 0), [], False),
        ((9, 0), ["gfx90a", "nonsense"], False),
    ],
)
def test_which_code_runs_on_which_gpu(capability, arches, fits):
    assert (telemetry._arch_problem(capability, arches) is None) is fits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda = '12.6'\n", "12.6"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", None),
        ("", None),
    ],
)
def test_torch_says_its_cuda_version_without_being_imported(monkeypatch, tmp_path, text, expected):
    write(tmp_path, {"torch/version.py": text})
    found = SimpleNamespace(locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(telemetry.metadata, "distribution", lambda name: found)
    assert torch_cuda_version() == expected


# ---- this machine ---------------------------------------------------------------------------------------------------


def test_cpu_description_is_json():
    info, state = device_info("cpu"), snapshot("cpu")
    assert json.loads(json.dumps(info)) == info
    assert json.loads(json.dumps(state)) == state
    assert info["kind"] == "cpu"
    assert 1 <= info["affinity"] <= info["cores"]
    assert set(state) == {"clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "throttle", "note"}


@pytest.mark.parametrize("call", [device_info, snapshot, machine_fingerprint])
def test_descriptions_want_a_resolved_device(call):
    for bad in ("auto", "cuda", "gpu"):
        with pytest.raises(InvalidInput, match="resolve_device"):
            call(bad)


def test_a_description_of_an_absent_gpu_is_an_error(monkeypatch):
    set_torch(monkeypatch)
    for call in (device_info, snapshot, machine_fingerprint):
        with pytest.raises(DeviceError, match="cuda:0 cannot be used"):
            call("cuda:0")


def test_versions_leave_out_what_is_not_there(monkeypatch, no_kernel_module):
    set_torch(monkeypatch, version=None, cuda=None)
    install(monkeypatch, FakeNvml(no_driver=True))
    assert set(versions()) == {"gigamlp", "python", "os"}


def test_fingerprint_decides_by_machine_and_versions():
    found = machine_fingerprint("cpu")
    assert found == machine_fingerprint("cpu")
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in found.items())
    assert found["device"] == found["cpu"] == device_info("cpu")["name"]
    assert {"cpus", "gigamlp", "numpy"} <= set(found)
    assert not {"python", "os", "driver"} & set(found)


def test_cpu_telemetry_imports_neither_torch_nor_cuda():
    code = """
import sys
import gigamlp.measure as m
from gigamlp.measure import clock, roofline, stats, telemetry, timing
assert "pynvml" not in sys.modules
telemetry.device_info("cpu"); telemetry.snapshot("cpu"); telemetry.versions(); telemetry.machine_fingerprint("cpu")
assert telemetry.resolve_device("cpu") == "cpu"
clock.clock_for("cpu")
assert not {"torch", "matplotlib", "cuda"} & set(sys.modules), "imported"
for name in m.__all__:
    getattr(m, name)
assert not {"torch", "matplotlib", "cuda"} & set(sys.modules), "imported by a public name"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_public_name():
    import gigamlp.measure

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gigamlp.measure.nothing  # noqa: B018
    assert "throughput" in dir(gigamlp.measure)


@pytest.mark.gpu
def test_gpu_description():
    import torch

    info, state = device_info("cuda:0"), snapshot("cuda:0")
    assert json.loads(json.dumps([info, state])) == [info, state]
    assert info["name"] == torch.cuda.get_device_name(0)
    assert info["memory_bytes"] > 1 << 30
    assert info["l2_bytes"] > 1 << 18
    assert info["driver"]
    assert "uuid" not in json.dumps(info).lower()
    # without nvidia-ml-py the clocks are unknown, and the reason is given
    assert (state["note"] is None) == (state["clock_mhz"] is not None)
    assert (info["nvml"] is None) == (info["max_clock_mhz"] is not None)
    assert resolve_device("auto") == "cuda:0"


@pytest.mark.gpu
def test_gpu_fingerprint():
    found = machine_fingerprint("cuda:0")
    assert found["device"] == device_info("cuda:0")["name"] != found["cpu"]
    assert {"compute_capability", "driver", "torch", "cuda"} <= set(found)
    assert all(isinstance(value, str) for value in found.values())
