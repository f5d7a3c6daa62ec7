"""What the operating system says about the CPU: name, flags, caches, memory, and how much of it we may use."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CpuText", "cgroup_cpus", "cpu_clock_mhz", "cpu_info", "last_level_bytes", "parse_cpuinfo", "usable_cpus"]

ROOT = Path("/")

# the flags that decide which integer and half-precision kernels exist (x86 names, then Arm names)
FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni",
    "avx_vnni_int8", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip

# Arm cores do not report a name, only numbers (Arm "MIDR_EL1": implementer, part)
_ARM = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd84"): "Arm Neoverse-V3",
    ("0x41", "0xd8e"): "Arm Neoverse-N3",
}


@dataclass(frozen=True)
class CpuText:
    """What ``/proc/cpuinfo`` says.

    Attributes
    ----------
    name : str or None
        As the CPU reports it; on Arm made from the implementer and part numbers.
    flags : tuple of str
        Those of `FLAGS` that the first core has, in that order.
    mhz : tuple of float
        The present clock of each core, where given.
    vendor : str or None
    cache_bytes : int or None
        The line ``cache size``: the last level on Intel, the second level on AMD.
    """

    name: str | None
    flags: tuple[str, ...]
    mhz: tuple[float, ...]
    vendor: str | None = None
    cache_bytes: int | None = None


def parse_cpuinfo(text: str) -> CpuText:
    r"""Read the text of ``/proc/cpuinfo`` (x86, Arm and others); unknown lines are skipped.

    Examples
    --------
    >>> parse_cpuinfo("model name : Some CPU @ 2.60GHz\ncpu MHz : 2593.9\nflags : fpu avx2 fma")
    CpuText(name='Some CPU @ 2.60GHz', flags=('avx2', 'fma'), mhz=(2593.9,), vendor=None, cache_bytes=None)
    """
    first: dict[str, str] = {}
    mhz = []
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            continue
        first.setdefault(key, value)
        if key == "cpu MHz":
            found = _number(value)
            if found is not None:
                mhz.append(found)
    has = set((first.get("flags") or first.get("Features") or "").split())
    size = re.fullmatch(r"(\d+) KB", first.get("cache size", ""))
    return CpuText(
        name=_name(first),
        flags=tuple(flag for flag in FLAGS if flag in has),
        mhz=tuple(mhz),
        vendor=first.get("vendor_id") or None,
        cache_bytes=int(size[1]) * 1024 if size else None,
    )


def _name(first: dict[str, str]) -> str | None:
    if first.get("model name"):
        return " ".join(first["model name"].split())
    implementer, part = first.get("CPU implementer"), first.get("CPU part")
    if implementer and part:
        numbers = f"implementer {implementer} part {part}"
        known = _ARM.get((implementer, part))
        return f"{known} ({numbers})" if known else f"Arm CPU ({numbers})"
    return first.get("cpu") or first.get("Processor") or None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    """Return the text of a kernel file; None where this system has no such file or does not let us read it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def cpu_info(root: Path = ROOT) -> dict[str, Any]:
    """Return name, core counts, flags, cache and memory sizes of this machine's CPU; None where unknown.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are; another folder in tests.
    """
    text = parse_cpuinfo(_read(root / "proc/cpuinfo") or "")
    return {
        "name": text.name or _other_name(),
        "kind": "cpu",
        "arch": platform.machine(),
        "cores": os.cpu_count() or 1,
        "affinity": _affinity(),
        "cgroup_cpus": cgroup_cpus(root),
        "flags": list(text.flags),
        "l2_bytes": _cache(root, 0, 2)[0],
        "l3_bytes": _cache(root, 0, 3)[0],
        "cache_bytes": last_level_bytes(root),
        "memory_bytes": _memory_bytes(root),
    }


def _other_name() -> str:
    """Return the CPU's name where there is no ``/proc/cpuinfo`` that says it: macOS, Windows."""
    if sys.platform == "darwin":
        import subprocess

        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def _affinity() -> int:
    """Return how many logical cores this process may run on."""
    return len(_my_cpus())


def _my_cpus() -> list[int]:
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    return sorted(allowed(0)) if allowed else list(range(os.cpu_count() or 1))


def usable_cpus(root: Path = ROOT) -> int:
    """Return how many logical cores' worth of time this process gets: affinity and cgroup limit, at least 1."""
    limit = cgroup_cpus(root)
    return max(1, _affinity() if limit is None else min(_affinity(), int(limit)))


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """Return the CPU limit that a container sets, in cores; None if there is none.

    Reads cgroup v2 (``cpu.max``) and v1 (``cpu.cfs_quota_us``), for this process' group and those above it; the
    tightest counts.
    """
    limits = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            limits += [_quota_v2(_read(folder / "cpu.max")) for folder in _up(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for base in (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"):
                for folder in _up(base, path):
                    quota = _read(folder / "cpu.cfs_quota_us")
                    limits.append(_quota(quota, _read(folder / "cpu.cfs_period_us")))
    return min((limit for limit in limits if limit is not None), default=None)


def _up(base: Path, path: str) -> list[Path]:
    """Return the folders of a cgroup path under `base`, the innermost first, `base` last."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota_v2(text: str | None) -> float | None:
    quota, _, period = (text or "").strip().partition(" ")
    return _quota(quota, period)


def _quota(quota: str | None, period: str | None) -> float | None:
    granted, of = _number((quota or "").strip()), _number((period or "").strip())
    return granted / of if granted is not None and of and granted > 0 else None


def last_level_bytes(root: Path = ROOT) -> int | None:
    """Return the size of the last-level cache, all instances that this process' cores use taken together."""
    cpus = _my_cpus()
    for level in (3, 2):
        instances = {}
        for cpu in cpus:
            size, shared_by = _cache(root, cpu, level)
            if size:
                instances[shared_by] = size
        if instances:
            return sum(instances.values())
    return parse_cpuinfo(_read(root / "proc/cpuinfo") or "").cache_bytes


def _cache(root: Path, cpu: int, level: int) -> tuple[int | None, str]:
    """Return (bytes, the list of cores that share it) of one core's cache of a level, as ``/sys`` tells it."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache"
    for index in range(8):
        place = folder / f"index{index}"
        if (_read(place / "level") or "").strip() != str(level):
            continue
        if (_read(place / "type") or "").strip() == "Instruction":
            continue
        size = re.fullmatch(r"(\d+)([KMG]?)", (_read(place / "size") or "").strip())
        if size:
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[2]]
            return int(size[1]) * scale, (_read(place / "shared_cpu_list") or str(cpu)).strip()
    return None, str(cpu)


def _memory_bytes(root: Path) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    if sys.platform == "darwin":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def cpu_clock_mhz(root: Path = ROOT) -> float | None:
    """Return the present clock of the fastest core in MHz; None where the system does not say."""
    mhz = parse_cpuinfo(_read(root / "proc/cpuinfo") or "").mhz
    return max(mhz) if mhz else None
