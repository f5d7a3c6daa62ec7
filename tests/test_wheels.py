"""The wheels that cibuildwheel is asked for have kernels in CMakeLists.txt."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CMAKE = (ROOT / "CMakeLists.txt").read_text()
WHEELS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
SYSTEMS = ("linux", "macos", "windows")
TARGETS = [(system, arch) for system in SYSTEMS for arch in WHEELS.get(system, {}).get("archs", [])]


def kernels(arch: str) -> set[str]:
    """Names of the instruction sets that CMakeLists.txt compiles for a processor."""
    everywhere = set(re.findall(r"^gigamlp_isa\((\w+)", CMAKE, re.M))
    for pattern, body in re.findall(r'^if\(CMAKE_SYSTEM_PROCESSOR MATCHES "(.+?)"\)\n(.*?)^endif', CMAKE, re.M | re.S):
        if re.search(pattern, arch):
            everywhere |= set(re.findall(r"^ +gigamlp_isa\((\w+)", body, re.M))
    return everywhere


@pytest.mark.parametrize(("system", "arch"), TARGETS)
def test_a_wheel_has_its_kernels(system: str, arch: str) -> None:
    wanted = {"portable", "avx2", "avx2wide", "avx512vnni"} if arch in {"x86_64", "AMD64"} else {"portable"}
    assert wanted <= kernels(arch), system


def test_every_kernel_file_is_built() -> None:
    files = {p.stem.removeprefix("isa_") for p in (ROOT / "src/gigamlp/kernels/cpu").glob("isa_*.cpp")}
    assert files == set(re.findall(r"^ *gigamlp_isa\((\w+)", CMAKE, re.M))
    assert {("linux", "x86_64"), ("linux", "aarch64"), ("macos", "arm64")} <= set(TARGETS)
